"""Random-weight stand-ins of the published folders: same files, names, layout and architecture as Cosmos3-Nano, thousands of times smaller.

Seeded, bf16, offline. They let every stage run its real loading code on a CPU; the policy they make knows nothing.
"""

import json
from pathlib import Path

import torch

from common import libero

SEED = 0
SHARD_BYTES = 400_000  # small, so that transformer/ has several shards
# transformer/config.json with the published keys; the sizes are tiny, all else is Nano's.
TRANSFORMER = {
    "_class_name": "Cosmos3OmniTransformer", "_diffusers_version": "0.37.1", "action_dim": 64, "action_gen": True, "attention_bias": False, "attention_dropout": 0.0,
    "base_fps": 24, "dtype": "bfloat16", "enable_fps_modulation": True, "freeze_und": False, "head_dim": 16, "hidden_act": "silu", "hidden_size": 64,
    "initializer_range": 0.02, "intermediate_size": 128, "joint_attn_implementation": "two_way", "latent_channel": 48, "latent_patch_size": 2, "max_action_dim": 64,
    "max_position_embeddings": 262144, "model_type": "qwen3_vl_text", "num_attention_heads": 4, "num_embodiment_domains": 32, "num_hidden_layers": 2, "num_key_value_heads": 2,
    "patch_latent_dim": 192, "position_embedding_type": "unified_3d_mrope", "qk_norm": False, "qk_norm_for_diffusion": True, "qk_norm_for_text": True, "rms_norm_eps": 1e-6,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"}, "rope_theta": 5000000, "sound_dim": 64, "sound_gen": True,
    "sound_latent_fps": 25, "temporal_compression_factor_sound": 1, "timestep_scale": 0.001, "unified_3d_mrope_reset_spatial_ids": True,
    "unified_3d_mrope_temporal_modality_margin": 15000, "use_cache": True, "use_moe": True, "video_temporal_causal": False, "vocab_size": 512,
}  # fmt: skip
# AutoencoderKLWan in Wan2.2 shape: x16 in space, x4 in time, 48 channels.
VAE = {
    "base_dim": 4, "decoder_base_dim": 4, "z_dim": 48, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 1, "attn_scales": [], "temperal_downsample": [False, True, True],
    "is_residual": True, "in_channels": 12, "out_channels": 12, "patch_size": 2, "scale_factor_temporal": 4, "scale_factor_spatial": 16,
    "latents_mean": [0.0] * 48, "latents_std": [0.15] * 48,  # a random encoder's output is about this wide
}  # fmt: skip
SCHEDULER = {
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "use_karras_sigmas": True,
    "sigma_max": 200.0,
    "sigma_min": 0.147,
}
SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# Qwen's pre-tokenizer pattern.
PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CORPUS_TASKS = (
    "put the bowl on the plate",
    "pick up the alphabet soup and place it in the basket",
    "turn on the stove and put the moka pot on it",
)


def _json(path: Path, value) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE of 512 ids with Qwen's pre-tokenizer, normalizer and special tokens, trained on three prompts."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [f"user\n{libero.build_prompt(t, n, libero.LIBERO.fps)}\nassistant\n" for t in CORPUS_TASKS for n in range(3)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=TRANSFORMER["vocab_size"], special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
        ),
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    _json(folder / "vocab.json", model["vocab"])
    (folder / "merges.txt").write_text("".join(f"{' '.join(m)}\n" for m in model["merges"]))
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "unk_token": None,
        "add_bos_token": False,
    }
    _json(folder / "tokenizer_config.json", config | {"model_max_length": 262144, "chat_template": CHAT_TEMPLATE})


def _quiet() -> None:
    """The libraries warn about what is meant here: published config keys they do not know, and bf16 in every tensor."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.set_verbosity_error()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def _vae():
    from diffusers import AutoencoderKLWan

    _quiet()

    torch.manual_seed(SEED)
    return AutoencoderKLWan(**VAE).to(torch.bfloat16)


def _vision_encoder():
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    torch.manual_seed(SEED)
    config = Qwen3VLVisionConfig(
        depth=2,
        hidden_size=32,
        intermediate_size=64,
        num_heads=2,
        out_hidden_size=64,
        num_position_embeddings=16,
        deepstack_visual_indexes=[0],
    )
    return Qwen3VLVisionModel(config).to(torch.bfloat16)


def write_cosmos3_nano(folder: Path) -> None:
    """nvidia/Cosmos3-Nano: 66 transformer tensors (22 a layer and 22 more, sound included) in several shards, VAE, tokenizer, scheduler, vision tower, root index."""
    from diffusers import Cosmos3OmniTransformer, UniPCMultistepScheduler

    _quiet()
    folder = Path(folder)
    torch.manual_seed(SEED)
    config = {k: v for k, v in TRANSFORMER.items() if not k.startswith("_")}
    transformer = Cosmos3OmniTransformer.from_config(config)
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            # Wide enough that every tensor changes the output visibly; the norms stay near one.
            parameter.copy_(
                1 + 0.1 * torch.randn(parameter.shape, generator=generator)
                if "norm" in name
                else 0.1 * torch.randn(parameter.shape, generator=generator)
            )
    transformer.to(torch.bfloat16).save_pretrained(folder / "transformer", max_shard_size=SHARD_BYTES)
    _json(folder / "transformer/config.json", TRANSFORMER)
    _vae().save_pretrained(folder / "vae")
    write_tokenizer(folder / "text_tokenizer")
    UniPCMultistepScheduler(**SCHEDULER).save_pretrained(folder / "scheduler")
    _vision_encoder().save_pretrained(folder / "vision_encoder")
    _json(
        folder / "model_index.json",
        {
            "_class_name": "Cosmos3OmniDiffusersPipeline",
            "_diffusers_version": "0.37.1",
            "scheduler": ["diffusers", "UniPCMultistepScheduler"],
            "text_tokenizer": ["transformers", "Qwen2TokenizerFast"],
            "transformer": ["diffusers", "Cosmos3OmniTransformer"],
            "vae": ["diffusers", "AutoencoderKLWan"],
            "vision_encoder": ["transformers", "Qwen3VLVisionModel"],
        },
    )
    from safetensors import safe_open

    index = json.loads((folder / "transformer/diffusion_pytorch_model.safetensors.index.json").read_text())
    weight_map = {name: f"transformer/{shard}" for name, shard in index["weight_map"].items()}
    with safe_open(folder / "vision_encoder/model.safetensors", "pt") as f:
        weight_map |= dict.fromkeys(f.keys(), "vision_encoder/model.safetensors")
    _json(folder / "model.safetensors.index.json", {"metadata": index["metadata"], "weight_map": weight_map})
    _json(
        folder / "config.json",
        {
            "model_type": "cosmos3_omni",
            "architectures": ["Cosmos3ForConditionalGeneration"],
            "allow_patterns_overrides": ["*/*.safetensors"],
        },
    )
    _json(folder / "checkpoint.json", {"experiment": "random weights", "seed": SEED})


def write_wan_diffusers(folder: Path) -> None:
    """Wan-AI/Wan2.2-TI2V-5B-Diffusers, the part that is used: vae/ and model_index.json."""
    folder = Path(folder)
    _vae().save_pretrained(folder / "vae")
    _json(
        folder / "model_index.json",
        {"_class_name": "WanPipeline", "_diffusers_version": "0.35.0.dev0", "vae": ["diffusers", "AutoencoderKLWan"]},
    )


def write_wan_vae_pth(folder: Path) -> None:
    """Wan-AI/Wan2.2-TI2V-5B, the part that is used: Wan2.2_VAE.pth."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(dict(_vae().state_dict()), folder / "Wan2.2_VAE.pth")


def write_qwen3_vl(folder: Path) -> None:
    """Qwen/Qwen3-VL-8B-Instruct: tokenizer, config, and a sharded checkpoint of the vision tower and the embedding."""
    from safetensors.torch import save_file

    folder = Path(folder)
    write_tokenizer(folder)
    _json(folder / "config.json", {"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"]})
    generator = torch.Generator().manual_seed(SEED)
    shards = [
        {f"model.visual.{k}": v.contiguous() for k, v in _vision_encoder().state_dict().items()},
        {"model.language_model.embed_tokens.weight": torch.randn(TRANSFORMER["vocab_size"], 64, generator=generator).to(torch.bfloat16)},
    ]
    weight_map = {}
    for i, tensors in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    _json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
