"""07_read_tb.py: no point is dropped, doubled or invented, and nothing is wrong in silence.

Run: python -m pytest tests/test_read_tb.py
"""

import csv
import json
import math
import random
import struct
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from conftest import load_script, run_script
from hypothesis import example, given
from hypothesis import strategies as st

from common import console

tb = load_script("07_read_tb")
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
    return console.run_stage("07_read_tb", lambda: tb.main([str(a) for a in argv]))


def record_ends(path: Path) -> list[int]:
    """Offset past each record, by the framing alone."""
    data, ends = path.read_bytes(), [0]
    while ends[-1] < len(data):
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
    series = tb.read_run(tmp_path).series["train/loss"]
    np.testing.assert_array_equal(series.steps, np.arange(10_500))


def test_tb2_truncated_last_record_is_said(tmp_path, hundred, capsys):
    """A file cut 7 bytes short yields 99 points and one [warn] with the last good offset, the size and the bytes left."""
    cut = tmp_path / hundred.name
    cut.write_bytes(hundred.read_bytes()[:-7])
    good, size = record_ends(hundred)[-2], cut.stat().st_size
    assert main(cut) == 0
    out = capsys.readouterr().out
    assert f"[warn] {cut}: truncated record; stopped at byte {good} of {size}, {size - good} bytes left unread" in out
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
    series = tb.read_run(tmp_path).series["train/loss"]
    np.testing.assert_array_equal(series.steps, np.arange(120))
    np.testing.assert_array_equal(series.values, [1.0] * 50 + [2.0] * 70)


def test_tb4_newest_is_by_time_not_by_file_name(tmp_path):
    """Files that sort against their time (another host, a copied file) still yield the newest value."""
    write(tmp_path, [("a", 2.0, 7, 2000.0)])
    write(tmp_path, [("a", 1.0, 7, 1000.0)])
    assert tb.read_run(tmp_path).series["a"].values.tolist() == [2.0]


def test_tb4_a_rewound_tail_is_dropped(tmp_path, capsys):
    """A restart opened with purge_step=50 that has reached only step 59 takes back 60..99: the last step is 59, 40 are said to be rewound."""
    write(tmp_path, curve(100))
    write(tmp_path, [("train/loss", 2.0, s) for s in range(50, 60)], purge_step=50)
    assert main(tmp_path) == 0
    out = capsys.readouterr().out
    assert "[ok] replaced: 10 points" in out and "[ok] rewound: 40 points" in out
    assert tb.read_run(tmp_path).series["train/loss"].steps.tolist() == list(range(60))


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
    series = tb.read_run(tmp_path).series["train/loss"]
    np.testing.assert_array_equal(series.steps, np.arange(200))
    np.testing.assert_array_equal(series.values, np.float32([v for _, v, *_ in curve(200)]).astype(float))


def test_tb6_other_kinds_are_no_scalars(tmp_path):
    """Text and histograms beside the scalars are passed over."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_text("note", "hello", 0)
        writer.add_histogram("weights", np.arange(9.0), 0)
        writer.add_scalar("a", 1.0, 0)
    assert list(tb.read_run(tmp_path).series) == ["a"]


def test_tb10_points_without_a_step_are_kept(tmp_path, capsys):
    """A tag written without global_step keeps all its points in order of time, and a [warn] says so."""
    write(tmp_path, [("a", float(v), None, 1000.0 + v) for v in range(100)] + [("train/loss", 1.0, 0), ("train/loss", 0.5, 1)])
    assert main(tmp_path) == 0
    out = capsys.readouterr().out
    assert "[warn] no global_step: a: all points at one step" in out and "replaced" not in out
    assert tb.read_run(tmp_path).series["a"].values.tolist() == list(range(100))


def test_tb10_one_point_per_restart_is_a_restart(tmp_path):
    """One value a restart at the same step (a parameter count) is a replaced point, not a missing step."""
    for value in (1.0, 2.0):
        write(tmp_path, [("model/parameters", value, 0, 1000.0 + value)])
    run = tb.read_run(tmp_path)
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
                tb.read_run(Path(folder))
            return
        run = tb.read_run(Path(folder))
    assert run.points == records
    assert run.files[0]["read_bytes"] == good and run.files[0]["bytes"] == len(bad)
    assert bool(run.files[0]["fault"]) == (good != len(bad))


VALUE = st.one_of(st.floats(width=32), st.sampled_from([0.0, math.nan, math.inf, -math.inf]))
POINTS = st.lists(st.tuples(st.sampled_from(["train/loss", "val/loss", "z"]), st.integers(0, 8), VALUE), max_size=12)
LIVES = st.lists(st.tuples(st.one_of(st.none(), st.integers(1, 6)), POINTS), min_size=1, max_size=4)  # (purge_step, points) of each writer


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
@example([(None, [("z", 0, 1.0), ("z", 0, 2.0)]), (None, [("z", 0, 3.0)])])  # no steps, over a restart
@example([(None, [("z", 5, 1.0)]), (3, [("train/loss", 3, 1.0)])])  # a tag that is wholly rewound
@example([(None, [("z", 5, 1.0)]), (3, [])])  # nothing is left
def test_any_restarts_match_a_plain_model(lives):
    """Any sequence of writes over several restarts, with and without purge_step, gives the series, counts and figures of a plain-Python model."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from torch.utils.tensorboard import SummaryWriter

    expected, replaced, rewound = model(lives)
    clock = iter(range(1000, 10_000))
    with tempfile.TemporaryDirectory() as folder:
        for purge, points in lives:
            with SummaryWriter(folder) as writer:
                if purge is not None:  # what purge_step writes, on our clock
                    writer.file_writer.add_event(Event(session_log=SessionLog(status=SessionLog.START)), purge, float(next(clock)))
                for tag, step, value in points:
                    writer.add_scalar(tag, value, step, walltime=float(next(clock)))
        if not expected:
            with pytest.raises(console.Precondition, match="scalars"):
                tb.read_run(Path(folder))
            return
        run = tb.read_run(Path(folder))
    assert list(run.series) == [tag for tag in ("train/loss", "val/loss", "z") if tag in expected]
    assert (run.replaced, run.rewound) == (replaced, rewound)
    for tag, points in expected.items():
        np.testing.assert_array_equal(run.series[tag].steps, [step for step, _ in points])
        np.testing.assert_array_equal(run.series[tag].values, [value for _, value in points])
        row, finite = tb.row(run.series[tag]), sorted(value for _, value in points if math.isfinite(value))
        assert (row["count"], row["non_finite"]) == (len(points), len(points) - len(finite))
        np.testing.assert_array_equal((row["first_step"], row["first"], row["last_step"], row["last"]), (*points[0], *points[-1]))
        if finite:
            middle = (finite[(len(finite) - 1) // 2] + finite[len(finite) // 2]) / 2
            np.testing.assert_array_equal((row["min"], row["p50"], row["max"]), (finite[0], middle, finite[-1]))
        assert len(tb.sparkline(run.series[tag].values)) == min(len(points), tb.TREND_WIDTH)


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


@pytest.mark.parametrize(
    ("values", "prefix", "text"),
    [
        (
            [16.0 - s for s in range(10)] + [3.0] * 10,
            "[ok]",
            "train/loss falling: 15.5 (mean of first 2) -> 3 (mean of last 2); non-finite points: 0",
        ),
        ([1.0] * 10 + [2.0] * 10, "[warn]", "train/loss NOT falling: 1 (mean of first 2) -> 2 (mean of last 2); non-finite points: 0"),
        (
            [3.0] * 10 + [math.nan, math.inf] + [1.0] * 10,
            "[warn]",
            "train/loss falling: 3 (mean of first 2) -> 1 (mean of last 2); non-finite points: 2",
        ),
        ([math.nan, 1.0], "[warn]", "fewer than two finite points of train/loss; non-finite points: 1"),
    ],
)
def test_health_line(tmp_path, capsys, values, prefix, text):
    """The health line says whether the loss falls, with both means, the non-finite points and the age of the last event."""
    write(tmp_path, [("train/loss", v, s) for s, v in enumerate(values)])
    run = tb.read_run(tmp_path)
    assert abs(run.last_event - time.time()) < 60
    run.last_event = time.time() - 3 * 3600
    tb.show(run)
    assert capsys.readouterr().out.splitlines()[-1] == f"{prefix} health: {text}; last event 3 h ago"


def test_json_is_strict(tmp_path):
    """Non-finite values stand as null in the JSON, which a parser that refuses NaN reads; the figures are the table's."""
    write(tmp_path / "run", [("a", math.nan, 0), ("a", 2.0, 1), ("a", math.inf, 2), ("b", -math.inf, 0)])
    assert main(tmp_path / "run", "--json", tmp_path / "out" / "t.json") == 0

    def refuse(constant):
        raise AssertionError(f"{constant} in strict JSON")

    (run,) = json.loads((tmp_path / "out" / "t.json").read_text(), parse_constant=refuse)["runs"]
    assert run["series"]["a"] == dict(count=3, first=None, first_step=0, last=None, last_step=2, min=2.0, p50=2.0, max=2.0, non_finite=2)
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
    for tag, series in tb.read_run(tmp_path / "run").series.items():
        mine = [r for r in rows if r["tag"] == tag]
        np.testing.assert_array_equal([int(r["step"]) for r in mine], series.steps)
        np.testing.assert_array_equal([float(r["wall_time"]) for r in mine], series.walls)
        np.testing.assert_array_equal([float(r["value"]) for r in mine], series.values)
        np.testing.assert_array_equal(series.values, np.float32(values).astype(float))


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
    """A loss that falls tenfold gets a log axis; one that hardly moves, one that touches zero, and any other tag do not."""
    from matplotlib.figure import Figure

    figures = {"a/loss": lambda s: 100 * 0.9**s, "b/loss": lambda s: 15.7 - 0.001 * s, "c/loss": float, "d/norm": lambda s: 100 * 0.9**s}
    write(tmp_path / "run", [(tag, value(s), s) for tag, value in figures.items() for s in range(60)])
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: (drawn.extend(self.axes), Path(path).write_bytes(b"x")))
    assert main(tmp_path / "run", "--plot", tmp_path / "p.png") == 0
    assert {a.get_title("left") for a in drawn if a.get_yscale() == "log"} == {"a/loss"}
    assert {a.get_title("left") for a in drawn if a.get_visible()} == set(figures)


# -------------------------------------------------------------- the script as a script


def test_preconditions_have_their_own_messages(tmp_path, capsys):
    """Missing folder, folder without event files, event files one level down, files without a scalar: exit 3, each with its own text."""
    from torch.utils.tensorboard import SummaryWriter

    (tmp_path / "empty").mkdir()
    SummaryWriter(str(tmp_path / "fresh")).close()
    write(tmp_path / "root" / "run_a", curve(2))
    for name, text in {
        "absent": "found nothing there",
        "empty": "expected event files (*tfevents*) in",
        "root": f"to mend: pass {tmp_path / 'root' / 'run_a'}",
        "fresh": "expected scalars in the event files of",
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
    outputs = {f"--{kind}": tmp_path / "new" / f"o.{kind}" for kind in ("csv", "json", "plot")}
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
    """--help answers in under a second (the best of three, so that a busy machine does not fail it) and loads nothing heavy."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        assert "--plot FILE.png" in run_script(SCRIPT, "--help").stdout
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 1
    code = f"import runpy, sys; runpy.run_path({SCRIPT!r}); print([m for m in ('tensorboard', 'matplotlib', 'torch') if m in sys.modules])"
    assert run_script("-c", code, launcher=[sys.executable]).stdout.strip() == "[]"
