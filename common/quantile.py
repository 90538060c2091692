"""The action normalizer: x = 2 (a - q01) / (q99 - q01) - 1, per channel, without a clamp.

A channel whose range is below 1e-6 is centred and not scaled, x = a - q01, in both directions, so that
denormalize(normalize(a)) == a and noise in a constant channel stays as small as it was (cosmos-framework divides by
1e-8 on the way in and by the raw range on the way out).

Stats files come in two layouts, and the caller says which: nested ("global" with rotations left at -1..1, "global_raw"
with all channels measured; the LIBERO recipe `quantile_rot` uses global_raw) or "flat" (q01 and q99 at the top). Nothing is guessed.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.console import Precondition, warn

MIN_RANGE = 1e-6  # below it a channel counts as constant
BLOCKS = ("global_raw", "global", "flat")
# quantile_rot of the published LIBERO recipe: facts of cosmos-framework's libero_native_frame_wise_relative_rot6d.json
BUILT_IN = Path(__file__).with_name("libero_stats_20fps.json")
QUANTILES = (0.01, 0.99)
MAKE = "python 04_fetch_libero.py stats --data DATA --out stats.json"


@dataclass(frozen=True, eq=False)
class QuantileStats:
    """q01 and q99, float64 [channels], of one block of one stats file, known by the file's sha256."""

    q01: np.ndarray
    q99: np.ndarray
    fps: float | None  # frames per second that the actions were recorded at; a delta action scales with it
    block: str
    path: Path
    sha256: str

    def _affine(self, like):
        """Offset and scale [channels] in the type, dtype (float64 for integers) and device of `like`."""
        span = self.q99 - self.q01
        constant = span < MIN_RANGE
        low = np.where(constant, self.q01, (self.q01 + self.q99) / 2)
        half = np.where(constant, 1.0, span / 2)
        if isinstance(like, np.ndarray):
            return tuple(v.astype(like.dtype if like.dtype.kind == "f" else np.float64) for v in (low, half))
        import torch

        return tuple(
            torch.tensor(v, dtype=like.dtype if like.is_floating_point() else torch.float64, device=like.device) for v in (low, half)
        )

    def normalize(self, action):
        """[..., channels] in action units -> the same shape with q01 at -1 and q99 at +1. numpy or torch; dtype kept."""
        low, half = self._affine(self._checked(action))
        return (action - low) / half

    def denormalize(self, x):
        """The inverse of normalize, for any value, inside the quantiles or not."""
        low, half = self._affine(self._checked(x))
        return x * half + low

    def _checked(self, array):
        if array.shape[-1] != len(self.q01):
            raise ValueError(f"stats {self.path} hold {len(self.q01)} channels; the action has shape {tuple(array.shape)}")
        return array

    def require_fps(self, fps: float) -> None:
        """Raise Precondition if the stats were made at another frame rate: deltas scale with it."""
        if self.fps is None:
            warn("stats", f"{self.path} does not say at which frame rate it was made; the data has {fps:g} fps")
        elif abs(self.fps - fps) > 1e-6:
            raise Precondition(f"action stats at the data's {fps:g} fps", f"{self.path} at {self.fps:g} fps", MAKE)


def load_stats(path: Path = BUILT_IN, block: str = "global_raw") -> QuantileStats:
    """Read one block of a stats file. Raises Precondition naming the file, what is missing and the keys seen."""
    if block not in BLOCKS:
        raise ValueError(f"block is one of {BLOCKS}; got {block!r}")
    path = Path(path).resolve()
    if not path.is_file():
        raise Precondition("a stats file", f"nothing at {path}", MAKE)
    raw = path.read_bytes()
    try:
        content = json.loads(raw)
        table = content if block == "flat" else content.get(block, {})
        if not isinstance(table, dict) or not {"q01", "q99"} <= set(table):
            seen = sorted(table if isinstance(table, dict) and table else content)
            raise Precondition(
                f"q01 and q99 in block {block!r} of {path}",
                f"keys {seen}",
                "name another block, or make the file with 04_fetch_libero.py stats",
            )
        q01, q99 = (np.array(table[k], np.float64) for k in ("q01", "q99"))
        fps = None if content.get("fps") is None else float(content["fps"])
    except (ValueError, TypeError, AttributeError) as error:
        raise Precondition(f"a stats table as JSON in {path}", f"{type(error).__name__}: {error}", MAKE) from error
    if q01.ndim != 1 or not len(q01) or q01.shape != q99.shape or not np.isfinite([q01, q99]).all() or (q01 > q99).any():
        raise Precondition(f"finite q01 <= q99 of one length in {path}", f"q01 {q01.tolist()}, q99 {q99.tolist()}", MAKE)
    return QuantileStats(q01, q99, fps, block, path, hashlib.sha256(raw).hexdigest())


class Pool:
    """Statistics of a stream of rows, pooled (never averages of per-episode quantiles): add() them in order, then table().

    Count, mean, std, min and max are exact for any number of rows. q01 and q99 are exact up to `limit` rows; beyond, they are those
    of a uniform sample of `limit` rows (a reservoir), the same for the same rows in the same order. Quantiles interpolate linearly.
    """

    def __init__(self, limit: int = 20_000_000, seed: int = 0):  # 20 M rows of 10 channels: 1.6 GB
        self.limit, self.rng = limit, np.random.default_rng(seed)
        self.count, self.kept = 0, []

    def add(self, rows: np.ndarray) -> None:
        """rows: [n, channels]. Raises ValueError with the first bad row of these when one is not finite."""
        rows = np.array(rows, np.float64)
        if not len(rows):
            return
        bad = ~np.isfinite(rows).all(-1)
        if bad.any():
            raise ValueError(f"{int(bad.sum())} row(s) are not finite, the first is row {int(bad.argmax())}")
        first, self.count = self.count, self.count + len(rows)
        mean, square = rows.mean(0), rows.var(0) * len(rows)
        if first:  # Chan, Golub and LeVeque: the moments of two parts give those of the whole
            shift = mean - self.mean
            self.square += square + shift**2 * first * len(rows) / self.count
            self.mean += shift * len(rows) / self.count
            self.min, self.max = np.minimum(self.min, rows.min(0)), np.maximum(self.max, rows.max(0))
        else:
            self.mean, self.square, self.min, self.max = mean, square, rows.min(0), rows.max(0)
        room = max(0, self.limit - first)
        if room:
            self.kept.append(rows[:room])
        if len(rows) > room:  # row number n replaces a kept one with probability limit / (n + 1)
            if len(self.kept) > 1:
                self.kept = [np.concatenate(self.kept)]
            place = self.rng.integers(0, np.arange(first + room, self.count) + 1)
            hit = place < self.limit
            self.kept[0][place[hit]] = rows[room:][hit]  # of two rows with one place, the later stays

    def table(self, rotation: slice, fps: float) -> dict:
        """Both blocks of a stats file. rotation: the channels that `global` leaves at -1..1. Raises ValueError when no row came."""
        if not self.count:
            raise ValueError("no rows to measure")
        q01, q99 = np.quantile(np.concatenate(self.kept), QUANTILES, axis=0)
        raw = {"q01": q01, "q99": q99, "mean": self.mean, "std": np.sqrt(self.square / self.count), "min": self.min, "max": self.max}
        fixed = {k: v.copy() for k, v in raw.items()}
        for key, value in (("q01", -1.0), ("q99", 1.0), ("mean", 0.0), ("std", 1.0), ("min", -1.0), ("max", 1.0)):
            fixed[key][rotation] = value
        return {"fps": float(fps), "count": self.count, "quantiles_of": min(self.count, self.limit)} | {
            name: {k: v.tolist() for k, v in table.items()} for name, table in (("global", fixed), ("global_raw", raw))
        }
