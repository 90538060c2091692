"""What one generation layer keeps for its backward pass, eager and compiled: the source of common/budget.py's constants.

Run:  python tests/bench/activations.py            a CPU, about a minute (the compiler); shares are those of 05 --activation-budget
A layer of Nano's proportions (32 query and 8 key/value heads of 128 on 4096 become 4 and 1 on 512, feed-forward three times as wide),
4 samples of 266 tokens behind 140 of text. Parameters and what all layers share are not counted.
"""

import sys
from pathlib import Path

import torch
import torch._functorch.config

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common import cosmos3, fp8, keys, tiny

BATCH, TOKENS, TEXT, WIDTH = 4, 266, 140, 512


def kept_rows(compiled: bool, share: float = 1.0, float8: bool = False) -> float:
    """bf16 rows of hidden width that the layer keeps for each generation token."""
    scale = keys.NANO["hidden_size"] // WIDTH
    config = tiny.TRANSFORMER | {"num_hidden_layers": 1, "hidden_size": WIDTH, "head_dim": keys.NANO["head_dim"]}
    config |= {name: keys.NANO[name] // scale for name in ("intermediate_size", "num_attention_heads", "num_key_value_heads")}
    tower = cosmos3.GenTower(cosmos3.build_transformer(config))
    cosmos3.materialize(tower, torch.device("cpu"))
    layer = tower.layers[0].bfloat16()
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.02)
    if float8:
        fp8.convert(layer)
    if compiled:
        torch.compiler.reset()
        torch._functorch.config.activation_memory_budget = share
        layer.compile()
    shape, kv = (BATCH, TOKENS, config["head_dim"]), (BATCH, TEXT, config["num_key_value_heads"], config["head_dim"])
    x = torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    cos, sin, k, v = (torch.randn(s, dtype=torch.bfloat16) for s in (shape, shape, kv, kv))
    mask = torch.ones(BATCH, 1, 1, TEXT + TOKENS, dtype=torch.bool)
    shared = {t.untyped_storage().data_ptr() for t in (cos, sin, mask, *layer.parameters())}
    kept = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in shared:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = layer(x, cos, sin, k, v, mask)
    out.sum().backward()
    return sum(kept.values()) / (2 * WIDTH * BATCH * TOKENS)


if __name__ == "__main__":
    for float8 in (False, True):
        for how in ("eager", 1.0, 0.8, 0.5):
            rows = kept_rows(how != "eager", 1.0 if how == "eager" else how, float8)
            nbytes = rows * 2 * keys.NANO["hidden_size"]
            print(f"[ok] {how}{', fp8' if float8 else ''}: {rows:.2f} rows, {nbytes:,.0f} bytes a token and layer at Nano's width")
