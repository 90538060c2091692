"""Turn a Cosmos3 checkpoint into a servable model_diffusers folder, RLinf's full_weights.pt or a cosmos-framework DCP, tensor by tensor.

Run:    python 06_convert_ckpt.py --src work/run/checkpoints/global_step_5000 --base work/models/Cosmos3-Nano --out work/policy/model_diffusers
        python 06_convert_ckpt.py --verify work/policy/model_diffusers --src work/run/checkpoints/global_step_5000 --forward
        python 06_convert_ckpt.py --sizes
Reads:  SRC: our global_step_N, a cosmos-framework or RLinf DCP, RLinf's full_weights.pt, a flat safetensors export, a diffusers folder;
        BASE: the diffusers folder that training began with (frozen tensors, vae/, text_tokenizer/, scheduler/)
Writes: OUT/model_index.json, OUT/transformer/ (bf16, split as the base is), OUT/{vae,text_tokenizer,scheduler}/, OUT/policy.json, OUT/stats.json, OUT/COMPLETE;
        with --to rlinf: the file OUT; with --to cosmos-dcp: OUT/model/ (dtypes as in SRC), OUT/base.json
Needs:  common/console.py, common/cosmos3.py, common/keys.py, common/libero.py, common/quantile.py, common/rot6d.py, common/stock.py,
        common/weights.py, common/libero_stats_20fps.json; torch; with --forward: diffusers, transformers
Fails:  exit 3: SRC or BASE is incomplete, or they do not belong together; exit 4: OUT exists; exit 5: what was written differs from SRC or BASE
Next:   python 07_read_tb.py work/run

Every tensor that was written is read back: finite, equal to SRC after the cast, and to BASE where it is frozen. A killed run goes on
with the same command: shards that pass this check are kept.
"""

import argparse
import collections
import filecmp
import json
import math
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from common import console, keys, quantile, weights
from common.console import Precondition, VerifyFailed
from common.libero import LIBERO, build_prompt, load_tokenizer, mosaic_canvas, prompt_ids

STAGE = "06_convert_ckpt"
# What only an output of this stage has together: the folders that --force may replace.
MARKS = {"diffusers": ("policy.json", "model_index.json"), "rlinf": (), "cosmos-dcp": (weights.BASE_NOTE, "model/.metadata")}
COMPONENTS = ("vae", "text_tokenizer", "scheduler")
# The first is what RLinf's converter writes and SGLang and vLLM-Omni know; stock diffusers has the second.
CLASS_NAMES = ("Cosmos3OmniDiffusersPipeline", "Cosmos3OmniPipeline")
FORWARD_TOLERANCE = 1e-3  # of the output's spread, float32; the batched tower and stock diffusers order their sums differently


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False, formatter_class=console.HelpFormatter)
    parser.add_argument("--src", type=Path, help="checkpoint to convert")
    parser.add_argument("--base", type=Path, default=Path("work/models/Cosmos3-Nano"), help="diffusers folder of the base")
    parser.add_argument("--out", type=Path, help="model_diffusers or DCP folder to write; with --to rlinf, the .pt file")
    parser.add_argument("--weights", choices=["net", "ema"], help="the weights (net, the default), or their moving average")
    parser.add_argument("--to", choices=["diffusers", "rlinf", "cosmos-dcp"], default="diffusers", help="what to write")
    parser.add_argument("--class-name", choices=CLASS_NAMES, default=CLASS_NAMES[0], help="_class_name in model_index.json")
    parser.add_argument("--verify", type=Path, metavar="OUT", help="write nothing; hold an output of this stage against --src and --base")
    parser.add_argument(
        "--forward", action="store_true", help="also one seeded forward: stock diffusers on OUT against our tower on SRC (float32)"
    )
    parser.add_argument("--sizes", action="store_true", help="print what Cosmos3-Nano weighs, from its name table alone, and stop")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument("--json", type=console.json_file, help="write the result as JSON to this file")
    args = parser.parse_args(argv)
    if not args.sizes and not (args.src and bool(args.out) != bool(args.verify)):
        parser.error("--src with either --out or --verify is required (or --sizes alone)")
    if args.verify:
        args.to = "rlinf" if args.verify.is_file() else "cosmos-dcp" if (args.verify / "model/.metadata").is_file() else "diffusers"
        if args.weights is None:
            args.weights = ((args.to == "diffusers" and console.read_json(args.verify / "policy.json")) or {}).get("weights")
    if args.forward and args.to != "diffusers":
        parser.error("--forward opens a diffusers folder")
    args.weights = args.weights or "net"
    return args


class Out(NamedTuple):
    """One tensor of the output."""

    key: str  # canonical
    origin: weights.Source
    stored: str  # its name there
    dtype: str  # in the output, as torch prints it

    def shape(self) -> tuple[int, ...]:
        return self.origin.info[self.stored][0]

    def value(self):
        return self.origin.tensor(self.stored)


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
        "prompt": {"system_prompt": False, "template": build_prompt("TASK", 0, LIBERO.fps)},
        "stats": {"file": "stats.json", "block": stats.block, "sha256": stats.sha256},
    }
    return policy, stats.path


def identity(src) -> dict:
    """What tells one source from another without reading it: the time at which it was written. Its place is for people: it may be moved."""
    file = next((f for f in (src.path / ".metadata", src.path / weights.INDEX) if f.is_file()), src.path)
    return {"path": str(src.path.resolve()), "mtime_ns": file.stat().st_mtime_ns}


def inputs(args) -> dict:
    """Where every output tensor comes from. Reads metadata (and, where SRC has an EMA, the frozen norms). Raises Precondition."""
    import torch

    src, base = weights.open_source(args.src), weights.open_source(args.base)
    if base.kind != "diffusers":
        raise Precondition("a diffusers folder as --base", f"{base.kind} at {base.path}", "pass the folder that 02_cache_models.py fetched")
    config = weights.read_config(base)
    sound = any(map(keys.is_sound, src.net))
    names = [k for k in keys.rename_table(config["num_hidden_layers"], sound) if k in base.net]
    trained = keys.trained(names)
    if args.weights == "ema" and not src.ema:
        raise Precondition("an EMA in the checkpoint", f"none among {len(src.net)} tensors of {src.path}", "pass --weights net")
    chosen = src.ema if args.weights == "ema" else src.net
    missing = [k for k in trained if k not in chosen]
    if missing:
        raise Precondition(
            f"{len(trained)} trained tensors ({args.weights})",
            f"{len(missing)} absent in {src.path}: {', '.join(missing[:5])}",
            "pass a whole checkpoint",
        )
    # Frozen tensors: the source's own where it holds them (they are compared with the base afterwards), else the base's.
    frozen = {k: (src, src.net[k]) if k in src.net else (base, base.net[k]) for k in names if k not in set(trained)}
    net = {k: frozen.get(k) or (src, chosen[k]) for k in names}
    wrong = [
        f"{k} {o.info[n][0]} against {base.info[base.net[k]][0]}" for k, (o, n) in net.items() if o.info[n][0] != base.info[base.net[k]][0]
    ]
    if wrong:
        raise Precondition(
            "the base's shapes", f"{len(wrong)} others: {', '.join(wrong[:5])}", "pass the base that this checkpoint was trained from"
        )
    # An average that never saw the base holds random frozen tensors; the norms tell.
    norms = [k for k in frozen if len(base.info[base.net[k]][0]) == 1 and k in src.ema]
    stale = [k for k in norms if not weights.same(src.tensor(src.ema[k]), base.tensor(base.net[k]), torch.bfloat16)]
    if stale and args.weights == "ema":
        raise Precondition(
            "an EMA that began from the base", f"{len(stale)} frozen averages differ from it, first {stale[0]}", "pass --weights net"
        )
    tensors = {}
    if args.to == "diffusers":
        tensors = {keys.to_diffusers(k): Out(k, o, n, "torch.bfloat16") for k, (o, n) in net.items()}
    else:
        # RLinf keeps bf16 weights and fp32 averages, and has no sound; a DCP is cast by whoever loads it, so nothing is cast here.
        fixed = {"net": "torch.bfloat16", "net_ema": "torch.float32"} if args.to == "rlinf" else {}
        container = {"rlinf": "rlinf", "cosmos-dcp": "cosmos"}[args.to]
        averages = {}
        if stale:
            console.warn("ema", f"left out: {len(stale)} frozen averages of {src.path} differ from the base, so it never began from it")
        elif src.ema and args.weights == "net":  # --weights ema makes the averages the weights; a file with both says which is which
            averages = {k: (src, src.ema[k]) if k in src.ema else net[k] for k in names}
        for which, table in (("net", net), ("net_ema", averages)):
            for k, (o, n) in table.items():
                if args.to == "cosmos-dcp" or not keys.is_sound(k):
                    tensors[keys.spell(k, container, ema=which == "net_ema")] = Out(k, o, n, fixed.get(which) or o.info[n][1])
        if args.to == "cosmos-dcp":
            # cosmos-framework's HF export fills its vision tower from stock Qwen3-VL: the base's is taken
            tower = base if src.kind == "safetensors" else src
            tensors |= {"net." + k: Out(k, tower, n, tower.info[n][1]) for k, n in tower.vision.items() if src.vision}
    return {
        "src": src,
        "base": base,
        "config": config,
        "sound": sound,
        "trained": set(trained),
        "frozen": {k: base.net[k] for k in frozen} | base.vision,  # canonical -> name in the base, of what must equal it
        "tensors": tensors,
        "weights": args.weights,
    }


def plan(args) -> dict:
    """The inputs, the recipe that goes with them, and what will be written. Writes nothing. Raises Precondition or OutputExists."""
    p = inputs(args)
    src, base = p["src"], p["base"]
    policy, stats = recipe_of(src)
    fingerprint = weights.base_fingerprint(base)
    if policy.get("base", {}).get("fingerprint", fingerprint) != fingerprint:
        raise Precondition(
            f"base {policy['base']['fingerprint'][:12]} ({policy['base']['path']})",
            f"{fingerprint[:12]} at {args.base}",
            "pass the base that this checkpoint was trained from",
        )
    if policy["stats"]["sha256"] != quantile.load_stats(stats, policy["stats"]["block"]).sha256:
        raise Precondition(
            f"stats {policy['stats']['sha256'][:12]}", f"another file at {stats}", "put the run's stats.json back beside the checkpoint"
        )
    p["components"] = [*COMPONENTS]
    p["components"] += ["vision_encoder"] if src.vision and base.vision else []
    p["components"] += ["sound_tokenizer"] if p["sound"] and (args.base / "sound_tokenizer").is_dir() else []
    absent = [n for n in (*COMPONENTS, "model_index.json") if not (args.base / n).exists()]
    if args.to == "diffusers" and absent:
        raise Precondition(
            f"{', '.join(COMPONENTS)} and model_index.json in the base folder",
            f"no {', '.join(absent)} in {args.base}",
            "python 02_cache_models.py download",
        )
    nbytes = sum(math.prod(o.shape()) * weights.ITEM_BYTES[o.dtype] for o in p["tensors"].values())
    origins = collections.Counter(o.origin is src for o in p["tensors"].values())
    console.plan("src", f"{src.path} ({src.kind}), {len(src.net)} weights, {len(src.ema)} averages, {len(src.vision)} of a vision tower")
    console.plan("base", f"{base.path}, fingerprint {fingerprint[:12]}")
    sound = "kept" if p["sound"] and args.to != "rlinf" else "left out"
    console.plan("from src", f"{origins[True]} tensors ({args.weights}); from base: {origins[False]}; sound {sound}")
    console.plan("out", f"{args.verify or args.out}, {len(p['tensors'])} tensors, {console.human_bytes(nbytes)}, as {args.to}")
    p["policy"] = policy | {"weights": args.weights, "class_name": args.class_name, "source": identity(src)}
    p["stats"], p["bytes"], p["config"] = stats, nbytes, p["config"] | ({} if p["sound"] else {"sound_gen": False, "sound_dim": None})
    if args.verify:
        return p
    p["finished"] = (
        args.to == "diffusers"
        and not args.force
        and (args.out / "COMPLETE").is_file()
        and console.anywhere(console.read_json(args.out / "policy.json")) == console.anywhere(p["policy"])
    )
    if not p["finished"]:
        console.check_output(args.out, args.force, MARKS[args.to], (args.base, args.src))
        tmp = args.out.with_name(args.out.name + ".tmp")
        there = sum(f.stat().st_size for f in tmp.glob("transformer/*"))  # kept, or replaced
        console.need_disk(args.out, nbytes - there, "the output")
    return p


# ---------------------------------------------------------------- verification

# Every group of differences that should not be, and what mends it.
UNEXPECTED = {
    "absent": "convert again",
    "of another shape or dtype": "convert again",
    "not finite": "convert an earlier checkpoint",
    "other values than SRC": "convert again; check the disk",
    "frozen, but not the base's": "pass the base that this checkpoint was trained from",
    "not asked for": "delete what is left over from another checkpoint, or convert again",
    "files that differ from the base's or the plan's": "convert again",
}


def differences(p: dict, names, info: dict, tensor, parallel: bool = True) -> dict[str, list[str]]:
    """Group of UNEXPECTED -> names among `names`, for tensors that were written. `info`: name -> (shape, dtype); `tensor(name)` reads one."""
    import torch

    def groups(name) -> list[tuple[str, str]]:
        out, base = p["tensors"][name], p["base"]
        if name not in info:
            return [("absent", name)]
        if info[name] != (out.shape(), out.dtype):
            return [("of another shape or dtype", f"{name} {info[name][0]} {info[name][1]}")]
        value, frozen = tensor(name), p["frozen"].get(out.key)
        if frozen and base.info[frozen][1] == out.dtype:  # bit-equal to the base: then SRC, which it was read from, held the same
            finite, pinned = weights.finite_and_same(value, base.tensor(frozen))
            right = pinned or weights.same(value, out.value(), value.dtype)
        else:
            finite, right = weights.finite_and_same(value, out.value())
            pinned = not frozen or weights.same(value, base.tensor(frozen), torch.bfloat16)  # a float32 average of it
        checks = {"not finite": finite, "other values than SRC": right, "frozen, but not the base's": pinned}
        return [(group, name) for group, passed in checks.items() if not passed]

    found = collections.defaultdict(list)
    for differing in (weights.spread if parallel else map)(groups, names):
        for group, text in differing:
            found[group].append(text)
    return found


def judge(found: dict[str, list[str]]) -> None:
    """A [FAIL] line for each group; raises VerifyFailed if there is one."""
    for group, names in found.items():
        console.fail("unexpected", f"{len(names)} {group}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}")
    if found:
        summary = ", ".join(f"{len(names)} {group}" for group, names in found.items())
        raise VerifyFailed("an output that equals SRC and BASE", summary, "; ".join(dict.fromkeys(UNEXPECTED[g] for g in found)))


def say_expected(p: dict) -> None:
    """What differs between SRC, BASE and the output and should: one line each."""
    import torch

    src, base, outs = p["src"], p["base"], p["tensors"].values()
    used = {o.stored for o in outs if o.origin is src}
    trained = {o.key: o for o in reversed(outs) if o.key in p["trained"]}  # the weights come before the averages
    changed = sum(weights.spread(lambda k: not weights.same(trained[k].value(), base.tensor(base.net[k]), torch.bfloat16), trained))
    console.ok("expected", f"{changed} of {len(trained)} trained tensors differ from the base")
    for (old, new), n in collections.Counter((o.origin.info[o.stored][1], o.dtype) for o in outs).items():
        if old != new:
            console.ok("expected", f"{n} tensors cast from {old} to {new}")
    left = {
        "averages": [n for n in src.ema.values() if n not in used],
        "sound tensors": [n for k, n in src.net.items() if keys.is_sound(k) and n not in used],
        "weights, since the averages take their place": [n for k, n in src.net.items() if k in p["trained"] and n not in used],
        "optimizer and other entries": set(src.info) - set(src.net.values()) - set(src.ema.values()) - set(src.vision.values()),
    }
    for what, names in left.items():
        if names:
            console.ok("expected", f"{len(names)} {what} of SRC left out")
    if p["weights"] == "ema" and all(
        weights.same(src.tensor(src.net[k]), src.tensor(src.ema[k]), torch.bfloat16) for k in p["trained"] if k in src.net
    ):
        console.warn("ema", "every average equals its weight: saved after the first step, or never updated")


def vision_differs(p: dict) -> dict[str, list[str]]:
    """The vision tower of SRC is not written from it but copied from BASE: are they equal?"""
    src, base = p["src"], p["base"]
    if not src.vision or "vision_encoder" not in p["components"]:
        if src.vision:
            console.ok("expected", f"{len(src.vision)} tensors of a vision tower left out: BASE has none to hold them against")
        return {}
    differ = [
        k
        for k, n in src.vision.items()
        if k not in base.vision
        or src.info[n] != base.info[base.vision[k]]
        or not weights.same(src.tensor(n), base.tensor(base.vision[k]), base.tensor(base.vision[k]).dtype)
    ]
    if differ and src.kind == "safetensors":
        console.ok("expected", f"{len(differ)} tensors of the vision tower are stock Qwen3-VL's in an HF export; BASE's are taken")
        return {}
    return {"frozen, but not the base's": differ} if differ else {}


def verify_diffusers(folder: Path, p: dict, tensors: bool) -> None:
    """A model_diffusers folder: names, index, files, configuration and components, and, if asked, every tensor."""
    written = weights.open_source(folder)
    found = differences(p, p["tensors"], written.info, written.tensor) if tensors else {}
    extra = [n for n in written.files if n not in p["tensors"]]
    expected = {"transformer/config.json": p["config"]}
    if not tensors:  # just written; one that is verified later may name another class, or a place where SRC was then
        expected |= {"policy.json": p["policy"], "model_index.json": model_index(p)}
    files = [n for n, value in expected.items() if console.read_json(folder / n) != value]
    for component in p["components"]:
        for file in sorted(f for f in (p["base"].path.parent / component).rglob("*") if f.is_file()):
            name = file.relative_to(p["base"].path.parent)
            if not (folder / name).is_file() or not filecmp.cmp(file, folder / name, shallow=False):
                files.append(str(name))
    policy = console.read_json(folder / "policy.json") or {}
    sha = policy.get("stats", {}).get("sha256")
    if sha != p["policy"]["stats"]["sha256"] or quantile.load_stats(folder / "stats.json", policy["stats"]["block"]).sha256 != sha:
        files.append("stats.json")
    if not p["config"].get("action_gen"):
        files.append("transformer/config.json without action_gen (servers would drop the action heads)")
    groups = {"not asked for": extra, "files that differ from the base's or the plan's": files, **vision_differs(p)}
    judge(found | {g: n for g, n in groups.items() if n})


def verify_other(place: Path, p: dict) -> None:
    """A full_weights.pt or a DCP: nothing more and nothing less, and every tensor."""
    written = weights.open_source(place)
    extra = [n for n in written.info if n not in p["tensors"]]
    judge(differences(p, p["tensors"], written.info, written.tensor) | ({"not asked for": extra} if extra else {}))


def verify_and_sync(place: Path, p: dict) -> None:
    """verify_other of what was just written, while it goes to the disk."""
    with ThreadPoolExecutor(1) as pool:
        synced = pool.submit(lambda: [console.sync(f) for f in (place.iterdir() if place.is_dir() else [place])])
        verify_other(place, p)
        synced.result()


def say_verified(p: dict) -> None:
    outs = p["tensors"].values()
    census = ", ".join(f"{n} {dtype}" for dtype, n in collections.Counter(o.dtype for o in outs).items())
    frozen = sum(o.key in p["frozen"] for o in outs)
    console.ok("verify", f"{len(outs)} tensors equal SRC, {frozen} frozen ones the base, bit for bit; all finite; {census}")
    say_expected(p)


def forward(folder: Path, p: dict) -> None:
    """One seeded window through stock diffusers on the converted folder, and through our tower on SRC's own tensors, float32.

    Memory: the model once in float32 (56.5 GiB for Nano), on the GPU if there is one.
    """
    import torch
    from diffusers import Cosmos3OmniTransformer

    from common import cosmos3, stock

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    model = Cosmos3OmniTransformer.from_pretrained(folder, subfolder="transformer", dtype=torch.float32).to(device)
    tokenizer = load_tokenizer(folder / "text_tokenizer")
    ids = torch.as_tensor(prompt_ids(tokenizer, build_prompt("put the bowl on the plate", 0, LIBERO.fps))).to(device)
    g = torch.Generator().manual_seed(0)
    x, a = (torch.randn(shape, generator=g).to(device) for shape in ((1, 48, *stock.LATENT), (1, LIBERO.chunk, p["config"]["action_dim"])))
    a[..., LIBERO.raw_action_dim :] = 0
    frames, acts = (torch.zeros(1, n, dtype=torch.bool, device=device) for n in (stock.LATENT[0], LIBERO.chunk))
    frames[:, 0] = True
    with torch.no_grad():
        theirs = stock.stock_forward(model, ids, x, a[0], 0.7, frames[0], acts[0])
        for name, parameter in model.named_parameters():
            parameter.copy_(p["tensors"][name].value().to(torch.bfloat16))
        prompts = cosmos3.PromptKV.pad([cosmos3.UndTower(model)(ids)]).to(device)
        row = torch.zeros(1, dtype=torch.long, device=device)
        sigma = torch.tensor([0.7], device=device)
        ours = cosmos3.GenTower(model)(x, a, sigma, prompts, row, frames, acts, LIBERO.domain_id, LIBERO.fps)
    worst = max(((o[0] - t).abs().max() / t.std()).item() for o, t in zip(ours, theirs, strict=True))
    if not worst < FORWARD_TOLERANCE:
        raise VerifyFailed(
            f"one forward, equal within {FORWARD_TOLERANCE:g} of its spread", f"{worst:.2e}", "convert again; check the disk"
        )
    console.ok("forward", f"stock diffusers on the folder and our tower on SRC differ by {worst:.1e} of the output's spread ({device})")


# ---------------------------------------------------------------- writing


def model_index(p: dict) -> dict:
    index = json.loads((p["base"].path.parent / "model_index.json").read_text())
    keep = (*p["components"], "transformer", "_diffusers_version")
    return {k: v for k, v in index.items() if k in keep} | {"_class_name": p["policy"]["class_name"]}


def write_diffusers(args, p: dict) -> None:
    """Shard by shard, each with the tensors that the base keeps in the file of that name; the folder is renamed when whole."""
    tmp, base, tensors = args.out.with_name(args.out.name + ".tmp"), p["base"], p["tensors"]
    shards: dict[str, list[str]] = {}
    for name, out in tensors.items():
        shards.setdefault(base.files[base.net[out.key]], []).append(name)
    (tmp / "transformer").mkdir(parents=True, exist_ok=True)
    for left in [f for f in (*tmp.iterdir(), *(tmp / "transformer").iterdir()) if f != tmp / "transformer"]:
        if left.is_dir():
            shutil.rmtree(left)
        elif left.parent == tmp or left.name not in shards:  # only shards are worth keeping, and only if they pass
            left.unlink()

    def write(shard) -> tuple[dict, str]:
        """(differences, what happened) of one shard: written, unless an interrupted run left it whole."""
        file, names = tmp / "transformer" / shard, shards[shard]
        if file.is_file() and not shard_differences(file, names, p):
            return {}, ", kept from an interrupted run"
        weights.write_safetensors(file, {n: (tensors[n].shape(), tensors[n].dtype) for n in names}, lambda n: tensors[n].value())
        return shard_differences(file, names, p), ""

    for shard, (found, kept) in zip(sorted(shards), weights.spread(write, sorted(shards)), strict=True):
        judge(found)
        console.ok(shard, f"{len(shards[shard])} tensors{kept}")
    if (base.path / weights.INDEX).is_file():
        weight_map = {n: shard for shard, names in shards.items() for n in names}
        index = {"metadata": {"total_size": p["bytes"]}, "weight_map": dict(sorted(weight_map.items()))}
        (tmp / "transformer" / weights.INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    (tmp / "transformer/config.json").write_text(json.dumps(p["config"], indent=2, sort_keys=True) + "\n")
    for component in p["components"]:
        shutil.copytree(args.base / component, tmp / component, copy_function=link_or_copy)
    (tmp / "model_index.json").write_text(json.dumps(model_index(p), indent=2, sort_keys=True) + "\n")
    shutil.copy(p["stats"], tmp / "stats.json")
    console.write_json(tmp / "policy.json", p["policy"])
    verify_diffusers(tmp, p, tensors=False)  # the tensors were held against SRC and BASE shard by shard
    if args.forward:
        forward(tmp, p)
    (tmp / "COMPLETE").touch()
    console.replace_folder(tmp, args.out)


def shard_differences(file: Path, names: list[str], p: dict) -> dict[str, list[str]]:
    """`differences` of one safetensors file; a damaged one lacks all of its tensors."""
    try:
        table = weights.check_safetensors(file)
    except Precondition:
        return {"absent": names}
    found = differences(p, names, {n: t[:2] for n, t in table.items()}, lambda n: weights.mapped(file, *table[n]), parallel=False)
    extra = [n for n in table if n not in names]
    return found | ({"not asked for": extra} if extra else {})


def link_or_copy(src: str, dst: str) -> str:
    """Hard link where the file system allows it (28 GiB stays 28 GiB), else copy. Links of a hub cache are followed."""
    try:
        os.link(os.path.realpath(src), dst)
    except OSError:
        shutil.copy2(src, dst)
    return dst


def write_rlinf(args, p: dict) -> None:
    """One .pt file: omni.net.K (bf16) and, where the source has averages, omni.net_ema.K (float32; frozen ones from the weights)."""
    if not any("net_ema." in n for n in p["tensors"]):
        console.warn("ema", "the file has omni.net.* only, which RLinf's converter accepts")
    tmp = args.out.with_name(args.out.name + ".tmp")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    outs = p["tensors"]
    weights.write_pt(tmp, {n: (o.shape(), o.dtype) for n, o in outs.items()}, lambda n: outs[n].value())
    verify_and_sync(tmp, p)
    os.replace(tmp, args.out)


def write_dcp(args, p: dict) -> None:
    """A DCP as stage 03 writes it, of the trained model: net.K and, where the source has averages, net_ema.K."""
    tmp, outs = args.out.with_name(args.out.name + ".tmp"), p["tensors"]
    shutil.rmtree(tmp, ignore_errors=True)
    model = tmp / "model"
    weights.write_dcp(model, {n: (o.shape(), o.dtype) for n, o in outs.items()}, lambda n: outs[n].value())
    (model / "config.json").write_text(json.dumps(p["config"], indent=2, sort_keys=True) + "\n")
    if (args.base / "checkpoint.json").is_file():
        shutil.copy(args.base / "checkpoint.json", tmp / "checkpoint.json")
    verify_and_sync(model, p)
    fingerprint = weights.base_fingerprint(weights.open_source(model))
    note = {"fingerprint": fingerprint, "tensors": len(outs), "bytes": p["bytes"], **weights.versions()}
    console.write_json(tmp / weights.BASE_NOTE, note)
    console.replace_folder(tmp, args.out)


# ---------------------------------------------------------------- sizes


def sizes() -> dict:
    """{group: {tensors, parameters, bytes in bf16}} of Cosmos3-Nano, and the files that follow from them, in bytes."""
    shapes = keys.shapes(keys.NANO)
    trained = set(keys.trained(shapes))

    def group(key):
        if ".layers." in key:
            return "layers, generation half" if "moe_gen" in key else "layers, understanding half"
        head = keys.to_diffusers(key).split(".")[0]
        return "audio_proj_in, audio_proj_out, audio_modality_embed" if keys.is_sound(key) else head

    def total(names):
        parameters = sum(math.prod(shapes[k]) for k in names)
        return {"tensors": len(names), "parameters": parameters, "bytes": 2 * parameters}

    groups = {}
    for key in shapes:
        groups.setdefault(group(key), []).append(key)
    silent = [k for k in shapes if not keys.is_sound(k)]
    table = {g: total(names) for g, names in groups.items()} | {
        "all, with sound": total(shapes),
        "all, without sound (a LIBERO policy)": total(silent),
        "trained": total(trained),
        "frozen": total([k for k in silent if k not in trained]),
        "vision tower (vision_encoder/)": {
            "tensors": keys.NANO_VISION[0],
            "parameters": keys.NANO_VISION[1],
            "bytes": 2 * keys.NANO_VISION[1],
        },
    }
    n, t = table["all, without sound (a LIBERO policy)"]["parameters"], table["trained"]["parameters"]
    everything = table["all, with sound"]["bytes"]
    files = {
        "base as a DCP": everything,
        "base as a DCP, with the vision tower": everything + 2 * keys.NANO_VISION[1],
        "model_diffusers of a policy, transformer/": 2 * n,
        "RLinf full_weights.pt (bf16, and float32 averages)": 6 * n,
        "RLinf dcp_checkpoint (the same, and two bf16 moments)": 6 * n + 4 * t,
        "RLinf checkpoint (both)": 12 * n + 4 * t,
        "our global_step_N (weights, averages and two moments of the trained half, float32)": 16 * t,
        "our global_step_N with --ema off": 12 * t,
    }
    return {"groups": table, "files": files}


def print_sizes(table: dict) -> None:
    for name, row in table["groups"].items():
        console.say(f"[ok] {name:<52} {row['tensors']:>4} tensors {row['parameters']:>14,} parameters {row['bytes']:>14,} bytes in bf16")
    for name, nbytes in table["files"].items():
        console.say(f"[ok] {name:<90} {nbytes:>15,} bytes {nbytes / 2**30:>7.2f} GiB")


def main(argv=None) -> int:
    args = parse_args(argv)
    start = time.monotonic()
    if args.sizes:
        result = sizes()
        print_sizes(result)
        if args.json:
            console.write_json(args.json, result)
        console.done(STAGE, **result["groups"]["all, with sound"])
        return 0
    p = plan(args)
    if args.dry_run:
        return 0
    place = args.verify or args.out
    if args.verify:
        try:
            verify_diffusers(place, p, tensors=True) if args.to == "diffusers" else verify_other(place, p)
        except Precondition as error:  # the output itself is damaged
            raise VerifyFailed(error.expected, error.found, "convert again") from error
        say_verified(p)
        if args.forward:
            forward(place, p)
    elif p["finished"]:
        console.ok("out", f"{args.out} is this policy already")
    else:
        {"diffusers": write_diffusers, "rlinf": write_rlinf, "cosmos-dcp": write_dcp}[args.to](args, p)
        say_verified(p)
    result = {"out": place, "tensors": len(p["tensors"]), "weights": args.weights, "seconds": round(time.monotonic() - start, 1)}
    if args.to == "diffusers":
        console.say(f"[ok] stock diffusers opens it with: Cosmos3OmniPipeline.from_pretrained({str(place)!r}, enable_safety_checker=False)")
    if args.json:
        console.write_json(args.json, result)
    console.done(STAGE, **result)
    return 0


if __name__ == "__main__":
    raise SystemExit(console.run_stage(STAGE, main))
