"""Stage 04's encode against the per-window way, and the VAE of real size on a GPU.

Run:    python tests/bench/encode.py                    (CPU: demonstration data, the stand-in's VAE)
        python tests/bench/encode.py --device cuda      (GPU: random weights of Wan2.2's size, decoded frames in memory)
Prints  windows/s of both ways in one run and their ratio. On a GPU: clips/s of the stock encode and of ours, and ours as a share of
        the matrix rate measured beside it.
The per-window way opens the video and decodes 17 frames of both cameras to float, makes the canvas, and runs the stock VAE at batch 1.
"""

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))
from shared import WAN22, load_script, matrix_rates


def per_window(suite, vae, episode: int, first: int):
    """One window the per-window way. -> latents bf16 [48, 5, 10, 20]"""
    import torch
    from lerobot.datasets.video_utils import decode_video_frames

    from common import libero

    views = []
    for camera in suite.robot.cameras:
        row = suite.episodes[episode]
        place = {k: row[f"videos/{camera}/{k}"] for k in ("chunk_index", "file_index")}
        path = suite.root / suite.video_path.format(video_key=camera, **place)
        seconds = row[f"videos/{camera}/from_timestamp"] + suite.timestamp[suite.start[episode] :][first : first + 17]
        views.append(decode_video_frames(path, seconds.tolist(), 1e-4, backend="pyav"))
    frames = libero.snap((torch.cat(views, -1) * 255).clamp(0, 255).to(torch.uint8))
    mu = vae.encode((frames.transpose(0, 1)[None].float() / 127.5 - 1).to(torch.bfloat16)).latent_dist.mean
    return mu[0, :, :, :10, :20]


def on_cpu(windows: int) -> None:
    import torch
    from diffusers import AutoencoderKLWan

    from common import console, libero, tiny

    stage, data = load_script("04_fetch_libero"), REPO / "tests/data/libero_demo"
    with tempfile.TemporaryDirectory() as tmp, torch.no_grad():
        base = Path(tmp) / "base"
        tiny.write_cosmos3_nano(base)
        suite = libero.read_suite(data / "libero_goal")
        vae = AutoencoderKLWan.from_pretrained(base / "vae", torch_dtype=torch.bfloat16)
        rng = np.random.default_rng(0)
        column = libero.windows(suite)
        picked = rng.permutation(len(column["start"]))[:windows]  # a training loader asks in random order
        places = [(int(e), int(s - suite.start[e])) for e, s in zip(column["episode"][picked], column["start"][picked], strict=True)]
        per_window(suite, vae, *places[0])
        start = time.perf_counter()
        for place in places:
            per_window(suite, vae, *place)
        theirs = len(places) / (time.perf_counter() - start)

        argv = [
            "encode",
            "--data",
            str(data),
            "--suites",
            "libero_goal",
            "--base",
            str(base),
            "--out",
            str(Path(tmp) / "cache"),
            "--batch",
            "2",
        ]
        args = stage.parse_args(argv)
        plan = stage.plan_encode(args)
        stage.lay_out(plan, force=False)
        start = time.perf_counter()
        stage.encode_windows(args, plan, 0, 1)
        ours = len(column["start"]) / (time.perf_counter() - start)
    console.ok("per window", f"{theirs:.2f} windows/s over {len(places)}")
    console.ok("encode", f"{ours:.2f} windows/s over {len(column['start'])}, start-up of the VAE included")
    console.done("bench/encode", ratio=f"{ours / theirs:.2f}", threads=torch.get_num_threads())


def on_gpu(seconds: float) -> None:
    import torch
    from diffusers import AutoencoderKLWan
    from torch.utils.flop_counter import FlopCounterMode

    from common import console, tiny, wan_vae

    stage, device = load_script("04_fetch_libero"), torch.device("cuda")

    def rate(call, count: int) -> float:
        """Things a second, of calls that each do `count`, after two of warm-up."""
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        start, calls = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            call()
            torch.cuda.synchronize()
            calls += 1
        return count * calls / (time.perf_counter() - start)

    cool, matrix = matrix_rates()
    console.ok("matmul", f"{matrix / 1e12:.0f} TFLOP/s under load, {cool / 1e12:.0f} before: 8192 cubed, bf16")
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        torch.manual_seed(0)
        with device:
            vae = AutoencoderKLWan(**(tiny.VAE | WAN22)).to(torch.bfloat16).eval()
        vae.save_pretrained(folder)
        frames = torch.randint(0, 256, (200, 3, 192, 320), dtype=torch.uint8, device=device)
        pixels = wan_vae.to_pixels(frames, device)
        first = list(range(len(frames) - 16))

        def clips(n):
            return torch.stack([pixels[s : s + 17] for s in first[:n]]).transpose(1, 2).contiguous()

        with FlopCounterMode(display=False) as counter:
            vae.encode(clips(1))
        flop = counter.get_total_flops()
        stock = {}
        for n in (1, 8, 16):
            x = clips(n)
            stock[n] = rate(partial(vae.encode, x), n)
            console.ok(f"stock, batch {n}", f"{stock[n]:.1f} clips/s")
        reference = vae.encode(clips(8)).latent_dist.mean[..., :10, :20]
        single = vae.float().encode(clips(8).float()).latent_dist.mean[..., :10, :20]
        for compiled in (False, True):
            start = time.perf_counter()
            encoder = wan_vae.WanEncoder(folder, 10, 20, device, compiled)
            ours = stage.encode_clips(encoder, pixels, first[:8], 8, fixed=True)
            ready = time.perf_counter() - start
            spread = single.std()
            scaled = ours.to(device).float() * 0.15  # the stand-in's latents_std
            apart = [
                ((x - y).float().norm() / single.norm()).item() for x, y in ((scaled, reference), (scaled, single), (reference, single))
            ]
            torch.cuda.reset_peak_memory_stats()
            value = rate(partial(stage.encode_clips, encoder, pixels, first, 8, fixed=True), len(first))
            console.ok(
                f"encode, batch 8, {'compiled' if compiled else 'eager'}",
                f"{value:.1f} clips/s = {value * flop / 1e12:.0f} TFLOP/s = {value * flop / matrix:.0%} of the matrix rate, {value / stock[1]:.1f}x stock batch 1, "
                f"{value / stock[16]:.2f}x stock batch 16; peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB; ready after {ready:.0f} s; "
                f"{apart[0]:.1e} of its norm from the stock encode, from float32: ours {apart[1]:.1e}, stock {apart[2]:.1e} (spread {spread:.2f})",
            )
    console.done("bench/encode", tflop_per_clip=f"{flop / 1e12:.2f}", gpu=torch.cuda.get_device_name().replace(" ", "-"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="which of the two measurements")
    parser.add_argument("--windows", type=int, default=60, help="windows of the per-window way (CPU)")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each measurement (GPU)")
    args = parser.parse_args()
    on_cpu(args.windows) if args.device == "cpu" else on_gpu(args.seconds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
