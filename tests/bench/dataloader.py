"""The trainer's data path alone, one rank: sample order, mapped latents, noise, collation, as stage 05 runs it.

Run:    python tests/bench/synthetic.py --layers 1 --windows 10000 --out work/synthetic
        python tests/bench/dataloader.py --work work/synthetic
Prints  samples/s with the latents in the page cache, and with a page cache budget of one micro-batch (every page of latents is dropped before
        each, so that all of it comes from the disk); bytes read from the disk a sample; how much of the time goes into drawing noise.
        The copy to the GPU is not part of it.
"""

import argparse
import mmap
import os
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))
from shared import load_script

NEEDED = 60  # samples/s that one GPU may ask for


def disk_bytes() -> int:
    """Bytes that this process has had read from the disk."""
    return next(int(line.split()[1]) for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("read_bytes"))


def drop(stream) -> None:
    """Unmap the latents' pages and drop them from the page cache."""
    for suite in stream.suites:
        suite.latents.base.madvise(mmap.MADV_DONTNEED)
        with open(suite.latents.filename, "rb") as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("work/synthetic"), help="folder of tests/bench/synthetic.py")
    parser.add_argument("--batches", type=int, default=100, help="micro-batches of each measurement")
    parser.add_argument("--micro-batch", type=int, default=32, help="samples of one")
    args = parser.parse_args()
    import torch

    from common import console, cosmos3, libero, quantile

    torch.set_num_threads(1)
    stage = load_script("05_train_fsdp2")
    cache = args.work / "cache"
    manifest = libero.read_manifest(cache)
    stream = stage.Stream(cache, manifest, quantile.load_stats(cache / "stats.json"), 64, 42)
    flags = stage.parse_args(["--global-batch", str(args.micro_batch), "--micro-batch", str(args.micro_batch)])
    latent_bytes = stream.suites[0].latents[0].nbytes

    def rate(first: int, cold: bool) -> float:
        make = stream.batch

        def cold_batch(samples):
            drop(stream)
            return make(samples)

        stream.batch = cold_batch if cold else make
        batches = stage.micro_batches(stream, first, flags, args.micro_batch, 0, 1, pin=False)
        next(batches)
        read, start = disk_bytes(), time.perf_counter()
        for _ in range(args.batches):
            next(batches)
        seconds, read = time.perf_counter() - start, disk_bytes() - read
        batches.close()
        stream.batch = make
        samples = args.batches * args.micro_batch
        what = f"{samples / seconds:.0f} samples/s, {samples / seconds / NEEDED:.1f} times what {NEEDED} samples/s need"
        console.ok("cold" if cold else "warm", f"{what}; {read / samples / 1000:.0f} kB from the disk a sample")
        return samples / seconds

    size = sum(suite.latents.nbytes for suite in stream.suites)
    console.plan("cache", f"{console.human_bytes(size)} of latents, {latent_bytes / 1000:.0f} kB a sample; micro-batch {args.micro_batch}")
    cold = rate(0, cold=True)
    first = args.micro_batch * (args.batches + 2)
    stream.batch(range(first, first + args.micro_batch * (args.batches + 2)))  # into the page cache
    warm = rate(first, cold=False)

    start = time.perf_counter()
    for n in range(200):
        cosmos3.sample_noise(42, n, stream.shape, (16, 10))
    noise = (time.perf_counter() - start) / 200
    console.ok("time", f"{1000 / warm:.2f} ms a sample, {noise * warm:.0%} of it drawing its noise")
    console.done("bench/dataloader", cold=f"{cold:.0f}", warm=f"{warm:.0f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
