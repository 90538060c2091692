"""What a chunk costs at real widths: stage 08's sampler against a loop over stock diffusers, in one run.

Run:    python tests/bench/synthetic.py --layers 36 --windows 1 --out work/synthetic        (once: 28.3 GiB)
        python tests/bench/latency.py --base work/synthetic/Cosmos3-Nano
Prints  p50 of a chunk at each number of steps for: stock (both towers every step, a 17-frame clip through the VAE, two schedulers); stage 08 eager;
        stage 08 --compile; their ratios; how far the two agree; and the table of `08 latency` for the compiled one.
Needs no lerobot. The base gets a VAE of Wan2.2's size with random weights, a policy.json and a stats.json, if it has none.
"""

import argparse
import shutil
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))
from shared import WAN22, load_script


def make_policy(base: Path, real_vae: bool) -> None:
    """Turn a base folder of random weights into a policy folder."""
    import torch
    from diffusers import AutoencoderKLWan

    from common import console, libero, quantile, tiny
    from common.libero import LIBERO

    if (base / "policy.json").is_file():
        return
    if real_vae:
        shutil.rmtree(base / "vae")
        torch.manual_seed(0)
        AutoencoderKLWan(**(tiny.VAE | WAN22)).to(torch.bfloat16).save_pretrained(base / "vae")
    shutil.copy(quantile.BUILT_IN, base / "stats.json")
    stats = quantile.load_stats(base / "stats.json")
    recorded = {"file": "stats.json", "block": stats.block, "sha256": stats.sha256}
    console.write_json(
        base / "policy.json",
        {"robot": LIBERO.describe(), "canvas": vars(libero.mosaic_canvas(LIBERO)), "fps": LIBERO.fps, "stats": recorded},
    )


def stock_loop(stage, base: Path, device, picture, text: str):
    """A chunk as stock diffusers' pipeline makes it, the index tensors made once: function of the number of steps -> normalized actions [16, 10]."""
    import torch
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler

    from common import cosmos3, libero, wan_vae, weights
    from common.libero import LIBERO
    from common.stock import stock_inputs

    source = weights.open_source(base)
    model = cosmos3.build_transformer(weights.read_config(source)).to(torch.bfloat16)
    model.time_embedder.float()  # as from_pretrained keeps it
    weights.load_module(cosmos3.materialize(model, device), source)
    vae = AutoencoderKLWan.from_pretrained(base / "vae", torch_dtype=torch.bfloat16).to(device)
    mean, inv_std = (
        torch.tensor(v, device=device).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, [1 / s for s in vae.config.latents_std])
    )
    ids = torch.from_numpy(libero.prompt_ids(libero.load_tokenizer(base / "text_tokenizer"), text)).to(device)
    clean = torch.tensor([True] + [False] * 4, device=device), torch.zeros(LIBERO.chunk, dtype=torch.bool, device=device)
    inputs = stock_inputs(ids, *clean)
    noise = cosmos3.sample_noise(0, 0, (48, 5, 10, 20), (LIBERO.chunk, LIBERO.raw_action_dim))

    @torch.no_grad()
    def stock(steps: int) -> np.ndarray:
        clip = stage.picture_frames(picture).repeat(LIBERO.frames, 1, 1, 1).transpose(0, 1)[None]
        frame = ((vae.encode(wan_vae.to_pixels(clip, device)).latent_dist.mean.float() - mean) * inv_std)[:, :, :1, :10, :20]
        x = torch.from_numpy(noise.vision).to(device)[None]
        x[:, :, :1] = frame
        a = torch.nn.functional.pad(torch.from_numpy(noise.action).to(device), (0, 54))
        solvers = []
        for _ in range(2):
            solvers.append(UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0))
            solvers[-1].set_timesteps(sigmas=np.linspace(0.999, 0, steps + 1)[:-1])
            solvers[-1].set_begin_index(0)
        for t in solvers[0].timesteps:
            found = model(
                **inputs,
                vision_tokens=[x.bfloat16()],
                action_tokens=[a.bfloat16()],
                vision_timesteps=torch.full((200,), float(t), device=device),
                action_timesteps=torch.full((LIBERO.chunk,), float(t), device=device),
            )
            x = solvers[0].step(found[0][0].float().view(x.shape), t, x, return_dict=False)[0]
            x[:, :, :1] = frame
            a = solvers[1].step(found[2][0].float(), t, a, return_dict=False)[0]
            a[:, LIBERO.raw_action_dim :] = 0
        return a[:, : LIBERO.raw_action_dim].cpu().numpy()

    return stock


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--base", type=Path, default=Path("work/synthetic/Cosmos3-Nano"), help="folder of tests/bench/synthetic.py")
    parser.add_argument("--steps", type=int, nargs="+", default=[4, 30], help="numbers of denoising steps")
    parser.add_argument("--repeats", type=int, default=10, help="timed chunks for each")
    parser.add_argument("--tiny-vae", action="store_true", help="keep the stand-in's VAE (CPU)")
    args = parser.parse_args()

    import torch

    from common import console

    stage = load_script("08_eval_policy")
    make_policy(args.base, not args.tiny_vae)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record, stats = stage.read_policy(args.base)
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 256, (1, 256, 512, 3), np.uint8)
    text = stage.prompt_of("pick up the black bowl between the plate and the ramekin and place it on the plate", "trained")

    def clock(call) -> float:
        """Median seconds of a call, the device's work included."""
        times = []
        for _ in range(args.repeats + 2):
            start = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return float(np.median(times[2:]))

    stock = stock_loop(stage, args.base, device, picture, text)
    seconds, reference = {}, {}
    for n in args.steps:
        seconds["stock", n], reference[n] = clock(partial(stock, n)), stock(n)
    del stock  # and with it the model
    if device.type == "cuda":
        torch.cuda.empty_cache()
    for name, flags in (("eager", []), ("compiled", ["--compile"])):
        policy = stage.Policy(stage.parse_args(["latency", "--model", str(args.base), *flags]), record, stats)
        for n in args.steps:
            policy.steps = n
            seconds[name, n] = clock(lambda policy=policy: policy.act(stage.picture_frames(picture), [text], [0]))
            ours = policy.stats.normalize(policy.act(stage.picture_frames(picture), [text], [0])[0])
            apart = np.linalg.norm(ours - reference[n]) / np.linalg.norm(reference[n])
            ratio = seconds["stock", n] / seconds[name, n]
            console.ok(
                f"{n} steps, {name}",
                f"{1e3 * seconds[name, n]:.1f} ms; stock {1e3 * seconds['stock', n]:.1f} ms; {ratio:.2f}x; actions {apart:.1e} of their norm apart",
            )
        del policy
    stage.main(["latency", "--model", str(args.base), "--compile", "--repeats", str(max(10, args.repeats))])
    gpu = torch.cuda.get_device_name().replace(" ", "-") if device.type == "cuda" else "cpu"
    console.done("bench/latency", gpu=gpu, **{f"ratio_{n}": f"{seconds['stock', n] / seconds['compiled', n]:.2f}" for n in args.steps})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
