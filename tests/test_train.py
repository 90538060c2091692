"""05_train_fsdp2.py: exact resume, any number of ranks, the recipe's numbers.    Run: ./run_tests.sh tests/test_train.py

The cache is that of the walk-through; every run here is a real one. One-rank runs share this process, the others are forked (tests/fork_server.py).
"""

import json
import shutil

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import golden
from safetensors.torch import save_file
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from trainer import change_stats, fork_ranks, here, on_ranks, run, small, tensors, train

from common import keys, libero, quantile, tiny, weights
from common.console import OutputExists, Precondition, StageError


def refused(walk, out, *flags):
    """What the plan of such a run raises; the scripts' exit codes are those of the exception (test_existing_run_is_refused)."""
    with pytest.raises(StageError) as caught:
        train.plan(train.parse_args(small(walk, out, *flags)))
    return caught.value


@pytest.fixture(scope="module")
def straight(walk, tmp_path_factory):
    """Four steps in one go, one process, a checkpoint of each, two validations."""
    out = tmp_path_factory.mktemp("straight") / "run"
    losses, code, text = here(walk, out, "--steps", 4, "--save-every", 1, "--val-every", 2, "--val-windows", 4)
    assert code == 0, text
    return out, losses


@pytest.fixture(scope="module")
def two_ranks(walk, tmp_path_factory):
    """The same four steps on two ranks, from the diffusers folder, with another micro-batch and the average in host memory."""
    out = tmp_path_factory.mktemp("two") / "run"
    flags = ("--micro-batch", 2, "--base", walk / "models/Cosmos3-Nano", "--ema", "host", "--val-every", 2, "--val-windows", 4)
    return out, on_ranks(2, walk, out, "--steps", 4, "--save-every", 2, *flags)


def scalars(out):
    """{tag: [(step, value)]} of a run's TensorBoard files as they are, nothing merged."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_resume_is_bit_exact(walk, straight, tmp_path):
    """Two steps, then a resume to four, equal four steps in one go bit for bit: weights, averages, moments, train state and TensorBoard's steps.

    The straight run validated on the way, with the average swapped in, and the resumed one did not: validation leaves no trace.
    """
    out = tmp_path / "run"
    shutil.copytree(straight[0], out)
    for n in (3, 4):
        shutil.rmtree(out / f"checkpoints/global_step_{n}")
    args = (out / "args.json").read_text()
    losses, code, text = here(walk, out, "--steps", 4, "--save-every", 2, "--resume", "--lr", 1e-3)
    assert code == 0 and sorted(losses) == [3, 4] and "global_step_2" in text
    assert "[plan] resume lr: 0.001 in the checkpoint, 0.001 from now on" in text
    assert [step for step, _ in scalars(out)["train/loss"]] == [1, 2, 3, 4]
    assert (out / "args.json").read_text() == args and (out / "run.log").read_text().count("[plan] trained: 36 tensors") == 2
    launches = [json.loads(line) for line in (out / "launches.jsonl").read_text().splitlines()]
    assert [(n["from_step"], n["args"]["resume"]) for n in launches] == [(0, None), (2, "latest")]
    first, second = tensors(straight[0] / "checkpoints/global_step_4"), tensors(out / "checkpoints/global_step_4")
    assert first.keys() == second.keys() and len(first) == 4 * (2 * 11 + 14)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    assert (out / "checkpoints/global_step_4/train.json").read_text() == (straight[0] / "checkpoints/global_step_4/train.json").read_text()


def test_two_ranks_train_what_one_trains(straight, two_ranks):
    """World 1 and world 2, other micro-batch, other base container: the same losses, gradient norms and weights within float error."""
    assert straight[1].keys() == two_ranks[1].keys() == {1, 2, 3, 4}
    np.testing.assert_allclose(list(straight[1].values()), list(two_ranks[1].values()), rtol=1e-5, atol=1e-4)
    norms = [[v for _, v in scalars(o)["train/grad_norm"]] for o, _ in (straight, two_ranks)]
    np.testing.assert_allclose(*norms, rtol=1e-4)  # the whole gradient's, not one shard's
    first, second = (tensors(o / "checkpoints/global_step_4") for o, _ in (straight, two_ranks))
    for name, value in first.items():
        if name.startswith("net"):
            assert (value - second[name]).norm() <= 1e-4 * value.norm() + 1e-7, name


def test_weights_gathered_once_a_step_train_the_same(walk, two_ranks, tmp_path, monkeypatch):
    """--keep-gathered on two ranks with three micro-batches a step: bit for bit the run without it, validations with the average included.
    On one rank: each layer is gathered once a step, and without the flag twice a micro-batch."""
    out, plain = tmp_path / "run", two_ranks[0]
    flags = ("--micro-batch", 2, "--base", walk / "models/Cosmos3-Nano", "--ema", "host", "--val-every", 2, "--val-windows", 4)
    assert on_ranks(2, walk, out, "--steps", 4, "--save-every", 2, "--keep-gathered", *flags) == two_ranks[1]
    for step in (2, 4):
        first, second = (tensors(folder / f"checkpoints/global_step_{step}") for folder in (plain, out))
        assert all(torch.equal(value, second[name]) for name, value in first.items()), step
    tags = [t for t in scalars(plain) if t.startswith("val/")]
    assert tags and all(scalars(plain)[t] == scalars(out)[t] for t in tags)
    gathered, gather = [], FSDPParamGroup._to_unsharded
    monkeypatch.setattr(FSDPParamGroup, "_to_unsharded", lambda group: (gathered.append(group._module_fqn), gather(group)))
    for flags, times in (("--keep-gathered",), 1), ((), 6):
        gathered.clear()
        here(walk, tmp_path / f"{times}", "--steps", 2, "--micro-batch", 4, "--save-every", 0, *flags)
        assert gathered.count("layers.0") == 2 * times, gathered


def test_float8_trains_nearly_the_same(walk, straight, tmp_path):
    """--fp8: four steps within 1 % of the float32 losses but not equal to them, checkpoints with the same names."""
    out = tmp_path / "run"
    losses, code, text = here(walk, out, "--steps", 4, "--fp8", "--micro-batch", 4)
    assert code == 0, text
    close = [abs(losses[n] / straight[1][n] - 1) for n in (1, 2, 3, 4)]
    assert close[0] > 0 and max(close) < 0.01, close
    assert tensors(out / "checkpoints/global_step_4").keys() == tensors(straight[0] / "checkpoints/global_step_4").keys()


def test_a_run_of_two_ranks_goes_on_with_one(walk, straight, two_ranks, tmp_path):
    """A checkpoint of two ranks resumes on one rank with the losses of the straight run."""
    out = tmp_path / "run"
    shutil.copytree(two_ranks[0], out)
    shutil.rmtree(out / "checkpoints/global_step_4")
    losses, _, _ = here(walk, out, "--steps", 4, "--resume", "--micro-batch", "auto")
    np.testing.assert_allclose([losses[3], losses[4]], [straight[1][3], straight[1][4]], rtol=1e-5, atol=1e-4)


def test_a_run_of_two_ranks_goes_on_with_three(walk, straight, two_ranks, tmp_path):
    """The same checkpoint on three ranks, whose shards are cut elsewhere and not evenly: again the losses of the straight run."""
    out = tmp_path / "run"
    shutil.copytree(two_ranks[0], out)
    shutil.rmtree(out / "checkpoints/global_step_4")
    losses = on_ranks(3, walk, out, "--steps", 4, "--resume", "--micro-batch", 2)
    np.testing.assert_allclose([losses[3], losses[4]], [straight[1][3], straight[1][4]], rtol=1e-5, atol=1e-4)


def test_shards_of_replicas_travel(walk, straight, tmp_path):
    """Two replicas of two shards each take up a one-rank checkpoint, train step 3 and save; one rank goes on from there: the straight run's losses."""
    out = tmp_path / "run"
    shutil.copytree(straight[0], out)
    for n in (3, 4):
        shutil.rmtree(out / f"checkpoints/global_step_{n}")
    losses = on_ranks(4, walk, out, "--steps", 3, "--resume", "--replicate", 2)
    again, _, _ = here(walk, out, "--steps", 4, "--resume")
    np.testing.assert_allclose([losses[3], again[4]], [straight[1][3], straight[1][4]], rtol=1e-5, atol=1e-4)


def test_no_rank_holds_the_model(tmp_path):
    """Two ranks, a tower wide enough that its heads are small: from the meta build to the loaded base, each rank's live memory peaks below
    its own shard and three times the largest tensor (its read buffer, and a fresh head while it is drawn and cut), far below the whole."""
    config = tiny.TRANSFORMER | {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 64, "num_hidden_layers": 6}
    config |= {"rope_scaling": {"mrope_interleaved": True, "mrope_section": [16, 8, 8], "rope_type": "default"}}
    generator = torch.Generator().manual_seed(0)
    state = {keys.to_diffusers(k): torch.randn(s, generator=generator).bfloat16() for k, s in keys.shapes(config).items()}
    (tmp_path / "transformer").mkdir()
    save_file(state, tmp_path / "transformer/diffusion_pytorch_model.safetensors")
    (tmp_path / "transformer/config.json").write_text(json.dumps(config))
    dcp.save({f"net.{keys.to_canonical(k)}": v for k, v in state.items()}, checkpoint_id=str(tmp_path / "model"), no_dist=True)
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    codes, texts = fork_ranks(2, "count_start", tmp_path, tmp_path / "model", tmp_path / "transformer")
    assert codes == [0, 0], texts
    for rank in (0, 1):
        for container, count in json.loads((tmp_path / f"{rank}.json").read_text()).items():
            assert count["equal"] and count["shard"] <= 0.51 * count["whole"]
            held = count["peak"] - count["mapped"]
            assert count["shard"] <= held < count["shard"] + 3 * count["largest"] < 0.75 * count["whole"], (container, count)


@pytest.mark.parametrize(
    ("room", "chosen", "peak"),
    [(200, 32, 165), (165, 32, 165), (164, 16, 85), (39, 4, 25), (9, 0, 10)],
)
def test_largest_micro_batch_by_two_measurements(room, chosen, peak):
    """Peaks of 15 at 2 samples and 25 at 4 mean 5 a sample over 5: the largest divisor of 32 whose peak is within the room; none if not even one."""
    assert train.most_that_fits([1, 2, 4, 8, 16, 32], 2, 15, 4, 25, room) == (chosen, peak)


def test_validation_does_not_depend_on_the_ranks(straight, two_ranks):
    """One rank and two ranks, which share four windows, report the same held-out losses and action errors; both at steps 2 and 4."""
    first, second = scalars(straight[0]), scalars(two_ranks[0])
    tags = {"val/" + t for t in ("loss", "flow_matching_loss_vision", "flow_matching_loss_action")}
    tags |= {"val/" + t for t in ("position_error", "rotation_error_deg", "gripper_accuracy")}
    assert {t for t in first if t.startswith("val/")} == tags == {t for t in second if t.startswith("val/")}
    for tag in tags:
        assert [s for s, _ in first[tag]] == [2, 4] == [s for s, _ in second[tag]]
        np.testing.assert_allclose([v for _, v in first[tag]], [v for _, v in second[tag]], rtol=2e-3, atol=1e-4)
    assert first["val/loss"][1][1] < first["val/loss"][0][1] and 0 < first["val/rotation_error_deg"][1][1] < 180


def test_every_trained_tensor_moved_and_nothing_else_was_saved(walk, straight):
    """The checkpoint holds exactly the trained tensors; each differs from the base, the heads by a fresh start, the rest by training."""
    source, base = weights.open_source(straight[0] / "checkpoints/global_step_4"), weights.open_source(walk / "models/Cosmos3-Nano")
    assert set(source.net) == set(source.ema) == set(keys.trained(base.net))
    for key, name in source.net.items():
        assert source.info[name][1] == "torch.float32"
        assert not torch.equal(source.read([name])[name], base.read([base.net[key]])[base.net[key]].float()), key


def test_average_follows_its_recurrence(straight):
    """The average of step 1 is the weights (beta 0); each later one is beta * before + (1 - beta) * weights, bit for bit; the counter is saved."""
    before = None
    for n in (1, 2, 3, 4):
        checkpoint = straight[0] / f"checkpoints/global_step_{n}"
        assert json.loads((checkpoint / "train.json").read_text())["ema_updates"] == n
        state = tensors(checkpoint)
        average = {k: v for k, v in state.items() if k.startswith("net_ema.")}
        for name, value in average.items():
            weight = state[name.replace("net_ema.", "net.")]
            expected = weight if before is None else before[name].clone().lerp_(weight, 1 - train.ema_beta(n - 1))
            assert torch.equal(value, expected), (n, name)
            assert before is None or not torch.equal(value, before[name]), (n, name)
        before = average


def test_fresh_heads_are_drawn_as_the_recipe_says(walk, tmp_path, monkeypatch):
    """The action heads start from a truncated normal with std 1/sqrt(fan in), never beyond 3 std, biases zero; the base's heads are not used."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        source = weights.open_source(walk / "models/Cosmos3-Nano")
        config = json.loads((source.path / "config.json").read_text())
        args = train.parse_args([])
        tower = train.build_tower(config, init_device_mesh("cpu", (1,)), torch.device("cpu"), torch.float32, args)
        train.load_base(tower, source, seed=7)
        state = {keys.to_canonical(n): p.full_tensor().detach() for n, p in tower.named_parameters()}
    finally:
        dist.destroy_process_group()
    for key, std in {
        "action2llm.fc.weight": 64**-0.5,
        "llm2action.fc.weight": config["hidden_size"] ** -0.5,
        "action_modality_embed": config["hidden_size"] ** -0.5,
    }.items():
        assert state[key].abs().max() <= 3 * std and state[key].std() == pytest.approx(std, rel=0.25), key
    assert not state["action2llm.bias.weight"].any() and not state["llm2action.bias.weight"].any()
    warm = [k for k in state if "action" not in k]
    assert len(warm) == 2 * 11 + 9
    for key in warm:
        assert torch.equal(state[key], source.read([source.net[key]])[source.net[key]].float()), key


def test_learning_rate_equals_the_reference():
    """The schedule's factor at the reference's step counts (largest error seen: 1e-16)."""
    case = golden("libero_golden.json")["lr_factor"]
    np.testing.assert_allclose([train.lr_factor(n, 500, 16000) for n in case["n"]], case["factor"], rtol=1e-12)
    assert 5e-5 * train.lr_factor(10, 500, 16000) == pytest.approx(1e-6, rel=1e-4)  # what the guide's run logged after 10 steps


def test_ema_beta_equals_the_reference():
    """The power EMA's beta at the reference's iterations (rate 0.1)."""
    case = golden("libero_golden.json")["ema_beta_rate_0.1"]
    np.testing.assert_allclose([train.ema_beta(i) for i in case["iteration"]], case["beta"], rtol=1e-12)


@pytest.fixture(scope="module")
def stream(walk):
    manifest = libero.read_manifest(walk / "cache")
    return train.Stream(walk / "cache", manifest, quantile.load_stats(), channels=64, seed=3)


def test_suites_get_equal_shares_and_every_window_its_turn(stream):
    """Any run of samples shares the suites equally; one epoch of a suite visits each training window once and no held-out one."""
    n = len(stream.suites)
    for suite, rows in enumerate(stream.train):
        seen = [stream.window(suite + n * k) for k in range(2 * len(rows))]
        assert {s for s, _ in seen} == {suite}
        for epoch in (seen[: len(rows)], seen[len(rows) :]):
            assert sorted(r for _, r in epoch) == sorted(rows)
        assert [r for _, r in seen[: len(rows)]] != [r for _, r in seen[len(rows) :]]
        assert not stream.suites[suite].val[rows].any()


def test_a_batch_is_its_samples(stream):
    """Samples drawn together equal the same samples drawn one by one, in any order."""
    together = stream.batch([5, 900, 17])
    for i, sample in enumerate([5, 900, 17]):
        alone = stream.batch([sample])
        for k, v in together.items():
            assert torch.equal(v[i : i + 1], alone[k]), k


def test_batch_actions_are_normalized(stream):
    """The q01..q99 normalization was applied: most numbers lie in [-1.1, 1.1], the gripper is at -1 or 1, channels from 10 on are zero."""
    actions = stream.batch(range(64))["actions"]
    inside = (actions[..., :10].abs() <= 1.1).float().mean()
    assert inside > 0.9
    assert set(actions[..., 9].flatten().tolist()) <= {-1.0, 1.0} and not actions[..., 10:].any()
    identity = torch.tensor([1.0, 0, 0, 0, 1, 0])
    assert not torch.isclose(actions[..., 3:9], identity, atol=1e-3).all(-1).any()  # raw identity rotations are not left as they were


# ---------------------------------------------------------------- refusals


def test_plan_says_what_the_run_will_take(walk, tmp_path, capsys):
    """The plan's numbers, worked out by hand for the stand-in on one rank: bytes, tokens, operations, epochs, checkpoints."""
    flags = ("--steps", 10, "--ema", "host", "--save-every", 5, "--lr", 5e-5)
    train.plan(train.parse_args(small(walk, tmp_path / "run", *flags)))
    text, parameters = capsys.readouterr().out, 385_856
    in_layers = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128 + 2 * 16 + 2 * 64)
    flops = 6 * 12 * 266 * (in_layers + 2 * 2 * 64 * 266)
    assert "learning rates: 5e-05 x 31 tensors, 0.00025 x 5 tensors" in text
    assert f"10 steps of {12 * 266} tokens and {flops / 1e12:.4g} TFLOP" in text
    assert f"[plan] memory: {parameters * 16 / 2**20:.2f} MiB a rank for weights, gradients and Adam, 0 B for EMA" in text
    assert f"[plan] host memory: {parameters * 4 / 2**20:.2f} MiB a rank for EMA (host)" in text
    assert f"[plan] checkpoint: {parameters * 16 / 2**20:.2f} MiB each, 2 in all" in text
    assert f"libero_10 36 ({10 * 12 / 4 / 36:.1f} epochs)" in text


def test_existing_run_is_refused(walk, straight):
    """A run folder that exists is exit 4 and names --resume; nothing in it changes."""
    before = sorted((p, p.stat().st_mtime_ns) for p in straight[0].rglob("*"))
    _, done = run(walk, straight[0], "--steps", 8, code=4)
    assert "--resume" in done.stderr and sorted((p, p.stat().st_mtime_ns) for p in straight[0].rglob("*")) == before


def test_a_run_killed_before_its_first_checkpoint_starts_again(walk, straight, tmp_path):
    """--resume in a run folder without a complete checkpoint starts at step 0 with a [warn], even if it was killed before it wrote its args;
    a folder without COMPLETE does not count."""
    (tmp_path / "run/checkpoints/global_step_9").mkdir(parents=True)
    for name in ("lock", "run.log", "args.json.tmp"):
        (tmp_path / "run" / name).touch()
    losses, _, text = here(walk, tmp_path / "run", "--steps", 1, "--resume")
    assert "[warn] resume" in text and losses[1] == straight[1][1]


def test_resume_into_a_strangers_folder_is_refused(walk, tmp_path):
    """--resume with --out at a folder that is no run is refused, and nothing is written there."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home/thesis.txt").write_text("keep")
    error = refused(walk, tmp_path / "home", "--resume")
    assert isinstance(error, Precondition) and "something else" in str(error) and len(list((tmp_path / "home").iterdir())) == 1


def test_resume_from_what_is_no_checkpoint_is_refused(walk, tmp_path):
    """--resume PATH at a cache or a policy folder (which have a COMPLETE too) is refused and names what is missing."""
    for place, missing in ((walk / "cache", "policy.json, train.json"), (walk / "policy/model_diffusers", "train.json")):
        assert f"without {missing}" in str(refused(walk, tmp_path / "run", "--resume", place))


def test_two_branches_do_not_mix(walk, straight):
    """Going back to step 2 in a run that has step 4 is refused and asks for another --out: step 4 is never overwritten by another branch."""
    before = (straight[0] / "checkpoints/global_step_4/.metadata").stat().st_mtime_ns
    error = refused(walk, straight[0], "--steps", 5, "--resume", straight[0] / "checkpoints/global_step_2")
    assert (
        isinstance(error, OutputExists)
        and "another --out" in str(error)
        and (straight[0] / "checkpoints/global_step_4/.metadata").stat().st_mtime_ns == before
    )


def test_resume_with_another_seed_or_cache_is_refused(walk, straight, tmp_path):
    """The stream is a function of (seed, sample number) over one cache: another seed, another stride or other suites stop the resume by name."""
    assert "seed: 42 -> 7" in str(refused(walk, straight[0], "--steps", 8, "--resume", "--seed", 7))
    cache = shutil.copytree(walk / "cache", tmp_path / "cache")
    manifest = json.loads((cache / "manifest.json").read_text())
    (cache / "manifest.json").write_text(json.dumps(manifest | {"stride": 8}))
    assert "data.stride: 16 -> 8" in str(refused(walk, straight[0], "--steps", 8, "--resume", "--cache", cache))


def test_finished_run_is_left_alone(walk, straight):
    """--resume of a run that has reached --steps says so, exits 0 and trains nothing."""
    losses, code, text = here(walk, straight[0], "--steps", 4, "--resume")
    assert code == 0 and not losses and "[ok] finished" in text and "[done] 05_train_fsdp2" in text


def test_failed_start_leaves_no_run_folder(walk, tmp_path):
    """A cache whose latents are cut short stops before the run folder is made."""
    cache = shutil.copytree(walk / "cache", tmp_path / "cache")
    file = cache / "libero_goal/latents.bin"
    file.write_bytes(file.read_bytes()[:-2])
    _, code, text = here(walk, tmp_path / "run", "--cache", cache)
    assert code == 3 and "latents.bin" in text and not (tmp_path / "run").exists()


def test_resume_with_other_stats_is_refused(walk, straight, tmp_path):
    """A cache with other action statistics is named, with both hashes, before anything is trained."""
    cache = tmp_path / "cache"
    shutil.copytree(walk / "cache", cache)
    sha256 = change_stats(cache)
    error = refused(walk, straight[0], "--steps", 8, "--resume", "--cache", cache)
    assert "stats.sha256: " in str(error) and sha256[:12] in str(error) and "--allow-change stats" in str(error)


def test_cache_of_another_base_is_refused(walk, tmp_path):
    """A cache whose base fingerprint is not the base's is refused with both fingerprints."""
    cache = tmp_path / "cache"
    shutil.copytree(walk / "cache", cache)
    manifest = json.loads((cache / "manifest.json").read_text())
    (cache / "manifest.json").write_text(json.dumps(manifest | {"base_fingerprint": "0" * 64}))
    assert "000000000000" in str(refused(walk, tmp_path / "run", "--cache", cache)) and not (tmp_path / "run").exists()


def test_batch_arithmetic_is_refused_with_its_numbers(walk, tmp_path):
    """A global batch that micro-batches do not divide is refused and says the product."""
    assert (
        "10 = 4 x 1 x 2.5" in str(refused(walk, tmp_path / "run", "--global-batch", 10, "--micro-batch", 4))
        and not (tmp_path / "run").exists()
    )
