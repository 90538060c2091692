"""Bring the published models to this machine: download them, lay hand-copied files out as the hub cache, verify them offline.

Run:    python 02_cache_models.py download                     # nvidia/Cosmos3-Nano, all that this pipeline needs
        python 02_cache_models.py download --only all          # and what RLinf and cosmos-framework read from the hub cache
        python 02_cache_models.py layout --from /mnt/usb       # files that came by rsync, object store or disk
        python 02_cache_models.py verify --only all
        python 02_cache_models.py repair                       # what is broken and can be put right without a network; --yes does it
        python 02_cache_models.py download --tiny --work work/tiny   # random-weight stand-ins, no network
Reads:  the hub (HF_ENDPOINT, HF_TOKEN), or the folder given to --from
Writes: <work>/models/Cosmos3-Nano and, for the others, the hub cache (--hub, else as huggingface_hub resolves it)
Needs:  common/console.py common/cache_layout.py; for --tiny common/tiny.py common/libero.py common/rot6d.py; pip: huggingface_hub
Fails:  3 hub unreachable, repository gated or missing, disk too small, hand-copied files not whole
        4 Cosmos3-Nano is there, but not whole: --force replaces it
        5 the cache is there, but an offline use of it would fail
Next:   python 03_base_to_dcp.py
"""

import argparse
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from common import cache_layout, console
from common.cache_layout import PLACEHOLDER, check_folder, leftovers, list_files, matches, read_ref, repo_folder
from common.console import OutputExists, Precondition, VerifyFailed, done, fail, human_bytes, ok, plan, run_stage, say, warn

STAGE = "02_cache_models"
API_SECONDS = 30  # s; patience for the hub's listing of one repository
LISTING = ".cache/huggingface/trees/*.json"  # under a plain folder, named by its commit
OFFLINE_SECONDS = 120  # s; patience for the offline child, which reads no weights


KEPT = "a rerun keeps finished files, not parts of one"


class Asset(NamedTuple):
    name: str  # for --only; common.tiny.write_<name> writes the stand-in
    repo: str
    revision: str | None  # pinned commit; None: the newest
    patterns: tuple[str, ...]  # which of the repository's files
    required: tuple[str, ...]  # patterns that must each match a file
    gib: int  # size, about
    ours: bool  # this pipeline reads it, as a plain folder under --models; the others go into the hub cache
    purpose: str


NANO = (
    "model_index.json",
    "transformer/config.json",
    "transformer/*.safetensors",
    "vae/config.json",
    "vae/*.safetensors",
    "text_tokenizer/tokenizer.json",
)
QWEN, QWEN_COMMIT = "Qwen/Qwen3-VL-8B-Instruct", "0c351dd01ed87e9c1b53cbc748cba10e6187ff3b"
WAN, WAN_COMMIT, WAN_FILES = "Wan-AI/Wan2.2-TI2V-5B", "921dbaf3f1674a56f47e83fb80a34bac8a8f203e", ("Wan2.2_VAE.pth",)
ASSETS = (
    Asset("cosmos3-nano", "nvidia/Cosmos3-Nano", None, ("*",), NANO, 31, True, "the base model: stages 03, 04 and 06"),
    Asset(
        "qwen3-vl",
        QWEN,
        QWEN_COMMIT,
        ("*",),
        ("config.json", "tokenizer.json", "*.safetensors"),
        16,
        False,
        "text side of RLinf and cosmos-framework",
    ),
    Asset("wan-vae-pth", WAN, WAN_COMMIT, WAN_FILES, WAN_FILES, 3, False, "video VAE of cosmos-framework, given by path"),
    Asset(
        "wan-diffusers",
        f"{WAN}-Diffusers",
        None,
        ("vae/*", "model_index.json"),
        ("model_index.json", "vae/*.safetensors"),
        3,
        False,
        "video VAE of RLinf",
    ),
)

# Environment variables act at import only, so the check needs a process of its own. Reads [[repo, revision, patterns, files]].
OFFLINE_CHILD = """
import json, socket, sys
def refuse(*args, **kwargs):
    raise OSError("an offline lookup opened a socket")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
from huggingface_hub import hf_hub_download, snapshot_download
answers = []
for repo, revision, patterns, files in json.load(sys.stdin):
    try:
        snapshot_download(repo, revision=revision, allow_patterns=patterns)
        for name in files:
            with open(hf_hub_download(repo, name, revision=revision), "rb") as f:
                f.read(1)
        answers.append("")
    except Exception as error:
        answers.append(f"{type(error).__name__}: {error} (cause: {error.__cause__!r})")
print(json.dumps(answers))
"""


def location(args, asset: Asset) -> tuple[Path, str]:
    """(folder with the asset's files, the commit it is at)."""
    if asset.ours:
        return args.models / asset.repo.split("/")[1], "plain folder"
    repo = repo_folder(args.hub, asset.repo)
    revision = asset.revision or read_ref(repo) or PLACEHOLDER
    return repo / "snapshots" / revision, revision


def check_plain(folder: Path, asset: Asset) -> list[str]:
    """check_folder for a plain folder, held against the listing that a download leaves in it, and against a commit that was asked for."""
    listing = next(folder.glob(LISTING), None)
    other = [f"{folder}: commit {listing.stem}, not {asset.revision}"] if listing and asset.revision not in (None, listing.stem) else []
    return other + check_folder(folder, asset.required, asset.patterns, listing)


def problems_of(args, asset: Asset, hashes: bool = False) -> list[str]:
    """What is wrong with the asset at its place; [] if it is whole."""
    folder, revision = location(args, asset)
    if not asset.ours:
        return cache_layout.verify(args.hub, asset.repo, revision, required=asset.required, patterns=asset.patterns, hashes=hashes)
    return check_plain(folder, asset) if list_files(folder) else [f"{folder}: absent or empty"]


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / name for name in list_files(folder)) if path.exists())


def is_complete(args, asset: Asset) -> bool:
    """Whether there is nothing to do for the asset. Raises OutputExists for a plain folder that is there but not whole."""
    folder, _ = location(args, asset)
    problems = [] if args.force else problems_of(args, asset)
    if asset.ours and problems and list_files(folder):
        raise OutputExists(f"{folder} whole or not there", "; ".join(problems[:3]), "--force replaces it, or remove it")
    if not args.force and not problems:
        ok(asset.name, "already complete")
    return not args.force and not problems


def explain(error: Exception, asset: Asset, endpoint: str) -> Precondition:
    """A download's failure in terms of what the user can change; one with no such reading is raised again."""
    import httpx
    from huggingface_hub import errors

    mirror = "unset HF_ENDPOINT or choose another mirror"
    readings = (  # the first that fits counts: a gated repository is also one not found, and that is also an HTTP error
        (errors.OfflineModeIsEnabled, "HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE"),
        (
            errors.GatedRepoError,
            "a gated repository, not open to this token",
            f"accept its terms at {endpoint}/{asset.repo}, then set HF_TOKEN",
        ),
        (errors.RepositoryNotFoundError, "no such repository, or a private one", "check HF_ENDPOINT and HF_TOKEN"),
        (errors.RevisionNotFoundError, "the repository, but not that commit", mirror),
        ((errors.FileMetadataError, httpx.TooManyRedirects), "a redirect (308) that loses the hub's headers", mirror),
        ((httpx.RemoteProtocolError, httpx.ReadError), "a connection that broke", f"run this again ({KEPT})"),
        (httpx.ReadTimeout, "a hub that stopped answering", f"run this again ({KEPT}; HF_HUB_DOWNLOAD_TIMEOUT=60 waits longer)"),
        (httpx.TransportError, "no answer", f"check network and proxy, {mirror}"),
        (errors.HfHubHTTPError, "an HTTP error", f"try again later, {mirror}"),
    )
    chain = [error]
    while following := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(following)
    denied = {
        401: ("no token, or one that it does not accept (401)", "log in (hf auth login), or unset a stale HF_TOKEN"),
        403: ("no leave to read it (403)", f"accept its terms at {endpoint}/{asset.repo}, then set HF_TOKEN to a token that may read it"),
    }
    for e, (kinds, cause, cure) in itertools.product(chain, readings):
        if isinstance(e, kinds):
            status = e.response.status_code if kinds is errors.HfHubHTTPError else None
            found, mend = denied.get(status, (cause, cure))
            request = getattr(e, "_request", None)  # the public property raises where there is none
            via = f" after a redirect (308 or alike) to {request.url.host}" if request and not str(request.url).startswith(endpoint) else ""
            expected = f"{asset.repo} at {asset.revision or 'main'} from {endpoint}"
            return Precondition(
                expected, f"{found}{via} ({type(e).__name__})", f"{mend}, or copy the files by hand: 02_cache_models.py layout --from DIR"
            )
    raise error


def download(args, asset: Asset) -> None:
    import httpx
    from huggingface_hub import HfApi, constants, snapshot_download

    folder, _ = location(args, asset)
    partial, repo = folder.with_name(f".{folder.name}.partial"), repo_folder(args.hub, asset.repo)
    revision = asset.revision or "main"
    try:
        info = HfApi().repo_info(asset.repo, revision=revision, files_metadata=True, timeout=API_SECONDS)
        total = sum(s.size or 0 for s in info.siblings if matches(s.rfilename, asset.patterns))
        have = bytes_in(partial if asset.ours else repo / "blobs")
        console.need_disk(args.models if asset.ours else args.hub, max(0, total - have), asset.repo)
        (repo / "trees" / f"{info.sha}.json").unlink(missing_ok=True)  # one written by layout lists the copied files only
        names = {s.rfilename for s in info.siblings}
        for stale in [partial / n for n in list_files(partial) if n not in names] + [
            p for p in partial.glob(LISTING) if p.stem != info.sha
        ]:
            stale.unlink()  # of an unfinished download of another commit; what both have stays
        where = {"local_dir": partial} if asset.ours else {"cache_dir": args.hub}
        snapshot_download(asset.repo, revision=revision, allow_patterns=list(asset.patterns), force_download=args.force, **where)
    except (OSError, httpx.HTTPError) as error:
        raise explain(error, asset, constants.ENDPOINT) from error
    if not asset.ours:
        cache_layout.set_ref(repo, asset.revision or info.sha)  # a pinned download writes none, and many callers ask for main
        return
    if problems := check_plain(partial, asset):
        raise VerifyFailed(f"{asset.repo} whole in {partial}", "; ".join(problems), "--force fetches every file again")
    console.replace_folder(partial, folder)


def source_of(args, asset: Asset) -> Path | None:
    """Where under --from the asset's hand-copied files are: <repo id>/, the repository's name, or --from itself for a single --only."""
    roots = [args.source / asset.repo, args.source / asset.repo.split("/")[1], *([args.source] if args.only == [asset.name] else [])]
    return next((r for r in roots if any(matches(n, asset.patterns) for n in list_files(r))), None)


def layout(args, asset: Asset, source: Path, mode: str) -> None:
    """Lay the asset's files out at its place: the hub cache, or the plain folder. Raises Precondition for files that are not whole."""
    files = [n for n in list_files(source) if matches(n, asset.patterns)]
    if problems := check_folder(source, asset.required, asset.patterns):
        raise Precondition(f"the whole of {asset.repo} in {source}", "; ".join(problems), "copy what is missing, then run this again")
    folder, revision = location(args, asset)
    if mode == "copy":
        console.need_disk(args.models if asset.ours else args.hub, sum((source / n).stat().st_size for n in files), asset.repo)
    if not asset.ours:
        cache_layout.build(source, args.hub, asset.repo, revision, files=files, mode=mode)
        return
    partial = folder.with_name(f".{folder.name}.layout")
    shutil.rmtree(partial, ignore_errors=True)
    for name in files:
        cache_layout.put((source / name).resolve(), partial / name, mode)
    console.replace_folder(partial, folder)


def write_tiny(args, asset: Asset) -> None:
    from common import tiny

    staging = args.models / ".tiny-staging"
    shutil.rmtree(staging, ignore_errors=True)
    getattr(tiny, "write_" + asset.name.replace("-", "_"))(staging)
    layout(args, asset, staging, "copy")
    shutil.rmtree(staging)


def resolve_offline(hub: Path, jobs: list) -> list[str]:
    """Ask huggingface_hub itself, offline and without sockets, for every file of [[repo, revision, patterns, files]]; '' where all is found."""
    env = {**os.environ, "HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    command, asked = [sys.executable, "-c", OFFLINE_CHILD], json.dumps(jobs)
    child = subprocess.run(command, input=asked, env=env, timeout=OFFLINE_SECONDS, capture_output=True, text=True, check=False)
    if child.returncode:
        raise Precondition(
            "an importable huggingface_hub", (child.stderr.strip().splitlines() or ["no message"])[-1], "python 01_check_env.py"
        )
    return json.loads(child.stdout)


def verify(args, assets: list[Asset]) -> list[dict]:
    """Check every asset, by our rules and then by the library's own offline lookup; print one line each and return the rows."""
    rows, jobs = [], []
    for asset in assets:
        folder, revision = location(args, asset)
        files = [n for n in list_files(folder) if matches(n, asset.patterns)]
        row = {"name": asset.name, "repo": asset.repo, "revision": revision, "path": str(folder)}
        rows.append({**row, "files": len(files), "bytes": bytes_in(folder), "problems": problems_of(args, asset, args.hash)})
        if files and not asset.ours:
            main = ["main"] if read_ref(repo_folder(args.hub, asset.repo)) == revision else []
            jobs += [(rows[-1], [asset.repo, r, asset.patterns, files]) for r in [revision, *main]]
        for path in leftovers(folder if asset.ours else repo_folder(args.hub, asset.repo)):
            warn(asset.name, f"{path}: unfinished, counted as nothing; python 02_cache_models.py repair lists what can be deleted")
    for (row, job), error in zip(jobs, resolve_offline(args.hub, [job for _, job in jobs]) if jobs else [], strict=True):
        if error:
            row["problems"].append(f"huggingface_hub offline, {job[0]} at {job[1]} in {args.hub}: {error}")
    for row in rows:
        for problem in row["problems"]:
            fail(row["name"], problem)
        if not row["problems"]:
            ok(row["name"], f"{row['files']} files, {human_bytes(row['bytes'])}, {row['revision']}, at {row['path']}")
    return rows


def repair(args, assets: list[Asset]) -> int:
    """Print what can be put right without a network, and do it with --yes."""
    found = []
    for asset in assets:
        folder, _ = location(args, asset)
        places = (folder, folder.with_name(f".{folder.name}.partial")) if asset.ours else ()
        for path in itertools.chain(*map(leftovers, places or (repo_folder(args.hub, asset.repo),))):
            if not cache_layout.is_quiet(path):
                warn(
                    asset.name,
                    f"{path}: unfinished, but younger than {cache_layout.QUIET_SECONDS} s: a download may still write it; left alone",
                )
            elif asset.ours:
                found.append((asset.name, cache_layout.Repair(f"{path}: an unfinished file; delete it", path.unlink)))
        found += [] if asset.ours else [(asset.name, r) for r in cache_layout.repairs(args.hub, asset.repo)]
    for name, one in found:
        if args.yes:
            one.do()
        ok(name, f"{one.what}: done") if args.yes else plan(name, one.what)
    if args.json:
        console.write_json(args.json, {"hub": str(args.hub), "done": args.yes, "repairs": [{"name": n, "what": r.what} for n, r in found]})
    if found and not args.yes:
        plan("next", "the same with --yes does it")
        return 0
    ok("next", "python 02_cache_models.py verify")
    done(STAGE, repaired=len(found), hub=args.hub)
    return 0


def parse_args(argv=None):
    rows = [f"  {a.name:14}{a.gib:3} GiB  {a.repo}@{(a.revision or 'newest')[:7]}: {a.purpose}" for a in ASSETS]
    look = {"epilog": "\n".join(["assets:", *rows]), "formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--only", action="append", choices=[*(a.name for a in ASSETS), "all"], help="which asset; repeatable (default: see the command)"
    )
    shared.add_argument("--revision", metavar="COMMIT", help="full commit of the one --only asset, instead of its own")
    shared.add_argument("--work", type=Path, default=Path("work"), help="root of this project's outputs (default: %(default)s)")
    shared.add_argument("--models", type=Path, help="parent of the folder Cosmos3-Nano (default: <work>/models)")
    shared.add_argument("--hub", type=Path, help="hub cache (default: as huggingface_hub resolves it; <work>/hub with --tiny)")
    shared.add_argument("--json", type=console.json_file, metavar="FILE", help="write what the check found")
    shared.add_argument("--force", action="store_true", help="do it again even where the asset is complete (default: %(default)s)")
    shared.add_argument("--dry-run", action="store_true", help="print the plan and stop (default: %(default)s)")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], **look)
    commands = parser.add_subparsers(dest="command", required=True)
    texts = {
        "download": "fetch from the hub (default: what this pipeline needs; all with --tiny)",
        "layout": "lay out hand-copied files (default: every asset found in DIR)",
        "verify": "check offline use (default: every asset that is there, and what this pipeline needs)",
        "repair": "show what can be put right without a network: refs, dangling links, empty snapshots, unfinished files (default: every asset)",
    }
    get, lay, check, mend = (
        commands.add_parser(name, parents=[shared], help=text, description=text, **look) for name, text in texts.items()
    )
    get.add_argument("--tiny", action="store_true", help="write random-weight stand-ins instead: no network (default: %(default)s)")
    lay.add_argument(
        "--from", dest="source", type=Path, required=True, metavar="DIR", help="DIR/<org>/<name>, DIR/<name>, or DIR itself for one --only"
    )
    lay.add_argument(
        "--mode", choices=("hardlink", "symlink", "copy"), default="hardlink", help="how a file gets there (default: %(default)s)"
    )
    check.add_argument("--hash", action="store_true", help="read every blob and hold it against its name (default: %(default)s)")
    mend.add_argument("--yes", action="store_true", help="do what it shows (default: %(default)s)")
    parser.set_defaults(tiny=False, hash=False)
    args = parser.parse_args(argv)
    if args.revision and not cache_layout.COMMIT.fullmatch(args.revision):
        parser.error(f"--revision is a full commit, 40 lower-case hex digits: an offline lookup finds no other; found {args.revision!r}")
    if args.revision and (len(args.only or ()) != 1 or args.only == ["all"]):
        parser.error("--revision belongs to one asset: name it by --only")
    args.models = (args.models or args.work / "models").absolute()
    hub, args.hub_reason = cache_layout.hub_cache_root()
    if args.tiny:  # random weights under a pinned revision have no business in a real cache
        hub, args.hub_reason = args.work / "hub", "--tiny"
    if args.hub:
        hub, args.hub_reason = args.hub, "--hub"
    args.hub = hub.absolute()
    return args


def select(args) -> list[Asset]:
    if args.only:
        chosen = [a for a in ASSETS if a.name in args.only or "all" in args.only]
        return [a._replace(revision=args.revision or a.revision) for a in chosen]
    if args.command == "layout":
        found = [a for a in ASSETS if source_of(args, a)]
        if not found:
            raise Precondition(
                f"{ASSETS[0].repo} or another asset of --help in {args.source}", "none", "put each into DIR/<name>, or name one by --only"
            )
        return found
    if args.command == "repair":
        return list(ASSETS)
    return [a for a in ASSETS if a.ours or args.tiny or (args.command == "verify" and list_files(location(args, a)[0]))]


def execute(args, asset: Asset) -> None:
    if args.tiny:
        write_tiny(args, asset)
    elif args.command == "download":
        download(args, asset)
    elif source := source_of(args, asset):
        layout(args, asset, source, args.mode)
    else:
        raise Precondition(f"{asset.repo} in {args.source}", "no file of it", f"put it into {args.source / asset.repo}")


def main(argv=None) -> int:
    args, start = parse_args(argv), time.monotonic()
    assets = select(args)
    plan("hub cache", f"{args.hub} (from {args.hub_reason})")
    plan("models", args.models)
    if args.command == "download":
        endpoint = os.environ.get("HF_ENDPOINT", "the hub")
        plan("from", "common/tiny.py" if args.tiny else f"{endpoint}; {KEPT}")
    for a in assets:
        plan(
            a.name,
            f"{a.repo} at {a.revision or 'newest'}, published size about {a.gib} GiB, {'' if a.ours else 'not '}needed by this pipeline: {a.purpose}",
        )
    if args.dry_run:
        return 0
    if args.command == "repair":
        return repair(args, assets)
    for asset in assets if args.command != "verify" else ():
        try:
            if not is_complete(args, asset):
                execute(args, asset)
        except Precondition as error:
            if asset.ours or len(assets) == 1:
                raise
            warn(asset.name, f"{error}; not needed by this pipeline, so the others go on")

    rows = verify(args, assets)
    home = {"HF_HOME": str(args.hub.parent)} if args.hub.name == "hub" else {}
    exports = {**home, "HF_HUB_CACHE": str(args.hub), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if args.json:
        console.write_json(
            args.json, {"hub": str(args.hub), "hub_reason": args.hub_reason, "models": str(args.models), "exports": exports, "assets": rows}
        )
    if broken := [row for row in rows if row["problems"]]:
        absent = not any(row["files"] for row in broken)
        again = " ".join(["download", *([] if absent else ["--force"]), *(f"--only {row['name']}" for row in broken)])
        raise (Precondition if absent else VerifyFailed)(
            "every asset whole", f"{len(broken)} of {len(rows)} not", f"python 02_cache_models.py {again}"
        )
    for name, value in exports.items():
        say(f"export {name}={shlex.quote(value)}")
    for row in rows:
        if row["name"] == "wan-vae-pth":
            ok("VAE file for cosmos-framework", Path(row["path"]) / WAN_FILES[0])
    if any(row["name"] == "cosmos3-nano" for row in rows):
        base = shlex.quote(str(args.models / "Cosmos3-Nano"))
        ok("next", f"python 03_base_to_dcp.py --base {base} --out {base}-DCP")
    out = next((row["path"] for row in rows if row["name"] == "cosmos3-nano"), args.hub)
    done(STAGE, out=out, hub=args.hub, assets=len(rows), bytes=sum(row["bytes"] for row in rows), seconds=f"{time.monotonic() - start:.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_stage(STAGE, main))
