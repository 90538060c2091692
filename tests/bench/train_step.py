"""The trainer at full Nano width on this machine's GPUs: how fast, and how far from what the chip can do.

Run:    python tests/bench/synthetic.py --layers 36 --windows 400 --out work/synthetic
        python tests/bench/train_step.py --work work/synthetic --gpus 1 -- --micro-batch 32 --compile
Prints  in one run: the bf16 matrix rate (8192 cubed, random data; before and under load), the stock diffusers forward and backward one sample at a time, and
        05_train_fsdp2.py itself, launched as a user does with the flags after `--`: samples/s of the steady steps, useful TFLOP/s,
        their share of the matrix rate, peak memory, waiting for data. Then the time of a 2048-sample step and of 5,000 steps on 8 GPUs,
        modelled from the measured rate; communication is not measured there but bounded from both sides.

Useful FLOP a sample: three times the generation tower's forward (3.695 TFLOP linear) and 3.5 times its attention (0.064 TFLOP); what is
recomputed does not count.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))
from shared import load_script, matrix_rates, train_command

NANO_LAYERS = 36
LINEAR, ATTENTION = 3.695e12, 0.064e12  # FLOP of a sample's forward at 36 layers and 266 generation tokens
LINK = 370e9  # bytes/s that a ring reduce-scatter or all-gather moves a GPU over NVLink of 450 GB/s a direction; assumed, not measured


def stock_loop(base: Path, samples: int) -> dict:
    """Samples/s of the stock diffusers transformer, one sample a forward and backward, with the trained tensors' gradients only."""
    import time

    import torch

    from common import cosmos3, keys, weights
    from common.stock import stock_forward

    source = weights.open_source(base)
    model = cosmos3.materialize(cosmos3.build_transformer(weights.read_config(source)).to(torch.bfloat16), torch.device("cuda"))
    weights.load_module(model, source)
    trained = {keys.to_diffusers(n) for n in keys.trained(keys.shapes(weights.read_config(source), sound=False))}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    frames, actions = torch.tensor([True, False, False, False, False], device="cuda"), torch.zeros(16, dtype=torch.bool, device="cuda")
    ids = torch.arange(140, device="cuda")
    torch.manual_seed(0)
    x, a = torch.randn(1, 48, 5, 10, 20, device="cuda").bfloat16(), torch.randn(16, 64, device="cuda").bfloat16()
    for i in range(samples + 2):
        if i == 2:
            torch.cuda.synchronize()
            start = time.perf_counter()
        outputs = stock_forward(model, ids, x, a, 0.7, frames, actions)
        sum(o.float().square().mean() for o in outputs).backward()
    torch.cuda.synchronize()
    return {"stock": samples / (time.perf_counter() - start)}


def profile(args) -> None:
    """Where the GPU's time goes in the last step: stage 05 in this process under torch's profiler, kernels summed by what they do."""
    from torch.profiler import ProfilerActivity, profile

    stage = load_script("05_train_fsdp2")
    shutil.rmtree(args.work / "bench_run", ignore_errors=True)
    command = [*train_command(args.work, 1, args.work / "bench_run"), *trainer_flags(args)]
    argv = command[command.index("--base") :]
    prof, calls, loss_of = profile(activities=[ProfilerActivity.CUDA]), [], stage.loss_of
    first = (args.steps - 1) * args.global_batch // stage.parse_args(argv).micro_batch

    def watched(*rest):
        calls.append(0)
        if len(calls) == first + 1:
            prof.start()
        return loss_of(*rest)

    stage.loss_of = watched
    stage.main(argv)
    prof.stop()
    kinds = {
        "matrix products": ("gemm", "nvjet", "cutlass", "cublas"),
        "attention": ("fmha", "flash", "attention", "sdpa", "cudnn"),
        "compiled pointwise": ("triton",),
        "optimizer and norms": ("multi_tensor", "lpnorm", "adam"),
        "copies between host and device": ("memcpy htod", "memcpy dtoh"),
    }
    total = {}
    events = [e for e in prof.key_averages() if e.self_device_time_total]
    for e in events:
        name = e.key.lower()
        kind = next((k for k, parts in kinds.items() if any(p in name for p in parts)), "everything else")
        total[kind] = total.get(kind, 0) + e.self_device_time_total
    whole = sum(total.values())
    for kind, spent in sorted(total.items(), key=lambda kv: -kv[1]):
        print(f"{spent / whole:7.1%}  {kind}")
    for e in sorted(events, key=lambda e: -e.self_device_time_total)[:28]:
        print(f"{e.self_device_time_total / whole:7.1%} {e.count:6d} x {e.self_device_time_total / e.count:9.1f} us  {e.key[:150]}")


def child(*argv) -> dict:
    """Run one measurement in a process of its own, so that its memory is free again for the next."""
    run = subprocess.run([sys.executable, __file__, *map(str, argv)], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(run.stdout.splitlines()[-1])


def trainer_flags(args) -> list[str]:
    return ["--ema", "off", "--steps", str(args.steps), "--global-batch", str(args.global_batch), *args.flags]


def trainer(args) -> list[dict]:
    """Launch stage 05; -> the figures of its steady [step] lines (the first two, with compilation, are left out)."""
    command = [*train_command(args.work, args.gpus, args.work / "bench_run"), *trainer_flags(args)]
    shutil.rmtree(args.work / "bench_run", ignore_errors=True)
    steps = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith("[step] "):
                steps.append({k: float(v) for k, v in re.findall(r"([\w/]+):([-+.\de]+)", line)})
    if process.returncode:
        raise SystemExit(process.returncode)
    return steps[2:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("work/synthetic"), help="folder of tests/bench/synthetic.py")
    parser.add_argument("--gpus", type=int, default=1, help="ranks of the trainer")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps; the first two are not counted")
    parser.add_argument("--global-batch", type=int, default=256, help="samples a step")
    parser.add_argument("--samples", type=int, default=10, help="samples of the stock loop; 0 leaves it out")
    parser.add_argument("--profile", action="store_true", help="no figures: the kernels of a run, summed by what they do")
    parser.add_argument("--child", choices=("matmul", "stock"), help=argparse.SUPPRESS)
    parser.add_argument("flags", nargs="*", help="after --: flags of 05_train_fsdp2.py; the last of a flag given twice holds")
    args = parser.parse_args()
    if args.child:
        print(json.dumps({"matmul": matrix_rates()} if args.child == "matmul" else stock_loop(args.work / "Cosmos3-Nano", args.samples)))
        return 0
    if args.profile:
        profile(args)
        return 0
    from common import console, keys, weights

    layers = weights.read_config(weights.open_source(args.work / "Cosmos3-Nano"))["num_hidden_layers"]
    flop = (3 * LINEAR + 3.5 * ATTENTION) * layers / NANO_LAYERS
    cool, matmul = child("--child", "matmul")["matmul"]
    console.ok("matmul", f"{matmul / 1e12:.0f} TFLOP/s under load, {cool / 1e12:.0f} before: 8192 cubed, bf16")
    stock = child("--child", "stock", "--work", args.work, "--samples", args.samples)["stock"] if args.samples else None
    if stock:
        console.ok("stock", f"{stock:.2f} samples/s, one sample a forward")
    steady = trainer(args)
    if not steady:
        raise SystemExit("no steady step: raise --steps")
    mean = {k: sum(s[k] for s in steady) / len(steady) for k in steady[0]}
    rate = mean["samples/s"] / args.gpus
    console.ok("trainer", f"{mean['samples/s']:.1f} samples/s, {rate:.1f} a GPU, over {len(steady)} steps of {args.global_batch}")
    console.ok(
        "useful",
        f"{rate * flop / 1e12:.0f} TFLOP/s a GPU, {rate * flop / matmul:.1%} of the matrix rate under load, {rate * flop / cool:.1%} of that before",
    )
    console.ok("peak", f"{mean['peak_gib']:.1f} GiB a GPU")
    console.ok("data", f"{mean['data_s'] / mean['s']:.2%} of the step is waiting for data")
    if stock:
        console.ok("ratio", f"{rate / stock:.1f} times the stock loop")
    compute = 2048 / 8 / rate
    moved = keys.NANO_TRAINED[1] * layers / NANO_LAYERS * 7 / 8 / LINK  # seconds per byte of each weight that a ring of eight moves
    gathers = moved * 2 * 2 * compute * rate / 32  # bf16, forward and backward of each micro-batch of 32
    reduces = moved * 4  # float32, once a step
    low, high = compute, compute + gathers + reduces
    console.ok(
        "8 GPUs",
        f"modelled: {low:.1f} s a step of 2048 if all communication hides behind computation, {high:.1f} s if none does; "
        f"5,000 steps in {low * 5000 / 3600:.1f} to {high * 5000 / 3600:.1f} h",
    )
    facts = {"samples_per_s": f"{mean['samples/s']:.1f}", "share": f"{rate * flop / matmul:.3f}", "peak_gib": f"{mean['peak_gib']:.1f}"}
    console.done("bench/train_step", gpus=args.gpus, **facts)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
