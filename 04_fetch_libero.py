"""LIBERO in LeRobot v3: fetch it, check it, measure its action statistics, and encode it once for training.

Run:    python 04_fetch_libero.py all    --data work/data --base work/models/Cosmos3-Nano --out work/cache     (fetch, check, encode)
        python 04_fetch_libero.py fetch  --data work/data
        python 04_fetch_libero.py check  --data work/data --preview work/preview.png
        python 04_fetch_libero.py stats  --data work/data --out work/stats.json        (only for data other than NVIDIA's 20 fps set)
        torchrun --nproc-per-node 8 04_fetch_libero.py encode --data work/data --base work/models/Cosmos3-Nano --out work/cache
Reads:  the hub (fetch); DATA/<suite>/{meta,data,videos}; BASE/{vae,transformer,text_tokenizer} (encode)
Writes: fetch: DATA/<suite>, DATA/fetch.json; check: PREVIEW; stats: one JSON; encode: the cache that 05 trains from
        (manifest.json, <suite>/{latents.bin,windows.parquet,actions.npy}, prompt_kv.safetensors, stats.json, bad_frames.json, COMPLETE)
Needs:  common/console.py, common/cosmos3.py, common/defects.py, common/libero.py, common/quantile.py, common/rot6d.py, common/weights.py,
        common/keys.py, common/wan_vae.py, common/libero_stats_20fps.json; torch, torchvision, diffusers, lerobot, av, pyarrow, matplotlib
Fails:  exit 3: a suite, the base, the hub or disk space is missing; exit 4: OUT exists; exit 5: check found defects, or encode met them
Next:   torchrun --nproc-per-node 8 05_train_fsdp2.py --base work/models/Cosmos3-Nano-DCP --cache work/cache --out work/run
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np

from common import console, libero, quantile
from common.console import OutputExists, Precondition, VerifyFailed
from common.libero import LIBERO

STAGE = "04_fetch_libero"
REPO = "nvidia/LIBERO_LeRobot_v3"
DEMO = Path(__file__).resolve().parent / "tests/data/libero_demo"  # 12 real simulator episodes, 3 a suite
INSIDE = 1.1  # a normalized action beyond it lies outside the stats' quantiles by a tenth of their half range
SAY_EVERY = 30.0  # seconds between progress lines where there is no terminal for a bar
WARN_INSIDE, LEAST_INSIDE = 0.9, 0.5  # share of the steps that stats of this data would leave inside: 0.98


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name, text):
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False, formatter_class=console.HelpFormatter)
        sub.add_argument("--data", type=Path, default=Path("work/data"), help="folder that holds the suites")
        which = sub.add_mutually_exclusive_group()
        which.add_argument(
            "--data-type",
            choices=("libero_all", "libero_10", "auto"),
            default="libero_all",
            help="the four suites, libero_10 alone, or whichever of the two lies in DATA",
        )
        which.add_argument("--suites", nargs="+", help="suite folders by name instead, libero_90 for one")
        sub.add_argument("--dry-run", action="store_true", help="print the plan and stop")
        sub.add_argument("--json", type=console.json_file, help="write the result as JSON to this file")
        return sub

    def camera_flags(sub):
        sub.add_argument("--cameras", nargs=2, metavar=("LEFT", "RIGHT"), help="camera keys: third person, wrist; default: by info.json")

    def fetch_flags(sub):
        sub.add_argument("--repo", default=REPO, help="data set repository on the hub")
        sub.add_argument("--revision", default="main", help="branch, tag or full commit hash; the commit is recorded in fetch.json")
        sub.add_argument(
            "--endpoint", help="hub endpoint for this data set; HF_ENDPOINT is ignored here, since mirrors answer data sets with a 308"
        )
        sub.add_argument(
            "--tiny", action="store_true", help="lay out the 12 demonstration episodes of this repository instead of downloading"
        )

    def check_flags(sub):
        sub.add_argument("--fps", type=float, default=LIBERO.fps, help="frame rate that the data should have: that of the action stats")
        sub.add_argument("--preview", type=Path, help="draw one window as the model sees it to this PNG")

    def stats_flags(sub):
        sub.add_argument("--stats", type=Path, default=LIBERO.stats_path, help="action stats that training will normalize with")
        sub.add_argument("--stats-block", choices=quantile.BLOCKS, default=LIBERO.stats_block, help="block of the stats file")

    def bad_flags(sub):
        sub.add_argument(
            "--max-bad", type=int, default=0, help="undecodable frames to put up with; their windows are left out, never replaced"
        )

    def encode_flags(sub):
        sub.add_argument("--base", type=Path, default=Path("work/models/Cosmos3-Nano"), help="diffusers folder of nvidia/Cosmos3-Nano")
        sub.add_argument("--out", type=Path, default=Path("work/cache"), help="cache folder to write")
        sub.add_argument("--stride", type=int, default=1, help="frames between the starts of two windows")
        sub.add_argument("--batch", type=int, default=8, help="windows per VAE call")
        sub.add_argument("--device", help="torch device; cuda if there is one")
        sub.add_argument(
            "--force", action="store_true", help="replace OUT if it exists, and start over if an unfinished one lies beside it"
        )

    fetch_flags(command("fetch", "download the suites"))
    one = command("check", "list every defect of the suites")
    for flags in (camera_flags, check_flags, stats_flags, bad_flags):
        flags(one)
    one = command("stats", "pooled action statistics of the training episodes")
    one.add_argument("--out", type=Path, default=Path("work/stats.json"), help="stats file to write")
    one.add_argument("--force", action="store_true", help="replace OUT if it exists")
    one = command("encode", "run the frozen networks once: windows to latents, prompts to keys and values; torchrun shares the work")
    for flags in (camera_flags, stats_flags, bad_flags, encode_flags):
        flags(one)
    one = command("all", "fetch, check and encode, in one process")
    for flags in (fetch_flags, camera_flags, check_flags, stats_flags, bad_flags, encode_flags):
        flags(one)
    args = parser.parse_args(argv)
    if args.command in ("encode", "all") and min(args.stride, args.batch) < 1:
        parser.error("--stride and --batch are at least 1")
    if args.command != "encode" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        parser.error(f"{args.command} is one process; torchrun is for encode")
    return args


def suite_names(args) -> list[str]:
    """The suites asked for. `auto` says what it chose and why, and takes all four or libero_10, never another part of the four."""
    if args.suites:
        return args.suites
    if args.data_type != "auto" or args.command == "fetch":
        return ["libero_10"] if args.data_type == "libero_10" else list(LIBERO.suites)
    have = [s for s in LIBERO.suites if (args.data / s / "meta/info.json").is_file()]
    if have == list(LIBERO.suites):
        console.plan("data type", "libero_all, since the four suites are there")
    elif have == ["libero_10"]:
        console.plan("data type", f"libero_10, since it is the only suite in {args.data}")
    else:
        raise Precondition(
            "the four suites, or libero_10 alone, for --data-type auto",
            f"{', '.join(have) or 'none'} in {args.data}",
            "python 04_fetch_libero.py fetch, or say what to take with --suites",
        )
    return have


def suite_roots(args) -> list[Path]:
    """The folders of the suites asked for. A missing one is an error, never a smaller mix."""
    names = suite_names(args)
    missing = [s for s in names if not (args.data / s / "meta/info.json").is_file()]
    if missing:
        itself = (args.data / "meta/info.json").is_file()
        mend = f"{args.data} is a suite itself: pass --data {args.data.parent} --suites {args.data.name}"
        raise Precondition(
            f"suites {', '.join(names)} in {args.data}",
            f"no {', '.join(missing)}",
            mend
            if itself
            else f"python 04_fetch_libero.py fetch --data {args.data} --suites {' '.join(missing)}, or name fewer with --suites",
        )
    return [args.data / s for s in names]


def robot(args):
    """LIBERO with the cameras asked for; a suite's own info.json may still name them otherwise (libero.find_cameras)."""
    return replace(LIBERO, cameras=tuple(args.cameras)) if args.cameras else LIBERO


# ---------------------------------------------------------------- fetch


def fetch(args) -> dict:
    names = suite_names(args)
    console.plan("suites", " ".join(names))
    console.plan("data", args.data)
    return fetch_demo(args, names) if args.tiny else fetch_hub(args, names)


def fetch_demo(args, names) -> dict:
    """Lay the demonstration episodes out as a download would."""
    console.plan("from", f"{DEMO} (demonstrations recorded in the simulator; nothing is downloaded)")
    for suite in names:
        place = args.data / suite
        if not (DEMO / suite).is_dir():
            raise Precondition("a demonstration suite", f"no {suite} in {DEMO}", f"choose from {', '.join(LIBERO.suites)}")
        if place.exists():
            console.ok(suite, "already there")
        elif not args.dry_run:
            tmp = args.data / f".{suite}.tmp"
            shutil.rmtree(tmp, ignore_errors=True)
            shutil.copytree(DEMO / suite, tmp)
            os.replace(tmp, place)
    if not args.dry_run:
        console.write_json(args.data / "fetch.json", {"repo": "tests/data/libero_demo", "revision": None, "suites": names, "files": {}})
    return {"data": args.data, "suites": len(names)}


def absent(folder: Path, files: dict[str, int]) -> list[str]:
    """The files that are not in `folder` with their size in bytes."""
    return [f for f, size in files.items() if not (folder / f).is_file() or (folder / f).stat().st_size != size]


def fetch_hub(args, names) -> dict:
    """Download the suites at one commit. fetch.json is written when every file has the size that the hub lists."""
    note = console.read_json(args.data / "fetch.json")
    revision = args.revision
    if note:
        if note["repo"] != args.repo or args.revision not in (note.get("asked"), note["revision"]):
            raise OutputExists(
                f"{args.repo} at {args.revision}, or nothing, in {args.data}",
                f"{note['repo']} at {note['revision']} (fetch.json)",
                "pass another --data: suites of two revisions must not mix",
            )
        revision = note["revision"]  # a branch may have moved on; what is here has not
        if set(names) <= set(note["suites"]) and not absent(args.data, note["files"]):
            console.ok("fetch", f"{args.repo} at {revision[:12]} is complete in {args.data}")
            return {"data": args.data, "suites": len(names), "revision": revision}
    mirror = os.environ.pop("HF_ENDPOINT", None)  # huggingface_hub reads it once, at import
    import httpx
    from huggingface_hub import HfApi, constants, snapshot_download

    endpoint = args.endpoint or constants.ENDPOINT
    if mirror and not args.endpoint:
        console.warn(
            "endpoint", f"HF_ENDPOINT={mirror} is ignored for the data set: mirrors answer data sets with 308; --endpoint overrides"
        )
    console.plan("from", f"{args.repo} at {revision}")
    try:
        if args.endpoint:
            answer = httpx.get(f"{endpoint}/api/datasets/{args.repo}", follow_redirects=False, timeout=30)
            if answer.status_code == 308:
                raise Precondition(
                    "an endpoint that serves data sets",
                    f"{endpoint} answers 308 and points to {answer.headers.get('location')}",
                    "it mirrors models only: drop --endpoint to ask the hub itself",
                )
        info = HfApi(endpoint=endpoint).dataset_info(args.repo, revision=revision, files_metadata=True)
        files = {s.rfilename: s.size for s in info.siblings if s.rfilename.split("/")[0] in names}
        there = sorted({f.rfilename.split("/")[0] for f in info.siblings if f.rfilename.endswith("meta/info.json")})
        if not set(names) <= set(there):
            raise Precondition(
                f"suites {', '.join(names)} in {args.repo}", f"it has {', '.join(there) or 'none'}", "name others with --suites"
            )
        todo = absent(args.data, files)
        nbytes = sum(files[f] for f in todo)
        console.plan("commit", info.sha)
        console.plan(
            "files", f"{len(files)} of {console.human_bytes(sum(files.values()))}; {len(todo)} of {console.human_bytes(nbytes)} to fetch"
        )
        console.need_disk(args.data, nbytes, "the files still to fetch")
        if args.dry_run:
            return {}
        snapshot_download(
            args.repo,
            repo_type="dataset",
            revision=info.sha,
            local_dir=args.data,
            allow_patterns=[f"{s}/*" for s in names],
            endpoint=endpoint,
        )
    except (OSError, httpx.HTTPError) as error:  # the hub's own errors are among them
        text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        mend = "check the network and HF_HUB_OFFLINE; run again, finished files are kept"
        raise Precondition(f"{args.repo} from {endpoint}", text, mend) from error
    todo = absent(args.data, files)
    if todo:
        raise Precondition(
            f"{len(files)} files with the sizes that the hub lists",
            f"{len(todo)} absent or cut, the first {todo[0]}",
            "run again; finished files are kept",
        )
    old = note or {"suites": [], "files": {}}
    suites = sorted({*old["suites"], *names})
    console.write_json(
        args.data / "fetch.json",
        {"repo": args.repo, "asked": args.revision, "revision": info.sha, "suites": suites, "files": old["files"] | files},
    )
    return {"data": args.data, "suites": len(names), "revision": info.sha}


# ---------------------------------------------------------------- check


def check(args) -> dict:
    from common import defects

    roots = suite_roots(args)
    console.plan("suites", " ".join(map(str, roots)))
    if args.dry_run:
        return {}
    reports = [defects.inspect(root, robot(args), args.fps) for root in roots]
    lost = sum(r.lost for r in reports)
    wrong = [d for r in reports for d in r.defects if not (d.lost and lost <= args.max_bad)]
    for report in reports:
        for defect in report.found:
            (console.fail if defect in wrong else console.warn)(report.name, defect)
        counts = f"{report.episodes} episodes, {report.frames} frames at {report.fps} fps, {report.windows} windows"
        if not report.defects:
            console.ok(report.name, f"{counts}; tables, actions and every frame of both cameras")
        else:
            console.say(f"{report.name}: {counts}, {len(report.defects)} defects")
    if args.json and args.command == "check":
        console.write_json(args.json, {r.name: r.as_json() for r in reports})
    if args.preview and not any(r.defects for r in reports[:1]):
        preview(libero.read_suite(roots[0], robot(args)), quantile.load_stats(args.stats, args.stats_block), args.preview)
        console.ok("preview", args.preview)
    if wrong:
        raise VerifyFailed("no defect", f"{len(wrong)} in {args.data}", "each line above ends with what mends it")
    return {"data": args.data, "suites": len(roots), "defects": 0}


def preview(suite, normalizer, file: Path) -> None:
    """Draw the window whose actions vary most: its 17 canvases, its prompt, its actions as stored and as the model sees them."""
    import textwrap

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    column = libero.windows(suite)
    chunks = normalizer.normalize(suite.robot.encode(suite.actions))[column["start"][:, None] + np.arange(suite.robot.chunk)]
    i = int(chunks.std(1).sum(-1).argmax())
    episode, start = int(column["episode"][i]), int(column["start"][i])
    first = start - int(suite.start[episode])
    frames = libero.episode_frames(suite, episode)[first : first + suite.robot.frames].permute(0, 2, 3, 1).numpy()
    actions = suite.actions[start : start + suite.robot.chunk]
    encoded = suite.robot.encode(actions)
    prompt = libero.build_prompt(suite.wordings(column["task"][i])[0], int(column["idle"][i]), suite.fps, suite.robot)

    fig = plt.figure(figsize=(16, 12), constrained_layout=True)
    strip, text, plots = fig.subfigures(3, 1, height_ratios=[6, 1, 4.2])
    canvas = libero.mosaic_canvas(suite.robot)
    title = f"{suite.name}, episode {episode}, frames {first} to {first + suite.robot.chunk} of {suite.fps:g} fps: canvas {canvas.width} x {canvas.height}"
    strip.suptitle(
        f"{title}, left {suite.robot.cameras[0]}, right {suite.robot.cameras[1]}; rows below {canvas.content_height} are padding"
    )
    cells = strip.subplots(3, 6)
    for cell in cells.flat:
        cell.axis("off")
    for k, (cell, frame) in enumerate(zip(cells.flat, frames, strict=False)):
        cell.imshow(frame)
        cell.set_title(f"{k}{' (given)' if k == 0 else ''}", fontsize=9)
    text.text(0.01, 0.5, "\n".join(textwrap.wrap(prompt, 190)), family="monospace", fontsize=8.5, va="center")
    left, right = plots.subplots(1, 2)
    step = np.arange(suite.robot.chunk)
    for values, names, axis, label in (
        (actions, [n for n, *_ in suite.robot.action_range], left, f"{suite.robot.action_key} as stored, {suite.robot.action_dim}-D"),
        (normalizer.normalize(encoded), suite.robot.encoded, right, f"as the model sees it, {suite.robot.raw_action_dim}-D, normalized"),
    ):
        for k, name in enumerate(names):
            place = sorted({n for n, *_ in suite.robot.action_range} | set(suite.robot.encoded)).index(name)
            axis.plot(step, values[:, k], marker=".", label=name, color=plt.get_cmap("tab20")(place))
        axis.set(title=label, xlabel="step of the chunk", xticks=step)
        axis.grid(alpha=0.3)
        axis.legend(ncols=2, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    right.axhspan(-1, 1, color="0.93", zorder=0, label="q01..q99")
    file.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(file, dpi=80)
    plt.close(fig)


# ---------------------------------------------------------------- stats


def stats(args) -> dict:
    roots = suite_roots(args)
    infos = [libero.read_info(root) for root in roots]
    fps = {float(info["fps"]) for info in infos}
    if len(fps) != 1:
        raise Precondition("one frame rate", f"{sorted(fps)} fps", "make stats for each group of suites with --suites")
    console.plan("out", args.out)
    console.check_output(args.out, args.force)
    if args.dry_run:
        return {}
    pool = quantile.Pool()
    for root, info in zip(roots, infos, strict=True):
        before = pool.count
        expected = pool_suite(pool, root)
        frames = info.get("total_frames")
        if pool.count - before != expected[0] or expected[1] != frames:
            found = f"{pool.count - before} rows of the training episodes in {root}/data, {expected[0]} by meta/episodes; {expected[1]} frames in all, {frames} by info.json"
            raise Precondition("as many rows as the metadata say", found, "python 04_fetch_libero.py check, and mend what it lists")
    table = pool.table(slice(*LIBERO.rotation), fps.pop())
    console.write_json(args.out, table | {"suites": [r.name for r in roots], "split": "train", "source": "04_fetch_libero.py stats"})
    ours, theirs = quantile.load_stats(args.out), quantile.load_stats(LIBERO.stats_path, LIBERO.stats_block)
    console.say(f"{'channel':>8} {'q01':>10} {'q99':>10} {'built-in q01':>13} {'q99':>10}")
    for i, name in enumerate(LIBERO.encoded):
        moved = max(abs(ours.q01[i] - theirs.q01[i]), abs(ours.q99[i] - theirs.q99[i])) > 0.1 * (theirs.q99[i] - theirs.q01[i])
        console.say(
            f"{name:>8} {ours.q01[i]:10.4f} {ours.q99[i]:10.4f} {theirs.q01[i]:13.4f} {theirs.q99[i]:10.4f}{'  moved by more than a tenth of its range' if moved else ''}"
        )
    if table["quantiles_of"] < table["count"]:
        console.warn("quantiles", f"of a uniform sample of {table['quantiles_of']} of the {table['count']} rows")
    return {"out": args.out, "rows": table["count"], "sha256": ours.sha256[:12]}


def pool_suite(pool, root: Path) -> tuple[int, int]:
    """Add the encoded actions of a suite's training episodes, file by file. -> (their rows, all rows) by meta/episodes."""
    files = sorted((root / "meta/episodes").rglob("*.parquet"))
    lengths = dict(row.values() for f in files for row in libero.read_table(f, ["episode_index", "length"]).to_pylist())
    train, _ = libero.split_episodes(len(lengths))
    for file in sorted((root / "data").rglob("*.parquet")):
        table = libero.read_table(file, ["episode_index", "frame_index", LIBERO.action_key])
        episode, frame = table["episode_index"].to_numpy(), table["frame_index"].to_numpy()
        rows = np.flatnonzero(np.isin(episode, train))
        actions = np.array(table[LIBERO.action_key].to_pylist(), np.float32).reshape(len(table), -1)[rows]
        bad = np.flatnonzero(~np.isfinite(actions).all(-1))
        if len(bad):
            found = f"{len(bad)} row(s) that are not, the first is episode {episode[rows[bad[0]]]} frame {frame[rows[bad[0]]]} of {file}"
            raise Precondition("finite actions", found, "python 04_fetch_libero.py check, and mend what it lists")
        pool.add(LIBERO.encode(actions))
    return sum(lengths[e] for e in train), sum(lengths.values())


# ---------------------------------------------------------------- encode


def prompt_table(suites, columns) -> tuple[list[str], list[dict]]:
    """All prompts that can occur, and for each suite where a (task, idle count) begins in that list.

    Prompt 0 is the empty one. A task may hold several wordings joined by " | ": they follow one another.
    """
    texts, places, first = [""], [], {}
    for suite, column in zip(suites, columns, strict=True):
        place = {}
        for task, idle in sorted(set(zip(column["task"].tolist(), column["idle"].tolist(), strict=True))):
            prompts = tuple(libero.build_prompt(w, idle, suite.fps, suite.robot) for w in suite.wordings(task))
            if prompts not in first:
                first[prompts] = len(texts)
                texts += prompts
            place[task, idle] = (first[prompts], len(prompts))
        places.append(place)
    return texts, places


def encode_prompts(ids: list[np.ndarray], source, device, file: Path) -> None:
    """Run the understanding tower over the token ids of every prompt; write k.<i> and v.<i> [layers, tokens, kv heads, head dim] bf16."""
    import torch
    from safetensors.torch import save_file

    from common import cosmos3, weights

    tower = cosmos3.UndTower(cosmos3.build_transformer(weights.read_config(source))).to(torch.bfloat16)
    cosmos3.materialize(tower, device)
    weights.load_module(tower, source)
    tensors = {}
    for i, one in enumerate(ids):
        k, v = tower(torch.from_numpy(one).to(device))
        tensors |= {f"k.{i}": k.cpu().contiguous(), f"v.{i}": v.cpu().contiguous()}
    tmp = file.with_name(file.name + ".tmp")
    save_file(tensors, tmp)
    os.replace(tmp, file)


def stats_fit(normalizer, suites, columns) -> None:
    """Do the stats belong to these actions? Warns about a channel that leaves their range often; stops when one mostly does."""
    train = [s.actions[np.unique(c["start"][~c["val"], None] + np.arange(s.robot.chunk))] for s, c in zip(suites, columns, strict=True)]
    x = normalizer.normalize(LIBERO.encode(np.concatenate(train).astype(np.float64)))
    inside = (np.abs(x) <= INSIDE).mean(0)
    spread = np.ptp(np.quantile(x, quantile.QUANTILES, axis=0), axis=0) / 2
    for i, name in enumerate(LIBERO.encoded):
        text = f"{inside[i]:.0%} of the {name} steps lie within the stats' range and fill {spread[i]:.0%} of it; stats of this data give 98% and 100%"
        mend = "python 04_fetch_libero.py stats, then --stats"
        if inside[i] < LEAST_INSIDE:
            raise Precondition("action stats of this data", f"{normalizer.path}: {text}", mend)
        if inside[i] < WARN_INSIDE or spread[i] < 0.1:
            console.warn("stats", f"{text}; to mend: {mend}")


def plan_encode(args) -> dict:
    """What encode will do, all of it checked; writes nothing. `finished`: the cache at --out is the one asked for."""
    import torch

    from common import weights

    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(args.device or (f"cuda:{local}" if torch.cuda.is_available() else "cpu"))
    roots = suite_roots(args)
    suites = [libero.read_suite(root, robot(args)) for root in roots]
    if len({(s.fps, s.robot.cameras) for s in suites}) > 1:
        seen = "; ".join(f"{s.name}: {s.fps:g} fps, {', '.join(s.robot.cameras)}" for s in suites)
        raise Precondition("one frame rate and one set of camera keys", seen, "encode them apart with --suites")
    normalizer = quantile.load_stats(args.stats, args.stats_block)
    normalizer.require_fps(suites[0].fps)
    source = weights.open_source(args.base)
    if source.kind != "diffusers" or not (args.base / "vae").is_dir():
        raise Precondition(
            "a diffusers folder with vae/, transformer/ and text_tokenizer/",
            f"{args.base}",
            "pass --base the folder that 02_cache_models.py fetched",
        )
    columns = [libero.windows(s, args.stride) for s in suites]
    empty = [s.name for s, c in zip(suites, columns, strict=True) if not len(c["start"])]
    if empty:
        raise Precondition(
            f"an episode of {LIBERO.frames} frames in every suite", f"none in {', '.join(empty)}", "leave it out with --suites"
        )
    canvas = libero.mosaic_canvas(suites[0].robot)
    latent_shape = [48, 1 + LIBERO.chunk // libero.VAE_TEMPORAL, *canvas.latent_size]
    texts, places = prompt_table(suites, columns)
    config, tokenizer = weights.read_config(source), libero.load_tokenizer(args.base / "text_tokenizer")
    ids = [libero.prompt_ids(tokenizer, text) for text in texts]
    if max(i.max() for i in ids) >= config["vocab_size"]:
        raise Precondition(
            f"token ids below {config['vocab_size']}", f"{max(i.max() for i in ids)}", "use the text_tokenizer/ that belongs to this base"
        )
    counts = [len(c["start"]) for c in columns]
    latent_bytes = 2 * int(np.prod(latent_shape))
    prompt_bytes = 4 * sum(map(len, ids)) * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    manifest = {
        "version": libero.CACHE_VERSION,
        "base_fingerprint": weights.base_fingerprint(source),
        "vae_fingerprint": weights.folder_fingerprint(args.base / "vae"),
        "robot": suites[0].robot.describe(),
        "canvas": vars(canvas),
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
    console.plan("cameras", f"{suites[0].robot.cameras[0]} left, {suites[0].robot.cameras[1]} right; {suites[0].fps:g} fps")
    console.plan("prompts", f"{len(texts)} distinct of {min(map(len, ids))} to {max(map(len, ids))} tokens, the empty one included")
    console.plan("stats", f"{normalizer.path} block {normalizer.block} sha256 {normalizer.sha256[:12]}")
    console.plan("cache", f"{console.human_bytes(latent_bytes * sum(counts))} of latents, {console.human_bytes(prompt_bytes)} of prompts")
    finished = (args.out / "COMPLETE").is_file() and not args.force and console.read_json(args.out / "manifest.json") == manifest
    part = args.out.with_name(args.out.name + ".partial")
    if not finished:
        stats_fit(normalizer, suites, columns)
        console.check_output(args.out, args.force, ("manifest.json",), (args.base, args.data, *roots))
        begun = part.is_dir() and {f.name for f in part.iterdir()} - {"manifest.json.tmp"}  # a run killed before its manifest holds no work
        if begun and console.read_json(part / "manifest.json") != manifest and not args.force:
            raise OutputExists(
                "an unfinished cache of the same request", f"{part} of another one", "pass --force to start over, or delete it"
            )
        there = 0 if args.force else sum(512 * f.stat().st_blocks for f in part.rglob("*") if f.is_file())
        console.need_disk(args.out, latent_bytes * sum(counts) + prompt_bytes - there, "the latents and prompts")
    return {
        "suites": suites,
        "columns": columns,
        "places": places,
        "ids": ids,
        "source": source,
        "normalizer": normalizer,
        "manifest": manifest,
        "device": device,
        "part": part,
        "finished": finished,
        "result": {"out": args.out, "windows": sum(counts), "prompts": len(texts), "bytes": latent_bytes * sum(counts)},
    }


def encode(args, p=None) -> dict:
    """Encode what is not done yet. Under torchrun the ranks share the episodes; rank 0 lays the files out before and closes them after."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    barrier = lambda: None  # noqa: E731
    if world > 1:
        import torch.distributed as dist

        dist.init_process_group("gloo", timeout=timedelta(days=2))
        barrier = dist.barrier
    if rank:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  one voice is enough
        barrier()
    p = p or plan_encode(args)
    start = time.monotonic()
    work = not (args.dry_run or p["finished"])
    if rank == 0:
        if p["finished"]:
            console.ok("cache", f"{args.out} is this cache already")
        if work:
            lay_out(p, args.force)
        barrier()
    if not work:
        return p["result"]
    if not (p["part"] / "COMPLETE").is_file():
        if rank == 0 and not (p["part"] / "prompt_kv.safetensors").is_file():
            encode_prompts(p["ids"], p["source"], p["device"], p["part"] / "prompt_kv.safetensors")
            console.ok("prompts", f"{len(p['ids'])} through the understanding tower")
        encode_windows(args, p, rank, world)
    barrier()
    if rank == 0:
        close(args, p)
    return p["result"] | {"seconds": round(time.monotonic() - start, 1)}


def lay_out(p: dict, force: bool) -> None:
    """Make the unfinished cache: manifest, latents.bin at full length (so that a full disk shows now), and the log of finished episodes.

    The log names each finished episode with the sha256 of its latents. Only what still hashes to that counts as done.
    """
    part, manifest = p["part"], p["manifest"]
    if force:
        shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True, exist_ok=True)
    if (part / "COMPLETE").is_file():
        return
    console.write_json(part / "manifest.json", manifest)
    logged = []
    for log in sorted(part.glob("done*.jsonl")):
        for line in log.read_text().splitlines():
            try:
                logged.append(json.loads(line))
            except ValueError:
                console.warn("resume", f"a line of {log.name} was cut; its episode is encoded again")
    done = {}
    nbytes = 2 * int(np.prod(manifest["latent_shape"]))
    for suite, column in zip(p["suites"], p["columns"], strict=True):
        folder = part / suite.name
        folder.mkdir(exist_ok=True)
        with open(folder / "latents.bin", "ab") as f:
            if len(column["start"]):
                os.posix_fallocate(f.fileno(), 0, nbytes * len(column["start"]))
        with open(folder / "latents.bin", "rb") as f:
            for entry in logged:
                if entry["suite"] == suite.name:
                    low, high = np.searchsorted(column["episode"], [entry["episode"], entry["episode"] + 1])
                    f.seek(nbytes * int(low))
                    if hashlib.sha256(f.read(nbytes * int(high - low))).hexdigest() == entry["sha256"]:
                        done[suite.name, entry["episode"]] = entry
    if logged:
        console.ok("resume", f"{len(done)} episodes were done before")
    tmp = part / "done.tmp"
    tmp.write_text("".join(json.dumps(entry) + "\n" for entry in done.values()))
    os.replace(tmp, part / "done.jsonl")
    for log in part.glob("done.*.jsonl"):
        log.unlink()


def read_log(part: Path) -> dict:
    """{(suite, episode): entry} of the finished episodes of an unfinished cache."""
    entries = [json.loads(line) for log in part.glob("done*.jsonl") for line in log.read_text().splitlines()]
    return {(e["suite"], e["episode"]): e for e in entries}


def check_bad(entries, limit: int) -> None:
    """Raise VerifyFailed, listing them, if more frames than `limit` could not be decoded."""
    bad = [(e["suite"], e["episode"], *b) for e in entries for b in e["bad"]]
    if len(bad) > limit:
        for suite, episode, frame, file, why in bad[:20]:
            console.fail(suite, f"{file} episode {episode} frame {frame} cannot be decoded: {why}")
        raise VerifyFailed(
            f"at most {limit} undecodable frames (--max-bad)",
            f"{len(bad)}",
            "fetch the files named above again (python 04_fetch_libero.py check lists all), or raise --max-bad to leave their windows out",
        )


def encode_windows(args, p: dict, rank: int, world: int) -> None:
    """Encode this rank's share of the episodes. Each frame is decoded once; an episode is logged when its latents are on the disk."""
    import torch
    from tqdm import tqdm

    from common import wan_vae

    part, shape, device = p["part"], p["manifest"]["latent_shape"], p["device"]
    torch.backends.cudnn.deterministic = True
    entries = read_log(part)
    todo = [(s, c, e) for s, c in zip(p["suites"], p["columns"], strict=True) for e in range(len(s.episodes)) if (s.name, e) not in entries]
    if not todo[rank::world]:
        return
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    vae = wan_vae.WanEncoder(args.base / "vae", *shape[2:], device, compiled=on_gpu)

    def load(suite, column, episode):
        bad = []
        rows = np.flatnonzero(column["episode"] == episode)
        frames = libero.episode_frames(suite, episode, bad) if len(rows) else None
        return rows, frames, bad

    # Decoding leaves the interpreter's lock, so the next episodes are decoded while the VAE works on this one.
    ahead = 4 if on_gpu else 1
    with ThreadPoolExecutor(ahead) as pool, open(part / f"done.{rank}.jsonl", "a") as log:
        mine = todo[rank::world]
        windows, start, said = 0, time.monotonic(), time.monotonic()
        queue = [pool.submit(load, *item) for item in mine[:ahead]]
        for i, (suite, column, episode) in enumerate(tqdm(mine, f"rank {rank}", disable=not sys.stderr.isatty())):
            rows, frames, bad = queue.pop(0).result()
            if i + ahead < len(mine):
                queue.append(pool.submit(load, *mine[i + ahead]))
            entry = {"suite": suite.name, "episode": episode, "bad": bad}
            check_bad([*entries.values(), entry], args.max_bad)
            latents = np.zeros((len(rows), *shape), np.uint16)
            first = column["start"][rows] - suite.start[episode]
            good = np.flatnonzero(~touched(first, bad))
            if len(good):
                pixels = wan_vae.to_pixels(frames, device)
                found = encode_clips(vae, pixels, first[good].tolist(), args.batch, fixed=on_gpu)
                if not torch.isfinite(found).all() or not found.flatten(1).any(1).all():
                    raise VerifyFailed(
                        "finite latents",
                        f"one of episode {episode} of {suite.name} is zero or not finite",
                        "check the base's vae/, then encode again",
                    )
                latents[good] = found.view(torch.uint16).numpy()
            data = latents.tobytes()
            if len(rows):
                with open(part / suite.name / "latents.bin", "r+b") as f:
                    f.seek(latents[0].nbytes * int(rows[0]))
                    f.write(data)
                    f.flush()
                    os.fsync(f.fileno())
            entries[suite.name, episode] = entry | {"sha256": hashlib.sha256(data).hexdigest()}
            log.write(json.dumps(entries[suite.name, episode]) + "\n")
            log.flush()
            os.fsync(log.fileno())
            windows += len(rows)
            if not sys.stderr.isatty() and time.monotonic() - said > SAY_EVERY:
                said, rate = time.monotonic(), windows / (time.monotonic() - start)
                left = (time.monotonic() - start) / (i + 1) * (len(mine) - i - 1) / 60
                console.say(f"[step] episode {i + 1} of {len(mine)} of this rank, {rate:.1f} windows/s a rank, {left:.0f} min left")


def touched(first: np.ndarray, bad: list) -> np.ndarray:
    """Which windows, by their first frame in the episode, hold one of the bad frames. -> bool [windows]"""
    frames = np.array(sorted({b[0] for b in bad}), np.int64)
    return ((first[:, None] <= frames) & (frames < first[:, None] + LIBERO.frames)).any(-1)


def encode_clips(vae, pixels, first: list[int], batch: int, fixed: bool):
    """Windows of one episode through the VAE. pixels bf16 [frames, 3, H, W]; first: their first frames. -> bf16 [windows, 48, 5, 10, 20] on the CPU.

    fixed: fill the last batch up by repeating its last window, so that a compiled encoder sees one shape.
    """
    import torch

    found = []
    for i in range(0, len(first), batch):
        part = first[i : i + batch]
        filled = part + part[-1:] * (batch - len(part)) if fixed else part
        clips = torch.stack([pixels[s : s + LIBERO.frames] for s in filled]).transpose(1, 2)
        found.append(vae(clips)[: len(part)].cpu())
    return torch.cat(found)


def close(args, p: dict) -> None:
    """Write the tables, mark the cache COMPLETE and rename it to its place."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    part = p["part"]
    if not (part / "COMPLETE").is_file():
        entries = read_log(part)
        check_bad(entries.values(), args.max_bad)
        missing = [(s.name, e) for s in p["suites"] for e in range(len(s.episodes)) if (s.name, e) not in entries]
        if missing:
            raise VerifyFailed("every episode encoded", f"{len(missing)} are not, the first {missing[0]}", "run encode again: it resumes")
        for suite, column, place in zip(p["suites"], p["columns"], p["places"], strict=True):
            keys = zip(column["task"].tolist(), column["idle"].tolist(), strict=True)
            prompt, variants = np.array([place[key] for key in keys], np.int32).reshape(-1, 2).T
            bad = [entries[suite.name, e]["bad"] for e in range(len(suite.episodes))]
            local = column["start"] - suite.start[column["episode"]]
            lost = [touched(local[column["episode"] == e], bad[e]) for e in range(len(suite.episodes))]
            table = pa.table({**column, "prompt": prompt, "variants": variants, "bad": np.concatenate(lost)})
            pq.write_table(table, part / suite.name / "windows.parquet")
            np.save(part / suite.name / "actions.npy", suite.actions)
            libero.open_cached_suite(part, p["manifest"], suite.name)
            console.ok(suite.name, f"{len(table)} windows of {len(suite.episodes)} episodes, {int(table['bad'].to_numpy().sum())} left out")
        names = ("suite", "episode", "frame", "file", "why")
        found = [dict(zip(names, (e["suite"], e["episode"], *b), strict=True)) for e in entries.values() for b in e["bad"]]
        console.write_json(part / "bad_frames.json", found)
        if found:
            console.warn("bad frames", f"{len(found)}; bad_frames.json lists them, and their windows are left out")
        shutil.copy(p["normalizer"].path, part / "stats.json")
        (part / "COMPLETE").touch()
    for log in part.glob("done*.jsonl"):
        log.unlink()
    console.replace_folder(part, args.out)


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
