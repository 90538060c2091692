"""Short training runs over the walk-through's cache, for tests: as a script, inside this process, or in forks of it, one a rank."""

import contextlib
import functools
import io
import json
import os
import re
import subprocess
import sys
import warnings

import torch
import torch.distributed as dist
from conftest import REPO, load_script, run_script

from common import quantile, weights
from common.console import StageError

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
train = load_script("05_train_fsdp2")


def small(walk, out, *flags):
    """The arguments of a short run, 12 samples a step, no validation; later flags win."""
    own = ["--base", walk / "models/Cosmos3-Nano-DCP", "--cache", walk / "cache", "--out", out]
    own += ["--global-batch", 12, "--micro-batch", 3, "--val-every", 0, "--lr", 1e-3, "--warmup", 2]
    return [str(a) for a in (*own, *flags)]


def read_losses(text):
    """{step: loss} of a run's output."""
    return {int(s): float(x) for s, x in re.findall(r"^\[step\] step:(\d+)/\d+ loss:(\S+)", text, re.M)}


def run(walk, out, *flags, code=0):
    """A run as a script. Returns its losses by step and the finished process."""
    done = run_script("05_train_fsdp2.py", *small(walk, out, *flags))
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-3000:]
    return read_losses(done.stdout), done


@functools.cache
def server():
    """tests/fork_server.py, started at the first use; it ends when its standard input does, with this process."""
    command = [sys.executable, str(REPO / "tests/fork_server.py")]
    path = os.pathsep.join(map(str, (REPO, REPO / "tests")))
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})


def fork_ranks(count, call, *args):
    """A function of tests/fork_server.py on `count` ranks. Returns (exit codes, outputs)."""
    server().stdin.write(json.dumps({"count": count, "call": call, "args": [a if isinstance(a, int) else str(a) for a in args]}) + "\n")
    server().stdin.flush()
    answer = json.loads(server().stdout.readline())
    return answer["codes"], answer["texts"]


def on_ranks(count, walk, out, *flags):
    """A run on `count` ranks. Returns its losses by step."""
    codes, texts = fork_ranks(count, "train", *small(walk, out, *flags))
    assert not any(codes), (codes, *(t[-3000:] for t in texts))
    return read_losses(texts[0])


def here(walk, out, *flags):
    """The same on one rank inside this process, which spares the imports. Returns (losses by step, exit code, output)."""
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's error recorder wants a real stderr
            code = train.main(small(walk, out, *flags))
    except StageError as error:
        code = error.code
        text.write(f"[FAIL] {error}\n")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return read_losses(text.getvalue()), code, text.getvalue()


def change_stats(cache):
    """Give a cache other action statistics, recorded as its own. Returns their sha256."""
    changed = json.loads((cache / "stats.json").read_text()) | {"note": "changed"}
    (cache / "stats.json").write_text(json.dumps(changed))
    manifest = json.loads((cache / "manifest.json").read_text())
    manifest["stats"]["sha256"] = quantile.load_stats(cache / "stats.json").sha256
    (cache / "manifest.json").write_text(json.dumps(manifest))
    return manifest["stats"]["sha256"]


def tensors(checkpoint):
    """Every tensor of a checkpoint: weights, averages and, unless it was slimmed, Adam's moments."""
    import torch.distributed.checkpoint as dcp

    everything = {}
    for folder in (checkpoint, checkpoint / "optim"):
        if folder.is_dir():
            state = {k: torch.empty(m.size) for k, m in weights.read_dcp_metadata(folder).state_dict_metadata.items()}
            dcp.load(state, checkpoint_id=str(folder), no_dist=True)
            everything |= state
    return everything
