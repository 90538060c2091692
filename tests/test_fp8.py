"""common/fp8.py: float8 products keep to what e4m3 can hold, and change nothing else.    Run: ./run_tests.sh tests/test_fp8.py"""

import pytest
import torch
from conftest import run_script
from torch import nn

from common import cosmos3, fp8, tiny


def error(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.fixture
def pair():
    """(a linear layer, the same as a Float8Linear, an input [2, 23, 64] with rows of magnitudes from 1e-4 to 1e4)"""
    torch.manual_seed(0)
    plain, quick = nn.Linear(64, 96, bias=False), nn.Linear(64, 96, bias=False)
    quick.load_state_dict(plain.state_dict())
    assert fp8.convert(nn.ModuleList([quick])) == ["0"]
    return plain, quick, torch.randn(2, 23, 64) * torch.logspace(-4, 4, 23)[:, None]


def test_every_row_is_as_exact_as_e4m3_allows(pair):
    """Output rows of magnitudes from 1e-4 to 1e4 are each within 6 % of the exact ones (e4m3 rounds to 6 % at most, 64 errors average out):
    with one scale for the whole tensor the small ones would be zero."""
    plain, quick, x = pair
    rows = zip(quick(x).flatten(0, 1), plain(x).flatten(0, 1), strict=True)
    assert max(error(a, b) for a, b in rows) < 0.06 and error(quick(x), plain(x)) > 0.01  # and it is float8


def test_gradients_follow_the_exact_ones(pair):
    """dx row by row and dW as a whole, against autograd's own."""
    plain, quick, x = pair
    x = x / x.norm(dim=-1, keepdim=True)
    dy, inputs = torch.randn(2, 23, 96), [x.clone().requires_grad_() for _ in range(2)]
    for layer, given in zip((plain, quick), inputs, strict=True):
        layer(given).backward(dy)
    assert max(error(a, b) for a, b in zip(inputs[1].grad.flatten(0, 1), inputs[0].grad.flatten(0, 1), strict=True)) < 0.06
    assert 0.01 < error(quick.weight.grad, plain.weight.grad) < 0.06


def test_gradients_are_those_of_the_rounded_factors(pair):
    """With gradients that e4m3 holds exactly (one entry a row and column), dx is a row of the weight and dW a row of the input as the forward pass
    rounded them: the two are rounded once, not once a product."""
    _, quick, x = pair
    x = x.reshape(-1, 64)[:32].clone().requires_grad_()
    dy = torch.eye(32, 96)
    quick(x).backward(dy)
    for found, factor in ((x.grad, quick.weight[:32]), (quick.weight.grad[:32], x)):
        q, scale = fp8.rounded(factor.detach(), 1)
        torch.testing.assert_close(found, q.float() * scale, rtol=1e-6, atol=0)
        assert not torch.equal(found, factor.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_layer_has_the_same_gradients(pair, dtype):
    """Dynamo and AOTAutograd change neither dx nor dW."""
    _, quick, x = pair
    found = []
    for layer in (quick.to(dtype), torch.compile(quick.to(dtype), backend="aot_eager")):
        given = x.to(dtype).requires_grad_()
        quick.weight.grad = None
        layer(given).square().sum().backward()
        found.append((given.grad, quick.weight.grad))
    assert all(torch.equal(a, b) and a.any() for a, b in zip(*found, strict=True))


def test_what_is_not_finite_reaches_the_gradients(pair):
    """A NaN or an infinity in the input or in the output's gradient: the weight's gradient, whose norm a bad step is seen by, is not finite."""
    _, quick, x = pair
    for bad in (float("nan"), float("inf")):
        for place in ("x", "dy"):
            given, dy = x.clone(), torch.ones(2, 23, 96)
            (given if place == "x" else dy)[1, 5, 7] = bad
            quick.weight.grad = None
            quick(given).backward(dy)
            assert not quick.weight.grad.norm().isfinite(), (bad, place)


KERNELS = """
import torch
from common import fp8, fp8_kernels

q = torch.randn(70, 96).to(fp8.E4M3)
assert torch.equal(fp8_kernels.transposed(q).float(), q.t().float())
fp8.E4M3 = torch.float32  # what is about to be rounded: Triton's interpreter does not round to e4m3 as a GPU does
form = (torch.float32, fp8.LARGEST, fp8.SMALLEST)
torch.manual_seed(0)
for m, n in ((70, 96), (16, 208), (130, 64)):
    a = (torch.randn(m, n) * torch.logspace(-5, 5, m)[:, None]).bfloat16()
    a[3] = 0
    factors = torch.rand(m, 1) + 0.1, torch.rand(n, 1) + 0.1
    found, expected = (*fp8_kernels.rows(a, *form), *fp8_kernels.both(a, *factors, *form)), (*fp8.rounded(a, 1), *fp8.both(a, *factors))
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))
a[2, 5], a[7, 9] = float("nan"), float("inf")
for f, e in zip((*fp8_kernels.rows(a, *form)[:1], *fp8_kernels.both(a, *factors, *form)[::2]), (fp8.rounded(a, 1)[0], *fp8.both(a, *factors)[::2])):
    assert torch.equal(f.isfinite().all(1), e.isfinite().all(1)) and not f.isfinite().all()  # seen in the same rows
print("equal")
"""


def test_kernels_give_what_the_emulation_gives():
    """Sides that are no multiples of a tile, rows of magnitudes from 1e-5 to 1e5, a row of zeros; in Triton's interpreter, without a GPU."""
    done = run_script("-c", KERNELS, env={"TRITON_INTERPRET": "1"})
    assert done.stdout.strip() == "equal", done.stderr


def test_scales_are_the_rows_own_and_hold_the_extremes():
    """The largest magnitude of a row maps to 448 exactly, a row of zeros stays zero, a NaN or an infinity shows in its row and in no other."""
    a = torch.tensor(
        [[1.0, -2.0, 0.5], [0.0, 0.0, 0.0], [3e38, -1.5e38, 0.0], [1e-30, 0.0, -1e-30], [float("inf"), 1.0, 2.0], [float("nan"), 1.0, 2.0]]
    )
    q, scale = fp8.rounded(a, 1)
    assert q.dtype == torch.float8_e4m3fn and scale.shape == (6, 1) and scale.dtype == torch.float32
    value = q.float() * scale
    torch.testing.assert_close(value[:4], a[:4], rtol=1e-6, atol=0)
    assert q[0, 1].float() == -448 and not value[1].any()
    assert not value[4].isfinite().all() and not value[5].isfinite().all() and value[:4].isfinite().all()


def test_without_gradients_nothing_changes(pair):
    """Validation and sampling run the layer as it was."""
    plain, quick, x = pair
    with torch.no_grad():
        assert torch.equal(quick(x), plain(x))


def test_names_and_what_is_converted():
    """The seven projections of every layer of the tower and nothing else; the state dict's names are those of before."""
    tower = cosmos3.GenTower(cosmos3.build_transformer(tiny.TRANSFORMER))
    before = list(tower.state_dict())
    found = fp8.convert(tower.layers)
    kinds = {"add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "gate_proj", "up_proj", "down_proj"}
    assert {n.rsplit(".", 1)[1] for n in found} == kinds and len(found) == 7 * len(tower.layers) and list(tower.state_dict()) == before
    assert not isinstance(tower.proj_in, fp8.Float8Linear) and not isinstance(tower.time_embedder.linear_1, fp8.Float8Linear)


def test_layers_that_float8_cannot_take_are_named():
    for linear in (nn.Linear(64, 64), nn.Linear(64, 40, bias=False)):
        with pytest.raises(ValueError, match=r"multiples of 16: head "):
            fp8.convert(nn.ModuleDict({"head": linear}))
