"""The trainer's plan of GPU memory against the peak that it reaches.

Run:    python tests/bench/synthetic.py --layers 36 --windows 400 --out work/synthetic          (fewer layers: a smaller GPU does)
        python tests/bench/memory.py --work work/synthetic --gpus 1 --rows 32/1/host/compile 16/0/host/compile 16/1/off/eager
Prints  a line a row (micro-batch / --grad-checkpoint / --ema / compile or eager): planned GiB, measured peak, their difference
Fails   exit 5 if a row differs by more than 10 %
"""

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

from shared import train_command

ROWS = ("32/1/host/compile", "8/2/host/compile", "16/0/host/compile", "16/1/off/eager", "8/4/off/eager")


def measure(work: Path, gpus: int, row: str) -> tuple[float, float]:
    """(planned, measured) GiB of one run of two steps, two micro-batches each."""
    micro, recompute, ema, how = row.split("/")
    with tempfile.TemporaryDirectory() as out:
        flags = f"--micro-batch {micro} --global-batch {2 * int(micro) * gpus} --grad-checkpoint {recompute} --ema {ema}"
        flags += f" --steps 2{' --compile' if how == 'compile' else ''}"
        run = subprocess.run([*train_command(work, gpus, f"{out}/run"), *flags.split()], capture_output=True, text=True, check=False)
    planned = re.search(r"^\[plan\] memory: .* ([\d.]+) (GiB|MiB) in all$", run.stdout, re.M)
    peaks = [float(x) for x in re.findall(r"^\[step\] .* peak_gib:([\d.]+)", run.stdout, re.M)]
    if run.returncode or not planned or not peaks:
        raise SystemExit(f"[FAIL] {row}: exit {run.returncode}\n{run.stdout[-1500:]}{run.stderr[-3000:]}")
    return float(planned[1]) / (1024 if planned[2] == "MiB" else 1), max(peaks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--work", type=Path, default=Path("work/synthetic"))
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--rows", nargs="+", default=ROWS)
    args = parser.parse_args()
    worst = 0.0
    for row in args.rows:
        planned, peak = measure(args.work, args.gpus, row)
        worst = max(worst, abs(planned / peak - 1))
        print(f"[ok] {row}: planned {planned:.1f} GiB a GPU, measured {peak:.1f}, {planned / peak - 1:+.1%}", flush=True)
    print(f"[{'done' if worst <= 0.1 else 'FAIL'}] memory gpus={args.gpus} worst={worst:.1%}")
    return 0 if worst <= 0.1 else 5


if __name__ == "__main__":
    raise SystemExit(main())
