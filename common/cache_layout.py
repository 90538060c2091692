"""The hub cache on disk: where it is, how hand-copied files are laid into it, what is wrong with it, what of that can be put right.

Layout, as huggingface_hub 1.33 writes and reads it:

    <hub>/models--<org>--<name>/
        blobs/<etag>               the bytes. etag: SHA-256 of an LFS file, git blob SHA-1 of any other
        snapshots/<commit>/<path>  a relative symlink to the blob
        refs/main                  the commit, 40 hex digits and nothing else
        trees/<commit>.json        the repository's files with sizes and ids

Without the listing, 1.33 turns to the network for a snapshot named by its commit, HF_HUB_OFFLINE or not. `build` therefore
writes one of the files it has; to download more of that commit later, delete it first. Standard library and common/console.py only.
"""

import errno
import functools
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable
from fnmatch import fnmatch, translate
from pathlib import Path
from typing import NamedTuple

from common.console import Precondition

PLACEHOLDER = "0" * 40  # stands for the commit of hand-copied files whose commit nobody wrote down
COMMIT = re.compile(r"[0-9a-f]{40}")  # the only spelling of a commit that an offline lookup accepts
LFS_BYTES = 10 * 2**20  # the hub takes no larger file outside LFS
# What the .gitattributes of a new hub repository sends to LFS; used when the copied files lack theirs.
LFS_NAME = (
    r".*\.(7z|arrow|bin|bz2|ckpt|ftz|gz|h5|joblib|mlmodel|model|msgpack|npy|npz|onnx|ot|parquet|pb|pickle|pkl|pt|pth|rar|safetensors)|"
)
LFS_NAME += r".*\.(tar|tflite|tgz|wasm|xz|zip|zst)|.*\.(lfs|tar)\..*|.*tfevents.*"
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1"
QUIET_SECONDS = 600  # what changed within them may belong to a download that still runs
HEADER_LIMIT = 100_000_000  # bytes; the longest safetensors header that its reader accepts


def hub_cache_root(env=os.environ) -> tuple[Path, str]:
    """(hub cache folder, the variable that decided it or "default"), by the precedence of huggingface_hub."""
    home, reason = "~/.cache/huggingface", "default"
    if "XDG_CACHE_HOME" in env:
        home, reason = os.path.join(env["XDG_CACHE_HOME"], "huggingface"), "XDG_CACHE_HOME"
    if "HF_HOME" in env:
        home, reason = env["HF_HOME"], "HF_HOME"
    root = os.path.join(home, "hub")
    for name in ("HUGGINGFACE_HUB_CACHE", "HF_HUB_CACHE"):
        if name in env:
            root, reason = env[name], name
    return Path(os.path.expandvars(os.path.expanduser(root))), reason


def repo_folder(hub: Path, repo_id: str) -> Path:
    return Path(hub) / "--".join(["models", *repo_id.split("/")])


def check_revision(revision: str) -> str:
    """Return `revision`; raise Precondition unless it is a full lower-case commit."""
    if not COMMIT.fullmatch(revision):
        raise Precondition(
            "a revision of 40 lower-case hex digits", repr(revision), "pass the full commit, not a branch, a short or an upper-case one"
        )
    return revision


def list_files(folder: Path) -> list[str]:
    """Sorted relative paths ('/'-separated) of the files and links under `folder`, without .git and .cache at its top."""
    names = []
    for root, directories, files in os.walk(folder):
        if Path(root) == Path(folder):
            directories[:] = [d for d in directories if d not in (".git", ".cache")]
        names += [(Path(root) / f).relative_to(folder).as_posix() for f in files]
    return sorted(names)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """By the rule of huggingface_hub's allow_patterns: '*' crosses '/'."""
    return any(fnmatch(name, p) for p in patterns)


def digest(path: Path, lfs: bool) -> str:
    """The etag that the hub gives to these bytes, hence the blob's name."""
    with open(path, "rb") as f:
        start = hashlib.sha256() if lfs else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
        return hashlib.file_digest(f, lambda: start).hexdigest()


def file_problem(path: Path, size: int | None = None) -> str:
    """Why `path` cannot be what the hub serves, or '' (`size`: bytes it should have, where known). Reads the header only."""
    if not path.exists():
        return f"dangling link to {os.readlink(path)}" if path.is_symlink() else "missing"
    found = path.stat().st_size
    with open(path, "rb") as f:
        head = f.read(len(LFS_POINTER))
        if head == LFS_POINTER:
            return "an LFS pointer, not the file; copy the file itself (git lfs pull)"
        if size is not None and found != size:
            return f"{found} bytes where the hub lists {size}"
        if path.suffix == ".safetensors":
            length = int.from_bytes(head[:8], "little")
            if found < 8 or length > min(found - 8, HEADER_LIMIT):
                return f"its header does not fit its {found} bytes: cut off, or not safetensors"
            f.seek(8)
            try:
                header = json.loads(f.read(length))
                end = 8 + length + max((t["data_offsets"][1] for k, t in header.items() if k != "__metadata__"), default=0)
            except (ValueError, AttributeError, KeyError, TypeError, IndexError) as error:
                return f"its safetensors header cannot be read ({type(error).__name__})"
            if end != found:
                return f"{found} bytes where its safetensors header says {end}"
    return ""


def build(source: Path, hub: Path, repo_id: str, revision: str, *, files: Iterable[str] | None = None, mode: str = "hardlink") -> Path:
    """Lay `files` (default: all) of the folder `source` out as a download of `repo_id` at `revision`; return the snapshot.

    mode: hardlink (no bytes written; one file system), symlink (the blob points into `source`, which must stay), copy.
    Blobs come first, then links, listing and refs/main, each renamed into place: a rerun after a kill completes it, and a rerun
    on a complete cache changes nothing. Raises Precondition for a bad revision, no files, or a file that is a pointer or cut off.
    """
    source, repo = Path(source), repo_folder(hub, repo_id)
    snapshot = repo / "snapshots" / check_revision(revision)
    names = list_files(source) if files is None else sorted(files)
    if not names:
        raise Precondition(f"files of {repo_id} in {source}", "none", "name the folder that holds them")
    for name in names:
        if problem := file_problem(source / name):
            raise Precondition(f"{name} of {repo_id}, whole", f"{source / name}: {problem}", "copy that file again")
    attributes = source / ".gitattributes"
    tracked = [x.split()[0] for x in attributes.read_text().splitlines() if "filter=lfs" in x] if attributes.is_file() else []
    rule = re.compile("|".join(map(translate, tracked)) or LFS_NAME)
    blobs, listing = {}, repo / "trees" / f"{revision}.json"
    entries = _load(listing, "files") or {}
    for name in names:
        path = (source / name).resolve()  # a hard link to a symlink would be one more symlink
        size = path.stat().st_size
        lfs = bool(size > LFS_BYTES or rule.fullmatch(name) or rule.fullmatch(name.split("/")[-1]))
        etag = digest(path, lfs)
        blobs[name] = repo / "blobs" / etag
        put(path, blobs[name], mode)
        pointer = b"%s\noid sha256:%s\nsize %d\n" % (LFS_POINTER, etag.encode(), size)  # what git itself holds of an LFS file
        entry = {
            "size": size,
            "blob_id": hashlib.sha1(b"blob %d\0%s" % (len(pointer), pointer)).hexdigest(),
            "lfs_sha256": etag,
            "lfs_size": size,
        }
        entries[name] = entry if lfs else {"size": size, "blob_id": etag}
    for name, blob in blobs.items():
        _link(snapshot / name, blob)
    if entries != _load(listing, "files"):
        _place(
            listing, lambda partial: partial.write_text(json.dumps({"format_version": 1, "files": dict(sorted(entries.items()))}, indent=1))
        )
    set_ref(repo, revision)
    return snapshot


def put(path: Path, blob: Path, mode: str) -> None:
    """Make `blob` hold the bytes of `path` by hardlink, symlink or copy; nothing to do where the size agrees already."""
    if blob.is_file() and blob.stat().st_size == path.stat().st_size:
        return
    try:
        _place(blob, lambda partial: {"hardlink": os.link, "symlink": os.symlink, "copy": shutil.copyfile}[mode](path, partial))
    except OSError as error:
        if mode == "hardlink" and error.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK):
            raise Precondition(
                f"{path} and {blob.parent} on one file system that allows hard links", os.strerror(error.errno), "--mode copy"
            ) from error
        raise


def _link(pointer: Path, blob: Path) -> None:
    target = os.path.relpath(blob, pointer.parent)
    if not (pointer.is_symlink() and os.readlink(pointer) == target):
        _place(pointer, lambda partial: partial.symlink_to(target))


def _place(path: Path, write: Callable[[Path], object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".incomplete")  # the library's own name for an unfinished blob
    partial.unlink(missing_ok=True)
    write(partial)
    os.replace(partial, path)


def read_ref(repo: Path, name: str = "main") -> str | None:
    """The commit that refs/<name> holds, if it is well-formed and its snapshot is here; else None."""
    path = repo / "refs" / name
    commit = path.read_text() if path.is_file() else ""
    snapshot = repo / "snapshots" / commit
    return commit if COMMIT.fullmatch(commit) and snapshot.is_dir() and any(snapshot.iterdir()) else None


def set_ref(repo: Path, revision: str, name: str = "main") -> None:
    """Write refs/<name> without a newline. One that leads to another snapshot stays: someone downloaded that on purpose."""
    if read_ref(repo, name) in (None, PLACEHOLDER):
        _place(repo / "refs" / name, lambda partial: partial.write_text(check_revision(revision)))


def leftovers(folder: Path) -> list[Path]:
    """Unfinished files under a repository's folder. They count as nothing, and only delete them when no download runs."""
    return sorted(folder.rglob("*.incomplete"))


class Repair(NamedTuple):
    what: str
    do: Callable[[], object]


def is_quiet(path: Path) -> bool:
    return time.time() - path.lstat().st_mtime > QUIET_SECONDS


def repairs(hub: Path, repo_id: str) -> list[Repair]:
    """What can be put right in a repository's folder without a network, in the order in which to do it. Nothing is done before `do` is called.

    Whitespace around a ref's commit goes; links without a blob, snapshots with nothing else in them and unfinished files go, so that a
    download or layout fills their places; refs/main without a snapshot moves to the only sound one, any other such ref goes. No blob is
    ever deleted. Unfinished files, empty snapshots and refs to nowhere may be a running download's: the youngest QUIET_SECONDS are left alone.
    """
    repo, found, sound = repo_folder(hub, repo_id), [], []
    for path in leftovers(repo):
        if is_quiet(path):
            found.append(Repair(f"{path}: an unfinished file; delete it", functools.partial(path.unlink, missing_ok=True)))
    for snapshot in sorted(p for p in (repo / "snapshots").glob("*") if p.is_dir()):
        names = list_files(snapshot)
        dangling = [snapshot / n for n in names if not (snapshot / n).exists()]
        if len(dangling) < len(names):
            sound.append(snapshot.name)
            found += [
                Repair(f"{p}: a link to {os.readlink(p)}, which is not there; delete it", functools.partial(p.unlink, missing_ok=True))
                for p in dangling
            ]
        elif is_quiet(snapshot):
            inside = f"holds nothing but {len(dangling)} dangling link(s)" if names else "is empty"
            found.append(Repair(f"{snapshot}: {inside}; delete it", functools.partial(shutil.rmtree, snapshot)))
        else:
            sound.append(snapshot.name)
    for ref in sorted(p for p in repo.glob("refs/**/*") if p.is_file() and not p.name.endswith(".incomplete")):
        text = ref.read_text()
        commit = text.strip()
        if commit not in sound and ref == repo / "refs/main" and len(sound) == 1:
            commit = sound[0]
        if commit not in sound and is_quiet(ref):
            found.append(Repair(f"{ref}: names {text!r}, which has no snapshot; delete it", ref.unlink))
        elif commit in sound and commit != text:
            write = functools.partial(_place, ref, lambda new, commit=commit: new.write_text(commit))
            found.append(Repair(f"{ref}: {text!r}; write {commit}", write))
    return found


def check_folder(folder: Path, required: Iterable[str] = (), patterns: Iterable[str] = ("*",), listing: Path | None = None) -> list[str]:
    """What is wrong with a plain folder or a snapshot: '<file>: <problem>' each; [] if nothing.

    Only files that match `patterns` count. required: patterns that must each match one. listing: a trees/<commit>.json, whose
    files must be here with their sizes. Shards named by a *.safetensors.index.json must be here too.
    """
    names = [n for n in list_files(folder) if matches(n, patterns)]
    entries = (_load(listing, "files") if listing else None) or {}
    listed = {name: entry.get("lfs_size", entry["size"]) for name, entry in entries.items() if matches(name, patterns)}
    problems = {name: problem for name in names if (problem := file_problem(folder / name, listed.get(name)))}
    absent = {p for p in required if not any(fnmatch(n, p) for n in names)} | (listed.keys() - set(names))
    for name in names:
        if name.endswith(".safetensors.index.json") and name not in problems:
            weights = _load(folder / name, "weight_map")
            if weights is None:
                problems[name] = "not an index of safetensors shards"
            absent |= {(Path(name).parent / shard).as_posix() for shard in (weights or {}).values()} - set(names)
    problems.update(dict.fromkeys(absent, "missing"))
    return [f"{name}: {problem}" for name, problem in sorted(problems.items())]


def _load(path: Path, key: str) -> dict | None:
    """The dict under `key` of a JSON file, None if there is none."""
    try:
        return dict(json.loads(path.read_text())[key])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def verify(hub: Path, repo_id: str, revision: str, *, required=(), patterns=("*",), hashes: bool = False) -> list[str]:
    """What would make an offline use of `repo_id` at `revision` fail: one line each, [] if nothing. Writes nothing.

    hashes: read every blob and hold it against its name. required, patterns: as in check_folder. Raises Precondition for a revision that is not a full commit.
    """
    repo = repo_folder(hub, repo_id)
    snapshot = repo / "snapshots" / check_revision(revision)
    problems = []
    for ref in sorted(p for p in repo.glob("refs/**/*") if p.is_file() and p.suffix not in (".incomplete", ".tmp")):
        text = ref.read_text()
        if text != text.strip():
            problems.append(f"{ref}: ends in whitespace, so offline lookups fail; printf %s {text.strip()} > {ref}")
        elif read_ref(repo, ref.relative_to(repo / "refs").as_posix()) is None:
            problems.append(f"{ref}: names {text!r}, whose snapshot is absent or empty")
    if not list_files(snapshot):
        return [*problems, f"{snapshot}: {'an empty snapshot' if snapshot.is_dir() else 'no such snapshot'}"]
    listing = repo / "trees" / f"{revision}.json"
    if not listing.is_file():
        problems.append(
            f"{listing}: absent, so huggingface_hub 1.33 finds no commit offline; lay the snapshot itself out again to write it"
        )
    problems += check_folder(snapshot, required, patterns, listing)
    known = {p.split(": ")[0] for p in problems}
    for name in [n for n in list_files(snapshot) if hashes and n not in known and matches(n, patterns) and (snapshot / n).is_symlink()]:
        blob = (snapshot / name).parent / os.readlink(snapshot / name)
        if digest(blob, len(blob.name) == 64) != blob.name:
            problems.append(f"{name}: its bytes do not hash to its blob's name; delete {blob.resolve()} and fetch it again")
    return problems
