"""common/weights.py: every container is recognised, every kind of damage is named.    Run: ./run_tests.sh tests/test_weights.py"""

import json
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import load_script
from safetensors.torch import load_file, save_file

from common import cosmos3, keys, weights
from common.console import Precondition


@pytest.fixture
def folder(base, tmp_path):
    """A copy of the base to break."""
    return shutil.copytree(base, tmp_path / "Cosmos3-Nano")


@pytest.fixture(scope="session")
def base_dcp(base, tmp_path_factory):
    out = tmp_path_factory.mktemp("dcp") / "Cosmos3-Nano-DCP"
    assert load_script("03_base_to_dcp").main(["--base", str(base), "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="session")
def tensors(base):
    """Canonical key -> tensor of the base."""
    source = weights.open_source(base)
    return {k: source.read([n])[n] for k, n in source.net.items()}


def written(container, tensors, place):
    """The same weights (and an average of twice their value) in another container."""
    state = {keys.spell(k, container): v for k, v in tensors.items()}
    if container in ("rlinf", "rlinf-dcp", "cosmos"):
        state |= {keys.spell(k, container, ema=True): 2 * v.float() for k, v in tensors.items()}
    if container == "rlinf":
        torch.save(state, place / "full_weights.pt")
        return place / "full_weights.pt"
    if container == "cosmos-hf":
        place.mkdir(exist_ok=True)
        save_file(state, place / "model-00001-of-00001.safetensors")
        return place
    inner = {"cosmos": place / "model", "rlinf-dcp": place / "actor/dcp_checkpoint"}[container]
    extra = (
        {"fsdp_checkpoint.optimizers.state.x.exp_avg": torch.zeros(3), "fsdp_checkpoint.fsdp_version": 2}
        if container == "rlinf-dcp"
        else {}
    )
    dcp.save(state | extra, storage_writer=dcp.FileSystemWriter(str(inner)), no_dist=True)
    return place


@pytest.mark.parametrize("container", ["cosmos", "cosmos-hf", "rlinf", "rlinf-dcp"])
def test_every_container_reads_the_same_tensors(container, tensors, tmp_path):
    """Written under another spelling in another container, each tensor reads back bit for bit, and averages never mix with weights."""
    source = weights.open_source(written(container, tensors, tmp_path))
    assert set(source.net) == set(tensors)
    for k, v in tensors.items():
        torch.testing.assert_close(source.read([source.net[k]])[source.net[k]], v, rtol=0, atol=0)
    assert set(source.ema) == (set() if container == "cosmos-hf" else set(tensors))
    if source.ema:
        k = next(iter(tensors))
        torch.testing.assert_close(source.read([source.ema[k]])[source.ema[k]], 2 * tensors[k].float(), rtol=0, atol=0)


def test_fingerprint_is_the_same_for_folder_and_dcp(base, base_dcp):
    """The diffusers folder and the DCP made from it have one fingerprint, from base.json and from the tensors alike."""
    expected = weights.base_fingerprint(weights.open_source(base))
    source = weights.open_source(base_dcp)
    assert weights.base_fingerprint(source) == expected
    (base_dcp / weights.BASE_NOTE).rename(base_dcp / "elsewhere")
    assert weights.base_fingerprint(source) == expected
    (base_dcp / "elsewhere").rename(base_dcp / weights.BASE_NOTE)


def test_fingerprint_changes_with_one_weight(base, folder):
    """One changed number at the end of one tensor is another base."""
    file = sorted((folder / "transformer").glob("*.safetensors"))[0]
    state = load_file(file)
    name = sorted(state)[0]
    state[name].view(-1)[-1] += 1
    save_file(state, file, metadata={"format": "pt"})
    assert weights.base_fingerprint(weights.open_source(folder)) != weights.base_fingerprint(weights.open_source(base))


def test_load_module_fills_every_parameter(base, tensors):
    """A tower built on meta and filled from the folder equals the base, cast to its own dtype."""
    tower = cosmos3.materialize(
        cosmos3.GenTower(cosmos3.build_transformer(json.loads((base / "transformer/config.json").read_text()))), "cpu"
    )
    weights.load_module(tower, weights.open_source(base))
    for name, p in tower.named_parameters():
        torch.testing.assert_close(p.detach(), tensors[keys.to_canonical(name)].float(), rtol=0, atol=0)


def shard(folder):
    return sorted((folder / "transformer").glob("*.safetensors"))[1]


def index_edit(folder, change):
    file = folder / "transformer" / weights.INDEX
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))


DAMAGE = {
    "missing shard": (lambda f: shard(f).unlink(), r"no .*00002-of"),
    "cut shard": (lambda f: shard(f).write_bytes(shard(f).read_bytes()[:-7]), r"cut short by 7"),
    "long shard": (lambda f: shard(f).write_bytes(shard(f).read_bytes() + b"x"), r"too long by 1"),
    "LFS pointer": (
        lambda f: shard(f).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        r"Git LFS pointer",
    ),
    "HTML": (lambda f: shard(f).write_text("<!doctype html>" * 100), r"safetensors header"),
    "empty": (lambda f: shard(f).write_bytes(b""), r"safetensors header"),
    "stale shard": (
        lambda f: save_file({"norm.weight": torch.ones(1)}, f / "transformer/old.safetensors"),
        r"old.safetensors.*in no index",
    ),
    "index without a tensor": (lambda f: index_edit(f, lambda m: m.pop("norm.weight")), r"1 tensors differ.*norm.weight"),
    "index with one too many": (
        lambda f: index_edit(f, lambda m: m.update({"norm2.weight": m["norm.weight"]})),
        r"1 tensors differ.*norm2.weight",
    ),
    "nothing there": (lambda f: shutil.rmtree(f / "transformer"), r"found .* with .*model_index.json"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_folder_is_named(name, folder):
    """Each kind of damage to a diffusers folder stops with a message that names it."""
    damage, message = DAMAGE[name]
    damage(folder)
    with pytest.raises(Precondition, match=message):
        weights.open_source(folder)


def test_unknown_tensor_is_refused(tensors, tmp_path):
    """A tensor that Cosmos3-Nano does not have (Edge's) is an error, never dropped in silence."""
    state = {keys.spell(k, "rlinf"): v for k, v in tensors.items()} | {
        "omni.net.language_model.model.layers.0.self_attn.k_norm_und_for_gen.weight": torch.ones(1)
    }
    torch.save(state, tmp_path / "x.pt")
    with pytest.raises(Precondition, match="k_norm_und_for_gen"):
        weights.open_source(tmp_path / "x.pt")


def test_two_spellings_of_one_tensor_collide(tensors, tmp_path):
    """The same canonical key twice in one file is an error."""
    torch.save({"omni.net.vae2llm.bias": torch.ones(1), "net.vae2llm.bias": torch.ones(1)}, tmp_path / "x.pt")
    with pytest.raises(Precondition, match="one tensor a name"):
        weights.open_source(tmp_path / "x.pt")


def test_pickled_code_is_not_run(tmp_path):
    """Objects in a .pt file that are no tensors are not built, whatever they would call; one in a tensor's place leaves that tensor absent."""

    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    state = {"omni.net.vae2llm.bias": torch.ones(1), "omni.net.llm2vae.bias": Trap(), "meta": [Trap(), {"deep": Trap()}]}
    torch.save(state, tmp_path / "x.pt")
    source = weights.open_source(tmp_path / "x.pt")
    assert list(source.net) == ["vae2llm.bias"] and source.tensor("omni.net.vae2llm.bias") == 1
    assert not (tmp_path / "ran").exists()


def test_cut_pt_file_is_named(tensors, tmp_path):
    """A truncated full_weights.pt is a message, not a traceback."""
    torch.save({keys.spell(k, "rlinf"): v for k, v in tensors.items()}, tmp_path / "x.pt")
    (tmp_path / "x.pt").write_bytes((tmp_path / "x.pt").read_bytes()[:5000])
    with pytest.raises(Precondition, match=r"whole \.pt file"):
        weights.open_source(tmp_path / "x.pt")


def test_pt_file_that_is_no_state_dict_is_named(tmp_path):
    """A saved tensor, and a pickle from before torch's zip format: a message with what was found."""
    torch.save(torch.ones(3), tmp_path / "tensor.pt")
    (tmp_path / "old.pt").write_bytes(pickle.dumps({"omni.net.vae2llm.bias": [1.0]}))
    for name, found in (("tensor.pt", "Tensor in"), ("old.pt", "not a zip archive")):
        with pytest.raises(Precondition, match=found):
            weights.open_source(tmp_path / name)


def test_cut_dcp_shard_is_named(base_dcp, tmp_path):
    """A .distcp file shorter than the metadata says is named before anything is loaded."""
    copy = shutil.copytree(base_dcp, tmp_path / "D")
    file = copy / "model/__0_0.distcp"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(Precondition, match=r"__0_0.distcp \(1000, needs \d+\)"):
        weights.open_source(copy)


def test_dcp_without_metadata_is_a_broken_save(base_dcp, tmp_path):
    """*.distcp files without .metadata (written last) are a save that was cut short."""
    copy = shutil.copytree(base_dcp, tmp_path / "D")
    (copy / "model/.metadata").unlink()
    with pytest.raises(Precondition, match=r"no .metadata"):
        weights.open_source(copy)


def test_metadata_names_no_machine_path_and_reads_from_python_313(base_dcp, tmp_path):
    """The .metadata we write holds no absolute path; one written by Python 3.13 (paths pickled under pathlib._local) reads as well."""
    copy = shutil.copytree(base_dcp, tmp_path / "D")
    file = copy / "model/.metadata"
    assert str(base_dcp).encode() not in file.read_bytes() and b"pathlib" not in file.read_bytes()
    metadata = pickle.loads(file.read_bytes())
    metadata.storage_meta.checkpoint_id = tmp_path
    file.write_bytes(pickle.dumps(metadata, protocol=2).replace(b"cpathlib\n", b"cpathlib._local\n"))
    assert b"pathlib._local" in file.read_bytes()
    assert len(weights.open_source(copy).net) == 66
