"""Stock diffusers, one sample at a time: the reference that the batched tower is held against (06 --forward, tests, tests/bench)."""

import torch

from common import cosmos3

LATENT = (5, 10, 20)  # latent frames, rows, columns of a LIBERO window
GRID, DOMAIN, FPS = (5, 5, 10), 5, 20.0  # latent frames, patch rows, patch columns; LIBERO's head row and frame rate


def stock_inputs(ids, clean_frames, clean_actions) -> dict:
    """The arguments of the stock forward that do not change over the denoising steps of one sample.

    ids int64 [n]; clean_frames bool [5], clean_actions bool [16].
    """
    device, n = ids.device, len(ids)
    gen = cosmos3.gen_positions(torch.tensor([n], device=device), GRID, 16, FPS)[:, 0]
    frames, actions = (~clean_frames).nonzero()[:, 0], (~clean_actions).nonzero()[:, 0]
    patches = (frames[:, None] * 50 + torch.arange(50, device=device)).flatten()
    return {
        "input_ids": ids,
        "text_indexes": torch.arange(n, device=device),
        "position_ids": torch.cat([torch.arange(n, dtype=torch.float32, device=device).expand(3, n), gen], 1),
        "und_len": n,
        "sequence_length": n + 266,
        "vision_token_shapes": [GRID],
        "vision_sequence_indexes": torch.arange(n, n + 250, device=device),
        "vision_mse_loss_indexes": n + patches,
        "vision_noisy_frame_indexes": [frames],
        "action_token_shapes": [(16, 1, 1)],
        "action_sequence_indexes": torch.arange(n + 250, n + 266, device=device),
        "action_mse_loss_indexes": n + 250 + actions,
        "action_noisy_frame_indexes": [actions],
        "action_domain_ids": [torch.tensor([DOMAIN], device=device)],
        "return_dict": False,
    }


def stock_forward(model, ids, x, a, sigma: float, clean_frames, clean_actions):
    """(vision [48, 5, 10, 20], action [16, 64]) of one sample.

    ids int64 [n]; x [1, 48, 5, 10, 20] and a [16, 64], x_t in the model's dtype; clean_frames bool [5], clean_actions bool [16].
    """
    inputs = stock_inputs(ids, clean_frames, clean_actions)
    out = model(
        **inputs,
        vision_tokens=[x],
        action_tokens=[a],
        vision_timesteps=torch.full((len(inputs["vision_mse_loss_indexes"]),), 1000 * sigma, device=ids.device),
        action_timesteps=torch.full((len(inputs["action_mse_loss_indexes"]),), 1000 * sigma, device=ids.device),
    )
    return out[0][0][0], out[2][0]
