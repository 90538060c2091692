"""TensorBoard event files: every scalar of every record, restarts merged, and where a file is broken.

Format:   records of length (8 bytes) | crc of it | data | crc of them; a crc is CRC-32C, masked; data are one Event protobuf.
Verified: both crcs of every record, before anything in it is believed. Reading ends at the first bad one: behind it the framing is lost.
Speed:    crcs in numpy over all records of a block at once; an Event of one plain scalar is read by pattern, any other by protobuf.
Memory:   28 bytes a point, and one block of the file.
Merging:  the newest point of a step stands (by wall time, then file, then record), unless a later restart with a purge_step at or before
          that step took it back. A tag that one file holds twice, and only ever at one step, was written without steps: all points stand.
Growing:  Run.refresh() reads only what was appended since; the bytes of a half-written record are kept, not read again.
"""

import json
import re
import struct
import time
from array import array
from collections import namedtuple
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from common import console

BLOCK = 1 << 20  # bytes read at once
FEW = 16  # for fewer records of one length TensorBoard's own crc, byte by byte, is the quicker one
LIVE_SECONDS = 60  # a file written to this recently is taken for a live one
TRUNCATED, BAD_LENGTH, BAD_DATA = "truncated record", "a record's length fails its checksum", "a record's data fail their checksum"
NO_EVENT = "a record with good checksums is no Event"

# The Event that SummaryWriter.add_scalar writes: wall_time, step (absent at 0), summary { value { tag, simple_value } }.
SCALAR = re.compile(rb"\x09(.{8})(?:\x10([\x80-\xff]{0,8}[\x00-\x7f]))?\x2a([\x00-\x7f])\x0a(.)\x0a(.)(.*)\x15(.{4})", re.DOTALL)
DOUBLE, FLOAT, LENGTH = struct.Struct("<d").unpack, struct.Struct("<f").unpack, struct.Struct("<Q").unpack_from

CRC_TABLE = np.arange(256, dtype=np.uint32)
for _ in range(8):
    CRC_TABLE = np.where(CRC_TABLE & 1, CRC_TABLE >> 1 ^ np.uint32(0x82F63B78), CRC_TABLE >> 1)

# One tag as numpy arrays, by step, or by time where the writer gave no step (stepless). walls: seconds since the epoch.
Series = namedtuple("Series", "steps walls values stepless")


def masked_crc(rows: np.ndarray) -> np.ndarray:
    """The masked CRC-32C of each row of bytes [n, length]."""
    if len(rows) < FEW:
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

        return np.array([masked_crc32c(row.tobytes()) for row in rows], np.uint32)
    crc = np.full(len(rows), 0xFFFFFFFF, np.uint32)
    for column in np.ascontiguousarray(rows.T):
        crc = CRC_TABLE[(crc ^ column) & 255] ^ (crc >> 8)
    return ((~crc >> 15) | (~crc << 17)) + np.uint32(0xA282EAD8)


def sound(data: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """For each start: are the `length` bytes there followed by their crc?"""
    rows = np.lib.stride_tricks.sliding_window_view(data, length + 4)[starts]
    return masked_crc(rows[:, :length]) == np.ascontiguousarray(rows[:, length:]).view("<u4")[:, 0]


def whole_records(block: bytes) -> tuple[list[bytes], int, str | None]:
    """The sound records at the head of a block, the bytes they take, and what ended them (None: all of the block is read)."""
    starts, at, fault = [], 0, None
    while len(block) - at >= 12 and (end := at + 16 + LENGTH(block, at)[0]) <= len(block):
        starts.append(at)
        at = end
    data, bounds = np.frombuffer(block, np.uint8), np.array([*starts, at])
    heads = bounds if len(block) - at >= 12 else bounds[:-1]  # the last may be that of a record that the block cuts
    if at < len(block):
        fault = TRUNCATED
    if len(heads) and not (good := sound(data, heads, 8)).all():
        bounds, fault = bounds[: good.argmin() + 1], BAD_LENGTH
    starts, lengths = bounds[:-1], np.diff(bounds) - 16
    good = np.ones(len(starts), bool)
    for length in np.unique(lengths):
        good[lengths == length] = sound(data, starts[lengths == length] + 12, int(length))
    if not good.all():
        bounds, fault = bounds[: good.argmin() + 1], BAD_DATA
    edges = bounds.tolist()
    return [block[a + 12 : b - 4] for a, b in pairwise(edges)], edges[-1], fault


@dataclass
class EventFile:
    path: Path
    read: int = 0  # bytes of the whole, sound records so far
    size: int = 0  # bytes seen so far, those of a half-written record included
    fault: str | None = None
    fetched: int = 0  # bytes taken from the disk
    tail: bytes = b""
    first: tuple | None = None  # (wall, step) of its first scalar, or of its purge_step
    last: float = 0.0  # newest wall time

    def records(self):
        """Yield the new records of one block after another."""
        self.size = self.path.stat().st_size
        if self.fault not in (None, TRUNCATED):
            return
        with open(self.path, "rb") as f:
            f.seek(self.read + len(self.tail))
            while more := f.read(BLOCK):
                self.fetched += len(more)
                found, used, self.fault = whole_records(self.tail + more)
                self.tail = (self.tail + more)[used:]
                self.read += used
                yield found
                if self.fault not in (None, TRUNCATED):
                    break
        self.size = max(self.size, self.read + len(self.tail))

    def saw(self, wall: float, step: int) -> None:
        if self.first is None or wall < self.first[0]:
            self.first = (wall, step)

    def fault_text(self) -> str:
        what = self.fault
        if what == TRUNCATED:
            age = time.time() - self.path.stat().st_mtime
            what += " (a live run, in the middle of a write)" if age < LIVE_SECONDS else " (a killed run)"
        return f"{what}; stopped at byte {self.read} of {self.size}, {self.size - self.read} bytes left unread"


@dataclass
class Points:
    """One tag as it was written."""

    walls: array = field(default_factory=lambda: array("d"))
    steps: array = field(default_factory=lambda: array("q"))
    values: array = field(default_factory=lambda: array("d"))
    files: array = field(default_factory=lambda: array("i"))


@dataclass
class Run:
    name: str
    folder: Path
    files: list[EventFile] = field(default_factory=list)
    written: dict[str, Points] = field(default_factory=dict)
    purges: list[tuple[float, int]] = field(default_factory=list)  # (wall, purge_step) of each writer opened with one
    series: dict[str, Series] = field(default_factory=dict)
    points: int = 0
    replaced: int = 0  # points written again at the same step
    rewound: int = 0  # points of steps that a later restart took back and has not written again
    restarts: list[tuple[float, int]] = field(default_factory=list)  # (wall, first step) of each later writer
    writers_at_once: bool = False
    last_event: float = 0.0  # seconds since the epoch
    max_steps: int | None = None  # `steps` of the run's newest launch

    def refresh(self, paths: list[Path]) -> bool:
        """Read what these files hold beyond what was read before; was there anything?"""
        known, before = {f.path for f in self.files}, sum(f.fetched for f in self.files)
        self.files += [EventFile(path) for path in paths if path not in known]
        for number, file in enumerate(self.files):
            self._read(number, file)
        if sum(f.fetched for f in self.files) == before:
            return False
        self._merge()
        self.max_steps = max_steps(self.folder)
        return True

    def _read(self, number: int, file: EventFile) -> None:
        before = {tag: len(points.walls) for tag, points in self.written.items()}
        for records in file.records():
            done = self._read_block(file, records)
            if done < len(records):
                file.read, file.fault = file.read - sum(len(r) + 16 for r in records[done:]), NO_EVENT
                break
        for tag, points in self.written.items():
            if (start := before.get(tag, 0)) < len(points.walls):
                points.files.extend([number] * (len(points.walls) - start))
                walls = np.array(points.walls[start:])
                earliest = int(walls.argmin())
                file.saw(float(walls[earliest]), points.steps[start + earliest])
                file.last = max(file.last, float(walls.max()))

    def _read_block(self, file: EventFile, records: list[bytes]) -> int:
        """Take the scalars of these records; how many records could be read?"""
        tags = {}  # name as bytes -> where its wall, step and value go
        last, step = None, 0  # the points of one step follow each other
        for number, record in enumerate(records):
            match = SCALAR.fullmatch(record)
            if match:
                wall, varint, summary, value, name, tag, float32 = match.groups()
                if name[0] == len(tag) and value[0] == len(tag) + 7 and summary[0] == len(tag) + 9 and (tag in tags or is_text(tag)):
                    if varint != last:
                        last, step = varint, 0
                        for byte in reversed(varint or b""):
                            step = step << 7 | byte & 127
                    if tag not in tags:
                        points = self.written.setdefault(tag.decode(), Points())
                        tags[tag] = points.walls.append, points.steps.append, points.values.append
                    to_walls, to_steps, to_values = tags[tag]
                    to_walls(DOUBLE(wall)[0])
                    to_steps(step)
                    to_values(FLOAT(float32)[0])
                    continue
            try:
                for wall, step_, tag, value in parse(record):
                    if tag is not None:
                        points = self.written.setdefault(tag, Points())
                        points.walls.append(wall)
                        points.steps.append(step_)
                        points.values.append(value)
                    elif value:
                        self.purges.append((wall, step_))
                        file.saw(wall, step_)
            except (ValueError, TypeError):  # no Event, or a tensor that is none
                return number
        return len(records)

    def _merge(self) -> None:
        self.series, self.points, self.replaced, self.rewound = {}, 0, 0, 0
        for tag, points in self.written.items():
            series, replaced, rewound = merge(points, self.purges)
            self.replaced, self.rewound, self.points = self.replaced + replaced, self.rewound + rewound, self.points + len(series.steps)
            if len(series.steps):
                self.series[tag] = series
        self.last_event = max((f.last for f in self.files), default=0.0)
        self.restarts, self.writers_at_once, end = [], False, None
        for file in sorted((f for f in self.files if f.first), key=lambda f: f.first[0]):
            if end is not None and file.first[0] < end:
                self.writers_at_once = True
            elif end is not None:
                self.restarts.append(file.first)
            end = max(end or 0.0, file.last)


def parse(record: bytes):
    """By protobuf: yield (wall, step, tag, value) of each scalar, and first (wall, step, None, did a writer start with a purge_step)."""
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    try:
        event = Event.FromString(record)
    except DecodeError as error:
        raise ValueError("no Event") from error
    yield event.wall_time, event.step, None, event.session_log.status == SessionLog.START
    for value in event.summary.value:
        kind = value.WhichOneof("value")
        if kind == "simple_value":
            yield event.wall_time, event.step, value.tag, value.simple_value
        # Tensor form (TF2, new_style=True). A writer may name the plugin on a tag's first event only.
        elif kind == "tensor" and value.metadata.plugin_data.plugin_name in ("", "scalars"):
            from tensorboard.util.tensor_util import make_ndarray

            array = make_ndarray(value.tensor)
            if array.size == 1 and array.dtype.kind in "fiub":
                yield event.wall_time, event.step, value.tag, float(array.item())


def max_steps(folder: Path) -> int | None:
    """`steps` of the newest launch in a run folder (launches.jsonl; args.json is what the run began with), seen from it or from its tensorboard
    folder; None where there is none to read."""
    run = folder.parent if folder.name == "tensorboard" else folder
    try:
        launches = run / "launches.jsonl"
        found = (
            json.loads(launches.read_text().splitlines()[-1])["args"] if launches.is_file() else json.loads((run / "args.json").read_text())
        )
        steps = found["steps"]
    except (OSError, ValueError, TypeError, KeyError, IndexError):  # another project's file of that name
        return None
    return steps if isinstance(steps, int) else None


def is_text(tag: bytes) -> bool:
    try:
        tag.decode()
        return True
    except UnicodeDecodeError:  # protobuf refuses it as well
        return False


def merge(points: Points, purges: list[tuple[float, int]]) -> tuple[Series, int, int]:
    """The points that stand, how many were replaced, how many rewound. The rule is in the module's docstring."""
    walls, steps, values, files = (np.array(c) for c in (points.walls, points.steps, points.values, points.files))
    by_time = np.lexsort((files, walls))
    stepless = bool(len(steps) and (steps == steps[0]).all() and np.bincount(files).max() > 1)
    kept, newest = by_time, len(steps)
    if not stepless:
        by_time = by_time[::-1]
        kept = by_time[np.unique(steps[by_time], return_index=True)[1]]
        newest = len(kept)
        for wall, step in purges:
            kept = kept[(walls[kept] >= wall) | (steps[kept] < step)]
    return Series(steps[kept], walls[kept], values[kept], stepless), len(steps) - newest, newest - len(kept)


def find(source: Path) -> dict[Path, list[Path]]:
    """The runs below a path as folder -> its event files: a run folder, a tensorboard folder, an event file, a root of many runs."""
    if source.is_file():
        return {source: [source]}
    if not source.exists():
        raise console.Precondition(
            f"a run folder or an event file at {source}", "nothing there", "check the path; 05_train_fsdp2.py writes RUN/tensorboard"
        )
    found = {}
    for path in sorted(source.rglob("*tfevents*")):
        if path.is_file():
            found.setdefault(path.parent, []).append(path)
    return found


class Runs:
    """The runs below some paths; refresh() follows their growth, new files and new runs included."""

    def __init__(self, sources: list[Path]):
        self.sources, self.runs = sources, {}

    def refresh(self) -> bool:
        news = False
        for source in self.sources:
            for folder, paths in find(source).items():
                run = self.runs.get(folder)
                if run is None or any(not f.path.exists() or f.path.stat().st_size < f.size for f in run.files):  # new, or written anew
                    name = folder.parent if folder.name == "tensorboard" and folder != source else folder
                    run = self.runs[folder] = Run(str(name), folder.parent if source.is_file() else folder)
                news |= run.refresh(paths)
        return news

    def with_scalars(self) -> list[Run]:
        return [run for run in self.runs.values() if run.series]


def read(sources: list[Path]) -> list[Run]:
    """Every run below the paths, once. A path without event files, or without any scalar in them, is a Precondition of its own."""
    for source in sources:
        if not find(source):
            raise console.Precondition(
                f"event files (*tfevents*) in {source}", "none", "wait for the run's first log step, or check the path"
            )
    runs = Runs(sources)
    runs.refresh()
    for source in sources:
        mine = [runs.runs[folder] for folder in find(source) if folder in runs.runs]
        if not any(run.series for run in mine):
            texts = [f"{f.path}: {f.fault_text() if f.fault else console.human_bytes(f.size)}" for run in mine for f in run.files]
            found = f"none ({sum(run.rewound for run in mine)} rewound by a restart) in {'; '.join(texts)}"
            live = any(time.time() - f.path.stat().st_mtime < LIVE_SECONDS for run in mine for f in run.files)
            mend = "the run is still writing: wait for its first log step, or --follow it" if live else "pass a run that wrote scalars"
            raise console.Precondition(f"scalars in the event files of {source}", found, mend)
    return list(runs.runs.values())
