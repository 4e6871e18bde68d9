"""A module of the user's, whose globals other modules read."""

import torch

WEIGHT = torch.ones(3, requires_grad=True)
SCALE = 2.0


def scaled(x):
    return x * WEIGHT * SCALE


class Settings:
    scale = 3.0
    weight = torch.full((3,), 2.0, requires_grad=True)

    @staticmethod
    def apply(x):
        return x * WEIGHT * SCALE
