"""Lets the trained model write: bytes drawn one by one, shown as text."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from aotdist.launch.config import RunOptions
from aotdist.launch.parallel import World

PROMPT = "class "
"""What the sample continues."""

TEMPERATURE = 0.6


@torch.no_grad()
def write_sample(model: nn.Module, world: World, options: RunOptions, *, seq_len: int) -> str:
    """The prompt and the model's continuation of it; every rank must take part.

    The model always sees a full window, filled up on the right, where causal attention does not look: a
    compiled model then needs one artifact for all of them.
    """
    generator = torch.Generator().manual_seed(options.seed)
    text = list(PROMPT.encode())
    for _ in range(options.sample_bytes):
        context = text[-seq_len:]
        window = torch.tensor([context + [0] * (seq_len - len(context))], device=world.device)
        with world.autocast():
            logits = model(window)[0, len(context) - 1]
        text.append(draw_byte(logits.cpu(), generator))
    return bytes(text).decode(errors="replace")


def draw_byte(logits: Tensor, generator: torch.Generator) -> int:
    """One byte.

    Shapes: logits (256,).
    """
    chances = torch.softmax(logits.float() / TEMPERATURE, dim=-1)
    return int(torch.multinomial(chances, 1, generator=generator))
