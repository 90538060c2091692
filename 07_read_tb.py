"""Show the truth about a training run at a glance: a table of every scalar, a line of health, and on request files, plots, checks.

Run:    python 07_read_tb.py work/run [RUN ...] [--csv points.csv] [--csv-wide steps.csv] [--json table.json] [--plot curves.png] [--compare]
        python 07_read_tb.py work/run --follow          python 07_read_tb.py work/run --expect libero-smoke --log work/run/run.log
Reads:  RUN: a run folder, a tensorboard folder, an event file, or a root of several runs, live ones too; launches.jsonl or args.json beside it for the last step
Writes: stdout, and the files named by --csv, --csv-wide, --json, --plot
Needs:  common/console.py, common/tb.py (which says what is verified); pip: tensorboard, numpy; matplotlib for --plot
Fails:  exit 3: no such path, no event file in it, or no scalar in its files; exit 4: an output exists (--force);
        exit 5: an --expect is not met; with --strict also: an event file is truncated or corrupt, or --log ends in an error
Next:   06_convert_ckpt.py on the checkpoint you choose, then 08_eval_policy.py: a falling loss is not yet a policy
"""

import argparse
import contextlib
import csv
import io
import math
import os
import re
import shutil
import sys
import textwrap
import time
from pathlib import Path

import numpy as np

from common import console, tb

LOSS, NORM, STEP_TIME, DATA_TIME = "train/loss", "train/grad_norm", "time/step", "time/data"
# Shown first, in this order, each with the tags below it (val/loss under val). The names are those of 05_train_fsdp2.py and RLinf.
FIRST_TAGS = (LOSS, "train/flow_matching_loss_action", "train/flow_matching_loss_vision", NORM, "train/learning_rate", STEP_TIME, "val")
CLIP = 1.0  # gradients of a larger norm are clipped
SPIKE = 10  # a spike stands out over both its neighbourhoods by more than so many usual changes from one point to the next
PLATEAU, PLATEAU_POINTS = 0.005, 50  # relative change between the last two fifths below which a loss of so many points has stopped moving
STALL, STALL_SECONDS = 10, 120  # a run is stalled after so many usual intervals without a point, and at least so many seconds
DATA_WAIT = 0.1  # share of a step spent waiting for data above which the health line warns
NARROW = ("tag", "last (step)", "p50", "trend")
TREND_WIDTH, BLOCKS, ASCII = 24, "▁▂▃▄▅▆▇█", "_.-=*#"  # sparkline: characters; levels low to high, for UTF-8 and other terminals
COMPARED = 8  # steps a tag in the table of --compare
PLOT_COLUMNS, PLOT_WIDTH, PLOT_ROW = 3, 1200, 250  # panels a row; pixels; pixels
FEW_POINTS = 20  # below this a curve is drawn as it is, unsmoothed
LINE = dict(lw=1.8)
LOG_RATIO = 10  # a loss goes on a log axis when its largest value is at least this many times its smallest
# The ten-step smoke run of the guide (libero_all, global batch 2048, logged each step): loss 15.7 -> 15.5, action 1.42 -> 1.41, vision 0.144,
# grad norm 14.8. Tolerances: the losses 10 % (vision, known to be "about" only, 20 %), the norm 30 %.
EXPECTATIONS = {
    "libero-smoke": (
        "train/loss=14.1:17.3@first",
        "train/loss=13.9:17.1@first+9",
        "train/flow_matching_loss_action=1.27:1.57@first",
        "train/flow_matching_loss_action=1.26:1.56@first+9",
        "train/flow_matching_loss_vision=0.115:0.173@first+9",
        "train/grad_norm=10.3:19.3@first+9",
    )
}
# What to look for in a log: RLinf's lines as the guide lists them, and those of 05_train_fsdp2.py. name, pattern, is it an error.
MARKERS = tuple(
    (name, re.compile(pattern), error)
    for name, pattern, error in (
        ("base loaded", rb"Cosmos3: loading|\[ok\] start:", False),
        ("loader built", rb"PackingDataLoader|\[ok\] start:", False),
        ("progress", rb"Global Step|\[step\]", False),
        ("saved", rb"\[ok\] saved:", False),
        ("traceback", rb"Traceback \(most recent call last\)", True),
        ("exception", rb"\w(?:Error|Exception)\b(?::|$)", True),
        ("out of memory", rb"(?i:out of memory)|OutOfMemory", True),
        ("worker died", rb"(?i:workers? (?:\([^)]*\) )?(?:\S+ )?(?:died|exited|is killed))|ActorDiedError", True),
        ("failed", rb"\[FAIL\]", True),
    )
)


# ---------------------------------------------------------------- figures


def order(tag: str) -> tuple[int, str]:
    return next((i for i, first in enumerate(FIRST_TAGS) if f"{tag}/".startswith(first + "/")), len(FIRST_TAGS)), tag


def tags_of(*runs: tb.Run) -> list[str]:
    return sorted({tag for run in runs for tag in run.series}, key=order)


def row(s: tb.Series) -> dict:
    """The table's figures of one tag; min, p50, max and slope (per step, least squares, last tenth) are of the finite values."""
    good = np.isfinite(s.values)
    steps, finite = s.steps[good], s.values[good]
    low, middle, high = (finite.min(), np.median(finite), finite.max()) if len(finite) else [math.nan] * 3
    tenth = max(2, len(finite) // 10)
    x, y = steps[-tenth:] - steps[-tenth:].mean() if len(steps) else steps, finite[-tenth:]
    with np.errstate(over="ignore", invalid="ignore"):
        slope = float((x * (y - y.mean())).sum() / (x * x).sum()) if len(y) > 1 and not s.stepless else math.nan
    ends = dict(first=s.values[0], first_step=int(s.steps[0]), last=s.values[-1], last_step=int(s.steps[-1]))
    return dict(count=len(s.values), **ends, min=low, p50=middle, max=high, slope=slope, non_finite=len(s.values) - len(finite))


def sparkline(values) -> str:
    """The means of up to TREND_WIDTH equal stretches; ! where a stretch holds a non-finite value."""
    levels = BLOCKS if "utf" in (sys.stdout.encoding or "").lower() else ASCII
    with np.errstate(invalid="ignore", over="ignore"):
        means = np.array([part.mean() for part in np.array_split(values, min(TREND_WIDTH, len(values)))])
        finite = means[np.isfinite(means)]
        low, span = (finite.min(), np.ptp(finite)) if len(finite) else (0, 0)
    scale = (len(levels) - 1) / span if 1e-6 * abs(low) < span < math.inf else 0  # rounding noise on a constant is no trend
    return "".join(levels[round((m - low) * scale)] if np.isfinite(m) else "!" for m in means)


def spikes(values) -> np.ndarray:
    """Positions of lone upward outliers: above the medians of the five points before and the five after by SPIKE median changes."""
    if len(values) < 11:
        return np.array([], int)
    medians = np.median(np.lib.stride_tricks.sliding_window_view(values, 5), axis=1)
    changes = np.abs(np.diff(values))
    stretches = np.array_split(changes, max(1, len(changes) // 64))  # the usual change shrinks as a loss falls
    usual = np.concatenate([np.full(len(c), np.median(c)) for c in stretches])[4:-5]
    return 5 + np.flatnonzero(values[5:-5] - np.maximum(medians[:-6], medians[6:]) > SPIKE * usual + 1e-6 * np.abs(values[5:-5]))


def pace(run: tb.Run) -> dict:
    """Steps per second over the last 200 points since the last restart, the last step, and the seconds left to max_steps."""
    s = run.series.get(LOSS) or max(run.series.values(), key=lambda s: (not s.stepless, len(s.values)))
    begin = run.restarts[-1][0] if run.restarts else -math.inf
    steps, walls = s.steps[s.walls >= begin][-200:], s.walls[s.walls >= begin][-200:]
    rate = None
    if len(steps) > 1 and not s.stepless and walls[-1] > walls[0]:
        rate = float((steps[-1] - steps[0]) / (walls[-1] - walls[0]))
    last = int(s.steps[-1])
    left = (run.max_steps - last) / rate if run.max_steps and rate else None
    interval = float(np.median(np.diff(walls))) if len(walls) > 1 else None
    return dict(steps_per_second=rate, last_step=last, max_steps=run.max_steps, eta_seconds=left, seconds_a_point=interval)


def health(run: tb.Run) -> dict:
    """The figures behind the line of health; null where the run does not hold what a figure needs."""
    s = run.series.get(LOSS)
    losses = s.values[np.isfinite(s.values)] if s else np.array([])
    tenth, fifth = max(1, len(losses) // 10), len(losses) // 5
    first, last = (float(losses[:tenth].mean()), float(losses[-tenth:].mean())) if len(losses) > 1 else (None, None)
    found = dict(falling=None if first is None else last < first, first_tenth=first, last_tenth=last, tenth_points=tenth)
    if s:
        found["spikes"] = s.steps[np.isfinite(s.values)][spikes(losses)].tolist()
    if len(losses) >= PLATEAU_POINTS:
        before, now = losses[-2 * fifth : -fifth].mean(), losses[-fifth:].mean()
        found["plateau"] = bool(abs(now - before) <= PLATEAU * abs(before))
    if NORM in run.series and np.isfinite(norms := run.series[NORM].values).any():
        found["clipped_share"] = float((norms[np.isfinite(norms)] > CLIP).mean())
    if STEP_TIME in run.series and DATA_TIME in run.series:
        step, data = run.series[STEP_TIME], run.series[DATA_TIME]
        _, a, b = np.intersect1d(step.steps, data.steps, return_indices=True)
        if (total := step.values[a].sum()) > 0:
            found["data_wait_share"] = float(data.values[b].sum() / total)
    p, age = pace(run), time.time() - run.last_event
    found |= p | dict(non_finite=sum(int((~np.isfinite(s.values)).sum()) for s in run.series.values()))
    found |= dict(finished=None if p["max_steps"] is None else p["last_step"] >= p["max_steps"], last_event=run.last_event, age_seconds=age)
    found["stalled"] = not found["finished"] and age > max(STALL_SECONDS, STALL * (p["seconds_a_point"] or 0))
    return found


# ---------------------------------------------------------------- the table


def duration(seconds: float) -> str:
    unit, size = next((u for u in (("d", 86400), ("h", 3600), ("min", 60)) if seconds >= 2 * u[1]), ("s", 1))
    return f"{seconds / size:.0f} {unit}" if seconds >= 10 * size or size == 1 else f"{seconds / size:.1f} {unit}"


def print_table(lines: list[tuple], left: int = 1, right: int = 0) -> None:
    """Columns aligned: the first `left` and the last `right` ones to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (
            c.ljust(w) if i < left or i >= len(line) - right else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))
        )
        console.say("  ".join(cells).rstrip())


def show(run: tb.Run, columns: int | None = None) -> None:
    """Print the look at one run; in fewer columns than the whole table needs, the NARROW part of it."""
    size = console.human_bytes(sum(f.size for f in run.files))
    console.ok(run.name, f"event files {len(run.files)} ({size}), tags {len(run.series)}, points {run.points}")
    for f in (f for f in run.files if f.fault):
        console.warn(str(f.path), f.fault_text())
    if run.restarts:
        console.ok("restarts", f"{len(run.restarts)}, at steps {', '.join(str(step) for _, step in run.restarts)}")
    if run.writers_at_once:
        console.warn("writers", "files of this folder were written at the same time (does every rank log?); their points are merged")
    if run.replaced:
        console.ok("replaced", f"{run.replaced} points were written again at the same step; the newest of each stands")
    if run.rewound:
        console.ok("rewound", f"{run.rewound} points dropped: a later restart began before their step and has not reached it again")
    if not run.series:
        console.warn("no scalars", "in these files yet")
        return
    if stepless := [tag for tag, s in run.series.items() if s.stepless]:
        console.warn("no global_step", f"{', '.join(stepless)}: all points at one step; shown in order of time")
    lines = [("tag", "count", "first (step)", "last (step)", "min", "p50", "max", "slope/step", "non-finite", "trend")]
    for tag in tags_of(run):
        r = row(run.series[tag])
        ends = [f"{r[end]:.4g} ({r[end + '_step']})" for end in ("first", "last")]
        slope = "-" if math.isnan(r["slope"]) else f"{r['slope']:+.2g}"
        figures = (f"{r[k]:.4g}" for k in ("min", "p50", "max"))
        lines.append((tag, str(r["count"]), *ends, *figures, slope, str(r["non_finite"]), sparkline(run.series[tag].values)))
    if columns and sum(max(map(len, cells)) + 2 for cells in zip(*lines, strict=True)) > columns:
        lines = [tuple(line[lines[0].index(name)] for name in NARROW) for line in lines]
    print_table(lines, right=1)
    show_health(health(run))


def show_health(h: dict) -> None:
    of = f" of {h['max_steps']}" if h["max_steps"] else ""
    rate = h["steps_per_second"]
    speed = f"; {rate:.3g} steps/s ({1 / rate:.3g} s a step)" if rate else ""
    eta = "; finished" if h["finished"] else f"; {duration(h['eta_seconds'])} left" if h["eta_seconds"] else ""
    console.ok("pace", f"step {h['last_step']}{of}{speed}{eta}; last event {duration(h['age_seconds'])} ago")
    text = [f"fewer than two finite points of {LOSS}"]
    if h["falling"] is not None:
        means = f"{h['first_tenth']:.4g} (mean of first {h['tenth_points']}) -> {h['last_tenth']:.4g} (mean of last {h['tenth_points']})"
        text = [f"{LOSS} {'falling' if h['falling'] else 'NOT falling'}: {means}"]
    text += ["PLATEAU: the last fifth is as high as the one before"] * bool(h.get("plateau"))
    if h.get("spikes"):
        text.append(f"SPIKES: {len(h['spikes'])}, the last at step {h['spikes'][-1]}")
    text.append(f"non-finite points: {h['non_finite']}")
    if h["stalled"]:
        text.append("STALLED" if h["max_steps"] else "ended or STALLED")
    if "clipped_share" in h:
        text.append(f"clipped steps: {h['clipped_share']:.0%}")
    if "data_wait_share" in h:
        text.append(f"waiting for data: {h['data_wait_share']:.1%}")
    stalled = h["stalled"] and h["max_steps"]  # a run whose end is not known may as well have ended
    sick = h["non_finite"] or h.get("spikes") or h.get("plateau") or stalled or h.get("data_wait_share", 0) > DATA_WAIT
    (console.ok if h["falling"] and not sick else console.warn)("health", "; ".join(text))


def short_names(runs: list[tb.Run]) -> list[str]:
    """Their names without the folders that they share."""
    if len(runs) == 1:
        return [runs[0].name]
    shared = os.path.commonpath([os.path.abspath(run.name) for run in runs])
    return [os.path.relpath(os.path.abspath(run.name), shared) for run in runs]


def compare(runs: list[tb.Run]) -> None:
    """Print the important tags that all runs share at up to COMPARED equal steps, and the mean of the last tenth of those."""
    if len(runs) < 2:
        raise console.Precondition("two or more runs with scalars to --compare", str(len(runs)), "pass more runs, or a root of several")
    for tag in tags_of(*runs):
        several = [run.series[tag] for run in runs if tag in run.series and not run.series[tag].stepless]
        if order(tag)[0] == len(FIRST_TAGS) or len(several) < len(runs):
            continue
        steps = several[0].steps
        for s in several[1:]:
            steps = np.intersect1d(steps, s.steps)
        if not len(steps):
            console.warn("compare", f"{tag}: the runs share no step")
            continue
        shown = steps[np.unique(np.linspace(0, len(steps) - 1, COMPARED).round().astype(int))]
        lines = [(tag, *short_names(runs))]
        for step in shown:
            lines.append((f"step {step}", *(f"{s.values[np.searchsorted(s.steps, step)]:.4g}" for s in several)))
        if len(tenth := steps[-(len(steps) // 10) :]) > 1 and len(steps) >= 20:
            lines.append((f"mean of last {len(tenth)}", *(f"{s.values[np.isin(s.steps, tenth)].mean():.4g}" for s in several)))
        print_table(lines)


# ---------------------------------------------------------------- outputs


def write_csv(runs: list[tb.Run], path: Path) -> None:
    """Long: a line a point."""
    several = len(runs) > 1  # only then does a column `run` lead
    with open(path, "w", newline="") as f:
        out = csv.writer(f, lineterminator="\n")
        out.writerow(["run"] * several + ["tag", "step", "wall_time", "value"])
        for run in runs:
            for tag in tags_of(run):
                columns = (c.tolist() for c in run.series[tag][:3])
                out.writerows([run.name] * several + [tag, *p] for p in zip(*columns, strict=True))


def write_csv_wide(runs: list[tb.Run], path: Path) -> None:
    """Wide: a line a step, a column a tag, empty where a tag has no point there. Tags without steps have no place in it."""
    several, tags = len(runs) > 1, [tag for tag in tags_of(*runs) if not any(run.series[tag].stepless for run in runs if tag in run.series)]
    with open(path, "w", newline="") as f:
        out = csv.writer(f, lineterminator="\n")
        out.writerow(["run"] * several + ["step", *tags])
        for run in runs:
            columns = [
                dict(zip(*(c.tolist() for c in (run.series[t].steps, run.series[t].values)), strict=True)) if t in run.series else {}
                for t in tags
            ]
            for step in sorted(set().union(*columns)):
                out.writerow([run.name] * several + [step, *(column.get(step, "") for column in columns)])


def write_table(runs: list[tb.Run], path: Path) -> None:
    def table(run):
        files = [dict(file=str(f.path), bytes=f.size, read_bytes=f.read, fault=f.fault) for f in run.files]
        counts = dict(points=run.points, replaced=run.replaced, rewound=run.rewound, restarts=[step for _, step in run.restarts])
        series = {tag: row(run.series[tag]) for tag in tags_of(run)}
        return dict(name=run.name, files=files, **counts, series=series, health=health(run) if series else None)

    console.write_json(path, {"runs": [table(run) for run in runs]})


def smooth(x, values):
    """Centred mean of the middle half of each twentieth of the points (9 or more), at up to 400 places: a spike stays in the raw line.

    Towards both ends the windows shrink to keep their centre: a steep start is not flattened.
    """
    half, places = max(4, len(x) // 40), np.unique(np.linspace(0, len(x) - 1, 400).astype(int))
    halves = np.minimum(half, np.maximum(max(3, half // 4), np.minimum(places, len(x) - 1 - places)))
    windows = (np.sort(values[max(0, i - h) : i + h + 1]) for i, h in zip(places, halves, strict=True))
    return x[places], [w[len(w) // 4 : len(w) - len(w) // 4].mean() for w in windows]


def draw(panel, s: tb.Series, color, validation: bool, pale: float) -> None:
    """One series: the raw line pale, the smoothed one over it, crosses at non-finite values; a validation series as dots."""
    x = np.arange(len(s.values)) if s.stepless else s.steps
    finite = np.isfinite(s.values)
    if validation:
        panel.plot(x[finite], s.values[finite], "o", color=color, ms=5, mec="black", mew=0.8, zorder=4)
    else:
        turns = np.diff(np.sign(np.diff(s.values[finite]))) != 0
        noisy = finite.sum() >= FEW_POINTS and turns.mean() > 0.2  # a schedule turns rarely: smoothing would only blunt it
        marker = "" if len(x) >= FEW_POINTS else "o"
        panel.plot(x, np.where(finite, s.values, np.nan), color=color, marker=marker, ms=3, **(dict(lw=0.9, alpha=pale) if noisy else LINE))
        if noisy:
            panel.plot(*smooth(x[finite], s.values[finite]), color=color, **LINE)
    if not finite.all():
        panel.plot(x[~finite], np.full((~finite).sum(), 0.03), "x", color="red", ms=6, transform=panel.get_xaxis_transform())
    if s.stepless:
        panel.set_xlabel("point (no step was written)", fontsize=9)


def cut_outliers(panel, shown) -> bool:
    """Where a few points (first steps, saves) would flatten all others: leave those above the scale, a triangle at the top for each."""
    if len(shown) < FEW_POINTS:
        return False
    low, usual = shown.min(), np.quantile(shown, 0.98)
    if not usual > low or shown.max() - low <= 3 * (usual - low):
        return False
    top = usual + 0.5 * (usual - low)
    for line in panel.get_lines():
        x, y = line.get_data()
        if len(x) > 2 and (above := np.asarray(y) > top).any():
            where = dict(transform=panel.get_xaxis_transform(), clip_on=False)
            panel.plot(np.asarray(x)[above], np.ones(above.sum()), "^", color=line.get_color(), ms=5, **where)
    panel.set_ylim(low - 0.05 * (top - low), top)
    return True


def write_plot(runs: list[tb.Run], path: Path) -> None:
    """One panel a tag with every run in it. val/X is drawn as dots into the panel of train/X where there is one."""
    labels = short_names(runs)
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    tags = tags_of(*runs)
    guests = {"train/" + tag.removeprefix("val/"): tag for tag in tags if tag.startswith("val/")}
    tags = [tag for tag in tags if not (tag.startswith("val/") and "train/" + tag.removeprefix("val/") in tags)]
    columns = min(PLOT_COLUMNS, len(tags))
    rows = -(-len(tags) // columns)
    figure = Figure(figsize=(PLOT_WIDTH / 100, (PLOT_ROW * rows + 60) / 100), dpi=100, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel in panels[len(tags) :]:
        panel.set_visible(False)
    colors = [colormaps["tab10"](i % 10) for i in range(len(runs))]
    extra = {}  # legend entries that the picture needs
    for panel, tag in zip(panels, tags, strict=False):
        drawn = []
        for run, color in zip(runs, colors, strict=True):
            for name in (n for n in (tag, guests.get(tag)) if n in run.series):
                s, validation = run.series[name], name.startswith("val/")
                draw(panel, s, color, validation, 0.3 if len(runs) == 1 else 0.16)
                drawn.append(s.values[np.isfinite(s.values)])
                if validation:
                    extra["validation"] = dict(marker="o", ls="", ms=5, color="white", mec="black", mew=0.8)
                if len(drawn[-1]) < len(s.values):
                    extra["not finite"] = dict(marker="x", ls="", ms=6, color="red")
            if tag in run.series and not run.series[tag].stepless:
                for _, step in run.restarts:
                    panel.axvline(step, color="0.35" if len(runs) == 1 else color, lw=1, ls=(0, (4, 3)), zorder=1)
                    extra["restart"] = dict(color="0.35", lw=1, ls=(0, (4, 3)))
        shown = np.concatenate(drawn)
        panel.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
        if re.search("loss|norm", tag) and len(shown) and shown.min() > 0 and shown.max() >= LOG_RATIO * shown.min():
            panel.set_yscale("log")
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_major_formatter("{x:g}")
            panel.yaxis.set_minor_formatter(NullFormatter())
        else:
            if len(shown) and abs(shown).max() < 0.01:
                panel.yaxis.set_major_formatter("{x:.3g}")
            if cut_outliers(panel, shown):
                extra["off the scale"] = dict(marker="^", ls="", ms=5, color="0.35")
        panel.set_title(tag if len(tag) <= 46 else "..." + tag[-43:], loc="left", fontsize=10.5, fontweight="bold")
        panel.grid(alpha=0.25)
        panel.tick_params(which="both", labelsize=9)
        panel.spines[["top", "right"]].set_visible(False)
    handles = [Line2D([], [], color=color, label=label, **LINE) for label, color in zip(labels, colors, strict=True)]
    handles += [Line2D([], [], label=label, **style) for label, style in extra.items()]
    figure.legend(
        handles=handles, loc="outside upper left", ncols=min(6 if len(runs) == 1 else 4, len(handles)), frameon=False, fontsize=10
    )
    figure.supxlabel("step", fontsize=10)
    figure.savefig(path, format="png")


# ---------------------------------------------------------------- checks


def expectation(text: str) -> list[tuple]:
    """tag=lo:hi@where, or the name of a built-in list, as (tag, lo, hi, where); where: a step, first, first+N (steps), last."""
    if text in EXPECTATIONS:
        return [one for line in EXPECTATIONS[text] for one in expectation(line)]
    number = r"[-+\d.eE]*"
    match = re.fullmatch(rf"(.+)=({number}):({number})(?:@(\d+|first|first\+\d+|last))?", text)
    try:
        tag, low, high, where = match.groups()
        return [(tag, float(low or -math.inf), float(high or math.inf), where or "last")]
    except (AttributeError, ValueError) as error:
        form = "expected TAG=LO:HI[@STEP|@first|@first+N|@last] (LO or HI may be empty) or one of " + ", ".join(EXPECTATIONS)
        raise argparse.ArgumentTypeError(f"{form}; found {text!r}") from error


def check(run: tb.Run, expected: list[tuple]) -> list[str]:
    """Print a line an expectation; return those that are not met. A point outside, not finite, or not there is none."""
    missed = []
    for tag, low, high, where in expected:
        name, value = f"{tag}@{where}", None
        if s := run.series.get(tag):
            step = int(where) if where.isdigit() else int(s.steps[-1 if where == "last" else 0]) + int(where.partition("+")[2] or 0)
            value = s.values[-1 if where == "last" else np.searchsorted(s.steps, step)] if step in s.steps else None
        found = f"{value:.6g}" if value is not None else f"no point at step {step}, the last is {s.steps[-1]}" if s else "no such tag"
        met = value is not None and low <= value <= high
        (console.ok if met else console.fail)("expect", f"{name} in {low:g}:{high:g}: {found}")
        missed += [] if met else [f"{run.name}: {name} = {found}"]
    return missed


class Log:
    """The last of each marker in a growing log. What a progress bar writes between two carriage returns counts as a line of its own."""

    def __init__(self, path: Path):
        self.path, self.at, self.rest = path, 0, b""  # bytes read; the last, unfinished line
        self.lines, self.number = 0, 1  # lines seen, and the number an editor gives to the current one
        self.last, self.counts = {}, {}  # marker -> (lines, number, text) of the last; how often it was seen

    def refresh(self) -> None:
        with open(self.path, "rb") as f:
            f.seek(self.at)
            while block := f.read(1 << 20):
                self.at += len(block)
                *parts, self.rest = re.split(rb"([\r\n])", self.rest + block)
                for line, end in zip(parts[::2], parts[1::2], strict=True):
                    self.lines += 1
                    for name in markers_in(line):
                        self.last[name], self.counts[name] = (self.lines, self.number, line), self.counts.get(name, 0) + 1
                    self.number += end == b"\n"

    def show(self) -> list[str]:
        """Print the last of each marker, the unfinished line included; return the errors that no progress followed."""
        self.refresh()
        last = self.last | dict.fromkeys(markers_in(self.rest), (self.lines + 1, self.number, self.rest))
        console.ok(str(self.path), console.human_bytes(self.at))
        ends, reached = [], last.get("progress", (0,))[0]
        for name, _, error in MARKERS:
            if name not in last:
                if not error:
                    console.ok(name, "not seen")
                continue
            at, number, line = last[name]
            text = " ".join(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line.decode(errors="replace")).split())
            text = f"{text[:157]}..." if len(text) > 160 else text
            fatal = error and at > reached
            after = f" ({self.counts[name]} in all; the run went on after it)" if error and not fatal else ""
            (console.warn if fatal else console.ok)(name, f"line {number}: {text}{after}")
            ends += [f"{name} in line {number} of {self.path}"] if fatal else []
        return ends


def markers_in(line: bytes) -> list[str]:
    return [name for name, pattern, _ in MARKERS if pattern.search(line)]


# ---------------------------------------------------------------- following


def screen(args, runs: tb.Runs, logs: list[Log], columns: int | None = None) -> list[str]:
    """What a single look prints, as lines."""
    buffer = io.TextIOWrapper(io.BytesIO(), encoding=sys.stdout.encoding)
    with contextlib.redirect_stdout(buffer):
        for run in runs.runs.values():
            show(run, columns)
        if args.compare and len(runs.with_scalars()) > 1:
            compare(runs.with_scalars())
        for run in runs.with_scalars():
            check(run, args.expect)
        for log in logs:
            log.show()
        if not runs.runs:
            console.ok("waiting", f"no event file in {', '.join(map(str, args.runs))} yet")
        console.say(f"{time.strftime('%H:%M:%S')}, every {args.interval:g} s; Ctrl-C ends")
    buffer.flush()
    return buffer.buffer.getvalue().decode(sys.stdout.encoding).splitlines()


def fit(lines: list[str], width: int, height: int) -> list[str]:
    """Lines for a window: prefixed ones are wrapped, rows of tables cut, and of those the last are left out when there are too many."""
    parts = [textwrap.wrap(x, width - 1, subsequent_indent="  ") if x.startswith("[") else [x[: width - 1]] for x in lines]
    left_out = 0
    while sum(map(len, parts)) >= height - (left_out > 0):
        rows = [i for i, part in enumerate(parts) if not part[0].startswith("[")][
            2:-1
        ]  # not the head, the first row, the line at the bottom
        if not rows:
            break
        del parts[rows[-1]]
        left_out += 1
    parts[-1:-1] = [[f"(the window is {left_out} rows too low)"[: width - 1]]] * bool(left_out)
    fitted = [line for part in parts for line in part]
    return [*fitted[: height - 2], fitted[-1]] if len(fitted) >= height else fitted


def follow(args, sleep=time.sleep) -> int:
    """Redraw in place as the runs grow, until Ctrl-C; elsewhere than in a terminal, print on news only."""
    runs, logs, terminal = tb.Runs(args.runs), [Log(path) for path in args.log], sys.stdout.isatty()
    try:
        while True:
            news = runs.refresh() or not runs.runs
            if terminal:
                width, height = shutil.get_terminal_size()
                lines = fit(screen(args, runs, logs, width), width, height)
                sys.stdout.write("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J")
                sys.stdout.flush()
            elif news:
                console.say("\n".join(screen(args, runs, logs)))
            sleep(args.interval)
    except KeyboardInterrupt:
        console.done("07_read_tb", runs=len(runs.runs), points=sum(run.points for run in runs.runs.values()))
        return 0


# ---------------------------------------------------------------- the stage


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False, formatter_class=console.HelpFormatter)
    add = parser.add_argument
    add("runs", nargs="*", type=Path, metavar="RUN", help="run folder, tensorboard folder, event file, or a root of several runs")
    add("--csv", type=Path, metavar="FILE", help="write every point: tag,step,wall_time,value (with several runs, a column run first)")
    add("--csv-wide", type=Path, metavar="FILE", help="write a line per step, a column per tag")
    add("--json", type=Path, metavar="FILE", help="write tables and health as strict JSON; null stands for non-finite")
    add("--plot", type=Path, metavar="FILE.png", help=f"draw every tag, all runs over each other, {PLOT_WIDTH} px wide")
    add("--compare", action="store_true", help="print the important tags of all runs at equal steps")
    add("--follow", action="store_true", help="redraw as the runs grow, until Ctrl-C")
    add("--interval", type=float, default=10, metavar="SECONDS", help="between two looks of --follow (default: %(default)g)")
    expect_help = "exit 5 unless the value lies there; @STEP may be first, first+N, last (default); built in: " + ", ".join(EXPECTATIONS)
    add("--expect", type=expectation, action="append", default=[], metavar="TAG=LO:HI@STEP", help=expect_help)
    add(
        "--log",
        type=Path,
        action="append",
        default=[],
        metavar="run.log",
        help="print the last of each marker in this log; alone or with runs",
    )
    add("--strict", action="store_true", help="exit 5 when an event file is truncated or corrupt, or --log ends in an error")
    add("--force", action="store_true", help="replace output files that exist")
    add("--dry-run", action="store_true", help="print the plan and stop")
    args = parser.parse_args(argv)
    args.expect = [one for several in args.expect for one in several]
    outputs = [path for path in (args.csv, args.csv_wide, args.json, args.plot) if path]
    if len(set(outputs)) < len(outputs):
        parser.error("--csv, --csv-wide, --json and --plot need a file each")
    if args.follow and outputs:
        parser.error("--follow writes no files: ask for them in a second call")
    if not args.runs and (not args.log or outputs or args.expect or args.compare or args.follow):
        parser.error("a RUN is needed (--log alone does without)")
    if args.interval <= 0:
        parser.error("--interval must be above 0")
    return args


def plan(args) -> dict:
    """Say what will be read and written; return the writer of each output asked for."""
    for source in args.runs:
        files = [path for paths in tb.find(source).values() for path in paths]
        console.plan("read", f"{source}: event files {len(files)} ({console.human_bytes(sum(f.stat().st_size for f in files))})")
    for log in args.log:
        if not log.is_file():
            raise console.Precondition(f"a log at {log}", "no such file", "check the path; 05_train_fsdp2.py writes RUN/run.log")
        console.plan("read", f"{log} ({console.human_bytes(log.stat().st_size)})")
    writers = ((args.csv, write_csv), (args.csv_wide, write_csv_wide), (args.json, write_table), (args.plot, write_plot))
    outputs = {path: write for path, write in writers if path}
    for path in outputs:
        if path.exists() and not args.force:
            raise console.OutputExists(f"no file at {path}", f"{path.stat().st_size} bytes", "pass --force to replace it, or another name")
        console.plan("write", path)
    return outputs


def execute(args, outputs: dict) -> tuple[list[tb.Run], list[str]]:
    """Print and write what was asked for; return the runs and what the checks found wrong."""
    every = tb.read(args.runs)
    runs, wrong = [run for run in every if run.series], []
    for run in every:
        show(run)
    if args.compare:
        compare(runs)
    for path, write in outputs.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".part")  # renamed when complete
        write(runs, temporary)
        os.replace(temporary, path)
    for run in runs:
        wrong += check(run, args.expect)
    for log in args.log:
        ends = Log(log).show()
        wrong += ends if args.strict else []
    if args.strict:
        wrong += [f"{f.path}: {f.fault_text()}" for run in every for f in run.files if f.fault]
    return runs, wrong


def main(argv=None) -> int:
    args = parse_args(argv)
    outputs = plan(args)
    if args.dry_run:
        return 0
    if args.follow:
        return follow(args)
    runs, wrong = execute(args, outputs)
    if wrong:
        raise console.VerifyFailed(
            "whole event files, met expectations, a log without an error at its end", "; ".join(wrong), "see the lines above"
        )
    tags, points = (sum(map(count, runs)) for count in (lambda run: len(run.series), lambda run: run.points))
    console.done("07_read_tb", runs=len(runs), tags=tags, points=points, out=",".join(map(str, outputs)) or "-")
    return 0


if __name__ == "__main__":
    raise SystemExit(console.run_stage("07_read_tb", main))
