"""Shared test set-up: offline always, scripts loaded by file name, one tiny pipeline run for the whole session."""

import contextlib
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

os.environ.update(
    HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""
)

import pytest
from bench.shared import load_script
from filelock import FileLock
from hypothesis import HealthCheck, settings

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=60, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("fuzz", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def call_script(name: str, *argv) -> int:
    """Run a numbered script in this process as its guard runs it: its exit code, with a StageError told on stderr."""
    stage = load_script(name)
    return stage.console.run_stage(name, lambda: stage.main([str(a) for a in argv]))


def run_script(*argv, env=None, timeout=300, cwd=REPO, launcher=None) -> subprocess.CompletedProcess:
    """Run a script as a user does. `launcher` replaces the plain interpreter (torchrun)."""
    command = [*(launcher or [sys.executable]), *map(str, argv)]
    return subprocess.run(
        command,
        check=False,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        timeout=timeout,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


@contextlib.contextmanager
def processor_seconds(limit: float):
    """The programs run inside take less than `limit` seconds of processors: a bound that a busy machine does not break."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    yield
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < limit


def golden(name: str) -> dict:
    """A file of tests/golden; a missing one is a failure, never made anew."""
    return json.loads((REPO / "tests/golden" / name).read_text())


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    """A random-weight stand-in of nvidia/Cosmos3-Nano."""
    from common import tiny

    folder = tmp_path_factory.mktemp("base") / "Cosmos3-Nano"
    tiny.write_cosmos3_nano(folder)
    return folder


def pytest_collection_modifyitems(items):
    """Tests of the walk come first: one worker starts it at once, the other begins at the far end (run_tests.sh: --dist worksteal)."""
    items.sort(key=lambda item: "walk" not in item.fixturenames)


@pytest.fixture(scope="session")
def walk(tmp_path_factory, worker_id) -> Path:
    """The work folder of one `run_all.sh --tiny`, with its output in run_all.log. Tests read it; what writes goes elsewhere.

    The workers of a parallel run share it: the first that needs it makes it, the others wait.
    """
    own = tmp_path_factory.getbasetemp()
    work = (own if worker_id == "master" else own.parent) / "walk"
    with FileLock(f"{work}.lock"):
        if not (work / "run_all.log").is_file():
            env = {**os.environ, "VENV": sys.prefix, "OMP_NUM_THREADS": "2"}
            command = ["./run_all.sh", "--tiny", "--work", str(work)]
            run = subprocess.run(command, check=False, cwd=REPO, env=env, capture_output=True, text=True, timeout=600)
            assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
            (work / "run_all.log").write_text(run.stdout + run.stderr)
    return work
