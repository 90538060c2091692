"""Short training runs over the walk-through's cache, for tests: as a script (under torchrun or not), or inside this process."""

import contextlib
import io
import re
import sys
import warnings

import torch
import torch.distributed as dist
from conftest import load_script, run_script

from common import weights
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


def run(walk, out, *flags, ranks=1, code=0):
    """A run as a script. Returns its losses by step and the finished process."""
    done = run_script("05_train_fsdp2.py", *small(walk, out, *flags), launcher=[*TORCHRUN, str(ranks)] if ranks > 1 else None)
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-3000:]
    return read_losses(done.stdout), done


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
