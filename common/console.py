"""What a stage prints, how it fails, and with which exit code.

Lines carry a greppable prefix, one fact a line: [plan] [ok] [warn] [FAIL] [step] [done].
Exit codes: 0 done, 1 crash, 2 usage, 3 a precondition is missing, 4 the output exists,
5 ran, but its own verification failed.
"""

import argparse
import errno
import json
import math
import os
import shutil
import sys
from pathlib import Path

_DISK = {
    errno.ENOSPC: "free some space, or write to another disk, and run again",
    errno.EDQUOT: "free some space, or write to another disk, and run again",
    errno.EFBIG: "write to a file system without that limit on a file's size (ulimit -f, FAT), and run again",
    errno.EROFS: "write to a file system that is not read-only",
    errno.EACCES: "give yourself leave to write there, or pass another place",
}
EXIT_CRASH, EXIT_USAGE, EXIT_PRECONDITION, EXIT_EXISTS, EXIT_VERIFY = 1, 2, 3, 4, 5


class StageError(Exception):
    """A failure with a known cause. Its text says what was expected, what was found and what mends it."""

    code = EXIT_CRASH

    def __init__(self, expected: str, found: str, mend: str):
        self.expected, self.found, self.mend = expected, found, mend
        super().__init__(f"expected {expected}; found {found}; to mend: {mend}")


class Precondition(StageError):
    """Something an earlier stage, the machine or the user must supply is missing (exit 3)."""

    code = EXIT_PRECONDITION


class OutputExists(StageError):
    """The output is already there and no flag said what to do about it (exit 4)."""

    code = EXIT_EXISTS


class VerifyFailed(StageError):
    """The stage ran, but what it wrote does not pass its own check (exit 5)."""

    code = EXIT_VERIFY


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default where there is one to show."""

    def _get_help_string(self, action):
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def say(line: str) -> None:
    print(line, flush=True)


def plan(key: str, value) -> None:
    say(f"[plan] {key}: {value}")


def ok(name: str, detail="") -> None:
    say(f"[ok] {name}: {detail}" if detail != "" else f"[ok] {name}")


def warn(name: str, detail) -> None:
    say(f"[warn] {name}: {detail}")


def fail(name: str, detail) -> None:
    say(f"[FAIL] {name}: {detail}")


def done(stage: str, **facts) -> None:
    """The last line of a stage that succeeded: what it wrote, as key=value."""
    say(" ".join([f"[done] {stage}", *(f"{k}={v}" for k, v in facts.items())]))


def run_stage(stage: str, main) -> int:
    """Run `main() -> int`, turning a StageError into one [FAIL] line on stderr and its exit code.

    A disk that is full or cannot be written counts as a missing precondition. Any other exception passes through with its traceback
    (exit 1): it is our bug, not the user's.
    """
    try:
        try:
            return main()
        except OSError as error:
            if error.errno not in _DISK:
                raise
            where = error.filename or "the output's file system"
            raise Precondition("room and leave to write", f"{error.strerror}: {where}", _DISK[error.errno]) from error
    except StageError as error:
        print(f"[FAIL] {stage}: {error}", file=sys.stderr, flush=True)
        return error.code
    except KeyboardInterrupt:
        print(f"[FAIL] {stage}: interrupted", file=sys.stderr, flush=True)
        return 130


def human_bytes(n: float) -> str:
    """Bytes with a binary unit: 28.26 GiB. Every size this project prints is 2**10-based."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024 or unit == "GiB":
            return f"{n:.0f} B" if unit == "B" else f"{n:.2f} {unit}"
        n /= 1024
    raise AssertionError("unreachable")


def need_disk(path: Path, nbytes: int, what: str) -> int:
    """The free bytes of the file system of `path` (which may not exist yet). Raises Precondition unless they are `nbytes` or more."""
    there = Path(path).absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if free < nbytes:
        raise Precondition(
            f"{human_bytes(nbytes)} free at {there} for {what}", human_bytes(free), "free some space, or write to another disk"
        )
    return free


def check_output(out: Path, force: bool, marks: tuple[str, ...] = (), inputs: tuple[Path, ...] = ()) -> None:
    """May `out` be written? It may if nothing is there. With `force` it may replace an earlier output of the same stage: a folder
    that holds all of `marks`, or, without marks, a file.

    Raises OutputExists otherwise, and Precondition if `out` is or holds one of the inputs, whatever `force` says.
    """
    place = Path(out).resolve()
    for one in inputs:
        given = Path(one).resolve()
        if place == given or place in given.parents:
            raise Precondition("an output apart from the inputs", f"--out {out} and input {one}", "pass another --out")
    if not place.exists():
        return
    if not force:
        raise OutputExists("nothing at --out", f"{out} exists", "pass --force to replace it, or another --out")
    if not (all((place / m).is_file() for m in marks) if marks else place.is_file()):
        kind = f"a folder with {' and '.join(marks)}" if marks else "a file"
        raise OutputExists(f"an earlier output of this stage ({kind}) at --out", f"{out} is something else", "pass another --out")


def sync(file: Path) -> None:
    """Return when the bytes of a file or the entries of a folder are on the disk."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_folder(new: Path, place: Path) -> None:
    """Rename a finished folder to its place. A folder (or a link to one) that stood there is moved aside first and deleted last."""
    new, place = Path(new), Path(place)
    old = place.with_name(place.name + ".old")

    def drop_old():
        if old.is_symlink():
            old.unlink()
        else:
            shutil.rmtree(old, ignore_errors=True)

    drop_old()
    if place.exists() or place.is_symlink():
        os.replace(place, old)
    os.replace(new, place)
    drop_old()


def _finite(value):
    """JSON has no NaN or infinity: null stands for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value


def read_json(path: Path):
    """The content of a JSON file, None if there is no such file."""
    return json.loads(Path(path).read_text()) if Path(path).is_file() else None


def anywhere(record):
    """A record without its entries called "path": two that differ in nothing else are of the same things, which have been moved."""
    return {k: anywhere(v) for k, v in record.items() if k != "path"} if isinstance(record, dict) else record


def json_file(text: str) -> Path:
    """The type of a --json flag: a path that is free, or holds JSON, which may be replaced. Anything else there is a usage error."""
    path = Path(text)
    if path.is_file() and path.stat().st_size:
        try:
            json.loads(path.read_text())
        except ValueError:
            raise argparse.ArgumentTypeError(f"{path} exists and is not JSON: it would be lost; name another file") from None
    return path


def write_json(path: Path, value) -> None:
    """Write strict JSON beside its place, then rename: a reader sees the old file or the whole new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w") as f:
        f.write(json.dumps(_finite(value), indent=2, allow_nan=False, default=str) + "\n")
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)
