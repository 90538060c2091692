"""Stage 08: open loop, latency, server and closed loop.    Run: ./run_tests.sh tests/test_eval.py"""

import asyncio
import base64
import io
import json
import os
import shutil
import socket
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import REPO, load_script, run_script
from PIL import Image

from common import cosmos3, libero, libero_sim, quantile
from common.console import OutputExists, Precondition, VerifyFailed
from common.libero import LIBERO

POLICY = "policy/model_diffusers"
DEMO = REPO / "tests/data/libero_demo"
stage = load_script("08_eval_policy")


# ---------------------------------------------------------------- prompts, codec, sampler


def test_reference_prompt_and_its_inverse():
    """The reference's request keeps the task; a server takes it off again; the two variants differ where training and its evaluator differ."""
    for task in ("put the bowl on the plate", "put the bowl on the plate."):
        assert stage.task_of(stage.reference_request(task)).rstrip(".") == "put the bowl on the plate" == stage.task_of(task).rstrip(".")
        assert stage.prompt_of(stage.task_of(stage.reference_request(task)), "trained") == libero.build_prompt(task, 0, 20.0)
    content = json.loads(stage.prompt_of("put the bowl on the plate", "reference"))
    assert content["cinematography"]["framing"] == "This video contains concatenated views from multiple camera perspectives."
    assert content["actions"][0]["description"].startswith("put the bowl on the plate. This video contains concatenated views")
    assert content["actions"][0]["description"].endswith("the right half shows the wrist-mounted camera.")


def test_recorded_actions_survive_the_codec():
    """Every demonstration action through encode, normalize, float32 and back is the simulator's command: within 1e-5, the gripper turned (1 open -> -1)."""
    stats = quantile.load_stats(LIBERO.stats_path, LIBERO.stats_block)
    for suite in LIBERO.suites:
        recorded = libero.read_suite(DEMO / suite).actions.astype(np.float64)
        found = stage.through_codec(recorded, stats)
        np.testing.assert_allclose(found[:, :6], recorded[:, :6], rtol=0, atol=1e-5)
        np.testing.assert_allclose(found[:, 6], 1 - 2 * recorded[:, 6], rtol=0, atol=1e-5)
        assert {-1.0, 1.0} == set(found[:, 6].round(3))


def test_solver_table_is_the_scheduler():
    """For 1, 2, 5 and 30 steps, the table's sums are what diffusers' UniPC makes of the same velocities, and it ends without noise."""
    from diffusers import UniPCMultistepScheduler

    g = torch.Generator().manual_seed(0)
    for steps in (1, 2, 5, 30):
        sigmas, table = cosmos3.solver_table(steps, 5.0, torch.device("cpu"))
        solver = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0)
        solver.set_timesteps(sigmas=np.linspace(0.999, 0, steps + 1)[:-1])
        solver.set_begin_index(0)
        velocity, x = torch.randn(steps, 1, 7, generator=g, dtype=torch.float64), torch.randn(1, 7, generator=g, dtype=torch.float64)
        start = x
        for i, t in enumerate(solver.timesteps):
            x = solver.step(velocity[i], t, x, return_dict=False)[0]
            sums = (table[i, : i + 2, None, None].double() * torch.cat([start[None], velocity[: i + 1]])).sum(0)
            torch.testing.assert_close(sums, x, rtol=0, atol=1e-5)
            assert sigmas[i] == float(t) / 1000
        # A constant velocity v = eps - x0 leads from eps to x0 whatever the steps.
        assert abs(table[-1, 0] - 1) < 1e-5 and abs(table[-1, 1:].sum() + solver.sigmas[0]) < 1e-4


# ---------------------------------------------------------------- the policy


@pytest.fixture(scope="module")
def policy(walk):
    """The trained tiny policy in float32, four denoising steps."""
    args = stage.parse_args(["serve", "--model", str(walk / POLICY), "--dtype", "float32", "--num-steps", "4", "--max-batch", "4"])
    record, stats = stage.read_policy(walk / POLICY)
    torch.manual_seed(0)
    one = stage.Policy(args, record, stats)
    return args, one, stage.server_info(args, record, one)


@pytest.mark.parametrize("flags", [["--shift", "0"], ["--guidance", "-1"], ["--num-steps", "0"]])
def test_what_no_sampler_can_use_is_a_usage_error(flags, capsys):
    """Values that could only end in NaN: exit 2, and no word against the checkpoint."""
    with pytest.raises(SystemExit) as caught:
        stage.parse_args(["openloop", *flags])
    assert caught.value.code == 2 and flags[0] in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_said(walk, monkeypatch):
    """--device cuda where torch sees no GPU: exit 3 with what to do."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    record, stats = stage.read_policy(walk / POLICY)
    with pytest.raises(Precondition, match="none that torch sees"):
        stage.Policy(stage.parse_args(["serve", "--model", str(walk / POLICY), "--device", "cuda"]), record, stats)


def pictures(count: int, seed: int = 0) -> np.ndarray:
    """Pictures uint8 [count, 256, 512, 3], each another colour and texture."""
    rng = np.random.default_rng(seed)
    tint = rng.integers(0, 200, (count, 1, 1, 3))
    return (tint + rng.integers(0, 56, (count, 256, 512, 3))).astype(np.uint8)


def test_batch_prompts_and_noise_stay_with_their_item(policy):
    """An observation gets the same chunk alone and in a batch with others of other prompts; another picture, prompt or noise number changes it."""
    _, one, _ = policy
    frames, texts, numbers = stage.picture_frames(pictures(3)), [stage.prompt_of(t, "trained") for t in ("a", "b b", "a")], [0, 1, 2]
    together = one.act(frames, texts, numbers)
    for i in range(3):
        alone = one.act(frames[i : i + 1], [texts[i]], [numbers[i]])
        np.testing.assert_allclose(together[i], alone[0], rtol=0, atol=2e-5)
    for other in (one.act(frames[1:2], texts[:1], [0]), one.act(frames[:1], texts[1:2], [0]), one.act(frames[:1], texts[:1], [1])):
        assert np.abs(other[0] - together[0]).max() > 1e-4
    assert together.shape == (3, 16, 10) and len(one.prompts) == 2


def test_guidance_is_two_velocities(policy):
    """Guidance g moves the velocity to v_empty + g (v - v_empty): with one step the action is linear in g, and g = 1 is no guidance."""
    _, one, _ = policy
    frames, texts = stage.picture_frames(pictures(1)), [stage.prompt_of("put the bowl on the plate", "trained")]
    found = {}
    steps = one.steps
    try:
        one.steps = 1
        for g in (1.0, 1.000001, 2.0, 3.0):
            one.guidance = g
            found[g] = one.act(frames, texts, [0])
    finally:
        one.steps, one.guidance = steps, 1.0
    np.testing.assert_allclose(found[1.000001], found[1.0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(found[3.0] - found[2.0], found[2.0] - found[1.0], rtol=0, atol=1e-4)
    assert np.abs(found[2.0] - found[1.0]).max() > 1e-4


def test_other_stats_are_refused(walk, tmp_path):
    """A policy whose stats.json is not the one it was trained with, or that lacks a part, is exit 3 in every subcommand that needs it."""
    other = shutil.copytree(walk / POLICY, tmp_path / "other", copy_function=os.link)
    (other / "stats.json").unlink()
    with pytest.raises(Precondition, match=r"no stats\.json"):
        stage.read_policy(other)
    (other / "stats.json").write_text((walk / POLICY / "stats.json").read_text().replace('"q01"', ' "q01"', 1))
    for argv in (["openloop", "--data", walk / "data"], ["latency"], ["serve"]):
        with pytest.raises(Precondition, match="which it was trained with"):
            stage.main([*map(str, argv), "--model", str(other)])


# ---------------------------------------------------------------- open loop and latency


def test_openloop_of_the_walk(walk):
    """The walk's evaluation: every held-out window once, finite errors by step and task, both baselines as computed here, and a picture."""
    result = json.loads((walk / "eval/openloop/openloop.json").read_text())
    actual, train, tasks = [], [], 0
    for name in LIBERO.suites:
        suite = libero.read_suite(walk / "data" / name)
        encoded = LIBERO.encode(suite.actions.astype(np.float64))
        for episode in range(3):
            rows = encoded[suite.start[episode] : suite.start[episode + 1]]
            if episode in libero.split_episodes(3)[1]:
                actual += [rows[i : i + 16] for i in range(0, len(rows) - 16, 16)]
                tasks += 1
            else:
                train.append(rows)
    actual, mean = np.stack(actual), np.concatenate(train).mean(0)
    assert result["windows"] == len(actual) == sum(t["windows"] for t in result["policy"]["per_task"].values())
    assert len(result["policy"]["per_task"]) == tasks == 4 and len(result["policy"]["per_step"]["position"]) == 16
    still = np.array([0, 0, 0, 1, 0, 0, 0, 1, 0, 0])
    for name, guess in (("zero action", still), ("data mean", mean)):
        assert result[name]["overall"]["position"] == pytest.approx(np.linalg.norm(actual[..., :3] - guess[:3], axis=-1).mean())
        assert result[name]["overall"]["gripper"] == pytest.approx(((guess[9] > 0.5) == (actual[..., 9] > 0.5)).mean())
    assert all(np.isfinite(v) for v in result["policy"]["overall"].values())
    assert result["policy"]["overall"]["position"] == pytest.approx(np.mean(result["policy"]["per_step"]["position"]))
    assert Image.open(walk / "eval/openloop/traces.png").size[0] > 1500
    log = (walk / "run_all.log").read_text()
    assert "[ok] zero action: position" in log and "[ok] data mean: position" in log


def test_openloop_knows_a_perfect_policy(walk, tmp_path, monkeypatch, capsys):
    """A policy that answers with the recorded actions has no error and no warning; results of other settings are not replaced (exit 4)."""
    goal = libero.read_suite(walk / "data/libero_goal")
    places = [s for _, starts, _ in stage.held_out(goal, 16) for s in starts]
    recorded = LIBERO.encode(goal.actions[np.array(places)[:, None] + np.arange(16)].astype(np.float64))
    monkeypatch.setattr(
        stage, "Policy", lambda *a: type("Perfect", (), {"act": staticmethod(lambda frames, prompts, numbers: recorded[numbers])})
    )
    argv = [
        "openloop",
        "--model",
        str(walk / POLICY),
        "--data",
        str(walk / "data"),
        "--suites",
        "libero_goal",
        "--out",
        str(tmp_path / "o"),
    ]
    assert stage.main(argv) == 0
    result = json.loads((tmp_path / "o/openloop.json").read_text())["policy"]["overall"]
    assert result["position"] == 0 and result["rotation"] < 1e-4 and result["gripper"] == 1 and "[warn]" not in capsys.readouterr().out
    before = (tmp_path / "o/openloop.json").read_bytes()
    assert stage.main(argv) == 0 and "finished" in capsys.readouterr().out
    with pytest.raises(OutputExists):
        stage.main([*argv, "--num-steps", "7"])
    assert (tmp_path / "o/openloop.json").read_bytes() == before


def test_latency_table(walk, tmp_path, capsys):
    """Without data no lerobot is imported; every number of steps has a row; shares follow from p95; with data the smoothness is there."""
    argv = ["latency", "--model", str(walk / POLICY), "--sweep", "1", "3", "--repeats", "3"]
    assert stage.main([*argv, "--data", str(walk / "data"), "--windows", "4", "--json", str(tmp_path / "l.json")]) == 0
    result = json.loads((tmp_path / "l.json").read_text())
    assert [r["steps"] for r in result["rows"]] == [1, 3]
    for row in result["rows"]:
        assert 0 < row["p50_ms"] <= row["p95_ms"] and row["peak_bytes"] > 2**20
        assert row["share"]["15 Hz"]["8"] == pytest.approx(row["p95_ms"] / 1e3 * 15 / 8)
        assert {"jerk", "step", "jump_4", "jump_8", "jump_16", "apart_4", "error_position"} <= row.keys()
    assert 0 < result["recorded"]["jerk"] < result["recorded"]["step"]
    table = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()[:1] in "13"]
    assert {line[0] for line in table} == {"1", "3"}


def test_smoothness_by_hand():
    """A constant command has no step and no jerk, a ramp a step and no jerk; the jump is from the last executed action to the next chunk's first."""
    chunk = np.zeros((1, 16, 10))
    chunk[0, :, 0] = np.arange(16) * 0.1
    later = chunk.copy()
    later[0, :, 0] += 0.4  # what a perfect policy says four frames later
    found = stage.smoothness(chunk, {4: later})
    assert found["step"] == pytest.approx(0.1) and found["jerk"] == pytest.approx(0, abs=1e-12)
    assert found["jump_4"] == pytest.approx(0.1) and found["apart_4"] == pytest.approx(0, abs=1e-12)


# ---------------------------------------------------------------- server


class Server:
    """The application of stage 08 in a thread of this process."""

    def __init__(self, policy, **flags):
        args, one, info = policy
        self.args = type(args)(**{**vars(args), "port": 0, **flags})
        self.loop, ready = asyncio.new_event_loop(), threading.Event()

        async def start():
            from aiohttp import web

            app, self.batcher = stage.build_app(self.args, one, info)
            self.runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1)
            await self.runner.setup()
            await web.TCPSite(self.runner, "127.0.0.1", 0).start()
            self.port = self.runner.addresses[0][1]
            ready.set()

        def run():
            self.loop.run_until_complete(start())
            self.loop.run_forever()

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
        assert ready.wait(20)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result(20)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(20)

    def ask(self, path: str, body=None, kind="application/json") -> tuple[int, dict]:
        """(status, JSON answer); bytes are sent as they are."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": kind})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())


def png(picture, mode="RGB") -> str:
    file = io.BytesIO()
    Image.fromarray(picture).convert(mode).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def request_of(picture, task="put the bowl on the plate", **more) -> dict:
    """As cosmos-framework's client sends it."""
    return {"image": png(picture), "prompt": stage.reference_request(task), "domain_name": "libero", "image_size": 256, **more}


def test_concurrent_clients_get_their_own_actions(policy):
    """Twelve clients at once, a tenth of their requests malformed: every answer is that observation's own, several shared a forward, nothing is lost."""
    _, one, _ = policy
    seen, tasks = pictures(6), ["put the bowl on the plate", "open the drawer", "push the plate"]
    bodies = [json.dumps(request_of(seen[i % 6], tasks[i % 3])).encode() for i in range(6)]
    direct = [one.act(stage.picture_frames(seen[i : i + 1]), [stage.prompt_of(tasks[i % 3], "trained")], [0])[0] for i in range(6)]
    assert min(np.abs(direct[i] - direct[j]).max() for i in range(6) for j in range(i)) > 1e-3
    with Server(policy) as server, ThreadPoolExecutor(12) as pool:

        def client(number):
            if number % 10 == 9:
                return number, *server.ask("/predict", b'{"image": "AAAA", "prompt": "x"}')
            return number, *server.ask("/predict", bodies[number % 6])

        answers = list(pool.map(client, range(120)))
        for number, status, answer in answers:
            if number % 10 == 9:
                assert status == 400 and "base64 of a PNG" in answer["error"]
                continue
            assert status == 200
            np.testing.assert_allclose(answer["action"], direct[number % 6], rtol=0, atol=1e-4)
            np.testing.assert_allclose(answer["env_action"], stage.to_env(np.array(answer["action"])), rtol=0, atol=1e-12)
        assert server.batcher.served == 108 > server.batcher.batches


def test_batch_request_and_info(policy):
    """/predict_batch answers in order, as the client expects; /info names what a client must know; / and /healthz answer."""
    _, one, _ = policy
    seen = pictures(3, 5)
    with Server(policy) as server:
        status, answer = server.ask("/predict_batch", {"items": [request_of(p, return_video=False) for p in seen]})
        assert status == 200 and len(answer["actions"]) == len(answer["videos"]) == 3 and not answer.get("error")
        direct = one.act(stage.picture_frames(seen), [stage.prompt_of("put the bowl on the plate", "trained")] * 3, [0] * 3)
        np.testing.assert_allclose(answer["actions"], direct, rtol=0, atol=1e-4)
        info = server.ask("/info")[1]
        assert (info["action_chunk_size"], info["raw_action_dim"], info["num_steps"], info["image"]["size"]) == (16, 10, 4, [256, 512])
        assert info["stats_sha256"] == one.stats.sha256
        assert server.ask("/")[1]["status"] == server.ask("/healthz")[1]["status"] == "ok"


def test_bad_requests_are_4xx_and_the_server_goes_on(policy):
    """Each kind of bad request gets its 4xx with what was expected; afterwards a good one is answered."""
    good = request_of(pictures(1)[0])
    grey16 = io.BytesIO()
    Image.fromarray(np.zeros((256, 512), np.uint16)).save(grey16, "PNG")
    jpeg = io.BytesIO()
    Image.fromarray(pictures(1)[0]).save(jpeg, "JPEG")
    bomb = io.BytesIO()
    Image.fromarray(np.zeros((5000, 5000, 3), np.uint8)).save(bomb, "PNG")
    b64 = lambda file: base64.b64encode(file.getvalue()).decode()  # noqa: E731
    whole = base64.b64decode(good["image"])
    cases = [
        ("/predict", b"{", 400, "expected JSON"),
        ("/predict", b"\xff\xfe", 400, "expected JSON"),
        ("/predict", b"[" * 100_000, 400, "expected JSON"),
        ("/predict", [good], 400, "a JSON object"),
        ("/predict", {**good, "image": 7}, 400, "base64 of a PNG"),
        ("/predict", {**good, "image": "not base64!"}, 400, "base64 of a PNG"),
        ("/predict", {**good, "image": base64.b64encode(whole[: len(whole) // 2]).decode()}, 400, "base64 of a PNG"),
        ("/predict", {**good, "image": b64(jpeg)}, 400, "base64 of a PNG"),
        ("/predict", {**good, "image": b64(grey16)}, 400, "8-bit RGB"),
        ("/predict", {**good, "image": png(pictures(1)[0], "RGBA")}, 400, "8-bit RGB"),
        ("/predict", {**good, "image": png(pictures(1)[0][:128])}, 400, "512 x 256"),
        ("/predict", {**good, "image": b64(bomb)}, 400, "512 x 256"),
        ("/predict", {**good, "prompt": ""}, 400, "prompt"),
        ("/predict", {**good, "prompt": LIBERO.framing}, 400, "prompt"),
        ("/predict", {**good, "prompt": "x" * 5000}, 400, "prompt"),
        ("/predict", {**good, "domain_name": "droid"}, 400, "domain_name"),
        ("/predict", {**good, "image_size": 224}, 400, "image_size"),
        ("/predict", {**good, "seed": True}, 400, "seed"),
        ("/predict_batch", {"items": []}, 400, "items"),
        ("/predict_batch", {"items": [good] * 5}, 400, "items"),
        ("/predict_batch", {"items": [good, {}]}, 400, "prompt"),
        ("/nothing", good, 404, "Not Found"),
        ("/predict", None, 405, "Not Allowed"),
        ("/predict", b" " * 3_100_000, 413, ""),
    ]
    with Server(policy, max_body=3_000_000) as server:
        for path, body, status, text in cases:
            found, answer = server.ask(path, body)
            assert found == status and text in answer["error"], (path, str(body)[:80], found, answer)
        assert server.ask("/predict", good, kind="text/plain")[0] == 415
        assert server.ask("/predict", good)[0] == 200


def test_slow_clients_and_disconnects(policy):
    """A client that never finishes its body gets 408; one that leaves is dropped from the queue; a full queue is 503; others are served."""
    args, one, info = policy
    good = request_of(pictures(1)[0])
    body = json.dumps(good).encode()
    head = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    gate, entered, seen = threading.Event(), threading.Event(), []

    class Gated:
        """The policy, held until the gate opens."""

        def act(self, frames, prompts, numbers):
            seen.append(len(prompts))
            entered.set()
            assert gate.wait(30)
            return one.act(frames, prompts, numbers)

    with Server((args, Gated(), info), body_timeout=1.0, max_waiting=2) as server:
        slow = socket.create_connection(("127.0.0.1", server.port))
        slow.sendall(head + body[:100])
        with ThreadPoolExecutor(3) as pool:
            first = pool.submit(server.ask, "/predict", good)  # in the forward
            assert entered.wait(20)
            leaver = socket.create_connection(("127.0.0.1", server.port))
            leaver.sendall(head + body)
            while len(server.batcher.waiting) < 1:
                assert first.running()
            second = pool.submit(server.ask, "/predict", good)  # behind it
            while len(server.batcher.waiting) < 2:
                assert first.running()
            assert server.ask("/predict", good)[0] == 503
            leaver.close()
            while not any(future.cancelled() for _, future in server.batcher.waiting):
                assert first.running()
            slow.settimeout(20)
            assert b" 408 " in slow.recv(4096).splitlines()[0]
            slow.close()
            gate.set()
            assert first.result(30)[0] == second.result(30)[0] == 200
        assert seen == [1, 1] and server.batcher.served == 2  # the one that left was never run


def test_a_failing_forward_is_500_for_its_batch_alone(policy):
    """An exception of the policy is answered with 500 and its text; the next request is served."""
    args, one, info = policy

    class Once:
        failed = False

        def act(self, frames, prompts, numbers):
            if not self.failed:
                self.failed = True
                raise VerifyFailed("finite actions", "NaN", "x")
            return one.act(frames, prompts, numbers)

    with Server((args, Once(), info)) as server:
        good = request_of(pictures(1)[0])
        assert server.ask("/predict", good)[0] == 500
        assert server.ask("/predict", good)[0] == 200


# ---------------------------------------------------------------- closed loop


def test_served_actions_are_the_policys(policy):
    """The closed loop's request, through a server and back, gives the simulator's commands for that picture; a dead server is exit 3."""
    _, one, _ = policy
    picture = pictures(1, 9)
    with Server(policy) as server:
        found = stage.served_actions(f"http://127.0.0.1:{server.port}", picture[0], "open the drawer")
    direct = one.act(stage.picture_frames(picture), [stage.prompt_of("open the drawer", "trained")], [0])[0]
    np.testing.assert_allclose(found, stage.to_env(direct), rtol=0, atol=1e-4)
    with pytest.raises(Precondition, match="a policy server"):
        stage.ask_server("http://127.0.0.1:9/info", patience=0)


@pytest.fixture
def loop(tmp_path, monkeypatch):
    """closedloop with tests/fake_sim.py as the simulator and a server that always moves right by 0.5; -> function of more flags."""
    (tmp_path / "sim/bin").mkdir(parents=True)
    python = tmp_path / "sim/bin/python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{REPO}/tests/fake_sim.py"\n')
    python.chmod(0o755)
    right = np.tile([0.5, 0, 0, 0, 0, 0, -1.0], (16, 1))
    left = right * [-1, 1, 1, 1, 1, 1, 1]
    monkeypatch.setattr(stage, "served_actions", lambda server, picture, task: right if task == "go right" else left)
    monkeypatch.setattr(stage, "ask_server", lambda url, patience: {"stats_sha256": "1"})
    argv = [
        "closedloop",
        "--sim",
        str(tmp_path / "sim"),
        "--suites",
        "libero_spatial",
        "--out",
        str(tmp_path / "out"),
        "--trials",
        "2",
        "--envs",
        "2",
    ]
    return lambda *more: stage.main([*argv, *map(str, more)])


def test_closed_loop_counts_stops_and_resumes(loop, tmp_path, capsys):
    """Success ends an episode at its step, failure at the suite's limit; rates, Wilson intervals and videos say so; a second call runs what is missing."""
    import av

    assert loop("--prefix", 4) == 0
    result = json.loads((tmp_path / "out/result.json").read_text())
    steps = {(e["task"], e["trial"]): (e["success"], e["steps"]) for e in result["episodes"]}
    assert steps == {(0, 0): (True, 6), (0, 1): (True, 6), (1, 0): (False, 210), (1, 1): (False, 210)}
    assert libero_sim.MAX_STEPS["libero_spatial"] == 220
    z, group = 1.959964, result["per_suite"]["libero_spatial"]
    middle, half = (2 + z * z / 2) / (4 + z * z), z / (4 + z * z) * np.sqrt(1 + z * z / 4)  # Wilson's interval of 2 in 4
    assert group["rate"] == 0.5 and group["wilson95"] == pytest.approx([middle - half, middle + half], abs=1e-6)
    assert result["per_task"]["libero_spatial"]["0: go right"]["success"] == 2
    videos = sorted(p.name for p in (tmp_path / "out/videos").iterdir())
    assert videos == ["libero_spatial_task00_trial00_success.mp4", "libero_spatial_task01_trial00_failure.mp4"]
    with av.open(str(tmp_path / "out/videos" / videos[0])) as file:
        assert sum(1 for _ in file.decode(video=0)) == 7 and file.streams.video[0].average_rate == 20
    lines = (tmp_path / "out/episodes.jsonl").read_text()
    capsys.readouterr()
    (tmp_path / "out/episodes.jsonl").write_text(lines + '{"suite": "libero_spa')  # as a kill leaves it
    assert loop("--prefix", 4, "--trials", 3) == 0
    assert "2 to run, 4 finished before" in capsys.readouterr().out
    assert (tmp_path / "out/episodes.jsonl").read_text().startswith(lines)
    with pytest.raises(OutputExists, match="prefix is 4 there, now 8"):
        loop("--prefix", 8)
    assert len(stage.read_episodes(tmp_path / "out/episodes.jsonl")) == 6


def test_a_dead_simulator_is_a_message_and_keeps_what_was_done(loop, tmp_path, monkeypatch):
    """The simulator's process ends in the second episode: exit 3 with the end of its log; the first episode stays and is not run again."""
    monkeypatch.setenv("DEATH", "3")
    with pytest.raises(Precondition, match=r"exit 3: no display"):
        loop("--prefix", 3, "--tasks", 0, "--envs", 1)
    assert len(stage.read_episodes(tmp_path / "out/episodes.jsonl")) == 1
    monkeypatch.delenv("DEATH")
    assert loop("--prefix", 3, "--tasks", 0) == 0
    assert len(stage.read_episodes(tmp_path / "out/episodes.jsonl")) == 2


def test_standing_still_that_succeeds_is_exit_5(loop, monkeypatch):
    """--policy zero ends well when every episode fails, and is exit 5 when one succeeds: then the check of success proves nothing."""
    assert loop("--policy", "zero") == 0
    monkeypatch.setattr(libero_sim, "WARMUP_ACTION", [1.0] * 7)
    with pytest.raises(VerifyFailed, match="standing still to fail"):
        loop("--policy", "zero", "--force")


def test_replay_of_another_benchmark_is_refused(loop, tmp_path):
    """A recording whose task the simulator's suite does not have is exit 3, names it, and nothing is written."""
    with pytest.raises(Precondition, match="a task of libero_spatial"):
        loop("--policy", "replay", "--data", DEMO)
    assert not (tmp_path / "out").exists()


SIM = Path(os.environ.get("LIBERO_SIM", REPO / "work/sim"))


@pytest.mark.skipif(
    not (SIM / "bin/python").exists(), reason=f"NO SIMULATOR at {SIM}: the closed loop was not tried (08 closedloop --setup-sim)"
)
def test_replay_succeeds_and_standing_still_fails_in_the_simulator(tmp_path):
    """The shortest demonstration (libero_goal, episode 2) succeeds again at its step through the whole codec; zero actions fail the same task."""
    flags = ["closedloop", "--sim", SIM, "--suites", "libero_goal", "--tasks", 6]
    done = run_script("08_eval_policy.py", *flags, "--policy", "replay", "--out", tmp_path / "replay", timeout=600)
    assert done.returncode == 0, done.stderr
    (episode,) = json.loads((tmp_path / "replay/result.json").read_text())["episodes"]
    assert episode["success"] and abs(episode["steps"] - 106) <= 2 and episode["first_frame_apart"] < 2.5
    done = run_script("08_eval_policy.py", *flags, "--policy", "zero", "--trials", 1, "--out", tmp_path / "zero", timeout=600)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "zero/result.json").read_text())["all"]["success"] == 0
