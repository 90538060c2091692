"""04 encode: shared between ranks, resumed after kill -9, honest about frames that do not decode.    Run: ./run_tests.sh tests/test_encode.py"""

import hashlib
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import REPO, call_script, load_script, run_script

from common import libero
from common.libero import LIBERO

DEMO = REPO / "tests/data/libero_demo"


def run04(*argv) -> int:
    return call_script("04_fetch_libero", *argv)


def tree(folder: Path) -> dict[str, str]:
    """{file: sha256} of a folder."""
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_ranks_share_the_work_and_make_the_same_bytes(walk, tmp_path):
    """torchrun with two ranks: each encodes some of the episodes, one of them talks, and the cache is the one process's byte for byte.
    D12: its manifest records how many frames and episodes each suite had, and at which rate."""
    argv = [
        "04_fetch_libero.py",
        "encode",
        "--data",
        walk / "data",
        "--base",
        walk / "models/Cosmos3-Nano",
        "--out",
        tmp_path / "cache",
        "--stride",
        16,
    ]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    run = run_script(*argv, launcher=launcher)
    assert run.returncode == 0, run.stderr[-3000:]
    assert tree(tmp_path / "cache") == tree(walk / "cache")
    manifest = libero.read_manifest(tmp_path / "cache")
    assert {s: (m["episodes"], m["frames"]) for s, m in manifest["suites"].items()} == {
        "libero_spatial": (3, 421),
        "libero_object": (3, 455),
        "libero_goal": (3, 391),
        "libero_10": (3, 866),
    } and manifest["fps"] == 20.0
    assert run.stdout.count("[done]") == 1 and run.stdout.count("[plan] prompts") == 1


def test_resume_redoes_no_finished_episode(walk, tmp_path, monkeypatch, capsys):
    """Stopped in the middle of the second suite and run again: the finished episodes stay, and so does the prompts' file; an episode whose
    latents changed on the disk since, and a torn last line of the log, are encoded again."""
    stage = load_script("04_fetch_libero")
    suites = ["libero_goal", "libero_object"]
    argv = ["encode", "--data", str(walk / "data"), "--suites", *suites, "--base", str(walk / "models/Cosmos3-Nano"), "--stride", "16"]
    argv += ["--out", str(tmp_path / "cache")]
    real, calls = stage.encode_clips, []

    def clips(vae, pixels, *rest, **named):
        if len(calls) == 4:
            raise KeyboardInterrupt
        calls.append(len(pixels))
        return real(vae, pixels, *rest, **named)

    monkeypatch.setattr(stage, "encode_clips", clips)
    with pytest.raises(KeyboardInterrupt):
        stage.main(argv)
    part = tmp_path / "cache.partial"
    assert calls == [126, 152, 113, 160] and not (tmp_path / "cache").exists()
    assert len((part / "done.0.jsonl").read_text().splitlines()) == 4
    prompts = (part / "prompt_kv.safetensors").stat().st_mtime_ns
    with open(part / "libero_goal/latents.bin", "r+b") as f:
        f.write(b"\1")
    with open(part / "done.0.jsonl", "a") as log:
        log.write('{"suite": "libero_object", "epis')
    calls.clear()
    monkeypatch.setattr(stage, "encode_clips", lambda *a, **k: calls.append(len(a[1])) or real(*a, **k))
    assert stage.main(argv) == 0
    out = capsys.readouterr().out
    assert calls == [126, 139, 156] and "[ok] resume: 3 episodes were done before" in out and "was cut" in out
    assert (tmp_path / "cache/prompt_kv.safetensors").stat().st_mtime_ns == prompts
    for suite in suites:
        assert (tmp_path / f"cache/{suite}/latents.bin").read_bytes() == (walk / f"cache/{suite}/latents.bin").read_bytes()
    assert not list((tmp_path / "cache").rglob("done*"))
    calls.clear()
    assert stage.main(argv) == 0 and not calls  # the same request again: nothing to do


KILLED = """
import os, pathlib, random, signal, sys
sys.path[:0] = [{repo!r}, {repo!r} + "/tests"]
import diffusers, lerobot.datasets.video_utils, pyarrow.parquet, safetensors.torch, torch
from conftest import load_script
from common import libero, wan_vae

class Mean:  # the networks and the decoder are not what is tested here: cheap functions with the same shapes
    def __init__(self, *_, **__): pass
    def __call__(self, x): return x[:, :1, ::4].expand(-1, 48, -1, -1, -1).contiguous() + 2

wan_vae.WanEncoder, wan_vae.to_pixels = Mean, lambda frames, device: frames[..., :10, :20].bfloat16()
libero.episode_frames = lambda suite, e, bad: torch.arange(suite.start[e], suite.start[e + 1])[:, None, None, None].expand(-1, 3, 192, 320).byte()
stage = load_script("04_fetch_libero")

def start(out, kill_at=0):  # kill_at: the file operation under `out` before which SIGKILL falls; 0: never
    pid = os.fork()
    if not pid:
        operations = 0
        def hook(event, details):
            nonlocal operations
            if event in ("open", "os.mkdir", "os.rename", "os.remove") and str(details[0]).startswith(out):
                operations += 1
                if operations == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        code = stage.main([*sys.argv[1:], "--out", out])
        pathlib.Path("operations").write_text(str(operations))
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

assert start("whole") == 0
count = int(pathlib.Path("operations").read_text())
assert count > 40
for point in [*range(1, 6), *random.Random(0).sample(range(6, count - 4), 10), *range(count - 4, count + 1)]:
    assert start(f"cache{{point}}", point) == -signal.SIGKILL, point
    assert start(f"cache{{point}}") == 0, point
"""


def test_kill_at_any_file_operation_leaves_the_same_cache(walk, tmp_path):
    """kill -9 at the first and last five file operations of encode and at ten random ones between: the same command then ends with a cache
    that has the sha256 of an uninterrupted one in every file, and nothing beside it."""
    (tmp_path / "killed.py").write_text(KILLED.format(repo=str(REPO)))
    run = run_script("killed.py", "encode", "--data", walk / "data", "--base", walk / "models/Cosmos3-Nano", "--stride", 4, cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-2000:]
    expected = tree(tmp_path / "whole")
    assert len(expected) == 4 * 3 + 5
    caches = sorted(tmp_path.glob("cache*"))
    assert len(caches) == 20 and all(tree(c) == expected for c in caches), [c.name for c in caches]
    assert run.stdout.count("[ok] resume") >= 3  # some kills fell between the first and the last episode


def test_undecodable_frames_are_left_out_and_never_replaced(walk, tmp_path, capsys):
    """A wrist video cut in half: exit 5 with the frames listed at --max-bad 0; with --max-bad their windows are in neither split, every other
    latent is the undamaged cache's, and bad_frames.json lists the frames."""
    root = shutil.copytree(walk / "data/libero_goal", tmp_path / "data/libero_goal")
    video = next((root / "videos" / LIBERO.cameras[1]).rglob("*.mp4"))
    video.write_bytes(video.read_bytes()[: video.stat().st_size * 7 // 8])
    flags = [
        "encode",
        "--data",
        root.parent,
        "--suites",
        "libero_goal",
        "--base",
        walk / "models/Cosmos3-Nano",
        "--stride",
        16,
        "--out",
        tmp_path / "c",
    ]
    assert run04(*flags) == 5
    said = capsys.readouterr()
    assert "episode 2 frame" in said.out + said.err and "raise --max-bad" in said.err and not (tmp_path / "c").exists()
    assert run04(*flags, "--max-bad", 113) == 0
    bad = json.loads((tmp_path / "c/bad_frames.json").read_text())
    first = bad[0]["frame"]
    assert {b["episode"] for b in bad} == {2} and [b["frame"] for b in bad] == list(range(first, 113)) and bad[0]["file"] == str(video)
    manifest = libero.read_manifest(tmp_path / "c")
    damaged, whole = (
        libero.open_cached_suite(c, m, "libero_goal")
        for c, m in ((tmp_path / "c", manifest), (walk / "cache", libero.read_manifest(walk / "cache")))
    )
    table = pq.read_table(tmp_path / "c/libero_goal/windows.parquet").to_pandas()
    lost = table["bad"].to_numpy()
    np.testing.assert_array_equal(lost, (table["episode"] == 2) & (table["start"] - 278 + 16 >= first))
    assert 0 < lost.sum() < len(lost) and not damaged.train[lost].any() and not damaged.val[lost].any()
    np.testing.assert_array_equal(damaged.train | damaged.val, ~lost)
    np.testing.assert_array_equal(damaged.latents[~lost], whole.latents[~lost])
    assert not damaged.latents[lost].any()


def test_full_disk_shows_before_the_work(walk, tmp_path, monkeypatch, capsys):
    """Less free space than latents and prompts need: exit 3 with both numbers, nothing written; what an unfinished cache holds already counts."""
    stage = load_script("04_fetch_libero")
    flags = ["encode", "--data", walk / "data", "--base", walk / "models/Cosmos3-Nano", "--stride", 16, "--out", tmp_path / "cache"]
    usage = type("Usage", (), {"free": 8_000_000})
    monkeypatch.setattr(stage.console.shutil, "disk_usage", lambda _: usage)
    assert run04(*flags) == 3
    assert "12.05 MiB free" in capsys.readouterr().err and not list(tmp_path.iterdir())
    shutil.copytree(walk / "cache", tmp_path / "cache.partial")
    for name in ("COMPLETE", "bad_frames.json"):
        (tmp_path / "cache.partial" / name).unlink()
    assert run04(*flags, "--dry-run") == 0
