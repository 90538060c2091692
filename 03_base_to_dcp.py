"""Turn the Cosmos3-Nano diffusers folder into a DCP with cosmos-framework's names, streaming.

Run:    python 03_base_to_dcp.py --base work/models/Cosmos3-Nano --out work/models/Cosmos3-Nano-DCP
Reads:  BASE/transformer/ (814 tensors, memory-mapped), with --with-vision BASE/vision_encoder/ (351 more), BASE/checkpoint.json
Writes: OUT/model/.metadata, OUT/model/__0_I.distcp (about 5 GiB each), OUT/model/config.json, OUT/checkpoint.json, OUT/base.json (fingerprint, versions)
Needs:  common/console.py, common/keys.py, common/weights.py; torch
Fails:  exit 3: BASE is no whole diffusers folder, or the disk is too small; exit 4: OUT exists and is not this base's DCP (--force);
        exit 5: what was written does not read back bit for bit
Next:   python 04_fetch_libero.py all --data work/data --base work/models/Cosmos3-Nano --out work/cache

Our own trainer reads the diffusers folder as well as this DCP; RLinf and cosmos-framework need the DCP.
"""

import argparse
import math
import shutil
import time
from pathlib import Path

from common import console, keys, weights
from common.console import Precondition, VerifyFailed

STAGE = "03_base_to_dcp"
LAYERS = 36  # Cosmos3-Nano; other depths are converted, and named in the plan


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False, formatter_class=console.HelpFormatter)
    parser.add_argument("--base", type=Path, default=Path("work/models/Cosmos3-Nano"), help="diffusers folder of nvidia/Cosmos3-Nano")
    parser.add_argument("--out", type=Path, default=Path("work/models/Cosmos3-Nano-DCP"), help="DCP folder to write")
    parser.add_argument("--with-vision", action="store_true", help="also the vision tower, as cosmos-framework's own base DCP has it")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument("--json", type=console.json_file, help="write the result as JSON to this file")
    return parser.parse_args(argv)


def plan(args) -> dict:
    """The source and what will be written; touches nothing. Raises Precondition or OutputExists."""
    source = weights.open_source(args.base)
    if source.kind != "diffusers":
        raise Precondition(
            "a diffusers folder", f"{source.kind} at {source.path}", "pass --base the folder that holds model_index.json and transformer/"
        )
    config = weights.read_config(source)
    layers = config["num_hidden_layers"]
    shapes = keys.shapes(config, sound=any(map(keys.is_sound, source.net)))
    differ = sorted(set(shapes) ^ set(source.net))
    if differ:
        raise Precondition(
            f"the {len(shapes)} tensors of {layers} layers",
            f"{len(source.net)} in {source.path}, {len(differ)} differ: {', '.join(differ[:5])}",
            "fetch the base again: python 02_cache_models.py download",
        )
    wrong = [f"{k} {source.info[n][0]} instead of {shapes[k]}" for k, n in source.net.items() if source.info[n][0] != shapes[k]]
    if wrong:
        raise Precondition(
            f"the shapes that {source.path}/config.json gives", f"{len(wrong)} others: {', '.join(wrong[:5])}", "fetch the base again"
        )
    if args.with_vision and not source.vision:
        raise Precondition("vision_encoder/ in the base folder", f"none in {args.base}", "python 02_cache_models.py download")
    names = source.net | (source.vision if args.with_vision else {})
    nbytes = source.nbytes(names.values())
    note = {"fingerprint": weights.base_fingerprint(source), "tensors": len(names), "bytes": nbytes, **weights.versions()}
    more = "" if layers == LAYERS else f" (Cosmos3-Nano has {LAYERS})"
    console.plan("base", f"{source.path}, {len(names)} tensors, {layers} layers{more}, {console.human_bytes(nbytes)}")
    console.plan("out", f"{args.out}/model, {math.ceil(nbytes / weights.FILE_BYTES)} file(s)")
    there = console.read_json(args.out / weights.BASE_NOTE) or {}
    finished = all(there.get(k) == note[k] for k in ("fingerprint", "tensors", "bytes"))
    if not finished or args.force:
        console.check_output(args.out, args.force, (weights.BASE_NOTE,), (args.base,))
        console.need_disk(args.out, nbytes, "the DCP")
    return {"source": source, "names": names, "note": note, "finished": finished and not args.force}


def execute(args, source, names, note) -> None:
    """Write beside the target, verify, leave the note last, then rename. What a killed run left beside it is written anew."""
    tmp = args.out.with_name(args.out.name + ".tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    model = tmp / "model"
    stored = {"net." + k: n for k, n in names.items()}
    weights.write_dcp(model, {k: source.info[n] for k, n in stored.items()}, lambda k: source.tensor(stored[k]))
    shutil.copy(source.path / "config.json", model / "config.json")
    if (args.base / "checkpoint.json").is_file():
        shutil.copy(args.base / "checkpoint.json", tmp / "checkpoint.json")
    verify(model, source, stored)
    console.write_json(tmp / weights.BASE_NOTE, note)
    console.replace_folder(tmp, args.out)


def verify(model: Path, source, stored) -> None:
    """Every name, shape and dtype is in the DCP and nothing else, and every tensor reads back bit for bit."""
    written = weights.open_source(model)
    if set(written.info) != set(stored):
        raise VerifyFailed(f"{len(stored)} tensors", f"{len(written.info)} in {model}", "run again; check the disk")
    for key, name in stored.items():
        if written.info[key] != source.info[name]:
            raise VerifyFailed(f"{key} {source.info[name]}", f"{written.info[key]} in {model}", "run again; check the disk")

    def check(item) -> bool:
        if isinstance(item, Path):  # the files go to the disk while their tensors are compared
            console.sync(item)
            return True
        a, b = source.tensor(stored[item]), written.tensor(item)
        return weights.same(a, b, a.dtype)

    items = [*model.iterdir(), *stored]
    for item, good in zip(items, weights.spread(check, items), strict=True):
        if not good:
            raise VerifyFailed(f"{item} bit for bit", f"other bytes in {model}", "run again; check the disk")
    console.ok("verify", f"{len(stored)} tensors read back bit for bit")


def main(argv=None) -> int:
    args = parse_args(argv)
    p = plan(args)
    if args.dry_run:
        return 0
    start = time.monotonic()
    if p["finished"]:
        console.ok("out", f"{args.out} is this base's DCP already")
    else:
        execute(args, p["source"], p["names"], p["note"])
    result = {"out": args.out, "tensors": p["note"]["tensors"], "bytes": p["note"]["bytes"], "seconds": round(time.monotonic() - start, 1)}
    if args.json:
        console.write_json(args.json, result)
    console.done(STAGE, **result)
    return 0


if __name__ == "__main__":
    raise SystemExit(console.run_stage(STAGE, main))
