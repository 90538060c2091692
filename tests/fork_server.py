"""Ranks of stage 05 without their launch: a process that imports torch and the script once and forks itself, once a rank, for each request.

tests/trainer.py starts and asks it. A request is a JSON line {"count": ranks, "call": name of a function below, "args": [...]}; the answer
is a JSON line {"codes": exit code of each rank (minus the signal that killed it), "texts": what each printed}. The forks get torchrun's
environment. pytest's own process cannot be forked for this: once it has run a backward pass, autograd refuses to work in its children.
"""

import contextlib
import json
import os
import resource
import signal
import socket
import sys
import tempfile
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conftest import load_script
from diffusers import Cosmos3OmniTransformer  # noqa: F401 (imported once, here)
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile
from torch.utils.tensorboard import SummaryWriter  # noqa: F401

from common import cosmos3, weights  # noqa: F401

script = load_script("05_train_fsdp2")


def train(*argv) -> int:
    return script.main(list(argv))


def hard_run(full, stop, *argv) -> int:
    """A run whose last rank meets a full disk while step `full` is saved, and SIGTERM in the middle of step `stop`."""
    real_save, real_factor = script.save, script.lr_factor

    def save(args, state, *rest):
        low = 10_000 if state["step"] == full else resource.RLIM_INFINITY  # bytes a file
        resource.setrlimit(resource.RLIMIT_FSIZE, (low, resource.RLIM_INFINITY))
        try:
            return real_save(args, state, *rest)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def factor(n, *rest):
        if n == stop - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real_factor(n, *rest)

    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        script.save, script.lr_factor = save, factor
    return script.main(list(argv))


def count_start(out, *bases) -> int:
    """Build and load a tower from each base under the allocator's own count; OUT/<rank>.json. A mapped safetensors file counts in full."""
    counts, (device, rank) = {}, script.setup_distributed()
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    for base in map(Path, bases):
        source = weights.open_source(base)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            tower = script.build_tower(weights.read_config(source), mesh, device, torch.float32, script.parse_args([]))
            script.load_base(tower, source, seed=0)
        live = peak = 0
        for event in profiler.profiler.kineto_results.events():
            if event.name() == "[memory]":
                live += event.nbytes()
                peak = max(peak, live)
        warm = {k: p.full_tensor() for k, p in script.canonical(tower).items() if "action" not in k}
        counts[base.name] = {
            "shard": sum(p.to_local().numel() * 4 for p in tower.parameters()),
            "whole": sum(p.numel() * 4 for p in tower.parameters()),
            "largest": max(p.numel() * 4 for p in tower.parameters()),
            "mapped": sum(f.stat().st_size for f in base.glob("*.safetensors")),
            "peak": peak,
            "equal": all(torch.equal(p, source.tensor(source.net[k]).float()) for k, p in warm.items()),
        }
    (Path(out) / f"{rank}.json").write_text(json.dumps(counts))
    return 0


def save_once(out, config, victim, kill_at) -> int:
    """Load the newest checkpoint of a run, save the next step, prune. Rank `victim` is killed by SIGKILL at its kill_at-th file operation of
    that (0: never) and prints how many there were."""
    out, args = Path(out), script.parse_args(["--out", out, "--keep-last", "2", "--slim-old"])
    script.setup_distributed()
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    tower = script.build_tower(json.loads(Path(config).read_text()), mesh, torch.device("cpu"), torch.float32, args)
    optimizer, ema = script.make_optimizer(tower, 1e-3, 0), script.PowerEMA(tower, "device")
    newest = script.checkpoints(out)[-1]
    dcp.load(script.model_state(tower, ema), storage_reader=weights.open_source(newest).reader())
    dcp.load(script.optimizer_state(tower, optimizer), storage_reader=dcp.FileSystemReader(str(newest / "optim")))
    policy = json.loads((newest / "policy.json").read_text())
    state = json.loads((newest / "train.json").read_text())
    state["step"] += 1
    operations = 0

    def hook(event, details):
        nonlocal operations
        if event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir") or (event == "open" and str(details[0]).startswith(str(out))):
            operations += 1
            if operations == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    if rank == victim:
        sys.addaudithook(hook)
    saved = script.save(args, state, script.model_state(tower, ema), script.optimizer_state(tower, optimizer), policy, 0)
    if rank == 0:
        script.prune(args)
    print(operations)
    return int(not isinstance(saved, Path))


def answer(request: dict) -> dict:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    count, children = request["count"], []
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(count)]
        for rank, file in enumerate(files):
            child = os.fork()
            if not child:
                code = 1
                try:
                    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                    os.environ.update({k: str(v) for k, v in place.items()})
                    with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
                        code = globals()[request["call"]](*request["args"])
                except BaseException:
                    traceback.print_exc(file=file)
                finally:
                    file.flush()
                    os._exit(code)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        for file in files:
            file.seek(0)
        return {"codes": codes, "texts": [file.read() for file in files]}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
