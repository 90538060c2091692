"""LIBERO in LeRobot v3: fetch it, check it, measure its action statistics, and encode it once for training.

Run:    python 04_fetch_libero.py all    --data work/data --base work/models/Cosmos3-Nano --out work/cache     (fetch, check, encode)
        python 04_fetch_libero.py fetch  --data work/data
        python 04_fetch_libero.py check  --data work/data
        python 04_fetch_libero.py stats  --data work/data --out work/stats.json        (only for data other than NVIDIA's 20 fps set)
        python 04_fetch_libero.py encode --data work/data --base work/models/Cosmos3-Nano --out work/cache
Reads:  the hub (fetch); DATA/<suite>/{meta,data,videos}; BASE/{vae,transformer,text_tokenizer} (encode)
Writes: fetch: DATA/<suite>; stats: one JSON; encode: the cache that 05 trains from (manifest.json, <suite>/latents.bin, prompt_kv.safetensors, COMPLETE)
Needs:  common/console.py, common/cosmos3.py, common/libero.py, common/quantile.py, common/rot6d.py, common/weights.py, common/keys.py,
        common/libero_stats_20fps.json; torch, torchvision, diffusers, lerobot, pyarrow
Fails:  exit 3: a suite, the base or disk space is missing; exit 4: OUT exists; exit 5: check found defects
Next:   torchrun --nproc-per-node 8 05_train_fsdp2.py --base work/models/Cosmos3-Nano-DCP --cache work/cache --out work/run
"""

import argparse
import hashlib
import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np

from common import console, libero, quantile
from common.console import OutputExists, Precondition, VerifyFailed
from common.libero import LIBERO

STAGE = "04_fetch_libero"
REPO = "nvidia/LIBERO_LeRobot_v3"
DATA_BYTES = 4 * 2**30  # the four suites, about 4 GB by the guide
RANGE_SLACK = 1e-3  # float noise allowed beyond the legal range of an action
DEMO = Path(__file__).resolve().parent / "tests/data/libero_demo"  # 12 real simulator episodes, 3 a suite


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name, text):
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False, formatter_class=console.HelpFormatter)
        sub.add_argument("--data", type=Path, default=Path("work/data"), help="folder that holds the suites")
        sub.add_argument("--suites", nargs="+", default=list(LIBERO.suites), help="suite folders")
        sub.add_argument("--dry-run", action="store_true", help="print the plan and stop")
        sub.add_argument("--json", type=Path, help="write the result as JSON to this file")
        return sub

    def fetch_flags(sub):
        sub.add_argument("--repo", default=REPO, help="data set repository on the hub")
        sub.add_argument("--revision", default="main", help="branch, tag or full commit hash; the commit is recorded in fetch.json")
        sub.add_argument(
            "--endpoint", help="hub endpoint for this data set; HF_ENDPOINT is ignored here, since mirrors answer data sets with a 308"
        )
        sub.add_argument(
            "--tiny", action="store_true", help="lay out the 12 demonstration episodes of this repository instead of downloading"
        )

    def encode_flags(sub):
        sub.add_argument("--base", type=Path, default=Path("work/models/Cosmos3-Nano"), help="diffusers folder of nvidia/Cosmos3-Nano")
        sub.add_argument("--out", type=Path, default=Path("work/cache"), help="cache folder to write")
        sub.add_argument("--stats", type=Path, default=LIBERO.stats_path, help="action stats that training will normalize with")
        sub.add_argument("--stats-block", choices=quantile.BLOCKS, default=LIBERO.stats_block, help="block of the stats file")
        sub.add_argument("--stride", type=int, default=1, help="frames between the starts of two windows")
        sub.add_argument("--batch", type=int, default=8, help="windows per VAE call")
        sub.add_argument("--device", help="torch device; cuda if there is one")
        sub.add_argument(
            "--force", action="store_true", help="replace OUT if it exists, and start over if an unfinished one lies beside it"
        )

    fetch_flags(command("fetch", "download the suites"))
    command("check", "list every defect of the suites")
    stats = command("stats", "pooled action statistics of the training episodes")
    stats.add_argument("--out", type=Path, default=Path("work/stats.json"), help="stats file to write")
    stats.add_argument("--force", action="store_true", help="replace OUT if it exists")
    encode_flags(command("encode", "run the frozen networks once: windows to latents, prompts to keys and values"))
    both = command("all", "fetch, check and encode")
    fetch_flags(both)
    encode_flags(both)
    args = parser.parse_args(argv)
    if args.command in ("encode", "all") and min(args.stride, args.batch) < 1:
        parser.error("--stride and --batch are at least 1")
    return args


def suite_roots(args) -> list[Path]:
    """The folders of the suites asked for. A missing one is an error, never a smaller mix."""
    missing = [s for s in args.suites if not (args.data / s / "meta/info.json").is_file()]
    if missing:
        raise Precondition(
            f"suites {', '.join(args.suites)} in {args.data}",
            f"no {', '.join(missing)}",
            f"python 04_fetch_libero.py fetch --data {args.data}, or name fewer with --suites",
        )
    return [args.data / s for s in args.suites]


# ---------------------------------------------------------------- fetch


def fetched_before(args) -> bool:
    """Did an earlier fetch of this repository and revision finish with these suites? Then no network is needed."""
    note = console.read_json(args.data / "fetch.json") or {}
    return note.get("repo") == args.repo and args.revision in (note["asked"], note["revision"]) and set(args.suites) <= set(note["suites"])


def fetch(args) -> dict:
    console.plan("suites", " ".join(args.suites))
    console.plan("data", args.data)
    if args.tiny:
        console.plan("from", f"{DEMO} (demonstrations recorded in the simulator; nothing is downloaded)")
        if args.dry_run:
            return {}
        for suite in args.suites:
            place = args.data / suite
            if not (DEMO / suite).is_dir():
                raise Precondition("a demonstration suite", f"no {suite} in {DEMO}", f"choose from {', '.join(LIBERO.suites)}")
            if place.exists():
                console.ok(suite, "already there")
                continue
            tmp = args.data / f".{suite}.tmp"
            shutil.rmtree(tmp, ignore_errors=True)
            shutil.copytree(DEMO / suite, tmp)
            os.replace(tmp, place)
        note = {"repo": "tests/data/libero_demo", "revision": None, "suites": args.suites}
    elif fetched_before(args):
        console.ok("fetch", f"{args.repo} lies in {args.data} already (fetch.json); delete that file to ask the hub again")
        return {"data": args.data, "suites": len(args.suites)}
    else:
        # Read once, at import: a mirror for models answers data sets with a 308.
        mirror = os.environ.pop("HF_ENDPOINT", None)
        from huggingface_hub import HfApi, constants, snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

        endpoint = args.endpoint or constants.ENDPOINT
        if mirror and not args.endpoint:
            console.warn(
                "endpoint", f"HF_ENDPOINT={mirror} is ignored for the data set: mirrors answer data sets with 308; --endpoint overrides"
            )
        console.plan("from", f"{args.repo} at {args.revision}")
        console.need_disk(args.data, DATA_BYTES, "the four suites")
        if args.dry_run:
            return {}
        try:
            commit = HfApi(endpoint=endpoint).dataset_info(args.repo, revision=args.revision).sha
            snapshot_download(
                args.repo,
                repo_type="dataset",
                revision=commit,
                local_dir=args.data,
                allow_patterns=[f"{s}/*" for s in args.suites],
                endpoint=endpoint,
            )
        except (HfHubHTTPError, OfflineModeIsEnabled, OSError) as error:
            text = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            hint = (
                "a mirror answered 308: drop --endpoint, or name one that serves data sets"
                if "308" in str(error)
                else "check the network and HF_HUB_OFFLINE; run again, finished files are kept"
            )
            raise Precondition(f"{args.repo} from the hub", text, hint) from error
        note = {"repo": args.repo, "asked": args.revision, "revision": commit, "suites": args.suites}
    suite_roots(args)
    console.write_json(args.data / "fetch.json", note)
    return {"data": args.data, "suites": len(args.suites)}


# ---------------------------------------------------------------- check


def defects(root: Path) -> list[str]:
    """Everything wrong with one suite, each with its file, episode or frame."""
    from tqdm import tqdm

    found = []
    for file in sorted(p for p in root.rglob("*") if p.is_file()):
        with open(file, "rb") as f:
            head = f.read(64)
        if not head:
            found.append(f"{file}: empty")
        elif head.startswith(b"version https://git-lfs"):
            found.append(f"{file}: a Git LFS pointer, not the file")
        elif head.lstrip()[:5].lower() in (b"<!doc", b"<html"):
            found.append(f"{file}: an HTML page, not the file")
    try:
        info = libero.read_info(root)
    except Precondition as error:
        return [*found, str(error)]
    features = info.get("features", {})
    for camera in LIBERO.cameras:
        if features.get(camera, {}).get("dtype") != "video":
            found.append(f"{root}/meta/info.json: no video feature {camera}; it has {sorted(features)}")
    if list(features.get(LIBERO.action_key, {}).get("shape", [])) != [LIBERO.action_dim]:
        found.append(
            f"{root}/meta/info.json: action shape {features.get(LIBERO.action_key, {}).get('shape')}, expected [{LIBERO.action_dim}]"
        )
    if found:
        return found
    try:
        suite = libero.read_suite(root)
    except Precondition as error:
        return [str(error)]
    if suite.fps != LIBERO.fps:
        found.append(f"{root}: {suite.fps:g} fps, the built-in stats are for {LIBERO.fps:g}: make others with `stats`")
    if [row["episode_index"] for row in suite.episodes] != list(range(len(suite.episodes))):
        found.append(f"{root}/meta/episodes: episode_index is not 0..{len(suite.episodes) - 1}")
    if (info.get("total_episodes"), info.get("total_frames")) != (len(suite.episodes), len(suite.actions)):
        found.append(
            f"{root}/meta/info.json: {info.get('total_episodes')} episodes and {info.get('total_frames')} frames, the tables hold {len(suite.episodes)} and {len(suite.actions)}"
        )
    unknown = sorted(set(suite.task.tolist()) - set(suite.tasks))
    if unknown:
        found.append(f"{root}/meta/tasks.parquet: no task_index {unknown}")

    def where(frame):
        episode = int(np.searchsorted(suite.start, frame, "right")) - 1
        return f"episode {episode} frame {frame - suite.start[episode]}"

    checks = [(~np.isfinite(suite.actions).all(-1), "an action is not finite")]
    for i, (name, least, greatest) in enumerate(LIBERO.action_range):
        outside = (suite.actions[:, i] < least - RANGE_SLACK) | (suite.actions[:, i] > greatest + RANGE_SLACK)
        checks.append((outside, f"action channel {name} leaves [{least:g}, {greatest:g}]"))
    for bad, what in checks:
        if bad.any():
            found.append(f"{root}/data: {what}: {int(bad.sum())} frames, first {where(int(bad.argmax()))}")
    for e in tqdm(range(len(suite.episodes)), root.name, disable=not sys.stderr.isatty()):
        steps = np.diff(suite.timestamp[suite.start[e] : suite.start[e + 1]])
        if len(steps) and np.abs(steps - 1 / suite.fps).max() > 0.5 / suite.fps:
            found.append(
                f"{root}/data: episode {e}: timestamps do not advance by 1/{suite.fps:g} s, first after frame {int(np.abs(steps - 1 / suite.fps).argmax())}"
            )
        try:
            libero.episode_frames(suite, e)
        except Precondition as error:
            found.append(str(error))
    return found


def check(args) -> dict:
    roots = suite_roots(args)
    console.plan("suites", " ".join(map(str, roots)))
    if args.dry_run:
        return {}
    report = {}
    for root in roots:
        report[root.name] = defects(root)
        for text in report[root.name]:
            console.fail(root.name, text)
        if not report[root.name]:
            console.ok(root.name, "no defect: tables, actions and every frame of both cameras")
    total = sum(map(len, report.values()))
    if args.json and args.command == "check":
        console.write_json(args.json, report)
    if total:
        raise VerifyFailed("no defect", f"{total} in {args.data}", "fetch the files named above again")
    return {"data": args.data, "suites": len(roots), "defects": 0}


# ---------------------------------------------------------------- stats


def stats(args) -> dict:
    suites = [libero.read_suite(root) for root in suite_roots(args)]
    fps = {s.fps for s in suites}
    if len(fps) != 1:
        raise Precondition("one frame rate", f"{sorted(fps)} fps", "make stats for each group of suites with --suites")
    console.plan("out", args.out)
    console.check_output(args.out, args.force)
    if args.dry_run:
        return {}
    rows = []
    for s in suites:
        train, _ = libero.split_episodes(len(s.episodes))
        rows += [LIBERO.encode(s.actions[s.start[e] : s.start[e + 1]]) for e in train]
    table = quantile.pooled_stats(np.concatenate(rows), slice(*LIBERO.rotation), fps.pop())
    console.write_json(args.out, table | {"suites": args.suites, "split": "train", "source": "04_fetch_libero.py stats"})
    ours, theirs = quantile.load_stats(args.out), quantile.load_stats(LIBERO.stats_path, LIBERO.stats_block)
    console.say(f"{'channel':>8} {'q01':>10} {'q99':>10} {'built-in q01':>13} {'q99':>10}")
    for i, name in enumerate(LIBERO.encoded):
        moved = max(abs(ours.q01[i] - theirs.q01[i]), abs(ours.q99[i] - theirs.q99[i])) > 0.1 * (theirs.q99[i] - theirs.q01[i])
        console.say(
            f"{name:>8} {ours.q01[i]:10.4f} {ours.q99[i]:10.4f} {theirs.q01[i]:13.4f} {theirs.q99[i]:10.4f}{'  moved by more than a tenth of its range' if moved else ''}"
        )
    return {"out": args.out, "rows": table["count"], "sha256": ours.sha256[:12]}


# ---------------------------------------------------------------- encode


def prompt_table(suites, columns) -> tuple[list[str], list[dict]]:
    """All prompts that can occur, and for each suite where a (task, idle count) begins in that list.

    Prompt 0 is the empty one. A task may hold several wordings joined by " | ": they follow one another.
    """
    texts, places, first = [""], [], {}
    for suite, column in zip(suites, columns, strict=True):
        place = {}
        for task, idle in sorted(set(zip(column["task"].tolist(), column["idle"].tolist(), strict=True))):
            wordings = [w.strip() for w in suite.tasks[task].split(" | ")]
            prompts = tuple(libero.build_prompt(w, idle, suite.fps) for w in wordings)
            if prompts not in first:
                first[prompts] = len(texts)
                texts += prompts
            place[task, idle] = (first[prompts], len(prompts))
        places.append(place)
    return texts, places


def encode_prompts(texts, base, source, device, file: Path) -> list[int]:
    """Run the understanding tower over every prompt; write k.<id> and v.<id> [layers, tokens, kv heads, head dim] bf16. Returns the token counts."""
    import torch
    from safetensors.torch import save_file

    from common import cosmos3, weights

    config = weights.read_config(source)
    tower = cosmos3.UndTower(cosmos3.build_transformer(config)).to(torch.bfloat16)
    cosmos3.materialize(tower, device)
    weights.load_module(tower, source)
    tokenizer = libero.load_tokenizer(base / "text_tokenizer")
    tensors, lengths = {}, []
    for i, text in enumerate(texts):
        ids = libero.prompt_ids(tokenizer, text)
        if ids.max() >= config["vocab_size"]:
            raise Precondition(
                f"token ids below {config['vocab_size']}", f"{ids.max()}", "use the text_tokenizer/ that belongs to this base"
            )
        k, v = tower(torch.from_numpy(ids).to(device))
        tensors |= {f"k.{i}": k.cpu().contiguous(), f"v.{i}": v.cpu().contiguous()}
        lengths.append(len(ids))
    tmp = file.with_name(file.name + ".tmp")
    save_file(tensors, tmp)
    os.replace(tmp, file)
    return lengths


def load_vae(folder: Path, device):
    """The frozen VAE in bf16 and its latent mean and 1/std, bf16 [1, 48, 1, 1, 1]."""
    import torch
    from diffusers import AutoencoderKLWan

    vae = AutoencoderKLWan.from_pretrained(folder, torch_dtype=torch.bfloat16).to(device).eval().requires_grad_(False)
    mean, std = (
        torch.tensor(v, dtype=torch.bfloat16, device=device).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std)
    )
    return vae, mean, 1 / std


def encode_clips(vae, mean, inv_std, clips):
    """uint8 [B, 3, 17, 192, 320] on the VAE's device -> normalized latents bf16 [B, 48, 5, 10, 20] (posterior mean; the padding's rows are cropped)."""
    import torch

    rows, columns = libero.mosaic_canvas(LIBERO).latent_size
    with torch.no_grad():
        mu = vae.encode((clips.float() / 127.5 - 1).to(torch.bfloat16)).latent_dist.mean
        return ((mu - mean) * inv_std)[..., :rows, :columns].contiguous()


def plan_encode(args) -> dict:
    """What encode will do, all of it checked; writes nothing. `finished`: the cache at --out is the one asked for."""
    import torch

    from common import weights

    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    roots = suite_roots(args)
    suites = [libero.read_suite(root) for root in roots]
    normalizer = quantile.load_stats(args.stats, args.stats_block)
    for s in suites:
        normalizer.require_fps(s.fps)
    source = weights.open_source(args.base)
    if source.kind != "diffusers" or not (args.base / "vae").is_dir():
        raise Precondition(
            "a diffusers folder with vae/, transformer/ and text_tokenizer/",
            f"{args.base}",
            "pass --base the folder that 02_cache_models.py fetched",
        )
    columns = [libero.windows(s, LIBERO, args.stride) for s in suites]
    latent_shape = [48, 1 + LIBERO.chunk // libero.VAE_TEMPORAL, *libero.mosaic_canvas(LIBERO).latent_size]
    texts, places = prompt_table(suites, columns)
    counts = [len(c["start"]) for c in columns]
    nbytes = 2 * int(np.prod(latent_shape)) * sum(counts)
    manifest = {
        "version": libero.CACHE_VERSION,
        "base_fingerprint": weights.base_fingerprint(source),
        "vae_fingerprint": weights.folder_fingerprint(args.base / "vae"),
        "robot": LIBERO.describe(),
        "canvas": vars(libero.mosaic_canvas(LIBERO)),
        "latent_shape": latent_shape,
        "fps": suites[0].fps,
        "stride": args.stride,
        "stats": {"file": "stats.json", "block": normalizer.block, "sha256": normalizer.sha256},
        "prompts": texts,
        "suites": {
            s.name: {
                "episodes": len(s.episodes),
                "frames": len(s.actions),
                "actions_sha256": hashlib.sha256(s.actions.tobytes()).hexdigest(),
                "windows": n,
                "val_windows": int(c["val"].sum()),
                "val_episodes": libero.split_episodes(len(s.episodes))[1],
            }
            for s, n, c in zip(suites, counts, columns, strict=True)
        },
    }
    for s, n in zip(suites, counts, strict=True):
        console.plan(s.name, f"{len(s.episodes)} episodes, {len(s.actions)} frames, {n} windows")
    console.plan("prompts", f"{len(texts)} distinct, the empty one included")
    console.plan("stats", f"{normalizer.path} block {normalizer.block} sha256 {normalizer.sha256[:12]}")
    console.plan("latents", f"{console.human_bytes(nbytes)} on {device}")
    finished = (args.out / "COMPLETE").is_file() and not args.force and console.read_json(args.out / "manifest.json") == manifest
    part = args.out.with_name(args.out.name + ".partial")
    if not finished:
        console.check_output(args.out, args.force, ("manifest.json",), (args.base, args.data, *roots))
        console.need_disk(args.out, nbytes, "the latents")
    if not finished and part.exists() and console.read_json(part / "manifest.json") != manifest and not args.force:
        raise OutputExists("an unfinished cache of the same request", f"{part} of another one", "pass --force to start over, or delete it")
    return {
        "suites": suites,
        "columns": columns,
        "places": places,
        "texts": texts,
        "source": source,
        "normalizer": normalizer,
        "manifest": manifest,
        "device": device,
        "part": part,
        "finished": finished,
        "result": {"out": args.out, "windows": sum(counts), "prompts": len(texts), "bytes": nbytes},
    }


def encode(args, p=None) -> dict:
    p = p or plan_encode(args)
    if p["finished"]:
        console.ok("cache", f"{args.out} is this cache already")
    if args.dry_run or p["finished"]:
        return p["result"]
    part, manifest = p["part"], p["manifest"]
    start = time.monotonic()
    if args.force:
        shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True, exist_ok=True)
    console.write_json(part / "manifest.json", manifest)
    if not (part / "COMPLETE").is_file():
        lengths = encode_prompts(p["texts"], args.base, p["source"], p["device"], part / "prompt_kv.safetensors")
        console.ok("prompts", f"{len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens")
        vae = load_vae(args.base / "vae", p["device"])
        for s, column, place in zip(p["suites"], p["columns"], p["places"], strict=True):
            encode_suite(s, column, place, part / s.name, manifest["latent_shape"], vae, args.batch, p["device"])
        shutil.copy(p["normalizer"].path, part / "stats.json")
        check_cache(part, manifest)
        (part / "COMPLETE").touch()
    console.replace_folder(part, args.out)
    for log in args.out.glob("*/done.txt"):
        log.unlink()
    return p["result"] | {"seconds": round(time.monotonic() - start, 1)}


def encode_suite(suite, column, place, folder: Path, latent_shape, vae, batch: int, device) -> None:
    """Fill latents.bin episode by episode: each frame is decoded once, and an episode counts as done when its bytes are on disk."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from tqdm import tqdm

    folder.mkdir(exist_ok=True)
    n = len(column["start"])
    prompt, variants = (
        np.array([place[t, i] for t, i in zip(column["task"].tolist(), column["idle"].tolist(), strict=True)], np.int32).reshape(-1, 2).T
    )
    pq.write_table(pa.table({**column, "prompt": prompt, "variants": variants}), folder / "windows.parquet")
    np.save(folder / "actions.npy", suite.actions)
    file = folder / "latents.bin"
    if not file.exists() or file.stat().st_size != 2 * n * int(np.prod(latent_shape)):
        (folder / "done.txt").unlink(missing_ok=True)
        with open(file, "wb") as f:
            f.truncate(2 * n * int(np.prod(latent_shape)))
    out = np.memmap(file, np.uint16, "r+", shape=(n, *latent_shape))
    done = {int(line) for line in (folder / "done.txt").read_text().splitlines()} if (folder / "done.txt").exists() else set()
    if done:
        console.ok(suite.name, f"{len(done)} of {len(suite.episodes)} episodes were done before")
    with open(folder / "done.txt", "a") as log:
        for episode in tqdm([e for e in range(len(suite.episodes)) if e not in done], suite.name, disable=not sys.stderr.isatty()):
            rows = np.flatnonzero(column["episode"] == episode)
            frames = libero.episode_frames(suite, episode) if len(rows) else None
            for i in range(0, len(rows), batch):
                starts = column["start"][rows[i : i + batch]] - suite.start[episode]
                clips = torch.stack([frames[s : s + LIBERO.frames] for s in starts]).transpose(1, 2).to(device)
                out[rows[i : i + batch]] = encode_clips(*vae, clips).cpu().view(torch.uint16).numpy()
            out.flush()
            log.write(f"{episode}\n")
            log.flush()
            os.fsync(log.fileno())
    console.ok(suite.name, f"{n} windows of {len(suite.episodes)} episodes")


def check_cache(folder: Path, manifest: dict) -> None:
    """Every suite of a cache opens, and no latent of it is zero or not finite."""
    import torch

    for name in manifest["suites"]:
        suite = libero.open_cached_suite(folder, manifest, name)
        for i in range(len(suite.latents)):
            latent = torch.from_numpy(np.array(suite.latents[i])).view(torch.bfloat16)
            if not torch.isfinite(latent).all() or not latent.any():
                raise VerifyFailed(
                    "finite latents", f"window {i} of {name} is zero or not finite", "check the base's vae/, then encode again with --force"
                )
    console.ok("cache", "every latent is finite")


def everything(args) -> dict:
    """fetch, check, encode. A finished cache of the same request needs no second check, which decodes every frame."""
    result = fetch(args)
    if args.dry_run and not args.data.is_dir():
        console.plan("then", "check and encode, which need the data to be planned")
        return result
    p = plan_encode(args)
    return result | ({} if p["finished"] else check(args)) | encode(args, p)


def main(argv=None) -> int:
    args = parse_args(argv)
    result = {"fetch": fetch, "check": check, "stats": stats, "encode": encode, "all": everything}[args.command](args)
    if not args.dry_run:
        if args.json and args.command != "check":  # check writes its report itself, defects or not
            console.write_json(args.json, result)
        console.done(STAGE, **result)
    return 0


if __name__ == "__main__":
    raise SystemExit(console.run_stage(STAGE, main))
