"""A base and an encoded cache of real widths with random contents, for measuring where no download is possible.

Run:    python tests/bench/synthetic.py --layers 36 --out work/synthetic
Writes: OUT/Cosmos3-Nano (transformer/ at Nano width with --layers layers in bf16: 28.3 GiB at 36; the other components tiny) and OUT/cache

The prompts' keys and values are computed by stage 04's own code at full width. Latents and actions have the real shapes and can be learned: a
suite is one long trajectory of 16 slow oscillations, the same in all; a window's latents are a fixed mixture of them, its actions seven of them (the
gripper: the sign of one).
"""

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

import numpy as np

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))
from shared import load_script

from common import console, keys, libero, quantile, tiny, weights
from common.libero import LIBERO

# Cosmos3-Nano's own widths; everything else of the config is as in the stand-in.
WIDTHS = {
    "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
}  # fmt: skip
SHARD_BYTES = 5_000_000_000


def write_base(folder: Path, layers: int, device) -> None:
    """A folder in the published layout. Weights: N(0, 0.02), norms near one, so that activations stay of order one through all layers."""
    import torch
    from safetensors.torch import save_file

    tiny.write_cosmos3_nano(folder)
    shutil.rmtree(folder / "transformer")
    (folder / "transformer").mkdir()
    config = tiny.TRANSFORMER | WIDTHS | {"num_hidden_layers": layers}
    (folder / "transformer/config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    generator = torch.Generator(device).manual_seed(0)
    shards, size = [{}], 0
    for key, shape in keys.shapes(config).items():
        value = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=generator)
        nbytes = 2 * value.numel()
        if size + nbytes > SHARD_BYTES:
            shards, size = [*shards, {}], 0
        size += nbytes
        shards[-1][keys.to_diffusers(key)] = (value + 1 if "norm" in key else value).cpu()
    weight_map = {}
    for i, shard in enumerate(shards):
        name = f"diffusion_pytorch_model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / "transformer" / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    (folder / "transformer" / weights.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_cache(folder: Path, base: Path, windows: int, device) -> None:
    """The encoded cache of four suites with `windows` windows each, ten tasks a suite."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    encode = load_script("04_fetch_libero")
    rng, shape = np.random.default_rng(0), [48, 5, 10, 20]
    texts = ["", *(libero.build_prompt(f"pick up object {i} and place it in the basket on the table", 0, 20.0) for i in range(10))]
    folder.mkdir(parents=True)
    source = weights.open_source(base)
    tokenizer = libero.load_tokenizer(base / "text_tokenizer")
    encode.encode_prompts([libero.prompt_ids(tokenizer, t) for t in texts], source, device, folder / "prompt_kv.safetensors")
    frequency, phase = rng.uniform(0.02, 0.3, 16), rng.uniform(0, 2 * np.pi, 16)
    mixture = rng.standard_normal((16, shape[0] * shape[2] * shape[3]), np.float32) / 8**0.5  # unit variance: a sine's is a half
    for suite in LIBERO.suites:
        (folder / suite).mkdir()
        state = np.sin(np.arange(windows + LIBERO.chunk + 1)[:, None] * frequency + phase).astype(np.float32)
        with open(folder / suite / "latents.bin", "wb") as f:
            for i in range(windows):  # a latent frame every four steps
                frames = state[i : i + LIBERO.chunk + 1 : 4] @ mixture + rng.normal(0, 0.1, (shape[1], mixture.shape[1])).astype(np.float32)
                latents = frames.reshape(shape[1], shape[0], *shape[2:]).swapaxes(0, 1)
                f.write((np.ascontiguousarray(latents).view(np.uint32) >> 16).astype(np.uint16).tobytes())
        action = 0.9 * state[:-1, :7]
        action[:, 3:6] *= 0.3
        action[:, 6] = action[:, 6] > 0
        np.save(folder / suite / "actions.npy", action)
        column = {
            "start": np.arange(windows, dtype=np.int32),
            "prompt": rng.integers(1, len(texts), windows),
            "variants": np.ones(windows, np.int64),
        }
        pq.write_table(
            pa.table({**column, "val": np.arange(windows) < 1, "bad": np.zeros(windows, bool)}), folder / suite / "windows.parquet"
        )
    shutil.copy(quantile.BUILT_IN, folder / "stats.json")
    stats = quantile.load_stats(folder / "stats.json")
    manifest = {
        "version": libero.CACHE_VERSION,
        "base_fingerprint": weights.base_fingerprint(source),
        "robot": LIBERO.describe(),
        "canvas": vars(libero.mosaic_canvas(LIBERO)),
        "latent_shape": shape,
        "fps": LIBERO.fps,
        "stats": {"file": "stats.json", "block": stats.block, "sha256": stats.sha256},
        "vae_fingerprint": weights.folder_fingerprint(base / "vae"),
        "stride": 1,
        "prompts": texts,
        "suites": {s: {"windows": windows, "val_windows": 1} for s in LIBERO.suites},
    }
    console.write_json(folder / "manifest.json", manifest)
    (folder / "COMPLETE").touch()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--layers", type=int, default=36, help="decoder layers")
    parser.add_argument("--windows", type=int, default=1000, help="windows a suite")
    parser.add_argument("--out", type=Path, default=Path("work/synthetic"), help="folder to write")
    args = parser.parse_args()
    import torch

    device, start = torch.device("cuda" if torch.cuda.is_available() else "cpu"), time.monotonic()
    write_base(args.out / "Cosmos3-Nano", args.layers, device)
    console.ok("base", f"{time.monotonic() - start:.1f} s")
    write_cache(args.out / "cache", args.out / "Cosmos3-Nano", args.windows, device)
    console.done("synthetic", out=args.out, layers=args.layers, seconds=round(time.monotonic() - start, 1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
