"""Everything that is wrong with a LeRobot v3 data set, each defect with its file, episode and frame.

`inspect` goes through a data set once (files, info.json, tasks, episodes, rows, every frame of every camera) and lists all it finds; it
does not stop at the first defect. Its cost grows linearly with the number of frames. It needs numpy, pyarrow and PyAV; it writes nothing.
"""

import io
import os
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from common import libero
from common.console import Precondition
from common.libero import Embodiment, find_cameras, read_info, read_table, read_tasks

RANGE_SLACK = 1e-3  # float noise allowed beyond the legal range of an action
FETCH = "fetch this file again: delete it, then python 04_fetch_libero.py fetch"
CONVERT = "convert the data set again with lerobot"
HEAD = 512  # bytes that tell a pointer or an error page from a file
ROW_COLUMNS = {"index": "int64", "episode_index": "int64", "frame_index": "int64", "task_index": "int64", "timestamp": "float32"}
TEMPLATE = {
    "data_path": ("{chunk_index", "{file_index"),
    "video_path": ("{video_key", "{chunk_index", "{file_index"),
}


@dataclass(frozen=True)
class Defect:
    file: str  # relative to the data set
    what: str
    mend: str
    episode: int | None = None
    frame: int | None = None  # of the episode
    lost: int = 0  # frames that cannot be decoded
    note: bool = False  # worth knowing, but not wrong

    def __str__(self) -> str:
        place = [self.file, *(f"{k} {v}" for k, v in (("episode", self.episode), ("frame", self.frame)) if v is not None)]
        return f"{' '.join(place)}: {self.what}" + (f"; to mend: {self.mend}" if self.mend else "")


@dataclass
class Report:
    """What `inspect` found in one data set."""

    name: str
    fps: float | None = None
    episodes: int = 0
    frames: int = 0
    windows: int = 0
    found: list[Defect] = field(default_factory=list)

    @property
    def defects(self) -> list[Defect]:
        return [d for d in self.found if not d.note]

    @property
    def notes(self) -> list[Defect]:
        return [d for d in self.found if d.note]

    @property
    def lost(self) -> int:
        return sum(d.lost for d in self.found)

    def as_json(self) -> dict:
        counts = {k: getattr(self, k) for k in ("fps", "episodes", "frames", "windows", "lost")}
        return counts | {k: [asdict(d) | {"text": str(d)} for d in getattr(self, k)] for k in ("defects", "notes")}


def inspect(root: Path, robot: Embodiment, fps: float) -> Report:
    """Go through one data set. fps: the frame rate that it should have (the action stats are for one rate). -> Report."""
    root, report = Path(root), Report(Path(root).name)
    add = report.found.append
    broken = _files(root, add)
    try:
        info = read_info(root)
    except Precondition as error:
        if "meta/info.json" not in broken:
            add(Defect("meta/info.json", f"{error.found.replace(f' in {root}/meta/info.json', '')}, expected {error.expected}", error.mend))
        return report
    features, kinds = _info(info, robot, fps, add)
    report.fps = info.get("fps")
    rate = float(report.fps) if isinstance(report.fps, (int, float)) and report.fps > 0 else fps
    tasks = _tasks(root, info, broken, add)
    episodes = _episodes(root, info, kinds, rate, broken, add)
    rows = _rows(root, info, features, robot, broken, add)
    rows_of = {}
    if rows is not None:
        seen, first, count = np.unique(rows["episode_index"], return_index=True, return_counts=True)
        rows_of = dict(zip(seen.tolist(), zip(first.tolist(), count.tolist(), strict=True), strict=True))
        report.episodes, report.frames, report.windows = len(seen), int(count.sum()), int(np.maximum(count - robot.chunk, 0).sum())
        _compare(root, info, rate, tasks, episodes, rows, rows_of, robot, add)
    if episodes:
        _videos(root, info, features, kinds, rate, episodes, rows, rows_of, broken, add)
    _images(root, features, kinds, broken, add)
    return report


# ---------------------------------------------------------------- files and metadata


def _files(root: Path, add) -> set[str]:
    """Pointers, empty files and error pages. -> the files that cannot hold what their name says, relative to root."""
    broken = set()
    for file in sorted(p for p in root.rglob("*") if p.is_file()):
        name = file.relative_to(root).as_posix()
        with open(file, "rb") as f:
            head = f.read(HEAD).lstrip()
        if file.suffix == ".incomplete":
            add(Defect(name, "left over from a download that was cut", "python 04_fetch_libero.py fetch, or delete it", note=True))
            continue
        if not head:
            what = "empty"
        elif head.startswith(b"version https://git-lfs"):
            what = "a Git LFS pointer, not the file"
        elif head[:5].lower() in (b"<!doc", b"<html") or (head[:1] == b"<" and file.suffix in (".parquet", ".mp4", ".json")):
            what = "an HTML page, not the file"
        elif file.suffix == ".parquet" and head[:4] != b"PAR1":
            what = "not a parquet file"
        else:
            continue
        broken.add(name)
        add(Defect(name, what, FETCH))
    return broken


def _info(info: dict, robot: Embodiment, fps: float, add) -> tuple[dict, dict[str, str]]:
    """-> (features, {camera key: "video" or "image"}); the latter is empty when the cameras are not to be found."""
    file = "meta/info.json"
    for key in ("fps", "features", "data_path", "total_episodes", "total_frames"):
        if key not in info:
            add(Defect(file, f"no {key}", CONVERT))
    if "fps" in info and not (isinstance(info["fps"], (int, float)) and info["fps"] > 0):
        add(Defect(file, f"fps is {info['fps']!r}", CONVERT))
    elif "fps" in info and info["fps"] != fps:
        mend = f"if that is right: python 04_fetch_libero.py stats, then --fps {info['fps']:g} here and encode --stats"
        add(Defect(file, f"{info['fps']:g} fps where the action stats are for {fps:g}: deltas scale with the rate", mend))
    features = info.get("features") if isinstance(info.get("features"), dict) else {}
    wanted = {**{k: (d, [1]) for k, d in ROW_COLUMNS.items()}, robot.action_key: ("float32", [robot.action_dim])}
    for key, (dtype, shape) in wanted.items():
        feature = features.get(key)
        if not isinstance(feature, dict):
            add(Defect(file, f"no feature {key}", CONVERT))
            continue
        if list(feature.get("shape", [])) != shape:
            add(Defect(file, f"feature {key} has shape {feature.get('shape')}, expected {shape}", CONVERT))
        if feature.get("dtype") not in (dtype, {"float32": "float64"}.get(dtype)):
            add(Defect(file, f"feature {key} is {feature.get('dtype')}, expected {dtype}", CONVERT))
    try:
        cameras = find_cameras(features, robot).cameras
    except Precondition as error:
        add(Defect(file, f"{error.found}; expected {error.expected}", error.mend))
        cameras = ()
    kinds = {c: features[c]["dtype"] for c in cameras}
    size = robot.camera_size
    for camera in cameras:
        shape = list(features[camera].get("shape", []))
        if sorted(shape) != sorted([size, size, 3]):
            mend = "frames of another size are resized: use the data set that the recipe is for, or accept the difference"
            add(Defect(file, f"camera {camera} has shape {shape}, expected {[size, size, 3]}", mend))
    for key, parts in TEMPLATE.items():
        if key == "video_path" and "video" not in kinds.values():
            continue
        template = info.get(key)
        if key in info and not (isinstance(template, str) and all(p in template for p in parts)):
            add(Defect(file, f"{key} is {template!r}, which is not a v3 template: it needs {', '.join(p + '}' for p in parts)}", CONVERT))
        elif key == "video_path" and key not in info:
            add(Defect(file, "no video_path", CONVERT))
    return features, kinds


def _tasks(root: Path, info: dict, broken: set, add) -> dict[int, str] | None:
    file = "meta/tasks.parquet"
    if file in broken:
        return None
    if not (root / file).is_file():
        old = root / "meta/tasks.jsonl"
        add(Defect(file, f"missing{' (there is a tasks.jsonl of v2)' if old.is_file() else ''}", libero.TO_V30 if old.is_file() else FETCH))
        return None
    try:
        table = read_table(root / file)
        if "task_index" not in table.column_names:
            add(Defect(file, f"no column task_index; it has {table.column_names}", CONVERT))
            return None
        tasks = read_tasks(root)
    except Precondition as error:
        add(Defect(file, error.found, error.mend))
        return None
    index = table["task_index"].to_pylist()
    for i in sorted({i for i in index if index.count(i) > 1}):
        add(Defect(file, f"task_index {i} stands {index.count(i)} times", CONVERT))
    for i, text in sorted(tasks.items()):
        if not text.strip() or text.strip() == str(i):
            add(Defect(file, f"task_index {i} has the text {text!r}, which says nothing", CONVERT))
    if info.get("total_tasks", len(tasks)) != len(tasks):
        add(Defect("meta/info.json", f"total_tasks {info['total_tasks']}, {file} has {len(tasks)}", FETCH))
    return tasks


def _episodes(root: Path, info: dict, kinds: dict, fps: float, broken: set, add) -> list[dict]:
    """The rows of meta/episodes that can be used, by episode_index."""
    files = sorted((root / "meta/episodes").rglob("*.parquet"))
    if not files:
        add(Defect("meta/episodes", "no parquet file", FETCH))
    rows = []
    for path in files:
        file = path.relative_to(root).as_posix()
        if file in broken:
            continue
        try:
            table = read_table(path)
        except Precondition as error:
            add(Defect(file, error.found, error.mend))
            continue
        needed = ["episode_index", "length", "dataset_from_index", "dataset_to_index", "data/chunk_index", "data/file_index"]
        for camera, kind in kinds.items():
            if kind == "video":
                needed += [f"videos/{camera}/{k}" for k in ("chunk_index", "file_index", "from_timestamp", "to_timestamp")]
        missing = [c for c in needed if c not in table.column_names]
        if missing:
            add(Defect(file, f"no column {', '.join(missing)}", CONVERT))
        if not {"episode_index", "length"} & set(missing):
            rows += [row | {"file": file} for row in table.select([c for c in needed if c not in missing]).to_pylist()]
    rows.sort(key=lambda row: row["episode_index"])
    if not rows:
        return []
    if len(rows) != info.get("total_episodes", len(rows)):
        add(Defect("meta/info.json", f"total_episodes {info['total_episodes']}, meta/episodes has {len(rows)}", FETCH))
    total = 0
    for number, row in enumerate(rows):
        place = {"file": row["file"], "episode": row["episode_index"]}
        if row["episode_index"] != number:
            add(Defect(**place, what=f"stands where episode {number} should: episode_index has gaps or repeats", mend=CONVERT))
            break
        if row["length"] < 1:
            add(Defect(**place, what=f"length {row['length']}", mend=CONVERT))
        bounds = (row.get("dataset_from_index", total), row.get("dataset_to_index", total + row["length"]))
        if bounds != (total, total + row["length"]):
            add(
                Defect(
                    **place,
                    what=f"rows {bounds[0]}..{bounds[1]} by its index, {total}..{total + row['length']} by the lengths",
                    mend=CONVERT,
                )
            )
        for camera in (c for c, kind in kinds.items() if kind == "video" and f"videos/{c}/to_timestamp" in row):
            span = row[f"videos/{camera}/to_timestamp"] - row[f"videos/{camera}/from_timestamp"]
            if not abs(span - row["length"] / fps) <= 0.5 / fps:
                add(
                    Defect(
                        **place, what=f"{camera} spans {span:.3f} s, its {row['length']} frames {row['length'] / fps:.3f} s", mend=CONVERT
                    )
                )
        total += row["length"]
    if total != info.get("total_frames", total):
        add(Defect("meta/info.json", f"total_frames {info['total_frames']}, the episodes add up to {total}", FETCH))
    return rows


# ---------------------------------------------------------------- rows


def _rows(root: Path, info: dict, features: dict, robot: Embodiment, broken: set, add) -> dict[str, np.ndarray] | None:
    """All rows of the data files by `index`: ROW_COLUMNS, action float32 [n, action_dim], file (number), and names (of the files)."""
    files = sorted((root / "data").rglob("*.parquet"))
    if not files:
        add(Defect("data", "no parquet file", FETCH))
    parts, names = [], []
    for path in files:
        file = path.relative_to(root).as_posix()
        if file in broken:
            continue
        wanted = [*ROW_COLUMNS, robot.action_key]
        try:
            import pyarrow.parquet as pq

            missing = sorted(set(wanted) - set(pq.read_schema(path).names))
            if missing:
                add(Defect(file, f"no column {', '.join(missing)}", CONVERT))
                continue
            table = read_table(path, wanted)
        except (Precondition, OSError, ValueError) as error:
            add(Defect(file, error.found if isinstance(error, Precondition) else str(error).splitlines()[0][:160], FETCH))
            continue
        stored = table[robot.action_key].to_pylist()
        width = {len(a) if isinstance(a, list) else 0 for a in stored}
        if width - {robot.action_dim}:
            add(Defect(file, f"actions of {sorted(width)} channels, expected {robot.action_dim}", CONVERT))
            continue
        part = {c: table[c].to_numpy().reshape(-1) for c in ROW_COLUMNS}
        part |= {"action": np.array(stored, np.float32).reshape(-1, robot.action_dim), "file": np.full(len(table), len(names))}
        parts, names = [*parts, part], [*names, file]
    if not parts:
        return None
    rows = {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}
    order = np.argsort(rows["index"], kind="stable")
    return {k: v[order] for k, v in rows.items()} | {"names": np.array(names)}


def _compare(root, info, fps, tasks, episodes, rows, rows_of, robot, add) -> None:
    """The rows against the tables, and the values of the rows. rows_of: episode -> (first row, number of rows)."""
    index, episode, frame = rows["index"], rows["episode_index"], rows["frame_index"]

    def report(bad, what, mend, note=False):
        """One defect for all rows of a mask, at the first of them."""
        if bad.any():
            i = int(bad.argmax())
            count = f" ({int(bad.sum())} rows)" if bad.sum() > 1 else ""
            text = what(i) if callable(what) else what
            add(Defect(str(rows["names"][rows["file"][i]]), text + count, mend, int(episode[i]), int(frame[i]), note=note))

    report(index != np.arange(len(index)), lambda i: f"index {index[i]} where {i} should follow: rows are missing or doubled", CONVERT)
    steps = np.concatenate([[0], frame[1:] - frame[:-1]])
    same = np.concatenate([[False], episode[1:] == episode[:-1]])
    report((same & (steps != 1)) | (~same & (frame != 0)), lambda i: f"frame_index {frame[i]} does not continue its episode", CONVERT)
    if len(rows["index"]) != info.get("total_frames", len(rows["index"])):
        add(Defect("meta/info.json", f"total_frames {info['total_frames']}, the data files hold {len(rows['index'])} rows", FETCH))

    by_table = {row["episode_index"]: row for row in episodes}
    for e, row in by_table.items():
        where = {"file": row["file"], "episode": e}
        if "data/file_index" in row and "data/chunk_index" in row:
            path = str(info.get("data_path", "")).format(chunk_index=row["data/chunk_index"], file_index=row["data/file_index"])
            if not (root / path).is_file():
                add(Defect(path, "missing, though the episodes table names it", FETCH, episode=e))
                continue
            actual = str(rows["names"][rows["file"][rows_of[e][0]]]) if e in rows_of else path
            if actual != path:
                add(Defect(**where, what=f"its rows lie in {actual}, the table says {path}", mend=CONVERT))
        if e not in rows_of:
            add(Defect(**where, what="no row in the data files", mend=FETCH))
        elif rows_of[e][1] != row["length"]:
            add(Defect(**where, what=f"{rows_of[e][1]} rows in the data files, {row['length']} by the table", mend=FETCH))
    if episodes:
        report(~np.isin(episode, list(by_table)), "an episode that meta/episodes does not list", CONVERT)

    expected = frame / fps
    off = ~(np.abs(rows["timestamp"] - expected) <= 0.5 / fps + 1e-4)
    report(off, lambda i: f"timestamp {rows['timestamp'][i]:.4f} s, {expected[i]:.4f} s at {fps:g} fps", CONVERT)
    if tasks is not None:
        report(
            ~np.isin(rows["task_index"], list(tasks)),
            lambda i: f"task_index {rows['task_index'][i]}, which meta/tasks.parquet lacks",
            FETCH,
        )
        long_enough = {e: n for e, (_, n) in rows_of.items() if n > robot.chunk}
        for t, text in sorted(tasks.items()):
            mine = np.unique(episode[rows["task_index"] == t]).tolist()
            if not mine:
                add(Defect("meta/tasks.parquet", f"task {t} {text!r} has no episode", "", note=True))
            elif not set(mine) & set(long_enough):
                what = f"task {t} {text!r}: none of its {len(mine)} episodes has {robot.frames} frames, so it would never be trained"
                add(Defect("meta/tasks.parquet", what, "use a copy whose idle frames were not all removed", episode=mine[0]))
    short = {e: n for e, (_, n) in rows_of.items() if n <= robot.chunk}
    if short:
        e = min(short)
        add(
            Defect(
                "data", f"{len(short)} episode(s) under {robot.frames} frames give no window, the first has {short[e]}", "", e, note=True
            )
        )

    action = rows["action"]
    report(
        ~np.isfinite(action).all(-1), lambda i: f"action is not finite: {action[i].tolist()}", "drop the episode, or fetch the file again"
    )
    for c, (name, least, greatest) in enumerate(robot.action_range):
        values = action[:, c]
        if name == "gripper" and np.nanmin(values) < least - 0.5:
            mend = "store (1 - g) / 2"
            report(
                values < least - RANGE_SLACK,
                lambda i, v=values: f"gripper {v[i]:g}: the simulator's -1 open, 1 closed; LIBERO stores 1 open, 0 closed",
                mend,
            )
            continue
        outside = (values < least - RANGE_SLACK) | (values > greatest + RANGE_SLACK)
        report(
            outside,
            lambda i, v=values, t=(name, least, greatest): f"action {t[0]} is {v[i]:g}, outside [{t[1]:g}, {t[2]:g}]",
            "use actions in controller units",
        )
        if name == "gripper":
            closed = (frame == 0) & (values < (least + greatest) / 2)
            if closed.sum() > 0.5 * (frame == 0).sum():
                report(closed, "gripper closed at the first frame of most episodes: 1 must mean open", "store 1 - g")
    moves = np.abs(np.nan_to_num(action[:, : robot.action_dim - 1])).max(-1) > 0
    still = [e for e, (start, n) in rows_of.items() if not moves[start : start + n].any()]
    if still:
        add(Defect("data", f"{len(still)} episode(s) never move", "", still[0], note=True))


# ---------------------------------------------------------------- frames


def scan_video(path: Path) -> tuple[np.ndarray, tuple[int, int], str]:
    """Decode a whole video once, one thread. -> (seconds of each frame that decodes, (height, width), the first error or "")."""
    import av

    seconds, size, first = [], (0, 0), ""
    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1
            stream.codec_context.options = {"err_detect": "explode"}  # else H.264 paints over what is broken
            for packet in container.demux(stream):
                try:
                    for frame in packet.decode():
                        seconds.append(float(frame.pts * stream.time_base))
                        size = (frame.height, frame.width)
                except av.FFmpegError as error:
                    first = first or f"{type(error).__name__}: {error.strerror}"
    except (av.FFmpegError, IndexError, OSError) as error:
        first = first or f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    return np.sort(np.array(seconds)), size, first


def _runs(numbers: np.ndarray) -> str:
    """3, 4, 5, 9 -> "3..5, 9"."""
    parts = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    return ", ".join(f"{p[0]}..{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts[:8]) + (", .." if len(parts) > 8 else "")


def _videos(root, info, features, kinds, fps, episodes, rows, rows_of, broken, add) -> None:
    """Every frame of every video that the episodes table names, against the times that the rows ask for."""
    named = defaultdict(list)
    for row in episodes:
        for camera, kind in kinds.items():
            where = [row.get(f"videos/{camera}/{k}") for k in ("chunk_index", "file_index", "from_timestamp")]
            if kind == "video" and None not in where:
                path = str(info.get("video_path", "")).format(video_key=camera, chunk_index=where[0], file_index=where[1])
                named[path, camera].append((where[2], row))
    whole = [(path, camera) for path, camera in named if path not in broken and (root / path).is_file()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # decoding leaves the interpreter's lock
        scans = dict(zip(whole, pool.map(lambda key: scan_video(root / key[0]), whole), strict=True))
    for (path, camera), spans in named.items():
        if (path, camera) not in scans:
            if path not in broken:
                lost = sum(row["length"] for _, row in spans)
                add(Defect(path, "missing, though the episodes table names it", FETCH, episode=spans[0][1]["episode_index"], lost=lost))
            continue
        seconds, size, error = scans[path, camera]
        shape = list(features[camera].get("shape", []))
        if len(seconds) and sorted([*size, 3]) != sorted(shape):
            add(Defect(path, f"frames of {size[0]} x {size[1]}, info.json says {shape}", CONVERT))
        if len(seconds) > 2 and abs(np.median(np.diff(seconds)) * fps - 1) > 0.25:
            add(Defect(path, f"runs at {1 / np.median(np.diff(seconds)):.4g} fps, info.json says {fps:g}", CONVERT))
            continue
        end, needed = 0.0, 0
        for start, row in sorted(spans, key=lambda s: (s[0], s[1]["episode_index"])):
            e = row["episode_index"]
            if start < end - 0.5 / fps:
                add(Defect(row["file"], f"{camera} starts at {start:.3f} s of {path}, inside the episode before it", CONVERT, e))
            times = np.arange(row["length"]) / fps
            if rows_of.get(e, (0, 0))[1] == row["length"]:
                times = rows["timestamp"][rows_of[e][0] :][: row["length"]].astype(np.float64)
            times, end, needed = start + times, start + row["length"] / fps, needed + row["length"]
            right = np.searchsorted(seconds, times)
            around = np.concatenate([[-np.inf], seconds, [np.inf]])
            lost = np.flatnonzero(~(np.minimum(times - around[right], around[right + 1] - times) <= 0.5 / fps + 1e-4))
            if len(lost):
                last = f"the file ends at {seconds[-1] + 1 / fps:.3f} s" if len(seconds) else "no frame of the file decodes"
                why = error or (
                    f"it asks for second {times[lost[-1]]:.3f}; {last}"
                    if not len(seconds) or times[lost[0]] > seconds[-1]
                    else "no frame there"
                )
                add(Defect(path, f"{len(lost)} frame(s) cannot be decoded, {_runs(lost)}: {why}", FETCH, e, int(lost[0]), lost=len(lost)))
        if len(seconds) > needed:
            add(Defect(path, f"holds {len(seconds)} frames, its episodes {needed}", "", note=True))
        elif error and len(seconds) == needed:
            add(Defect(path, f"all frames decode, but the decoder complained: {error}", FETCH, note=True))


def _images(root, features, kinds, broken, add) -> None:
    """Every picture of cameras that are stored inside the data files."""
    from PIL import Image

    cameras = [c for c, kind in kinds.items() if kind == "image"]
    for path in sorted((root / "data").rglob("*.parquet")) if cameras else ():
        file = path.relative_to(root).as_posix()
        if file in broken:
            continue
        try:
            table = read_table(path, ["episode_index", "frame_index", *cameras])
        except Precondition as error:
            add(Defect(file, error.found, error.mend))
            continue
        episode, frame = table["episode_index"].to_pylist(), table["frame_index"].to_pylist()
        for camera in cameras:
            for e, i, stored in zip(episode, frame, table[camera].to_pylist(), strict=True):
                try:
                    with Image.open(io.BytesIO(stored["bytes"])) as picture:
                        picture.load()
                        size = (picture.height, picture.width)
                except (OSError, SyntaxError, TypeError, ValueError) as error:
                    add(Defect(file, f"{camera} cannot be decoded: {type(error).__name__}: {str(error)[:80]}", FETCH, e, i, lost=1))
                    continue
                if sorted([*size, 3]) != sorted(features[camera].get("shape", [])):
                    add(Defect(file, f"{camera} is {size[0]} x {size[1]}, info.json says {features[camera].get('shape')}", CONVERT, e, i))
                    break
