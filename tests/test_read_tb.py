"""07_read_tb.py: no point is dropped, doubled or invented, and nothing is wrong in silence.

Run: python -m pytest tests/test_read_tb.py
"""

import contextlib
import csv
import json
import math
import os
import random
import re
import struct
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from conftest import REPO, load_script, processor_seconds, run_script
from hypothesis import example, given
from hypothesis import strategies as st

from common import console, tb

stage = load_script("07_read_tb")
SCRIPT = "07_read_tb.py"


def write(folder: Path, points, **options):
    """One writer's life: (tag, value, step[, wall_time]) in order; returns its file. `options` go to SummaryWriter, but for new_style."""
    from torch.utils.tensorboard import SummaryWriter

    new_style, before = options.pop("new_style", False), set(folder.glob("*"))
    with SummaryWriter(str(folder), **options) as writer:
        for tag, value, step, *wall in points:
            writer.add_scalar(tag, value, step, walltime=wall[0] if wall else None, new_style=new_style)
    (path,) = set(folder.glob("*")) - before
    return path


def curve(n: int, first: int = 0, tag: str = "train/loss", wall: float = 1000.0):
    return [(tag, 16 - 0.1 * s, s, wall + s) for s in range(first, first + n)]


def main(*argv) -> int:
    """The script as its guard runs it, in this process."""
    return console.run_stage("07_read_tb", lambda: stage.main([str(a) for a in argv]))


def read_run(source: Path) -> tb.Run:
    (run,) = tb.read([source])
    return run


def pour(series) -> dict:
    return {tag: [column.tolist() for column in s[:3]] for tag, s in series.items()}


def record_ends(path: Path) -> list[int]:
    """Offset past each record, by the framing alone."""
    data, ends = path.read_bytes(), [0]
    while ends[-1] + 12 <= len(data):
        ends.append(ends[-1] + 16 + struct.unpack_from("<Q", data, ends[-1])[0])
    return ends[1:]


@pytest.fixture(scope="module")
def hundred(tmp_path_factory) -> Path:
    """An event file of 100 points of train/loss."""
    return write(tmp_path_factory.mktemp("hundred"), curve(100))


# -------------------------------------------------------------- the rows of the table of known faults


def test_tb1_every_point_is_kept(tmp_path):
    """Of 10,500 points none is sampled away, as the default of TensorBoard's accumulator does beyond 10,000."""
    write(tmp_path / "tensorboard", curve(10_500))
    series = read_run(tmp_path).series["train/loss"]
    np.testing.assert_array_equal(series.steps, np.arange(10_500))


def test_tb2_truncated_last_record_is_said(tmp_path, hundred, capsys):
    """A file cut 7 bytes short yields 99 points and one [warn] with the last good offset, the size and the bytes left."""
    cut = tmp_path / hundred.name
    cut.write_bytes(hundred.read_bytes()[:-7])
    good, size = record_ends(hundred)[-2], cut.stat().st_size
    assert main(cut) == 0
    out = capsys.readouterr().out
    assert (
        f"[warn] {cut}: truncated record (a live run, in the middle of a write); stopped at byte {good} of {size}, {size - good} bytes left unread"
        in out
    )
    assert "points 99\n" in out


def test_tb3_flipped_byte_is_said(tmp_path, hundred, capsys):
    """A flipped byte in the middle stops the reading there, with a [warn]; --strict makes it exit 5, after the table."""
    broken = tmp_path / hundred.name
    data = bytearray(hundred.read_bytes())
    data[len(data) // 2] ^= 0x10
    broken.write_bytes(data)
    good = max(end for end in record_ends(hundred) if end <= len(data) // 2)
    assert main(broken) == 0
    assert f"stopped at byte {good} of {len(data)}, {len(data) - good} bytes left unread" in capsys.readouterr().out
    assert main(broken, "--strict") == 5
    captured = capsys.readouterr()
    assert "train/loss" in captured.out and "[done]" not in captured.out
    assert f"stopped at byte {good} of {len(data)}" in captured.err
    assert main(hundred, "--strict") == 0  # a whole file passes


def test_tb4_resume_without_purge_keeps_the_newest(tmp_path, capsys):
    """Steps 0..99, then a restart's 50..119: 120 points in order, the restart's values where both wrote, 50 said to be replaced."""
    write(tmp_path, [("train/loss", 1.0, s, 1000.0 + s) for s in range(100)])
    write(tmp_path, [("train/loss", 2.0, s, 2000.0 + s) for s in range(50, 120)])
    assert main(tmp_path) == 0
    assert "[ok] replaced: 50 points" in capsys.readouterr().out
    series = read_run(tmp_path).series["train/loss"]
    np.testing.assert_array_equal(series.steps, np.arange(120))
    np.testing.assert_array_equal(series.values, [1.0] * 50 + [2.0] * 70)


def test_tb4_newest_is_by_time_not_by_file_name(tmp_path):
    """Files that sort against their time (another host, a copied file) still yield the newest value."""
    write(tmp_path, [("a", 2.0, 7, 2000.0)])
    write(tmp_path, [("a", 1.0, 7, 1000.0)])
    assert read_run(tmp_path).series["a"].values.tolist() == [2.0]


def test_tb4_a_rewound_tail_is_dropped(tmp_path, capsys):
    """A restart opened with purge_step=50 that has reached only step 59 takes back 60..99: the last step is 59, 40 are said to be rewound."""
    write(tmp_path, curve(100))
    write(tmp_path, [("train/loss", 2.0, s) for s in range(50, 60)], purge_step=50)
    assert main(tmp_path) == 0
    out = capsys.readouterr().out
    assert "[ok] replaced: 10 points" in out and "[ok] rewound: 40 points" in out
    assert read_run(tmp_path).series["train/loss"].steps.tolist() == list(range(60))


def test_tb5_one_row_per_tag(tmp_path, capsys):
    """A folder of several restarts prints each tag once, and its last point is the run's, not a file's."""
    for first in (0, 40, 80):
        write(tmp_path / "tensorboard", curve(50, first, wall=1000.0 + first))
    assert main(tmp_path) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("train/loss")]
    assert len(rows) == 1 and rows[0][1] == "130" and rows[0][5] == "(129)"


def test_tb6_tensor_scalars_are_merged(tmp_path):
    """Scalars in tensor form (TF2, new_style=True) join those in the old form under one tag; none is sampled away."""
    write(tmp_path, curve(100, 0), new_style=True)
    write(tmp_path, curve(100, 100))
    series = read_run(tmp_path).series["train/loss"]
    np.testing.assert_array_equal(series.steps, np.arange(200))
    np.testing.assert_array_equal(series.values, np.float32([v for _, v, *_ in curve(200)]).astype(float))


def test_tb6_other_kinds_are_no_scalars(tmp_path):
    """Text and histograms beside the scalars are passed over."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_text("note", "hello", 0)
        writer.add_histogram("weights", np.arange(9.0), 0)
        writer.add_scalar("a", 1.0, 0)
    assert list(read_run(tmp_path).series) == ["a"]


def test_tb10_points_without_a_step_are_kept(tmp_path, capsys):
    """A tag written without global_step keeps all its points in order of time, and a [warn] says so."""
    write(tmp_path, [("a", float(v), None, 1000.0 + v) for v in range(100)] + [("train/loss", 1.0, 0), ("train/loss", 0.5, 1)])
    assert main(tmp_path) == 0
    out = capsys.readouterr().out
    assert "[warn] no global_step: a: all points at one step" in out and "replaced" not in out
    assert read_run(tmp_path).series["a"].values.tolist() == list(range(100))


def test_tb10_one_point_per_restart_is_a_restart(tmp_path):
    """One value a restart at the same step (a parameter count) is a replaced point, not a missing step."""
    for value in (1.0, 2.0):
        write(tmp_path, [("model/parameters", value, 0, 1000.0 + value)])
    run = read_run(tmp_path)
    assert run.series["model/parameters"].values.tolist() == [2.0] and run.replaced == 1


# -------------------------------------------------------------- properties


@given(st.data())
def test_any_cut_or_flip_is_found(hundred, data):
    """Whatever the offset of a cut or of a flipped bit: the records before it are read, the rest is counted, and only a cut between records passes."""
    whole, ends = hundred.read_bytes(), record_ends(hundred)
    at, bit = data.draw(st.integers(0, len(whole) - 1), "offset"), data.draw(st.sampled_from([None, *range(8)]), "bit (None: cut)")
    bad = whole[:at] if bit is None else whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]
    good = max((end for end in ends if end <= at), default=0)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "events.out.tfevents.1").write_bytes(bad)
        records = ends.index(good) if good else 0  # the first record is the file's version, not a point
        if not records:
            with pytest.raises(console.Precondition, match="scalars in the event files"):
                read_run(Path(folder))
            return
        run = read_run(Path(folder))
    assert run.points == records
    assert (run.files[0].read, run.files[0].size) == (good, len(bad))
    assert bool(run.files[0].fault) == (good != len(bad))


VALUE = st.one_of(st.floats(width=32), st.sampled_from([0.0, math.nan, math.inf, -math.inf]))
POINTS = st.lists(st.tuples(st.sampled_from(["train/loss", "val/loss", "z"]), st.integers(0, 8), VALUE), max_size=12)
LIFE = st.tuples(st.one_of(st.none(), st.integers(1, 6)), POINTS, st.one_of(st.just(0), st.integers(1, 150)))
LIVES = st.lists(LIFE, min_size=1, max_size=4)  # (purge_step, points, bytes cut from the end) of each writer


def whole_ends(path: Path) -> list[int]:
    return [end for end in record_ends(path) if end <= path.stat().st_size]


def model(lives):
    """The table by the plainest means: a dict a tag, filled in order of time; a restart with a first step takes back what lies beyond."""
    written, kept, at_one_step = defaultdict(list), defaultdict(dict), set()
    for _, points in lives:
        for tag, step, value in points:
            written[tag].append((step, value))
    for tag, points in written.items():
        most = max(Counter(t for t, *_ in life)[tag] for _, life in lives)
        if most > 1 and len({step for step, _ in points}) == 1:
            at_one_step.add(tag)
    for purge, points in lives:
        for tag in kept if purge is not None else ():
            kept[tag] = {step: value for step, value in kept[tag].items() if step < purge}
        for tag, step, value in points:
            kept[tag][step] = value
    series = {tag: written[tag] if tag in at_one_step else sorted(kept[tag].items()) for tag in written}
    dropped = sum(len(written[tag]) - len(series[tag]) for tag in written)
    distinct = sum(len({step for step, _ in written[tag]}) for tag in written if tag not in at_one_step)
    rewound = distinct - sum(len(series[tag]) for tag in written if tag not in at_one_step)
    return {tag: points for tag, points in series.items() if points}, dropped - rewound, rewound


@given(LIVES)
@example([(None, [("z", 0, 1.0), ("z", 0, 2.0)], 0), (None, [("z", 0, 3.0)], 0)])  # no steps, over a restart
@example([(None, [("z", 5, 1.0)], 0), (3, [("train/loss", 3, 1.0)], 0)])  # a tag that is wholly rewound
@example([(None, [("z", 5, 1.0)], 0), (3, [], 0)])  # nothing is left
@example([(None, [("z", 5, 1.0)], 0), (3, [("z", 3, 1.0)], 70)])  # the cut takes the purge as well
def test_any_restarts_and_cuts_match_a_plain_model(lives):
    """Any sequence of writes over several restarts, with and without purge_step, each file cut anywhere: the series, counts and figures are a plain-Python model's."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from torch.utils.tensorboard import SummaryWriter

    clock, survived = iter(range(1000, 10_000)), []
    with tempfile.TemporaryDirectory() as folder:
        for purge, points, cut in lives:
            before = set(Path(folder).iterdir())
            with SummaryWriter(folder) as writer:
                if purge is not None:  # what purge_step writes, on our clock
                    writer.file_writer.add_event(Event(session_log=SessionLog(status=SessionLog.START)), purge, float(next(clock)))
                for tag, step, value in points:
                    writer.add_scalar(tag, value, step, walltime=float(next(clock)))
            (path,) = set(Path(folder).iterdir()) - before
            ends, size = record_ends(path), max(0, path.stat().st_size - cut)
            os.truncate(path, size)
            whole = sum(end <= size for end in ends) - 1  # the first record is the file's version
            has_purge = purge is not None
            survived.append((purge if whole >= has_purge else None, points[: max(0, whole - has_purge)]))
        expected, replaced, rewound = model(survived)
        if not expected:
            with pytest.raises(console.Precondition, match="scalars"):
                read_run(Path(folder))
            return
        run = read_run(Path(folder))
        assert sum(f.size - f.read for f in run.files) == sum(p.stat().st_size - max([0, *whole_ends(p)]) for p in Path(folder).iterdir())
    assert stage.tags_of(run) == [tag for tag in ("train/loss", "val/loss", "z") if tag in expected]
    assert (run.replaced, run.rewound) == (replaced, rewound)
    for tag, points in expected.items():
        np.testing.assert_array_equal(run.series[tag].steps, [step for step, _ in points])
        np.testing.assert_array_equal(run.series[tag].values, [value for _, value in points])
        row, finite = stage.row(run.series[tag]), sorted(value for _, value in points if math.isfinite(value))
        assert (row["count"], row["non_finite"]) == (len(points), len(points) - len(finite))
        np.testing.assert_array_equal((row["first_step"], row["first"], row["last_step"], row["last"]), (*points[0], *points[-1]))
        if finite:
            middle = (finite[(len(finite) - 1) // 2] + finite[len(finite) // 2]) / 2
            np.testing.assert_array_equal((row["min"], row["p50"], row["max"]), (finite[0], middle, finite[-1]))
        assert len(stage.sparkline(run.series[tag].values)) == min(len(points), stage.TREND_WIDTH)


# -------------------------------------------------------------- figures and outputs


def test_metrics_that_matter_come_first(tmp_path, capsys):
    """Rows follow FIRST_TAGS, val/* after them, then the rest by name."""
    tags = [
        "zeta",
        "val/loss",
        "time/step",
        "train/loss",
        "alpha",
        "train/loss_ema",
        "train/grad_norm",
        "val/action",
        "train/learning_rate",
    ]
    write(tmp_path, [(tag, 1.0, step) for tag in tags for step in (0, 1)])
    assert main(tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [
        line.split()[0] for line in lines[lines.index(next(x for x in lines if x.startswith("tag "))) + 1 :] if not line.startswith("[")
    ]
    assert shown == [
        "train/loss",
        "train/grad_norm",
        "train/learning_rate",
        "time/step",
        "val/action",
        "val/loss",
        "alpha",
        "train/loss_ema",
        "zeta",
    ]


BUSY = [5 + 0.1 * math.sin(7.0 * s) for s in range(100)]  # a steady loss with some movement


@pytest.mark.parametrize(
    ("points", "prefix", "texts"),
    [
        ({"train/loss": [16.0 - s for s in range(10)] + [3.0] * 10}, "[ok]", ["falling: 15.5 (mean of first 2) -> 3 (mean of last 2)"]),
        ({"train/loss": [1.0] * 10 + [2.0] * 10}, "[warn]", ["NOT falling: 1 (mean of first 2) -> 2 (mean of last 2)"]),
        ({"train/loss": [3.0] * 10 + [math.nan, math.inf] + [1.0] * 10}, "[warn]", ["falling: 3 (mean", "non-finite points: 2"]),
        ({"train/loss": [math.nan, 1.0]}, "[warn]", ["fewer than two finite points of train/loss; non-finite points: 1"]),
        ({"train/loss": [10 - 0.1 * s + 20 * (s == 40) for s in range(90)]}, "[warn]", ["SPIKES: 1, the last at step 40"]),
        ({"train/loss": [10.0 - s for s in range(9)] + BUSY}, "[warn]", ["PLATEAU"]),
        (
            {"train/loss": [9.0 - s for s in range(8)], "train/grad_norm": [14.8, 3, 1.5, 1.0, 0.9, math.nan, 0.1, 0.1]},
            "[warn]",
            ["clipped steps: 43%"],
        ),
        ({"train/loss": [9.0, 1.0], "time/step": [10.0, 10.0], "time/data": [1.0, 0.5]}, "[ok]", ["waiting for data: 7.5%"]),
        ({"train/loss": [9.0, 1.0], "time/step": [10.0, 10.0], "time/data": [5.0, 0.5]}, "[warn]", ["waiting for data: 27.5%"]),
    ],
)
def test_health_line(tmp_path, capsys, points, prefix, texts):
    """The health line says whether the loss falls, spikes, stands still or is not finite, the clipped share and the wait for data; it warns where one is ill."""
    now = time.time()
    write(tmp_path, [(tag, v, s, now - 100 + s) for tag, values in points.items() for s, v in enumerate(values)])
    stage.show(read_run(tmp_path))
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(f"{prefix} health: ") and all(text in line for text in texts), line


@given(st.integers(0, 2**32 - 1))
def test_noise_and_steep_falls_are_no_spikes(seed):
    """Gaussian noise around a steep exponential fall holds no spike; one point raised by 30 standard deviations is the only one found."""
    rng = np.random.default_rng(seed)
    values = 15 * np.exp(-np.arange(300) / 30) + 1 + 0.02 * rng.standard_normal(300)
    assert len(stage.spikes(values)) == 0
    at = int(rng.integers(100, 295))
    values[at] += 0.6
    assert stage.spikes(values).tolist() == [at]


@pytest.mark.parametrize(
    ("steps", "age", "pace", "ill"),
    [
        (120, 5, "step 100 of 120; 0.1 steps/s (10 s a step); 3.3 min left; last event 5 s ago", None),
        (100, 7200, "step 100 of 100; 0.1 steps/s (10 s a step); finished; last event 2.0 h ago", None),
        (120, 7200, "step 100 of 120; 0.1 steps/s (10 s a step); 3.3 min left; last event 2.0 h ago", "; STALLED"),
        (None, 7200, "step 100; 0.1 steps/s (10 s a step); last event 2.0 h ago", "; ended or STALLED"),
    ],
)
def test_pace(tmp_path, capsys, steps, age, pace, ill):
    """Speed is that since the last restart; the time left follows from args.json; silence for long is a stall unless the last step is reached."""
    end = time.time() - age - 0.01
    write(tmp_path / "tensorboard", [("train/loss", 9 - 0.01 * s, s, end - 5000 - 10 * (100 - s)) for s in range(1, 60)])
    write(tmp_path / "tensorboard", [("train/loss", 9 - 0.01 * s, s, end - 10 * (100 - s)) for s in range(51, 101)])
    if steps:
        (tmp_path / "args.json").write_text(json.dumps({"steps": steps}))
    run = read_run(tmp_path)
    assert [step for _, step in run.restarts] == [51] and not run.writers_at_once
    stage.show(run)
    *_, first, second = capsys.readouterr().out.splitlines()
    assert first == f"[ok] pace: {pace}"
    assert second.startswith("[warn]" if ill == "; STALLED" else "[ok]") and ("STALLED" in second) == bool(ill) and (ill or "") in second


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(-1e6, 1e6, width=32)), min_size=2, max_size=60, unique_by=lambda p: p[0]))
def test_slope_is_least_squares(points):
    """The slope column is numpy's least-squares line through the last tenth of the points, at least two."""
    steps, values = np.array(sorted(points)).T
    last = max(2, len(points) // 10)
    found = stage.row(tb.Series(steps.astype(np.int64), steps, values, False))["slope"]
    fitted = np.polyfit(steps[-last:] - steps[-1], values[-last:], 1)[0]
    np.testing.assert_allclose(found, fitted, rtol=1e-6, atol=1e-6 * np.abs(values[-last:]).max() / np.ptp(steps[-last:]))


def test_json_is_strict(tmp_path):
    """Non-finite values stand as null in the JSON, which a parser that refuses NaN reads; the figures are the table's."""
    write(tmp_path / "run", [("a", math.nan, 0), ("a", 2.0, 1), ("a", math.inf, 2), ("b", -math.inf, 0)])
    assert main(tmp_path / "run", "--json", tmp_path / "out" / "t.json") == 0

    def refuse(constant):
        raise AssertionError(f"{constant} in strict JSON")

    (run,) = json.loads((tmp_path / "out" / "t.json").read_text(), parse_constant=refuse)["runs"]
    figures = dict(count=3, first=None, first_step=0, last=None, last_step=2, min=2.0, p50=2.0, max=2.0, slope=None, non_finite=2)
    assert run["series"]["a"] == figures
    assert run["series"]["b"]["min"] is None and run["points"] == 4 and run["health"]["non_finite"] == 3
    assert run["files"][0]["read_bytes"] == run["files"][0]["bytes"] and run["files"][0]["fault"] is None


def test_csv_round_trip(tmp_path):
    """The CSV holds every point at full precision: parsed back, step, time and value are bit-equal, non-finite ones included."""
    rng = random.Random(0)
    values = [rng.uniform(-1, 1) * 10 ** rng.randint(-30, 30) for _ in range(50)] + [math.nan, math.inf, -math.inf]
    write(tmp_path / "run", [(tag, v, s) for s, v in enumerate(values) for tag in ("a,b", 'c"d')])
    assert main(tmp_path / "run", "--csv", tmp_path / "p.csv") == 0
    with open(tmp_path / "p.csv", newline="") as f:
        rows = list(csv.DictReader(f))
    assert list(rows[0]) == ["tag", "step", "wall_time", "value"]
    for tag, series in read_run(tmp_path / "run").series.items():
        mine = [r for r in rows if r["tag"] == tag]
        np.testing.assert_array_equal([int(r["step"]) for r in mine], series.steps)
        np.testing.assert_array_equal([float(r["wall_time"]) for r in mine], series.walls)
        np.testing.assert_array_equal([float(r["value"]) for r in mine], series.values)
        np.testing.assert_array_equal(series.values, np.float32(values).astype(float))


def test_wide_csv_holds_every_point_once(tmp_path):
    """The wide CSV has a line a step in order and a column a tag in the table's order; what it holds is the long one's, and gaps are empty."""
    write(
        tmp_path / "run",
        [("b", float(s), s) for s in range(0, 9, 2)] + [("train/loss", s / 3, s) for s in range(0, 9, 3)] + [("c", 1.0, None)] * 2,
    )
    assert main(tmp_path / "run", "--csv-wide", tmp_path / "w.csv", "--csv", tmp_path / "l.csv") == 0
    with open(tmp_path / "w.csv", newline="") as f:
        rows = list(csv.DictReader(f))
    assert list(rows[0]) == ["step", "train/loss", "b"] and [r["step"] for r in rows] == ["0", "2", "3", "4", "6", "8"]
    with open(tmp_path / "l.csv", newline="") as f:
        long = {(r["tag"], r["step"]): r["value"] for r in csv.DictReader(f) if r["tag"] != "c"}
    assert long == {(tag, r["step"]): r[tag] for r in rows for tag in ("train/loss", "b") if r[tag] != ""}


def test_csv_of_several_runs_names_them(tmp_path):
    """With two runs a column `run` leads, and the table is printed once per run."""
    for name in ("one", "two"):
        write(tmp_path / name, curve(3))
    assert main(tmp_path / "one", tmp_path / "two", "--csv", tmp_path / "p.csv") == 0
    with open(tmp_path / "p.csv", newline="") as f:
        assert Counter(r["run"] for r in csv.DictReader(f)) == {str(tmp_path / "one"): 3, str(tmp_path / "two"): 3}


@pytest.mark.parametrize(("tags", "height"), [(1, 310), (4, 560)])
def test_plot_is_a_png_of_the_promised_size(tmp_path, tags, height):
    """The plot is a PNG 1200 px wide with a row of panels per three tags, and is not blank; short, NaN and stepless series are drawn too."""
    points = [("t0/loss", 100 * 0.9**s, s) for s in range(60)] + [("t1", math.nan, s) for s in range(30)]
    points += [("t2", 1.0, 0)] + [("t3", float(s % 7) if s % 5 else math.inf, None) for s in range(40)]
    write(tmp_path / "run", [p for p in points if int(p[0][1]) < tags])
    assert main(tmp_path / "run", "--plot", tmp_path / "p.png") == 0
    data = (tmp_path / "p.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", data[16:24]) == (1200, height)
    from matplotlib.image import imread

    assert imread(tmp_path / "p.png")[..., :3].std() > 0.02


def test_loss_axis_is_logarithmic_only_where_it_helps(tmp_path, monkeypatch):
    """A loss or norm that falls tenfold gets a log axis; one that hardly moves, one that touches zero, and any other tag do not."""
    from matplotlib.figure import Figure

    figures = {"a/loss": lambda s: 100 * 0.9**s, "b/loss": lambda s: 15.7 - 0.001 * s, "c/loss": float, "d/norm": lambda s: 100 * 0.9**s}
    figures["e/rate"] = figures["d/norm"]
    write(tmp_path / "run", [(tag, value(s), s) for tag, value in figures.items() for s in range(60)])
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: (drawn.extend(self.axes), Path(path).write_bytes(b"x")))
    assert main(tmp_path / "run", "--plot", tmp_path / "p.png") == 0
    assert {a.get_title("left") for a in drawn if a.get_yscale() == "log"} == {"a/loss", "d/norm"}
    assert {a.get_title("left") for a in drawn if a.get_visible()} == set(figures)


# -------------------------------------------------------------- the script as a script


def test_preconditions_have_their_own_messages(tmp_path, capsys):
    """Missing folder, folder without event files, a run before its first scalar, one whose scalars are all rewound: exit 3, each with its own text."""
    from torch.utils.tensorboard import SummaryWriter

    (tmp_path / "empty").mkdir()
    SummaryWriter(str(tmp_path / "fresh")).close()
    write(tmp_path / "old", [("a", 1.0, 5)])
    write(tmp_path / "old", [], purge_step=1)
    for path in (tmp_path / "old").iterdir():
        os.utime(path, (0, 0))
    for name, text in {
        "absent": "found nothing there",
        "empty": "expected event files (*tfevents*) in",
        "fresh": "to mend: the run is still writing",
        "old": "none (1 rewound by a restart)",
    }.items():
        assert main(tmp_path / name) == 3
        assert text in capsys.readouterr().err


def test_existing_output_needs_force(tmp_path, hundred, capsys):
    """An existing output is exit 4 and stays as it was; --force replaces it; nothing partial is left beside it."""
    out = tmp_path / "p.csv"
    out.write_text("mine")
    assert main(hundred, "--csv", out) == 4
    assert out.read_text() == "mine" and "--force" in capsys.readouterr().err
    assert main(hundred, "--csv", out, "--force") == 0
    assert len(out.read_text().splitlines()) == 101 and list(tmp_path.iterdir()) == [out]


def test_dry_run_writes_nothing(tmp_path, hundred, capsys):
    """A dry run names what it would read and write, and leaves the disk as it was."""
    outputs = {f"--{kind}": tmp_path / "new" / f"o.{kind}" for kind in ("csv", "csv-wide", "json", "plot")}
    assert main(hundred, *(x for pair in outputs.items() for x in pair), "--dry-run") == 0
    out = capsys.readouterr().out
    assert all(f"[plan] write: {path}" in out for path in outputs.values()) and "[done]" not in out
    assert list(tmp_path.iterdir()) == []


def test_as_a_user_runs_it(tmp_path, hundred):
    """Run as a script: 0 with a last [done] line, 2 on a shortened flag or two outputs in one file, 3 on a missing run; an ASCII terminal gets ASCII."""
    good = run_script(SCRIPT, hundred, "--json", tmp_path / "t.json", env={"PYTHONIOENCODING": "ascii"})
    assert good.returncode == 0, good.stderr
    assert good.stdout.isascii() and good.stdout.splitlines()[-1] == f"[done] 07_read_tb runs=1 tags=1 points=100 out={tmp_path / 't.json'}"
    assert run_script(SCRIPT, hundred, "--dry").returncode == 2
    assert run_script(SCRIPT, hundred, "--csv", tmp_path / "x", "--json", tmp_path / "x").returncode == 2
    assert run_script(SCRIPT, tmp_path / "absent").returncode == 3


def test_help_is_quick():
    """--help answers within a second of a processor and loads nothing heavy."""
    with processor_seconds(1):
        assert "--plot FILE.png" in run_script(SCRIPT, "--help").stdout
    code = f"import runpy, sys; runpy.run_path({SCRIPT!r}); print([m for m in ('tensorboard', 'matplotlib', 'torch') if m in sys.modules])"
    assert run_script("-c", code, launcher=[sys.executable]).stdout.strip() == "[]"


# -------------------------------------------------------------- the reader


@given(st.integers(0, 70), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_crc_is_tensorboards(length, rows, seed):
    """The checksum of many records at once is, row by row, that of TensorBoard's own byte-wise function."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    data = np.random.default_rng(seed).integers(0, 256, (rows, length), dtype=np.uint8)
    np.testing.assert_array_equal(tb.masked_crc(data), [masked_crc32c(row.tobytes()) for row in data])


def event(wall, step, tag, value) -> bytes:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Event(wall_time=wall, step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)])).SerializeToString()


def taken(records: list[bytes]) -> tuple:
    """What the reader takes from these records: how many, and the points."""
    run = tb.Run("r", Path("r"))
    done = run._read_block(tb.EventFile(Path("f")), records)
    return done, {tag: [np.array(c).tobytes() for c in (p.walls, p.steps, p.values)] for tag, p in run.written.items()}, run.purges


def test_plain_events_are_read_without_protobuf(monkeypatch):
    """The pattern takes what add_scalar writes, with step 0 and large steps: protobuf is not asked."""
    monkeypatch.setattr(tb, "parse", None)
    assert taken([event(1.5, step, "train/loss", 0.25) for step in (0, 1, 127, 128, 2**40)])[0] == 5


def by_protobuf_alone(records: list[bytes]) -> tuple:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tb, "SCALAR", re.compile(b"$."))
        return taken(records)


@given(st.data())
def test_pattern_agrees_with_protobuf(data):
    """Any Event of one scalar, with any bytes of it changed, gives the points, or the refusal, that protobuf alone gives."""
    tags = st.one_of(st.text(max_size=12), st.sampled_from(["train/loss", "x" * 118, "x" * 119, "x" * 300, "é/日"]))
    steps = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(0, 300))
    records = []
    for wall, step, tag, value in data.draw(st.lists(st.tuples(st.floats(), steps, tags, st.floats(width=32)), min_size=1, max_size=4)):
        record = bytearray(event(wall, step, tag, value))
        for at, byte in data.draw(st.lists(st.tuples(st.integers(0, len(record) - 1), st.integers(0, 255)), max_size=2)):
            record[at] = byte
        records.append(bytes(record))
    assert taken(records) == by_protobuf_alone(records)


def test_every_single_byte_change_agrees_with_protobuf():
    """Each byte of a plain event set to each of its 256 values: the pattern accepts nothing that protobuf reads otherwise."""
    record = event(1.5, 300, "a/b", 0.25)
    for at in range(len(record)):
        changed = [record[:at] + bytes([byte]) + record[at + 1 :] for byte in range(256)]
        assert [taken([r]) for r in changed] == [by_protobuf_alone([r]) for r in changed], at


def test_a_purge_takes_back_only_what_is_older():
    """A point written at the very time of a restart belongs to the restart."""
    points = tb.Points()
    for column, values in zip(
        (points.walls, points.steps, points.values, points.files), ((1.0, 2.0), (7, 8), (0.0, 0.0), (0, 0)), strict=True
    ):
        column.extend(values)
    series, replaced, rewound = tb.merge(points, [(2.0, 5)])
    assert (series.steps.tolist(), replaced, rewound) == ([8], 0, 1)


def test_a_record_that_is_no_event(tmp_path, hundred):
    """A record with good checksums that protobuf refuses ends the reading, with its offset; what stood before it counts."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    head, body = struct.pack("<Q", 3), b"\xff\xff\xff"
    junk = head + struct.pack("<I", masked_crc32c(head)) + body + struct.pack("<I", masked_crc32c(body))
    path = tmp_path / hundred.name
    path.write_bytes(hundred.read_bytes() + junk + hundred.read_bytes())
    run = read_run(path)
    assert run.points == 100 and run.files[0].read == hundred.stat().st_size and run.files[0].fault == tb.NO_EVENT


def test_length_gone_mad_is_corrupt_and_not_truncated(tmp_path, hundred):
    """A length field that points past the end of the file is told by its checksum; it is no truncation."""
    data, at = bytearray(hundred.read_bytes()), record_ends(hundred)[50]
    data[at + 6] ^= 1
    (tmp_path / hundred.name).write_bytes(data)
    run = read_run(tmp_path)
    assert run.points == 50 and run.files[0].fault == tb.BAD_LENGTH and run.files[0].read == at


def test_old_and_live_truncation_read_differently(tmp_path, hundred, capsys):
    """A cut file written to a moment ago belongs to a live run; one that nobody has touched for long, to a killed one."""
    cut = tmp_path / hundred.name
    cut.write_bytes(hundred.read_bytes()[:-7])
    os.utime(cut, (0, 0))
    assert main(cut) == 0
    assert "truncated record (a killed run)" in capsys.readouterr().out


def test_records_longer_than_a_block(tmp_path, monkeypatch):
    """With blocks of 100 bytes, records that do not fit are put together: the points are the same."""
    path = write(tmp_path, [*curve(30), ("t" * 300, 1.0, 5), *curve(30, 30)])
    whole = pour(read_run(path).series)
    monkeypatch.setattr(tb, "BLOCK", 100)
    assert pour(read_run(path).series) == whole and len(whole["train/loss"][0]) == 60


@given(st.lists(st.integers(0, 900), min_size=1, max_size=12), st.booleans())
def test_growing_in_any_pieces_equals_one_read(hundred, pieces, second):
    """A file that grows by any pieces, cut anywhere, with another beside it, gives what one look gives, and each byte is read once."""
    data = hundred.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        path, runs = Path(folder) / "events.out.tfevents.1", tb.Runs([Path(folder)])
        path.touch()
        for size in [*pieces, len(data)]:
            with open(path, "ab") as f:
                f.write(
                    data[: min(size, len(data) - path.stat().st_size)] if path.stat().st_size == 0 else data[path.stat().st_size :][:size]
                )
            grown = sum(f.fetched for run in runs.runs.values() for f in run.files)
            news = runs.refresh()
            fetched = sum(f.fetched for run in runs.runs.values() for f in run.files)
            assert fetched == path.stat().st_size and news == (fetched > grown)
        if second:
            (Path(folder) / "events.out.tfevents.2").write_bytes(data[:2000])
            runs.refresh()
        (run,) = runs.with_scalars()
        once = read_run(Path(folder))
    assert pour(run.series) == pour(once.series) and (run.points, run.replaced) == (once.points, once.replaced)
    assert sum(f.fetched for f in run.files) == len(data) + 2000 * second


# -------------------------------------------------------------- several runs


def test_tb9_two_writers_at_once_are_merged_and_said(tmp_path, capsys):
    """Two files growing in one folder (every rank logs): both are read and followed, one row a tag, and a [warn] names the cause; no restart is seen."""
    now = time.time()
    write(tmp_path, [("rank0/loss", 1.0, s, now + s) for s in range(50)])
    write(tmp_path, [("rank1/loss", 2.0, s, now + s + 0.5) for s in range(50)])
    assert main(tmp_path) == 0
    out = capsys.readouterr().out
    run = read_run(tmp_path)
    assert "[warn] writers: files of this folder were written at the same time" in out and "restarts" not in out
    assert {tag: len(s.steps) for tag, s in run.series.items()} == {"rank0/loss": 50, "rank1/loss": 50}


def test_tb12_summary_in_the_table_all_points_in_the_csv(tmp_path, capsys):
    """Many runs: a line a tag with last, min, p50 in the table; every step only in the CSV."""
    for name, top in (("a", 100.0), ("b", 50.0)):
        write(tmp_path / name / "tensorboard", [("train/loss", top - s, s) for s in range(40)])
    assert main(tmp_path, "--csv", tmp_path / "all.csv") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("train/loss")]
    assert [r[1:9] for r in rows] == [
        ["40", "100", "(0)", "61", "(39)", "61", "80.5", "100"],
        ["40", "50", "(0)", "11", "(39)", "11", "30.5", "50"],
    ]
    assert len((tmp_path / "all.csv").read_text().splitlines()) == 81


def test_a_root_of_runs_and_each_of_its_parts(tmp_path):
    """A logs root gives a run per folder, named without its tensorboard folder; the run, its tensorboard folder and its file give that run alone."""
    for name in ("a", "b/deep"):
        write(tmp_path / name / "tensorboard", curve(5))
    write(tmp_path / "flat", curve(5))
    assert [run.name for run in tb.read([tmp_path])] == [str(tmp_path / n) for n in ("a", "b/deep", "flat")]
    (path,) = (tmp_path / "a/tensorboard").iterdir()
    (tmp_path / "a/args.json").write_text('{"steps": 9}')
    for source in (tmp_path / "a", tmp_path / "a/tensorboard", path):
        run = read_run(source)
        assert (run.name, run.points, run.max_steps) == (str(source), 5, 9)
    for other in ("[]", "{", '{"steps": "many"}', "{}"):
        (tmp_path / "a/args.json").write_text(other)
        assert read_run(tmp_path / "a").max_steps is None


def test_a_run_without_scalars_beside_others(tmp_path, capsys):
    """One run of a root that has not logged yet does not stop the look at the others: it is named, the rest is shown and written."""
    from torch.utils.tensorboard import SummaryWriter

    write(tmp_path / "a", curve(5))
    SummaryWriter(str(tmp_path / "b")).close()
    assert main(tmp_path, "--json", tmp_path / "t.json", "--plot", tmp_path / "p.png") == 0
    assert "[warn] no scalars: in these files yet" in capsys.readouterr().out


def test_compare_at_equal_steps(tmp_path, capsys):
    """--compare shows each important tag that all runs share at steps that all have, by the value each had there; fewer than two runs is exit 3."""
    write(tmp_path / "a", [("train/loss", 100.0 - s, s) for s in range(0, 60, 2)] + [("other", 1.0, 0)])
    write(tmp_path / "b", [("train/loss", 200.0 - s, s) for s in range(0, 90, 3)] + [("val/loss", 1.0, 6), ("other", 1.0, 0)])
    assert main(tmp_path / "a", tmp_path / "b", "--compare") == 0
    out = capsys.readouterr().out.splitlines()
    begin = next(i for i, line in enumerate(out) if line.split() == ["train/loss", "a", "b"])
    rows = [line.split() for line in out[begin + 1 : -1]]
    assert len(rows) == stage.COMPARED and all(r[0] == "step" for r in rows)
    assert [int(r[1]) for r in rows] == sorted({int(r[1]) for r in rows}) and rows[0][1] == "0" and rows[-1][1] == "54"
    assert all(int(r[1]) % 6 == 0 and (float(r[2]), float(r[3])) == (100 - int(r[1]), 200 - int(r[1])) for r in rows)
    assert main(tmp_path / "a", "--compare") == 3


# -------------------------------------------------------------- following


def test_follow_reads_only_new_bytes_and_new_runs(tmp_path, capsys, hundred):
    """--follow waits for the first file, prints on news only, finds files and runs that appear later, reads each byte once, ends on Ctrl-C with 0."""
    data, ends = hundred.read_bytes(), record_ends(hundred)
    file, log = tmp_path / "a" / hundred.name, tmp_path / "run.log"
    (tmp_path / "a").mkdir()
    log.write_bytes(b"[step] step:1/9\n")
    looks, made = [], []
    build = tb.Runs

    def sleep(seconds):
        assert seconds == 0.5
        looks.append(capsys.readouterr().out)
        match len(looks):
            case 1:
                file.write_bytes(data[: ends[50] + 5])
            case 3:
                with open(file, "ab") as f:
                    f.write(data[ends[50] + 5 :])
                with open(log, "ab") as f:
                    f.write(b"[step] step:2/9\n")
            case 4:
                write(tmp_path / "b", curve(3))
            case 5:
                raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tb, "Runs", lambda sources: made.append(build(sources)) or made[-1])
        args = stage.parse_args([str(tmp_path), "--follow", "--interval", "0.5", "--log", str(log), "--expect", "train/loss=0:20@first"])
        assert stage.follow(args, sleep) == 0
    assert "[ok] waiting: no event file" in looks[0] and "points 50" in looks[1] and looks[2] == ""
    assert "points 100" in looks[3] and "line 2: [step] step:2/9" in looks[3] and str(tmp_path / "b") in looks[4]
    assert "[ok] expect: train/loss@first" in looks[3]
    assert capsys.readouterr().out == "[done] 07_read_tb runs=2 points=103\n"
    (runs,) = made
    assert all(f.fetched == f.path.stat().st_size for run in runs.runs.values() for f in run.files)


@given(
    st.lists(st.text("[ab ", min_size=1, max_size=90).filter(str.strip), min_size=1, max_size=30), st.integers(8, 60), st.integers(3, 20)
)
def test_a_look_fits_the_window(lines, width, height):
    """Whatever the lines and the window: no line is as long as it is wide, there are fewer than it is high, and the last line is there."""
    lines = ["[ok] " + line.replace("[", "") if line.startswith("[") else line for line in lines] + ["end"]
    fitted = stage.fit(lines, width, height)
    assert len(fitted) < height and all(len(line) < width for line in fitted) and fitted[-1] == "end"


def test_a_low_narrow_window_keeps_the_health_line(tmp_path):
    """In 70 columns and 14 rows the last value, the trend and the whole health line stay; rows at the end of the table go, and that is said."""
    write(tmp_path, [(f"tag{i}", 1.0, s, 1000.0) for i in range(20) for s in range(3)] + curve(40))
    args = stage.parse_args([str(tmp_path), "--follow"])
    runs = tb.Runs([tmp_path])
    runs.refresh()
    shown = stage.fit(stage.screen(args, runs, [], 70), 70, 14)
    text = " ".join(" ".join(shown).split())
    assert len(shown) == 13 and "12.1 (39)" in text and "non-finite points: 0; ended or STALLED" in text and "rows too low)" in text


def test_a_file_written_anew_is_read_anew(tmp_path, hundred):
    """A followed file that shrinks was replaced: its run is read from the start, and nothing of the old one stays."""
    path, runs = tmp_path / hundred.name, tb.Runs([tmp_path])
    path.write_bytes(hundred.read_bytes())
    runs.refresh()
    path.write_bytes(hundred.read_bytes()[: record_ends(hundred)[10]])
    assert runs.refresh() and runs.with_scalars()[0].points == 10


def test_follow_in_a_terminal(tmp_path, hundred):
    """In a terminal of 40 columns and 24 rows the look is redrawn in place (no alternate screen), no line wraps, and Ctrl-C ends it with exit 0."""
    import fcntl
    import pty
    import select
    import signal
    import subprocess
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    command = [sys.executable, SCRIPT, hundred.parent, "--follow", "--interval", "0.1"]

    # A test run that was started in the background ignores Ctrl-C, and its children would inherit that.
    reset = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    command = [sys.executable, "-c", reset, *command[1:]]
    process = subprocess.Popen(command, cwd=REPO, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True)
    os.close(theirs)
    seen = b""
    try:
        while seen.count(b"\x1b[H") < 3:
            assert select.select([ours], [], [], 30)[0], "nothing drawn in 30 s"
            seen += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # the other end is closed
            while not (b"[done]" in seen and seen.endswith(b"\n")) and select.select([ours], [], [], 20)[0]:
                seen += os.read(ours, 65536)
        assert process.wait(20) == 0 and b"Traceback" not in seen and b"\x1b[?1049h" not in seen
    finally:
        process.kill()
        os.close(ours)
    frame = seen.decode().split("\x1b[H")[2].split("\x1b[J")[0].replace("\x1b[K", "").splitlines()
    assert len(frame) < 24 and all(len(line) < 40 for line in frame)
    assert any(line.startswith("train/loss") for line in frame) and seen.endswith(b"[done] 07_read_tb runs=1 points=100\r\n")


# -------------------------------------------------------------- checks


def smoke(folder, factor=1.0):
    """The ten steps of the guide, its figures times a factor."""
    for i, (tag, first, last) in enumerate(
        [
            ("train/loss", 15.7, 15.5),
            ("train/flow_matching_loss_action", 1.42, 1.41),
            ("train/flow_matching_loss_vision", 0.144, 0.144),
            ("train/grad_norm", 14.8, 14.8),
        ]
    ):
        write(folder, [(tag, factor * (first + (last - first) * s / 9), s + 1, 1000.0 + s + i / 10) for s in range(10)])


@pytest.mark.parametrize(("factor", "code", "missed"), [(1.0, 0, 0), (1.05, 0, 0), (0.5, 5, 6), (math.nan, 5, 6)])
def test_tb11_the_guides_ten_step_figures(tmp_path, capsys, factor, code, missed):
    """--expect libero-smoke passes the guide's own figures and a run 5 % off; half of them, or NaN, is exit 5 with a [FAIL] line each."""
    smoke(tmp_path, factor)
    assert main(tmp_path, "--expect", "libero-smoke") == code
    captured = capsys.readouterr()
    assert captured.out.count("[FAIL] expect:") == missed and ("[done]" in captured.out) == (code == 0)
    assert ("train/grad_norm@first+9 = " in captured.err) == (code == 5)


def test_tb11_steps_may_count_from_zero(tmp_path):
    """The smoke figures are looked up from the first logged step on, whether the trainer counts from 0 or from 1."""
    write(tmp_path, [("train/loss", 15.6, s) for s in range(10)])
    assert stage.check(read_run(tmp_path), stage.expectation("libero-smoke")[:2]) == []


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("train/loss=15:16@0", 0),
        ("train/loss=15.05:15.2@9", 0),
        ("train/loss=:15.2", 0),
        ("train/loss=15:@last", 0),
        ("train/loss=16:17@first", 0),
        ("train/loss=-1e3:1.6e1@first+1", 0),
        ("train/loss=:@0", 0),
        ("train/loss=0:15", 5),
        ("train/loss=15:16@10", 5),
        ("train/loss=15:16@first+10", 5),
        ("absent=:@first", 5),
        ("train/loss=15", 2),
        ("train/loss=a:b", 2),
        ("train/loss=1-:2", 2),
        ("no-such-list", 2),
    ],
)
def test_expect(tmp_path, text, code):
    """TAG=LO:HI@STEP: bounds are inclusive and may be open, the step may be relative; a missing point or tag is a miss (5), a bad form usage (2)."""
    write(tmp_path, [("train/loss", 16 - 0.1 * s, s) for s in range(10)])
    if code == 2:
        with pytest.raises(SystemExit) as stop:
            stage.parse_args([str(tmp_path), "--expect", text])
        assert stop.value.code == 2
    else:
        assert main(tmp_path, "--expect", text) == code


RLINF_LOG = (
    b"python train_vla_sft.py ...\n(Worker pid=7) Cosmos3: loading DCP base into cosmos3_model from /base\n"
    b"(Worker pid=7) Cosmos3 SFT dataloader (cosmos PackingDataLoader): data_type='libero_all'\r\n"
    b"Global Step:   0%|          | 0/10\rGlobal Step:  10%|#  | 1/10 [01:50, train/loss=15.7]\rGlobal Step:  20%|##  | 2/10 [02:18, \x1b[1mtrain/loss=15.6\x1b[0m]"
)


def test_log_with_carriage_returns(tmp_path, capsys):
    """In a \\r-style log the last refresh of the bar is the progress, without the others and without colour codes; line numbers are an editor's."""
    log = tmp_path / "run_embodiment.log"
    log.write_bytes(RLINF_LOG)
    assert main("--log", log, "--strict") == 0
    out = capsys.readouterr().out.splitlines()
    assert "[ok] base loaded: line 2: (Worker pid=7) Cosmos3: loading DCP base into cosmos3_model from /base" in out
    assert "[ok] loader built: line 3: (Worker pid=7) Cosmos3 SFT dataloader (cosmos PackingDataLoader): data_type='libero_all'" in out
    assert "[ok] progress: line 4: Global Step: 20%|## | 2/10 [02:18, train/loss=15.6]" in out
    assert out[-1] == "[done] 07_read_tb runs=0 tags=0 points=0 out=-"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (b"Traceback (most recent call last):", "traceback"),
        (b"ValueError: boom", "exception"),
        (b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "out of memory"),
        (b"RuntimeError: DataLoader worker (pid(s) 12) exited unexpectedly", "worker died"),
        (b"(raylet) A worker died or was killed while executing a task", "worker died"),
        (b"[FAIL] 05_train_fsdp2: expected a finite gradient; found norm nan", "failed"),
    ],
)
def test_log_errors_at_the_end(tmp_path, capsys, text, name):
    """An error after the last progress is a [warn], with --strict exit 5; one that the run survived is told so and is none."""
    log = tmp_path / "run.log"
    log.write_bytes(RLINF_LOG + b"\n" + text + b"\n")
    assert main("--log", log) == 0
    assert f"[warn] {name}: line 5: {text.decode()}" in capsys.readouterr().out
    assert main("--log", log, "--strict") == 5
    assert f"{name} in line 5 of {log}" in capsys.readouterr().err
    log.write_bytes(text + b"\n" + RLINF_LOG)
    assert main("--log", log, "--strict") == 0
    assert f"[ok] {name}: line 1: {text.decode()} (1 in all; the run went on after it)" in capsys.readouterr().out


def test_log_of_our_own_trainer(tmp_path, capsys):
    """The lines of 05_train_fsdp2.py: start, the last step, the last checkpoint; a log that is not there is exit 3."""
    log = tmp_path / "run.log"
    steps = "".join(f"[step] step:{s}/40 loss:{60 - s}.0\n" for s in range(1, 41))
    log.write_text(
        f"[ok] start: 3.4 s, device cpu, compute torch.float32, prompts 13\n{steps}[ok] saved: run/checkpoints/global_step_40 in 0.1 s\n"
    )
    assert main("--log", log, "--strict") == 0
    out = capsys.readouterr().out
    assert "[ok] base loaded: line 1: [ok] start: 3.4 s" in out and "[ok] saved: line 42: [ok] saved: run/checkpoints/global_step_40" in out
    assert "[ok] progress: line 41: [step] step:40/40 loss:20.0" in out
    assert main("--log", tmp_path / "absent.log") == 3


@given(st.binary(max_size=200), st.lists(st.integers(0, 60), max_size=6))
def test_log_in_pieces_equals_one_look(noise, cuts):
    """A log read in pieces, cut anywhere, between \\r and \\n too, shows what one look at the whole shows."""
    whole = RLINF_LOG + b"\r\n" + noise + b"\nGlobal Step: 9/10\r\n[ok] saved: x\n"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.log"
        path.touch()
        log = stage.Log(path)
        for size in [*cuts, len(whole)]:
            with open(path, "ab") as f:
                f.write(whole[log.at :][:size])
            log.refresh()
        once = stage.Log(path)
        once.refresh()
    assert log.at == len(whole) and (log.last, log.counts, log.number) == (once.last, once.counts, once.number)


# -------------------------------------------------------------- pictures


def drawn_axes(patch, *argv):
    """The axes of the figure that the script draws."""
    from matplotlib.figure import Figure

    axes = []
    patch.setattr(Figure, "savefig", lambda self, path, **_: (axes.extend(self.axes), Path(path).write_bytes(b"x")))
    assert main(*argv) == 0
    return {a.get_title("left"): a for a in axes if a.get_visible()}


def test_plot_marks_restarts_and_validation(tmp_path, monkeypatch):
    """A dashed line at each restart's first step; val/X as dots in the panel of train/X and in no panel of its own; a val without a partner has one."""
    for first in (0, 30, 60):
        write(tmp_path / "run", [("train/loss", 9 - 0.01 * s, s, 1000 + 2.0 * first + s) for s in range(first, first + 40)])
    write(tmp_path / "run", [("val/loss", 8.0, 20), ("val/loss", 7.0, 90), ("val/other", 1.0, 20)], purge_step=90)
    panels = drawn_axes(monkeypatch, tmp_path / "run", "--plot", tmp_path / "p.png")
    assert set(panels) == {"train/loss", "val/other"}
    lines = panels["train/loss"].get_lines()
    assert [line.get_xdata()[0] for line in lines if not isinstance(line.get_linestyle(), str) or line.get_linestyle() == "--"] == [
        30,
        60,
        90,
    ]
    assert [line.get_xdata().tolist() for line in lines if line.get_marker() == "o"] == [[20, 90]]


def test_plot_overlays_runs(tmp_path, monkeypatch):
    """Several runs share a panel a tag, each in a colour of its own, named without the folders they share."""
    for name in ("a", "b"):
        write(tmp_path / name, curve(10))
    panels = drawn_axes(monkeypatch, tmp_path, "--plot", tmp_path / "p.png")
    (panel,) = panels.values()
    assert len({line.get_color() for line in panel.get_lines()}) == 2
    assert [t.get_text() for t in panel.figure.legends[0].get_texts()] == ["a", "b"]


def test_plot_leaves_outliers_off_the_scale_and_says_so(tmp_path, monkeypatch):
    """One first step of 110 s among hundreds of 28 s does not flatten the panel: it is a triangle at the top, and the legend names it."""
    write(tmp_path / "run", [("time/step", 110.0 if s == 0 else 28 + s % 5 / 10, s) for s in range(200)])
    panel = drawn_axes(monkeypatch, tmp_path / "run", "--plot", tmp_path / "p.png")["time/step"]
    assert panel.get_ylim()[1] < 30
    assert [line.get_xdata().tolist() for line in panel.get_lines() if line.get_marker() == "^"] == [[0]]
    assert [t.get_text() for t in panel.figure.legends[0].get_texts()][1:] == ["off the scale"]


def test_usage_errors(tmp_path, capsys):
    """No RUN (but for --log alone), --follow with an output, an interval of 0: exit 2."""
    for argv in (
        [],
        ["--log", "x", "--plot", "p.png"],
        ["--compare", "--log", "x"],
        ["r", "--follow", "--csv", "c"],
        ["r", "--interval", "0"],
    ):
        with pytest.raises(SystemExit) as stop:
            stage.parse_args(argv)
        assert stop.value.code == 2
    assert stage.parse_args(["--log", "x"]).runs == []
