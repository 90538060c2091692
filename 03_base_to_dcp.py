"""Turn the Cosmos3-Nano diffusers folder into a DCP with cosmos-framework's names, streaming.

Run:    python 03_base_to_dcp.py --base work/models/Cosmos3-Nano --out work/models/Cosmos3-Nano-DCP
Reads:  BASE/transformer/ (memory-mapped safetensors), BASE/checkpoint.json
Writes: OUT/model/.metadata, OUT/model/__0_I.distcp (about 5 GiB each), OUT/model/config.json, OUT/base.json (fingerprint, versions)
Needs:  common/console.py, common/keys.py, common/weights.py; torch, safetensors
Fails:  exit 3: BASE is no whole diffusers folder, or the disk is too small; exit 4: OUT exists and is not this base's DCP (--force)
Next:   python 04_fetch_libero.py all --data work/data --base work/models/Cosmos3-Nano --out work/cache

Our own trainer reads the diffusers folder as well as this DCP; RLinf and cosmos-framework need the DCP.
"""

import argparse
import importlib.metadata
import math
import platform
import shutil
import time
from pathlib import Path

from common import console, keys, weights
from common.console import Precondition, VerifyFailed

STAGE = "03_base_to_dcp"
FILE_BYTES = 5 * 2**30  # cosmos-framework writes ceil(bytes / 5 GiB) files
LAYERS = 36  # Cosmos3-Nano; other depths are converted, and named in the plan


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False, formatter_class=console.HelpFormatter)
    parser.add_argument("--base", type=Path, default=Path("work/models/Cosmos3-Nano"), help="diffusers folder of nvidia/Cosmos3-Nano")
    parser.add_argument("--out", type=Path, default=Path("work/models/Cosmos3-Nano-DCP"), help="DCP folder to write")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument("--json", type=Path, help="write the result as JSON to this file")
    return parser.parse_args(argv)


def plan(args) -> dict:
    """The source and what will be written; touches nothing. Raises Precondition or OutputExists."""
    source = weights.open_source(args.base)
    if source.kind != "diffusers":
        raise Precondition(
            "a diffusers folder", f"{source.kind} at {source.path}", "pass --base the folder that holds model_index.json and transformer/"
        )
    layers = weights.read_config(source)["num_hidden_layers"]
    whole = keys.rename_table(layers, sound=any(map(keys.is_sound, source.net)))
    differ = sorted(set(whole) ^ set(source.net))
    if differ:
        raise Precondition(
            f"the {len(whole)} tensors of {layers} layers",
            f"{len(source.net)} in {source.path}, first difference {differ[0]}",
            "fetch the base again: python 02_cache_models.py download",
        )
    nbytes = sum(math.prod(shape) * (2 if "16" in dtype else 4) for shape, dtype in source.info.values())
    note = {
        "fingerprint": weights.base_fingerprint(source),
        "tensors": len(source.net),
        "bytes": nbytes,
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
    }
    more = "" if layers == LAYERS else f" (Cosmos3-Nano has {LAYERS})"
    console.plan("base", f"{source.path}, {len(source.net)} tensors, {layers} layers{more}, {console.human_bytes(nbytes)}")
    console.plan("out", f"{args.out}/model, {math.ceil(nbytes / FILE_BYTES)} file(s)")
    there = console.read_json(args.out / weights.BASE_NOTE) or {}
    finished = all(there.get(k) == note[k] for k in ("fingerprint", "tensors", "bytes"))
    if not finished or args.force:
        console.check_output(args.out, args.force, (weights.BASE_NOTE,), (args.base,))
        console.need_disk(args.out, nbytes, "the DCP")
    return {"source": source, "note": note, "finished": finished and not args.force}


def execute(args, source, note) -> None:
    """Write beside the target, verify, leave the note last, then rename."""
    import torch.distributed.checkpoint as dcp

    tmp = args.out.with_name(args.out.name + ".tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    model = tmp / "model"
    model.mkdir(parents=True)
    # The tensors are views of memory-mapped files; the writer copies one at a time.
    names = list(source.net)
    tensors = source.read(source.net[k] for k in names)
    state = {keys.spell(k, "cosmos"): tensors[source.net[k]] for k in names}
    writer = dcp.FileSystemWriter(str(model), thread_count=math.ceil(note["bytes"] / FILE_BYTES))
    dcp.save(state, storage_writer=writer, no_dist=True)
    weights.drop_metadata_path(model)
    shutil.copy(source.path / "config.json", model / "config.json")
    if (args.base / "checkpoint.json").is_file():
        shutil.copy(args.base / "checkpoint.json", tmp / "checkpoint.json")
    verify(model, source)
    console.write_json(tmp / weights.BASE_NOTE, note)
    console.replace_folder(tmp, args.out)


def verify(model: Path, source) -> None:
    """Every name, shape and dtype is in the DCP, and every tensor reads back bit for bit."""
    import torch

    written = weights.open_source(model)
    for key, name in source.net.items():
        theirs = written.net.get(key)
        if theirs is None or written.info[theirs] != source.info[name]:
            raise VerifyFailed(f"{key} {source.info[name]}", f"{written.info.get(theirs)} in {model}", "run again; check the disk")
        a, b = source.tensor(name), written.tensor(theirs)
        if not torch.equal(a.contiguous().view(torch.uint8), b.view(torch.uint8)):
            raise VerifyFailed(f"{key} bit for bit", f"other bytes in {model}", "run again; check the disk")
    console.ok("verify", f"{len(source.net)} tensors read back bit for bit")


def main(argv=None) -> int:
    args = parse_args(argv)
    p = plan(args)
    if args.dry_run:
        return 0
    start = time.monotonic()
    if p["finished"]:
        console.ok("out", f"{args.out} is this base's DCP already")
    else:
        execute(args, p["source"], p["note"])
    result = {"out": args.out, "tensors": p["note"]["tensors"], "bytes": p["note"]["bytes"], "seconds": round(time.monotonic() - start, 1)}
    if args.json:
        console.write_json(args.json, result)
    console.done(STAGE, **result)
    return 0


if __name__ == "__main__":
    raise SystemExit(console.run_stage(STAGE, main))
