"""Cosmos3 checkpoints on disk: recognise any container, list its tensors by canonical name, read some, fingerprint all.

    diffusers      a pipeline folder (or its transformer/): sharded or single safetensors, names of Cosmos3OmniTransformer
    dcp            torch.distributed.checkpoint of cosmos-framework, RLinf or this project (.metadata and __R_i.distcp)
    safetensors    a flat folder, as cosmos-framework's HF export
    pt             RLinf's full_weights.pt
Nothing is read whole: safetensors and .pt are memory-mapped, DCP tensors are read by name.
A DCP's .metadata is a pickle: open only those that you trust.
"""

import contextlib
import hashlib
import json
import pathlib
import pickle
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from common import keys
from common.console import Precondition

# Single-process saves and loads are meant here (no_dist=True); torch warns on each of them.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)

INDEX = "diffusion_pytorch_model.safetensors.index.json"
BASE_NOTE = "base.json"  # beside a DCP: its fingerprint, source and versions
SAMPLE = 4096  # bytes at either end of a tensor that enter its fingerprint
# What a checkpoint may hold beside the network: dropped without a word. Anything else unknown is an error.
_BESIDE = (
    "optim.",
    "fsdp_checkpoint.optimizers",
    "fsdp_checkpoint.lr_schedulers",
    "fsdp_checkpoint.fsdp_version",
    "fsdp_checkpoint.rng",
)
_VISION = "language_model.visual."


@dataclass(frozen=True)
class Source:
    """One checkpoint. `net` and `ema` map canonical keys to the container's own names."""

    kind: str
    path: Path  # the folder or file that holds the tensors
    net: dict[str, str]
    ema: dict[str, str]
    info: dict[str, tuple[tuple[int, ...], str]]  # container's name -> (shape, dtype as torch prints it)
    read: Callable[[Iterable[str]], dict]  # container's names -> {name: CPU tensor}
    files: dict[str, str]  # container's name -> file name, where the container has one file a shard

    def tensor(self, name: str):
        """One tensor by the container's name."""
        return self.read([name])[name]

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


def _classify(names: Iterable[str], origin: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Container names -> canonical maps of the weights and of the EMA. Collisions and unknown names are errors."""
    net, ema = {}, {}
    for name in names:
        if name.startswith(_BESIDE) or _VISION in name:
            continue
        key, is_ema = keys.parse(name)
        table = ema if is_ema else net
        if key in table:
            raise Precondition("one tensor a name", f"{name!r} and {table[key]!r} are both {key} in {origin}", "keep one of them")
        table[key] = name
    if not net:
        raise Precondition("Cosmos3 weights", f"none among the names of {origin}", "point at a Cosmos3-Nano checkpoint")
    return net, ema


def check_safetensors(file: Path) -> None:
    """Raise Precondition unless `file` is a whole safetensors file: no Git LFS pointer, not cut short, nothing behind the last tensor."""
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


def _open_safetensors(folder: Path, kind: str, index_name: str) -> Source:
    from safetensors import safe_open

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
    for shard in sorted(set(files.values()) or present):
        check_safetensors(folder / shard)
    info, found = {}, {}
    for shard in sorted(set(files.values()) or present):
        with safe_open(folder / shard, "pt") as f:
            for name in f.keys():  # noqa: SIM118 (safe_open is no mapping)
                part = f.get_slice(name)
                info[name], found[name] = (tuple(part.get_shape()), _SAFETENSORS_DTYPES.get(part.get_dtype(), part.get_dtype())), shard
    missing = sorted(set(files) - set(found)) or sorted(set(found) - set(files)) if files else []
    if missing:
        raise Precondition(
            "an index that agrees with its shards",
            f"{len(missing)} tensors differ in {folder}, first {missing[0]}",
            "fetch the folder again",
        )

    def read(names):
        out = {}
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(found[name], []).append(name)
        for shard, wanted in by_file.items():
            with safe_open(folder / shard, "pt") as f:
                out |= {name: f.get_tensor(name) for name in wanted}
        return out

    return Source(kind, folder, *_classify(info, folder), info, read, found)


_SAFETENSORS_DTYPES = {"BF16": "torch.bfloat16", "F32": "torch.float32", "F16": "torch.float16", "F64": "torch.float64"}


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
    try:
        metadata = _dcp_reader(folder).read_metadata()
    except (ModuleNotFoundError, AttributeError, pickle.UnpicklingError, EOFError) as error:
        raise Precondition(
            "a .metadata that this Python reads", f"{folder}: {error}", "write the checkpoint again with this Python and torch"
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


def _open_dcp(folder: Path) -> Source:
    import torch
    import torch.distributed.checkpoint as dcp

    metadata = read_dcp_metadata(folder)
    info = {n: (tuple(m.size), str(m.properties.dtype)) for n, m in metadata.state_dict_metadata.items() if hasattr(m, "size")}

    def read(names):
        out = {n: torch.empty(info[n][0], dtype=getattr(torch, info[n][1].removeprefix("torch."))) for n in names}
        dcp.load(out, storage_reader=_dcp_reader(folder), no_dist=True)
        return out

    return Source("dcp", folder, *_classify(info, folder), info, read, {})


def _open_pt(file: Path) -> Source:
    import torch

    try:
        state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, OSError, pickle.UnpicklingError, EOFError) as error:
        raise Precondition(
            "a whole .pt file of plain tensors",
            f"{file}: {str(error).splitlines()[0][:200]}",
            "copy it again; files with other objects are not opened, since unpickling them runs code",
        ) from error
    tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
    info = {k: (tuple(v.shape), str(v.dtype)) for k, v in tensors.items()}
    return Source("pt", file, *_classify(info, file), info, lambda names: {n: tensors[n] for n in names}, {})


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
    from safetensors import safe_open

    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise Precondition("safetensors files", f"none in {folder}", "python 02_cache_models.py download")
    for file in files:
        check_safetensors(file)
    tensors = {}
    for file in files:
        with safe_open(file, "pt") as f:
            tensors |= {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118
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
