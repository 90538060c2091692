"""LIBERO as the model sees it: LeRobot v3 windows, the canvas, the prompt and its token ids, and the encoded cache.

Terms. A window is 17 consecutive frames of one episode; its chunk is the 16 actions between them. Each window becomes
    frames uint8 [3, 17, 192, 320] -> latents bf16 [48, 5, 10, 20]      (a 17-frame clip; the bottom padding is cropped after the VAE)
    actions float32 [16, 7]        -> encoded, normalized [16, 10]
    task and idle-frame count      -> a JSON prompt -> 134..146 chat tokens + 2
What is particular to one robot is one `Embodiment` value. torch and torchvision are imported where they are used.
"""

import io
import json
import mmap
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from common import rot6d
from common.console import Precondition

# Candidate canvases (width, height) of the 256 tier and the name that the prompt gives their aspect ratio (cosmos-framework's table).
CANVASES = {(256, 256): "1,1", (320, 256): "4,3", (256, 320): "3,4", (320, 192): "16,9", (192, 320): "9,16"}
VAE_SPATIAL, VAE_TEMPORAL = 16, 4  # Wan2.2: latent pixels and frames per picture pixel and frame
MAX_CHAT_TOKENS = 4096
# A frame is idle when it moves less than this, in units per second and degrees per second; runs shorter than 3 do not count.
IDLE_POSITION, IDLE_DEGREES, IDLE_GRIPPER, IDLE_RUN = 5e-3, 1.5, 0.01, 3
VAL_RATIO, VAL_SEED = 0.01, 0  # held-out episodes per suite
CACHE_VERSION = 2
# What turns an older LeRobot data set into v3.0. The first of the two left lerobot after 0.3.3 and works on a hub repository.
TO_V21 = "python -m lerobot.datasets.v21.convert_dataset_v20_to_v21 --repo-id=OWNER/NAME (in an environment with lerobot==0.3.3)"
TO_V30 = "python -m lerobot.scripts.convert_dataset_v21_to_v30 --repo-id=OWNER/NAME --root=FOLDER --push-to-hub=false"
CONVERT = {"v2.0": f"{TO_V21}, then {TO_V30}", "v2.1": TO_V30}


@dataclass(frozen=True)
class Embodiment:
    """Everything that another robot would change."""

    name: str
    domain_id: int  # row of the domain-aware action heads
    suites: tuple[str, ...]
    cameras: tuple[str, ...]  # video keys, left to right in the mosaic
    camera_size: int  # every view is resized to this square before the mosaic, pixels
    framing: str  # the prompt's sentences on the camera views
    action_key: str
    action_range: tuple[tuple[str, float, float], ...]  # stored channels: name, least and greatest legal value
    encoded: tuple[str, ...]  # channels that the model sees, by name
    position: tuple[int, int]  # encoded channels from, to; metres or controller units a frame
    rotation: tuple[int, int]  # encoded channels from, to; rot6d
    gripper: int  # encoded channel
    encode: Callable  # stored [..., channels] -> encoded [..., channels]
    decode: Callable  # the inverse
    chunk: int  # actions per window; a window has chunk + 1 frames
    fps: float  # the frame rate that the recipe and its stats are for
    stats: str  # action stats file beside this module
    stats_block: str

    @property
    def frames(self) -> int:
        return self.chunk + 1

    @property
    def action_dim(self) -> int:
        return len(self.action_range)

    @property
    def raw_action_dim(self) -> int:
        return len(self.encoded)

    @property
    def stats_path(self) -> Path:
        return Path(__file__).with_name(self.stats)

    def describe(self) -> dict:
        """The JSON-ready part, for manifests and policy.json."""
        values = {k: v for k, v in asdict(self).items() if not callable(v)}
        return json.loads(json.dumps(values | {"raw_action_dim": self.raw_action_dim}))


LIBERO = Embodiment(
    name="libero",
    domain_id=5,
    suites=("libero_spatial", "libero_object", "libero_goal", "libero_10"),
    cameras=("observation.images.image", "observation.images.wrist_image"),
    camera_size=256,
    framing="This video contains concatenated views from multiple camera perspectives. "
    "The left half shows the third-person view; the right half shows the wrist-mounted camera.",
    action_key="action",
    # Controller commands; the rotation is an axis-angle step. Gripper: 1 = open, 0 = closed.
    action_range=(*((name, -1.0, 1.0) for name in ("dx", "dy", "dz", "rx", "ry", "rz")), ("gripper", 0.0, 1.0)),
    encoded=("dx", "dy", "dz", "R00", "R10", "R20", "R01", "R11", "R21", "gripper"),
    position=(0, 3),
    rotation=(3, 9),
    gripper=9,
    encode=rot6d.encode_action,
    decode=rot6d.decode_action,
    chunk=16,
    fps=20.0,
    stats="libero_stats_20fps.json",
    stats_block="global_raw",
)


# ---------------------------------------------------------------- canvas


@dataclass(frozen=True)
class Canvas:
    """Where a picture lies on the padded canvas, pixels. The content starts at the top left corner."""

    height: int
    width: int
    content_height: int
    content_width: int

    @property
    def latent_size(self) -> tuple[int, int]:
        """Latent rows and columns that are kept: the padding is cropped away after the VAE."""
        return self.content_height // VAE_SPATIAL, self.content_width // VAE_SPATIAL


def canvas_for(height: int, width: int) -> Canvas:
    """The canvas of the 256 tier nearest in height / width; the content shrinks to fit and never grows."""
    w, h = min(CANVASES, key=lambda c: abs(height / width - c[1] / c[0]))
    scale = min(w / width, h / height, 1.0)
    return Canvas(h, w, int(scale * height + 0.5), int(scale * width + 0.5))


def mosaic_canvas(robot: Embodiment) -> Canvas:
    return canvas_for(robot.camera_size, robot.camera_size * len(robot.cameras))


def snap(frames):
    """uint8 tensor [..., 3, h, w] -> uint8 [..., 3, canvas h, canvas w]: bicubic antialiased resize, then reflect padding right and below."""
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms import functional as F

    c = canvas_for(*frames.shape[-2:])
    frames = F.resize(frames, [c.content_height, c.content_width], InterpolationMode.BICUBIC, antialias=True)
    right, below = c.width - c.content_width, c.height - c.content_height
    mirror = right < c.content_width and below < c.content_height  # a mirror shows at most what there is
    return F.pad(frames, [0, 0, right, below], padding_mode="reflect" if mirror else "edge")


def mosaic(views, size: int):
    """Camera views, each uint8 [T, 3, h, w], left to right -> uint8 [T, 3, size, size * len(views)]."""
    import torch

    square = []
    for view in views:
        if tuple(view.shape[-2:]) != (size, size):
            resized = torch.nn.functional.interpolate(view.float() / 255, (size, size), mode="bilinear", align_corners=False)
            square.append((resized * 255).clamp(0, 255).to(torch.uint8))
        else:
            square.append(view)
    return torch.cat(square, -1)


# ---------------------------------------------------------------- action error


def action_error(predicted: np.ndarray, actual: np.ndarray, robot: Embodiment = LIBERO) -> dict[str, np.ndarray]:
    """How far predicted actions are from the recorded ones, float64 [...] each, from encoded actions [..., raw_action_dim] in real units.

    position: length of the difference, in the action's unit a frame; rotation: angle between the two rotations, degrees (a predicted
    6-vector is projected onto the nearest rotation, one that determines none counts as the identity); gripper: 1 where both are on the
    same side of 0.5, else 0.
    """
    predicted, actual = np.asarray(predicted, np.float64), np.asarray(actual, np.float64)
    position, rotation = slice(*robot.position), slice(*robot.rotation)
    found, _ = rot6d.rot6d_to_matrix_or_identity(predicted[..., rotation])
    turn = rot6d.matrix_to_axis_angle(np.swapaxes(found, -1, -2) @ rot6d.rot6d_to_matrix(actual[..., rotation]))
    return {
        "position": np.linalg.norm(predicted[..., position] - actual[..., position], axis=-1),
        "rotation": np.rad2deg(np.linalg.norm(turn, axis=-1)),
        "gripper": ((predicted[..., robot.gripper] > 0.5) == (actual[..., robot.gripper] > 0.5)).astype(np.float64),
    }


# ---------------------------------------------------------------- prompt


def idle_frames(encoded, starts, chunk: int, fps: float, robot: Embodiment = LIBERO) -> np.ndarray:
    """How many frames of each chunk stand still: small position step, small rotation, unchanged gripper, in runs of 3 or more.

    encoded: [frames, raw_action_dim], as `robot.encode` gives it, not normalized; starts: int [chunks], their first frames.
    -> int [chunks]. The gripper of a chunk's first frame counts as unchanged.
    """
    action = np.asarray(encoded, np.float64)
    step = np.linalg.norm(action[:, slice(*robot.position)], axis=-1)
    angle = np.linalg.norm(rot6d.rot6d_to_axis_angle(action[:, slice(*robot.rotation)]), axis=-1)
    rest = (step < IDLE_POSITION / fps) & (angle < np.deg2rad(IDLE_DEGREES) / fps)
    same = np.abs(np.diff(action[:, robot.gripper], prepend=action[:1, robot.gripper])) < IDLE_GRIPPER
    rows = np.asarray(starts)[:, None] + np.arange(chunk)
    still = rest[rows] & (same[rows] | (np.arange(chunk) == 0))
    counted = np.zeros_like(still)
    for i in range(chunk - IDLE_RUN + 1):  # a frame counts if some run of 3 covers it
        counted[:, i : i + IDLE_RUN] |= still[:, i : i + IDLE_RUN].all(-1, keepdims=True)
    return counted.sum(-1)


def build_prompt(task: str, idle: int, fps: float, robot: Embodiment = LIBERO) -> str:
    """The JSON prompt of one window, byte for byte as the reference formats it (key order and separators included)."""
    text = task.strip()
    if text and text[-1] not in ".!?":
        text += "."
    seconds = robot.frames / fps
    end = round(seconds)
    canvas = mosaic_canvas(robot)
    content = {
        "cinematography": {"framing": robot.framing},
        "actions": [{"time": f"0:00-{end // 60}:{end % 60:02d}", "description": text, "idle_frame": f"{idle} out of {robot.chunk}."}],
        "duration": f"{int(seconds)}s",
        "fps": float(fps),
        "resolution": {"H": canvas.height, "W": canvas.width},
        "aspect_ratio": CANVASES[canvas.width, canvas.height],
    }
    return json.dumps(content)


def load_tokenizer(folder: Path):
    """text_tokenizer/ of a Cosmos3 folder -> (tokenizers.Tokenizer, end-of-text id, vision-start id)."""
    from tokenizers import Tokenizer

    folder = Path(folder)
    if not (folder / "tokenizer.json").is_file():
        raise Precondition("a tokenizer", f"no tokenizer.json in {folder}", "python 02_cache_models.py download")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    eos = config["eos_token"]
    ids = [
        tokenizer.token_to_id(t)
        for t in (eos["content"] if isinstance(eos, dict) else eos, "<|vision_start|>", "<|im_start|>", "<|im_end|>")
    ]
    if None in ids:
        raise Precondition("Qwen's special tokens", f"one is missing in {folder}", "use the text_tokenizer/ of nvidia/Cosmos3-Nano")
    return tokenizer, ids[0], ids[1]


def prompt_ids(tokenizer, prompt: str) -> np.ndarray:
    """Token ids, int64 [und_len], of a prompt in Qwen's chat form without system prompt, cut to 4096, then eos and <|vision_start|>.

    `tokenizer` is what load_tokenizer returns. The dropped prompt (classifier-free guidance) is the empty string: 10 tokens.
    """
    encoder, eos, vision_start = tokenizer
    chat = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    return np.array([*encoder.encode(chat, add_special_tokens=False).ids[:MAX_CHAT_TOKENS], eos, vision_start], np.int64)


# ---------------------------------------------------------------- LeRobot v3


@dataclass(frozen=True)
class Suite:
    """One LeRobot v3 data set, its table columns in memory. Frames are global row numbers, sorted by `index`."""

    name: str
    root: Path
    robot: Embodiment  # with the cameras of this data set
    stored: tuple[str, ...]  # how each camera is stored: "video", or "image" for pictures inside the data files
    fps: float
    tasks: dict[int, str]
    episodes: list[dict]  # rows of meta/episodes, by episode_index
    start: np.ndarray  # int64 [episodes + 1]: first row of each episode, then the row count
    task: np.ndarray  # int64 [frames]
    timestamp: np.ndarray  # float64 [frames], seconds from the start of the episode
    actions: np.ndarray  # float32 [frames, action_dim], as stored
    data_path: str
    video_path: str

    def wordings(self, task: int) -> list[str]:
        """A task's texts: several stand in one string, joined by " | "."""
        return [text.strip() for text in self.tasks[int(task)].split(" | ")]


def read_table(file: Path, columns: list[str] | None = None, filters=None):
    """One parquet file as a pyarrow table; columns and filters as pyarrow takes them. Raises Precondition naming the file and what is wrong with it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        missing = sorted(set(columns or ()) - set(pq.read_schema(file).names))
        if missing:
            raise Precondition(f"columns {columns}", f"{file} lacks {missing}", "fetch the data set again, or convert it with lerobot")
        return pq.read_table(file, columns=columns, filters=filters)
    except (OSError, pa.ArrowException) as error:
        raise Precondition("a whole parquet file", f"{file}: {str(error).splitlines()[0][:200]}", "fetch this file again") from error


def read_tasks(root: Path) -> dict[int, str]:
    """meta/tasks.parquet -> {task_index: text}. The text is the table's index or a column `task`; row order means nothing."""
    table = read_table(Path(root) / "meta/tasks.parquet").to_pandas()
    text = next((table[c] for c in ("task", "__index_level_0__") if c in table.columns), table.index)
    return {int(i): str(t) for i, t in zip(table["task_index"], text, strict=True)}


def read_info(root: Path) -> dict:
    """meta/info.json of a LeRobot v3 data set. Raises Precondition if it is absent, broken or of another version."""
    file = Path(root) / "meta/info.json"
    try:
        info = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise Precondition("a LeRobot v3 data set", f"{type(error).__name__} at {file}", "python 04_fetch_libero.py fetch") from error
    version = info.get("codebase_version")
    if not str(version).startswith("v3"):
        raise Precondition(
            "codebase_version v3.x", f"{version!r} in {file}", CONVERT.get(str(version), "fetch a v3.0 copy of the data set")
        )
    return info


def find_cameras(features: dict, robot: Embodiment) -> Embodiment:
    """`robot` with the camera keys of a data set: its own if they are there, else the only two, the one called wrist on the right.

    features: of meta/info.json. Raises Precondition listing the keys seen when that does not settle it.
    """
    seen = [k for k, v in features.items() if isinstance(v, dict) and v.get("dtype") in ("video", "image")]
    if set(robot.cameras) <= set(seen):
        return robot
    wrist = [k for k in seen if "wrist" in k]
    if len(seen) == len(robot.cameras) == 2 and len(wrist) == 1:
        return replace(robot, cameras=(next(k for k in seen if k not in wrist), *wrist))
    raise Precondition(
        f"the cameras {', '.join(robot.cameras)}", f"{', '.join(seen) or 'none'} in info.json", "name them with --cameras, left to right"
    )


def read_suite(root: Path, robot: Embodiment = LIBERO) -> Suite:
    """Read one suite. Raises Precondition for what makes it unusable; `04_fetch_libero.py check` lists every defect."""
    root, info = Path(root), read_info(root)
    features = info.get("features", {})
    robot = find_cameras(features, robot)
    stored = tuple(features[c]["dtype"] for c in robot.cameras)
    routing = ["episode_index", "length", "data/chunk_index", "data/file_index"]
    for camera, kind in zip(robot.cameras, stored, strict=True):
        if kind == "video":
            routing += [f"videos/{camera}/{k}" for k in ("chunk_index", "file_index", "from_timestamp")]
    episodes = [row for f in sorted((root / "meta/episodes").rglob("*.parquet")) for row in read_table(f, routing).to_pylist()]
    episodes.sort(key=lambda row: row["episode_index"])
    columns = ["index", "episode_index", "task_index", "timestamp", robot.action_key]
    parts = [read_table(f, columns) for f in sorted((root / "data").rglob("*.parquet"))]
    if not episodes or not parts:
        raise Precondition(
            "episodes and data files", f"{len(episodes)} episodes, {len(parts)} data files in {root}", "python 04_fetch_libero.py fetch"
        )
    column = {c: np.concatenate([p[c].to_numpy() for p in parts]) for c in columns[:-1]}
    actions = np.concatenate([np.stack(p[robot.action_key].to_numpy()) for p in parts]).astype(np.float32)
    order = np.argsort(column["index"], kind="stable")
    lengths = [row["length"] for row in episodes]
    expected = np.repeat([row["episode_index"] for row in episodes], lengths)
    if not np.array_equal(column["episode_index"][order], expected) or actions.shape[1:] != (robot.action_dim,):
        found = f"{len(expected)} rows by the table, {len(order)} in the data, actions of shape {actions.shape[1:]}, in {root}"
        raise Precondition("data rows that match the episodes table", found, "fetch the data set again")
    return Suite(
        name=root.name,
        root=root,
        robot=robot,
        stored=stored,
        fps=float(info["fps"]),
        tasks=read_tasks(root),
        episodes=episodes,
        start=np.concatenate([[0], np.cumsum(lengths)]),
        task=column["task_index"][order],
        timestamp=column["timestamp"][order].astype(np.float64),
        actions=actions[order],
        data_path=info.get("data_path", ""),
        video_path=info.get("video_path") or "",
    )


def split_episodes(count: int) -> tuple[list[int], list[int]]:
    """(train, val) episode numbers of one suite: max(1, round(1 %)) held out, the same on every rank."""
    val = sorted(random.Random(VAL_SEED).sample(range(count), max(1, round(VAL_RATIO * count))))
    return [e for e in range(count) if e not in val], val


def windows(suite: Suite, stride: int = 1) -> dict[str, np.ndarray]:
    """Every window of a suite: int32 columns episode, start (a global row), task, idle; bool val. Windows never cross episodes."""
    robot = suite.robot
    _, val = split_episodes(len(suite.episodes))
    rows = [(e, s) for e in range(len(suite.episodes)) for s in range(suite.start[e], suite.start[e + 1] - robot.chunk, stride)]
    episode, start = np.array(rows, np.int32).reshape(-1, 2).T
    return {
        "episode": episode,
        "start": start,
        "task": suite.task[start].astype(np.int32),
        "idle": idle_frames(robot.encode(suite.actions), start, robot.chunk, suite.fps, robot).astype(np.int32),
        "val": np.isin(episode, val),
    }


def episode_frames(suite: Suite, episode: int, bad: list | None = None):
    """All frames of an episode on the canvas, uint8 tensor [n, 3, 192, 320].

    A frame that cannot be decoded raises Precondition naming file, episode and frame; with a list `bad`, it is black and
    (frame of the episode, file, reason) is appended instead. A frame is never replaced by another one.
    """
    import torch

    row, count = suite.episodes[episode], int(suite.start[episode + 1] - suite.start[episode])
    views = []
    for camera, kind in zip(suite.robot.cameras, suite.stored, strict=True):
        path, decode = (_video if kind == "video" else _pictures)(suite, row, camera, episode)
        try:
            views.append(decode(range(count)))
            continue
        except DECODE_ERRORS as error:
            whole = error  # now one frame at a time, to know which
        view = torch.zeros(count, 3, suite.robot.camera_size, suite.robot.camera_size, dtype=torch.uint8)
        lost = 0
        for i in range(count):
            try:
                view[i] = mosaic([decode([i])], suite.robot.camera_size)[0]
            except DECODE_ERRORS as error:
                if bad is None:
                    raise Precondition(
                        "decodable frames", f"episode {episode} frame {i} in {path}: {_short(error)}", "fetch this file again"
                    ) from error
                lost += 1
                bad.append((i, str(path), _short(error)))
        if not lost:  # each frame decodes alone, so this is not about frames
            raise Precondition("decodable frames", f"episode {episode} in {path}: {_short(whole)}", "fetch this file again") from whole
        views.append(view)
    # A few frames at a time stay in the processor's cache: twice as fast as all at once.
    return torch.cat([snap(part) for part in mosaic(views, suite.robot.camera_size).split(8)])


# PyAV's errors are OSError or ValueError; lerobot asserts that a frame lies within the tolerance; Pillow raises OSError or SyntaxError.
DECODE_ERRORS = (OSError, ValueError, AssertionError, SyntaxError, RuntimeError)


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"


def _video(suite: Suite, row: dict, camera: str, episode: int):
    """(file, function of frame numbers -> uint8 [n, 3, h, w]) of one camera of one episode."""
    from lerobot.datasets.video_utils import decode_video_frames

    where = {k: row[f"videos/{camera}/{k}"] for k in ("chunk_index", "file_index", "from_timestamp")}
    path = suite.root / suite.video_path.format(video_key=camera, chunk_index=where["chunk_index"], file_index=where["file_index"])
    seconds = where["from_timestamp"] + suite.timestamp[suite.start[episode] : suite.start[episode + 1]]
    # Half a frame of tolerance: start times summed over a long file drift by more than the reference's 1e-4 s.
    return path, lambda rows: decode_video_frames(path, seconds[list(rows)].tolist(), 0.5 / suite.fps, backend="pyav", return_uint8=True)


def _pictures(suite: Suite, row: dict, camera: str, episode: int):
    """As _video, for encoded pictures that the data files hold as {bytes, path}."""
    import torch
    from PIL import Image

    path = suite.root / suite.data_path.format(chunk_index=row["data/chunk_index"], file_index=row["data/file_index"])
    table = read_table(path, ["index", camera], [("episode_index", "==", row["episode_index"])]).sort_by("index")
    stored = table[camera].to_pylist()

    def decode(rows):
        pictures = [np.array(Image.open(io.BytesIO(stored[i]["bytes"])).convert("RGB")) for i in rows]
        return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)

    return path, decode


# ---------------------------------------------------------------- encoded cache


@dataclass(frozen=True)
class CachedSuite:
    """One suite of the encoded cache. `latents` is a read-only uint16 memmap of bf16 [windows, 48, 5, 10, 20]."""

    name: str
    latents: np.ndarray
    actions: np.ndarray  # float32 [frames, action_dim], as stored
    start: np.ndarray  # int64 [windows]: the row of the window's first action
    prompt: np.ndarray  # int64 [windows]: the first prompt of its task and idle count
    variants: np.ndarray  # int64 [windows]: how many wordings of the task follow one another there
    train: np.ndarray  # bool [windows]
    val: np.ndarray  # bool [windows]: of held-out episodes. Windows with an undecodable frame are in neither

    def prefetch(self, row: int) -> None:
        """Have the kernel begin to read one window's latents, and nothing around them, without waiting."""
        nbytes = self.latents[0].nbytes
        first = row * nbytes // mmap.PAGESIZE * mmap.PAGESIZE
        self.latents.base.madvise(mmap.MADV_WILLNEED, first, (row + 1) * nbytes - first)


def read_manifest(folder: Path) -> dict:
    """manifest.json of a finished encoded cache. Raises Precondition if it is not finished or of another version."""
    folder = Path(folder)
    if not (folder / "COMPLETE").is_file():
        raise Precondition("a finished encoded cache", f"no COMPLETE in {folder}", "run 04_fetch_libero.py encode (again: it resumes)")
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        version = manifest["version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Precondition("a readable manifest.json", f"{error!r} in {folder}", "encode again, to another --out") from error
    if version != CACHE_VERSION:
        raise Precondition(f"cache version {CACHE_VERSION}", f"{version} in {folder}", "encode again with this version")
    return manifest


def open_cached_suite(folder: Path, manifest: dict, name: str) -> CachedSuite:
    """Map one suite of a cache. Raises Precondition if latents.bin is not exactly as long as its windows."""
    import pyarrow.parquet as pq

    root = Path(folder) / name
    table = pq.read_table(root / "windows.parquet")
    shape = (table.num_rows, *manifest["latent_shape"])
    size = (root / "latents.bin").stat().st_size if (root / "latents.bin").is_file() else 0
    if size != 2 * int(np.prod(shape)):
        raise Precondition(f"{2 * int(np.prod(shape))} bytes in {root / 'latents.bin'}", f"{size}", "encode again with --force")
    latents = np.memmap(root / "latents.bin", np.uint16, "r", shape=shape)
    latents.base.madvise(mmap.MADV_RANDOM)  # else a read of one window brings in the device's whole read-ahead, up to megabytes
    column = {c: table[c].to_numpy().astype(np.int64) for c in ("start", "prompt", "variants")}
    val, bad = (table[c].to_numpy(zero_copy_only=False) for c in ("val", "bad"))
    return CachedSuite(
        name,
        latents,
        np.load(root / "actions.npy"),
        train=~(val | bad),
        val=val & ~bad,
        **column,
    )
