"""python -m pytest tests/test_check_env.py"""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import REPO, load_script, run_script

stage = load_script("01_check_env")
LEVELS = {"ok", "warn", "FAIL"}
GOOD = {
    "torch": {"cuda": "13.0", "gpus": [], "nccl": "", "gloo": True},
    "cosmos3": {"tensors": 61},
    "video": {"codec": "libdav1d", "shape": [256, 256, 3], "std": 44.0},
    "torchcodec": {"found": False, "problem": "No module named 'torchcodec'"},
}


def by_name(checks) -> dict:
    return {f"{c.group}/{c.name}": c for c in checks}


@pytest.fixture(scope="module")
def real_run(tmp_path_factory):
    """The script as a user runs it on this machine, every probe included."""
    folder, start = tmp_path_factory.mktemp("check"), time.monotonic()
    result = run_script("01_check_env.py", "--work", folder / "not/yet/there", "--json", folder / "table.json")
    return result, json.loads((folder / "table.json").read_text()), time.monotonic() - start


def test_this_machine_is_fit_for_the_walk_through(real_run):
    """The machine that runs the tests passes: exit 0, a [done] line last, no FAIL, within 20 s unless the tests run side by side."""
    result, table, seconds = real_run
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1].startswith("[done] 01_check_env fit_for=walkthrough ok=")
    assert table["for"] == "walkthrough" and table["counts"]["FAIL"] == 0
    assert seconds < (60 if "PYTEST_XDIST_WORKER" in os.environ else 20)


def test_the_probes_really_ran(real_run):
    """The Cosmos3 class was built, a frame of 256 x 256 pixels was decoded, and a missing GPU is a warning that says what it means."""
    checks = {f"{c['group']}/{c['name']}": c for c in real_run[1]["checks"]}
    assert checks["diffusers/cosmos3"]["level"] == "ok" and "61 tensors" in checks["diffusers/cosmos3"]["found"]
    assert checks["video/decode"]["level"] == "ok" and "[256, 256, 3]" in checks["video/decode"]["found"]
    assert checks["torch/cuda"]["level"] == "warn" and "run on the CPU" in checks["torch/cuda"]["found"]  # conftest hides every GPU
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
    monkeypatch.setattr(stage, "run_probes", lambda codes, arguments: {**GOOD, "cosmos3": {"error": "exit 1: ImportError: no such class"}})
    monkeypatch.setattr(stage, "DISK", {"train": 1 << 60})
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
    answer = {**GOOD["torch"], "gpus": [["GPU", m * 2**30] for m in memory], "nccl": "2.28.3"}
    assert by_name(stage.check_torch(answer, purpose))["torch/cuda"].level == level


def test_a_wrong_pin_of_a_numeric_package_fails_and_another_warns(tmp_path):
    """E6: a version off by one fails where it can change numbers, warns elsewhere; a missing package fails unless only the tests want it."""
    requirements = tmp_path / "requirements.txt"
    pins = [
        "numpy==0.0.1  # per-sample noise",
        "tqdm==0.0.1",
        "no-such-package==1.0",
        "lerobot[dataset]==0.6.1   # v3",
        "# tests",
        "no-such-test-package==1.0",
    ]
    requirements.write_text("\n".join(pins))
    checks = by_name(stage.check_packages(requirements))
    levels = {name.split("/")[1]: c.level for name, c in checks.items()}
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
    answers = stage.run_probes(codes, {}, seconds=3)
    assert time.monotonic() - start < 6
    assert "EOFError" in answers["asks"]["error"] and "no answer in 3 s" in answers["hangs"]["error"]
    assert "exit -6" in answers["dies"]["error"] and "no_such_module" in answers["fails"]["error"]
    assert answers["works"] == {"a": 1}


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
    clean = by_name(stage.check_environment({}))
    assert {c.level for c in clean.values()} == {"ok"}
    env = {
        "UV_DEFAULT_INDEX": "https://user:secret@index",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_ENABLE_HF_TRANSFER": "1",
        "HF_HOME": "/h",
        "HF_ENDPOINT": "https://m",
    }
    checks = by_name(stage.check_environment(env))
    assert {n.split("/")[1] for n, c in checks.items() if c.level == "warn"} == env.keys() - {"HF_HOME"}
    assert checks["environment/hub cache"].found == "/h/hub (from HF_HOME)"
    assert not any("secret" in c.found + c.mend for c in checks.values())


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
    """--help and --dry-run answer within a second, start no probe and write nothing; a wrong value or an abbreviation exits 2."""
    for argv, code in ((("--help",), 0), (("--dry-run", "--work", "w", "--json", "t.json"), 0), (("--for", "eval"), 2), (("--dry",), 2)):
        start = time.monotonic()
        assert run_script(REPO / "01_check_env.py", *argv, cwd=tmp_path).returncode == code
        assert time.monotonic() - start < 1
    assert list(tmp_path.iterdir()) == []
