"""What training changes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from aotdist.launch.data import ByteStream

NEVER = -1
"""A step before every other one."""


@dataclass(slots=True)
class TrainState:
    """All that training changes: what a checkpoint has to hold.

    Args:
        model: its parameters and buffers.
        optimizer: its moments.
        stream: its position in the text.
        step: optimizer steps taken.
        validated: the step after which the model was last validated.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    stream: ByteStream
    step: int = 0
    validated: int = NEVER
