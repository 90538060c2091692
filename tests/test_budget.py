"""common/budget.py: what a run will take, against what runs took.    Run: ./run_tests.sh tests/test_budget.py"""

import pytest
from bench import activations

from common import budget, keys

GIB = 2**30
TRAINED = keys.NANO_TRAINED[1]


@pytest.mark.parametrize(
    ("ranks", "micro", "recompute", "rows", "ema", "measured"),
    [
        (1, 16, 1, 32.10, "off", 108.3),
        (1, 32, 1, 19.35, "off", 109.9),
        (1, 32, 1, 19.35, "host", 109.9),
        (2, 32, 2, 19.35, "device", 104.0),
        (1, 32, 4, budget.kept_rows(True, 1.0), "off", 135.8),
        (1, 32, 0, budget.kept_rows(True, 0.8), "off", 133.8),
        (1, 32, 0, budget.kept_rows(True, 0.6), "off", 128.6),
        (1, 16, 0, budget.kept_rows(True, 0.8), "off", 119.65),
        (1, 32, 0, budget.kept_rows(True, 0.8, fp8=True), "off", 128.4),
    ],
)
def test_estimate_meets_the_measured_peaks(ranks, micro, recompute, rows, ema, measured):
    """Peaks of the trainer at full width on H200s (RUNS.md, "the trainer ..."), in GiB a GPU: within 1 %. rows in numbers: what a layer kept when
    attention still repeated its heads, eager and compiled, counted by the same bench."""
    state = budget.state_bytes(TRAINED, ranks, True, ema)
    peak = state["gpu"] + state["ema"] + budget.activation_bytes(keys.NANO, TRAINED, 266, 140, micro, recompute, rows)
    assert peak / GIB == pytest.approx(measured, rel=0.01)


def test_what_an_eager_layer_keeps_is_counted():
    """The eager constants are what autograd saves for one layer of Nano's proportions, to a percent (the compiled ones: the same bench, by hand)."""
    assert activations.kept_rows(False) == pytest.approx(budget.KEPT_EAGER, rel=0.01)
    assert activations.kept_rows(False, float8=True) == pytest.approx(budget.KEPT_EAGER_FP8, rel=0.01)


def test_state_by_hand():
    """16 bytes a parameter over the ranks; whole gradients on each while several ranks accumulate; the average where it is asked for."""
    assert budget.state_bytes(1000, 1, True, "off") == {"gpu": 16000, "ema": 0, "host": 0}
    assert budget.state_bytes(1000, 4, False, "device") == {"gpu": 4000, "ema": 1000, "host": 0}
    assert budget.state_bytes(1000, 4, True, "host") == {"gpu": 7000, "ema": 0, "host": 1000}
    assert budget.checkpoint_bytes(1000, "off") == 12000 and budget.checkpoint_bytes(1000, "host") == 16000


def test_recomputation_saves_and_micro_batches_cost():
    """More recomputation never takes more, a larger micro-batch never less, and one layer alone cannot save by recomputing."""

    def of(micro, recompute, config=keys.NANO):
        return budget.activation_bytes(config, TRAINED, 266, 140, micro, recompute, budget.kept_rows(True))

    for fp8 in (False, True):
        rows = [budget.kept_rows(True, share, fp8) for share in (0.1, 0.5, 0.8, 1.0)]
        assert rows == sorted(rows) and rows[-1] < budget.kept_rows(False, fp8=fp8)
    assert of(32, 1) < of(32, 2) < of(32, 3) < of(32, 0) and of(8, 2) < of(16, 2)
    assert of(4, 0, keys.NANO | {"num_hidden_layers": 1}) <= of(4, 1, keys.NANO | {"num_hidden_layers": 1})
