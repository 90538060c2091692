"""The roundings of common/fp8.py as Triton kernels; each reads its input as seldom as it can. CUDA, or a CPU with TRITON_INTERPRET=1 (tests).

dtype, largest, smallest: what is rounded to, its largest value, and the least magnitude that sets a scale.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64


@triton.jit
def _rows(a, q, scales, k, largest: tl.constexpr, smallest: tl.constexpr, width: tl.constexpr):
    """One row a program, held in registers: read once."""
    row = tl.program_id(0)
    column = tl.arange(0, width)
    inside = column < k
    at = row.to(tl.int64) * k + column
    value = tl.load(a + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 0), smallest) / largest
    tl.store(q + at, (value * (1 / scale)).to(q.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def _transposed(q, out, m, k, tile: tl.constexpr):
    i = tl.program_id(0) * tile + tl.arange(0, tile)
    j = tl.program_id(1) * tile + tl.arange(0, tile)
    value = tl.load(q + i.to(tl.int64)[:, None] * k + j[None, :], mask=(i < m)[:, None] & (j < k)[None, :])
    tl.store(out + j.to(tl.int64)[:, None] * m + i[None, :], tl.trans(value), mask=(j < k)[:, None] & (i < m)[None, :])


@triton.jit
def _tile(dy, of_rows, of_columns, i, j, m, n):
    """-> (a tile of dy times the factor of its columns, the same times that of its rows), float32"""
    value = tl.load(dy + i.to(tl.int64)[:, None] * n + j[None, :], mask=(i < m)[:, None] & (j < n)[None, :], other=0.0).to(tl.float32)
    row, column = tl.load(of_rows + i, mask=i < m, other=0.0), tl.load(of_columns + j, mask=j < n, other=0.0)
    return value * column[None, :], value * row[:, None]


@triton.jit
def _both_amax(dy, of_rows, of_columns, row_amax, column_amax, m, n, height: tl.constexpr, width: tl.constexpr):
    i = tl.program_id(0) * height + tl.arange(0, height)
    j = tl.program_id(1) * width + tl.arange(0, width)
    along_n, along_m = _tile(dy, of_rows, of_columns, i, j, m, n)
    tl.atomic_max(row_amax + i, tl.max(tl.abs(along_n), 1), mask=i < m)
    tl.atomic_max(column_amax + j, tl.max(tl.abs(along_m), 0), mask=j < n)


@triton.jit
def _both(
    dy,
    of_rows,
    of_columns,
    row_amax,
    column_amax,
    q,
    scales,
    qt,
    scales_t,
    m,
    n,
    largest: tl.constexpr,
    smallest: tl.constexpr,
    tile: tl.constexpr,
):
    i = tl.program_id(0) * tile + tl.arange(0, tile)
    j = tl.program_id(1) * tile + tl.arange(0, tile)
    along_n, along_m = _tile(dy, of_rows, of_columns, i, j, m, n)
    scale = tl.maximum(tl.load(row_amax + i, mask=i < m, other=0.0), smallest) / largest
    scale_t = tl.maximum(tl.load(column_amax + j, mask=j < n, other=0.0), smallest) / largest
    inside = (i < m)[:, None] & (j < n)[None, :]
    tl.store(q + i.to(tl.int64)[:, None] * n + j[None, :], (along_n * (1 / scale)[:, None]).to(q.dtype.element_ty), mask=inside)
    turned = tl.trans((along_m * (1 / scale_t)[None, :]).to(qt.dtype.element_ty))
    tl.store(qt + j.to(tl.int64)[:, None] * m + i[None, :], turned, mask=(j < n)[:, None] & (i < m)[None, :])
    tl.store(scales + i, scale, mask=(i < m) & (tl.program_id(1) == 0))
    tl.store(scales_t + j, scale_t, mask=(j < n) & (tl.program_id(0) == 0))


def rows(a: Tensor, dtype: torch.dtype, largest: float, smallest: float) -> tuple[Tensor, Tensor]:
    m, k = a.shape
    q, scales = torch.empty_like(a, dtype=dtype), a.new_empty(m, 1, dtype=torch.float32)
    _rows[(m,)](a, q, scales, k, largest, smallest, triton.next_power_of_2(k), num_warps=8)
    return q, scales


def transposed(q: Tensor) -> Tensor:
    m, k = q.shape
    out = q.new_empty(k, m)
    _transposed[(triton.cdiv(m, TILE), triton.cdiv(k, TILE))](q.view(torch.uint8), out.view(torch.uint8), m, k, TILE)
    return out


def both(
    dy: Tensor, of_rows: Tensor, of_columns: Tensor, dtype: torch.dtype, largest: float, smallest: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m, n = dy.shape
    row_amax, column_amax = dy.new_zeros(m, dtype=torch.float32), dy.new_zeros(n, dtype=torch.float32)
    q, qt = dy.new_empty(m, n, dtype=dtype), dy.new_empty(n, m, dtype=dtype)
    scales, scales_t = (dy.new_empty(k, 1, dtype=torch.float32) for k in (m, n))
    factors = dy, of_rows, of_columns, row_amax, column_amax
    _both_amax[(triton.cdiv(m, TILE), triton.cdiv(n, 2 * TILE))](*factors, m, n, TILE, 2 * TILE)
    _both[(triton.cdiv(m, TILE), triton.cdiv(n, TILE))](*factors, q, scales, qt, scales_t, m, n, largest, smallest, TILE)
    return q, scales, qt, scales_t
