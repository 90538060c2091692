"""Linear layers whose three matrix products run in float8 while they train. Parameters, names and checkpoints stay as they are.

A factor is rounded to e4m3 in rows, each with its own scale: its largest magnitude over 448 (e4m3's own), computed anew each time; no state,
no history. With X and W rounded along the dimension that y = X W^T sums over, the backward pass uses these same rounded values, so dx and dW
are gradients of what the forward pass computed; their scales, which then lie along the summed dimension, are folded into dy before it is rounded:

    dx = (dy * scales of W) W_q         dW = (dy * scales of X)^T X_q

Without gradients (validation, sampling) a layer computes as it did, since a policy is served without float8.
CUDA, compute capability 8.9 or later, by the kernels of common/fp8_kernels.py; elsewhere the same rounding and products in float32, for tests.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max  # 448
SMALLEST = 1e-30  # the least magnitude that sets a scale: its inverse must stay finite
FORMAT = (E4M3, LARGEST, SMALLEST)
MULTIPLE = 16  # torch._scaled_mm wants every dimension a multiple of it


def rounded(a: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """-> (e4m3 values, float32 scales with `dim` reduced to 1). Zeros stay zero; along `dim`, an infinity or a NaN leaves a NaN."""
    scale = a.abs().amax(dim, keepdim=True).float().clamp(min=SMALLEST) / LARGEST
    return (a.float() * (1 / scale)).to(E4M3), scale


# What the compiler must take as one piece: fused into their neighbours, the reductions over tokens run at a third of the memory's rate.


@torch.library.custom_op("cosmos::fp8_rows", mutates_args=())
def rows(a: Tensor) -> tuple[Tensor, Tensor]:
    """a [m, k] -> (a rounded along k, scales [m, 1])."""
    a = a.contiguous()
    if a.is_cuda:
        from common import fp8_kernels

        return fp8_kernels.rows(a, *FORMAT)
    return rounded(a, 1)


@torch.library.custom_op("cosmos::fp8_transposed", mutates_args=())
def transposed(q: Tensor) -> Tensor:
    """e4m3 [m, k] -> [k, m], row-major: both factors of a float8 product must have the summed dimension last."""
    if q.is_cuda:
        from common import fp8_kernels

        return fp8_kernels.transposed(q)
    return q.t().contiguous()


@torch.library.custom_op("cosmos::fp8_weight_again", mutates_args=())
def weight_again(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [n, k] -> (`rows` of it, transposed [k, n], scales [n, 1]). For the backward pass: kept from the forward it were a byte a parameter."""
    q, scale = rows(weight)
    return transposed(q), scale


@torch.library.custom_op("cosmos::fp8_both", mutates_args=())
def both(dy: Tensor, of_rows: Tensor, of_columns: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dy [m, n], factors float32 [m, 1] and [n, 1] -> (dy * of_columns rounded along n, its scales [m, 1],
    dy * of_rows rounded along m and transposed [n, m], its scales [n, 1])."""
    dy = dy.contiguous()
    if dy.is_cuda:
        from common import fp8_kernels

        return fp8_kernels.both(dy, of_rows, of_columns, *FORMAT)
    q, scale = rounded(dy.float() * of_columns.t(), 1)
    qt, scale_t = rounded(dy.float() * of_rows, 0)
    return q, scale, qt.t().contiguous(), scale_t.t().contiguous()


@rows.register_fake
def _(a):
    return torch.empty_like(a, dtype=E4M3, memory_format=torch.contiguous_format), a.new_empty(len(a), 1, dtype=torch.float32)


@transposed.register_fake
def _(q):
    return q.new_empty(q.shape[1], q.shape[0])


@weight_again.register_fake
def _(weight):
    return weight.new_empty(weight.shape[1], weight.shape[0], dtype=E4M3), weight.new_empty(len(weight), 1, dtype=torch.float32)


@both.register_fake
def _(dy, of_rows, of_columns):
    m, n = dy.shape
    scales = [dy.new_empty(k, 1, dtype=torch.float32) for k in (m, n)]
    return dy.new_empty(m, n, dtype=E4M3), scales[0], dy.new_empty(n, m, dtype=E4M3), scales[1]


def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """e4m3 a [m, k] times e4m3 b [n, k] transposed, scales float32 [m, 1] and [n, 1] -> [m, n]."""
    if a.is_cuda:
        return torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b.t(), out_dtype=dtype, use_fast_accum=True)
    # A copy also in float32: what Dynamo finds twice among the results of a Function loses its gradient (torch 2.11).
    return ((a.float() @ b.float().t()) * scale_a * scale_b.t()).to(dtype, copy=True)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        """x [m, k], weight [n, k] -> [m, n]"""
        (qx, x_scale), (qw, w_scale) = rows(x), rows(weight)
        ctx.save_for_backward(qx, x_scale, weight)
        return product(qx, qw, x_scale, w_scale, x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
        qx, x_scale, weight = ctx.saved_tensors
        qw, w_scale = weight_again(weight)
        q, scale, qt, scale_t = both(dy, x_scale, w_scale)
        one = torch.ones(len(qw), 1, device=dy.device)
        return product(q, qw, scale, one, dy.dtype), product(qt, transposed(qx), scale_t, one, dy.dtype)


class Float8Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return F.linear(x, self.weight)
        tokens = x.flatten(0, -2)
        short = -len(tokens) % MULTIPLE  # tokens are what dW sums over
        padded = F.pad(tokens, (0, 0, 0, short)) if short else tokens
        return _Linear.apply(padded, self.weight)[: len(tokens)].view(*x.shape[:-1], -1)


def convert(module: nn.Module) -> list[str]:
    """Turn every linear layer inside `module` into a Float8Linear, in place. -> their names. Raises ValueError for one with a bias, or whose
    sides are no multiples of 16."""
    names = []
    for name, linear in module.named_modules():
        if isinstance(linear, nn.Linear):
            if linear.bias is not None or any(side % MULTIPLE for side in linear.weight.shape):
                raise ValueError(f"float8 needs no bias and sides that are multiples of {MULTIPLE}: {name} {tuple(linear.weight.shape)}")
            linear.__class__ = Float8Linear
            names.append(name)
    return names
