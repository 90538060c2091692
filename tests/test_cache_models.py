"""python -m pytest tests/test_cache_models.py

The outside reference is huggingface_hub itself: what we lay out it must resolve offline, and what it downloads we must lay out alike.
"""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import REPO, load_script, processor_seconds, run_script
from hub import serve
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import disable_progress_bars
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from common import cache_layout
from common.console import Precondition

disable_progress_bars()
SHA = "0123456789abcdef0123456789abcdef01234567"
SCRIPT = "02_cache_models.py"
ONLINE = {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "no_proxy": "127.0.0.1,localhost"}


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def weights(folder: Path, *names: str) -> None:
    for i, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        save_file({"w": np.full(64, i, np.float32)}, folder / name)


def wan_diffusers(folder: Path) -> Path:
    weights(folder, "vae/diffusion_pytorch_model.safetensors")
    return write(folder, {"model_index.json": b"{}", "vae/config.json": b'{"z_dim": 48}'})


def qwen(folder: Path) -> Path:
    """A repository with two shards and their index."""
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    weights(folder, *shards)
    index = json.dumps({"metadata": {}, "weight_map": dict(zip("ab", shards, strict=True))})
    return write(folder, {"model.safetensors.index.json": index.encode(), "config.json": b"{}", "tokenizer.json": b'{"model": {}}'})


def nano(folder: Path) -> Path:
    weights(folder, "transformer/diffusion_pytorch_model.safetensors", "vae/diffusion_pytorch_model.safetensors")
    plain = ("model_index.json", "transformer/config.json", "vae/config.json", "text_tokenizer/tokenizer.json")
    return write(folder, dict.fromkeys(plain, b"{}"))


def tree(folder: Path) -> dict[str, str]:
    """Every path under a folder, with a link's target or a file's digest."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[path.relative_to(folder).as_posix()] = f"-> {os.readlink(path)}"
        elif path.is_file():
            found[path.relative_to(folder).as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


QWEN, WAN, WAN_DIFFUSERS = "Qwen/Qwen3-VL-8B-Instruct", "Wan-AI/Wan2.2-TI2V-5B", "Wan-AI/Wan2.2-TI2V-5B-Diffusers"


@pytest.fixture
def hub(tmp_path):
    """All four repositories, those with a pin at it."""
    repos = {"nvidia/Cosmos3-Nano": nano(tmp_path / "hub-nano"), WAN_DIFFUSERS: wan_diffusers(tmp_path / "hub-wan")}
    repos |= {QWEN: qwen(tmp_path / "hub-qwen"), WAN: write(tmp_path / "hub-pth", {"Wan2.2_VAE.pth": b"vae"})}
    with serve(repos, SHA, {a.repo: a.revision for a in load_script("02_cache_models").ASSETS if a.revision}) as served:
        yield served


def download(hub_url, tmp_path, *more, **env):
    return run_script(
        SCRIPT,
        "download",
        "--work",
        tmp_path / "w",
        "--hub",
        tmp_path / "w/hub",
        *more,
        env={**ONLINE, "HF_ENDPOINT": hub_url, **env},
        timeout=60,
    )


# ------------------------------------------------------------------ common/cache_layout.py

FOLDERS, SUFFIXES = st.sampled_from(["", "vae/", "a/b/c/", "transformer/"]), st.sampled_from([".json", ".pth", "", ".txt"])
NAMES = st.tuples(FOLDERS, st.text("abcXYZ019_-", min_size=1, max_size=12), SUFFIXES).map(
    "{0[0]}{0[1]}x{0[2]}".format
)  # never a folder's name
CONTENTS = st.binary(max_size=200).filter(lambda b: not b.startswith(cache_layout.LFS_POINTER))  # refused, and tested below
REPOS = st.tuples(st.text("abcXYZ09", min_size=1, max_size=8), st.from_regex(r"[a-zA-Z0-9]+([._-][a-zA-Z0-9]+){0,2}", fullmatch=True)).map(
    "/".join
)


@given(
    repo_id=REPOS,
    revision=st.text("0123456789abcdef", min_size=40, max_size=40),
    files=st.dictionaries(NAMES, CONTENTS, min_size=1, max_size=6),
    mode=st.sampled_from(["hardlink", "symlink", "copy"]),
)
def test_build_then_offline_resolution_gives_the_same_bytes(repo_id, revision, files, mode):
    """For any repository name, commit, file tree and mode, huggingface_hub finds offline, by commit and by main, exactly the bytes laid out."""
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        cache_layout.build(write(root / "source", files), root / "hub", repo_id, revision, mode=mode)
        assert cache_layout.verify(root / "hub", repo_id, revision, hashes=True) == []
        for ref in (revision, "main"):
            snapshot = Path(snapshot_download(repo_id, revision=ref, cache_dir=root / "hub"))
            assert cache_layout.list_files(snapshot) == sorted(files)
            for name, content in files.items():
                assert Path(hf_hub_download(repo_id, name, revision=ref, cache_dir=root / "hub")).read_bytes() == content


def test_layout_is_file_for_file_what_a_download_writes(hub, tmp_path):
    """blobs, links, listing and refs of a hand-laid repository equal those of huggingface_hub's own download: names, targets and bytes."""
    repo, source = "Wan-AI/Wan2.2-TI2V-5B-Diffusers", hub.repos["Wan-AI/Wan2.2-TI2V-5B-Diffusers"]
    code = f"from huggingface_hub import snapshot_download; snapshot_download({repo!r}, cache_dir={str(tmp_path / 'theirs')!r})"
    subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **ONLINE, "HF_ENDPOINT": hub.url}, check=True, timeout=60, capture_output=True
    )
    cache_layout.build(source, tmp_path / "ours", repo, SHA, mode="copy")
    ours, theirs = (tree(cache_layout.repo_folder(tmp_path / which, repo)) for which in ("ours", "theirs"))
    assert ours == theirs
    assert (cache_layout.repo_folder(tmp_path / "ours", repo) / "refs/main").read_bytes() == SHA.encode()


def test_a_second_build_changes_nothing(tmp_path):
    """Laying the same files out twice leaves every inode and time of the first as it was."""
    source = wan_diffusers(tmp_path / "source")

    def state():
        return {p: (p.lstat().st_ino, p.lstat().st_mtime_ns) for p in (tmp_path / "hub").rglob("*")}

    cache_layout.build(source, tmp_path / "hub", "o/r", SHA, mode="copy")
    before = state()
    cache_layout.build(source, tmp_path / "hub", "o/r", SHA, mode="copy")
    assert state() == before


def test_a_build_after_a_kill_completes(tmp_path):
    """A half-copied blob, a dangling link and a cut ref of a killed run are replaced by the next one."""
    source = wan_diffusers(tmp_path / "source")
    cache_layout.build(source, tmp_path / "hub", "o/r", SHA, mode="copy")
    repo = cache_layout.repo_folder(tmp_path / "hub", "o/r")
    whole = tree(repo)
    blob = (repo / "snapshots" / SHA / "vae/config.json").resolve()
    blob.rename(blob.with_name(blob.name + ".incomplete"))
    (repo / "refs/main").write_text(SHA[:20])
    (repo / "snapshots" / SHA / "model_index.json").unlink()
    assert cache_layout.verify(tmp_path / "hub", "o/r", SHA)
    cache_layout.build(source, tmp_path / "hub", "o/r", SHA, mode="copy")
    assert tree(repo) == whole


def test_modes_store_as_they_say(tmp_path):
    """hardlink shares the source's inode, symlink points at the source, copy is a file of its own."""
    source = write(tmp_path / "source", {"a.json": b"{}"})
    blob = {m: (cache_layout.build(source, tmp_path / m, "o/r", SHA, mode=m) / "a.json") for m in ("hardlink", "symlink", "copy")}
    first = {m: p.parent / os.readlink(p) for m, p in blob.items()}
    assert first["hardlink"].stat().st_ino == (source / "a.json").stat().st_ino
    assert first["symlink"].is_symlink() and first["symlink"].resolve() == source / "a.json"
    assert not first["copy"].is_symlink() and first["copy"].stat().st_ino != (source / "a.json").stat().st_ino


def test_a_main_that_leads_to_another_snapshot_stays_but_a_placeholder_goes(tmp_path):
    """Laying out one commit does not move a sound refs/main off another, unless that one is the placeholder."""
    source = write(tmp_path / "source", {"a.json": b"{}"})
    for first, kept in ((SHA, SHA), (cache_layout.PLACEHOLDER, SHA[::-1])):
        cache_layout.build(source, tmp_path / first, "o/r", first)
        cache_layout.build(source, tmp_path / first, "o/r", SHA[::-1])
        assert cache_layout.read_ref(cache_layout.repo_folder(tmp_path / first, "o/r")) == kept


@pytest.mark.parametrize("revision", [SHA[:7], SHA.upper(), "main", SHA + "\n", ""])
def test_only_a_full_lower_case_commit_is_a_revision(tmp_path, revision):
    """C5: a branch, a short or an upper-case commit is refused before anything is written."""
    with pytest.raises(Precondition, match="40 lower-case hex"):
        cache_layout.build(write(tmp_path / "source", {"a": b"1"}), tmp_path / "hub", "o/r", revision)
    with pytest.raises(Precondition, match="40 lower-case hex"):
        cache_layout.verify(tmp_path / "hub", "o/r", revision)
    assert not (tmp_path / "hub").exists()


@pytest.fixture
def laid(tmp_path):
    cache_layout.build(qwen(tmp_path / "source"), tmp_path / "hub", "o/r", SHA, mode="copy")
    assert cache_layout.verify(tmp_path / "hub", "o/r", SHA, required=("config.json", "*.safetensors"), hashes=True) == []
    return cache_layout.repo_folder(tmp_path / "hub", "o/r")


@pytest.mark.parametrize("tail", ["\n", " ", "\r\n"])
def test_whitespace_in_a_ref_is_found(laid, tail):
    """C1: a newline or blank after the commit in refs/main, which makes huggingface_hub fail offline, is a problem with its cure."""
    (laid / "refs/main").write_bytes((SHA + tail).encode())
    with pytest.raises(LocalEntryNotFoundError):
        hf_hub_download("o/r", "config.json", cache_dir=laid.parent)
    (problem,) = cache_layout.verify(laid.parent, "o/r", SHA)
    assert "whitespace" in problem and f"printf %s {SHA} >" in problem


def test_an_empty_snapshot_is_not_a_snapshot(laid):
    """C2: an empty snapshots/<commit>/ is a problem, and so is the ref that leads to it."""
    shutil.rmtree(laid / "snapshots" / SHA)
    (laid / "snapshots" / SHA).mkdir()
    problems = cache_layout.verify(laid.parent, "o/r", SHA)
    assert any("an empty snapshot" in p for p in problems) and any("refs/main" in p for p in problems)


def cut(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 99\n"
SHARD = "model-00001-of-00002.safetensors"


@pytest.mark.parametrize(
    ("name", "damage", "expected"),
    [
        ("config.json", lambda link: link.resolve().unlink(), "config.json: dangling link"),  # C3
        ("config.json", lambda link: link.resolve().write_bytes(b"{}  "), "config.json: 4 bytes where the hub lists 2"),
        ("config.json", lambda link: link.unlink(), "config.json: missing"),
        (SHARD, lambda link: link.unlink(), f"{SHARD}: missing"),
        (SHARD, lambda link: cut(link.resolve(), 100), f"{SHARD}: 100 bytes where"),
        (SHARD, lambda link: link.resolve().write_bytes(POINTER), f"{SHARD}: an LFS pointer"),
        (SHARD, lambda link: link.resolve().write_bytes(link.resolve().read_bytes()[:-1] + b"!"), f"{SHARD}: its bytes do not hash"),
    ],
)
def test_damage_is_found_and_named(laid, name, damage, expected):
    """Each kind of damage to one file gives exactly one problem, which names the file."""
    damage(laid / "snapshots" / SHA / name)
    (problem,) = cache_layout.verify(laid.parent, "o/r", SHA, hashes=True)
    assert problem.startswith(expected)


@pytest.mark.parametrize(
    ("content", "expected"), [(b"", "cut off"), (b"\xff" * 64, "cut off"), (b"\x02" + b"\0" * 7 + b"[]", "cannot be read"), (None, "says")]
)
def test_a_safetensors_file_must_be_as_long_as_its_header_says(tmp_path, content, expected):
    """Without any listing, a safetensors file that is empty, cut off, overlong or not safetensors is caught by its header."""
    weights(tmp_path, "w.safetensors")
    whole = (tmp_path / "w.safetensors").read_bytes()
    assert cache_layout.file_problem(tmp_path / "w.safetensors") == ""
    for damaged in [content] if content is not None else [whole[:-1], whole + b"\0"]:
        (tmp_path / "w.safetensors").write_bytes(damaged)
        assert expected in cache_layout.file_problem(tmp_path / "w.safetensors")
        with pytest.raises(Precondition, match="whole"):
            cache_layout.build(tmp_path, tmp_path / "hub", "o/r", SHA, files=["w.safetensors"])


def test_an_unfinished_blob_is_listed_and_counts_as_nothing(laid):
    """C10: an .incomplete file never stands for its blob, and is listed so that the user can remove it."""
    blob = (laid / "snapshots" / SHA / "config.json").resolve()
    unfinished = blob.rename(blob.with_name(blob.name + ".incomplete"))
    assert cache_layout.leftovers(laid) == [unfinished]
    assert "dangling" in cache_layout.verify(laid.parent, "o/r", SHA)[0]


def test_a_snapshot_without_a_listing_is_found(laid):
    """huggingface_hub turns to the network for a commit without trees/<commit>.json; verify says so, and laying the snapshot out mends it."""
    (laid / "trees" / f"{SHA}.json").unlink()
    assert "finds no commit offline" in cache_layout.verify(laid.parent, "o/r", SHA)[0]
    cache_layout.build(laid / "snapshots" / SHA, laid.parent, "o/r", SHA)
    assert cache_layout.verify(laid.parent, "o/r", SHA, hashes=True) == []


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({}, "default"),
        ({"XDG_CACHE_HOME": "/x"}, "XDG_CACHE_HOME"),
        ({"XDG_CACHE_HOME": "/x", "HF_HOME": "~/h"}, "HF_HOME"),
        ({"HF_HOME": "/h", "HUGGINGFACE_HUB_CACHE": "/old"}, "HUGGINGFACE_HUB_CACHE"),
        ({"HF_HOME": "/h", "HUGGINGFACE_HUB_CACHE": "/old", "HF_HUB_CACHE": "$HOME/c"}, "HF_HUB_CACHE"),
    ],
)
def test_the_root_is_the_librarys(env, reason):
    """The hub cache folder that we print is the one that huggingface_hub uses under the same variables."""
    code = "import json; from huggingface_hub.constants import HF_HUB_CACHE as theirs; from common.cache_layout import hub_cache_root; "
    code += "ours, why = hub_cache_root(); print(json.dumps([theirs, str(ours), why]))"
    child = {"HOME": "/home/someone", "PATH": os.environ["PATH"], "PYTHONPATH": str(REPO), **env}
    theirs, ours, why = json.loads(
        subprocess.run([sys.executable, "-c", code], env=child, check=True, capture_output=True, text=True).stdout
    )
    assert (ours, why) == (theirs, reason)


def test_the_layout_module_works_alone(tmp_path):
    """cache_layout.py and console.py, copied into an empty project, lay out and verify with the standard library only."""
    write(tmp_path, {f"common/{n}": (REPO / "common" / n).read_bytes() for n in ("cache_layout.py", "console.py")})
    write(tmp_path / "source", {"a.json": b"{}"})
    code = f"from common import cache_layout as c; c.build('source', 'hub', 'o/r', {SHA!r}); print(c.verify('hub', 'o/r', {SHA!r}))"
    child = subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert child.stdout == "[]\n", child.stderr


# ------------------------------------------------------------------ 02_cache_models.py


def test_download_then_rerun_then_offline_verify(hub, tmp_path):
    """A download from the hub lands whole at both kinds of place, a rerun asks the hub for nothing, and verify passes without a hub."""
    first = download(hub.url, tmp_path, "--only", "all", "--dry-run")
    assert first.returncode == 0 and hub.asked == [] and not (tmp_path / "w").exists()
    chosen = ("--only", "cosmos3-nano", "--only", "wan-diffusers", "--json", tmp_path / "found.json")
    first = download(hub.url, tmp_path, *chosen)
    assert first.returncode == 0, first.stderr
    assert f"[plan] from: {hub.url}" in first.stdout and f"export HF_HOME={tmp_path / 'w'}\n" in first.stdout
    base = tmp_path / "w/models/Cosmos3-Nano"
    *_, following, last = first.stdout.splitlines()
    assert (
        last.startswith(f"[done] 02_cache_models out={base} ")
        and following == f"[ok] next: python 03_base_to_dcp.py --base {base} --out {base}-DCP"
    )
    got = tree(tmp_path / "w/models/Cosmos3-Nano")
    assert {k: v for k, v in got.items() if not k.startswith(".cache/")} == tree(hub.repos["nvidia/Cosmos3-Nano"])
    found = json.loads((tmp_path / "found.json").read_text())
    assert [(a["name"], a["revision"], a["problems"]) for a in found["assets"]] == [
        ("cosmos3-nano", "plain folder", []),
        ("wan-diffusers", SHA, []),
    ]
    hub.asked.clear()
    again = download(hub.url, tmp_path, *chosen)
    assert again.returncode == 0 and again.stdout.count("already complete") == 2 and hub.asked == []
    checked = run_script(SCRIPT, "verify", "--work", tmp_path / "w", "--hub", tmp_path / "w/hub", "--hash")
    assert checked.returncode == 0 and "assets=2 " in checked.stdout, checked.stderr


@pytest.mark.parametrize(
    ("status", "headers", "expected"),
    [
        (404, {"X-Error-Code": "RepoNotFound"}, "no such repository"),
        (404, {"X-Error-Code": "RevisionNotFound"}, "not that commit"),
        (403, {"X-Error-Code": "GatedRepo"}, "accept its terms at"),
        (500, {}, "an HTTP error"),
        (401, {"X-Error-Message": "Invalid credentials in Authorization header"}, "unset a stale HF_TOKEN"),
        (403, {}, "no leave to read it"),
        (308, {"Location": "http://localhost:9/elsewhere"}, "after a redirect (308 or alike) to localhost"),
    ],
)
def test_a_hub_that_refuses_is_explained(hub, tmp_path, status, headers, expected):
    """A missing or gated repository, a missing commit, a server error and a redirect to nowhere each exit 3 with what mends it, quickly."""
    hub.answer = lambda path: (status, headers)
    result = download(hub.url, tmp_path)
    assert result.returncode == 3 and expected in result.stderr and hub.url in result.stderr, result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "w/models/Cosmos3-Nano").exists()


def test_a_redirect_of_the_files_that_loses_the_headers_is_explained(hub, tmp_path):
    """308 on the files, to another host whose reply is not a hub's, exits 3 and names the redirect."""
    other = hub.url.replace("127.0.0.1", "localhost")
    hub.answer = lambda path: (308, {"Location": f"{other}/plain"}) if "/resolve/" in path else None
    result = download(hub.url, tmp_path)
    assert result.returncode == 3 and "a redirect (308) that loses the hub's headers" in result.stderr, result.stderr


def test_a_relative_redirect_is_followed(hub, tmp_path):
    """308 with a relative Location (a renamed repository) downloads all the same."""
    hub.answer = lambda path: (308, {"Location": path.replace("Cosmos3-Nano", "Renamed")}) if "Cosmos3-Nano" in path else None
    hub.repos["nvidia/Renamed"] = hub.repos["nvidia/Cosmos3-Nano"]
    result = download(hub.url, tmp_path)
    assert result.returncode == 0, result.stderr


def test_offline_and_no_server_are_explained(tmp_path):
    """HF_HUB_OFFLINE=1, and an endpoint where nobody listens, exit 3 at once (no retries for minutes) and name the cause."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
    start = time.monotonic()
    offline, dead = download(nobody, tmp_path, HF_HUB_OFFLINE="1"), download(nobody, tmp_path)
    assert time.monotonic() - start < 60
    assert offline.returncode == 3 and "unset HF_HUB_OFFLINE" in offline.stderr
    assert dead.returncode == 3 and "no answer" in dead.stderr and nobody in dead.stderr


def test_a_folder_that_is_not_whole_is_refused_and_force_replaces_it(hub, tmp_path):
    """A cut-off shard in Cosmos3-Nano exits 4 and names --force; with it the folder is whole again, and nothing else is left beside it."""
    folder = nano(tmp_path / "w/models/Cosmos3-Nano")
    cut(folder / "vae/diffusion_pytorch_model.safetensors", 50)
    refused = download(hub.url, tmp_path)
    assert refused.returncode == 4 and "--force" in refused.stderr and "vae/diffusion_pytorch_model.safetensors" in refused.stderr
    assert download(hub.url, tmp_path, "--force").returncode == 0
    assert [p.name for p in (tmp_path / "w/models").iterdir()] == ["Cosmos3-Nano"]


def test_layout_of_hand_copied_files(tmp_path):
    """Copies of all four repositories are found by repository name, laid out, and pass the library's own offline lookup."""
    usb = tmp_path / "usb"
    nano(usb / "Cosmos3-Nano")
    qwen(usb / "Qwen/Qwen3-VL-8B-Instruct")
    write(usb / "Wan2.2-TI2V-5B", {"Wan2.2_VAE.pth": b"vae", "unwanted.safetensors": b"cut off"})
    wan_diffusers(usb / "Wan2.2-TI2V-5B-Diffusers")
    before = tree(usb)
    result = run_script(SCRIPT, "layout", "--from", usb, "--work", tmp_path / "w", "--hub", tmp_path / "hub")
    assert result.returncode == 0 and "assets=4 " in result.stdout, result.stderr
    (vae,) = (line.split(": ")[1] for line in result.stdout.splitlines() if line.endswith("Wan2.2_VAE.pth"))
    assert Path(vae).is_absolute() and Path(vae).read_bytes() == b"vae"
    assert not list((tmp_path / "hub").rglob("unwanted*")) and tree(usb) == before
    assert (tmp_path / "hub/models--Wan-AI--Wan2.2-TI2V-5B-Diffusers/refs/main").read_text() == cache_layout.PLACEHOLDER
    for path in [tmp_path / "hub", *(p for p in (tmp_path / "hub").rglob("*") if not p.is_symlink())]:
        os.chmod(path, 0o555)
    before = {p: p.lstat().st_mtime_ns for p in (tmp_path / "hub").rglob("*")}
    assert run_script(SCRIPT, "verify", "--work", tmp_path / "w", "--hub", tmp_path / "hub", "--hash").returncode == 0
    assert {p: p.lstat().st_mtime_ns for p in (tmp_path / "hub").rglob("*")} == before  # C8: readable is enough, nothing is written


def test_layout_refuses_files_that_are_not_whole(tmp_path):
    """A missing shard in the hand-copied files exits 3, names it, and leaves the cache untouched; so does a folder with no asset in it."""
    (qwen(tmp_path / "usb") / SHARD).unlink()
    arguments = ("--from", tmp_path / "usb", "--work", tmp_path / "w", "--hub", tmp_path / "hub")
    named, unnamed = run_script(SCRIPT, "layout", "--only", "qwen3-vl", *arguments), run_script(SCRIPT, "layout", *arguments)
    assert named.returncode == 3 and f"{SHARD}: missing" in named.stderr
    assert unnamed.returncode == 3 and "none" in unnamed.stderr
    assert not (tmp_path / "hub").exists() and not (tmp_path / "w").exists()


def test_download_and_layout_of_every_repository_are_alike(hub, tmp_path):
    """The hub cache that `download --only all` leaves and the one that `layout` builds from hand-copied files hold the same files, links,
    refs and listings, with the bytes of the hub's; each passes the library's own offline lookup (which both commands end with)."""
    assert download(hub.url, tmp_path, "--only", "all").returncode == 0
    for repo, folder in hub.repos.items():
        shutil.copytree(folder, tmp_path / "usb" / repo)
    pinned = ("--only", "wan-diffusers", "--revision", SHA)  # main, in the hub; nobody wrote the commit of the copied files down
    for more in (("--only", "qwen3-vl", "--only", "wan-vae-pth", "--only", "cosmos3-nano"), pinned):
        laid = run_script(SCRIPT, "layout", "--from", tmp_path / "usb", "--work", tmp_path / "l", "--hub", tmp_path / "l/hub", *more)
        assert laid.returncode == 0, laid.stderr
    theirs, ours = (
        {k: v for k, v in tree(tmp_path / w / "hub").items() if not k.startswith(".locks/") and k != "CACHEDIR.TAG"} for w in ("w", "l")
    )
    assert ours == theirs and sum(k.endswith("/refs/main") for k in ours) == 3
    assert tree(tmp_path / "l/models/Cosmos3-Nano") == tree(hub.repos["nvidia/Cosmos3-Nano"])


def test_a_download_that_breaks_is_told_and_a_rerun_keeps_what_is_whole(hub, tmp_path):
    """C9: a connection that breaks in one file exits 3 with the cause and leaves no Cosmos3-Nano; a rerun asks for that file alone, from its
    first byte, and ends whole."""
    name = "transformer/diffusion_pytorch_model.safetensors"
    hub.cut[name] = 50
    broken = download(hub.url, tmp_path)
    assert broken.returncode == 3 and "found a connection that broke" in broken.stderr and "keeps finished files" in broken.stderr
    assert not (tmp_path / "w/models/Cosmos3-Nano").exists() and "Traceback" not in broken.stderr
    hub.cut.clear()
    hub.asked.clear()
    again = download(hub.url, tmp_path)
    assert again.returncode == 0, again.stderr
    assert [a.split("/", 5)[-1] for a in hub.asked if a.startswith("GET /nvidia")] == [name]


def test_a_hub_that_stalls_is_asked_again(hub, tmp_path):
    """A hub that falls silent in the middle of a file for longer than the library waits: the file is asked for again, and ends whole."""
    name = "vae/diffusion_pytorch_model.safetensors"
    hub.pause[name] = 30
    result = download(hub.url, tmp_path, HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert result.returncode == 0, result.stderr
    assert sum(a.startswith("GET ") and a.endswith(name) for a in hub.asked) == 2
    got = tmp_path / "w/models/Cosmos3-Nano" / name
    assert got.read_bytes() == (hub.repos["nvidia/Cosmos3-Nano"] / name).read_bytes()


def test_a_disk_that_is_too_small_is_known_before_the_download(hub, tmp_path):
    """A disk with less room than the hub lists for the repository exits 3 with both sizes, before any file is asked for."""
    patch = "import shutil; shutil.disk_usage = lambda path: type('usage', (), {'free': 100, 'total': 100})"
    write(tmp_path / "patch", {"sitecustomize.py": patch.encode()})
    result = download(hub.url, tmp_path, PYTHONPATH=str(tmp_path / "patch"))
    assert result.returncode == 3 and "for nvidia/Cosmos3-Nano; found 100 B" in result.stderr, result.stderr
    assert not any("/resolve/" in a for a in hub.asked)


def test_a_gated_side_repository_does_not_stop_the_others(hub, tmp_path):
    """C12: a refused repository that this pipeline does not need is told with its way out; the rest arrives; the exit code is 3."""
    hub.answer = lambda path: (403, {"X-Error-Code": "GatedRepo"}) if QWEN in path else None
    result = download(hub.url, tmp_path, "--only", "all")
    assert result.returncode == 3 and "download --only qwen3-vl" in result.stderr, result.stderr
    assert f"accept its terms at {hub.url}/{QWEN}" in result.stdout and "not needed by this pipeline" in result.stdout
    assert {line.split()[1] for line in result.stdout.splitlines() if line.startswith("[ok]")} == {
        "cosmos3-nano:",
        "wan-vae-pth:",
        "wan-diffusers:",
    }


def test_a_commit_can_be_asked_for(hub, tmp_path):
    """--revision: a commit that the hub has arrives, one that it lacks exits 3; a folder at another commit exits 4 and stays; what is no full
    commit, or belongs to no single asset, is a usage error (C5)."""
    only = ("--only", "cosmos3-nano", "--revision")
    assert download(hub.url, tmp_path, *only, SHA).returncode == 0
    before = tree(tmp_path / "w")
    other = download(hub.url, tmp_path, *only, "b" * 40)
    assert other.returncode == 4 and f"commit {SHA}, not {'b' * 40}" in other.stderr and tree(tmp_path / "w") == before
    absent = download(hub.url, tmp_path, "--only", "wan-diffusers", "--revision", "b" * 40)
    assert absent.returncode == 3 and "not that commit" in absent.stderr
    script = load_script("02_cache_models")
    for wrong in ([*only, SHA[:7]], [*only, SHA.upper()], ["--only", "all", "--revision", SHA], ["--revision", SHA]):
        with pytest.raises(SystemExit):
            script.parse_args(["download", *wrong])


def test_a_download_of_another_commit_does_not_mix(hub, tmp_path):
    """Files of an unfinished download that the commit asked for does not have are not carried into the folder."""
    partial = write(tmp_path / "w/models/.Cosmos3-Nano.partial", {"transformer/old-00001.safetensors": b"old", "vae/config.json": b"{}"})
    write(partial, {f".cache/huggingface/trees/{'b' * 40}.json": b'{"files": {"transformer/old-00001.safetensors": {"size": 3}}}'})
    assert download(hub.url, tmp_path).returncode == 0
    folder = tmp_path / "w/models/Cosmos3-Nano"
    assert cache_layout.list_files(folder) == cache_layout.list_files(hub.repos["nvidia/Cosmos3-Nano"])
    assert [p.stem for p in folder.glob(".cache/huggingface/trees/*")] == [SHA]


def test_repair_shows_then_does(tmp_path, capsys):
    """C1, C2, C3, C10: of a ref with a newline, a dead ref, a dangling link, an empty snapshot and an unfinished file, each is shown and
    nothing touched; with --yes each is put right, no blob is lost, the library finds what is sound, and a second repair has nothing to do."""
    script, hub = load_script("02_cache_models"), tmp_path / "hub"
    for source, revision in ((qwen, script.QWEN_COMMIT), (wan_diffusers, SHA)):
        repo = {qwen: QWEN, wan_diffusers: WAN_DIFFUSERS}[source]
        cache_layout.build(source(tmp_path / repo), hub, repo, revision, mode="copy")
    first, second = (cache_layout.repo_folder(hub, repo) for repo in (QWEN, WAN_DIFFUSERS))
    (first / "refs/main").write_text(script.QWEN_COMMIT + "\n")
    (first / "refs/old").write_text("c" * 40)
    (first / "snapshots" / ("c" * 40)).mkdir()
    (first / "snapshots" / script.QWEN_COMMIT / "gone.json").symlink_to("../../blobs/gone")
    (first / "blobs/abc.incomplete").write_bytes(b"half")
    (second / "refs/main").write_text("d" * 40)
    (second / "blobs/young.incomplete").write_bytes(b"half")
    for path in hub.rglob("*"):
        if path.name != "young.incomplete":
            os.utime(path, (1, 1), follow_symlinks=False)
    arguments = ["repair", "--work", str(tmp_path / "w"), "--hub", str(hub), "--json", str(tmp_path / "r.json")]
    before = tree(hub)
    assert script.main(arguments) == 0 and tree(hub) == before
    shown = [line for line in capsys.readouterr().out.splitlines() if "qwen3-vl: /" in line or "wan-diffusers: /" in line]
    repairs = json.loads((tmp_path / "r.json").read_text())["repairs"]
    assert len(repairs) == 6 and sum(line.startswith("[plan]") for line in shown) == 6
    assert sum(line.startswith("[warn]") and "young.incomplete" in line for line in shown) == 1
    assert script.main([*arguments, "--yes"]) == 0
    after = tree(hub)
    gone = {first / "blobs/abc.incomplete", first / "refs/old", first / "snapshots" / script.QWEN_COMMIT / "gone.json"}
    assert before.keys() - after.keys() == {p.relative_to(hub).as_posix() for p in gone} and not after.keys() - before.keys()
    changed = {k for k in after if after[k] != before[k]}
    assert changed == {(p / "refs/main").relative_to(hub).as_posix() for p in (first, second)}
    assert not (first / "snapshots" / ("c" * 40)).exists()
    for repo, revision in ((QWEN, script.QWEN_COMMIT), (WAN_DIFFUSERS, SHA)):
        assert cache_layout.verify(hub, repo, revision, hashes=True) == []
        assert Path(snapshot_download(repo, cache_dir=hub)).name == revision
    assert script.main(arguments) == 0 and json.loads((tmp_path / "r.json").read_text())["repairs"] == []


def test_repair_leaves_a_running_download_alone(tmp_path):
    """What a download that runs now has written (a ref before its snapshot, an empty snapshot, an unfinished blob) is not touched."""
    repo = cache_layout.repo_folder(tmp_path, "o/r")
    (repo / "snapshots" / SHA).mkdir(parents=True)
    write(repo, {"refs/main": SHA.encode(), "refs/v1": b"e" * 40, "blobs/a.incomplete": b"half"})
    assert cache_layout.repairs(tmp_path, "o/r") == []


def test_verify_tells_absent_from_broken(tmp_path):
    """Nothing there exits 3; a cache that is there but would fail offline exits 5, with a [FAIL] line and the command that mends it."""
    arguments = ("--only", "wan-diffusers", "--work", tmp_path / "w", "--hub", tmp_path / "hub")
    assert run_script(SCRIPT, "verify", *arguments).returncode == 3
    snapshot = cache_layout.build(wan_diffusers(tmp_path / "s"), tmp_path / "hub", "Wan-AI/Wan2.2-TI2V-5B-Diffusers", SHA, mode="copy")
    assert run_script(SCRIPT, "verify", *arguments).returncode == 0
    (snapshot / "vae/config.json").resolve().unlink()
    broken = run_script(SCRIPT, "verify", *arguments)
    assert broken.returncode == 5 and "[FAIL] wan-diffusers: vae/config.json: dangling link" in broken.stdout
    assert "download --force --only wan-diffusers" in broken.stderr
    asked = f"huggingface_hub offline, {WAN_DIFFUSERS} at {SHA} in {tmp_path / 'hub'}: "  # C14: the library's own words name none of them
    assert asked in broken.stdout


def test_the_offline_lookup_is_the_librarys_and_stays_offline(hub, tmp_path, monkeypatch):
    """resolve_offline reports what huggingface_hub says of an absent file, and asks no hub although one would answer."""
    stage = load_script("02_cache_models")
    cache_layout.build(write(tmp_path / "s", {"a.json": b"{}"}), tmp_path / "hub", "o/r", SHA)
    for name, value in {**ONLINE, "HF_ENDPOINT": hub.url}.items():
        monkeypatch.setenv(name, value)
    good, bad = stage.resolve_offline(tmp_path / "hub", [["o/r", SHA, ["*"], ["a.json"]], ["o/r", SHA, ["*"], ["b.json"]]])
    assert good == "" and "LocalEntryNotFoundError" in bad and "OfflineModeIsEnabled" in bad and hub.asked == []


def test_a_library_that_reaches_for_the_network_offline_is_found(hub, tmp_path, monkeypatch):
    """C15: a huggingface_hub that opens a connection in spite of HF_HUB_OFFLINE does not pass for an offline lookup."""
    library = f"import urllib.request\ndef snapshot_download(*args, **kwargs): urllib.request.urlopen({hub.url!r})\nhf_hub_download = snapshot_download\n"
    write(tmp_path / "fake", {"huggingface_hub.py": library.encode()})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    (error,) = load_script("02_cache_models").resolve_offline(tmp_path / "hub", [["o/r", SHA, ["*"], []]])
    assert "an offline lookup opened a socket" in error and hub.asked == []


def test_tiny_writes_stand_ins_without_a_network(tmp_path):
    """download --tiny fills both places from common/tiny.py, keeps out of the user's own cache, and a rerun finds all complete."""
    elsewhere = {"HF_HOME": str(tmp_path / "real")}
    command = (SCRIPT, "download", "--tiny", "--work", tmp_path / "tiny")
    first = run_script(*command, env=elsewhere)
    assert first.returncode == 0 and "assets=4 " in first.stdout, first.stderr
    assert (tmp_path / "tiny/models/Cosmos3-Nano/model_index.json").is_file() and not (tmp_path / "real").exists()
    assert [p.name for p in (tmp_path / "tiny/models").iterdir()] == ["Cosmos3-Nano"]
    before = tree(tmp_path / "tiny")
    again = run_script(*command, env=elsewhere)
    assert again.returncode == 0 and again.stdout.count("already complete") == 4 and tree(tmp_path / "tiny") == before


@pytest.mark.parametrize("argv", [("--help",), ("download", "--help")])
def test_help_is_quick_and_shows_the_table(argv):
    """--help answers within a second of a processor and lists every asset."""
    with processor_seconds(1):
        result = run_script(SCRIPT, *argv)
    assert result.returncode == 0
    assert all(name in result.stdout for name in ("cosmos3-nano", "qwen3-vl", "wan-vae-pth", "wan-diffusers"))


def test_wrong_usage_exits_2():
    """An unknown asset, a missing command, an abbreviated flag, and a name without its flag (C13) are usage errors."""
    for argv in (("download", "--only", "nano"), (), ("verify", "--dry"), ("download", "qwen3-vl")):
        assert run_script(SCRIPT, *argv).returncode == 2
