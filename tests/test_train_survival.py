"""05_train_fsdp2.py under what machines do to long runs.    Run: ./run_tests.sh tests/test_train_survival.py

Signals, kill -9, full disks, bad numbers, a second trainer, resumes with something changed; pruning and slimming of checkpoints.
"""

import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import REPO, load_script
from trainer import TORCHRUN, change_stats, fork_ranks, here, on_ranks, small, tensors, train

from common import cosmos3, libero, quantile, weights
from common.console import Precondition


@pytest.fixture(scope="module")
def short(walk, tmp_path_factory):
    """Four steps in one go, a checkpoint at 2 and 4."""
    out = tmp_path_factory.mktemp("short") / "run"
    losses, code, text = here(walk, out, "--steps", 4, "--save-every", 2)
    assert code == 0, text
    return out, losses


@pytest.fixture
def running(short, tmp_path):
    """A copy of it at step 2, to go on with."""
    out = shutil.copytree(short[0], tmp_path / "run")
    shutil.rmtree(out / "checkpoints/global_step_4")
    return out


def steps(out):
    """Steps of the complete checkpoints, each of which is opened."""
    for folder in train.checkpoints(out):
        assert len(weights.open_source(folder).net) == 2 * 11 + 14
    return [train.read_step(folder) for folder in train.checkpoints(out)]


# ---------------------------------------------------------------- signals


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_saves_and_ends_within_the_step(walk, short, tmp_path, monkeypatch, name):
    """A signal in the middle of step 3 (ignored by whoever started us): step 3 is finished and saved, exit 0, and step 4 comes out as in one go."""
    real = train.lr_factor

    def factor(n, *rest):
        if n == 2:
            os.kill(os.getpid(), getattr(signal, name))
        return real(n, *rest)

    monkeypatch.setattr(train, "lr_factor", factor)
    before = signal.signal(getattr(signal, name), signal.SIG_IGN)
    try:
        losses, code, text = here(walk, tmp_path / "run", "--steps", 100, "--save-every", 50)
        assert signal.getsignal(getattr(signal, name)) == signal.SIG_IGN  # what was there before is back
    finally:
        signal.signal(getattr(signal, name), before)
    assert code == 0 and list(losses) == [1, 2, 3] and steps(tmp_path / "run") == [3], text
    assert f"[ok] stopped: {name} at step 3" in text and "[done]" in text
    monkeypatch.undo()
    losses, _, _ = here(walk, tmp_path / "run", "--steps", 4, "--resume")
    assert losses == {4: short[1][4]}


def test_a_signal_during_a_save_needs_no_further_step(walk, tmp_path, monkeypatch):
    """A signal while step 2 is being saved: the save is finished and the run ends there."""
    real = train.save

    def save(*args):
        os.kill(os.getpid(), signal.SIGUSR1)
        return real(*args)

    monkeypatch.setattr(train, "save", save)
    losses, code, _ = here(walk, tmp_path / "run", "--steps", 100, "--save-every", 2)
    assert code == 0 and list(losses) == [1, 2] and steps(tmp_path / "run") == [2]


def spoil(cache, *samples):
    """Make the windows of some training samples NaN. Returns [(suite, window)]."""
    manifest, places = libero.read_manifest(cache), []
    stream = train.Stream(cache, manifest, quantile.load_stats(), channels=64, seed=42)
    for suite, row in map(stream.window, samples):
        name = stream.suites[suite].name
        latents = np.memmap(cache / name / "latents.bin", np.uint16, "r+", shape=stream.suites[suite].latents.shape)
        latents[row, 5, 1] = 0x7FFF  # a bf16 NaN
        latents.flush()
        places.append((name, row))
    return places


def until(process, log, needle):
    """Wait for a line in a growing file."""
    for _ in range(600):
        if needle in log.read_text():
            return
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    raise AssertionError(log.read_text())


def test_two_ranks_stop_together_and_skip_together(walk, tmp_path):
    """One rank's process id gets SIGUSR1 under torchrun: both ranks finish the step, save, and torchrun exits 0; then SIGTERM to torchrun itself.

    One window of the data is NaN, so that one rank alone meets a bad loss: both skip that step, it is named, and weights stay finite.
    """
    cache = shutil.copytree(walk / "cache", tmp_path / "cache")
    ((suite, row),) = spoil(cache, 19)  # step 2 trains on samples 12..23; 18..23 are rank 1's
    out, log = tmp_path / "run", tmp_path / "log"
    argv = small(walk, out, "--cache", cache, "--steps", 16000, "--save-every", 16000, "--max-bad-steps", 2)
    for resume, first in ((), 2), (("--resume",), None):
        with open(log, "w") as f:
            command = [*TORCHRUN, "2", "05_train_fsdp2.py", *argv, *resume]
            process = subprocess.Popen(command, cwd=REPO, stdout=f, stderr=f, stdin=subprocess.DEVNULL)
        try:
            until(process, log, "[step] step:2/" if first else "[step]")
            if first:
                os.kill(int((out / "lock").read_text()), signal.SIGUSR1)
            else:
                process.send_signal(signal.SIGTERM)
            code = process.wait(60)
        finally:
            process.kill()
        text = log.read_text()
        last = steps(out)[-1]
        assert "at step" in text and f"global_step_{last}" in text and "[done]" in text, text
        if first:
            assert code == 0 and last >= 2
            assert (
                "[warn] bad step: skipped, 1 in a row, 1 in all: loss nan, grad norm nan at step 2; samples 12..23, 1 with a loss" in text
            )
            assert f"19 ({suite} window {row})" in text
            before = last
            state = json.loads((out / f"checkpoints/global_step_{last}/train.json").read_text())
            assert state["skipped"] >= 1 and state["ema_updates"] == state["step"] - state["skipped"]
            assert all(v.isfinite().all() for v in tensors(out / f"checkpoints/global_step_{last}").values())
        else:
            assert last > before


# ---------------------------------------------------------------- kill -9


@pytest.mark.parametrize("world, victim", [(1, 0), (2, 0), (3, 2)])
def test_kill_9_during_a_save_loses_nothing_older(walk, running, world, victim):
    """SIGKILL of one rank at ten random file operations of saving and pruning (and one life unharmed, to count them): each time `latest` is a
    complete checkpoint that opens and loads, either the one before or the new one; the next life saves on top of what the killed one left."""
    config = walk / "models/Cosmos3-Nano/transformer/config.json"

    def life(kill_at):
        codes, texts = fork_ranks(world, "save_once", running, config, victim, kill_at)
        assert codes[victim] == (-signal.SIGKILL if kill_at else 0) and (kill_at or not any(codes)), texts
        return texts[victim]

    life(0)
    operations = int(life(0))
    assert steps(running) == [3, 4] and (operations > 30 or victim)
    old, new = 0, 0
    for point in sorted(random.Random(4).sample(range(1, operations + 1), min(10, operations))):
        before = steps(running)[-1]
        life(point)
        after = steps(running)
        assert after[-1] in (before, before + 1) and (running / f"checkpoints/global_step_{after[-1]}/optim/.metadata").is_file(), point
        old, new = old + (after[-1] == before), new + (after[-1] > before)
    assert old and (new or victim)  # some kills came before the new one was complete, some after; rank 0 alone has anything to do after
    life(0)
    last = steps(running)[-1]
    assert sorted(p.name for p in (running / "checkpoints").iterdir()) == [f"global_step_{last - 1}", f"global_step_{last}"]
    assert not (running / f"checkpoints/global_step_{last - 1}/optim").exists()  # and nothing of the killed saves is left


@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_one_rank_meets_all_survive(walk, tmp_path, world):
    """On `world` ranks: a NaN among one rank's samples of step 2 makes all skip it; the last rank's full disk while step 3 is saved costs that
    checkpoint alone; SIGTERM to the last rank alone in step 4 saves and ends all with 0; changed stats stop the resume on all. Then step 5,
    resumed, has bit for bit the weights, averages and moments of a run that met the NaN only."""
    cache = shutil.copytree(walk / "cache", tmp_path / "cache")
    spoil(cache, 23)  # step 2 trains on samples 12..23: the last rank's last
    flags = ("--cache", cache, "--steps", 5, "--save-every", 1, "--micro-batch", 2)
    on_ranks(world, walk, tmp_path / "calm", *flags)

    out = tmp_path / "hard"
    codes, texts = fork_ranks(world, "hard_run", 3, 4, *small(walk, out, *flags))
    assert not any(codes) and steps(out) == [1, 2, 4], texts
    assert "[warn] bad step: skipped, 1 in a row, 1 in all" in texts[0] and "samples 12..23, 1 with a loss" in texts[0]
    assert f"[FAIL] save: step 3: rank {world - 1}: " in texts[0] and "the run goes on" in texts[0] and "at step 4; --resume" in texts[0]

    other = shutil.copytree(cache, tmp_path / "other")
    change_stats(other)
    codes, texts = fork_ranks(world, "train", *small(walk, out, *flags, "--cache", other, "--resume"))
    assert all(codes) and all("stats.sha256: " in t and "--allow-change stats" in t for t in texts) and steps(out) == [1, 2, 4], texts

    assert list(on_ranks(world, walk, out, *flags, "--resume")) == [5]
    calm, hard = (tensors(folder / "checkpoints/global_step_5") for folder in (tmp_path / "calm", out))
    assert calm.keys() == hard.keys()
    for name, value in calm.items():
        assert torch.equal(value, hard[name]), name


# ---------------------------------------------------------------- full disks


def test_a_full_disk_leaves_the_run_alive(walk, running, short, monkeypatch):
    """Writing stops at 300 kB a file (a limit of the kernel's) while step 3 is saved: a loud line, nothing of the attempt left, the run goes on,
    and the save of step 4 works and holds what an undisturbed run holds."""
    before = tensors(running / "checkpoints/global_step_2")
    real = train.save

    def save(args, state, *rest):
        if state["step"] == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
        try:
            return real(args, state, *rest)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    monkeypatch.setattr(train, "save", save)
    losses, code, text = here(walk, running, "--steps", 4, "--save-every", 1, "--resume", "--keep-last", 2)
    assert code == 0 and list(losses) == [3, 4], text
    assert "[FAIL] save: step 3: rank 0: " in text and " free); nothing of it is left" in text and "global_step_2, the run goes on" in text
    assert steps(running) == [2, 4] and len(list((running / "checkpoints").iterdir())) == 2
    for name, value in tensors(running / "checkpoints/global_step_2").items():
        assert torch.equal(value, before[name]), name
    after = tensors(running / "checkpoints/global_step_4")
    for name, value in tensors(short[0] / "checkpoints/global_step_4").items():
        assert torch.equal(value, after[name]), name


def test_too_little_space_is_known_before_writing(walk, running, tmp_path, monkeypatch):
    """Free space below one checkpoint: refused at the start; if it runs out later, no save is begun, and a run whose last save failed is exit 5."""
    need = 385_856 * 16
    usage = shutil.disk_usage(running)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=need - 1))
    _, code, text = here(walk, tmp_path / "new", "--steps", 1)
    assert code == 3 and "5.89 MiB free" in text and not (tmp_path / "new").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=2 * need))  # for two of five: a warning
    for flags, warns in ((), True), (("--keep-last", 1), False):
        _, code, text = here(walk, tmp_path / "new", "--steps", 10, "--save-every", 2, "--dry-run", *flags)
        assert code == 0 and ("[warn] disk: 11.78 MiB free, all checkpoints take 29.44 MiB" in text) == warns
    frees = itertools.chain([need], itertools.repeat(need - 1))  # enough at the start, never again
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=next(frees)))
    losses, code, text = here(walk, running, "--steps", 4, "--save-every", 1, "--resume")
    assert code == 5 and list(losses) == [3, 4] and text.count("[FAIL] save: step") == 2 and steps(running) == [2]
    assert "the newest is" in text and "--resume" in text


# ---------------------------------------------------------------- bad numbers


def test_bad_steps_in_a_row_stop_the_run(walk, running):
    """Data of nothing but NaN: each step is skipped and named, the third in a row is exit 5, and no checkpoint was written or touched."""
    cache = shutil.copytree(walk / "cache", running / "cache")
    for file in cache.glob("*/latents.bin"):
        file.write_bytes(b"\xff\x7f" * (file.stat().st_size // 2))
    before = tensors(running / "checkpoints/global_step_2")
    losses, code, text = here(
        walk, running, "--cache", cache, "--steps", 9, "--save-every", 3, "--resume", "--max-bad-steps", 3, "--log-every", 5
    )
    assert code == 5 and list(losses) == [3, 4] and text.count("[warn] bad step") == 3, text
    assert "at step 5; samples 48..59, 12 with a loss that is not finite: 48 (libero_" in text
    assert steps(running) == [2, 3]  # step 3 was one bad step: its checkpoint holds step 2's weights
    for step in (2, 3):
        for name, value in tensors(running / f"checkpoints/global_step_{step}").items():
            assert torch.equal(value, before[name]), (step, name)


def test_bad_steps_that_are_not_in_a_row_do_not_stop_the_run(walk, running):
    """Step 3 bad, step 4 good, step 5 bad, with --max-bad-steps 2: the run goes on to step 6, and counts both."""
    cache = shutil.copytree(walk / "cache", running / "cache")
    spoil(cache, 24, 48)
    _, code, text = here(walk, running, "--cache", cache, "--steps", 6, "--resume", "--max-bad-steps", 2)
    assert code == 0 and text.count("1 in a row") == 2 and "2 in all" in text, text
    state = json.loads((running / "checkpoints/global_step_6/train.json").read_text())
    assert (state["skipped"], state["ema_updates"]) == (2, 4)


def test_a_run_that_began_with_bad_steps_goes_on(walk, tmp_path):
    """A checkpoint from before the average's first update resumes without ado, and its first good step copies the weights into the average."""
    cache, out = shutil.copytree(walk / "cache", tmp_path / "cache"), tmp_path / "run"
    for file in cache.glob("*/latents.bin"):
        file.write_bytes(b"\xff\x7f" * (file.stat().st_size // 2))
    assert here(walk, out, "--cache", cache, "--steps", 1, "--save-every", 1)[1] == 0
    losses, code, text = here(walk, out, "--steps", 2, "--resume")
    assert code == 0 and list(losses) == [2], text
    state = tensors(out / "checkpoints/global_step_2")
    assert all(torch.equal(v, state[k.replace("net_ema.", "net.")]) for k, v in state.items() if k.startswith("net_ema."))
    assert json.loads((out / "checkpoints/global_step_2/train.json").read_text())["ema_updates"] == 1


def test_tensors_that_do_not_move_are_named(walk, tmp_path):
    """A learning rate below what float32 can add: after ten steps exit 5, with the number and names of the tensors that stood still."""
    _, code, text = here(walk, tmp_path / "run", "--steps", 12, "--lr", 1e-20, "--save-every", 12)
    assert code == 5 and "every trained tensor to move in 10 steps" in text and "language_model.model.layers.0." in text
    assert not steps(tmp_path / "run")


def test_a_tensor_that_only_decays_has_not_moved(walk, tmp_path, monkeypatch):
    """Layers whose output is multiplied by zero get gradients of zero; weight decay changes them all the same, and the run still stops with exit 5."""
    forward = cosmos3.GenLayer.forward
    monkeypatch.setattr(cosmos3.GenLayer, "forward", lambda layer, x, *rest: x + 0 * forward(layer, x, *rest))
    _, code, text = here(walk, tmp_path / "run", "--steps", 10, "--save-every", 0)
    assert code == 5 and "by its gradient; found 22 that did not" in text and "language_model.model.layers.0." in text


def test_a_damaged_checkpoint_is_named_with_the_one_before_it(walk, short, tmp_path):
    """--resume from a newest checkpoint without the optimizer's metadata, with a cut shard of it, or a garbled train.json: exit 3, what is wrong,
    and nothing is changed."""
    for damage, said in (("metadata", "no .metadata in"), ("shard", "missing or cut short"), ("train", "a readable train.json")):
        out = tmp_path / damage
        shutil.copytree(short[0], out)
        newest = train.checkpoints(out)[-1]
        optim = newest / "optim"
        if damage == "metadata":
            (optim / ".metadata").unlink()
        elif damage == "shard":
            shard = next(optim.glob("*.distcp"))
            shard.write_bytes(shard.read_bytes()[:1000])
        else:
            (newest / "train.json").write_text("{")
        before = {f: f.stat().st_mtime_ns for f in out.rglob("*") if f.name != "lock"}
        _, code, text = here(walk, out, "--steps", 9, "--resume")
        assert code == 3 and said in text, text
        assert {f: f.stat().st_mtime_ns for f in out.rglob("*") if f.name != "lock"} == before
    (newest / "train.json").unlink()
    assert f"pass --resume {train.checkpoints(out)[-2]}" in here(walk, out, "--steps", 9, "--resume")[2]


# ---------------------------------------------------------------- keeping and slimming


def test_old_checkpoints_are_deleted_and_slimmed_as_asked(walk, short, tmp_path):
    """--keep-last 2 --keep-every 3 --slim-old over six saves keeps 3, 5, 6; all but the newest lose the optimizer, still convert, and refuse a resume."""
    out = tmp_path / "run"
    (out / "checkpoints/global_step_1.tmp").mkdir(parents=True)  # of a save that was killed
    (out / "args.json").write_text("{}")
    _, code, text = here(
        walk, out, "--steps", 6, "--save-every", 1, "--keep-last", 2, "--keep-every", 3, "--slim-old", "--resume", "--lr-cycle", 6
    )
    assert code == 0 and steps(out) == [3, 5, 6] and text.count("[ok] pruned: deleted") == 3, text
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == [f"global_step_{n}" for n in (3, 5, 6)]
    assert [(out / f"checkpoints/global_step_{n}/optim").is_dir() for n in (3, 5, 6)] == [False, False, True]
    slim = out / "checkpoints/global_step_3"
    _, code, text = here(walk, tmp_path / "other", "--steps", 6, "--resume", slim)
    assert code == 3 and "--slim-old drops it" in text and not (tmp_path / "other").exists()
    convert = load_script("06_convert_ckpt").main
    assert convert(["--src", str(slim), "--base", str(walk / "models/Cosmos3-Nano"), "--out", str(tmp_path / "policy")]) == 0


# ---------------------------------------------------------------- one trainer at a time, nothing changed unseen


def test_a_second_trainer_is_locked_out(walk, running, tmp_path):
    """While a process holds the run folder, --resume there is exit 3 with its id; the lock ends with the process, however that ends."""
    code = "import sys, time; sys.path[:0] = sys.argv[1:3]; from conftest import load_script; from pathlib import Path\n"
    code += "with load_script('05_train_fsdp2').lock_run(Path(sys.argv[3])): print('held', flush=True); time.sleep(60)"
    argv = [sys.executable, "-c", code, str(REPO), str(REPO / "tests"), str(running)]
    holder = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        _, code, text = here(walk, running, "--steps", 4, "--resume")
        assert code == 3 and f"process {holder.pid} holds" in text and steps(running) == [2]
    finally:
        holder.kill()
        holder.wait()
    assert here(walk, running, "--steps", 3, "--resume")[1] == 0 and steps(running) == [2, 3]


def changed(walk, place, **values):
    """A copy of the cache whose manifest says something else."""
    cache = shutil.copytree(walk / "cache", place)
    manifest = json.loads((cache / "manifest.json").read_text())
    (cache / "manifest.json").write_text(json.dumps(manifest | values))
    return cache


def test_what_differs_stops_a_resume_and_is_listed(walk, running, tmp_path):
    """Seed, cache, frame rate and average changed at once: exit 3, one line a difference, and the flag that accepts them, which then resumes."""
    cache = changed(walk, tmp_path / "cache", stride=8, fps=10.0)
    flags = ("--steps", 3, "--resume", "--cache", cache, "--seed", 7, "--ema", "off")
    _, code, text = here(walk, running, *flags)
    rows = ["data.stride: 16 -> 8", "ema: True -> False", "fps: 20.0 -> 10.0", "seed: 42 -> 7"]
    assert code == 3 and all(f"[FAIL] resume: {row}" in text for row in rows), text
    assert "--allow-change data ema fps prompt seed" in text and steps(running) == [2]
    _, code, text = here(walk, running, *flags, "--allow-change", "data", "ema", "fps", "prompt")
    assert code == 3 and "[FAIL] resume: seed: 42 -> 7" in text and "[warn] resume: ema: True -> False" in text
    losses, code, text = here(walk, running, *flags, "--allow-change", "data", "ema", "fps", "prompt", "seed")
    assert code == 0 and list(losses) == [3] and not weights.open_source(running / "checkpoints/global_step_3").ema


def test_an_average_added_later_starts_as_a_copy(walk, running):
    """--ema off, then on again: refused without --allow-change ema; with it the first update copies the weights, as at step 0."""
    assert here(walk, running, "--steps", 3, "--resume", "--ema", "off", "--allow-change", "ema")[1] == 0
    _, code, text = here(walk, running, "--steps", 4, "--resume")
    assert code == 3 and "ema: False -> True" in text
    assert here(walk, running, "--steps", 4, "--resume", "--allow-change", "ema")[1] == 0
    state = tensors(running / "checkpoints/global_step_4")
    assert all(torch.equal(v, state[k.replace("net_ema.", "net.")]) for k, v in state.items() if k.startswith("net_ema."))


def test_another_trained_set_or_chunk_is_refused(walk, running):
    """A checkpoint trained on fewer tensors cannot be accepted by any flag; one of another chunk can, and the chunk is named."""
    file = running / "checkpoints/global_step_2/policy.json"
    policy = json.loads(file.read_text())
    args = train.parse_args(small(walk, running, "--resume"))
    file.write_text(json.dumps(policy | {"trained": ["moe_gen"]}))
    with pytest.raises(Precondition, match=r"trained: \['moe_gen'\] -> .*or start a new run$"):
        train.plan(args)
    file.write_text(json.dumps(policy | {"robot": policy["robot"] | {"chunk": 8}, "base": {"path": "x", "fingerprint": "f" * 64}}))
    with pytest.raises(Precondition, match=r"base.fingerprint: ffff.*robot.chunk: 8 -> 16.*--allow-change base robot"):
        train.plan(args)


def test_learning_rate_comes_from_the_flags(walk, running):
    """A resume with another --lr prints both, trains with the new one, and the next checkpoint remembers it."""
    losses, code, text = here(walk, running, "--steps", 3, "--resume", "--lr", 5e-4)
    assert code == 0 and list(losses) == [3] and " lr:0.0005 " in text
    assert "[plan] resume lr: 0.001 in the checkpoint, 0.0005 from now on" in text
    assert json.loads((running / "checkpoints/global_step_3/train.json").read_text())["flags"]["lr"] == 5e-4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "20000"], "beyond --lr-cycle"),
        (["--keep-every", "5"], "--keep-last, which is off"),
        (["--slim-old", "--save-every", "0"], "--save-every 0"),
        (["--micro-batch", "many"], "a number from 1 on, or auto; found 'many'"),
        (["--micro-batch", "0"], "at least 1"),
        (["--activation-budget", "0.5"], "pass --compile"),
        (["--learning-rate", "1"], "unrecognized"),
        (["--allow-change", "trained"], "invalid choice: 'trained'"),
    ],
)
def test_contradictory_flags_are_usage_errors(flags, message, capsys):
    """Flags that are unknown or cannot both be meant: exit 2 with the reason, before anything is opened."""
    with pytest.raises(SystemExit) as caught:
        train.parse_args(flags)
    assert caught.value.code == 2 and message in capsys.readouterr().err
