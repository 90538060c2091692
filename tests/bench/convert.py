"""Stages 03 and 06 against a plain copy of the same bytes on the same disk, at two sizes: time and memory.

Run:    python tests/bench/convert.py --work work/bench_convert --gib 1 4          # random tensors in the published layout
        python tests/bench/convert.py --work work/bench_convert --base work/synthetic/Cosmos3-Nano      # one base that exists, at its own size
Prints a row for each size and step: seconds of the clock and of processors, ratios to `cp` of as many bytes, peak of anonymous memory (RssAnon: what the process itself
holds; the mapped file pages that RssFile counts are page cache) and of all resident memory, sampled every 5 ms. Every step ends with the
bytes on the disk (fsync), the copy too. The steps verify what they wrote by reading it back; the copy does not.
Disk: three times the base at most, twice with --shelf /dev/shm; each output is deleted when it is measured. Shards of 256 MiB for --gib, so that one shard is the same at both sizes.
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from common import console, keys, tiny, weights

SHARD_BYTES = 2**28
# Nano's own layers, 0.72 GiB each in bf16; the vocabulary is small, so that the number of layers sets the size.
WIDTHS = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 8192,
}


def write_base(folder: Path, gib: float) -> None:
    """A folder in the published layout whose transformer weighs about `gib` GiB."""
    import torch

    tiny.write_cosmos3_nano(folder)
    shutil.rmtree(folder / "transformer")
    (folder / "transformer").mkdir()
    config = tiny.TRANSFORMER | WIDTHS
    one, two = (sum(2 * torch.Size(s).numel() for s in keys.shapes(config | {"num_hidden_layers": n}).values()) for n in (1, 2))
    config["num_hidden_layers"] = max(1, round((gib * 2**30 - one) / (two - one)) + 1)
    console.write_json(folder / "transformer/config.json", config)
    generator = torch.Generator().manual_seed(0)
    shards, size = [{}], 0
    for key, shape in keys.shapes(config).items():
        nbytes = 2 * torch.Size(shape).numel()
        if size + nbytes > SHARD_BYTES and shards[-1]:
            shards, size = [*shards, {}], 0
        size += nbytes
        shards[-1][keys.to_diffusers(key)] = (shape, "torch.bfloat16")
    weight_map = {}
    for i, shard in enumerate(shards):
        name = f"diffusion_pytorch_model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        weights.write_safetensors(
            folder / "transformer" / name, shard, lambda n, shard=shard: torch.randn(shard[n][0], generator=generator).to(torch.bfloat16)
        )
        weight_map |= dict.fromkeys(shard, name)
    console.write_json(folder / "transformer" / weights.INDEX, {"metadata": {}, "weight_map": weight_map})


def measured(argv: list) -> dict:
    """{seconds, cpu, anonymous, resident} of a command; memory in bytes, the largest of samples taken every 5 ms."""
    peak = {"RssAnon": 0, "VmRSS": 0}
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    child = subprocess.Popen([str(a) for a in argv], stdout=subprocess.DEVNULL, cwd=REPO)
    while child.poll() is None:
        try:
            lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
        except OSError:  # it ended in between
            continue
        for line in lines:
            name = line.split(":")[0]
            if name in peak:
                peak[name] = max(peak[name], 1024 * int(line.split()[1]))
        time.sleep(0.005)
    seconds, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if child.returncode:
        raise SystemExit(f"{argv} ended with {child.returncode}")
    return {"seconds": seconds, "cpu": cpu, "anonymous": peak["RssAnon"], "resident": peak["VmRSS"]}


def bench(base: Path, work: Path, targets: list[str], repeat: int, shelf: Path | None) -> list[dict]:
    """Copy, 03, and 06 from the DCP to each target; outputs are deleted as soon as nothing needs them."""
    transformer = base / "transformer"
    nbytes = sum(f.stat().st_size for f in transformer.iterdir())
    dcp, out = work / "dcp", work / "out"
    subprocess.run(f"cat {transformer}/* > /dev/null", shell=True, check=True)  # all start from the same page cache
    rows = []

    def row(step, argv, out, keep=False):
        """Measure `repeat` times; the fastest counts, since a shared machine only ever adds."""
        runs = []
        for i in range(repeat):
            os.sync()
            runs.append(measured(argv))
            if not (keep and i == repeat - 1):
                shutil.rmtree(out) if out.is_dir() else out.unlink()
        best = {k: min(r[k] for r in runs) for k in ("seconds", "cpu")}
        most = {k: max(r[k] for r in runs) for k in ("anonymous", "resident")}
        rows.append({"step": step, "gib": nbytes / 2**30, **best, **most})

    row("cp", ["sh", "-c", f"cp -r {transformer} {out} && find {out} -exec sync {{}} +"], out)
    row("03 to DCP", [sys.executable, "03_base_to_dcp.py", "--base", base, "--out", dcp], dcp, keep=True)
    if shelf:
        dcp = Path(shutil.move(dcp, shelf))
    for target in targets:
        row(f"06 to {target}", [sys.executable, "06_convert_ckpt.py", "--src", dcp, "--base", base, "--out", out, "--to", target], out)
    shutil.rmtree(dcp)
    for r in rows:
        r["ratio"] = r["seconds"] / rows[0]["seconds"]
        console.ok(
            r["step"],
            f"{r['gib']:.2f} GiB in {r['seconds']:.2f} s ({r['cpu']:.2f} of processors), {r['ratio']:.2f} x cp; "
            f"{r['anonymous'] / 2**20:.0f} MiB anonymous, "
            f"{r['resident'] / 2**20:.0f} MiB resident",
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("work/bench_convert"), help="folder for inputs and outputs, deleted afterwards")
    parser.add_argument("--gib", type=float, nargs="+", default=[1, 4], help="sizes of the random bases")
    parser.add_argument("--base", type=Path, help="a diffusers folder that exists, instead of random ones; it is left as it is")
    parser.add_argument("--targets", nargs="+", default=["diffusers"], choices=["diffusers", "rlinf", "cosmos-dcp"], help="what 06 writes")
    parser.add_argument(
        "--shelf", type=Path, help="where the DCP waits while 06 runs: a RAM disk, if the disk has no room for three copies"
    )
    parser.add_argument("--repeat", type=int, default=3, help="runs of each step, of which the fastest counts")
    parser.add_argument("--json", type=Path, help="write the rows as JSON to this file")
    args = parser.parse_args()
    if args.work.exists():
        raise SystemExit(f"{args.work} exists: delete it, or pass another --work")
    work, rows = args.work.resolve(), []
    shelf = args.shelf and args.shelf.resolve() / f"bench_convert_{os.getpid()}"
    work.mkdir(parents=True)
    try:
        for gib in [None] if args.base else args.gib:
            base = args.base.resolve() if args.base else work / f"base_{gib:g}"
            if not args.base:
                write_base(base, gib)
            rows += bench(base, work, args.targets, args.repeat, shelf)
            if not args.base:
                shutil.rmtree(base)
    finally:
        shutil.rmtree(work)
        if shelf:
            shutil.rmtree(shelf, ignore_errors=True)
    if not args.base and len(args.gib) > 1:  # what another GiB costs: without the seconds that Python and torch take to start
        small, large = ([r for r in rows if r["gib"] == gib] for gib in (min(r["gib"] for r in rows), max(r["gib"] for r in rows)))
        per = [[(b[k] - a[k]) / (b["gib"] - a["gib"]) for k in ("seconds", "cpu")] for a, b in zip(small, large, strict=True)]
        for a, b, (seconds, cpu) in zip(small, large, per, strict=True):
            more = (b["anonymous"] - a["anonymous"]) / 2**20
            console.ok(
                f"{a['step']}, per GiB more",
                f"{seconds:.2f} s, {seconds / per[0][0]:.2f} x cp; {cpu:.2f} s of processors, {cpu / per[0][1]:.2f} x cp; {more:+.0f} MiB in all",
            )
    blank = measured([sys.executable, "-c", "import torch, torch.distributed.checkpoint"])
    console.ok("importing torch alone", f"{blank['seconds']:.2f} s, {blank['anonymous'] / 2**20:.0f} MiB anonymous")
    if args.json:
        console.write_json(args.json, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
