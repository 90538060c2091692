"""Stages 03 and 06: every source to every target, lossless, verified, interrupted.    Run: ./run_tests.sh tests/test_convert.py

The walk's own checkpoint goes through stage 06 in test_pipeline.py; here all sources hold the same made-up training result.
"""

import argparse
import errno
import importlib.metadata
import io
import json
import math
import os
import pickle
import pickletools
import platform
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import REPO, load_script
from safetensors.torch import load_file, save_file

from common import console, keys, quantile, weights
from common.console import OutputExists, Precondition, VerifyFailed

SOURCES = ("ours", "ours slim", "rlinf pt", "rlinf dcp", "cosmos dcp", "cosmos hf", "diffusers")
TARGETS = ("diffusers", "rlinf", "cosmos-dcp")


@pytest.fixture(scope="module")
def to_dcp():
    return load_script("03_base_to_dcp")


@pytest.fixture(scope="module")
def convert():
    return load_script("06_convert_ckpt")


def run(script, *argv) -> int:
    return script.main([str(a) for a in argv])


def exit_code(script, *argv) -> int:
    """As a user sees it: the exit code, with the [FAIL] line on stderr."""
    return console.run_stage("stage", lambda: run(script, *argv))


def save_dcp(state, folder):
    dcp.save(state, storage_writer=dcp.FileSystemWriter(str(folder)), no_dist=True)


@pytest.fixture(scope="module")
def trained(base):
    """(weights, averages): canonical -> float32 tensor without sound. The trained half differs from the base by values that bf16 holds exactly."""
    source = weights.open_source(base)
    g = torch.Generator().manual_seed(1)
    net = {k: source.tensor(n).float() for k, n in source.net.items() if not keys.is_sound(k)}
    moved = set(keys.trained(net))

    def drift(v):
        return (v + 0.05 * torch.randn(v.shape, generator=g)).bfloat16().float()

    net = {k: drift(v) if k in moved else v for k, v in net.items()}
    return net, {k: drift(v) if k in moved else v for k, v in net.items()}


@pytest.fixture(scope="module")
def sources(base, trained, tmp_path_factory):
    """The same training result in every container that stage 06 reads."""
    net, ema = trained
    bf16 = {k: v.bfloat16() for k, v in net.items()}
    place = {s: tmp_path_factory.mktemp(s.replace(" ", "_")) for s in SOURCES}
    moved = keys.trained(net)
    stats = quantile.load_stats(quantile.BUILT_IN)
    fingerprint = weights.base_fingerprint(weights.open_source(base))
    for name in ("ours", "ours slim"):
        state = {f"{p}.{k}": t[k] for p, t in (("net", net), ("net_ema", ema)) for k in moved}
        if name == "ours":
            state |= {f"optim.{m}.{k}": torch.zeros_like(net[k]) for m in ("exp_avg", "exp_avg_sq") for k in moved}
        place[name] /= "global_step_7"
        save_dcp(state, place[name])
        shutil.copy(stats.path, place[name] / "stats.json")
        policy = {
            "base": {"path": "x", "fingerprint": fingerprint},
            "stats": {"file": "stats.json", "block": stats.block, "sha256": stats.sha256},
        }
        console.write_json(place[name] / "policy.json", policy)
        (place[name] / "COMPLETE").touch()

    rlinf = {keys.spell(k, "rlinf"): v for k, v in bf16.items()} | {keys.spell(k, "rlinf", ema=True): v for k, v in ema.items()}
    # As a launcher may leave it: a config object, numbers, a list beside the tensors.
    torch.save({**rlinf, "config": argparse.Namespace(lr=5e-5), "step": 7, "notes": ["x"]}, place["rlinf pt"] / "full_weights.pt")
    place["rlinf pt"] /= "full_weights.pt"
    state = {keys.spell(k, "rlinf-dcp", ema=e): v for e, t in ((False, bf16), (True, ema)) for k, v in t.items()}
    state |= {
        "fsdp_checkpoint.optimizers.state.x.exp_avg": torch.zeros(3),
        "fsdp_checkpoint.fsdp_version": 2,
        "fsdp_checkpoint.rng": {"a": 1},
    }
    save_dcp(state, place["rlinf dcp"] / "actor/dcp_checkpoint")
    save_dcp(
        {keys.spell(k, "cosmos", ema=e): v for e, t in ((False, net), (True, ema)) for k, v in t.items()}, place["cosmos dcp"] / "model"
    )
    # An HF export carries stock Qwen3-VL's vision tower, not the base's.
    source = weights.open_source(base)
    vision = {"model.net." + k: source.tensor(n) + 1 for k, n in source.vision.items()}
    save_file({keys.spell(k, "cosmos-hf"): v for k, v in bf16.items()} | vision, place["cosmos hf"] / "model-00001-of-00001.safetensors")
    (place["diffusers"] / "transformer").mkdir()
    file = place["diffusers"] / "transformer/diffusion_pytorch_model.safetensors"
    save_file({keys.to_diffusers(k): v for k, v in bf16.items()}, file, metadata={"format": "pt"})
    return place


def shards(folder) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in sorted((folder / "transformer").glob("*.safetensors"))}


@pytest.fixture(scope="module")
def outputs(base, convert, sources, tmp_path_factory):
    """(source, target, weights) -> output, each made once and verified by the stage itself."""
    place, made = tmp_path_factory.mktemp("outputs"), {}

    def make(source, target, which="net"):
        if (source, target, which) not in made:
            out = place / f"{source}-{target}-{which}".replace(" ", "_")
            argv = ["--src", sources.get(source, source), "--base", base, "--out", out, "--to", target, "--weights", which]
            assert run(convert, *argv) == 0
            made[source, target, which] = out
        return made[source, target, which]

    return make


# ---------------------------------------------------------------- every source to every target


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_gives_the_same_policy(source, outputs, trained):
    """Seven checkpoints of one training result, converted to diffusers: shard for shard the bytes that safetensors' own writer gives."""
    for which in ("net", "ema") if source not in ("cosmos hf", "diffusers") else ("net",):
        out = outputs(source, "diffusers", which)
        expected = {keys.to_diffusers(k): v.bfloat16() for k, v in trained[which == "ema"].items()}
        weight_map = json.loads((out / "transformer" / weights.INDEX).read_text())["weight_map"]
        assert set(weight_map) == set(expected)
        for name, content in shards(out).items():
            save_file({k: v for k, v in expected.items() if weight_map[k] == name}, out.parent / "expected", metadata={"format": "pt"})
            assert content == (out.parent / "expected").read_bytes()
    assert source in ("cosmos hf", "diffusers") or shards(outputs(source, "diffusers", "net")) != shards(
        outputs(source, "diffusers", "ema")
    )


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("target", ["rlinf", "cosmos-dcp"])
def test_every_source_to_the_other_targets_and_on(source, target, outputs, trained):
    """To full_weights.pt or a DCP: names, dtypes and values, read with torch alone; converted on to diffusers it is the same policy."""
    out, (net, ema) = outputs(source, target), trained
    averages = source not in ("cosmos hf", "diffusers")
    container = {"rlinf": "rlinf", "cosmos-dcp": "cosmos"}[target]
    expected = {keys.spell(k, container): v for k, v in net.items()}
    expected |= {keys.spell(k, container, ema=True): v for k, v in ema.items()} if averages else {}
    if target == "rlinf":
        state = torch.load(out, weights_only=True)
        assert {v.dtype for k, v in state.items() if ".net." in k} == {torch.bfloat16}
        assert {v.dtype for k, v in state.items() if ".net_ema." in k} == ({torch.float32} if averages else set())
    else:
        state = {k: torch.empty_like(v) for k, v in expected.items()}
        dcp.load(state, storage_reader=dcp.FileSystemReader(str(out / "model")), no_dist=True)  # casts into float32
        stored = weights.open_source(out)
        assert len(stored.vision) == (39 if source == "cosmos hf" else 0)
        kept = {"ours": "torch.float32", "ours slim": "torch.float32", "cosmos dcp": "torch.float32"}.get(source, "torch.bfloat16")
        assert {stored.info[f"net.{k}"][1] for k in keys.trained(net)} == {kept}
    assert set(state) == set(expected)
    for k, v in expected.items():
        torch.testing.assert_close(state[k].float(), v, rtol=0, atol=0)
    assert shards(outputs(out, "diffusers")) == shards(outputs("ours", "diffusers"))


def test_a_chosen_average_becomes_the_weights(outputs, trained):
    """--weights ema --to rlinf: omni.net.* holds the averages, and no second set is written."""
    state = torch.load(outputs("ours", "rlinf", "ema"), weights_only=True)
    assert set(state) == {keys.spell(k, "rlinf") for k in trained[1]}
    for k, v in trained[1].items():
        torch.testing.assert_close(state[keys.spell(k, "rlinf")], v.bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("source", ["cosmos hf", "diffusers"])
def test_average_asked_for_where_there_is_none(source, base, convert, sources, tmp_path, capsys):
    """No EMA in SRC: exit 3, and the flag that mends it."""
    assert exit_code(convert, "--src", sources[source], "--base", base, "--out", tmp_path / "o", "--weights", "ema") == 3
    assert "--weights net" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_averages_that_never_saw_the_base_are_left_out(trained, base, convert, tmp_path, capsys):
    """An RLinf file from before the first step, with random frozen averages: --to rlinf writes the weights alone and says so."""
    state = {keys.spell(k, "rlinf"): v.bfloat16() for k, v in trained[0].items()}
    torch.save(state | {n.replace(".net.", ".net_ema."): torch.randn(v.shape) for n, v in state.items()}, tmp_path / "x.pt")
    assert run(convert, "--src", tmp_path / "x.pt", "--base", base, "--out", tmp_path / "o.pt", "--to", "rlinf") == 0
    assert set(torch.load(tmp_path / "o.pt", weights_only=True)) == set(state)
    assert "[warn] ema: left out: " in capsys.readouterr().out


def test_slim_checkpoint_still_needs_its_recipe(base, convert, sources, tmp_path, capsys):
    """A checkpoint of ours without optimizer entries and without policy.json is still known as ours: exit 3, no assumed recipe."""
    src = shutil.copytree(sources["ours slim"], tmp_path / "global_step_7")
    (src / "policy.json").unlink()
    assert exit_code(convert, "--src", src, "--base", base, "--out", tmp_path / "o") == 3
    assert "no policy.json" in capsys.readouterr().err and not (tmp_path / "o").exists()


def test_odd_tensors_of_a_pt_file_are_read_as_they_are(trained, base, tmp_path):
    """Tied, transposed and sliced tensors (views that share or exceed their storage) read back as torch.load gives them."""
    big = torch.randn(40, 64).bfloat16()
    state = {
        "omni.net.vae2llm.weight": big[3:20],
        "omni.net.llm2vae.weight": big.t(),
        "omni.net.vae2llm.bias": big[0, 1::2],
        "omni.net.llm2vae.bias": big[0],
    }
    torch.save(state, tmp_path / "x.pt")
    source = weights.open_source(tmp_path / "x.pt")
    for name, value in torch.load(tmp_path / "x.pt", weights_only=True).items():
        torch.testing.assert_close(source.tensor(name), value, rtol=0, atol=0)
        assert weights.same(source.tensor(name), value.clone(), torch.bfloat16)


def test_tensor_saved_by_several_ranks_is_put_together(tmp_path):
    """A DCP tensor in three chunks, as FSDP ranks leave it, reads back whole; chunks that leave a hole are refused."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    value = torch.randn(7, 5)
    parts = [(0, 3), (3, 6), (6, 7)]

    class Planner(dcp.DefaultSavePlanner):
        def create_local_plan(self):
            def item(i, a, b):
                data = TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=torch.Size([a, 0]), sizes=torch.Size([b - a, 5])),
                    properties=TensorProperties.create_from_tensor(value),
                    size=value.shape,
                )
                return WriteItem(
                    index=MetadataIndex("net.vae2llm.weight", torch.Size([a, 0]), i), type=WriteItemType.SHARD, tensor_data=data
                )

            self.plan = SavePlan([item(i, a, b) for i, (a, b) in enumerate(parts)], planner_data={})
            return self.plan

        def resolve_data(self, write_item):
            a, b = parts[write_item.index.index]
            return value[a:b].clone()

    dcp.save({}, storage_writer=dcp.FileSystemWriter(str(tmp_path / "d")), planner=Planner(), no_dist=True)
    torch.testing.assert_close(weights.open_source(tmp_path / "d").tensor("net.vae2llm.weight"), value, rtol=0, atol=0)
    metadata = pickle.loads((tmp_path / "d/.metadata").read_bytes())
    del metadata.state_dict_metadata["net.vae2llm.weight"].chunks[1]
    (tmp_path / "d/.metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(Precondition, match="2 chunks that do not cover it"):
        weights.open_source(tmp_path / "d").tensor("net.vae2llm.weight")


# ---------------------------------------------------------------- lossless


@pytest.fixture(scope="module")
def nano_names(base, tmp_path_factory):
    """The published layout with all of its names: 814 transformer tensors of 36 layers in 7 shards and 351 of the vision tower, tiny widths."""
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    folder = shutil.copytree(base, tmp_path_factory.mktemp("nano") / "Cosmos3-Nano")
    for name in ("transformer", "vision_encoder"):
        for file in (folder / name).glob("*.safetensors*"):
            file.unlink()
    config = json.loads((folder / "transformer/config.json").read_text()) | {"num_hidden_layers": 36, "hidden_size": 16, "vocab_size": 64}
    (folder / "transformer/config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    g = torch.Generator().manual_seed(2)
    state = {keys.to_diffusers(k): torch.randn(s, generator=g).bfloat16() for k, s in keys.shapes(config).items()}
    names, weight_map = list(state), {}
    for i in range(7):
        shard = f"diffusion_pytorch_model-{i + 1:05d}-of-00007.safetensors"
        part = names[i * 117 : (i + 1) * 117]
        save_file({n: state[n] for n in part}, folder / "transformer" / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": sum(v.nbytes for v in state.values())}, "weight_map": weight_map}
    (folder / "transformer" / weights.INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 16, "num_position_embeddings": 16}
    with torch.device("meta"):
        tower = Qwen3VLVisionModel(Qwen3VLVisionConfig(depth=27, deepstack_visual_indexes=[8, 16, 24], **sizes))
    vision = {k: torch.randn(v.shape, generator=g).bfloat16() for k, v in tower.state_dict().items()}
    save_file(vision, folder / "vision_encoder/model.safetensors", metadata={"format": "pt"})
    return folder


def test_1165_tensors_through_dcp_and_back_are_byte_identical(nano_names, to_dcp, convert, tmp_path):
    """03 --with-vision, then 06: every safetensors file, the index and every config of the published layout, byte for byte."""
    assert run(to_dcp, "--base", nano_names, "--out", tmp_path / "dcp", "--with-vision") == 0
    written = weights.open_source(tmp_path / "dcp")
    assert (len(written.net), len(written.vision)) == (814, 351) and len(written.info) == 1165
    assert {n.split(".")[0] for n in written.info} == {"net"} and "net.language_model.visual.pos_embed.weight" in written.info
    assert json.loads((tmp_path / "dcp/base.json").read_text())["tensors"] == 1165
    assert run(convert, "--src", tmp_path / "dcp", "--base", nano_names, "--out", tmp_path / "out") == 0
    files = [f.relative_to(nano_names) for f in nano_names.rglob("*") if f.is_file() and len(f.relative_to(nano_names).parts) > 1]
    assert sum(f.suffix == ".safetensors" for f in files) == 7 + 2
    for file in files:
        assert (tmp_path / "out" / file).read_bytes() == (nano_names / file).read_bytes(), file
    assert "vision_encoder" in json.loads((tmp_path / "out/model_index.json").read_text())


def test_vision_tower_of_another_model_is_refused(nano_names, to_dcp, convert, tmp_path, capsys):
    """A DCP whose vision tower is not BASE's: exit 5 (an HF export, which carries stock Qwen3-VL's, is the exception and says so)."""
    other = shutil.copytree(nano_names, tmp_path / "other")
    state = load_file(other / "vision_encoder/model.safetensors")
    state["pos_embed.weight"][0, 0] += 1
    save_file(state, other / "vision_encoder/model.safetensors", metadata={"format": "pt"})
    assert run(to_dcp, "--base", other, "--out", tmp_path / "dcp", "--with-vision") == 0
    assert exit_code(convert, "--src", tmp_path / "dcp", "--base", nano_names, "--out", tmp_path / "out") == 5
    assert "1 frozen, but not the base's: language_model.visual.pos_embed.weight" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_vision_without_a_vision_encoder(base, to_dcp, tmp_path, capsys):
    """--with-vision where the base has no vision_encoder/: exit 3."""
    other = shutil.copytree(base, tmp_path / "other", ignore=shutil.ignore_patterns("vision_encoder"))
    assert exit_code(to_dcp, "--base", other, "--out", tmp_path / "dcp", "--with-vision") == 3
    assert "vision_encoder/" in capsys.readouterr().err and not (tmp_path / "dcp").exists()


def mixed():
    """Tensors of two dtypes, in no order, with -0, infinity and a NaN of an odd payload among the values."""
    g = torch.Generator().manual_seed(3)
    state = {
        n: torch.randn(s, generator=g).to(d)
        for n, s, d in (
            ("z", (3, 5), torch.bfloat16),
            ("a.b", (7,), torch.float32),
            ("B", (2, 2), torch.bfloat16),
            ("m", (1,), torch.float32),
        )
    }
    state["a.b"].view(torch.int32)[:3] = torch.tensor([-(2**31), 0x7F800000, 0x7FC12345])
    return state, {n: (tuple(v.shape), str(v.dtype)) for n, v in state.items()}


def test_written_safetensors_are_the_librarys(tmp_path):
    """write_safetensors gives save_file's bytes, mixed dtypes and unsorted names included."""
    state, info = mixed()
    weights.write_safetensors(tmp_path / "ours", info, lambda n: state[n])
    save_file(state, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes() and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("mmap", [False, True])
def test_written_pt_is_torchs(mmap, tmp_path):
    """write_pt's file is as long as torch.save's and torch.load gives the same tensors in the same order, bit for bit."""
    state, info = mixed()
    weights.write_pt(tmp_path / "ours.pt", info, lambda n: state[n])
    torch.save(state, tmp_path / "theirs.pt")
    loaded = torch.load(tmp_path / "ours.pt", weights_only=True, mmap=mmap)
    assert list(loaded) == list(state) and type(next(iter(loaded.values()))) is torch.Tensor
    for n, v in state.items():
        assert loaded[n].dtype == v.dtype and loaded[n].shape == v.shape and torch.equal(loaded[n].view(torch.uint8), v.view(torch.uint8))
    assert abs((tmp_path / "ours.pt").stat().st_size - (tmp_path / "theirs.pt").stat().st_size) < 1024


def test_written_dcp_is_torchs(tmp_path):
    """write_dcp's folder loads with torch's own reader, bit for bit; several files where the bytes ask for it."""
    state, info = mixed()
    weights.write_dcp(tmp_path / "d", info, lambda n: state[n])
    loaded = {n: torch.empty_like(v) for n, v in state.items()}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(str(tmp_path / "d")), no_dist=True)
    for n, v in state.items():
        assert torch.equal(loaded[n].view(torch.uint8), v.view(torch.uint8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "FILE_BYTES", 40)
        weights.write_dcp(tmp_path / "e", info, lambda n: state[n])
    nbytes = sum(v.nbytes for v in state.values())
    assert sorted(f.name for f in (tmp_path / "e").glob("*.distcp")) == [f"__0_{i}.distcp" for i in range(math.ceil(nbytes / 40))]


def test_metadata_is_tied_to_no_machine_and_no_python(base, to_dcp, tmp_path):
    """.metadata imports torch classes alone (no pathlib, whose pickles differ between 3.12 and 3.13), in a protocol that 3.11 reads; no path of
    this machine is in it; base.json beside it says which Python and torch wrote, and an unreadable one is reported with them."""
    assert run(to_dcp, "--base", base, "--out", tmp_path / "D") == 0
    content, modules = (tmp_path / "D/model/.metadata").read_bytes(), set()

    class Recorder(pickle.Unpickler):
        def find_class(self, module, name):
            modules.add(module)
            return super().find_class(module, name)

    Recorder(io.BytesIO(content)).load()
    assert modules and all(m.split(".")[0] in ("torch", "collections") for m in modules), modules
    assert max(arg for op, arg, _ in pickletools.genops(content) if op.name == "PROTO") <= 5
    assert b"pathlib" not in content and str(tmp_path).encode() not in content and str(base.parent).encode() not in content
    note = json.loads((tmp_path / "D/base.json").read_text())
    assert (note["python"], note["torch"]) == (platform.python_version(), importlib.metadata.version("torch"))
    file = tmp_path / "D/model/.metadata"
    file.write_bytes(content.replace(b"torch.distributed.checkpoint.metadata", b"torch.distributed.checkpoint.mXtadata"))
    with pytest.raises(Precondition, match=re.escape(f"written with Python {note['python']}, torch {note['torch']}")):
        weights.open_source(tmp_path / "D")


def test_memory_does_not_grow_with_a_tensor(tmp_path):
    """A float32 tensor of 256 MiB goes through each writer and comparison, and 64 that are made on the way through the DCP's, with under
    64 MiB of anonymous memory (all of them together are more)."""
    shape, n = (64, 2**20), 2**26
    file = tmp_path / "big"
    with open(file, "wb") as f:
        f.truncate(4 * n)  # a hole: zeros without the time to write them

    def value(_):
        return weights.mapped(file, shape, "torch.float32", 0)

    def anonymous():
        text = Path("/proc/self/status").read_text()
        return 1024 * int(text.split("RssAnon:")[1].split()[0])

    assert weights.finite_and_same(value(0), value(0)) == (True, True)  # the thread pools are up
    start, peak, done = anonymous(), [0], threading.Event()

    def watch():
        while not done.wait(0.002):
            peak[0] = max(peak[0], anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    weights.write_safetensors(tmp_path / "s", {"a": (shape, "torch.bfloat16")}, value)
    weights.write_pt(tmp_path / "p", {"a": (shape, "torch.bfloat16")}, value)
    weights.write_dcp(tmp_path / "d", {"a": (shape, "torch.float32")}, value)
    weights.write_dcp(tmp_path / "e", {f"a{i}": ((2**19,), "torch.float32") for i in range(64)}, lambda name: torch.full((2**19,), 1.0))
    assert weights.same(
        value(0), weights.mapped(tmp_path / "s", shape, "torch.bfloat16", (tmp_path / "s").stat().st_size - 2 * n), torch.bfloat16
    )
    assert weights.finite_and_same(value(0), value(0)) == (True, True)
    done.set()
    watcher.join()
    assert 0 < peak[0] - start < 2**26


# ---------------------------------------------------------------- verification


def first(folder):
    return sorted((folder / "transformer").glob("*.safetensors"))[0]


def edit(folder, change):
    state = load_file(first(folder))
    change(state)
    save_file(state, first(folder), metadata={"format": "pt"})


def edit_json(file, change):
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


MOVED, FROZEN = "layers.0.self_attn.add_q_proj.weight", "layers.0.self_attn.to_q.weight"
DAMAGE = {
    "a trained value": (lambda f: edit(f, lambda s: s[MOVED][0, :1].add_(1)), f"1 other values than SRC: {MOVED}"),
    "NaN": (lambda f: edit(f, lambda s: s[MOVED].view(-1)[-1:].fill_(torch.nan)), f"1 not finite: {MOVED}"),
    "infinity": (lambda f: edit(f, lambda s: s[MOVED][0, :1].fill_(-torch.inf)), f"1 not finite: {MOVED}"),
    "a frozen value": (lambda f: edit(f, lambda s: s[FROZEN][-1, -1:].add_(1)), f"1 other values than SRC: {FROZEN}"),
    "a dtype": (lambda f: edit(f, lambda s: s.update({MOVED: s[MOVED].float()})), f"1 of another shape or dtype: {MOVED} .*float32"),
    "a shape": (lambda f: edit(f, lambda s: s.update({MOVED: s[MOVED].t().reshape(-1)})), f"1 of another shape or dtype: {MOVED}"),
    "an absent tensor": (lambda f: (edit(f, lambda s: s.pop(MOVED)), edit_json(f / "transformer" / weights.INDEX, lambda i: i["weight_map"].pop(MOVED))), f"1 absent: {MOVED}"),
    "an absent shard": (lambda f: first(f).unlink(), "every shard that the index names"),
    "a cut shard": (lambda f: first(f).write_bytes(first(f).read_bytes()[:-5]), "cut short by 5"),
    "an LFS pointer": (lambda f: first(f).write_text("version https://git-lfs.github.com/spec/v1\n"), "Git LFS pointer"),
    "an unindexed shard": (lambda f: shutil.copy(first(f), f / "transformer/old.safetensors"), "old.safetensors.* in no index"),
    "an index that lacks a tensor": (lambda f: edit_json(f / "transformer" / weights.INDEX, lambda i: i["weight_map"].pop(MOVED)), f"1 tensors differ.*{MOVED}"),
    "another VAE": (lambda f: edit_json(f / "vae/config.json", lambda c: c.update(z_dim=16)), "1 files that differ.*: vae/config.json"),
    "no tokenizer": (lambda f: (f / "text_tokenizer/tokenizer.json").unlink(), "1 files that differ.*: text_tokenizer/tokenizer.json"),
    "another normalizer": (lambda f: edit_json(f / "stats.json", lambda s: s["global_raw"]["q01"].__setitem__(0, -9.0)), "1 files that differ.*: stats.json"),
    "another config": (lambda f: edit_json(f / "transformer/config.json", lambda c: c.update(action_gen=False)), "1 files that differ.*: transformer/config.json"),
}  # fmt: skip


@pytest.fixture(scope="module")
def policy(outputs):
    return outputs("ours", "diffusers", "ema")


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_to_an_output_is_named(name, policy, base, convert, sources, tmp_path, capsys):
    """--verify of a damaged policy: exit 5, with the group of the difference and the tensor or file."""
    damage, message = DAMAGE[name]
    copy = tmp_path / "policy"
    shutil.copytree(policy, copy)
    for file in copy.rglob("*.json"):  # copytree made copies, hard links of the base are not touched
        assert file.stat().st_nlink == 1
    damage(copy)
    assert exit_code(convert, "--verify", copy, "--src", sources["ours"], "--base", base) == 5
    text = "".join(capsys.readouterr())
    assert re.search(message, text), text


def test_verify_alone_knows_each_output(outputs, policy, base, convert, sources, tmp_path, capsys):
    """--verify finds out what OUT is and, for a policy, which weights it holds; the expected differences are listed apart."""
    for target in TARGETS:
        out = policy if target == "diffusers" else outputs("ours", target)
        before = sorted((f, f.stat().st_mtime_ns) for f in (out.rglob("*") if out.is_dir() else [out]))
        assert exit_code(convert, "--verify", out, "--src", sources["ours"], "--base", base, "--json", tmp_path / "r.json") == 0
        assert sorted((f, f.stat().st_mtime_ns) for f in (out.rglob("*") if out.is_dir() else [out])) == before
        text = capsys.readouterr().out
        assert f"as {target}" in text and "[ok] expected: 36 of 36 trained tensors differ from the base" in text
        assert "72 optimizer and other entries of SRC left out" in text and "unexpected" not in text
        if target == "diffusers":
            assert "36 tensors cast from torch.float32 to torch.bfloat16" in text and "36 weights, since the averages" in text
    assert json.loads((tmp_path / "r.json").read_text())["weights"] == "net"


@pytest.mark.parametrize("target", ["rlinf", "cosmos-dcp"])
def test_verify_of_another_result_fails(target, outputs, base, convert, sources):
    """A file of the weights held against the averages: exit 5, all trained tensors counted."""
    with pytest.raises(VerifyFailed, match=r"36 other values than SRC"):
        run(convert, "--verify", outputs("ours", target), "--src", sources["ours"], "--base", base, "--weights", "ema")


def test_forward_sees_one_changed_tensor(policy, base, convert, sources, tmp_path):
    """--forward passes on the policy, and fails once a single trained tensor of the folder is another."""
    args = convert.parse_args(["--verify", str(policy), "--src", str(sources["ours"]), "--base", str(base), "--forward"])
    plan = convert.plan(args)
    convert.forward(policy, plan)
    copy = shutil.copytree(policy, tmp_path / "policy")
    edit(copy, lambda s: s[MOVED].mul_(1.5))
    with pytest.raises(VerifyFailed, match="one forward"):
        convert.forward(copy, plan)


@pytest.mark.parametrize("target", TARGETS)
def test_weights_that_are_not_finite_are_not_exported(target, trained, base, convert, tmp_path, capsys):
    """A NaN in SRC: exit 5 with the tensor, nothing at OUT."""
    state = {keys.spell(k, "rlinf"): v.bfloat16() for k, v in trained[0].items()}
    state["omni.net.vae2llm.bias"] = torch.full_like(state["omni.net.vae2llm.bias"], torch.nan)
    torch.save(state, tmp_path / "x.pt")
    assert exit_code(convert, "--src", tmp_path / "x.pt", "--base", base, "--out", tmp_path / "o", "--to", target) == 5
    out, err = capsys.readouterr()
    assert "1 not finite: " in out and "convert an earlier checkpoint" in err and not (tmp_path / "o").exists()


def test_frozen_weights_of_another_base_are_refused(trained, base, convert, tmp_path, capsys):
    """A full checkpoint whose frozen half is not BASE's: exit 5, counted and named, nothing at OUT."""
    state = {keys.spell(k, "rlinf"): v.bfloat16() for k, v in trained[0].items()}
    for k in ("language_model.model.norm.weight", "language_model.lm_head.weight"):
        state["omni.net." + k] = state["omni.net." + k] + 1
    torch.save(state, tmp_path / "x.pt")
    assert exit_code(convert, "--src", tmp_path / "x.pt", "--base", base, "--out", tmp_path / "o") == 5
    out, err = capsys.readouterr()
    assert (
        "frozen, but not the base's: " in out and "the base that this checkpoint was trained from" in err and not (tmp_path / "o").exists()
    )


# ---------------------------------------------------------------- interruptions and disks

CHILD = """
import sys; sys.path[:0] = [{repo!r}, {tests!r}]
import os, resource, signal
from conftest import load_script
from common import console, weights
convert, to_dcp = load_script("06_convert_ckpt"), load_script("03_base_to_dcp")
"""


def child(code, timeout=120):
    text = CHILD.format(repo=str(REPO), tests=str(REPO / "tests")) + code
    return subprocess.run([sys.executable, "-c", text], check=False, capture_output=True, text=True, timeout=timeout)


def test_killed_conversion_keeps_its_verified_shards(base, convert, sources, policy, tmp_path, capsys):
    """kill -9 in the middle of a shard: nothing at OUT. The same command again keeps the whole shards, rewrites a damaged one, drops what is
    left of other runs, and gives the bytes of an undisturbed run."""
    argv = ["--src", str(sources["ours"]), "--base", str(base), "--out", str(tmp_path / "out"), "--weights", "ema"]
    done = child(f"""
weights.WORKERS = 1
real, seen = weights._write, []
def write(f, value, dtype):
    real(f, value, dtype)
    seen.append(f.name)
    if len(set(seen)) == 3:
        f.flush()
        os.kill(os.getpid(), signal.SIGKILL)
weights._write = write
convert.main({argv!r})
""")
    tmp = tmp_path / "out.tmp/transformer"
    assert done.returncode == -9 and not (tmp_path / "out").exists()
    left = sorted(f.name for f in tmp.iterdir())
    assert len(left) == 3 and left[2].endswith(".part"), left
    kept = (tmp / left[0]).stat()
    damaged = tmp / left[1]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    (tmp / "diffusion_pytorch_model-00001-of-00009.safetensors").write_bytes(b"of another run")
    (tmp_path / "out.tmp/vae").mkdir()
    (tmp_path / "out.tmp/COMPLETE").touch()
    assert exit_code(convert, *argv) == 0
    text = capsys.readouterr().out
    assert text.count("kept from an interrupted run") == 1 and f"{left[0]}: " in text.split("kept from")[0].splitlines()[-1]
    now = (tmp_path / "out/transformer" / left[0]).stat()
    assert (now.st_ino, now.st_mtime_ns) == (kept.st_ino, kept.st_mtime_ns)
    assert shards(tmp_path / "out") == shards(policy) and not (tmp_path / "out.tmp").exists()
    files = {f.relative_to(policy) for f in policy.rglob("*") if f.is_file()}
    assert {f.relative_to(tmp_path / "out") for f in (tmp_path / "out").rglob("*") if f.is_file()} == files


def test_killed_and_cut_short_runs_leave_no_output(base, sources, to_dcp, convert, tmp_path, capsys):
    """Stage 03 and each target of 06, once against a limit on file sizes (a write fails half-way: exit 3 with the cause, no traceback), once
    killed with -9 while a tensor is read for writing. Nothing is at OUT; the same command then starts from what is left and passes."""
    lines = {"03": ["--base", str(base), "--out", str(tmp_path / "03")]}
    lines |= {t: ["--src", str(sources["ours"]), "--base", str(base), "--out", str(tmp_path / t), "--to", t] for t in TARGETS}
    done = child(f"""
import torch, torch.distributed.checkpoint
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

def start(name, argv):
    return console.run_stage(name, lambda: (to_dcp if name == "03" else convert).main(argv))

for name, argv in {lines!r}.items():
    for end in ("limit", "kill"):
        if os.fork():
            status = os.waitstatus_to_exitcode(os.wait()[1])
            print("CODE", name, end, status, os.path.exists(argv[-1] if name == "03" else argv[5]), flush=True)
            continue
        if end == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, resource.RLIM_INFINITY))
        else:
            real = weights.pieces
            def pieces(value, dtype):
                os.path.exists(argv[5 if name != "03" else 3] + ".tmp") and os.kill(os.getpid(), signal.SIGKILL)
                return real(value, dtype)
            weights.pieces = pieces
        os._exit(start(name, argv))
""")
    codes = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("CODE")]
    expected = [[name, end, code, "False"] for name in lines for end, code in (("limit", "3"), ("kill", "-9"))]
    assert codes == expected, done.stdout + done.stderr
    assert done.stderr.count("File too large") == 4 and "Traceback" not in done.stderr, done.stderr
    for name, argv in lines.items():
        place = tmp_path / name
        assert place.with_name(name + ".tmp").exists()
        assert run(to_dcp if name == "03" else convert, *argv) == 0
        assert place.exists() and not place.with_name(name + ".tmp").exists()


@pytest.mark.parametrize(
    ("number", "word"), [("ENOSPC", "free some space"), ("EROFS", "read-only"), ("EACCES", "another place"), ("EDQUOT", "free some space")]
)
def test_disks_that_cannot_be_written(number, word, base, to_dcp, convert, sources, tmp_path, monkeypatch, capsys):
    """A full or read-only disk while the outputs are written: exit 3, the cause and what mends it."""
    code = getattr(errno, number)

    def refuse(*args, **kwargs):
        raise OSError(code, os.strerror(code), "place")

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert exit_code(to_dcp, "--base", base, "--out", tmp_path / "d") == 3
    assert exit_code(convert, "--src", sources["ours"], "--base", base, "--out", tmp_path / "o") == 3
    err = capsys.readouterr().err
    assert err.count("[FAIL]") == 2 == err.count(word) and os.strerror(code) in err and not list(tmp_path.iterdir())


def test_too_small_disk_is_seen_before_anything_is_written(base, to_dcp, convert, sources, tmp_path, monkeypatch, capsys):
    """Less room than the output needs: exit 3 with both sizes, nothing written."""
    monkeypatch.setattr(shutil, "disk_usage", lambda p: argparse.Namespace(free=1000))
    assert exit_code(to_dcp, "--base", base, "--out", tmp_path / "d") == 3
    for target in TARGETS:
        assert exit_code(convert, "--src", sources["ours"], "--base", base, "--out", tmp_path / "o", "--to", target) == 3
    err = capsys.readouterr().err
    assert err.count("free at") == 4 == err.count("1000 B") and not list(tmp_path.iterdir())


def test_existing_outputs_are_kept(base, to_dcp, convert, sources, tmp_path, capsys):
    """Anything at OUT: exit 4 and every byte as it was; --force does not touch what this stage did not write."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("keep")
    for force in ([], ["--force"]):
        assert exit_code(to_dcp, "--base", base, "--out", tmp_path / "mine", *force) == 4
        for target in TARGETS:
            assert exit_code(convert, "--src", sources["ours"], "--base", base, "--out", tmp_path / "mine", "--to", target, *force) == 4
    assert capsys.readouterr().err.count("[FAIL]") == 8
    assert [f.read_text() for f in tmp_path.rglob("*") if f.is_file()] == ["keep"] and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("target", ["rlinf", "cosmos-dcp"])
def test_force_replaces_an_earlier_output(target, base, convert, sources, tmp_path):
    """--force over an output of the same target replaces it; without it exit 4 and the old one stays."""
    out = tmp_path / "o"
    argv = ["--src", sources["ours"], "--base", base, "--out", out, "--to", target]
    assert run(convert, *argv) == 0
    with pytest.raises(OutputExists):
        run(convert, *argv, "--weights", "ema")
    before = len(weights.open_source(out).info)
    assert run(convert, *argv, "--weights", "ema", "--force") == 0
    assert before == 2 * 61 and len(weights.open_source(out).info) == 61


def test_pipeline_of_another_class_is_refused(base, convert, sources, tmp_path, capsys):
    """A base whose model_index.json is another model's: exit 3 with that class."""
    other = shutil.copytree(base, tmp_path / "other")
    edit_json(other / "model_index.json", lambda i: i.update(_class_name="WanPipeline"))
    assert exit_code(convert, "--src", sources["ours"], "--base", other, "--out", tmp_path / "o") == 3
    assert "WanPipeline" in capsys.readouterr().err


@pytest.mark.parametrize("which", ["--base", "--src"])
def test_another_size_of_model_is_named_by_its_shapes(which, base, nano_names, to_dcp, convert, sources, tmp_path, capsys):
    """A checkpoint and a base of different widths: exit 3, counts and the first shapes of either."""
    pair = {"--base": base, "--src": nano_names} if which == "--src" else {"--base": nano_names, "--src": sources["cosmos hf"]}
    assert exit_code(convert, *[x for item in pair.items() for x in item], "--out", tmp_path / "o") == 3
    assert ("(64,)" in (err := capsys.readouterr().err) and "(16,)" in err) or "absent in" in err
    broken = shutil.copytree(base, tmp_path / "broken")
    edit_json(broken / "transformer/config.json", lambda c: c.update(intermediate_size=256))
    assert exit_code(to_dcp, "--base", broken, "--out", tmp_path / "d") == 3
    assert "12 others: " in capsys.readouterr().err


# ---------------------------------------------------------------- sizes, flags


def test_sizes_are_those_of_the_published_model(convert, tmp_path, capsys):
    """--sizes: the groups' tensors and parameters and the files' bytes, computed from names alone, as measured on the instantiated model."""
    assert run(convert, "--sizes", "--json", tmp_path / "s.json") == 0
    result = json.loads((tmp_path / "s.json").read_text())
    groups = {n: (g["tensors"], g["parameters"]) for n, g in result["groups"].items()}
    assert groups == {
        "layers, understanding half": (396, 6_946_071_552),
        "layers, generation half": (396, 6_946_071_552),
        "embed_tokens": (1, 622_329_856),
        "lm_head": (1, 622_329_856),
        "norm": (1, 4_096),
        "norm_moe_gen": (1, 4_096),
        "proj_in": (2, 790_528),
        "proj_out": (2, 786_624),
        "time_embedder": (4, 17_833_984),
        "action_proj_in": (2, 8_519_680),
        "action_proj_out": (2, 8_390_656),
        "action_modality_embed": (1, 4_096),
        "audio_proj_in, audio_proj_out, audio_modality_embed": (5, 266_240 + 262_208 + 4_096),
        "all, with sound": (814, 15_173_669_120),
        "all, without sound (a LIBERO policy)": (809, 15_173_136_576),
        "trained": (410, 6_982_401_216),
        "frozen": (399, 8_190_735_360),
        "vision tower (vision_encoder/)": (351, 576_388_336),
    }
    gib = [round(n / 2**30, 2) for n in result["files"].values()]
    assert gib == [28.26, 29.34, 28.26, 84.79, 110.80, 195.58, 104.05, 78.03]
    assert "30,347,338,240" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--src", "x"],
        ["--out", "x"],
        ["--src", "x", "--out", "y", "--verify", "z"],
        ["--src", "x", "--out", "y", "--to", "rlinf", "--forward"],
        ["--src", "x", "--out", "y", "--class-name", "WanPipeline"],
    ],
)
def test_flags_that_do_not_go_together(argv, convert):
    """Exit 2 from the parser."""
    with pytest.raises(SystemExit, match="2"):
        convert.parse_args(argv)


@pytest.mark.parametrize("name", ["Cosmos3OmniDiffusersPipeline", "Cosmos3OmniPipeline"])
def test_class_name_is_written(name, base, convert, sources, tmp_path):
    """model_index.json carries the class that was asked for; stock diffusers has the second."""
    import diffusers

    assert run(convert, "--src", sources["ours"], "--base", base, "--out", tmp_path / "o", "--class-name", name) == 0
    assert json.loads((tmp_path / "o/model_index.json").read_text())["_class_name"] == name
    assert hasattr(diffusers, name) == (name == "Cosmos3OmniPipeline")
