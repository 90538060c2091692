"""Cosmos3 in plain PyTorch: the understanding tower's keys and values, the generation tower in batches, and its sampler.

Both towers take their modules from a stock diffusers Cosmos3OmniTransformer and keep its parameter names, so a state dict
of GenTower is the trained half of the published one. The stock forward takes one sample; here a batch of B samples shares
one padded text length. Text never reads generation tokens, so its keys and values are a function of the prompt alone.

Sequence of one sample: text (und_len tokens) | vision (frames x rows x columns patches) | actions. Only the last two are here.
Training semantics: a flow x_t = (1 - s) x_0 + s eps with target v = eps - x_0; one s per sample; clean frames have s = 0.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SIGMA_SHIFT = 3.0  # of the 256 tier
WAVER = 1.29  # curvature of the "waver" timestep distribution
PROMPT_DROPOUT = 0.1  # share of samples that train on the empty prompt
LOSS_SCALE = 10.0  # weight of the vision loss and of the action loss
TEMPORAL = 4  # Wan2.2: pictures per latent frame
SAMPLER_STEPS, SAMPLER_SHIFT = 30, 5.0  # UniPC steps and flow shift of the reference's LIBERO server (not the training shift)

_GEN_ATTENTION = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "norm_added_q", "norm_added_k")
_UND_ATTENTION = ("to_q", "to_k", "to_v", "to_out", "norm_q", "norm_k")


def build_transformer(config: Mapping, device="meta"):
    """A stock Cosmos3OmniTransformer for a transformer/config.json, without sound, uninitialised on `device`.

    Keys that the constructor does not take are left out. On the meta device it costs no memory; see `materialize`.
    """
    import inspect

    from diffusers import Cosmos3OmniTransformer

    known = set(inspect.signature(Cosmos3OmniTransformer.__init__).parameters) - {"self", "dtype"}
    with torch.device(device):
        return Cosmos3OmniTransformer(**{k: v for k, v in config.items() if k in known} | {"sound_gen": False, "sound_dim": None})


def materialize(module: nn.Module, device) -> nn.Module:
    """Give a meta module storage on `device`, its values undefined, and recompute the one buffer that no checkpoint holds."""
    module.to_empty(device=device)
    old = module.rotary_emb.inv_freq
    theta = module.config.rope_theta ** (torch.arange(0, 2 * old.numel(), 2, dtype=torch.float32) / (2 * old.numel()))
    module.rotary_emb.inv_freq = (1.0 / theta).to(device)
    return module


def _rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., n, heads, d] turned by cos and sin [..., n, d]."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return x * cos + _rotate_half(x) * sin


def _pick(module: nn.Module, names) -> nn.Module:
    """A bare module that holds some children of another under their own names (parameters are shared, not copied)."""
    bare = nn.Module()
    for name in names:
        setattr(bare, name, getattr(module, name))
    return bare


# ---------------------------------------------------------------- understanding tower


class UndTower(nn.Module):
    """The frozen text tower, up to the keys and values that the generation tower reads."""

    def __init__(self, transformer):
        super().__init__()
        self.embed_tokens = transformer.embed_tokens
        self.rotary_emb = transformer.rotary_emb
        self.config = transformer.config
        self.heads, self.kv_heads, self.head_dim = (
            transformer.config.num_attention_heads,
            transformer.config.num_key_value_heads,
            transformer.config.head_dim,
        )
        self.layers = nn.ModuleList()
        for layer in transformer.layers:
            bare = _pick(layer, ("input_layernorm", "post_attention_layernorm", "mlp"))
            bare.self_attn = _pick(layer.self_attn, _UND_ATTENTION)
            self.layers.append(bare)

    @torch.no_grad()
    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids, int64 [n] -> keys (normed, rotated) and values, each [layers, n, kv heads, head dim]."""
        x = self.embed_tokens(ids)
        n = len(ids)
        position = torch.arange(n, dtype=torch.float32, device=ids.device).expand(3, 1, n)
        cos, sin = (t[0] for t in self.rotary_emb(position, ids.device, x.dtype))
        keys, values = [], []
        for i, layer in enumerate(self.layers):
            attn, h = layer.self_attn, layer.input_layernorm(x)
            k = _rope(attn.norm_k(attn.to_k(h).view(n, self.kv_heads, self.head_dim)), cos, sin)
            v = attn.to_v(h).view(n, self.kv_heads, self.head_dim)
            keys.append(k)
            values.append(v)
            if i == len(self.layers) - 1:
                break  # nothing reads what the last layer would still compute
            q = _rope(attn.norm_q(attn.to_q(h).view(n, self.heads, self.head_dim)), cos, sin)
            groups = self.heads // self.kv_heads
            k, v = (t.repeat_interleave(groups, 1).transpose(0, 1)[None] for t in (k, v))
            y = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, is_causal=True)
            x = x + attn.to_out(y[0].transpose(0, 1).reshape(n, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return torch.stack(keys), torch.stack(values)


@dataclass
class PromptKV:
    """Keys and values of P prompts, padded to the longest: k, v [layers, P, L, kv heads, head dim]; length int64 [P] (und_len)."""

    k: Tensor
    v: Tensor
    length: Tensor

    @classmethod
    def pad(cls, pairs: list[tuple[Tensor, Tensor]]) -> "PromptKV":
        """From one (k, v) per prompt, each [layers, n, kv heads, head dim]. The padding is zero and masked."""
        length = torch.tensor([k.shape[1] for k, _ in pairs])
        padded = [torch.stack([F.pad(pair[i], (0, 0, 0, 0, 0, int(length.max()) - pair[i].shape[1])) for pair in pairs], 1) for i in (0, 1)]
        return cls(*padded, length)

    def to(self, device, dtype=None) -> "PromptKV":
        return PromptKV(self.k.to(device, dtype), self.v.to(device, dtype), self.length.to(device))


# ---------------------------------------------------------------- generation tower


def gen_positions(
    und_len: Tensor, grid: tuple[int, int, int], actions: int, fps: float, margin: int = 15000, base_fps: float = 24
) -> Tensor:
    """Position ids float32 [3 (t, h, w), B, frames * rows * columns + actions] of the generation tokens.

    und_len: int64 [B], text tokens; grid: latent frames, patch rows, patch columns; fps of the data. Time runs in units of
    base_fps / 4 per second behind the text and a margin; rows and columns restart at 0. They must stay float32: in bf16
    15140.3 is 15168.
    """
    frames, rows, columns = grid
    t, row, column, chunk = (torch.arange(n, dtype=torch.float64, device=und_len.device) for n in (frames, rows, columns, actions))
    vision = torch.cartesian_prod(t * (TEMPORAL / fps) * (base_fps / TEMPORAL), row, column).T
    time = (chunk + 1) / fps * (base_fps / TEMPORAL)
    action = torch.stack([time, torch.zeros_like(time), torch.zeros_like(time)])
    position = torch.cat([vision, action], 1)[:, None].repeat(1, len(und_len), 1)
    position[0] += (und_len + margin)[:, None]
    return position.float()


def patchify(latents: Tensor, p: int) -> Tensor:
    """[B, C, T, H, W] -> [B, T * H/p * W/p, p * p * C], frame-major, then rows, then columns."""
    b, c, t, h, w = latents.shape
    return latents.view(b, c, t, h // p, p, w // p, p).permute(0, 2, 3, 5, 4, 6, 1).reshape(b, -1, p * p * c)


def unpatchify(tokens: Tensor, shape: tuple[int, ...], p: int) -> Tensor:
    """The inverse of patchify, to [B, C, T, H, W] = shape."""
    b, c, t, h, w = shape
    return tokens.view(b, t, h // p, w // p, p, p, c).permute(0, 6, 1, 2, 4, 3, 5).reshape(shape)


class GenLayer(nn.Module):
    """The generation half of one decoder layer. The text half enters as keys and values."""

    def __init__(self, layer, config):
        super().__init__()
        self.self_attn = _pick(layer.self_attn, _GEN_ATTENTION)
        self.mlp_moe_gen = layer.mlp_moe_gen
        self.input_layernorm_moe_gen = layer.input_layernorm_moe_gen
        self.post_attention_layernorm_moe_gen = layer.post_attention_layernorm_moe_gen
        self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, und_k: Tensor, und_v: Tensor, mask: Tensor) -> Tensor:
        """x [B, n, hidden]; cos, sin [B, n, head dim]; und_k, und_v [B, L, kv heads, head dim]; mask bool [B, 1, 1, L + n]."""
        b, n, _ = x.shape
        attn, h = self.self_attn, self.input_layernorm_moe_gen(x)
        q = _rope(attn.norm_added_q(attn.add_q_proj(h).view(b, n, self.heads, self.head_dim)), cos, sin)
        k = _rope(attn.norm_added_k(attn.add_k_proj(h).view(b, n, self.kv_heads, self.head_dim)), cos, sin)
        v = attn.add_v_proj(h).view(b, n, self.kv_heads, self.head_dim)
        k, v = (torch.cat([und, gen], 1).transpose(1, 2) for und, gen in ((und_k, k), (und_v, v)))
        # Grouped heads with a mask: on CUDA only cuDNN's kernel takes both, 1.2 times as fast as with the heads repeated, and keeps a
        # quarter of the keys and values for the backward pass.
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, enable_gqa=True)
        x = x + attn.to_add_out(y.transpose(1, 2).reshape(b, n, -1))
        return x + self.mlp_moe_gen(self.post_attention_layernorm_moe_gen(x))


class GenTower(nn.Module):
    """The trained half of Cosmos3: 410 tensors, 6,982,401,216 parameters at Nano size. Parameters are shared with `transformer`."""

    def __init__(self, transformer):
        super().__init__()
        self.config = config = transformer.config
        self.layers = nn.ModuleList(GenLayer(layer, config) for layer in transformer.layers)
        for name in (
            "norm_moe_gen",
            "proj_in",
            "proj_out",
            "time_proj",
            "time_embedder",
            "action_proj_in",
            "action_proj_out",
            "rotary_emb",
        ):
            setattr(self, name, getattr(transformer, name))
        self.action_modality_embed = transformer.action_modality_embed
        self.checkpoint_every = 0  # recompute every k-th layer in the backward pass; 0: none, 1: all

    def forward(
        self,
        latents: Tensor,
        actions: Tensor,
        sigma: Tensor,
        prompts: PromptKV,
        prompt: Tensor,
        clean_frames: Tensor,
        clean_actions: Tensor,
        domain: int,
        fps: float,
    ) -> tuple[Tensor, Tensor]:
        """Velocities of one batch; what is clean is predicted as zero.

        latents [B, 48, T, H, W] and actions [B, n, 64]: x_t in the compute dtype, clean ones as they are
        sigma float32 [B] in [0, 1]; prompt int64 [B], rows of `prompts`
        clean_frames bool [B, T] and clean_actions bool [B, n]: True where a token is given: no timestep embedding, no prediction
        domain: row of the action heads, one for the batch; fps of the data
        -> vision [B, 48, T, H, W] and action [B, n, 64], in the compute dtype
        """
        c, dtype = self.config, latents.dtype
        b, _, t, h, w = latents.shape
        p = c.latent_patch_size
        grid = (t, h // p, w // p)
        # The sinusoid and its MLP run in the MLP's own dtype (float32 in training), then join the compute dtype.
        time = self.time_embedder(
            self.time_proj(sigma.float() * (1000 * c.timestep_scale)).to(self.time_embedder.linear_1.weight.dtype)
        ).to(dtype)
        noisy = torch.cat([~clean_frames.repeat_interleave(grid[1] * grid[2], 1), ~clean_actions], 1)

        vision = self.proj_in(patchify(latents, p))
        # One domain a batch makes the domain-aware head one matrix product (a stock DomainAwareLinear gathers a matrix per token).
        weight, bias = self.action_proj_in.fc.weight[domain], self.action_proj_in.bias.weight[domain]
        action = actions @ weight.view(c.action_dim, c.hidden_size).to(dtype) + bias.to(dtype) + self.action_modality_embed.to(dtype)
        x = torch.cat([vision, action], 1) + time[:, None] * noisy[..., None].to(dtype)

        und_len = prompts.length[prompt]
        position = gen_positions(und_len, grid, actions.shape[1], fps, c.unified_3d_mrope_temporal_modality_margin, c.base_fps)
        cos, sin = self.rotary_emb(position, x.device, dtype)
        text = torch.arange(prompts.k.shape[2], device=x.device) < und_len[:, None]
        mask = torch.cat([text, text.new_ones(b, x.shape[1])], 1)[:, None, None]
        for i, layer in enumerate(self.layers):
            args = (x, cos, sin, prompts.k[i].index_select(0, prompt), prompts.v[i].index_select(0, prompt), mask)
            recompute = self.checkpoint_every and i % self.checkpoint_every == 0 and torch.is_grad_enabled()
            x = checkpoint(layer, *args, use_reentrant=False) if recompute else layer(*args)

        x = self.norm_moe_gen(x)
        split = math.prod(grid)
        vision = unpatchify(self.proj_out(x[:, :split]), latents.shape, p) * ~clean_frames[:, None, :, None, None]
        weight, bias = self.action_proj_out.fc.weight[domain], self.action_proj_out.bias.weight[domain]
        action = (x[:, split:] @ weight.view(c.hidden_size, c.action_dim).to(dtype) + bias.to(dtype)) * ~clean_actions[..., None]
        return vision, action


# ---------------------------------------------------------------- noise and loss


def waver_sigma(u, shift: float = SIGMA_SHIFT):
    """Uniform u in [0, 1] -> sigma in [0, 1] of the "waver" distribution with a shift; u = 0 gives 1, u = 1 gives 0."""
    r = 1 - u - WAVER * (np.cos(np.pi * u / 2) ** 2 - 1 + u)
    return shift * r / (1 + (shift - 1) * r)


@dataclass(frozen=True)
class SampleNoise:
    """All randomness of one training sample."""

    sigma: float
    drop_prompt: bool
    variant: float  # uniform [0, 1): which wording of the task
    vision: np.ndarray  # float32, standard normal
    action: np.ndarray


def sample_noise(seed: int, sample: int, latent_shape: tuple[int, ...], action_shape: tuple[int, ...]) -> SampleNoise:
    """The noise of global sample number `sample`: a counter-based stream keyed by (seed, sample), the same on any rank, batch or device."""
    rng = np.random.Generator(np.random.Philox(key=np.array([seed, sample], np.uint64)))
    u, drop, variant = rng.random(3)
    draw = (rng.standard_normal(shape, np.float32) for shape in (latent_shape, action_shape))
    return SampleNoise(float(waver_sigma(u)), bool(drop < PROMPT_DROPOUT), float(variant), *draw)


def add_noise(x0: Tensor, eps: Tensor, sigma: Tensor, clean: Tensor, time_dim: int) -> Tensor:
    """x_t = (1 - s) x_0 + s eps with s = 0 where `clean` [B, T]; `time_dim` is T's place in x_0. Same dtype as x_0 (float32)."""
    s = sigma[:, None] * ~clean
    s = s.view(*s.shape[:1], *[-1 if d == time_dim else 1 for d in range(1, x0.ndim)])
    return (1 - s) * x0 + s * eps


def flow_loss(
    vision: Tensor, action: Tensor, vision_target: Tensor, action_target: Tensor, clean_frames: Tensor, clean_actions: Tensor, raw_dim: int
) -> tuple[Tensor, Tensor]:
    """Per-sample squared errors, float32 [B] each, against v = eps - x_0.

    Clean frames and actions count as zero error and stay in the denominator (the vision loss is 4/5 of the mean over noisy
    frames); action channels from raw_dim on are padding and count nowhere.
    """
    dv = (vision.float() - vision_target.float()) * ~clean_frames[:, None, :, None, None]
    da = ((action.float() - action_target.float()) * ~clean_actions[..., None])[..., :raw_dim]
    return dv.square().mean((1, 2, 3, 4)), da.square().mean((1, 2))


# ---------------------------------------------------------------- sampling


@lru_cache
def solver_table(steps: int, shift: float, device) -> tuple[tuple[float, ...], Tensor]:
    """UniPC on the flow's own schedule as a table: (sigma that the network sees at each step, weights float32 [steps, steps + 1] on `device`).

    Row i gives x after step i as a sum over x at the start and the velocities of steps 0..i. diffusers' scheduler is linear in both, so it
    is run once, in float64, on one unit vector for each. Sampling then needs no scheduler, waits for no device, and can be a CUDA graph.
    Its sigmas go from 0.999 down to 0, evenly, then shifted; the network sees the sigma of the whole timestep below (0..999), as in the
    reference server.
    """
    from diffusers import UniPCMultistepScheduler

    solver = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)
    train_steps = solver.config.num_train_timesteps
    solver.set_timesteps(sigmas=np.linspace(1 - 1 / train_steps, 0, steps + 1)[:-1])
    solver.set_begin_index(0)  # else it looks each step's timestep up, and two may round to the same one
    units = torch.eye(steps + 1, dtype=torch.float64)
    x, rows = units[:1], []
    for i, t in enumerate(solver.timesteps):
        x = solver.step(units[i + 1 : i + 2], t, x, return_dict=False)[0]
        rows.append(x)
    return tuple(float(t) / train_steps for t in solver.timesteps), torch.cat(rows).float().to(device)


@torch.no_grad()
def sample_policy(
    tower: GenTower,
    frame: Tensor,
    vision_noise: Tensor,
    action_noise: Tensor,
    prompts: PromptKV,
    prompt: Tensor,
    domain: int,
    fps: float,
    steps: int = SAMPLER_STEPS,
    shift: float = SAMPLER_SHIFT,
    guidance: float = 1.0,
    empty: int = 0,
) -> tuple[Tensor, Tensor]:
    """Denoise the rest of the clip and the action chunk together, given the first latent frame: the policy.

    frame: float32 [B, 48, 1, H, W], clean; vision_noise: float32 [B, 48, T, H, W]; action_noise: float32 [B, n, the robot's own channels]
    prompt: int64 [B], rows of `prompts`; domain and fps as in GenTower.forward
    guidance: v = v_empty + guidance (v - v_empty), a second pass a step with row `empty` of `prompts`, the dropped prompt; 1.0: no second pass
    -> latents float32 [B, 48, T, H, W] and normalized actions, shaped like their noise

    The solver works in float32 (see solver_table); the compute dtype is that of `prompts`.
    """
    b, _, t, _, _ = vision_noise.shape
    sigmas, table = solver_table(steps, shift, vision_noise.device)
    dtype, padding = prompts.k.dtype, (0, tower.config.action_dim - action_noise.shape[2])
    clean_frames = torch.zeros(b, t, dtype=torch.bool, device=vision_noise.device)
    clean_frames[:, 0] = True
    clean_actions = torch.zeros(action_noise.shape[:2], dtype=torch.bool, device=vision_noise.device)

    def velocity(x, a, sigma, prompt):
        vision, action = tower(x.to(dtype), F.pad(a, padding).to(dtype), sigma, prompts, prompt, clean_frames, clean_actions, domain, fps)
        return vision.float(), action[..., : a.shape[2]].float()

    latents, actions = torch.cat([frame, vision_noise[:, :, 1:]], 2), action_noise
    # The start and one velocity a step, of either kind
    history = [x.new_zeros(steps + 1, *x.shape) for x in (latents, actions)]
    history[0][0], history[1][0] = latents, actions
    for i, s in enumerate(sigmas):
        sigma = torch.full((b,), s, device=latents.device)
        found = velocity(latents, actions, sigma, prompt)
        if guidance != 1:
            found = [
                e + guidance * (v - e)
                for v, e in zip(found, velocity(latents, actions, sigma, torch.full_like(prompt, empty)), strict=True)
            ]
        for past, v in zip(history, found, strict=True):
            past[i + 1] = v
        latents, actions = (
            (table[i, : i + 2].view(-1, *[1] * v.ndim) * past[: i + 2]).sum(0) for past, v in zip(history, found, strict=True)
        )
        latents[:, :, :1] = frame  # the sums leave it within rounding; it is given
    return latents, actions
