"""python -m pytest tests/test_check_env.py"""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import REPO, load_script, processor_seconds, run_script
from hub import serve

stage = load_script("01_check_env")
LEVELS = {"ok", "warn", "FAIL"}
GOOD = {
    "torch": {"cuda": "13.0", "visible": 0, "gpus": [], "nccl": "", "ranks": ["4 done", "4 done"]},
    "cosmos3": {"tensors": 61},
    "video": {"codec": "libdav1d", "shape": [256, 256, 3], "std": 44.0, "lerobot": ""},
    "hub": {"endpoint": "https://hub", "offline": True, "problem": "", "seconds": 0.0},
    "torchcodec": {"found": False, "problem": "No module named 'torchcodec'"},
}


def by_name(checks) -> dict:
    return {f"{c.group}/{c.name}": c for c in checks}


@pytest.fixture(scope="module")
def real_run(tmp_path_factory):
    """The script as a user runs it on this machine, every probe included."""
    folder = tmp_path_factory.mktemp("check")
    with processor_seconds(30):
        result = run_script("01_check_env.py", "--work", folder / "not/yet/there", "--json", folder / "table.json")
    return result, json.loads((folder / "table.json").read_text())


def test_this_machine_is_fit_for_the_walk_through(real_run):
    """The machine that runs the tests passes: exit 0, a [done] line last, no FAIL."""
    result, table = real_run
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1].startswith("[done] 01_check_env fit_for=walkthrough ok=")
    assert table["for"] == "walkthrough" and table["counts"]["FAIL"] == 0


def test_the_probes_really_ran(real_run):
    """The Cosmos3 class was built, a frame decoded, two processes summed, and a missing GPU is a warning that says what it means."""
    checks = {f"{c['group']}/{c['name']}": c for c in real_run[1]["checks"]}
    assert checks["diffusers/cosmos3"]["level"] == "ok" and "61 tensors" in checks["diffusers/cosmos3"]["found"]
    assert checks["video/decode"]["level"] == "ok" and "[256, 256, 3]" in checks["video/decode"]["found"]
    assert checks["torch/cuda"]["level"] == "warn" and "run on the CPU" in checks["torch/cuda"]["found"]  # conftest hides every GPU
    assert checks["video/lerobot"]["level"] == "ok" and "the same frame" in checks["video/lerobot"]["found"]  # E4
    assert checks["torch/collective"]["level"] == "ok" and "2 processes" in checks["torch/collective"]["found"]
    assert {c["level"] for c in checks.values()} <= LEVELS


def test_every_check_is_one_line_in_groups(real_run):
    """Each check is one line with its prefix, the lines of a group stand together, and a warning carries its mending."""
    lines = [line for line in real_run[0].stdout.splitlines() if line.startswith(("[ok]", "[warn]", "[FAIL]"))]
    assert len(lines) == len(real_run[1]["checks"])
    groups = [line.split("] ")[1].split("/")[0] for line in lines]
    assert [g for i, g in enumerate(groups) if i == 0 or g != groups[i - 1]] == list(dict.fromkeys(groups))
    assert all("; to mend: " in line for line in lines if not line.startswith("[ok]"))


def test_failures_come_last_and_exit_3(monkeypatch, capsys, tmp_path):
    """With training asked for and no GPU, the exit code is 3 and every line after the first [FAIL] is a [FAIL] with its mending."""
    monkeypatch.setattr(
        stage, "run_probes", lambda codes, arguments, **_: {**GOOD, "cosmos3": {"error": "exit 1: ImportError: no such class"}}
    )
    monkeypatch.setitem(stage.NEEDS, "train", stage.NEEDS["train"]._replace(disk=1 << 60))
    assert stage.main(["--for", "train", "--json", str(tmp_path / "t.json")]) == 3
    lines = capsys.readouterr().out.splitlines()
    last = lines[next(i for i, line in enumerate(lines) if line.startswith("[FAIL]")) :]
    assert all(line.startswith("[FAIL]") and "; to mend: " in line for line in last)
    assert {"torch/cuda", "diffusers/cosmos3", "machine/disk"} <= {line.split()[1].rstrip(":") for line in last}
    assert json.loads((tmp_path / "t.json").read_text())["counts"]["FAIL"] == len(last)


@pytest.mark.parametrize(
    ("memory", "purpose", "level"),
    [
        ([], "walkthrough", "warn"),
        ([], "convert", "warn"),
        ([], "train", "FAIL"),
        ([80], "train", "FAIL"),
        ([141], "train", "ok"),
        ([24] * 8, "train", "ok"),
    ],
)
def test_gpu_memory_is_held_against_the_purpose(memory, purpose, level):
    """Training needs 104 GiB over all GPUs together: one of 80 fails, one of 141 or eight of 24 pass; the other purposes need none."""
    gpus = [["GPU", m * 2**30] for m in memory]
    answer = {**GOOD["torch"], "visible": len(gpus), "gpus": gpus, "nccl": "2.28.3"}
    assert by_name(stage.check_torch(answer, purpose))["torch/cuda"].level == level
    answer["visible"] += 1
    assert (
        "1 of " in by_name(stage.check_torch(answer, purpose))["torch/cuda"].found
    )  # one that is visible and does not compute fails for all
    assert by_name(stage.check_torch(answer, purpose))["torch/cuda"].level == "FAIL"


def test_a_wrong_pin_of_a_numeric_package_fails_and_another_warns(tmp_path):
    """E6, E7, C11: a version off by one fails where it can change numbers, warns elsewhere; a missing package fails unless only the tests want it."""
    requirements = tmp_path / "requirements.txt"
    pins = [
        "numpy==0.0.1  # per-sample noise",
        "transformers==0.0.1",
        "huggingface_hub==0.0.1",
        "tqdm==0.0.1",
        "no-such-package==1.0",
        "lerobot[dataset]==0.6.1   # v3",
        "# tests",
        "no-such-test-package==1.0",
    ]
    requirements.write_text("\n".join(pins))
    checks = by_name(stage.check_packages(requirements))
    levels = {name.split("/")[1]: c.level for name, c in checks.items()}
    assert {levels.pop("transformers"), levels.pop("huggingface_hub")} == {"FAIL"}
    assert levels == {"numpy": "FAIL", "tqdm": "warn", "no-such-package": "FAIL", "lerobot": "ok", "no-such-test-package": "warn"}
    assert "per-sample noise" in checks["packages/numpy"].found and "'numpy==0.0.1'" in checks["packages/numpy"].mend


def test_every_pin_is_read():
    """Each package line of requirements.txt gives a check: none is lost to the pattern."""
    lines = [line for line in (REPO / "requirements.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert len(list(stage.check_packages(REPO / "requirements.txt"))) == len(lines)


def test_a_probe_that_asks_hangs_or_dies_is_a_finding():
    """E1: an import that asks a question, one that hangs, one that kills its process and one that fails each give an error, in bounded time."""
    codes = {
        "asks": "input('download the data set? ')",
        "hangs": "import time; time.sleep(60)",
        "dies": "import os; os.abort()",
        "fails": "import no_such_module",
        "works": "print('noise'); print('{\"a\": 1}')",
    }
    start = time.monotonic()
    answers = stage.run_probes(codes, {}, seconds=5)
    assert time.monotonic() - start < 30  # the hanging one sleeps for 60
    assert "EOFError" in answers["asks"]["error"] and "no answer in 5 s" in answers["hangs"]["error"]
    assert "exit -6" in answers["dies"]["error"] and "no_such_module" in answers["fails"]["error"]
    assert answers["works"] == {"a": 1}


def test_a_rank_that_does_not_answer_is_named():
    """Of two processes, one never gets to the other: the probe ends in bounded time and names that rank, not the one that waited for it; a
    rank that fails is named with its error; and neither leaves a process behind."""
    computed = 'log.write("1 computed'
    assert stage.PROBES["torch"].count(computed) == 1
    hung = stage.PROBES["torch"].replace(computed, f"time.sleep(99 * rank); {computed}")
    hung += "print(json.dumps({'ranks': last, 'left': [c for c in children if os.path.exists(f'/proc/{c}')]}))"
    failed = stage.PROBES["torch"].replace(computed, f"assert rank == 1, 'no device'; {computed}")
    answers = stage.run_probes({"hung": hung, "failed": failed}, {"hung": ["2"], "failed": ["2"]})
    assert answers["hung"]["left"] == []
    for name, rank, words in (("hung", 1, "did not answer"), ("failed", 0, "AssertionError: no device")):
        check = by_name(stage.check_torch({**GOOD["torch"], **answers[name]}, "train"))["torch/collective"]
        assert check.level == "FAIL" and check.found.startswith(f"rank {rank} of 2") and words in check.found, check


def test_a_probe_that_hangs_takes_its_children_with_it():
    """What a probe started is killed with it, so that run_probes neither waits for it nor leaves it behind."""
    code = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '98.7654']).pid, flush=True); time.sleep(60)"
    assert "no answer" in stage.run_probes({"parent": code}, {}, seconds=1)["parent"]["error"]
    assert not [p for p in Path("/proc").glob("[0-9]*/cmdline") if b"98.7654" in p.read_bytes()]


def test_a_simulator_that_asks_a_question_is_told(tmp_path, monkeypatch):
    """E1, E8: an `import libero` that asks, one whose initial states torch refuses, and none at all, each by the real probe."""
    package = tmp_path / "libero/libero"
    (package / "benchmark").mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(
        "import os\nif not os.path.exists(os.path.expanduser('~/.libero/config.yaml')): input('where? ')\n"
    )
    (package / "benchmark/__init__.py").write_text("states = torch.load(path)\n")
    monkeypatch.setenv("HOME", str(tmp_path))

    def found(level):
        check = by_name(stage.check_simulator(stage.run_probes({"libero": stage.LIBERO}, {})["libero"], {"error": "no libEGL.so.1"}))
        assert check["simulator/egl"].level == "warn" and check["simulator/libero"].level == level
        return check["simulator/libero"].found

    assert "not installed" in found("warn")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert f"asks a question, and hangs in tmux; {tmp_path}/.libero/config.yaml is missing" in found("FAIL")
    (tmp_path / ".libero").mkdir()
    (tmp_path / ".libero/config.yaml").touch()
    assert "refuses the pickled initial states" in found("warn")
    (package / "benchmark/__init__.py").write_text("states = torch.load(path, weights_only=False)\n")
    assert "without a question" in found("ok")


def test_the_rlinf_list(tmp_path, monkeypatch):
    """The guide's first step on an environment made of stand-in packages: one import that hangs and one that is missing are named, the commit
    of cosmos-framework is compared, the tools and the configuration file are looked for."""
    root = tmp_path / "cosmos-framework"
    for name in ("ray", "rlinf"):
        (tmp_path / f"{name}.py").write_text("__version__ = '1.0'\n")
    (root / "cosmos_framework").mkdir(parents=True)
    (root / "cosmos_framework/__init__.py").touch()
    git = ["git", "-C", str(root), "-c", "user.name=t", "-c", "user.email=t@example.com"]
    for more in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *more], check=True, capture_output=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{root}")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "libero.py").write_text("input('where are the data? ')\n")
    names = ("ray", "rlinf", "cosmos_framework", "libero")
    answers = stage.run_probes({f"import {n}": stage.IMPORT for n in names}, {f"import {n}": [n] for n in names})
    answers |= {f"import {n}": {"error": "No module named"} for n in stage.RLINF_IMPORTS if n not in names}
    checks = by_name(stage.check_rlinf(answers, {"HOME": str(tmp_path), "PATH": str(tmp_path)}))
    levels = {name.split("/")[1]: c.level for name, c in checks.items()}
    expected = {f"import {n}": "FAIL" for n in stage.RLINF_IMPORTS} | {f"import {n}": "ok" for n in names if n != "libero"}
    expected |= {"typing.override": "ok", "libero config": "FAIL", "cosmos-framework": "warn", "uv": "FAIL", "hf": "warn"}
    assert levels == expected
    assert "EOFError" in checks["rlinf/import libero"].found and f"{root} at {commit}" in checks["rlinf/cosmos-framework"].found
    monkeypatch.setattr(stage, "COSMOS_FRAMEWORK", commit)
    for tool in ("uv", "hf"):
        (tmp_path / tool).write_text("#!/bin/sh\n")
        (tmp_path / tool).chmod(0o755)
    (tmp_path / ".libero").mkdir()
    (tmp_path / ".libero/config.yaml").touch()
    checks = by_name(stage.check_rlinf(answers, {"HOME": str(tmp_path), "PATH": str(tmp_path)}))
    assert {checks[f"rlinf/{n}"].level for n in ("cosmos-framework", "uv", "hf", "libero config")} == {"ok"}


def test_finished_and_unfinished_stages_are_told_apart(walk, tmp_path):
    """Every mark is one that its stage really leaves: after the walk all are found; without it each says its command; a partial is a warning."""
    assert all(c.found.startswith(str(walk)) for c in stage.check_artefacts(walk)), [c.found for c in stage.check_artefacts(walk)]
    (tmp_path / "models/.Cosmos3-Nano.partial").mkdir(parents=True)
    *absent, partial = stage.check_artefacts(tmp_path)
    assert (
        all("not yet" in c.found and (REPO / c.found.split("python ")[1].split()[0]).is_file() for c in absent) and partial.level == "warn"
    )


def test_the_disk_check_counts_what_is_already_there(tmp_path, monkeypatch):
    """A run that goes on needs no second helping: bytes under --work count as room."""
    (tmp_path / "checkpoint").write_bytes(b"x" * 4096)
    monkeypatch.setitem(stage.NEEDS, "train", stage.NEEDS["train"]._replace(disk=3 * 2**40))
    monkeypatch.setattr(stage.shutil, "disk_usage", lambda path: type("usage", (), {"free": 3 * 2**40 - 4096, "total": 2**45}))
    assert by_name(stage.check_machine(tmp_path, "train"))["machine/disk"].level == "ok"
    (tmp_path / "checkpoint").unlink()
    assert by_name(stage.check_machine(tmp_path, "train"))["machine/disk"].level == "FAIL"


def plan_of(capsys, tmp_path, *flags, code=0):
    assert stage.run_stage(stage.STAGE, lambda: stage.main(["--plan", *flags, "--json", str(tmp_path / "p.json")])) == code
    return json.loads((tmp_path / "p.json").read_text()), capsys.readouterr()


def test_plan_agrees_with_measured_runs(capsys, tmp_path, monkeypatch):
    """One and two H200s: the rows that RUNS.md measured say within 2 % what was measured, when layers kept what they kept then (as in
    test_budget.py), and the command given parses in stage 05."""
    monkeypatch.setattr(stage.budget, "kept_rows", lambda compiled: 19.35)
    for gpus, micro, recompute, ema, measured in ((1, 32, 1, "host", 109.9), (2, 32, 2, "device", 104.0)):
        table, printed = plan_of(capsys, tmp_path, "--gpus", str(gpus), "--gpu-memory", "140.4", "--global-batch", "256", "--steps", "10")
        (row,) = [r for r in table["rows"] if (r["micro_batch"], r["grad_checkpoint"], r["ema"]) == (micro, recompute, ema)]
        assert row["fits"] and row["gpu_bytes"] / 2**30 == pytest.approx(measured, rel=0.02)
        (command,) = [x for x in printed.out.splitlines() if "05_train_fsdp2.py" in x]
        load_script("05_train_fsdp2").parse_args(command.split("05_train_fsdp2.py")[1].split())
    assert {(r["micro_batch"], r["grad_checkpoint"], r["ema"]) for r in table["rows"] if not r["fits"]}  # and some do not fit


def test_plan_is_the_trainers(walk, capsys, tmp_path, monkeypatch):
    """Both scripts ask common/budget.py: with Nano's sizes swapped for the stand-in's, the plan's bytes are those in the trainer's plan."""
    from trainer import small, train

    from common import weights

    config = json.loads((walk / "models/Cosmos3-Nano-DCP/model/config.json").read_text())
    text = max(shape[1] for shape, _, _ in weights.check_safetensors(walk / "cache/prompt_kv.safetensors").values())
    for name, value in {"TRAINED": 385_856, "PROMPTS": (walk / "cache/prompt_kv.safetensors").stat().st_size, "TEXT": text}.items():
        monkeypatch.setattr(stage, name, value)
    monkeypatch.setattr(stage.keys, "NANO", config)
    table, _ = plan_of(capsys, tmp_path, "--gpus", "1", "--gpu-memory", "1", "--global-batch", "32", "--steps", "10")
    for row in table["rows"]:
        flags = [
            "--global-batch",
            32,
            "--micro-batch",
            row["micro_batch"],
            "--grad-checkpoint",
            row["grad_checkpoint"],
            "--ema",
            row["ema"],
            "--compile",
        ]
        train.plan(train.parse_args(small(walk, tmp_path / "run", *flags)))
        out = capsys.readouterr().out
        assert f"{row['gpu_bytes'] / 2**20:.2f} MiB in all" in out and f"[plan] host memory: {stage.human_bytes(row['host_bytes'])}" in out
    assert len(table["rows"]) == 18


def test_a_plan_that_does_not_fit_exits_3(capsys, tmp_path):
    """GPUs that are too small, a batch that they do not divide, and no GPU to be seen: exit 3, with what is least and how to ask."""
    _, printed = plan_of(capsys, tmp_path, "--gpus", "8", "--gpu-memory", "16", code=3)
    assert "the least is 39." in printed.err and "too large" in printed.out
    _, printed = plan_of(capsys, tmp_path, "--gpus", "3", "--gpu-memory", "80", code=3)
    assert "--global-batch 2048 over 3 GPUs" in printed.err


def test_plan_counts_the_disk(capsys, tmp_path):
    """All checkpoints without --keep-last, one more than it keeps with it, and none with --save-every 0."""
    kept = {}
    for flags in ((), ("--keep-last", "2"), ("--save-every", "0")):
        table, _ = plan_of(capsys, tmp_path, "--gpus", "8", "--gpu-memory", "80", *flags)
        kept[flags] = table["disk"]["checkpoints"] / (16 * stage.TRAINED)
    assert list(kept.values()) == [10, 3, 0]


def test_a_lerobot_without_a_video_reader_fails(tmp_path, monkeypatch):
    """E4: where lerobot's own decoding fails although PyAV works, that is a failure of its own, by the real probe."""
    (tmp_path / "lerobot/datasets").mkdir(parents=True)
    for name in ("lerobot/__init__.py", "lerobot/datasets/__init__.py"):
        (tmp_path / name).touch()
    (tmp_path / "lerobot/datasets/video_utils.py").write_text("def decode_video_frames(*a, **k): raise AttributeError('no VideoReader')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    video = sorted((REPO / "tests/data/libero_demo").glob("*/videos/*/*/*.mp4"))[0]
    answer = stage.run_probes({"video": stage.PROBES["video"]}, {"video": [str(video)]})["video"]
    checks = by_name(stage.check_libraries(GOOD["cosmos3"], answer, GOOD["torchcodec"]))
    assert (
        checks["video/decode"].level == "ok"
        and checks["video/lerobot"].level == "FAIL"
        and "no VideoReader" in checks["video/lerobot"].found
    )


def test_a_video_that_cannot_be_decoded_or_is_blank_fails(tmp_path):
    """E3: the real probe on a file that is no video is an error, and a frame without contrast does not count as decoded."""
    (tmp_path / "no.mp4").write_bytes(b"not a video")
    answer = stage.run_probes({"video": stage.PROBES["video"]}, {"video": [str(tmp_path / "no.mp4")]})["video"]
    for video in (answer, {**GOOD["video"], "std": 0.0}):
        assert by_name(stage.check_libraries(GOOD["cosmos3"], video, GOOD["torchcodec"]))["video/decode"].level == "FAIL"


@pytest.mark.parametrize(("found", "level", "text"), [(False, "ok", "not installed"), (True, "warn", "cannot load")])
def test_torchcodec_absent_differs_from_unloadable(found, level, text):
    """E5: torchcodec that is not installed is fine; one that is installed and cannot load is said to be so."""
    check = by_name(stage.check_libraries(GOOD["cosmos3"], GOOD["video"], {"found": found, "problem": "x"}))["video/torchcodec"]
    assert check.level == level and text in check.found


def test_a_hidden_sitecustomize_is_reported(tmp_path):
    """E2: with two sitecustomize.py on PYTHONPATH, the one that was loaded and the one that it hides are both named."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sitecustomize.py").write_text("")
    code = "import runpy; s = runpy.run_path('01_check_env.py'); print([c for c in s['check_python']() if c.name == 'sitecustomize'][0])"
    env = {**os.environ, "PYTHONPATH": f"{tmp_path / 'first'}:{tmp_path / 'second'}:{REPO}"}
    found = subprocess.run([sys.executable, "-c", code], cwd=REPO, env=env, capture_output=True, text=True, check=True).stdout
    assert "'warn'" in found and f"{tmp_path}/first/sitecustomize.py hides {tmp_path}/second/sitecustomize.py" in found


def test_environment_variables_are_told_with_their_effect():
    """E10: each variable that misleads is a warning, an unset one is not, and the value of one that may hold a secret is not printed."""
    clean = by_name(stage.check_environment(GOOD["hub"], {}))
    assert {c.level for c in clean.values()} == {"ok"}
    env = {
        "UV_DEFAULT_INDEX": "https://user:secret@index",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_ENABLE_HF_TRANSFER": "1",
        "HF_HOME": "/h",
        "HF_ENDPOINT": "https://m",
    }
    checks = by_name(stage.check_environment(GOOD["hub"], env))
    assert {n.split("/")[1] for n, c in checks.items() if c.level == "warn"} == env.keys() - {"HF_HOME"}
    assert checks["environment/hub cache"].found == "/h/hub (from HF_HOME)"
    assert not any("secret" in c.found + c.mend for c in checks.values())


def test_a_hub_that_cannot_be_reached_is_known_before_the_download(tmp_path, monkeypatch):
    """The real probe: a hub that answers, one that refuses the repository, one where nobody listens, and offline, when it asks nobody."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)

    def found(endpoint, offline="0"):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        monkeypatch.setenv("HF_HUB_OFFLINE", offline)
        check = by_name(stage.check_environment(stage.run_probes({"hub": stage.PROBES["hub"]}, {})["hub"], {}))["environment/hub"]
        return check.level, check.found

    with serve({"nvidia/Cosmos3-Nano": tmp_path}) as hub:
        assert found(hub.url)[0] == "ok"
        hub.answer = lambda path: (401, {})
        assert found(hub.url) == ("warn", f"{hub.url}: answers 401 for nvidia/Cosmos3-Nano")
        count = len(hub.asked)
        assert found(hub.url, "1") == ("ok", f"{hub.url}: not asked: offline") and len(hub.asked) == count
    assert found(hub.url)[0] == "warn" and "does not answer" in found(hub.url)[1]


def test_the_smallest_cgroup_limit_counts(tmp_path):
    """Of this process's cgroup and its parents, in v2 and v1, the smallest limit is the one that kills; 'max' is none."""
    proc = tmp_path / "cgroup"
    proc.write_text("0::/a/b\n")
    (tmp_path / "v2/a/b").mkdir(parents=True)
    (tmp_path / "v2/a/b/memory.max").write_text("max\n")
    assert stage.cgroup_limit(tmp_path / "v2", proc) is None
    (tmp_path / "v2/a/memory.max").write_text("4096\n")
    assert stage.cgroup_limit(tmp_path / "v2", proc) == 4096
    proc.write_text("5:cpu,cpuacct:/c\n4:memory:/c\n")
    (tmp_path / "v1/memory/c").mkdir(parents=True)
    (tmp_path / "v1/memory/c/memory.limit_in_bytes").write_text("8192\n")
    assert stage.cgroup_limit(tmp_path / "v1", proc) == 8192
    assert stage.cgroup_limit(tmp_path / "v1", tmp_path / "absent") is None


def test_the_memory_check_uses_the_cgroup_limit(monkeypatch):
    """A container limit below the need fails although the machine has more."""
    monkeypatch.setattr(stage, "cgroup_limit", lambda: 2**30)
    check = by_name(stage.check_machine(Path("work"), "walkthrough"))["machine/memory"]
    assert check.level == "FAIL" and "1.00 GiB by the cgroup" in check.found


def test_a_taken_port_is_a_warning_with_a_free_one(monkeypatch):
    """E11: another job on torchrun's port is a warning, and the port named instead can be bound."""
    with socket.socket() as job:
        job.bind(("127.0.0.1", 0))
        job.listen()
        monkeypatch.setattr(stage, "PORT", job.getsockname()[1])
        check = by_name(stage.check_machine(Path("work"), "walkthrough"))["machine/port"]
        assert check.level == "warn"
        with socket.socket() as free:
            free.bind(("127.0.0.1", int(check.mend.split()[-1])))


def test_help_and_dry_run_are_quick_and_touch_nothing(tmp_path):
    """--help and --dry-run answer within a second of a processor, start no probe and write nothing; a wrong value or an abbreviation exits 2."""
    for argv, code in (
        (("--help",), 0),
        (("--dry-run", "--work", "w", "--json", "t.json"), 0),
        (("--for", "sleep"), 2),
        (("--gpus", "0"), 2),
        (("--dry",), 2),
    ):
        with processor_seconds(1):
            assert run_script(REPO / "01_check_env.py", *argv, cwd=tmp_path).returncode == code
    assert list(tmp_path.iterdir()) == []
