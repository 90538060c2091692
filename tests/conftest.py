"""Shared test set-up: offline always, scripts loaded by file name, one tiny pipeline run for the whole session."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

os.environ.update(
    HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""
)

import pytest
from hypothesis import HealthCheck, settings

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=60, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("fuzz", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def load_script(name: str):
    """Import a numbered script ("07_read_tb") as a module; its name starts with a digit, so `import` cannot."""
    spec = importlib.util.spec_from_file_location("stage_" + name.replace(".", "_"), REPO / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run_script(*argv, env=None, timeout=300, cwd=REPO, launcher=None) -> subprocess.CompletedProcess:
    """Run a script as a user does. `launcher` replaces the plain interpreter (torchrun)."""
    command = [*(launcher or [sys.executable]), *map(str, argv)]
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **(env or {})}, timeout=timeout, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
