"""Does a change of arithmetic train the same? Loss curves of stage 05 with and without some flags, beside those of another seed.

Run:    python tests/bench/synthetic.py --layers 4 --windows 1000 --out work/synthetic
        python tests/bench/curves.py --work work/synthetic --out work/curves -- --fp8
Prints  the mean train/loss of every tenth of the run for four runs, at once on one GPU: plain and changed, each with two seeds of noise, order and
        fresh heads. Then, over the last half in means of ten steps: how far (rms) the changed run is from the plain one of the same seed, and
        how far the two plain ones are from each other. OUT/curves.png
Fails   exit 5 if the change moves the curve further than the other seed does
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))
from shared import train_command

SEEDS = (1, 2)
SMOOTH = 10  # steps a mean


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("work/synthetic"), help="folder of tests/bench/synthetic.py")
    parser.add_argument("--out", type=Path, default=Path("work/curves"), help="run folders and the picture; replaced")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of each run")
    parser.add_argument("--batch", type=int, default=32, help="samples a step, in one micro-batch")
    parser.add_argument("--lr", type=float, default=1e-4, help="peak learning rate")
    parser.add_argument("flags", nargs="*", help="after --: the flags of stage 05 whose effect is in question")
    args = parser.parse_args()
    if args.steps < 2 * SMOOTH:
        parser.error(f"--steps of at least {2 * SMOOTH}")
    import matplotlib
    import torch

    from common import console, tb

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shutil.rmtree(args.out, ignore_errors=True)
    common = f"--steps {args.steps} --global-batch {args.batch} --micro-batch {args.batch} --lr {args.lr} --warmup 20 --ema off"
    common = [*common.split(), *(["--compile"] if torch.cuda.is_available() else [])]
    running = {}
    for seed in SEEDS:
        for name, flags in (("plain", []), ("changed", args.flags)):
            run = args.out / f"{name}_{seed}"
            command = [*train_command(args.work, 1, run), *common, "--seed", str(seed), *flags]
            running[name, seed] = run, subprocess.Popen(command, stdout=subprocess.DEVNULL)
    if any([process.wait() for _, process in running.values()]):  # a list: wait for all of them
        raise SystemExit("a run of stage 05 failed; its error is above")

    means = {}
    figure, axis = plt.subplots(figsize=(8, 4.5))
    for (name, seed), (run, _) in running.items():
        (read,) = tb.read([run])
        found = np.asarray(read.series["train/loss"].values)
        means[name, seed] = np.array([found[i : i + SMOOTH].mean() for i in range(args.steps // 2, args.steps - SMOOTH + 1, SMOOTH)])
        console.ok(f"{name}, seed {seed}", " ".join(f"{part.mean():.3f}" for part in np.array_split(found, 10)))
        label = f"{' '.join(args.flags) if name == 'changed' else 'without'}, seed {seed}"
        smooth = np.convolve(found, np.ones(SMOOTH) / SMOOTH, "valid")
        axis.plot(np.arange(SMOOTH, args.steps + 1), smooth, "--" if name == "changed" else "-", color=f"C{seed}", label=label)
    axis.set(xlabel="step", ylabel=f"train/loss, mean of {SMOOTH} steps", yscale="log")
    axis.legend()
    figure.savefig(args.out / "curves.png", dpi=120, bbox_inches="tight")

    def apart(a, b) -> float:
        return float(np.sqrt(np.mean((means[a] / means[b] - 1) ** 2)))

    seeds, changes = apart(("plain", 2), ("plain", 1)), [apart(("changed", s), ("plain", s)) for s in SEEDS]
    said = f"the change moves the last half by {changes[0]:.2%} and {changes[1]:.2%}, the other seed by {seeds:.2%}"
    if not all(change <= seeds for change in changes):  # a NaN is no success
        console.fail("curves", said)
        return console.EXIT_VERIFY
    console.ok("curves", said)
    console.done("bench/curves", out=args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
