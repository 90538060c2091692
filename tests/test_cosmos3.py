"""common/cosmos3.py against the reference's numbers and against stock diffusers.    Run: ./run_tests.sh tests/test_cosmos3.py

The batched generation tower must be the stock forward, sample by sample: float32 outputs within 1e-5, gradients within 1e-5 relative.
"""

import math

import numpy as np
import pytest
import torch
from conftest import golden
from hypothesis import given
from hypothesis import strategies as st

from common import cosmos3, keys, tiny
from common.stock import DOMAIN, FPS, GRID, stock_forward

LENGTHS = (137, 10, 64)  # text tokens of the three prompts


@pytest.fixture(scope="module")
def stock():
    """A tiny stock Cosmos3OmniTransformer in float32 whose every tensor changes the output visibly."""
    model = cosmos3.build_transformer(tiny.TRANSFORMER, "cpu")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.3 * noise if "norm" in name else 0.2 * noise)
    return model


@pytest.fixture(scope="module")
def batch():
    """Three samples of different prompts and sigmas; x_0 and eps float32, action channels from 10 on zero."""
    g = torch.Generator().manual_seed(2)
    actions, action_noise = (torch.randn(3, 16, 64, generator=g) for _ in range(2))
    actions[..., 10:] = action_noise[..., 10:] = 0
    return {
        "ids": [torch.randint(0, 512, (n,), generator=g) for n in LENGTHS],
        "latents": torch.randn(3, 48, 5, 10, 20, generator=g),
        "vision_noise": torch.randn(3, 48, 5, 10, 20, generator=g),
        "actions": actions,
        "action_noise": action_noise,
        "sigma": torch.tensor([0.9, 0.31, 0.62]),
    }


def masks(clean_frames, clean_actions, n=3):
    frames, acts = torch.zeros(n, 5, dtype=torch.bool), torch.zeros(n, 16, dtype=torch.bool)
    frames[:, list(clean_frames)] = True
    acts[:, list(clean_actions)] = True
    return frames, acts


def noised(batch, frames, acts):
    return (
        cosmos3.add_noise(batch["latents"], batch["vision_noise"], batch["sigma"], frames, 2),
        cosmos3.add_noise(batch["actions"], batch["action_noise"], batch["sigma"], acts, 1),
    )


def ours(model, batch, frames, acts, checkpoint_every=0, compiled=False):
    """(vision, action) of all three samples in one forward of the generation tower."""
    prompts = cosmos3.PromptKV.pad([cosmos3.UndTower(model)(ids) for ids in batch["ids"]])
    tower = cosmos3.GenTower(model)
    tower.checkpoint_every = checkpoint_every
    if compiled:
        for layer in tower.layers:
            layer.compile(fullgraph=True)
    return tower(*noised(batch, frames, acts), batch["sigma"], prompts, torch.arange(3), frames, acts, DOMAIN, FPS)


def theirs(model, batch, i, frames, acts):
    """(vision, action) of sample i from the stock single-sample forward."""
    x, a = noised(batch, frames, acts)
    return stock_forward(model, batch["ids"][i], x[i : i + 1], a[i], float(batch["sigma"][i]), frames[i], acts[i])


# Which frames and actions are given: the policy (frame 0), image to video with a known first action, and inverse dynamics.
CLEAN = [((0,), ()), ((0,), (0, 1)), ((0, 1, 2, 3), ())]


@pytest.mark.parametrize("clean", CLEAN)
def test_batched_forward_is_the_stock_forward(stock, batch, clean):
    """Three samples of different prompt lengths in one batch give what stock diffusers gives one by one, whatever is clean."""
    frames, acts = masks(*clean)
    with torch.no_grad():
        vision, action = ours(stock, batch, frames, acts)
        for i in range(3):
            expected = theirs(stock, batch, i, frames, acts)
            assert expected[0].std() > 0.1 and expected[1].std() > 0.1  # an output near zero would prove nothing
            torch.testing.assert_close(vision[i], expected[0], rtol=0, atol=1e-5)
            torch.testing.assert_close(action[i], expected[1], rtol=0, atol=1e-5)


def loss(batch, frames, acts, vision, action):
    """The training loss of the whole batch from per-sample velocities."""
    targets = batch["vision_noise"] - batch["latents"], batch["action_noise"] - batch["actions"]
    v, a = cosmos3.flow_loss(vision, action, *targets, frames, acts, 10)
    return cosmos3.LOSS_SCALE * (v.mean() + a.mean())


def gradients(model, value):
    model.zero_grad()
    value.backward()
    names = set(keys.trained(keys.to_canonical(n) for n, _ in model.named_parameters()))
    return {n: p.grad.clone() for n, p in model.named_parameters() if keys.to_canonical(n) in names}


@pytest.fixture(scope="module")
def stock_gradients(stock, batch):
    frames, acts = masks((0,), ())
    outputs = [theirs(stock, batch, i, frames, acts) for i in range(3)]
    value = loss(batch, frames, acts, torch.stack([o[0] for o in outputs]), torch.stack([o[1] for o in outputs]))
    return value.item(), gradients(stock, value)


@pytest.mark.parametrize("way", ["plain", "every layer recomputed", "every second layer recomputed", "compiled"])
def test_gradients_are_the_stock_gradients(stock, batch, stock_gradients, way):
    """Loss and the gradient of every trained tensor equal the stock's within 1e-5 relative, with recomputation and compile too."""
    frames, acts = masks((0,), ())
    every = {"every layer recomputed": 1, "every second layer recomputed": 2}.get(way, 0)
    value = loss(batch, frames, acts, *ours(stock, batch, frames, acts, every, way == "compiled"))
    expected_value, expected = stock_gradients
    assert value.item() == pytest.approx(expected_value, rel=1e-6)
    found = gradients(stock, value)
    assert len(found) == 2 * 11 + 14
    for name, g in found.items():
        assert expected[name].norm() > 0, name
        assert (g - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


def test_padding_of_the_text_does_not_leak(stock, batch):
    """A sample's velocity is the same whether its prompt stands alone or is padded to a longer neighbour's length."""
    frames, acts = masks((0,), ())
    with torch.no_grad():
        together, _ = ours(stock, batch, frames, acts)
        und, tower = cosmos3.UndTower(stock), cosmos3.GenTower(stock)
        alone = cosmos3.PromptKV.pad([und(batch["ids"][1])])
        x, a = noised(batch, frames, acts)
        single, _ = tower(x[1:2], a[1:2], batch["sigma"][1:2], alone, torch.zeros(1, dtype=torch.long), frames[1:2], acts[1:2], DOMAIN, FPS)
    torch.testing.assert_close(together[1], single[0], rtol=0, atol=1e-5)


def test_only_the_domain_row_gets_gradient(stock, batch):
    """The other 31 rows of the action heads stay at zero gradient."""
    frames, acts = masks((0,), ())
    found = gradients(stock, loss(batch, frames, acts, *ours(stock, batch, frames, acts)))
    for name in ("action_proj_in.fc.weight", "action_proj_out.bias.weight"):
        rows = found[name].abs().sum(1)
        assert rows[DOMAIN] > 0 and rows.sum() == rows[DOMAIN]


def test_generation_tower_holds_the_trained_names(stock):
    """GenTower's state dict is exactly the trained half, under the published names."""
    canonical = [keys.to_canonical(n) for n, _ in stock.named_parameters()]
    assert {keys.to_canonical(n) for n, _ in cosmos3.GenTower(stock).named_parameters()} == set(keys.trained(canonical))


def test_understanding_tower_never_asks_for_gradients(stock, batch):
    """Keys and values of the prompt come out detached."""
    k, v = cosmos3.UndTower(stock)(batch["ids"][0])
    assert not k.requires_grad and not v.requires_grad and k.shape == v.shape == (2, 137, 2, 16)


def test_materialize_restores_the_rotary_buffer():
    """A tower built on the meta device has the same inverse frequencies as one built on the CPU; to_empty alone leaves garbage."""
    reference = cosmos3.build_transformer(tiny.TRANSFORMER, "cpu").rotary_emb.inv_freq
    tower = cosmos3.materialize(cosmos3.GenTower(cosmos3.build_transformer(tiny.TRANSFORMER)), "cpu")
    torch.testing.assert_close(tower.rotary_emb.inv_freq, reference, rtol=0, atol=0)


def test_positions_equal_the_reference():
    """mRoPE ids of vision and action tokens are the reference's to the last bit of float32."""
    for case in golden("libero_golden.json")["mrope"]:
        found = cosmos3.gen_positions(torch.tensor([case["und_len"]]), GRID, 16, case["fps"])[:, 0]
        assert found.dtype == torch.float32 and found.shape == (3, 266)
        np.testing.assert_array_equal(found[:, 0:250:50].numpy(), np.float32(case["vision_first_token_of_each_frame"]))
        np.testing.assert_array_equal(found[:, [50, 59, 60, 99]].numpy(), np.float32(case["vision_frame1_tokens_0_9_10_49"]))
        np.testing.assert_array_equal(found[:, 250:].numpy(), np.float32(case["action"]))


def test_sigma_equals_the_reference():
    """The waver distribution with shift 3 maps the reference's uniform draws to its sigmas (largest error seen: 0)."""
    case = golden("libero_golden.json")["sigma_waver_shift3"]
    np.testing.assert_allclose(cosmos3.waver_sigma(np.array(case["u"])), case["sigma"], rtol=0, atol=1e-15)


def test_sigma_quantiles():
    """Drawn sigmas have the mean and quantiles that the contract gives (0.710; 0.264 0.651 0.750 0.828 0.962)."""
    sigma = cosmos3.waver_sigma((np.arange(200_000) + 0.5) / 200_000)
    assert sigma.mean() == pytest.approx(0.710, abs=1e-3)
    np.testing.assert_allclose(np.quantile(sigma, [0.05, 0.25, 0.5, 0.75, 0.95]), [0.264, 0.651, 0.750, 0.828, 0.962], atol=1e-3)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 2))
def test_noise_depends_on_seed_and_sample_alone(seed, sample):
    """Drawing a sample's noise again, after any other sample, gives the same bits; the next sample's differ."""
    first = cosmos3.sample_noise(seed, sample, (2, 3), (4,))
    other = cosmos3.sample_noise(seed, sample + 1, (2, 3), (4,))
    again = cosmos3.sample_noise(seed, sample, (2, 3), (4,))
    np.testing.assert_array_equal(first.vision, again.vision)
    assert (first.sigma, first.drop_prompt, first.variant) == (again.sigma, again.drop_prompt, again.variant)
    assert first.sigma != other.sigma and not np.array_equal(first.vision, other.vision)


def test_noise_is_standard_normal_and_a_tenth_of_prompts_drop():
    """Over 2,000 samples: mean 0 and variance 1 of the noise, 10 % dropped prompts, within four standard errors."""
    draws = [cosmos3.sample_noise(42, i, (50,), (16, 10)) for i in range(2000)]
    values = np.concatenate([d.vision for d in draws])
    assert abs(values.mean()) < 4 / math.sqrt(values.size) and abs(values.var() - 1) < 4 * math.sqrt(2 / values.size)
    assert abs(np.mean([d.drop_prompt for d in draws]) - 0.1) < 4 * math.sqrt(0.09 / 2000)


def test_loss_denominators():
    """A zero prediction costs the mean square of v over ALL vision elements with clean frames at zero, and over 16 x 10 action numbers."""
    frames, acts = masks((0,), (), n=1)
    one, a = torch.ones(1, 48, 5, 10, 20), torch.ones(1, 16, 64)
    vision, action = cosmos3.flow_loss(torch.zeros_like(one), torch.zeros_like(a), one, a, frames, acts, 10)
    assert vision.item() == pytest.approx(4 / 5) and action.item() == pytest.approx(1.0)
    frames, acts = masks((0, 1), (0, 1, 2, 3), n=1)
    vision, action = cosmos3.flow_loss(torch.zeros_like(one), torch.zeros_like(a), one, a, frames, acts, 10)
    assert vision.item() == pytest.approx(3 / 5) and action.item() == pytest.approx(12 / 16)


def test_clean_frames_get_no_noise(batch):
    """x_t is x_0 on clean frames and (1 - s) x_0 + s eps elsewhere."""
    frames, acts = masks((0,), (3,))
    x, a = noised(batch, frames, acts)
    torch.testing.assert_close(x[:, :, 0], batch["latents"][:, :, 0], rtol=0, atol=0)
    torch.testing.assert_close(a[:, 3], batch["actions"][:, 3], rtol=0, atol=0)
    s = batch["sigma"][1]
    torch.testing.assert_close(x[1, :, 2], (1 - s) * batch["latents"][1, :, 2] + s * batch["vision_noise"][1, :, 2])


@given(st.integers(1, 3), st.integers(1, 4), st.sampled_from([2, 4, 10]), st.sampled_from([2, 6, 20]))
def test_patchify_round_trip(b, t, h, w):
    """unpatchify undoes patchify for any even grid, and the first token is the top left patch of the first frame."""
    x = torch.arange(b * 3 * t * h * w, dtype=torch.float32).view(b, 3, t, h, w)
    tokens = cosmos3.patchify(x, 2)
    assert tokens.shape == (b, t * h * w // 4, 12)
    torch.testing.assert_close(cosmos3.unpatchify(tokens, x.shape, 2), x, rtol=0, atol=0)
    torch.testing.assert_close(tokens[0, 0].view(2, 2, 3), x[0, :, 0, :2, :2].permute(1, 2, 0), rtol=0, atol=0)


# ---------------------------------------------------------------- sampling


def test_sampled_policy_is_the_stock_pipelines(stock, batch, base, monkeypatch):
    """From the same first frame and noise, two prompts sampled in one batch end where the stock pipeline's own loop ends, one by one.

    The pipeline runs in its policy mode with its native flow schedule and shift 5, 30 steps; only its prompt and the width of LIBERO's
    action (which it does not know) are given to it.
    """
    from diffusers import Cosmos3OmniPipeline, UniPCMultistepScheduler
    from diffusers.pipelines.cosmos import pipeline_cosmos3_omni as omni
    from PIL import Image

    solver = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0)
    pipe = Cosmos3OmniPipeline.from_pretrained(base, transformer=stock, scheduler=solver, enable_safety_checker=False, dtype=torch.float32)
    pipe.register_to_config(use_native_flow_schedule=True)
    pipe.set_progress_bar_config(disable=True)
    monkeypatch.setitem(omni._EMBODIMENT_TO_RAW_ACTION_DIM, "libero", 10)
    action = omni.CosmosActionCondition(
        mode="policy", chunk_size=16, domain_name="libero", resolution_tier=256, image=Image.new("RGB", (512, 256))
    )
    prompts = cosmos3.PromptKV.pad([cosmos3.UndTower(stock)(batch["ids"][i]) for i in (0, 2)])
    frame, vision_noise, action_noise = batch["latents"][::2, :, :1], batch["vision_noise"][::2], batch["action_noise"][::2, :, :10]
    tower = cosmos3.GenTower(stock)
    latents, actions = cosmos3.sample_policy(tower, frame, vision_noise, action_noise, prompts, torch.arange(2), DOMAIN, FPS)
    for i, ids in enumerate((batch["ids"][0], batch["ids"][2])):
        monkeypatch.setattr(pipe, "tokenize_prompt", lambda *a, ids=ids, **k: (ids.tolist(), ids.tolist()))
        out = pipe(
            "",
            action=action,
            fps=FPS,
            num_inference_steps=30,
            guidance_scale=1.0,
            latents=torch.cat([frame[i : i + 1], vision_noise[i : i + 1, :, 1:]], 2),
            action_latents=torch.nn.functional.pad(action_noise[i], (0, 54)),
            output_type="latent",
        )
        moved = (actions[i] - action_noise[i]).norm() / action_noise[i].norm()
        assert moved > 0.3  # a sampler that returns its noise would agree with nothing else
        torch.testing.assert_close(latents[i : i + 1], out.video, rtol=0, atol=2e-4)
        torch.testing.assert_close(actions[i], out.action[0], rtol=0, atol=2e-4)
        assert torch.equal(latents[i, :, :1], frame[i])
