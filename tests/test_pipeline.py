"""The walk-through as a user runs it, and what lies on disk afterwards.    Run: ./run_tests.sh tests/test_pipeline.py

One `run_all.sh --tiny` serves all tests here (fixture `walk`).
"""

import copy
import filecmp
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import REPO, load_script, run_script
from safetensors.torch import load_file, save_file

from common import cosmos3, keys, libero, quantile, weights
from common.libero import LIBERO
from common.stock import stock_forward

POLICY = "policy/model_diffusers"
LAST = "run/checkpoints/global_step_40"


def test_eight_done_lines(walk):
    """run_all.sh --tiny prints one [done] line a stage, in order, each with what it wrote, and no [FAIL]."""
    lines = (walk / "run_all.log").read_text().splitlines()
    done = [line.split()[1] for line in lines if line.startswith("[done]")]
    assert done == [
        "01_check_env",
        "02_cache_models",
        "03_base_to_dcp",
        "04_fetch_libero",
        "05_train_fsdp2",
        "06_convert_ckpt",
        "07_read_tb",
        "08_eval_policy",
    ]
    assert not [line for line in lines if line.startswith("[FAIL]")]
    assert (walk / POLICY / "model_index.json").is_file()


def test_loss_falls(walk):
    """Stage 07 says that train/loss fell, and the scalars agree: the last tenth is under three quarters of the first."""
    log = (walk / "run_all.log").read_text()
    assert "health: train/loss falling" in log
    rows = [line.split(",") for line in (walk / "run/scalars.csv").read_text().splitlines()[1:]]
    loss = [float(r[3]) for r in rows if r[0] == "train/loss"]
    assert len(loss) == 40 and np.mean(loss[-4:]) < 0.75 * np.mean(loss[:4])


def test_data_lies_as_the_download_would(walk):
    """Every file of the four suites, in the same place with the same bytes."""
    for suite in LIBERO.suites:
        demo = REPO / "tests/data/libero_demo" / suite
        files = [p.relative_to(demo) for p in demo.rglob("*") if p.is_file()]
        match, mismatch, errors = filecmp.cmpfiles(demo, walk / "data" / suite, files, shallow=False)
        assert len(match) == len(files) >= 6 and not mismatch and not errors


def run_all(*flags, timeout=120):
    command = [str(REPO / "run_all.sh"), *map(str, flags)]
    return subprocess.run(
        command, check=False, cwd=REPO, env={**os.environ, "VENV": sys.prefix}, capture_output=True, text=True, timeout=timeout
    )


def test_rerun_leaves_what_is_finished(walk, tmp_path):
    """A second run over a finished work folder, which has been moved, trains and writes nothing, and prints the same eight [done] stages."""
    moved = shutil.copytree(walk, tmp_path / "moved", symlinks=True)
    watched = [moved / n for n in ("models", "cache", "run/checkpoints", "policy", "eval")]
    before = [(p, p.stat().st_mtime_ns) for folder in watched for p in sorted(folder.rglob("*"))]
    run = run_all("--tiny", "--work", moved, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.count("[done]") == 8 and "[step]" not in run.stdout
    assert [(p, p.stat().st_mtime_ns) for folder in watched for p in sorted(folder.rglob("*"))] == before


def test_finished_output_of_other_settings_stops(walk):
    """The other weights asked for where a policy of the average lies, another stride where a cache lies: exit 4, and all as it was."""
    base = walk / "models/Cosmos3-Nano"
    for argv, file in (
        (
            ["06_convert_ckpt.py", "--src", walk / LAST, "--base", base, "--out", walk / POLICY, "--weights", "net"],
            walk / POLICY / "policy.json",
        ),
        (
            ["04_fetch_libero.py", "encode", "--data", walk / "data", "--base", base, "--out", walk / "cache", "--stride", 8],
            walk / "cache/manifest.json",
        ),
    ):
        before = file.read_bytes()
        run = run_script(*argv)
        assert run.returncode == 4 and "--force" in run.stderr and file.read_bytes() == before


def test_run_all_stops_at_the_first_failure(tmp_path):
    """With a base that is no base, run_all.sh ends with stage 03's exit code and starts no later stage."""
    (tmp_path / "nothing").mkdir()
    run = run_all("--tiny", "--work", tmp_path / "w", "--base", tmp_path / "nothing")
    assert run.returncode == 3 and "[FAIL] 03_base_to_dcp" in run.stderr
    assert "[done] 01_check_env" in run.stdout and "[plan] suites" not in run.stdout


# ---------------------------------------------------------------- encoded cache


def test_cached_latents_are_the_stock_vae(walk):
    """Windows of two suites: the cached latent is what a stock AutoencoderKLWan gives for those frames alone, within bf16 rounding: it differs
    from the stock bf16 encode by no more than that one differs from the same in float32, and is as near to float32 as that one."""
    from diffusers import AutoencoderKLWan

    manifest = libero.read_manifest(walk / "cache")
    vae = AutoencoderKLWan.from_pretrained(walk / "models/Cosmos3-Nano/vae", torch_dtype=torch.bfloat16)
    single = copy.deepcopy(vae).float()
    mean, std = (torch.tensor(v, dtype=torch.bfloat16).view(-1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
    for name in ("libero_goal", "libero_10"):
        cached, suite = libero.open_cached_suite(walk / "cache", manifest, name), libero.read_suite(walk / "data" / name)
        for row in (0, len(cached.start) - 1):  # in a full batch, and in one that was not
            episode = int(np.searchsorted(suite.start, cached.start[row], "right")) - 1
            first = cached.start[row] - suite.start[episode]
            clip = libero.episode_frames(suite, episode)[first : first + 17].transpose(0, 1)[None]
            with torch.no_grad():
                mu = vae.encode((clip.float() / 127.5 - 1).bfloat16()).latent_dist.mean[0]
                exact = (single.encode(clip.float() / 127.5 - 1).latent_dist.mean[0] - mean) / std
            stock, exact = ((mu - mean) * (1 / std))[:, :, :10, :20].float(), exact[:, :, :10, :20]
            found = torch.from_numpy(np.array(cached.latents[row])).view(torch.bfloat16).float()
            assert found.shape == (48, 5, 10, 20)
            apart, ours, theirs = ((a - b).norm() / exact.norm() for a, b in ((found, stock), (found, exact), (stock, exact)))
            print(f"{name} window {row}: {apart:.1e} of its norm from the stock encode; from float32: ours {ours:.1e}, stock {theirs:.1e}")
            assert apart <= theirs and ours <= 1.1 * theirs


def test_cached_actions_are_as_stored(walk):
    """actions.npy of a suite is the data set's float32 column, row for row."""
    suite = libero.read_suite(walk / "data/libero_object")
    np.testing.assert_array_equal(np.load(walk / "cache/libero_object/actions.npy"), suite.actions)


def test_cached_prompts_are_the_understanding_tower(walk):
    """The keys and values of one prompt equal the tower run on its token ids; the first prompt is the empty one of 10 tokens."""
    base, manifest = walk / "models/Cosmos3-Nano", libero.read_manifest(walk / "cache")
    assert manifest["prompts"][0] == ""
    tower = cosmos3.UndTower(cosmos3.build_transformer(json.loads((base / "transformer/config.json").read_text()))).bfloat16()
    weights.load_module(cosmos3.materialize(tower, "cpu"), weights.open_source(base))
    ids = libero.prompt_ids(libero.load_tokenizer(base / "text_tokenizer"), manifest["prompts"][3])
    k, v = tower(torch.from_numpy(ids))
    stored = load_file(walk / "cache/prompt_kv.safetensors")
    assert stored["k.0"].shape[1] == 10
    torch.testing.assert_close(stored["k.3"], k, rtol=0, atol=0)
    torch.testing.assert_close(stored["v.3"], v, rtol=0, atol=0)


def test_encode_never_calls_bad_latents_complete(walk, tmp_path):
    """A VAE with NaN weights: exit 5, and no folder with COMPLETE that a later stage could take for a cache."""
    base = shutil.copytree(walk / "models/Cosmos3-Nano", tmp_path / "base")
    file = next((base / "vae").glob("*.safetensors"))
    save_file({k: torch.full_like(v, torch.nan) for k, v in load_file(file).items()}, file, metadata={"format": "pt"})
    argv = [
        "04_fetch_libero.py",
        "encode",
        "--data",
        walk / "data",
        "--suites",
        "libero_goal",
        "--base",
        base,
        "--stride",
        64,
        "--out",
        tmp_path / "cache",
    ]
    run = run_script(*argv)
    assert run.returncode == 5 and "not finite" in run.stderr and not list(tmp_path.rglob("COMPLETE"))


@pytest.mark.parametrize(
    ("script", "flags", "out"),
    [
        ("03_base_to_dcp.py", ["--base", "{base}"], "{base}"),
        ("03_base_to_dcp.py", ["--base", "{base}"], "{home}"),
        ("04_fetch_libero.py", ["encode", "--data", "{data}", "--base", "{base}"], "{data}"),
        ("04_fetch_libero.py", ["encode", "--data", "{data}", "--base", "{base}"], "{base}"),
        ("06_convert_ckpt.py", ["--src", "{run}", "--base", "{base}"], "{base}"),
        ("06_convert_ckpt.py", ["--src", "{run}", "--base", "{base}"], "{run}"),
        ("06_convert_ckpt.py", ["--src", "{run}", "--base", "{base}"], "{mine}"),
    ],
)
def test_force_never_deletes_an_input_or_a_strangers_folder(walk, tmp_path, script, flags, out):
    """--force with --out at an input, above one, or at a folder that this stage did not write: refused, every byte still there."""
    home = tmp_path / "home"
    places = {"home": home, "base": home / "base", "data": home / "data", "run": home / "run", "mine": home / "mine"}
    shutil.copytree(walk / "models/Cosmos3-Nano", places["base"])
    shutil.copytree(walk / "data", places["data"])
    shutil.copytree(walk / LAST, places["run"])
    places["mine"].mkdir()
    (places["mine"] / "thesis.txt").write_text("keep")
    before = sorted((p, p.stat().st_size) for p in home.rglob("*"))
    run = run_script(script, *(f.format(**places) for f in flags), "--out", out.format(**places), "--force")
    assert run.returncode in (3, 4) and "[FAIL]" in run.stderr and "Traceback" not in run.stderr
    assert sorted((p, p.stat().st_size) for p in home.rglob("*")) == before


def test_stats_are_those_of_the_training_episodes(walk, tmp_path):
    """stats pools the encoded actions of the training episodes alone: q01, q99 and the count equal numpy's."""
    assert load_script("04_fetch_libero").main(["stats", "--data", str(walk / "data"), "--out", str(tmp_path / "stats.json")]) == 0
    rows = []
    for name in LIBERO.suites:
        s = libero.read_suite(walk / "data" / name)
        rows += [LIBERO.encode(s.actions[s.start[e] : s.start[e + 1]]) for e in libero.split_episodes(3)[0]]
    stats = quantile.load_stats(tmp_path / "stats.json")
    np.testing.assert_allclose(
        [stats.q01, stats.q99], np.quantile(np.concatenate(rows).astype(np.float64), [0.01, 0.99], axis=0), rtol=0, atol=1e-12
    )
    assert json.loads((tmp_path / "stats.json").read_text())["count"] == sum(map(len, rows)) and stats.fps == 20


# ---------------------------------------------------------------- conversion


def test_base_through_dcp_and_back_is_byte_identical(walk, tmp_path):
    """03 then 06 without training: every transformer file, index and config included, has the base's bytes."""
    base = walk / "models/Cosmos3-Nano"
    argv = ["--src", str(walk / "models/Cosmos3-Nano-DCP"), "--base", str(base), "--out", str(tmp_path / "out")]
    assert load_script("06_convert_ckpt").main(argv) == 0
    names = sorted(p.name for p in (base / "transformer").iterdir())
    assert len([n for n in names if n.endswith(".safetensors")]) >= 2
    assert sorted(p.name for p in (tmp_path / "out/transformer").iterdir()) == names
    match, mismatch, errors = filecmp.cmpfiles(base / "transformer", tmp_path / "out/transformer", names, shallow=False)
    assert match == names and not mismatch and not errors


def test_policy_opens_in_stock_diffusers(walk):
    """Cosmos3OmniPipeline opens the folder; its transformer holds the average that training left, and the base's frozen tensors."""
    from diffusers import Cosmos3OmniPipeline

    pipe = Cosmos3OmniPipeline.from_pretrained(walk / POLICY, enable_safety_checker=False, dtype=torch.bfloat16)
    state = pipe.transformer.state_dict()
    source, base = weights.open_source(walk / LAST), weights.open_source(walk / "models/Cosmos3-Nano")
    trained = set(keys.trained(source.net))
    assert len(state) == 2 * 22 + 22 - 5 and len(trained) == 2 * 11 + 14
    for name, value in state.items():
        key = keys.to_canonical(name)
        expected = source.read([source.ema[key]])[source.ema[key]] if key in trained else base.read([base.net[key]])[base.net[key]]
        torch.testing.assert_close(value.bfloat16(), expected.bfloat16(), rtol=0, atol=0)


def test_policy_forward_is_the_trained_models(walk):
    """One seeded training window: the stock forward of the converted policy equals our tower filled from the checkpoint's average."""
    from diffusers import Cosmos3OmniTransformer

    stock = Cosmos3OmniTransformer.from_pretrained(walk / POLICY, subfolder="transformer", dtype=torch.float32)
    ours = cosmos3.materialize(cosmos3.GenTower(cosmos3.build_transformer(stock.config)), "cpu")
    source = weights.open_source(walk / LAST)
    with torch.no_grad():
        for name, p in ours.named_parameters():
            stored = source.ema[keys.to_canonical(name)]
            p.copy_(source.read([stored])[stored].bfloat16())  # the export rounds to bf16
    g = torch.Generator().manual_seed(0)
    batch = {"ids": [torch.randint(0, 512, (137,), generator=g)], "sigma": torch.tensor([0.7])}
    for k, shape in {
        "latents": (1, 48, 5, 10, 20),
        "vision_noise": (1, 48, 5, 10, 20),
        "actions": (1, 16, 64),
        "action_noise": (1, 16, 64),
    }.items():
        batch[k] = torch.randn(shape, generator=g)
    frames, acts = torch.zeros(1, 5, dtype=torch.bool), torch.zeros(1, 16, dtype=torch.bool)
    frames[:, 0] = True
    x = cosmos3.add_noise(batch["latents"], batch["vision_noise"], batch["sigma"], frames, 2)
    a = cosmos3.add_noise(batch["actions"], batch["action_noise"], batch["sigma"], acts, 1)
    prompts = cosmos3.PromptKV.pad([cosmos3.UndTower(stock)(batch["ids"][0])])
    with torch.no_grad():
        vision, action = ours(x, a, batch["sigma"], prompts, torch.zeros(1, dtype=torch.long), frames, acts, LIBERO.domain_id, 20.0)
        expected = stock_forward(stock, batch["ids"][0], x, a[0], 0.7, frames[0], acts[0])
    torch.testing.assert_close(vision[0], expected[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(action[0], expected[1], rtol=0, atol=1e-5)


def test_policy_carries_its_recipe(walk):
    """policy.json names chunk, channels, domain, fps, canvas and stats; the stats beside it have that hash; COMPLETE is there."""
    policy = json.loads((walk / POLICY / "policy.json").read_text())
    robot = policy["robot"]
    assert (robot["chunk"], robot["raw_action_dim"], robot["domain_id"], policy["fps"]) == (16, 10, 5, 20.0)
    assert policy["canvas"] == {"height": 192, "width": 320, "content_height": 160, "content_width": 320}
    assert quantile.load_stats(walk / POLICY / "stats.json", policy["stats"]["block"]).sha256 == policy["stats"]["sha256"]
    assert policy["weights"] == "ema" and (walk / POLICY / "COMPLETE").is_file()
    config = json.loads((walk / POLICY / "transformer/config.json").read_text())
    assert config["action_gen"] is True and config["sound_gen"] is False and config["sound_dim"] is None


def test_rlinf_file_converts_to_the_same_policy(walk, tmp_path):
    """Our checkpoint -> RLinf's full_weights.pt -> diffusers gives the bytes that our checkpoint -> diffusers gives, for weights and for averages."""
    convert, base = load_script("06_convert_ckpt").main, ["--base", str(walk / "models/Cosmos3-Nano")]
    assert convert(["--src", str(walk / LAST), *base, "--out", str(tmp_path / "full_weights.pt"), "--to", "rlinf"]) == 0
    state = torch.load(tmp_path / "full_weights.pt", weights_only=True)
    assert len(state) == 2 * (2 * 22 + 17) and all(k.startswith(("omni.net.", "omni.net_ema.")) for k in state)
    assert {v.dtype for k, v in state.items() if "net_ema" in k} == {torch.float32}
    outputs = {}
    for which in ("net", "ema"):
        for name, src in (("direct", walk / LAST), ("rlinf", tmp_path / "full_weights.pt")):
            out = tmp_path / f"{which}-{name}"
            assert convert(["--src", str(src), *base, "--out", str(out), "--weights", which]) == 0
            outputs[which, name] = {p.name: p.read_bytes() for p in (out / "transformer").glob("*.safetensors")}
        assert outputs[which, "direct"] == outputs[which, "rlinf"]
    assert outputs["net", "direct"] != outputs["ema", "direct"]


def test_convert_refuses_another_base(walk, tmp_path):
    """A base whose weights changed is refused by fingerprint before anything is written (exit 3)."""
    other = shutil.copytree(walk / "models/Cosmos3-Nano", tmp_path / "other")
    file = sorted((other / "transformer").glob("*.safetensors"))[0]
    save_file({k: v + 1 for k, v in load_file(file).items()}, file, metadata={"format": "pt"})
    run = run_script("06_convert_ckpt.py", "--src", walk / LAST, "--base", other, "--out", tmp_path / "out")
    assert run.returncode == 3 and "trained from" in run.stderr and not (tmp_path / "out").exists()


def test_convert_refuses_an_existing_output(walk, tmp_path):
    """An existing OUT is exit 4, names --force, and keeps its bytes."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("keep")
    run = run_script("06_convert_ckpt.py", "--src", walk / LAST, "--base", walk / "models/Cosmos3-Nano", "--out", tmp_path / "out")
    assert run.returncode == 4 and "--force" in run.stderr and (tmp_path / "out/mine").read_text() == "keep"


def test_averages_that_never_saw_the_base_are_refused(walk, tmp_path):
    """An RLinf file saved before the first step has random frozen averages: --weights ema stops."""
    convert, base = load_script("06_convert_ckpt"), walk / "models/Cosmos3-Nano"
    source = weights.open_source(base)
    state = {keys.spell(k, "rlinf"): source.read([n])[n] for k, n in source.net.items() if not keys.is_sound(k)}
    state |= {k.replace("omni.net.", "omni.net_ema."): torch.randn(v.shape) for k, v in state.items()}
    torch.save(state, tmp_path / "full_weights.pt")
    argv = ["--src", str(tmp_path / "full_weights.pt"), "--base", str(base), "--out", str(tmp_path / "out"), "--weights", "ema"]
    with pytest.raises(convert.Precondition, match="frozen averages differ"):
        convert.main(argv)


def test_own_checkpoint_without_its_recipe_is_refused(walk, tmp_path):
    """Our checkpoint that lost policy.json is no RLinf file: exit 3, instead of a policy with an assumed recipe."""
    src = shutil.copytree(walk / LAST, tmp_path / "global_step_40")
    (src / "policy.json").unlink()
    run = run_script("06_convert_ckpt.py", "--src", src, "--base", walk / "models/Cosmos3-Nano", "--out", tmp_path / "out")
    assert run.returncode == 3 and "no policy.json" in run.stderr and not (tmp_path / "out").exists()


def test_foreign_checkpoint_says_that_its_recipe_is_assumed(walk, tmp_path):
    """A source without a recipe gets the published one, marked as assumed in policy.json and in a [warn] line."""
    run = run_script(
        "06_convert_ckpt.py", "--src", walk / "models/Cosmos3-Nano-DCP", "--base", walk / "models/Cosmos3-Nano", "--out", tmp_path / "out"
    )
    assert run.returncode == 0 and "[warn] recipe" in run.stdout
    assert "assumed" in json.loads((tmp_path / "out/policy.json").read_text())
