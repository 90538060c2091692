"""Turn the Cosmos3-Nano diffusers folder into a DCP with cosmos-framework's names, streaming.

Run:    python 03_base_to_dcp.py --base work/models/Cosmos3-Nano --out work/models/Cosmos3-Nano-DCP
Reads:  BASE/transformer/ (memory-mapped safetensors), BASE/checkpoint.json
Writes: OUT/model/.metadata, OUT/model/__0_I.distcp (about 5 GiB each), OUT/model/config.json, OUT/base.json (fingerprint, versions)
Needs:  common/console.py, common/keys.py, common/weights.py; torch, safetensors
Fails:  exit 3: BASE is no whole diffusers folder, or the disk is too small; exit 4: OUT exists (--force writes it anew)
Next:   python 04_fetch_libero.py fetch --out work/data

Our own trainer reads the diffusers folder as well as this DCP; RLinf and cosmos-framework need the DCP.
"""

import argparse
import math
import platform
import shutil
import time
from pathlib import Path

from common import console, keys, weights
from common.console import OutputExists, Precondition, VerifyFailed

STAGE = "03_base_to_dcp"
FILE_BYTES = 5 * 2**30  # cosmos-framework writes ceil(bytes / 5 GiB) files
LAYERS, HIDDEN = 36, 4096  # Cosmos3-Nano; other sizes are converted, and named in the plan


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False, formatter_class=console.HelpFormatter)
    parser.add_argument("--base", type=Path, default=Path("work/models/Cosmos3-Nano"), help="diffusers folder of nvidia/Cosmos3-Nano")
    parser.add_argument("--out", type=Path, default=Path("work/models/Cosmos3-Nano-DCP"), help="DCP folder to write")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument("--json", type=Path, help="write the result as JSON to this file")
    return parser.parse_args(argv)


def plan(args):
    """The source and what will be written; touches nothing. Raises Precondition or OutputExists."""
    source = weights.open_source(args.base)
    if source.kind != "diffusers":
        raise Precondition(
            "a diffusers folder", f"{source.kind} at {source.path}", "pass --base the folder that holds model_index.json and transformer/"
        )
    layers = 1 + max(int(k.split(".layers.")[1].split(".")[0]) for k in source.net if ".layers." in k)
    whole = keys.rename_table(layers, sound=any(map(keys.is_sound, source.net)))
    missing = sorted(set(whole) - set(source.net))
    if missing:
        raise Precondition(
            f"{len(whole)} tensors",
            f"{len(missing)} absent in {source.path}, first {missing[0]}",
            "fetch the base again: python 02_cache_models.py download",
        )
    nbytes = sum(math.prod(shape) * (2 if "16" in dtype else 4) for shape, dtype in source.info.values())
    console.plan(
        "base",
        f"{source.path}, {len(source.net)} tensors, {layers} layers{'' if layers == LAYERS else ' (Cosmos3-Nano has 36)'}, {console.human_bytes(nbytes)}",
    )
    console.plan("out", f"{args.out}/model, {math.ceil(nbytes / FILE_BYTES)} file(s)")
    if args.out.exists() and not args.force:
        raise OutputExists("no folder at --out", f"{args.out} exists", "pass --force to replace it, or another --out")
    console.need_disk(args.out, nbytes, "the DCP")
    return source, nbytes


def execute(args, source, nbytes) -> None:
    """Write beside the target, then rename."""
    import torch
    import torch.distributed.checkpoint as dcp

    tmp = args.out.with_name(args.out.name + ".tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    model = tmp / "model"
    model.mkdir(parents=True)
    # The tensors are views of memory-mapped files; the writer copies one at a time.
    names = list(source.net)
    tensors = source.read(source.net[k] for k in names)
    state = {keys.spell(k, "cosmos"): tensors[source.net[k]] for k in names}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(str(model), thread_count=math.ceil(nbytes / FILE_BYTES)), no_dist=True)
    weights.drop_metadata_path(model)
    shutil.copy(source.path / "config.json", model / "config.json")
    if (args.base / "checkpoint.json").is_file():
        shutil.copy(args.base / "checkpoint.json", tmp / "checkpoint.json")
    note = {
        "fingerprint": weights.base_fingerprint(source),
        "tensors": len(names),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    console.write_json(tmp / weights.BASE_NOTE, note)
    console.replace_folder(tmp, args.out)


def verify(out: Path, source) -> None:
    """Every name, shape and dtype is in the DCP, and every tensor reads back bit for bit."""
    import torch

    written = weights.open_source(out)
    for key, name in source.net.items():
        theirs = written.net.get(key)
        if theirs is None or written.info[theirs] != source.info[name]:
            raise VerifyFailed(
                f"{key} {source.info[name]}", f"{written.info.get(theirs)} in {out}", "run again with --force; check the disk"
            )
        a, b = source.read([name])[name], written.read([theirs])[theirs]
        if not torch.equal(a.contiguous().view(torch.uint8), b.view(torch.uint8)):
            raise VerifyFailed(f"{key} bit for bit", f"other bytes in {out}", "run again with --force; check the disk")
    console.ok("verify", f"{len(source.net)} tensors read back bit for bit")


def main(argv=None) -> int:
    args = parse_args(argv)
    source, nbytes = plan(args)
    if args.dry_run:
        return 0
    start = time.monotonic()
    execute(args, source, nbytes)
    verify(args.out, source)
    result = {"out": args.out, "tensors": len(source.net), "bytes": nbytes, "seconds": round(time.monotonic() - start, 1)}
    if args.json:
        console.write_json(args.json, result)
    console.done(STAGE, **result)
    return 0


if __name__ == "__main__":
    raise SystemExit(console.run_stage(STAGE, main))
