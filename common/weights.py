"""Cosmos3 checkpoints on disk: recognise any container, list its tensors by canonical name, read some, fingerprint all.

    diffusers      a pipeline folder (or its transformer/): sharded or single safetensors, names of Cosmos3OmniTransformer
    dcp            torch.distributed.checkpoint of cosmos-framework, RLinf or this project (.metadata and __R_i.distcp)
    safetensors    a flat folder, as cosmos-framework's HF export
    pt             RLinf's full_weights.pt
Nothing is read whole. In all of them a tensor lies in one piece (a chunk of a DCP is a small torch.save file inside a .distcp), so a
tensor is a memory map of just its bytes, which the kernel drops again. Writers take one tensor at a time, in pieces of PIECE numbers.
A DCP's .metadata is a pickle: open only those that you trust. Pickled objects in a .pt are not built (`_TensorsOnly`).
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import math
import mmap
import os
import pathlib
import pickle
import platform
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from common import keys
from common.console import Precondition

# Single-process saves and loads are meant here (no_dist=True); torch warns on each of them.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)

INDEX = "diffusion_pytorch_model.safetensors.index.json"
BASE_NOTE = "base.json"  # beside a DCP: its fingerprint, source and versions
PIECE = 2**20  # numbers that are cast, compared or written at a time: 2 to 4 MiB, which stay in a processor's cache
WORKERS = 4  # threads that write or compare: while one waits for the disk, others work
FILE_BYTES = 5 * 2**30  # cosmos-framework writes ceil(bytes / 5 GiB) DCP files
SAMPLE = 4096  # bytes at either end of a tensor that enter its fingerprint
# What a checkpoint may hold beside the network: dropped without a word. Anything else unknown is an error.
_BESIDE = (
    "optim.",
    "fsdp_checkpoint.optimizers",
    "fsdp_checkpoint.lr_schedulers",
    "fsdp_checkpoint.fsdp_version",
    "fsdp_checkpoint.rng",
)
VISION = "language_model.visual."
# dtypes as torch prints them -> bytes an element. What else Cosmos3 checkpoints come in (FP8) is another model.
ITEM_BYTES = {"torch.bfloat16": 2, "torch.float16": 2, "torch.float32": 4, "torch.float64": 8}
_SAFETENSORS_DTYPES = {"BF16": "torch.bfloat16", "F16": "torch.float16", "F32": "torch.float32", "F64": "torch.float64"}


@dataclass(frozen=True)
class Source:
    """One checkpoint. `net`, `ema` and `vision` map canonical keys to the container's own names.

    `vision` is the vision tower, 351 tensors of Qwen3VLVisionModel: `language_model.visual.*`, or vision_encoder/ beside transformer/.
    """

    kind: str
    path: Path  # the folder or file that holds the tensors
    net: dict[str, str]
    ema: dict[str, str]
    vision: dict[str, str]
    info: dict[str, tuple[tuple[int, ...], str]]  # container's name -> (shape, dtype as torch prints it)
    tensor: Callable  # container's name -> CPU tensor, mapped from the file where it lies there in one piece
    files: dict[str, str]  # container's name -> file name, where the container has one file a shard

    def read(self, names: Iterable[str]) -> dict:
        """{name: tensor} for some of the container's names."""
        return {name: self.tensor(name) for name in names}

    def nbytes(self, names: Iterable[str]) -> int:
        return sum(math.prod(self.info[n][0]) * ITEM_BYTES[self.info[n][1]] for n in names)

    def reader(self):
        """A torch.distributed.checkpoint storage reader: FSDP2 ranks read their own shards with it, under the container's names."""
        if self.kind == "dcp":
            return _dcp_reader(self.path)
        if self.kind in ("diffusers", "safetensors"):
            from torch.distributed.checkpoint import HuggingFaceStorageReader

            return HuggingFaceStorageReader(str(self.path))
        raise Precondition(
            "a diffusers folder or a DCP as the base",
            f"{self.kind} file {self.path}",
            "convert it first: python 06_convert_ckpt.py --src FILE --base BASE --out OUT",
        )


def open_source(path: Path) -> Source:
    """Recognise what lies at `path` and list its tensors. Raises Precondition with a diagnosis for anything incomplete or unknown."""
    path = Path(path)
    if not path.exists():
        raise Precondition("a checkpoint", f"nothing at {path}", "check the path; python 02_cache_models.py download fetches the base")
    if path.is_file():
        return _open_pt(path)
    for folder in (path, path / "model", path / "dcp_checkpoint", path / "actor/dcp_checkpoint"):
        if (folder / ".metadata").is_file():
            return _open_dcp(folder)
        if any(folder.glob("*.distcp")):
            raise Precondition(
                "a finished DCP",
                f"*.distcp files but no .metadata (which is written last) in {folder}",
                "write it again: that save was cut short",
            )
    index = path / "model_index.json"
    pipeline = json.loads(index.read_text()).get("_class_name", "") if index.is_file() else "Cosmos3"
    if "Cosmos3" not in pipeline:
        raise Precondition("a Cosmos3 pipeline", f"{pipeline} in {index}", "point at the folder of nvidia/Cosmos3-Nano")
    for folder in (path / "transformer", path):
        if (folder / INDEX).is_file() or (folder / "diffusion_pytorch_model.safetensors").is_file():
            return _open_safetensors(folder, "diffusers", INDEX)
    if any(path.glob("*.safetensors")):
        return _open_safetensors(path, "safetensors", "model.safetensors.index.json")
    seen = ", ".join(sorted(p.name for p in path.iterdir())[:12]) or "an empty folder"
    raise Precondition(
        "a diffusers folder, a DCP, flat safetensors or full_weights.pt",
        f"{path} with {seen}",
        "point at the folder that holds model_index.json or .metadata",
    )


def _classify(info: dict, origin: Path) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Container names -> canonical maps of the weights, the EMA and the vision tower. Collisions and unknown names or dtypes are errors."""
    net, ema, vision = {}, {}, {}
    for name, (_, dtype) in info.items():
        if name.startswith(_BESIDE):
            continue
        if VISION in name:
            key, table = VISION + name.split(VISION)[1], vision
            if "net_ema." in name:  # a frozen tower's average is the tower
                continue
        else:
            key, is_ema = keys.parse(name)
            table = ema if is_ema else net
        if key in table:
            raise Precondition("one tensor a name", f"{name!r} and {table[key]!r} are both {key} in {origin}", "keep one of them")
        if dtype not in ITEM_BYTES:
            raise Precondition(f"{', '.join(ITEM_BYTES)}", f"{dtype} in {name} of {origin}", "use the bf16 checkpoint of Cosmos3-Nano")
        table[key] = name
    if not net:
        raise Precondition("Cosmos3 weights", f"none among the names of {origin}", "point at a Cosmos3-Nano checkpoint")
    return net, ema, vision


def mapped(file: Path, shape: tuple[int, ...], dtype: str, offset: int):
    """A tensor over the bytes of `file` from `offset` on. Its storage is exactly those bytes; they leave memory with the tensor."""
    import torch

    begin = offset - offset % mmap.ALLOCATIONGRANULARITY
    length = offset - begin + math.prod(shape) * ITEM_BYTES[dtype]
    with open(file, "rb") as f:
        view = mmap.mmap(f.fileno(), length, access=mmap.ACCESS_COPY, offset=begin)
    flat = torch.frombuffer(view, dtype=getattr(torch, dtype.removeprefix("torch.")), count=math.prod(shape), offset=offset - begin)
    return flat.view(shape)


def _stored(file: Path, begin: int, like):
    """The tensor that a torch.save archive at byte `begin` of `file` holds; `like` is what torch.load gave for it on the meta device."""
    storage = like.untyped_storage()
    offset, count = begin + storage._checkpoint_offset, storage.nbytes() // like.element_size()
    return mapped(file, (count,), str(like.dtype), offset).as_strided(like.shape, like.stride(), like.storage_offset())


def check_safetensors(file: Path) -> dict[str, tuple[tuple[int, ...], str, int]]:
    """name -> (shape, dtype, byte offset in the file) of a whole safetensors file.

    Raises Precondition for anything else: missing, a Git LFS pointer, cut short, or with bytes behind the last tensor.
    """
    if not file.is_file():
        raise Precondition(
            "every shard that the index names", f"no {file}", "python 02_cache_models.py download (it fetches what is missing)"
        )
    size = file.stat().st_size
    with open(file, "rb") as f:
        head = f.read(8)
        if head.startswith(b"version "):
            raise Precondition(
                "tensor data", f"{file} is a Git LFS pointer ({size} bytes)", "fetch the file itself: python 02_cache_models.py download"
            )
        length = int.from_bytes(head, "little")
        header = f.read(length) if len(head) == 8 and length < size else b""
    try:
        tensors = {k: v for k, v in json.loads(header).items() if k != "__metadata__"}
    except ValueError as error:
        raise Precondition("a safetensors header", f"none in {file} ({size} bytes)", "fetch the file again") from error
    expected = 8 + length + max((t["data_offsets"][1] for t in tensors.values()), default=0)
    if size != expected:
        raise Precondition(
            f"{expected} bytes in {file}",
            f"{size} bytes ({'cut short by' if size < expected else 'too long by'} {abs(expected - size)})",
            "fetch the file again",
        )
    found = {}
    for name, t in tensors.items():
        shape, dtype = tuple(t["shape"]), _SAFETENSORS_DTYPES.get(t["dtype"], t["dtype"])
        begin, end = t["data_offsets"]
        if end - begin != math.prod(shape) * ITEM_BYTES.get(dtype, 0) and dtype in ITEM_BYTES:
            raise Precondition(f"{shape} {dtype} for {name}", f"{end - begin} bytes in {file}", "fetch the file again")
        found[name] = shape, dtype, 8 + length + begin
    return found


def _open_safetensors(folder: Path, kind: str, index_name: str) -> Source:
    present = sorted(p.name for p in folder.glob("*.safetensors"))
    files = {}
    if (folder / index_name).is_file():
        files = json.loads((folder / index_name).read_text())["weight_map"]
        stale = sorted(set(present) - set(files.values()))
        if stale:
            raise Precondition(
                "only shards that the index names",
                f"{', '.join(stale)} in {folder} stand in no index",
                "delete what is left over from another checkpoint",
            )
    place, found = {}, {}  # name -> (file, shape, dtype, offset); name -> file name
    for shard in sorted(set(files.values()) or present):
        for name, entry in check_safetensors(folder / shard).items():
            if name in found:
                raise Precondition("one shard a tensor", f"{name} in {found[name]} and {shard} of {folder}", "fetch the folder again")
            place[name], found[name] = (folder / shard, *entry), shard
    missing = sorted(set(files) - set(found)) or sorted(set(found) - set(files)) if files else []
    if missing:
        raise Precondition(
            "an index that agrees with its shards",
            f"{len(missing)} tensors differ in {folder}, first {missing[0]}",
            "fetch the folder again",
        )
    tower = folder.parent / "vision_encoder"
    if kind == "diffusers" and tower.is_dir():
        for shard in sorted(tower.glob("*.safetensors")):
            place |= {VISION + name: (shard, *entry) for name, entry in check_safetensors(shard).items()}
    info = {name: (shape, dtype) for name, (_, shape, dtype, _) in place.items()}
    return Source(kind, folder, *_classify(info, folder), info, lambda name: mapped(*place[name]), found)


@contextlib.contextmanager
def _pathlib_alias():
    """Python 3.13 pickles paths under `pathlib._local`, which older interpreters lack."""
    if "pathlib._local" in sys.modules:
        yield
        return
    sys.modules["pathlib._local"] = pathlib
    try:
        yield
    finally:
        del sys.modules["pathlib._local"]


def _dcp_reader(folder: Path):
    from torch.distributed.checkpoint import FileSystemReader

    class Reader(FileSystemReader):
        def read_metadata(self, *args, **kwargs):
            with _pathlib_alias():
                return super().read_metadata(*args, **kwargs)

    return Reader(str(folder))


def read_dcp_metadata(folder: Path):
    """The Metadata of a DCP, its shard files checked to be present and long enough. Raises Precondition otherwise."""
    if not (folder / ".metadata").is_file():
        raise Precondition("a DCP", f"no .metadata in {folder}", "copy or write the checkpoint again")
    try:
        metadata = _dcp_reader(folder).read_metadata()
    except (ModuleNotFoundError, AttributeError, pickle.UnpicklingError, EOFError) as error:
        raise Precondition(
            "a .metadata that this Python reads",
            f"{folder}: {error}{_written_with(folder)}",
            "write the checkpoint again with this Python and torch",
        ) from error
    need: dict[str, int] = {}
    for storage in (metadata.storage_data or {}).values():
        need[storage.relative_path] = max(need.get(storage.relative_path, 0), storage.offset + storage.length)
    bad = [
        f"{f} ({(folder / f).stat().st_size if (folder / f).is_file() else 'missing'}, needs {n})"
        for f, n in sorted(need.items())
        if not (folder / f).is_file() or (folder / f).stat().st_size < n
    ]
    if bad:
        raise Precondition(
            f"{len(need)} whole shard files in {folder}",
            f"{len(bad)} missing or cut short: {', '.join(bad[:4])}",
            "copy or write the checkpoint again (a full disk cuts files)",
        )
    return metadata


def versions() -> dict[str, str]:
    """What writes here: a DCP's .metadata is a pickle, and its reader may want to know."""
    return {"python": platform.python_version(), "torch": importlib.metadata.version("torch")}


def _written_with(folder: Path) -> str:
    note = folder.parent / BASE_NOTE
    try:
        found = json.loads(note.read_text())
        return f" (written with Python {found['python']}, torch {found['torch']})"
    except (OSError, ValueError, KeyError):
        return ""


def _open_dcp(folder: Path) -> Source:
    import torch
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.utils import _create_file_view

    metadata = read_dcp_metadata(folder)
    tensors = {n: m for n, m in metadata.state_dict_metadata.items() if hasattr(m, "size")}
    info = {n: (tuple(m.size), str(m.properties.dtype)) for n, m in tensors.items()}

    @functools.cache
    def find(name, offsets):
        """(file, its archive's first byte, meta tensor) of a chunk: where its bytes lie is read from the archive once."""
        entry = metadata.storage_data[MetadataIndex(name, offsets)]
        if getattr(entry, "transform_descriptors", None):
            raise Precondition("a plain DCP", f"{entry.transform_descriptors} on {name} in {folder}", "save it without extensions")
        with open(folder / entry.relative_path, "rb") as f:
            like = torch.load(_create_file_view(f, entry.offset, entry.length), map_location="meta", weights_only=True)
        return folder / entry.relative_path, entry.offset, like

    def tensor(name):
        chunks = tensors[name].chunks
        if len(chunks) == 1:
            return _stored(*find(name, chunks[0].offsets)).view(info[name][0])
        value = torch.empty(info[name][0], dtype=tensors[name].properties.dtype)
        if sum(c.sizes.numel() for c in chunks) != value.numel():
            raise Precondition(f"every element of {name}", f"{len(chunks)} chunks that do not cover it in {folder}", "save it again")
        for chunk in chunks:
            value[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))] = _stored(*find(name, chunk.offsets))
        return value

    return Source("dcp", folder, *_classify(info, folder), info, tensor, {})


class _Inert:
    """Stands for an object in a .pt file that is no tensor. Its class is not imported and nothing of it is called."""

    def __new__(cls, *args, **kwargs):
        return object.__new__(cls)

    def __init__(self, *args, **kwargs):
        pass

    def __setstate__(self, state):
        pass

    def __setitem__(self, key, value):
        pass

    def append(self, value):
        pass

    def extend(self, values):
        pass


class _TensorsOnly(pickle.Unpickler):
    """Builds tensors and plain containers; every other class becomes _Inert. RLinf's files may carry a config object beside the weights."""

    ALLOWED = frozenset({("collections", "OrderedDict"), ("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_parameter")})

    def find_class(self, module, name):
        return super().find_class(module, name) if (module, name) in self.ALLOWED else _Inert


def _open_pt(file: Path) -> Source:
    import torch

    try:
        with open(file, "rb") as f:
            if f.read(4) != b"PK\3\4":
                raise RuntimeError("not a zip archive, as torch.save writes it")
        only_tensors = types.SimpleNamespace(__name__="tensors_only", Unpickler=_TensorsOnly)
        state = torch.load(file, map_location="meta", weights_only=False, pickle_module=only_tensors)
    except (RuntimeError, OSError, pickle.UnpicklingError, EOFError, TypeError, AttributeError) as error:
        raise Precondition("a whole .pt file of tensors", f"{file}: {str(error).splitlines()[0][:200]}", "copy it again") from error
    if not isinstance(state, dict):
        raise Precondition("a dict of tensors", f"{type(state).__name__} in {file}", "pass RLinf's full_weights.pt")
    tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
    info = {k: (tuple(v.shape), str(v.dtype)) for k, v in tensors.items()}
    return Source("pt", file, *_classify(info, file), info, lambda name: _stored(file, 0, tensors[name]), {})


# ---------------------------------------------------------------- writing and comparing, piece by piece


def spread(work: Callable, items: Iterable) -> Iterable:
    """work(item) of every item, in order, by WORKERS threads (reading, writing and comparing run outside the interpreter lock)."""
    import torch

    # One processor a worker: torch's own threads, as many for each of them, would only wait for one another.
    with ThreadPoolExecutor(WORKERS, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield from pool.map(work, items)


def pieces(value, dtype):
    """Consecutive flat pieces of a tensor, at most PIECE numbers each, cast to `dtype` (round to nearest)."""
    for piece in value.contiguous().view(-1).split(PIECE):
        yield piece.to(dtype)


def _bits(piece):
    import torch

    raw = piece.view(torch.uint8)
    return raw.view(torch.int64) if raw.numel() % 8 == raw.storage_offset() % 8 == 0 else raw  # eight times fewer numbers to compare


def same(a, b, dtype) -> bool:
    """Are two tensors bit-equal once both are cast to `dtype`?"""
    import torch

    return a.shape == b.shape and all(torch.equal(_bits(x), _bits(y)) for x, y in zip(pieces(a, dtype), pieces(b, dtype), strict=True))


def finite_and_same(value, other) -> tuple[bool, bool]:
    """(no NaN and no infinity in `value`, bit-equal to `other` cast to its dtype), in one pass over both."""
    import torch

    finite, equal = True, value.shape == other.shape
    for x, y in zip(pieces(value, value.dtype), pieces(other, value.dtype), strict=equal):
        equal = equal and torch.equal(_bits(x), _bits(y))
        # either shows in the extremes, which are far cheaper to find than to test each number
        finite = finite and all(bool(extreme.isfinite()) for extreme in x.aminmax())
    return finite, equal


def _write(f, value, dtype) -> None:
    import torch

    for piece in pieces(value, dtype):
        f.write(memoryview(piece.view(torch.uint8).numpy()))


def write_safetensors(file: Path, tensors: Mapping[str, tuple], tensor: Callable) -> None:
    """`tensors`: name -> (shape, dtype); `tensor(name)` gives the values in any dtype. The bytes are those of safetensors' save_file with
    metadata {"format": "pt"}: 8 bytes of header length, the header in JSON (wider dtypes first, then by name) padded to 8, the data.
    The file appears under its name when it is whole and on the disk. save_file itself wants all tensors of a shard in memory."""
    import torch

    spelled = {t: s for s, t in _SAFETENSORS_DTYPES.items()}
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name in sorted(tensors, key=lambda n: (-ITEM_BYTES[tensors[n][1]], n)):
        shape, dtype = tensors[name]
        end = offset + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": spelled[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    part = file.with_name(file.name + ".part")
    with open(part, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for name in list(header)[1:]:
            _write(f, tensor(name), getattr(torch, tensors[name][1].removeprefix("torch.")))
        f.flush()
        os.fsync(f.fileno())
    os.replace(part, file)


def write_pt(file: Path, tensors: Mapping[str, tuple], tensor: Callable) -> None:
    """What torch.save would write for {name: tensor}, without holding the dict: first the archive with holes, then each tensor in its place.
    Not forced to the disk, as with write_dcp."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        empty = {n: torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch."))) for n, (shape, dtype) in tensors.items()}
    with torch.serialization.skip_data(materialize_fake_tensors=True), open(file, "wb") as f:
        torch.save(empty, f)
    with open(file, "r+b") as f:
        for name, like in torch.load(file, map_location="meta", weights_only=True).items():
            f.seek(like.untyped_storage()._checkpoint_offset)
            _write(f, tensor(name), like.dtype)


def write_dcp(folder: Path, tensors: Mapping[str, tuple], tensor: Callable) -> None:
    """A DCP of ceil(bytes / 5 GiB) files, as FileSystemWriter lays it out: torch.save archives back to back, .metadata last. FileSystemWriter
    itself keeps every tensor of a file until the file is done. Not forced to the disk: `sync` does that, beside the reader that verifies."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
    from torch.distributed.checkpoint.metadata import StorageMeta

    folder.mkdir(parents=True, exist_ok=True)
    shapes = {n: torch.empty(s, dtype=getattr(torch, d.removeprefix("torch.")), device="meta") for n, (s, d) in tensors.items()}
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(shapes, is_coordinator=True)
    (plan,), metadata = planner.create_global_plan([planner.create_local_plan()])
    files = [[] for _ in range(math.ceil(sum(v.nbytes for v in shapes.values()) / FILE_BYTES))]
    filled = [0] * len(files)
    for item in sorted(plan.items, key=lambda i: -shapes[i.index.fqn].nbytes):  # the largest first, each where least is
        i = filled.index(min(filled))
        files[i].append(item)
        filled[i] += shapes[item.index.fqn].nbytes

    def write(i) -> dict:
        entries, name = {}, f"__0_{i}.distcp"
        with open(folder / name, "wb") as f:
            for item in files[i]:
                value, begin = tensor(item.index.fqn).contiguous(), f.tell()
                torch.save(value if value.untyped_storage().nbytes() == value.nbytes else value.clone(), f)
                entries[item.index] = _StorageInfo(name, begin, f.tell() - begin)
        return entries

    checksums = torch.serialization.get_crc32_options()
    # torch's zip checksum is never read back and takes four times as long as the copy.
    torch.serialization.set_crc32_options(False)
    try:
        metadata.storage_data = {k: v for entries in spread(write, range(len(files))) for k, v in entries.items()}
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # torch's zip writer covers a full disk with "unexpected pos"
            raise error.__context__ from error
        raise
    finally:
        torch.serialization.set_crc32_options(checksums)
    metadata.storage_meta, metadata.version = StorageMeta(checkpoint_id=""), CURRENT_DCP_VERSION
    temporary = folder / ".metadata.tmp"
    temporary.write_bytes(pickle.dumps(metadata))
    temporary.replace(folder / ".metadata")


def read_config(source: Source) -> dict:
    """The transformer's config.json, which lies beside the tensors. Raises Precondition if it is absent or broken."""
    file = source.path / "config.json"
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise Precondition(
            "transformer/config.json beside the tensors", f"{type(error).__name__} at {file}", "copy it from nvidia/Cosmos3-Nano"
        ) from error


def drop_metadata_path(folder: Path) -> None:
    """Take the absolute path that torch pickles into .metadata out again: it names the machine and ties the file to a Python version."""
    file = Path(folder) / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.storage_meta.checkpoint_id = ""
    temporary = file.with_name(".metadata.tmp")
    temporary.write_bytes(pickle.dumps(metadata))
    temporary.replace(file)


def fingerprint(named) -> str:
    """sha256 over (name, dtype, shape, first and last 4 KiB) of every (name, tensor) pair in the order given.

    It tells two checkpoints apart (any training step changes every tensor); it does not prove that each byte is whole.
    """
    import torch

    digest = hashlib.sha256()
    for name, tensor in named:
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        for part in (flat[:SAMPLE], flat[-SAMPLE:]):
            digest.update(part.numpy().tobytes())
    return digest.hexdigest()


def base_fingerprint(source: Source) -> str:
    """Fingerprint of a base's 809 tensors (sound apart), the same for a diffusers folder and for the DCP made from it.

    03_base_to_dcp.py leaves it in base.json beside the DCP, since reading every tensor of a DCP takes minutes at Nano size.
    """
    note = source.path.parent / BASE_NOTE
    if source.kind == "dcp" and source.path.name == "model" and note.is_file():
        return json.loads(note.read_text())["fingerprint"]
    names = sorted(k for k in source.net if not keys.is_sound(k))
    return fingerprint((k, source.tensor(source.net[k])) for k in names)


def folder_fingerprint(folder: Path) -> str:
    """Fingerprint of all safetensors in a folder (vae/), by tensor name."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise Precondition("safetensors files", f"none in {folder}", "python 02_cache_models.py download")
    tensors = {name: mapped(file, *entry) for file in files for name, entry in check_safetensors(file).items()}
    return fingerprint(sorted(tensors.items()))


def load_module(module, source: Source) -> None:
    """Fill a module (diffusers parameter names) from a source, tensor by tensor, cast to each parameter's dtype. Every parameter must be there in its shape."""
    import torch

    for name, parameter in module.named_parameters():
        key = keys.to_canonical(name)
        if key not in source.net:
            raise Precondition(f"tensor {key}", f"absent from {source.path}", "use a whole Cosmos3-Nano checkpoint")
        shape = source.info[source.net[key]][0]
        if shape != tuple(parameter.shape):
            raise Precondition(
                f"{key} of shape {tuple(parameter.shape)}",
                f"{shape} in {source.path}",
                "check action_dim 64 and num_embodiment_domains 32 in transformer/config.json",
            )
        with torch.no_grad():
            parameter.copy_(source.tensor(source.net[key]))
