"""common/quantile.py: one affine map and its exact inverse, from the block that was asked for and no other.

Run: python -m pytest tests/test_quantile.py
Golden: tests/golden/libero_golden.json, block action (float32, from the reference implementation, quantile_rot).
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from common import quantile
from common.console import Precondition
from common.rot6d import encode_action

GOLDEN = json.loads((Path(__file__).parent / "golden/libero_golden.json").read_text())["action"]
EPS32 = float(np.finfo(np.float32).eps)
KINDS = {"numpy": np.asarray, "torch": torch.as_tensor}
DTYPES = [("numpy", np.float32), ("numpy", np.float64), ("torch", torch.bfloat16), ("torch", torch.float32), ("torch", torch.float64)]
ROTATION = slice(3, 9)
STATS = quantile.load_stats()

ends = st.floats(-1e3, 1e3, allow_subnormal=False)
places = st.floats(-50, 50, allow_subnormal=False)


def golden(key):
    return np.array(GOLDEN[key], np.float32)


def write(folder, content):
    path = folder / "stats.json"
    path.write_text(json.dumps(content))
    return path


def stats_of(q01, q99):
    """Stats of the given quantiles, without a file."""
    return quantile.QuantileStats(np.array(q01, float), np.array(q99, float), 20.0, "flat", Path("stats.json"), "")


def bound(stats, a):
    """Error of denormalize(normalize(a)) in a's type: 2 eps (|a| + max(|q01|, |q99|)).

    Four roundings of half an eps: three relative to |a - low| (minus, divide, times) and one relative to |a| (plus), low inside [q01, q99].
    """
    return 2 * np.finfo(a.dtype).eps * (np.abs(a) + np.maximum(np.abs(stats.q01), np.abs(stats.q99))) + np.finfo(a.dtype).tiny


def within(actual, expected, tolerance):
    worst = np.abs(np.asarray(actual, np.float64) - np.asarray(expected, np.float64)) - tolerance
    np.testing.assert_array_less(worst, np.finfo(np.float64).tiny)


# Golden


@pytest.mark.parametrize("kind", KINDS)
def test_golden_normalized(kind):
    """The reference's 16 normalized actions are reproduced. Largest error seen: 5 eps at R00, whose half range of 0.033 magnifies half an eps 31 times."""
    actual = STATS.normalize(KINDS[kind](golden("action10")))
    np.testing.assert_allclose(actual, golden("normalized"), rtol=0, atol=16 * EPS32)


@pytest.mark.parametrize("kind", KINDS)
def test_golden_denormalized(kind):
    """The reference's denormalized actions are reproduced. Largest error seen: 0.5 eps."""
    actual = STATS.denormalize(KINDS[kind](golden("normalized")))
    np.testing.assert_allclose(actual, golden("denormalized"), rtol=0, atol=2 * EPS32)


def test_golden_check_catches_no_normalizing():
    """N6: the golden normalized actions are far from the raw ones, so a normalizer that is never called is caught."""
    assert np.abs(golden("normalized") - golden("action10")).max() > 1


# The map


@pytest.mark.parametrize(("row", "level"), [("q01", -1.0), ("q99", 1.0)])
def test_quantile_rows_are_the_ends(row, level):
    """N6: the q01 row maps to -1 and the q99 row to +1 in every channel; the largest magnification is 31 (R00)."""
    np.testing.assert_allclose(STATS.normalize(getattr(STATS, row)), np.full(10, level), rtol=0, atol=64 * np.finfo(np.float64).eps)


@given(st.lists(st.tuples(ends, ends, places), min_size=1, max_size=4), st.sampled_from([np.float32, np.float64]))
@example([(0.0, 0.0, 3.0)], np.float32)
@example([(999.0, 999.0000001, 3.0)], np.float64)
def test_round_trip_inside_and_outside(channels, dtype):
    """denormalize(normalize(a)) == a within the stated bound, up to 50 half ranges outside the quantiles."""
    low, high = (np.array([f(a, b) for a, b, _ in channels]) for f in (min, max))
    stats = stats_of(low, high)
    middle, half = (low + high) / 2, np.maximum((high - low) / 2, 1e-3)
    a = (middle + half * np.array([t for *_, t in channels])).astype(dtype)
    within(stats.denormalize(stats.normalize(a)), a, bound(stats, a))


@given(ends, ends)
def test_larger_action_is_never_a_smaller_number(a, b):
    """The map is monotone in every channel."""
    low, high = sorted([a, b])
    assert (STATS.normalize(np.full(10, low)) <= STATS.normalize(np.full(10, high))).all()


def test_nothing_is_clamped():
    """N11: dx = -0.9375, the legal minimum, lies outside the quantiles and gives -1.258, not -1."""
    np.testing.assert_allclose(STATS.normalize(np.full(10, -0.9375))[0], -1.258, rtol=0, atol=5e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_value_beyond_the_quantiles_comes_back(kind):
    """N11: an action twice as far out as any quantile survives the round trip, since nothing is clamped."""
    a = 2 * np.maximum(np.abs(STATS.q01), np.abs(STATS.q99)) + 1
    within(STATS.denormalize(STATS.normalize(KINDS[kind](a))), a, bound(STATS, a))


# Constant channels


@pytest.mark.parametrize("direction", ["normalize", "denormalize"])
def test_constant_channel_is_not_scaled(direction):
    """N1, N2: where q01 == q99 both directions have slope one: a step of 0.25 stays 0.25."""
    move = getattr(stats_of([0.5], [0.5]), direction)
    np.testing.assert_array_equal(move(np.array([0.75])) - move(np.array([0.5])), [0.25])


def test_constant_channel_is_centred():
    """N1: the constant itself becomes 0, and 0 becomes the constant."""
    stats = stats_of([0.5], [0.5])
    np.testing.assert_array_equal([stats.normalize(np.array([0.5])), stats.denormalize(np.array([0.0]))], [[0.0], [0.5]])


def test_noise_in_a_constant_channel_stays_small():
    """N1, N2: 1e-7 of noise becomes 1e-7, where dividing by the clamped range would make it 20."""
    np.testing.assert_allclose(stats_of([0.5], [0.5]).normalize(np.array([0.5 + 1e-7])), [1e-7], rtol=1e-8, atol=0)


@pytest.mark.parametrize(("span", "slope"), [(0.9e-6, 1.0), (1.1e-6, 2 / 1.1e-6)])
def test_constant_means_a_range_below_1e_6(span, slope):
    """A range of 0.9e-6 is not scaled and one of 1.1e-6 is."""
    move = stats_of([0.0], [span]).normalize
    np.testing.assert_allclose(move(np.array([1.0])) - move(np.array([0.0])), [slope], rtol=1e-12)


# Shapes and types


@pytest.mark.parametrize(("kind", "dtype"), DTYPES)
@pytest.mark.parametrize("direction", ["normalize", "denormalize"])
def test_type_shape_and_dtype_are_kept(direction, kind, dtype):
    """numpy gives numpy and torch gives torch, in the shape and dtype that came in."""
    x = np.zeros((2, 1, 10), dtype) if kind == "numpy" else torch.zeros((2, 1, 10), dtype=dtype)
    y = getattr(STATS, direction)(x)
    assert (type(y), y.dtype, y.shape) == (type(x), x.dtype, x.shape)


@given(st.lists(st.floats(-5, 5, width=32), min_size=10, max_size=10).map(lambda v: np.array(v, np.float32)))
def test_numpy_equals_torch(a):
    """Both libraries give the same float32, bit for bit, in both directions."""
    np.testing.assert_array_equal(STATS.normalize(torch.from_numpy(a)), STATS.normalize(a))
    np.testing.assert_array_equal(STATS.denormalize(torch.from_numpy(a)), STATS.denormalize(a))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("direction", ["normalize", "denormalize"])
@pytest.mark.parametrize("shape", [(7,), (10, 1), (2, 11)])
def test_wrong_channel_count_raises(direction, shape, kind):
    """A last axis that is not 10, one that would broadcast included, raises with the file, the count and the shape."""
    with pytest.raises(ValueError, match=rf"libero_stats_20fps.json hold 10 channels.*{shape[-1]},?\)"):
        getattr(STATS, direction)(KINDS[kind](np.zeros(shape)))


# Reading a stats file


def test_global_raw_measures_the_rotation():
    """N8: R10 = 0 of the identity rotation gives -0.194 with global_raw, the built-in block."""
    identity = encode_action(np.zeros(7))
    assert STATS.block == "global_raw"
    np.testing.assert_allclose(STATS.normalize(identity)[4], -0.194, rtol=0, atol=5e-4)


def test_global_leaves_the_rotation(tmp_path):
    """N8: the same channel gives 0.0 with the `global` block of a file that also holds the built-in `global_raw`."""
    content = json.loads(quantile.BUILT_IN.read_text())
    content["global"] = {k: [*v[:3], *[end] * 6, v[9]] for (k, v), end in zip(content["global_raw"].items(), (-1, 1), strict=True)}
    stats = quantile.load_stats(write(tmp_path, content), "global")
    assert stats.normalize(encode_action(np.zeros(7)))[4] == 0.0


def test_built_in_is_at_20_fps():
    """The built-in stats are LIBERO's: ten channels at 20 fps, gripper from 0 to 1."""
    assert (len(STATS.q01), STATS.fps, STATS.q01[9], STATS.q99[9]) == (10, 20.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("content", "block", "seen"),
    [
        ({"global": {"q01": [0], "q99": [1]}}, "global_raw", r"block 'global_raw'.*keys \['global'\]"),
        ({"global_raw": {"q01": [0], "q99": [1]}}, "global", r"block 'global'.*keys \['global_raw'\]"),
        ({"q01": [0], "q99": [1]}, "global_raw", r"block 'global_raw'.*keys \['q01', 'q99'\]"),
        ({"global": {}, "global_raw": {}}, "flat", r"block 'flat'.*keys \['global', 'global_raw'\]"),
        ({"global_raw": {"mean": [0], "std": [1], "min": [0], "max": [1]}}, "global_raw", r"keys \['max', 'mean', 'min', 'std'\]"),
        ({"global_raw": {"q01": [0]}}, "global_raw", r"keys \['q01'\]"),
        ({"global_raw": [0, 1]}, "global_raw", r"keys \['global_raw'\]"),
    ],
)
def test_missing_block_names_the_keys_seen(tmp_path, content, block, seen):
    """N5, N8, N9: a block that is absent, incomplete or in the other layout stops, and the message names what the file does hold."""
    with pytest.raises(Precondition, match=seen):
        quantile.load_stats(write(tmp_path, content), block)


def test_block_is_never_guessed(tmp_path):
    """N8, N9: of a file that holds all three layouts each name reads its own numbers."""
    table = {name: {"q01": [-n], "q99": [n]} for n, name in enumerate(("global", "global_raw"), 2)}
    path = write(tmp_path, table | {"q01": [-1], "q99": [1]})
    assert {b: quantile.load_stats(path, b).q99.tolist() for b in quantile.BLOCKS} == {"flat": [1], "global": [2], "global_raw": [3]}


def test_unknown_block_name_raises():
    """A block name that is none of the three raises with the three."""
    with pytest.raises(ValueError, match=r"global_raw.*got 'quantile_rot'"):
        quantile.load_stats(block="quantile_rot")


def test_missing_file_says_how_to_make_it(tmp_path):
    """N5: no file at the path stops with the path and the command that makes one."""
    with pytest.raises(Precondition, match=r"nothing at .*none\.json; to mend: python 04_fetch_libero\.py stats"):
        quantile.load_stats(tmp_path / "none.json")


def test_broken_json_names_the_file(tmp_path):
    """A truncated stats file stops with its name."""
    path = tmp_path / "cut.json"
    path.write_text('{"global_raw": {"q01": [0')
    with pytest.raises(Precondition, match=r"JSON in .*cut\.json"):
        quantile.load_stats(path)


@pytest.mark.parametrize(
    ("q01", "q99"), [([0.0, 0.0], [1.0]), ([2.0], [1.0]), ([float("nan")], [1.0]), ([0.0], [float("inf")]), ([[0.0]], [[1.0]]), (0.0, 1.0)]
)
def test_impossible_quantiles_stop(tmp_path, q01, q99):
    """Lengths that differ, crossed, NaN or infinite quantiles and nested lists stop before anything is normalized."""
    with pytest.raises(Precondition, match="finite q01 <= q99 of one length"):
        quantile.load_stats(write(tmp_path, {"q01": q01, "q99": q99}), "flat")


def test_fps_mismatch_raises():
    """N14: stats at 20 fps refuse data at 10, whose deltas are twice as long."""
    with pytest.raises(Precondition, match=r"10 fps; found .* at 20 fps"):
        STATS.require_fps(10)


def test_fps_that_agrees_passes():
    """N14: stats at 20 fps take data at 20, and 20 read back from a float32."""
    for fps in (20, 20.0, float(np.float32(20))):
        assert STATS.require_fps(fps) is None


def test_sha256_is_the_file_s():
    """The hash is that of the file's bytes, as sha256sum prints it."""
    assert STATS.sha256 == hashlib.sha256(quantile.BUILT_IN.read_bytes()).hexdigest()


def test_sha256_tells_files_apart_that_read_alike(tmp_path):
    """Two files of equal numbers and different bytes have different hashes: the hash is of the file, not of the numbers."""
    path = write(tmp_path, {"q01": [0.0], "q99": [1.0]})
    one = quantile.load_stats(path, "flat")
    path.write_text(path.read_text() + "\n")
    assert quantile.load_stats(path, "flat").sha256 != one.sha256


def test_relative_path_becomes_absolute(tmp_path, monkeypatch):
    """N10: a relative path is read from the working directory, not from the built-in folder, and kept absolute."""
    path = write(tmp_path, {"q01": [0.0], "q99": [1.0]})
    monkeypatch.chdir(tmp_path)
    assert quantile.load_stats(Path("stats.json"), "flat").path == path.resolve()


# Making a stats file


def pooled(rows, rotation=slice(0, 0)):
    pool = quantile.Pool()
    pool.add(np.asarray(rows, float))
    return pool.table(rotation, 20)


def test_quantiles_are_of_the_pooled_rows():
    """N3: 100 zeros and 100 ones pool to q01 = 0 and q99 = 1, where averaging the episodes' quantiles would give 0.5 twice."""
    episodes = np.zeros((100, 1)), np.ones((100, 1))
    raw = pooled(np.concatenate(episodes))["global_raw"]
    assert (raw["q01"], raw["q99"]) == ([0.0], [1.0])
    assert np.mean([np.quantile(e, quantile.QUANTILES) for e in episodes]) == 0.5


def test_quantiles_interpolate_in_the_first_bin():
    """N4: q01 of linspace(0, 1, 100) is 0.01 and q99 0.99, not the minimum and the maximum."""
    raw = pooled(np.linspace(0, 1, 100)[:, None])["global_raw"]
    np.testing.assert_allclose([*raw["q01"], *raw["q99"]], [0.01, 0.99], rtol=1e-12)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_bad_row_is_named(value):
    """N13: a row that is not finite stops the pooling, and the message names the first such row and how many there are."""
    rows = np.zeros((9, 3))
    rows[[4, 7], 1] = value
    with pytest.raises(ValueError, match=r"^2 row\(s\) are not finite, the first is row 4$"):
        pooled(rows)


def test_rows_are_counted_once():
    """N15: the file says how many rows went in, whatever the channel count."""
    assert pooled(np.zeros((7, 3)))["count"] == 7


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_parts_make_the_whole(lengths, seed):
    """Rows added in parts of any size give the count, moments, extremes and quantiles of all of them at once, as numpy computes them."""
    rows = np.random.default_rng(seed).normal(3, 2, (sum(lengths), 2))
    pool = quantile.Pool()
    for part in np.split(rows, np.cumsum(lengths)[:-1]):
        pool.add(part)
    raw = pool.table(slice(0, 0), 20)["global_raw"]
    expected = {"mean": rows.mean(0), "std": rows.std(0), "min": rows.min(0), "max": rows.max(0)}
    expected |= dict(zip(("q01", "q99"), np.quantile(rows, quantile.QUANTILES, axis=0), strict=True))
    for key, value in expected.items():
        np.testing.assert_allclose(raw[key], value, rtol=1e-12, atol=1e-12, err_msg=key)
    assert pool.count == len(rows)


def test_reservoir_is_uniform_and_deterministic():
    """N13: beyond the limit q01 and q99 come from a uniform sample: the same for the same rows, each row kept with probability limit / rows,
    early or late; mean and extremes stay exact."""
    kept = np.zeros(300)
    for seed in range(400):
        pool = quantile.Pool(limit=30, seed=seed)
        for part in np.split(np.arange(300.0)[:, None], 10):
            pool.add(part)
        kept[pool.kept[0][:, 0].astype(int)] += 1
        assert len(np.unique(pool.kept[0])) == 30
    share = kept.reshape(10, 30).sum(1) / kept.sum()  # expected 0.1 each; the standard deviation of each is 0.0026
    assert np.abs(share - 0.1).max() < 0.013
    table = pool.table(slice(0, 0), 20)
    assert (table["count"], table["quantiles_of"], table["global_raw"]["mean"], table["global_raw"]["max"]) == (300, 30, [149.5], [299.0])
    again = quantile.Pool(limit=30, seed=399)
    for part in np.split(np.arange(300.0)[:, None], 10):
        again.add(part)
    assert again.table(slice(0, 0), 20) == table


def test_global_fixes_only_the_rotation():
    """N8: of `global` and `global_raw` only the rotation channels differ, and there `global` holds -1 and 1."""
    made = pooled(np.random.default_rng(0).normal(size=(50, 10)), ROTATION)
    one, raw = (np.array([made[b]["q01"], made[b]["q99"]]) for b in ("global", "global_raw"))
    np.testing.assert_array_equal(one[:, ROTATION], np.outer([-1, 1], np.ones(6)))
    np.testing.assert_array_equal(np.delete(one, ROTATION, 1), np.delete(raw, ROTATION, 1))


@pytest.mark.parametrize("block", ["global", "global_raw"])
def test_what_is_written_can_be_read(tmp_path, block):
    """Stats written as JSON read back bit for bit, with their fps, in both blocks."""
    made = pooled(np.random.default_rng(0).normal(size=(50, 10)), ROTATION)
    stats = quantile.load_stats(write(tmp_path, made), block)
    np.testing.assert_array_equal([stats.q01, stats.q99], [made[block]["q01"], made[block]["q99"]])
    assert stats.fps == 20.0


@given(st.lists(st.tuples(places, places), min_size=2, max_size=40).map(np.array))
def test_98_of_100_rows_fall_inside(rows):
    """N6: of the rows the stats came from at most 1 in 100 a side (and the one row that the quantile falls next to) lies outside [-1, 1]."""
    raw = pooled(rows)["global_raw"]
    x = stats_of(raw["q01"], raw["q99"]).normalize(rows)
    outside = (np.abs(x) > 1 + 1e-9).sum(0)
    assert (outside <= 2 * (1 + len(rows) // 100)).all()
