"""The batched generation tower against the stock forward at full width, on the machine's own device.

Run:    python tests/bench/parity.py --base work/synthetic/Cosmos3-Nano
Prints the largest output difference and the relative gradient difference, per sample and for the batch, in float32, and the
distance of a bf16 forward of either from the float32 one. Exit 5 if float32 differs by more than 1e-4 of the output's spread.
"""

import argparse
import json
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--base", type=Path, default=Path("work/synthetic/Cosmos3-Nano"), help="diffusers folder")
    args = parser.parse_args()
    import torch

    from common import console, cosmos3, weights
    from common.stock import DOMAIN, FPS, stock_forward

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    config = json.loads((args.base / "transformer/config.json").read_text())
    stock = cosmos3.materialize(cosmos3.build_transformer(config), device)
    weights.load_module(stock, weights.open_source(args.base))
    g = torch.Generator().manual_seed(0)
    lengths = (137, 10, 64)
    ids = [torch.randint(0, 512, (n,), generator=g).to(device) for n in lengths]
    x, a = (torch.randn(shape, generator=g).to(device) for shape in ((3, 48, 5, 10, 20), (3, 16, 64)))
    a[..., 10:] = 0
    sigma = torch.tensor([0.9, 0.31, 0.62], device=device)
    frames, acts = torch.zeros(3, 5, dtype=torch.bool, device=device), torch.zeros(3, 16, dtype=torch.bool, device=device)
    frames[:, 0] = True
    tower, und = cosmos3.GenTower(stock), cosmos3.UndTower(stock)

    def ours(dtype):
        prompts = cosmos3.PromptKV.pad([und(i) for i in ids]).to(device)
        return tower(x.to(dtype), a.to(dtype), sigma, prompts, torch.arange(3, device=device), frames, acts, DOMAIN, FPS)

    def theirs(dtype):
        outputs = [
            stock_forward(stock, ids[i], x[i : i + 1].to(dtype), a[i].to(dtype), float(sigma[i]), frames[i], acts[i]) for i in range(3)
        ]
        return torch.stack([o[0] for o in outputs]), torch.stack([o[1] for o in outputs])

    def grads(outputs):
        stock.zero_grad()
        sum(o.float().square().mean() for o in outputs).backward()
        return {n: p.grad.clone() for n, p in tower.named_parameters()}

    reference, found = theirs(torch.float32), ours(torch.float32)
    spread = [r.std().item() for r in reference]
    worst = max((f - r).abs().max().item() / s for f, r, s in zip(found, reference, spread, strict=True))
    expected, computed = grads(reference), grads(found)
    relative = max(((computed[n] - expected[n]).norm() / expected[n].norm()).item() for n in expected)
    console.ok("float32", f"largest difference {worst:.2e} of the output's spread; gradients {relative:.2e} relative, worst tensor")
    stock.bfloat16()
    with torch.no_grad():
        for name, outputs in (("bf16 stock", theirs(torch.bfloat16)), ("bf16 ours", ours(torch.bfloat16))):
            distance = [((o.float() - r).norm() / r.norm()).item() for o, r in zip(outputs, reference, strict=True)]
            console.ok(name, f"distance from float32: vision {distance[0]:.2e}, action {distance[1]:.2e}")
    if not max(worst, relative) < 1e-4:
        console.fail("parity", "float32 outputs or gradients differ")
        return console.EXIT_VERIFY
    console.done("parity", device=device, layers=config["num_hidden_layers"])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
