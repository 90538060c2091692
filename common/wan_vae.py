"""The frozen video VAE (Wan2.2, AutoencoderKLWan) as the recipe uses it: posterior mean, normalized by the model's own constants, padding cropped.

The encoder is causal in time and keeps its state between calls, so a clip goes through it in two passes, its first frame and all the
others, as in cosmos-framework. diffusers' own loop takes four frames a pass: the same numbers within bf16 rounding, and slower.
"""

from pathlib import Path

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, patchify


def to_pixels(frames: torch.Tensor, device) -> torch.Tensor:
    """uint8 [...] -> bf16 in -1..1 on `device`."""
    return (frames.to(device).float() / 127.5 - 1).to(torch.bfloat16)


class WanEncoder:
    """pixels bf16 [B, 3, 1 + 4n, H, W] -> latents bf16 [B, 48, 1 + n, rows, columns], the top left `rows` x `columns` of H/16 x W/16.

    compiled: torch.compile; worth it on a GPU from a few thousand clips on. It specializes on the shape of its input, so keep B fixed.
    """

    def __init__(self, folder: Path, rows: int, columns: int, device, compiled: bool = False):
        vae = AutoencoderKLWan.from_pretrained(folder, torch_dtype=torch.bfloat16).eval().requires_grad_(False)
        del vae.decoder, vae.post_quant_conv
        # Channels last is the layout that the convolution kernels compute in; without it they convert every input and output.
        for module in vae.encoder.modules():
            if isinstance(module, torch.nn.Conv3d):
                module.to(memory_format=torch.channels_last_3d)
            elif isinstance(module, torch.nn.Conv2d):
                module.to(memory_format=torch.channels_last)
        self.vae, self.rows, self.columns = vae.to(device), rows, columns
        self.encoder = torch.compile(vae.encoder, dynamic=False) if compiled else vae.encoder
        self.states = sum(isinstance(m, WanCausalConv3d) for m in vae.encoder.modules())
        mean, std = torch.tensor([vae.config.latents_mean, vae.config.latents_std], dtype=torch.bfloat16, device=device).view(
            2, 1, -1, 1, 1, 1
        )
        self.mean, self.inv_std = mean, 1 / std

    @torch.no_grad()
    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        x = patchify(pixels, self.vae.config.patch_size).contiguous(memory_format=torch.channels_last_3d)
        state = [None] * self.states
        parts = [self.encoder(part, feat_cache=state, feat_idx=[0]) for part in (x[:, :, :1], x[:, :, 1:]) if part.shape[2]]
        mu = self.vae.quant_conv(torch.cat(parts, 2)).chunk(2, 1)[0]
        return ((mu - self.mean) * self.inv_std)[..., : self.rows, : self.columns].contiguous()
