"""Say whether this machine can run the pipeline, by trying the things it rests on.

Run:    python 01_check_env.py                                  # fit for the CPU walk-through?
        python 01_check_env.py --for train --work /data/work    # for training at Nano size, outputs under /data/work
Reads:  requirements.txt, one video of tests/data/libero_demo, the environment, /proc, /sys/fs/cgroup
Writes: nothing but --json FILE
Needs:  common/console.py common/cache_layout.py requirements.txt tests/data/libero_demo; the packages under test
Fails:  3, with the failures last, each with what mends it
Next:   python 02_cache_models.py download
"""

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from common.cache_layout import hub_cache_root
from common.console import EXIT_PRECONDITION, done, fail, human_bytes, ok, plan, run_stage, warn, write_json

STAGE = "01_check_env"
REPO = Path(__file__).resolve().parent
GIB = 2**30
PYTHON = (3, 12)  # .python-version; lerobot 0.6 needs it, the pins were tested on it
PROBE_SECONDS = 60  # s; imports of torch and diffusers take 3 to 10 on two cores
# A wrong build of one of these changes results without an error.
NUMERIC = ("torch", "diffusers", "transformers", "tokenizers", "safetensors", "numpy", "lerobot", "av")
TRAINED = 6_982_401_216  # parameters of Cosmos3-Nano's generation tower
TRAIN_GPU_BYTES = 16 * TRAINED  # fp32 weights, gradients and two Adam moments, before activations: 104 GiB over all GPUs
PORT = 29500  # torchrun's default rendezvous port

# Bytes of RAM and of disk. train holds the EMA in RAM; its disk has the base (31 GiB), its DCP form (29), the encoded cache (23)
# and two checkpoints of weights, EMA and two moments in fp32 (104 each). convert holds a 5 GB shard twice, and reads and writes a base.
RAM = {"walkthrough": 4 * GIB, "train": 4 * TRAINED + 16 * GIB, "convert": 16 * GIB}
DISK = {"walkthrough": 2 * GIB, "train": (31 + 29 + 23 + 2 * 104) * GIB, "convert": 64 * GIB}
SHM = {"walkthrough": GIB // 16, "train": 8 * GIB, "convert": GIB // 16}  # loader workers and NCCL pass tensors here
FILES = {"walkthrough": 1024, "train": 8192, "convert": 1024}  # open files: shards, loader workers, sockets

# Each probe is a process of its own: an import that asks a question, hangs or crashes is then a finding. Its last line is JSON.
PROBES = {
    "torch": """
import json, torch, torch.distributed as dist
gpus, n = [], torch.cuda.device_count() if torch.cuda.is_available() else 0
for i in range(n):
    x = torch.eye(1024, device=f"cuda:{i}", dtype=torch.bfloat16)
    assert float((x @ x).float().sum()) == 1024, f"a matmul on GPU {i} is wrong"
    gpus.append([torch.cuda.get_device_name(i), torch.cuda.get_device_properties(i).total_memory])
nccl = ".".join(map(str, torch.cuda.nccl.version())) if n and dist.is_nccl_available() else ""
if nccl:
    ones = [torch.ones(8, device=f"cuda:{i}") for i in range(n)]
    torch.cuda.nccl.all_reduce(ones)
    assert all(float(o[0]) == n for o in ones), "an NCCL sum over the GPUs is wrong"
print(json.dumps({"cuda": torch.version.cuda, "gpus": gpus, "nccl": nccl, "gloo": dist.is_gloo_available()}))
""",
    "cosmos3": """
import json
from diffusers import Cosmos3OmniTransformer
model = Cosmos3OmniTransformer(hidden_size=64, intermediate_size=128, head_dim=16, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
                               vocab_size=512, rope_scaling={"mrope_section": [4, 2, 2]}, action_gen=True, action_dim=64)
print(json.dumps({"tensors": len(model.state_dict())}))
""",
    "video": """
import json, sys, av
with av.open(sys.argv[1]) as container:
    stream = container.streams.video[0]
    frame = next(container.decode(stream)).to_ndarray(format="rgb24")
    print(json.dumps({"codec": stream.codec_context.name, "shape": frame.shape, "std": float(frame.std())}))
""",
    "torchcodec": """
import importlib.util, json
problem, found = "", importlib.util.find_spec("torchcodec") is not None
try:
    import torchcodec.decoders
except Exception as error:
    problem = str(error).strip().splitlines()[0]
print(json.dumps({"found": found, "problem": problem}))
""",
}


class Check(NamedTuple):
    group: str
    name: str
    level: str  # ok, warn or FAIL
    found: str
    mend: str = ""


def run_probes(codes: dict[str, str], arguments: dict[str, list[str]], seconds: float = PROBE_SECONDS) -> dict[str, dict]:
    """Run each code in its own interpreter, all at once, stdin closed. {name: its JSON, or {"error": why there is none}}."""

    def start(name: str, code: str) -> subprocess.Popen:
        command = [sys.executable, "-c", code, *arguments.get(name, [])]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    children = {name: start(name, code) for name, code in codes.items()}
    deadline, answers = time.monotonic() + seconds, {}
    for name, child in children.items():
        try:
            out, err = child.communicate(timeout=max(0.1, deadline - time.monotonic()))
            lines = (out if child.returncode == 0 else err).strip().splitlines() or ["no message"]
            answers[name] = json.loads(lines[-1]) if child.returncode == 0 else {"error": f"exit {child.returncode}: {lines[-1]}"}
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            answers[name] = {"error": f"no answer in {seconds:g} s"}
    return answers


def check_python() -> Iterator[Check]:
    right = sys.version_info[:2] == PYTHON
    mend = f"make the venv with python{PYTHON[0]}.{PYTHON[1]}; on 3.11 an unpinned lerobot is the v2.1 format"
    yield Check("python", "version", "ok" if right else "FAIL", f"{platform.python_version()} at {sys.executable}", mend)
    loaded = getattr(sys.modules.get("sitecustomize"), "__file__", None)
    all_of_them = [p for p in (Path(d, "sitecustomize.py") for d in dict.fromkeys(sys.path)) if p.is_file()]
    hidden = ", ".join(str(p) for p in all_of_them if not (loaded and p.samefile(loaded)))
    mend = "take the folder of the first off PYTHONPATH if the other is needed"
    yield Check("python", "sitecustomize", "warn" if hidden else "ok", f"{loaded} hides {hidden}" if hidden else loaded or "none", mend)


def check_packages(requirements: Path) -> Iterator[Check]:
    """Installed versions against the pins `name[extra]==version  # reason`; a missing one after '# tests' only warns."""
    testing = False
    for line in requirements.read_text().splitlines():
        testing |= line.strip() == "# tests"
        pin = re.match(r"(([\w.-]+)(?:\[[\w,-]+\])?==([\w.]+))\s*(?:#\s*(.*))?", line)
        if not pin:
            continue
        requirement, name, wanted, reason = pin.groups()
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = ""
        if found.split("+")[0] == wanted:  # 2.11.0+cu130 is a build of 2.11.0
            yield Check("packages", name, "ok", found)
        else:
            level = "FAIL" if name in NUMERIC or not (found or testing) else "warn"
            text = f"{found or 'not installed'}, pinned {wanted}{f' ({reason})' if reason else ''}"
            yield Check("packages", name, level, text, f"{sys.executable} -m pip install '{requirement}'")


def check_torch(answer: dict, purpose: str) -> Iterator[Check]:
    if "error" in answer:
        yield Check("torch", "import", "FAIL", answer["error"], "reinstall torch; if it names a library, try with LD_LIBRARY_PATH unset")
        return
    gpus, need, level = answer["gpus"], human_bytes(TRAIN_GPU_BYTES), "ok"
    text, mend = ", ".join(f"{name} {human_bytes(memory)}" for name, memory in gpus) + "; a bf16 matmul on each is right", ""
    if not gpus:
        level, mend = (
            "FAIL" if purpose == "train" else "warn",
            "a machine with a GPU and its driver, and CUDA_VISIBLE_DEVICES unset or right",
        )
        text = f"none visible (torch built for CUDA {answer['cuda'] or 'none'}): the walk-through and conversion run on the CPU, training at Nano size does not"
    elif purpose == "train" and sum(memory for _, memory in gpus) < TRAIN_GPU_BYTES:
        level, text, mend = "FAIL", f"{text}; weights, gradients and moments alone take {need}", "more GPUs, or larger ones"
    yield Check("torch", "cuda", level, text, mend)
    if gpus:
        text = f"{answer['nccl']}, a sum over the GPUs is right" if answer["nccl"] else "absent"
        yield Check("torch", "nccl", "ok" if answer["nccl"] else "FAIL", text, "a torch build with NCCL")
    yield Check("torch", "gloo", "ok" if answer["gloo"] else "FAIL", "available" if answer["gloo"] else "absent", "a torch build with gloo")


def check_libraries(model: dict, video: dict, codec: dict) -> Iterator[Check]:
    text = model.get("error") or f"Cosmos3OmniTransformer built tiny, {model['tensors']} tensors"
    yield Check(
        "diffusers",
        "cosmos3",
        "FAIL" if "error" in model else "ok",
        text,
        "pip install -r requirements.txt (diffusers has the class from 0.39)",
    )
    good = "error" not in video and video["shape"] == [256, 256, 3] and video["std"] > 1  # a blank frame has none
    text = video.get("error") or f"one frame {video['shape']} by {video['codec']}, standard deviation {video['std']:.0f}"
    yield Check(
        "video",
        "decode",
        "ok" if good else "FAIL",
        text,
        "reinstall av at its pin: its wheel carries the AV1 decoder; git checkout tests/data",
    )
    problem = codec.get("error") or codec["problem"]
    if not problem:
        yield Check("video", "torchcodec", "ok", "loads")
    elif not codec.get("found", True):
        yield Check("video", "torchcodec", "ok", "not installed: pyav decodes")
    else:
        yield Check(
            "video",
            "torchcodec",
            "warn",
            f"installed, but cannot load: pyav decodes ({problem})",
            "install ffmpeg's shared libraries, or leave it",
        )


def check_environment(env=os.environ) -> Iterator[Check]:
    hub, reason = hub_cache_root(env)
    yield Check("environment", "hub cache", "ok", f"{hub} (from {reason})")
    effects = {
        "PYTHONPATH": (f"{env.get('PYTHONPATH')} comes before the venv's packages", "unset PYTHONPATH unless it is meant"),
        "LD_LIBRARY_PATH": (
            f"{env.get('LD_LIBRARY_PATH')}; the probes of torch and video ran under it",
            "if one of them failed, try without",
        ),
        "UV_DEFAULT_INDEX": (
            "set: `uv sync --locked` of other projects will call their uv.lock out of date",
            "unset UV_DEFAULT_INDEX for those",
        ),
        "HF_ENDPOINT": (
            f"{env.get('HF_ENDPOINT')}: a mirror may serve models and redirect data sets (308)",
            "unset HF_ENDPOINT if a download fails",
        ),
        "HF_HUB_ENABLE_HF_TRANSFER": ("ignored by huggingface_hub 1.x", "HF_XET_HIGH_PERFORMANCE=1 replaces it"),
        "HF_HUB_OFFLINE": (f"{env.get('HF_HUB_OFFLINE')}: 1 refuses downloads; --tiny and verify work", "unset HF_HUB_OFFLINE to download"),
        "TRANSFORMERS_OFFLINE": (
            f"{env.get('TRANSFORMERS_OFFLINE')}: 1 acts as HF_HUB_OFFLINE=1",
            "unset TRANSFORMERS_OFFLINE to download",
        ),
    }
    for name, (text, mend) in effects.items():
        yield Check("environment", name, "warn", text, mend) if env.get(name) else Check("environment", name, "ok", "not set")


def cgroup_limit(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """The smallest memory limit in bytes of this process's cgroup and its parents, v2 and v1; None without one."""
    limits = []
    for line in membership.read_text().splitlines() if membership.is_file() else []:
        _, controllers, path = line.split(":", 2)
        base, name = (root / "memory", "memory.limit_in_bytes") if "memory" in controllers.split(",") else (root, "memory.max")
        own = base / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(base) and (folder / name).is_file():
                limits.append((folder / name).read_text().strip())
    return min((int(x) for x in limits if x != "max"), default=None)


def check_machine(work: Path, purpose: str) -> Iterator[Check]:
    def enough(name, have, need, text, mend):
        level = "ok" if have >= need else "FAIL"
        return Check("machine", name, level, f"{text}, {purpose} needs {human_bytes(need)}", mend)

    usable = ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, text = cgroup_limit(), human_bytes(ram)
    if limit is not None and limit < ram:  # v1 writes "no limit" as a number above any RAM
        usable, text = limit, f"{human_bytes(limit)} by the cgroup, of {text}"
    yield enough("memory", usable, RAM[purpose], text, "a larger machine or container limit")
    there = work.absolute()
    while not there.exists():
        there = there.parent
    free, shm = shutil.disk_usage(there).free, shutil.disk_usage("/dev/shm").total
    yield enough("disk", free, DISK[purpose], f"{human_bytes(free)} free at {there}", "free some space, or pass --work on another disk")
    yield enough(
        "shm", shm, SHM[purpose], f"/dev/shm of {human_bytes(shm)}", f"docker run --shm-size={SHM[purpose] // 2**20}m, or --ipc=host"
    )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # -1: no limit
    level = "ok" if files < 0 or files >= FILES[purpose] else "warn"
    yield Check("machine", "open files", level, f"{files}, {purpose} needs {FILES[purpose]}", f"ulimit -n {FILES[purpose]}")
    with socket.socket() as wanted, socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        try:
            wanted.bind(("127.0.0.1", PORT))
            yield Check("machine", "port", "ok", f"{PORT} is free for torchrun")
        except OSError as error:
            text = f"{PORT}, torchrun's default: {os.strerror(error.errno)}"
            yield Check("machine", "port", "warn", text, f"torchrun --master-port {other.getsockname()[1]}")


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--for", dest="purpose", choices=("walkthrough", "train", "convert"), default="walkthrough", help="what the machine must be fit for"
    )
    parser.add_argument("--work", type=Path, default=Path("work"), help="root of this project's outputs; its disk is checked")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    return parser.parse_args(argv)


def main(argv=None) -> int:
    args, start = parse_args(argv), time.monotonic()
    plan("for", args.purpose)
    plan("needs", f"{human_bytes(RAM[args.purpose])} of memory, {human_bytes(DISK[args.purpose])} of disk at {args.work}")
    plan("probes", f"{', '.join(PROBES)}, each in a process of its own, at most {PROBE_SECONDS} s")
    if args.dry_run:
        return 0
    video = next(iter(sorted((REPO / "tests/data/libero_demo").glob("*/videos/*/*/*.mp4"))), REPO / "tests/data/libero_demo")
    answers = run_probes(PROBES, {"video": [str(video)]})
    groups = [check_python(), check_packages(REPO / "requirements.txt"), check_torch(answers["torch"], args.purpose)]
    groups += [
        check_libraries(answers["cosmos3"], answers["video"], answers["torchcodec"]),
        check_environment(),
        check_machine(args.work, args.purpose),
    ]
    checks = list(itertools.chain(*groups))
    failures = [c for c in checks if c.level == "FAIL"]
    for c in sorted(checks, key=lambda c: c.level == "FAIL"):  # stable: groups stay together, failures come last
        text = c.found if c.level == "ok" else f"{c.found}; to mend: {c.mend}"
        {"ok": ok, "warn": warn, "FAIL": fail}[c.level](f"{c.group}/{c.name}", text)
    count = {level: sum(c.level == level for c in checks) for level in ("ok", "warn", "FAIL")}
    if args.json:
        write_json(args.json, {"for": args.purpose, "counts": count, "checks": [c._asdict() for c in checks]})
    if failures:
        return EXIT_PRECONDITION
    done(STAGE, fit_for=args.purpose, ok=count["ok"], warn=count["warn"], seconds=f"{time.monotonic() - start:.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_stage(STAGE, main))
