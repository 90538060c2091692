"""common/keys.py: every tensor has one name in each spelling and none is lost, doubled or trained by mistake.

Run: python -m pytest tests/test_keys.py
Golden: tests/golden/cosmos3_nano_keys.json (layer 0 and all outside the layers, from the reference implementation).
"""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from common import keys, tiny
from common.console import Precondition

GOLDEN = json.loads((Path(__file__).parent / "golden/cosmos3_nano_keys.json").read_text())
PARAMETERS = GOLDEN["parameters"]
LAYERS = GOLDEN["num_layers"]
NANO = {
    "hidden_size": 4096, "vocab_size": 151936, "patch_latent_dim": 192, "intermediate_size": 12288, "num_attention_heads": 32, "head_dim": 128,
    "num_key_value_heads": 8, "num_embodiment_domains": 32, "action_dim": 64, "sound_dim": 64, "num_hidden_layers": LAYERS,
}  # fmt: skip
TABLE = keys.rename_table(LAYERS)
QUIET = list(keys.rename_table(LAYERS, sound=False))
ATTENTION = "language_model.model.layers.0.self_attn."
PREFIXES = {  # K is canonical, D diffusers
    "cosmos": "net.K",
    "cosmos-hf": "model.net.K",
    "rlinf": "omni.net.K",
    "rlinf-dcp": "fsdp_checkpoint.model.omni.net.K",
    "diffusers": "D",
}
WRAPPERS = ["_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"]

canonical_names = st.sampled_from(list(TABLE))
containers = st.sampled_from([(c, e) for c in PREFIXES for e in (False, True) if not (e and c == "diffusers")])


def count(names, sound=True):
    """Parameters of those names at Nano size."""
    shapes = keys.shapes(NANO, sound)
    return sum(math.prod(shapes[n]) for n in names)


def check_both_ways(parameters):
    """The golden check: every name maps to the other spelling, and back."""
    pairs = [(p["cosmos"], p["diffusers"]) for p in parameters]
    assert [(keys.to_canonical(d), keys.to_diffusers(c)) for c, d in pairs] == pairs


# Golden


def test_golden_names_both_ways():
    """Each of the 44 golden parameters has the reference's name in both directions."""
    assert len(PARAMETERS) == 44
    check_both_ways(PARAMETERS)


def test_golden_order():
    """The table of one layer lists the 44 golden names in the order of the state dict."""
    assert list(keys.rename_table(1).items()) == [(p["cosmos"], p["diffusers"]) for p in PARAMETERS]


def test_golden_shapes():
    """Each golden parameter has the reference's shape."""
    shapes = keys.shapes(NANO)
    assert {p["cosmos"]: shapes[p["cosmos"]] for p in PARAMETERS} == {p["cosmos"]: tuple(p["shape"]) for p in PARAMETERS}


def test_golden_trained():
    """The filter trains exactly the golden parameters that train."""
    assert keys.trained(p["cosmos"] for p in PARAMETERS) == [p["cosmos"] for p in PARAMETERS if p["trainable"]]


def test_golden_sound():
    """Exactly the golden sound parameters count as sound."""
    assert [p["cosmos"] for p in PARAMETERS if keys.is_sound(p["cosmos"])] == [p["cosmos"] for p in PARAMETERS if p["sound"]]


@pytest.mark.parametrize("rule", range(len(PARAMETERS)))
@pytest.mark.parametrize("table", ["DIFFUSERS", "CANONICAL"])
def test_a_removed_rule_is_caught(monkeypatch, rule, table):
    """K3: take any one rename rule away, in either direction, and the golden check stops at that very name."""
    source, target = ("cosmos", "diffusers") if table == "DIFFUSERS" else ("diffusers", "cosmos")
    name = PARAMETERS[rule][source]
    inner = re.search(r"layers\.0\.(.+)", name)
    rules = getattr(keys, f"_LAYER_TO_{table}" if inner else f"_ROOT_TO_{table}")
    assert rules[inner[1] if inner else name] == PARAMETERS[rule][target].split("layers.0.")[-1]
    monkeypatch.delitem(rules, inner[1] if inner else name)
    with pytest.raises(Precondition, match=f"found {re.escape(repr(name))};"):
        check_both_ways(PARAMETERS)


def test_two_swapped_rules_are_caught(monkeypatch):
    """Exchange two rules of equal shape, which no shape check would see, and the golden check fails."""
    rules = keys._LAYER_TO_DIFFUSERS
    a, b = "self_attn.q_proj.weight", "self_attn.q_proj_moe_gen.weight"
    for name, value in ((a, rules[b]), (b, rules[a])):
        monkeypatch.setitem(rules, name, value)
    with pytest.raises(AssertionError):
        check_both_ways(PARAMETERS)


# The table


@pytest.mark.parametrize(("sound", "tensors", "parameters"), [(True, 814, 15_173_669_120), (False, 809, 15_173_136_576)])
def test_nano_size(sound, tensors, parameters):
    """Nano has 814 tensors with sound and 809 without, and the published parameter counts."""
    names = keys.rename_table(LAYERS, sound)
    assert (len(names), count(names, sound)) == (tensors, parameters)


@given(st.integers(0, 80), st.booleans())
def test_names_are_one_to_one(layers, sound):
    """K4: at any depth no two canonical names share a diffusers name."""
    table = keys.rename_table(layers, sound)
    assert len(set(table.values())) == len(table) == 22 * layers + (22 if sound else 17)


def test_functions_agree_with_the_table():
    """to_diffusers and to_canonical give the table's pairs, and so invert each other, on all 814 names."""
    assert {c: keys.to_diffusers(c) for c in TABLE} == TABLE
    assert [keys.to_canonical(d) for d in TABLE.values()] == list(TABLE)


def test_attention_output_projection_is_kept():
    """K5: each layer keeps both output projections, under diffusers' names without an index."""
    names = {f"layers.{n}.self_attn.{tail}.weight" for n in range(LAYERS) for tail in ("to_out", "to_add_out")}
    assert names == {d for d in TABLE.values() if "_out.weight" in d and "self_attn" in d}


@pytest.mark.parametrize("direction", ["to_diffusers", "to_canonical"])
def test_a_name_in_the_wrong_spelling_raises(direction):
    """K3: a name that is already in the target spelling is refused; only action_modality_embed is spelt alike in both."""
    names = TABLE.values() if direction == "to_diffusers" else TABLE
    accepted = []
    for name in names:
        try:
            getattr(keys, direction)(name)
        except Precondition:
            continue
        accepted.append(name)
    assert accepted == ["action_modality_embed"]


@pytest.fixture(scope="module")
def meta_model():
    """diffusers' own model in the tiny configuration, without memory behind it."""
    from diffusers import Cosmos3OmniTransformer

    with torch.device("meta"):
        return Cosmos3OmniTransformer.from_config({k: v for k, v in tiny.TRANSFORMER.items() if not k.startswith("_")})


def test_names_are_diffusers_own(meta_model):
    """The table's diffusers names are those of the model's state dict, in its order."""
    assert list(keys.rename_table(tiny.TRANSFORMER["num_hidden_layers"]).values()) == list(meta_model.state_dict())


def test_shapes_are_diffusers_own(meta_model):
    """The shapes worked out from the configuration alone are those of the model."""
    built = {keys.to_canonical(k): tuple(v.shape) for k, v in meta_model.state_dict().items()}
    assert keys.shapes(tiny.TRANSFORMER) == built


# Five spellings


@pytest.mark.parametrize("container", PREFIXES)
def test_spelling(container):
    """Each container's name has the prefix written in the table of checkpoint formats."""
    name = ATTENTION + "q_proj.weight"
    expected = PREFIXES[container].replace("K", name).replace("D", "layers.0.self_attn.to_q.weight")
    assert keys.spell(name, container) == expected


@given(canonical_names, containers)
def test_every_spelling_parses_back(name, container):
    """What `spell` writes for any tensor, container and copy, `parse` reads back."""
    assert keys.parse(keys.spell(name, *container)) == (name, container[1])


@given(canonical_names, containers, st.lists(st.tuples(st.integers(0, 20), st.sampled_from(WRAPPERS)), min_size=1, max_size=4))
@example(
    ATTENTION + "q_proj.weight", ("rlinf-dcp", True), [(0, "_orig_mod"), (4, "_fsdp_wrapped_module"), (9, "_checkpoint_wrapped_module")]
)
def test_wrapper_infixes_are_dropped(name, container, infixes):
    """The infixes of compile, checkpointing and FSDP, anywhere before the last part of any spelling, do not change what is read."""
    parts = keys.spell(name, *container).split(".")
    for position, infix in infixes:
        parts.insert(position % len(parts), infix)
    assert keys.parse(".".join(parts)) == (name, container[1])


def test_a_diffusers_folder_has_no_ema():
    """Asking for the EMA name in a diffusers folder raises: there is none."""
    with pytest.raises(ValueError, match="no EMA"):
        keys.spell("vae2llm.weight", "diffusers", ema=True)


@pytest.mark.parametrize("container", ["cosmos", "cosmos-hf", "rlinf", "rlinf-dcp"])
def test_ema_never_mixes_with_the_network(container):
    """K6: of a file with both copies the two sets of names are disjoint, of equal size, and each parses whole to its own copy."""
    both = {ema: [keys.spell(k, container, ema) for k in QUIET] for ema in (False, True)}
    assert not set(both[False]) & set(both[True])
    for ema, names in both.items():
        assert [keys.parse(n) for n in names] == [(k, ema) for k in QUIET]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "net.",
        "netvae2llm.weight",
        "net.action_pos_embed",
        "net.latent_pos_embed",
        "net.image_modality_embed",
        f"net.{ATTENTION}k_norm_und_for_gen.weight",
        f"net.{ATTENTION}q_proj.bias",
        "net.layers.0.self_attn.to_q.weight",  # diffusers below net.
        "net.net_ema.vae2llm.weight",
        "language_model.model.embed_tokens.weight",  # canonical without a prefix
        "layers.0.self_attn.to_out.0.weight",
        "layers.x.self_attn.to_q.weight",
        "net.language_model.visual.blocks.0.attn.qkv.weight",
        "fsdp_checkpoint.optimizers.omni.net.vae2llm.weight",
        "fsdp_checkpoint.fsdp_version",
    ],
)
def test_unknown_name_raises(name):
    """A tensor that Nano does not have, in any spelling, stops and is named."""
    with pytest.raises(Precondition, match=rf"tensor name of Cosmos3-Nano; found '{re.escape(name.removeprefix('net.'))[:6]}"):
        keys.parse(name)


# Filters and groups


@pytest.mark.parametrize("sound", [True, False])
def test_nano_trains_410_tensors(sound):
    """With and without sound the recipe trains the same 410 tensors of 6,982,401,216 parameters."""
    names = keys.trained(keys.rename_table(LAYERS, sound))
    assert (len(names), count(names, sound)) == keys.NANO_TRAINED == (410, 6_982_401_216)


def test_filter_on_diffusers_names_would_miss_the_attention():
    """Negative control: the same filter on diffusers names selects 186 tensors and not one of the attention, so names must be canonical."""
    wrong = [n for n in TABLE.values() if any(p in n for p in keys.TRAINED)]
    assert len(wrong) == 186
    assert not [n for n in wrong if "self_attn" in n]


def test_every_trained_pattern_matches():
    """No pattern of the trained list is idle: 397 tensors of the generation tower and 1 to 4 of each head."""
    found = {p: len(n) for p, n in keys.match(keys.TRAINED, QUIET).items()}
    assert found == {
        "moe_gen": 397,
        "time_embedder": 4,
        "vae2llm": 2,
        "llm2vae": 2,
        "action2llm": 2,
        "llm2action": 2,
        "action_modality_embed": 1,
    }


def test_a_pattern_without_a_match_is_shown():
    """`match` keeps a pattern that names nothing, with an empty list."""
    assert keys.match(["action_pos_embed"], QUIET) == {"action_pos_embed": []}


def test_skipped_and_frozen_is_an_error():
    """K1: a tensor that is neither loaded nor trained would stay random; it is named."""
    names = ["action2llm.w", "action_pos_embed.w", "moe_gen.w"]
    with pytest.raises(Precondition, match=r"1 skipped and frozen: action_pos_embed\.w;"):
        keys.check_skipped(names, ("action2llm", "action_pos_embed"), ("action2llm", "moe_gen"))


def test_nano_skips_five_tensors_and_trains_them():
    """K1: the recipe's own lists leave the five action tensors fresh, and its idle entries do no harm."""
    assert sorted(keys.check_skipped(QUIET)) == [
        "action2llm.bias.weight",
        "action2llm.fc.weight",
        "action_modality_embed",
        "llm2action.bias.weight",
        "llm2action.fc.weight",
    ]


def test_learning_rates():
    """At 5e-5 the action head's 5 tensors learn at 2.5e-4 and the other 405 at 5e-5."""
    groups = keys.param_groups(keys.trained(QUIET), 5e-5)
    assert [(g["lr"], g["multiplier"], len(g["names"])) for g in groups] == [(5e-5, 1.0, 405), (2.5e-4, 5.0, 5)]


def test_groups_are_a_partition():
    """Each trained tensor lies in one group: none lost, none twice."""
    names = keys.trained(QUIET)
    assert sorted(n for g in keys.param_groups(names, 5e-5) for n in g["names"]) == sorted(names)
