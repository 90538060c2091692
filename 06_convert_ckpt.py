"""Turn a Cosmos3 checkpoint into a servable model_diffusers folder (or RLinf's full_weights.pt), streaming shard by shard.

Run:    python 06_convert_ckpt.py --src work/run/checkpoints/global_step_5000 --base work/models/Cosmos3-Nano --out work/policy/model_diffusers
Reads:  SRC: our global_step_N, a cosmos-framework or RLinf DCP, RLinf's full_weights.pt, a flat safetensors export, a diffusers folder;
        BASE: the diffusers folder that training began with (frozen tensors, vae/, text_tokenizer/, scheduler/)
Writes: OUT/model_index.json, OUT/transformer/ (bf16, split as the base is), OUT/{vae,text_tokenizer,scheduler}/, OUT/policy.json, OUT/stats.json, OUT/COMPLETE;
        with --to rlinf: the file OUT
Needs:  common/console.py, common/keys.py, common/libero.py, common/quantile.py, common/rot6d.py, common/weights.py, common/libero_stats_20fps.json;
        torch, safetensors
Fails:  exit 3: SRC or BASE is incomplete, or they do not belong together; exit 4: OUT exists; exit 5: what was written differs from SRC
Next:   python 07_read_tb.py work/run
"""

import argparse
import json
import math
import os
import shutil
import time
from pathlib import Path

from common import console, keys, quantile, weights
from common.console import Precondition, VerifyFailed
from common.libero import LIBERO, mosaic_canvas

STAGE = "06_convert_ckpt"
MARKS = ("policy.json", "model_index.json")  # what only an output of this stage has together
COMPONENTS = ("vae", "text_tokenizer", "scheduler")
# What RLinf's converter writes and SGLang expects; stock diffusers knows the class as Cosmos3OmniPipeline.
CLASS_NAME = "Cosmos3OmniDiffusersPipeline"


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False, formatter_class=console.HelpFormatter)
    parser.add_argument("--src", type=Path, required=True, help="checkpoint to convert")
    parser.add_argument("--base", type=Path, default=Path("work/models/Cosmos3-Nano"), help="diffusers folder of the base")
    parser.add_argument("--out", type=Path, required=True, help="model_diffusers folder to write; with --to rlinf, the .pt file")
    parser.add_argument("--weights", choices=["net", "ema"], default="net", help="the weights, or their moving average")
    parser.add_argument("--to", choices=["diffusers", "rlinf"], default="diffusers", help="what to write")
    parser.add_argument("--class-name", default=CLASS_NAME, help="_class_name in model_index.json; Cosmos3OmniPipeline for stock diffusers")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument("--json", type=Path, help="write the result as JSON to this file")
    return parser.parse_args(argv)


def recipe_of(src) -> tuple[dict, Path]:
    """(policy, stats file) that belong to a checkpoint: what our trainer left beside it, else the published LIBERO recipe, marked as assumed."""
    folder = src.path if src.path.is_dir() else src.path.parent
    ours = src.kind == "dcp" and len(keys.trained(src.net)) == len(src.net)  # no other checkpoint holds the trained half alone
    missing = [n for n in ("COMPLETE", "policy.json", "stats.json") if not (folder / n).is_file()]
    if ours and missing:
        raise Precondition(
            "a complete checkpoint of stage 05",
            f"no {', '.join(missing)} in {folder}",
            "convert another checkpoint, or copy the run's stats.json and policy.json there",
        )
    if (folder / "policy.json").is_file() and (folder / "stats.json").is_file():
        try:
            return json.loads((folder / "policy.json").read_text()), folder / "stats.json"
        except ValueError as error:
            raise Precondition("JSON in policy.json", f"{error} in {folder}", "copy the run's policy.json there again") from error
    stats = quantile.load_stats(LIBERO.stats_path, LIBERO.stats_block)
    console.warn("recipe", f"{src.path} says nothing about its recipe: policy.json will hold the published LIBERO one, marked as assumed")
    policy = {
        "assumed": "the published LIBERO recipe: this checkpoint says nothing about its own",
        "robot": LIBERO.describe(),
        "canvas": vars(mosaic_canvas(LIBERO)),
        "fps": LIBERO.fps,
        "stats": {"file": "stats.json", "block": stats.block, "sha256": stats.sha256},
    }
    return policy, stats.path


def identity(src) -> dict:
    """What tells one source from another without reading it: its place and the time at which it was written."""
    file = next((f for f in (src.path / ".metadata", src.path / weights.INDEX) if f.is_file()), src.path)
    return {"path": str(src.path.resolve()), "mtime_ns": file.stat().st_mtime_ns}


def equal_after_cast(a, a_name: str, b, b_name: str) -> bool:
    """Are two tensors of two sources bit-equal in bf16?"""
    import torch

    left, right = (o.tensor(n).to(torch.bfloat16).contiguous().view(torch.uint8) for o, n in ((a, a_name), (b, b_name)))
    return torch.equal(left, right)


def plan(args) -> dict:
    """Where every output tensor comes from. Reads metadata only. Raises Precondition or OutputExists."""
    src, base = weights.open_source(args.src), weights.open_source(args.base)
    if base.kind != "diffusers":
        raise Precondition("a diffusers folder as --base", f"{base.kind} at {base.path}", "pass the folder that 02_cache_models.py fetched")
    config = weights.read_config(base)
    sound = any(map(keys.is_sound, src.net))
    names = [k for k in keys.rename_table(config["num_hidden_layers"], sound) if k in base.net]
    trained = keys.trained(names)
    chosen = src.ema if args.weights == "ema" else src.net
    if args.weights == "ema" and not src.ema:
        raise Precondition("an EMA in the checkpoint", f"none among {len(src.net)} tensors of {src.path}", "pass --weights net")
    missing = [k for k in trained if k not in chosen]
    if missing:
        raise Precondition(
            f"{len(trained)} trained tensors ({args.weights})",
            f"{len(missing)} absent in {src.path}, first {missing[0]}",
            "pass a whole checkpoint",
        )
    # Frozen tensors: the source's own where it holds them (they are compared with the base afterwards), else the base's.
    origin = {k: (src, chosen[k]) if k in trained else (src, src.net[k]) if k in src.net else (base, base.net[k]) for k in names}
    wrong = [k for k, (o, n) in origin.items() if o.info[n][0] != base.info[base.net[k]][0]]
    if wrong:
        shapes = origin[wrong[0]][0].info[origin[wrong[0]][1]][0], base.info[base.net[wrong[0]]][0]
        raise Precondition(
            "the base's shapes",
            f"{len(wrong)} differ, first {wrong[0]}: {shapes[0]} against {shapes[1]}",
            "pass the base that this checkpoint was trained from",
        )
    policy, stats = recipe_of(src)
    fingerprint = weights.base_fingerprint(base)
    if policy.get("base", {}).get("fingerprint", fingerprint) != fingerprint:
        raise Precondition(
            f"base {policy['base']['fingerprint'][:12]} ({policy['base']['path']})",
            f"{fingerprint[:12]} at {args.base}",
            "pass the base that this checkpoint was trained from",
        )
    if args.weights == "ema":  # an average that never saw the base holds random frozen tensors; the norms tell
        stale = [
            k
            for k in names
            if k not in trained
            and len(base.info[base.net[k]][0]) == 1
            and k in src.ema
            and not equal_after_cast(src, src.ema[k], base, base.net[k])
        ]
        if stale:
            raise Precondition(
                "an EMA that began from the base", f"{len(stale)} frozen averages differ from it, first {stale[0]}", "pass --weights net"
            )
    if policy["stats"]["sha256"] != quantile.load_stats(stats, policy["stats"]["block"]).sha256:
        raise Precondition(
            f"stats {policy['stats']['sha256'][:12]}", f"another file at {stats}", "put the run's stats.json back beside the checkpoint"
        )
    nbytes = 2 * sum(math.prod(base.info[base.net[k]][0]) for k in names)
    console.plan("src", f"{src.path} ({src.kind}), {len(src.net)} weights, {len(src.ema)} averages")
    console.plan("base", f"{base.path}, fingerprint {fingerprint[:12]}")
    console.plan(
        "from src",
        f"{sum(o is src for o, _ in origin.values())} tensors ({args.weights}); from base: {sum(o is base for o, _ in origin.values())}; sound {'kept' if sound else 'left out'}",
    )
    console.plan("out", f"{args.out}, {len(names)} tensors, {console.human_bytes(nbytes)} in bf16, as {args.to}")
    policy = policy | {"weights": args.weights, "class_name": args.class_name, "source": identity(src)}
    finished = (
        args.to == "diffusers"
        and not args.force
        and (args.out / "COMPLETE").is_file()
        and console.read_json(args.out / "policy.json") == policy
    )
    if not finished:
        console.check_output(args.out, args.force, MARKS if args.to == "diffusers" else (), (args.base, args.src))
        console.need_disk(args.out, nbytes * (3 if args.to == "rlinf" and src.ema else 1), "the output")
    if args.to == "diffusers":
        absent = [c for c in COMPONENTS if not (args.base / c).is_dir()]
        if absent:
            raise Precondition(
                f"{', '.join(COMPONENTS)} in the base folder",
                f"no {', '.join(absent)} in {args.base}",
                "python 02_cache_models.py download",
            )
    return {
        "src": src,
        "base": base,
        "config": config,
        "names": names,
        "origin": origin,
        "sound": sound,
        "policy": policy,
        "stats": stats,
        "bytes": nbytes,
        "finished": finished,
    }


def tensor(p: dict, key: str):
    """The output tensor of a canonical key: bf16, contiguous. Raises VerifyFailed if it is not finite."""
    import torch

    origin, name = p["origin"][key]
    value = origin.tensor(name).to(torch.bfloat16).contiguous()
    if not torch.isfinite(value).all():
        raise VerifyFailed(f"finite weights in {key}", f"NaN or infinity in {origin.path}", "convert an earlier checkpoint")
    return value


def write_diffusers(args, p: dict) -> None:
    """Shard by shard, each with the tensors that the base keeps in the file of that name; the folder is renamed when whole."""
    from safetensors.torch import save_file

    tmp = args.out.with_name(args.out.name + ".tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    (tmp / "transformer").mkdir(parents=True)
    base = p["base"]
    shards: dict[str, list[str]] = {}
    for key in p["names"]:
        shards.setdefault(base.files[base.net[key]], []).append(key)
    for shard in sorted(shards):
        save_file({keys.to_diffusers(k): tensor(p, k) for k in shards[shard]}, tmp / "transformer" / shard, metadata={"format": "pt"})
        console.ok(shard, f"{len(shards[shard])} tensors")
    if (base.path / weights.INDEX).is_file():
        weight_map = {keys.to_diffusers(k): shard for shard, names in shards.items() for k in names}
        index = {"metadata": {"total_size": p["bytes"]}, "weight_map": dict(sorted(weight_map.items()))}
        (tmp / "transformer" / weights.INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    config = p["config"] if p["sound"] else p["config"] | {"sound_gen": False, "sound_dim": None}
    (tmp / "transformer/config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for component in COMPONENTS:
        shutil.copytree(args.base / component, tmp / component, copy_function=link_or_copy)
    index = json.loads((args.base / "model_index.json").read_text())
    index = {k: v for k, v in index.items() if k in (*COMPONENTS, "transformer", "_diffusers_version")} | {"_class_name": args.class_name}
    (tmp / "model_index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    shutil.copy(p["stats"], tmp / "stats.json")
    console.write_json(tmp / "policy.json", p["policy"])
    verify(tmp, p)
    (tmp / "COMPLETE").touch()
    console.replace_folder(tmp, args.out)


def link_or_copy(src: str, dst: str) -> str:
    """Hard link where the file system allows it (28 GiB stays 28 GiB), else copy. Links of a hub cache are followed."""
    try:
        os.link(os.path.realpath(src), dst)
    except OSError:
        shutil.copy2(src, dst)
    return dst


def verify(folder: Path, p: dict) -> None:
    """Names, shapes and dtypes of what was written; every tensor equal to its source after the cast; frozen ones equal to the base."""
    import torch

    written, trained = weights.open_source(folder), set(keys.trained(p["names"]))
    if set(written.net) != set(p["names"]):
        raise VerifyFailed(f"{len(p['names'])} tensors", f"{len(written.net)} in {folder}", "run again")
    drifted = []
    for key in p["names"]:
        value = written.tensor(written.net[key])
        if value.dtype != torch.bfloat16 or not torch.equal(value.view(torch.uint8), tensor(p, key).view(torch.uint8)):
            raise VerifyFailed(f"{key} equal to its source", f"other values in {folder}", "run again; check the disk")
        if key not in trained and not equal_after_cast(written, written.net[key], p["base"], p["base"].net[key]):
            drifted.append(key)
    if drifted:
        raise VerifyFailed(
            "frozen tensors equal to the base",
            f"{len(drifted)} differ, first {drifted[0]}",
            "pass the base that this checkpoint was trained from",
        )
    console.ok(
        "verify", f"{len(p['names'])} tensors equal their source; {len(p['names']) - len(trained)} frozen ones equal the base bit for bit"
    )


def write_rlinf(args, p: dict) -> None:
    """One torch.save of omni.net.K (bf16) and, where the source has averages, omni.net_ema.K (float32; frozen ones from the weights)."""
    import torch

    names = [k for k in p["names"] if not keys.is_sound(k)]
    state = {keys.spell(k, "rlinf"): tensor(p, k) for k in names}
    if p["src"].ema:
        for k in names:
            name = p["src"].ema.get(k)
            value = p["src"].tensor(name) if name else state[keys.spell(k, "rlinf")]
            state[keys.spell(k, "rlinf", ema=True)] = value.to(torch.float32)
    else:
        console.warn("ema", "the source holds none: the file has omni.net.* only, which RLinf's converter accepts")
    tmp = args.out.with_name(args.out.name + ".tmp")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, tmp)
    again = weights.open_source(tmp)
    if len(again.net) != len(names):
        raise VerifyFailed(f"{len(names)} tensors", f"{len(again.net)} in {tmp}", "run again")
    os.replace(tmp, args.out)


def main(argv=None) -> int:
    args = parse_args(argv)
    p = plan(args)
    if args.dry_run:
        return 0
    start = time.monotonic()
    if p["finished"]:
        console.ok("out", f"{args.out} is this policy already")
    else:
        (write_diffusers if args.to == "diffusers" else write_rlinf)(args, p)
    result = {"out": args.out, "tensors": len(p["names"]), "weights": args.weights, "seconds": round(time.monotonic() - start, 1)}
    if args.to == "diffusers":
        console.say(
            f"[ok] stock diffusers opens it with: Cosmos3OmniPipeline.from_pretrained({str(args.out)!r}, enable_safety_checker=False)"
        )
    if args.json:
        console.write_json(args.json, result)
    console.done(STAGE, **result)
    return 0


if __name__ == "__main__":
    raise SystemExit(console.run_stage(STAGE, main))
