"""Show every scalar of a training run: a table, a line of health, and on request CSV, JSON and a plot.

Run:    python 07_read_tb.py work/run [RUN ...] [--csv points.csv] [--json table.json] [--plot curves.png]
Reads:  RUN/tensorboard/, a folder of event files, or one event file; a live run may go on meanwhile
Writes: stdout, and the files named by --csv, --json, --plot
Needs:  common/console.py; pip: tensorboard, numpy; matplotlib for --plot
Fails:  exit 3: no such folder, no event file in it, or no scalar in its files; exit 4: an output exists (--force);
        exit 5, only with --strict: an event file is truncated or corrupt (the rest is still shown and written)
Next:   06_convert_ckpt.py on the checkpoint you choose, then 08_eval_policy.py: a falling loss is not yet a policy
"""

import argparse
import csv
import os
import struct
import sys
import time
from collections import Counter, defaultdict, namedtuple
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from common import console

# Shown first, in this order, each with the tags below it (val/loss under val). The names are those of 05_train_fsdp2.py.
FIRST_TAGS = (
    "train/loss",
    "train/flow_matching_loss_action",
    "train/flow_matching_loss_vision",
    "train/grad_norm",
    "train/learning_rate",
    "time/step",
    "val",
)
LOSS = "train/loss"  # the tag that the health line judges
TREND_WIDTH, BLOCKS, ASCII = 24, "▁▂▃▄▅▆▇█", "_.-=*#"  # sparkline: characters; levels low to high, for UTF-8 and other terminals
PLOT_COLUMNS, PLOT_WIDTH, PLOT_ROW = 3, 1200, 250  # panels a row; pixels; pixels
FEW_POINTS = 20  # below this a curve is drawn as it is, unsmoothed
RAW, LINE = dict(lw=0.9, alpha=0.35), dict(lw=1.7)  # the raw values behind a smoothed line; the line itself
LOG_RATIO = 10  # a loss goes on a log axis when its largest value is at least this many times its smallest
HEADER, FOOTER = struct.Struct("<QI"), struct.Struct("<I")  # TFRecord: length, crc of the length | data | crc of the data

# One tag as numpy arrays, by step, or by time where the writer gave no step (stepless). walls: seconds since the epoch.
Series = namedtuple("Series", "steps walls values stepless")


@dataclass
class Run:
    name: str
    files: list = field(default_factory=list)  # {file, bytes, read_bytes, fault}
    series: dict = field(default_factory=dict)  # tag -> Series, in the order shown
    points: int = 0
    replaced: int = 0  # points written again at the same step
    rewound: int = 0  # points of steps that a later restart took back and has not written again
    last_event: float = 0.0  # seconds since the epoch


class BadRecord(Exception):
    """The bytes from here on make no sense."""


def event_files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise console.Precondition(
            f"a run folder or an event file at {source}", "nothing there", "check the path; 05_train_fsdp2.py writes RUN/tensorboard"
        )
    folder = source / "tensorboard" if (source / "tensorboard").is_dir() else source
    found = sorted(p for p in folder.iterdir() if "tfevents" in p.name and p.is_file())
    if not found:
        below = sorted({str(p.parent) for p in folder.rglob("*tfevents*") if p.is_file()})
        what, mend = (
            (f"some only in {', '.join(below)}", f"pass {below[0]}")
            if below
            else ("none", "wait for the run's first log step, or check the path")
        )
        raise console.Precondition(f"event files (*tfevents*) in {folder}", what, mend)
    return found


def read_events(f):
    """Yield (offset past the record, Event) of each whole record. TensorBoard's own readers end at a bad one without a word."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    offset = 0
    while head := f.read(HEADER.size):
        if len(head) < HEADER.size:
            raise BadRecord("truncated record")
        length, crc = HEADER.unpack(head)
        if masked_crc32c(head[:8]) != crc:
            raise BadRecord("a record's length fails its checksum")
        body = f.read(length + FOOTER.size)
        if len(body) < length + FOOTER.size:
            raise BadRecord("truncated record")
        if masked_crc32c(body[:length]) != FOOTER.unpack(body[length:])[0]:
            raise BadRecord("a record's data fail their checksum")
        offset += len(head) + len(body)
        yield offset, Event.FromString(body[:length])


def scalars(event):
    """Yield (tag, value) in either form: simple_value, or (TF2, new_style=True) a tensor of one element."""
    for value in event.summary.value:
        kind = value.WhichOneof("value")
        if kind == "simple_value":
            yield value.tag, value.simple_value
        # A writer may name the plugin on a tag's first event only.
        elif kind == "tensor" and value.metadata.plugin_data.plugin_name in ("", "scalars"):
            from tensorboard.util.tensor_util import make_ndarray

            array = make_ndarray(value.tensor)
            if array.size == 1 and array.dtype.kind in "fiub":
                yield value.tag, float(array.item())


def read_run(source: Path) -> Run:
    run, points, restarts = Run(str(source)), defaultdict(list), []
    for number, path in enumerate(event_files(source)):
        file = {"file": str(path), "bytes": 0, "read_bytes": 0, "fault": None}
        with open(path, "rb") as f:
            try:
                for file["read_bytes"], event in read_events(f):
                    run.last_event = max(run.last_event, event.wall_time)
                    if event.session_log.status == event.session_log.START:  # the writer was opened with purge_step
                        restarts.append((event.wall_time, event.step))
                    for tag, value in scalars(event):
                        points[tag].append((event.wall_time, number, event.step, value))
            except BadRecord as error:
                file["fault"] = str(error)
            file["bytes"] = os.fstat(f.fileno()).st_size  # after reading: a live file grows
        run.files.append(file)
    for tag in sorted(points, key=order):
        series, replaced, rewound = merge(points[tag], restarts)
        run.replaced, run.rewound, run.points = run.replaced + replaced, run.rewound + rewound, run.points + len(series.steps)
        if len(series.steps):
            run.series[tag] = series
    if not run.series:
        read = "; ".join(f"{f['file']}: {fault_text(f) if f['fault'] else console.human_bytes(f['bytes'])}" for f in run.files)
        found = f"none ({run.rewound} rewound by a restart) in {read}"
        raise console.Precondition(
            f"scalars in the event files of {source}", found, "wait for the run's first log step, or pass a run that wrote scalars"
        )
    return run


def merge(points: list, restarts: list) -> tuple[Series, int, int]:
    """One tag's (wall, file, step, value) of all files -> the points that stand, how many were replaced, how many rewound.

    The newest point of a step stands, unless a still later restart began at or before that step.
    A tag that one file holds twice, and only ever at one step, was written without steps: every point stands.
    """
    points = sorted(points, key=lambda p: p[0])  # stable: at equal times the later file, then the later record, is newer
    stepless = len({p[2] for p in points}) == 1 and max(Counter(p[1] for p in points).values()) > 1
    newest = points if stepless else sorted({p[2]: p for p in points}.values(), key=lambda p: p[2])
    kept = newest if stepless else [p for p in newest if not any(wall > p[0] and step <= p[2] for wall, step in restarts)]
    steps, walls, values = (np.array([p[i] for p in kept], kind) for i, kind in ((2, np.int64), (0, np.float64), (3, np.float64)))
    return Series(steps, walls, values, stepless), len(points) - len(newest), len(newest) - len(kept)


def order(tag: str) -> tuple[int, str]:
    return next((i for i, first in enumerate(FIRST_TAGS) if f"{tag}/".startswith(first + "/")), len(FIRST_TAGS)), tag


def fault_text(f: dict) -> str:
    return f"{f['fault']}; stopped at byte {f['read_bytes']} of {f['bytes']}, {f['bytes'] - f['read_bytes']} bytes left unread"


def row(s: Series) -> dict:
    """The table's figures of one tag; min, p50 and max are of the finite values."""
    finite = s.values[np.isfinite(s.values)]
    low, middle, high = (finite.min(), np.median(finite), finite.max()) if len(finite) else [float("nan")] * 3
    ends = dict(first=s.values[0], first_step=int(s.steps[0]), last=s.values[-1], last_step=int(s.steps[-1]))
    return dict(count=len(s.values), **ends, min=low, p50=middle, max=high, non_finite=len(s.values) - len(finite))


def sparkline(values) -> str:
    """The means of up to TREND_WIDTH equal stretches; ! where a stretch holds a non-finite value."""
    levels = BLOCKS if "utf" in (sys.stdout.encoding or "").lower() else ASCII
    with np.errstate(invalid="ignore"):
        means = np.array([part.mean() for part in np.array_split(values, min(TREND_WIDTH, len(values)))])
    finite = means[np.isfinite(means)]
    low, span = (finite.min(), np.ptp(finite)) if len(finite) else (0, 0)
    scale = (len(levels) - 1) / span if span > 1e-6 * abs(low) else 0  # rounding noise on a constant is no trend
    return "".join(levels[round((m - low) * scale)] if np.isfinite(m) else "!" for m in means)


def health(run: Run) -> dict:
    """Is the loss falling: the mean of its last tenth against that of its first (finite values; null with fewer than two)."""
    losses = run.series[LOSS].values if LOSS in run.series else np.array([])
    losses = losses[np.isfinite(losses)]
    tenth = max(1, len(losses) // 10)
    first, last = (float(losses[:tenth].mean()), float(losses[-tenth:].mean())) if len(losses) > 1 else (None, None)
    found = dict(falling=None if first is None else last < first, first_tenth=first, last_tenth=last, tenth_points=tenth)
    non_finite = sum(int((~np.isfinite(s.values)).sum()) for s in run.series.values())
    return found | dict(non_finite=non_finite, last_event=run.last_event, age_seconds=time.time() - run.last_event)


def show(run: Run) -> None:
    size = console.human_bytes(sum(f["bytes"] for f in run.files))
    console.ok(run.name, f"event files {len(run.files)} ({size}), tags {len(run.series)}, points {run.points}")
    for f in (f for f in run.files if f["fault"]):
        console.warn(
            f["file"], fault_text(f) + " (a killed run, or a live one in the middle of a write)" * f["fault"].startswith("truncated")
        )
    if run.replaced:
        console.ok("replaced", f"{run.replaced} points were written again at the same step; the newest of each stands")
    if run.rewound:
        console.ok("rewound", f"{run.rewound} points dropped: a later restart began before their step and has not reached it again")
    if stepless := [tag for tag, s in run.series.items() if s.stepless]:
        console.warn("no global_step", f"{', '.join(stepless)}: all points at one step; shown in order of time")
    lines = [("tag", "count", "first (step)", "last (step)", "min", "p50", "max", "non-finite", "trend")]
    for tag, s in run.series.items():
        r = row(s)
        ends = [f"{r[end]:.4g} ({r[end + '_step']})" for end in ("first", "last")]
        lines.append(
            (tag, str(r["count"]), *ends, *(f"{r[k]:.4g}" for k in ("min", "p50", "max")), str(r["non_finite"]), sparkline(s.values))
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for tag, *figures, trend in lines:
        console.say("  ".join([tag.ljust(widths[0]), *(c.rjust(w) for c, w in zip(figures, widths[1:-1], strict=True)), trend]))
    h = health(run)
    loss = f"fewer than two finite points of {LOSS}"
    if h["falling"] is not None:
        means = f"{h['first_tenth']:.4g} (mean of first {h['tenth_points']}) -> {h['last_tenth']:.4g} (mean of last {h['tenth_points']})"
        loss = f"{LOSS} {'falling' if h['falling'] else 'NOT falling'}: {means}"
    line = console.ok if h["falling"] and not h["non_finite"] else console.warn
    unit, seconds = next((u for u in (("d", 86400), ("h", 3600), ("min", 60)) if h["age_seconds"] >= 2 * u[1]), ("s", 1))
    line("health", f"{loss}; non-finite points: {h['non_finite']}; last event {h['age_seconds'] / seconds:.0f} {unit} ago")


def write_csv(runs: list[Run], path: Path) -> None:
    several = len(runs) > 1  # only then does a column `run` lead
    with open(path, "w", newline="") as f:
        out = csv.writer(f, lineterminator="\n")
        out.writerow(["run"] * several + ["tag", "step", "wall_time", "value"])
        for run in runs:
            for tag, s in run.series.items():
                out.writerows(
                    [run.name] * several + [tag, *p] for p in zip(s.steps.tolist(), s.walls.tolist(), s.values.tolist(), strict=True)
                )


def write_table(runs: list[Run], path: Path) -> None:
    tables = [vars(run) | {"series": {tag: row(s) for tag, s in run.series.items()}, "health": health(run)} for run in runs]
    console.write_json(path, {"runs": tables})


def smooth(x, values):
    """Centred mean of the middle half of each twentieth of the points (9 or more), at up to 400 places: a spike stays in the raw line."""
    half, places = max(4, len(x) // 40), np.unique(np.linspace(0, len(x) - 1, 400).astype(int))
    windows = (np.sort(values[max(0, i - half) : i + half + 1]) for i in places)
    return x[places], [w[len(w) // 4 : len(w) - len(w) // 4].mean() for w in windows]


def write_plot(runs: list[Run], path: Path) -> None:
    """One panel a tag with every run in it: the raw line pale, the smoothed one over it, a red cross at non-finite values."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    tags = sorted({tag for run in runs for tag in run.series}, key=order)
    rows = -(-len(tags) // PLOT_COLUMNS)
    figure = Figure(figsize=(PLOT_WIDTH / 100, (PLOT_ROW * rows + 60) / 100), dpi=100, layout="constrained")
    panels = figure.subplots(rows, PLOT_COLUMNS, squeeze=False).flatten()
    for panel in panels[len(tags) :]:
        panel.set_visible(False)
    for panel, tag in zip(panels, tags, strict=False):
        for i, run in enumerate(runs):
            if tag not in run.series:
                continue
            s, color = run.series[tag], colormaps["tab10"](i % 10)
            x = np.arange(len(s.values)) if s.stepless else s.steps
            finite = np.isfinite(s.values)
            turns = np.diff(np.sign(np.diff(s.values[finite]))) != 0
            noisy = finite.sum() >= FEW_POINTS and turns.mean() > 0.2  # a schedule turns rarely: smoothing would only blunt it
            panel.plot(
                x,
                np.where(finite, s.values, np.nan),
                color=color,
                marker="" if len(x) >= FEW_POINTS else "o",
                ms=3,
                **RAW if noisy else LINE,
            )
            if noisy:
                panel.plot(*smooth(x[finite], s.values[finite]), color=color, **LINE)
            if not finite.all():
                panel.plot(x[~finite], np.full((~finite).sum(), 0.03), "x", color="red", ms=6, transform=panel.get_xaxis_transform())
            if s.stepless:
                panel.set_xlabel("point (no step was written)", fontsize=9)
        shown = np.concatenate([run.series[tag].values for run in runs if tag in run.series])
        shown = shown[np.isfinite(shown)]
        if "loss" in tag and len(shown) and shown.min() > 0 and shown.max() >= LOG_RATIO * shown.min():
            panel.set_yscale("log")
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_major_formatter("{x:g}")
            panel.yaxis.set_minor_formatter(NullFormatter())
        panel.set_title(tag if len(tag) <= 46 else "..." + tag[-43:], loc="left", fontsize=10.5, fontweight="bold")
        panel.grid(alpha=0.25)
        panel.tick_params(which="both", labelsize=9)
        panel.spines[["top", "right"]].set_visible(False)
    for i, run in enumerate(runs):
        panels[0].plot([], [], color=colormaps["tab10"](i % 10), label=run.name, **LINE)
    figure.legend(loc="outside upper left", ncols=min(3, len(runs)), frameon=False, fontsize=10)
    figure.supxlabel("step", fontsize=10)
    figure.savefig(path, format="png")


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder, tensorboard folder or event file")
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", help="write every point: tag,step,wall_time,value (with several runs, a column run first)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write tables and health as strict JSON; null stands for non-finite")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help=f"draw every tag, {PLOT_WIDTH} px wide")
    parser.add_argument("--strict", action="store_true", help="exit 5 when an event file is truncated or corrupt")
    parser.add_argument("--force", action="store_true", help="replace output files that exist")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    args = parser.parse_args(argv)
    outputs = [path for path in (args.csv, args.json, args.plot) if path]
    if len(set(outputs)) < len(outputs):
        parser.error("--csv, --json and --plot need a file each")
    return args


def plan(args) -> dict:
    """Say what will be read and written; return the writer of each output asked for."""
    for source in args.runs:
        files = event_files(source)
        console.plan("read", f"{source}: event files {len(files)} ({console.human_bytes(sum(f.stat().st_size for f in files))})")
    outputs = {path: write for path, write in ((args.csv, write_csv), (args.json, write_table), (args.plot, write_plot)) if path}
    for path in outputs:
        if path.exists() and not args.force:
            raise console.OutputExists(f"no file at {path}", f"{path.stat().st_size} bytes", "pass --force to replace it, or another name")
        console.plan("write", path)
    return outputs


def execute(args, outputs: dict) -> list[Run]:
    runs = [read_run(source) for source in args.runs]
    for run in runs:
        show(run)
    for path, write in outputs.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".part")  # renamed when complete
        write(runs, temporary)
        os.replace(temporary, path)
    return runs


def verify(runs: list[Run]) -> None:
    if found := "; ".join(f"{f['file']}: {fault_text(f)}" for run in runs for f in run.files if f["fault"]):
        raise console.VerifyFailed("whole event files", found, "drop --strict to accept what could be read")


def main(argv=None) -> int:
    args = parse_args(argv)
    outputs = plan(args)
    if args.dry_run:
        return 0
    runs = execute(args, outputs)
    if args.strict:
        verify(runs)
    tags, points = (sum(map(count, runs)) for count in (lambda run: len(run.series), lambda run: run.points))
    console.done("07_read_tb", runs=len(runs), tags=tags, points=points, out=",".join(map(str, outputs)) or "-")
    return 0


if __name__ == "__main__":
    raise SystemExit(console.run_stage("07_read_tb", main))
