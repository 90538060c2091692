"""Names of Cosmos3 tensors: five spellings, one rename table, filters on canonical names, parameter groups.

The canonical key K is cosmos-framework's, relative to the network (`language_model.model.layers.0.self_attn.q_proj.weight`).
    cosmos DCP         net.K, net_ema.K                          cosmos HF export   model.net.K
    RLinf .pt          omni.net.K, omni.net_ema.K                RLinf DCP          fsdp_checkpoint.model.omni.net.K
    diffusers          the names of Cosmos3OmniTransformer, no prefix
Renames only: no tensor is transposed, split or merged between the spellings (both sides view DomainAwareLinear's row as (in, out)).

Filters (`TRAINED`, `SKIPPED`, `LR_MULTIPLIERS`) are substrings of canonical names. On diffusers names they would silently
miss the attention (`add_q_proj` does not contain `moe_gen`), so every function here takes canonical names.
"""

import re
from collections.abc import Iterable, Mapping

from common.console import Precondition

# (canonical, diffusers, shape) outside the layers, in the state-dict order of Cosmos3OmniTransformer.
# Shape letters: H hidden, V vocabulary, P patch (48*2*2), T timestep sinusoid, E domains, A action channels, S sound channels.
_ROOT_BEFORE = [
    ("action_modality_embed", "action_modality_embed", "H"),
    ("sound_modality_embed", "audio_modality_embed", "H"),
    ("language_model.model.embed_tokens.weight", "embed_tokens.weight", "VH"),
]
_ROOT_AFTER = [
    ("language_model.model.norm.weight", "norm.weight", "H"),
    ("language_model.model.norm_moe_gen.weight", "norm_moe_gen.weight", "H"),
    ("language_model.lm_head.weight", "lm_head.weight", "VH"),
    ("vae2llm.weight", "proj_in.weight", "HP"),
    ("vae2llm.bias", "proj_in.bias", "H"),
    ("llm2vae.weight", "proj_out.weight", "PH"),
    ("llm2vae.bias", "proj_out.bias", "P"),
    ("time_embedder.mlp.0.weight", "time_embedder.linear_1.weight", "HT"),
    ("time_embedder.mlp.0.bias", "time_embedder.linear_1.bias", "H"),
    ("time_embedder.mlp.2.weight", "time_embedder.linear_2.weight", "HH"),
    ("time_embedder.mlp.2.bias", "time_embedder.linear_2.bias", "H"),
    ("action2llm.fc.weight", "action_proj_in.fc.weight", ("E", "A*H")),
    ("action2llm.bias.weight", "action_proj_in.bias.weight", "EH"),
    ("llm2action.fc.weight", "action_proj_out.fc.weight", ("E", "A*H")),
    ("llm2action.bias.weight", "action_proj_out.bias.weight", "EA"),
    ("sound2llm.weight", "audio_proj_in.weight", "HS"),
    ("sound2llm.bias", "audio_proj_in.bias", "H"),
    ("llm2sound.weight", "audio_proj_out.weight", "SH"),
    ("llm2sound.bias", "audio_proj_out.bias", "S"),
]
# Tails below layers.N. Q query width, K key/value width, D head, I intermediate.
_LAYER = [
    ("self_attn.q_proj.weight", "self_attn.to_q.weight", "QH"),
    ("self_attn.k_proj.weight", "self_attn.to_k.weight", "KH"),
    ("self_attn.v_proj.weight", "self_attn.to_v.weight", "KH"),
    ("self_attn.o_proj.weight", "self_attn.to_out.weight", "HQ"),
    ("self_attn.q_norm.weight", "self_attn.norm_q.weight", "D"),
    ("self_attn.k_norm.weight", "self_attn.norm_k.weight", "D"),
    ("self_attn.q_proj_moe_gen.weight", "self_attn.add_q_proj.weight", "QH"),
    ("self_attn.k_proj_moe_gen.weight", "self_attn.add_k_proj.weight", "KH"),
    ("self_attn.v_proj_moe_gen.weight", "self_attn.add_v_proj.weight", "KH"),
    ("self_attn.o_proj_moe_gen.weight", "self_attn.to_add_out.weight", "HQ"),
    ("self_attn.q_norm_moe_gen.weight", "self_attn.norm_added_q.weight", "D"),
    ("self_attn.k_norm_moe_gen.weight", "self_attn.norm_added_k.weight", "D"),
    *(
        (f"{mlp}.{name}_proj.weight", f"{mlp}.{name}_proj.weight", shape)
        for mlp in ("mlp", "mlp_moe_gen")
        for name, shape in (("gate", "IH"), ("up", "IH"), ("down", "HI"))
    ),
    *(
        (f"{name}.weight", f"{name}.weight", "H")
        for name in ("input_layernorm", "input_layernorm_moe_gen", "post_attention_layernorm", "post_attention_layernorm_moe_gen")
    ),
]
SOUND = ("sound2llm", "llm2sound", "sound_modality_embed")

# The LIBERO recipe's lists, as RLinf spells them. `action_pos_embed` names nothing in Nano (positions are mRoPE); it is kept so the list reads the same.
TRAINED = ("moe_gen", "time_embedder", "vae2llm", "llm2vae", "action2llm", "llm2action", "action_modality_embed")
SKIPPED = ("net_ema.", "action2llm", "llm2action", "action_modality_embed", "action_pos_embed")
LR_MULTIPLIERS = {"action2llm": 5.0, "llm2action": 5.0, "action_modality_embed": 5.0}
# Cosmos3-Nano's transformer/config.json, as far as it fixes shapes.
NANO = {
    "num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "patch_latent_dim": 192, "num_embodiment_domains": 32, "action_dim": 64, "sound_dim": 64,
}  # fmt: skip
NANO_VISION = (351, 576_388_336)  # tensors, parameters of its vision tower, Qwen3VLVisionModel
NANO_TRAINED = (410, 6_982_401_216)  # tensors, parameters: 36 * 11 + 14

_PREFIX = re.compile(r"(?:(?:fsdp_checkpoint\.model\.)?omni\.|model\.)?(net|net_ema)\.")
_WRAPPERS = re.compile(r"(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
_LAYER_NAME = re.compile(r"(?:language_model\.model\.)?layers\.(0|[1-9][0-9]*)\.(.+)")


def rename_table(num_layers: int, sound: bool = True) -> dict[str, str]:
    """Canonical -> diffusers name of every tensor, in state-dict order: 22 * layers + 22, five fewer without sound."""
    layers = [(f"language_model.model.layers.{n}.{c}", f"layers.{n}.{d}") for n in range(num_layers) for c, d, _ in _LAYER]
    table = dict([*((c, d) for c, d, _ in _ROOT_BEFORE), *layers, *((c, d) for c, d, _ in _ROOT_AFTER)])
    return table if sound else {c: d for c, d in table.items() if not is_sound(c)}


_LAYER_TO_DIFFUSERS = {c: d for c, d, _ in _LAYER}
_LAYER_TO_CANONICAL = {d: c for c, d, _ in _LAYER}
_ROOT_TO_DIFFUSERS = {c: d for c, d, _ in _ROOT_BEFORE + _ROOT_AFTER}
_ROOT_TO_CANONICAL = {d: c for c, d, _ in _ROOT_BEFORE + _ROOT_AFTER}


def _unknown(name: str) -> Precondition:
    return Precondition(
        "a tensor name of Cosmos3-Nano", repr(name), "use a Cosmos3-Nano checkpoint (Edge, Super and multiview models have other tensors)"
    )


def to_diffusers(canonical: str) -> str:
    """Canonical key -> diffusers key. Raises Precondition for a name that Nano does not have (layer numbers have no upper bound)."""
    if canonical in _ROOT_TO_DIFFUSERS:
        return _ROOT_TO_DIFFUSERS[canonical]
    match = _LAYER_NAME.fullmatch(canonical)
    if not match or not canonical.startswith("language_model.model.") or match[2] not in _LAYER_TO_DIFFUSERS:
        raise _unknown(canonical)
    return f"layers.{int(match[1])}.{_LAYER_TO_DIFFUSERS[match[2]]}"


def to_canonical(diffusers: str) -> str:
    """Diffusers key -> canonical key. Raises Precondition for a name that Nano does not have."""
    if diffusers in _ROOT_TO_CANONICAL:
        return _ROOT_TO_CANONICAL[diffusers]
    match = _LAYER_NAME.fullmatch(diffusers)
    if not match or not diffusers.startswith("layers.") or match[2] not in _LAYER_TO_CANONICAL:
        raise _unknown(diffusers)
    return f"language_model.model.layers.{int(match[1])}.{_LAYER_TO_CANONICAL[match[2]]}"


def parse(name: str) -> tuple[str, bool]:
    """Any of the five spellings -> (canonical key, is it the EMA copy). Wrapper infixes of compile, checkpointing and FSDP are dropped.

    Raises Precondition for anything else, a tensor of the vision tower included.
    """
    key = _WRAPPERS.sub("", name)
    prefix = _PREFIX.match(key)
    if not prefix:
        return to_canonical(key), False
    key = key[prefix.end() :]
    to_diffusers(key)  # raises on an unknown name
    return key, prefix[1] == "net_ema"


def spell(canonical: str, container: str, ema: bool = False) -> str:
    """The name that `container` ("cosmos", "cosmos-hf", "rlinf", "rlinf-dcp", "diffusers") gives a canonical key."""
    net = "net_ema." if ema else "net."
    prefix = {"cosmos": net, "cosmos-hf": "model." + net, "rlinf": "omni." + net, "rlinf-dcp": "fsdp_checkpoint.model.omni." + net}
    if container == "diffusers":
        if ema:
            raise ValueError("a diffusers folder holds no EMA copy")
        return to_diffusers(canonical)
    return prefix[container] + canonical


def is_sound(canonical: str) -> bool:
    return canonical.startswith(SOUND)


def shapes(config: Mapping, sound: bool = True) -> dict[str, tuple[int, ...]]:
    """Canonical key -> shape for a transformer/config.json, from the name table alone (no model is built)."""
    heads, head = config["num_attention_heads"], config["head_dim"]
    size = {
        "H": config["hidden_size"], "V": config["vocab_size"], "P": config["patch_latent_dim"], "T": 256, "I": config["intermediate_size"],
        "Q": heads * head, "K": config["num_key_value_heads"] * head, "D": head,
        "E": config["num_embodiment_domains"], "A": config["action_dim"], "S": config.get("sound_dim") or 0,
    }  # fmt: skip
    size["A*H"] = size["A"] * size["H"]
    letters = {c: s for c, _, s in _ROOT_BEFORE + _ROOT_AFTER}
    tails = {c: s for c, _, s in _LAYER}
    return {
        k: tuple(size[x] for x in letters.get(k) or tails[_LAYER_NAME.fullmatch(k)[2]])
        for k in rename_table(config["num_hidden_layers"], sound)
    }


def match(patterns: Iterable[str], canonical: Iterable[str]) -> dict[str, list[str]]:
    """pattern -> the canonical names that contain it (an empty list where none does)."""
    names = list(canonical)
    return {p: [n for n in names if p in n] for p in patterns}


def trained(canonical: Iterable[str], patterns: Iterable[str] = TRAINED) -> list[str]:
    """The names that the optimizer owns, in the order given."""
    patterns = tuple(patterns)
    return [n for n in canonical if any(p in n for p in patterns)]


def check_skipped(canonical: Iterable[str], skipped: Iterable[str] = SKIPPED, patterns: Iterable[str] = TRAINED) -> list[str]:
    """Names left at their fresh initialisation. Raises Precondition if one of them is not trained: it would stay random for ever."""
    fresh = trained(canonical, skipped)
    stuck = sorted(set(fresh) - set(trained(fresh, patterns)))
    if stuck:
        raise Precondition(
            "every skipped tensor to be trained",
            f"{len(stuck)} skipped and frozen: {', '.join(stuck[:10])}",
            "add it to the trained list or take it off the skip list",
        )
    return fresh


def param_groups(canonical: Iterable[str], lr: float, multipliers: Mapping[str, float] = LR_MULTIPLIERS) -> list[dict]:
    """[{"lr", "multiplier", "names"}] in ascending multiplier: 1 and 5 give the learning rates 5e-5 and 2.5e-4 of the recipe."""
    groups: dict[float, list[str]] = {}
    for name in canonical:
        groups.setdefault(max([m for p, m in multipliers.items() if p in name], default=1.0), []).append(name)
    return [{"lr": lr * m, "multiplier": m, "names": groups[m]} for m in sorted(groups)]
