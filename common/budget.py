"""What a training run takes, from shapes alone: bytes on each GPU, in host memory and on the disk. Stage 05's plan and 01 --plan share it.

P trained parameters lie in float32 over the ranks of one replica: 4 bytes of weights, 8 of Adam's moments, 4 of gradients, 4 of average.
Activations are bf16, batches are micro-batches of one rank. RUNS.md holds the estimate against measured peaks.
"""

import itertools
import math

CHECKPOINT_COPIES = {"weights": 4, "exp_avg": 4, "exp_avg_sq": 4, "ema": 4}  # bytes a parameter
MEMORY_MARGIN = 0.95  # of the free GPU memory that a plan may use; the rest is for fragmentation
# What one layer keeps for its backward pass, in bf16 rows of hidden width a token. Counted with torch.autograd.graph.saved_tensors_hooks
# on a layer of Nano's proportions, 266 tokens behind 140 of text (tests/bench/activations.py). Compiled: (activation budget, rows), a line between
# the counted ones; at 0 the inputs alone.
KEPT_EAGER, KEPT_COMPILED = 29.81, ((0, 1.26), (0.2, 4.26), (0.5, 8.76), (0.8, 12.06), (1, 17.06))
# The same with --fp8. Below 0.8 the compiler makes other choices on a GPU, where it can recompute attention, than where this was counted.
KEPT_EAGER_FP8, KEPT_COMPILED_FP8 = 29.43, ((0, 1.26), (0.8, 9.85), (1, 15.15))
ACTIVATION_BUDGET = 0.8  # 05 --activation-budget
# Bytes a parameter of one layer, beside the state: bf16 weights of the layer at work and of the next, its gradient in bf16 and in float32.
LAYER_BUFFERS = 2 + 2 + 2 + 4


def state_bytes(parameters: int, shards: int, accumulates: bool, ema: str) -> dict[str, int]:
    """{"gpu", "ema", "host"}: bytes of a rank for weights, gradients and Adam; for the average on the GPU; for the average in host memory.

    shards: ranks of one replica; accumulates: several micro-batches a step. Then, with more than one rank, each holds the gradients of
    the whole model until the last micro-batch reduces them.
    """
    gradients = 4 * parameters if accumulates and shards > 1 else 4 * parameters // shards
    average = 4 * parameters // shards
    return {
        "gpu": 12 * parameters // shards + gradients,
        "ema": average if ema == "device" else 0,
        "host": average if ema == "host" else 0,
    }


def kept_rows(compiled: bool, share: float = ACTIVATION_BUDGET, fp8: bool = False) -> float:
    """Rows that a layer keeps. share: 05 --activation-budget, above 0 and at most 1."""
    if not compiled:
        return KEPT_EAGER_FP8 if fp8 else KEPT_EAGER
    counted = KEPT_COMPILED_FP8 if fp8 else KEPT_COMPILED
    (a, low), (b, high) = next(pair for pair in itertools.pairwise(counted) if share <= pair[1][0])
    return low + (high - low) * (share - a) / (b - a)


def activation_bytes(config: dict, parameters: int, tokens: int, text: int, micro: int, recompute: int, rows: float) -> int:
    """Bytes of a rank at the peak of forward and backward, beside the state and the prompts.

    config: num_hidden_layers, hidden_size, num_key_value_heads, head_dim; tokens: generation tokens a sample, of text: those it attends to
    micro: samples a pass; recompute: every k-th layer keeps its inputs only (0: none does), so that the last one, if it is among them,
    stands in full beside the inputs of the others; rows: kept_rows of the others
    """
    layers, row = config["num_hidden_layers"], 2 * config["hidden_size"]
    again = math.ceil(layers / recompute) if recompute else 0
    whole = layers - again + (1 if recompute and (layers - 1) % recompute == 0 else 0)
    kept = rows * row * tokens
    inputs = row * tokens + 4 * config["num_key_value_heads"] * config["head_dim"] * text  # and the text's keys and values
    return int(micro * (whole * kept + again * inputs)) + LAYER_BUFFERS * parameters // layers


def checkpoint_bytes(parameters: int, ema: str) -> int:
    """Bytes of one checkpoint."""
    return parameters * sum(v for k, v in CHECKPOINT_COPIES.items() if k != "ema" or ema != "off")
