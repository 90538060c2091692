"""What several benches, and the tests, need: a numbered script as a module, the real VAE's sizes, the GPU's matrix rate, a launch of stage 05."""

import importlib.util
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
# Wan2.2's encoder, over common/tiny.py's VAE; the decoder is not used and stays small.
WAN22 = {"base_dim": 160, "num_res_blocks": 2, "decoder_base_dim": 8}


def load_script(name: str):
    """Import a numbered script ("07_read_tb") as a module; its name starts with a digit, so `import` cannot."""
    spec = importlib.util.spec_from_file_location("stage_" + name.replace(".", "_"), REPO / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def matrix_rates() -> tuple[float, float]:
    """FLOP/s of bf16 products of 8192 cubed on random data: (the first fifty of a cool GPU, fifty after four seconds of them).

    The second is what a long run can have: under load a GPU lowers its clocks to stay within its power.
    """
    import torch

    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)

    def fifty() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            a @ b
        torch.cuda.synchronize()
        return 2 * 8192**3 * 50 / (time.perf_counter() - start)

    a @ b
    first, start = fifty(), time.perf_counter()
    while time.perf_counter() - start < 4:
        last = fifty()
    return first, last


def train_command(work: Path, gpus: int, out: Path | str) -> list[str]:
    """Stage 05 on tests/bench/synthetic.py's base and cache, as a user launches it, saving and validating nothing; flags come behind."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)] if gpus > 1 else []
    data = ["--base", str(work / "Cosmos3-Nano"), "--cache", str(work / "cache"), "--out", str(out)]
    return [sys.executable, *torchrun, str(REPO / "05_train_fsdp2.py"), *data, "--save-every", "0", "--val-every", "0"]
