"""Tensors to call a program with."""

import torch
from torch.testing._internal.two_tensor import TwoTensor


def plain(*size: int) -> torch.Tensor:
    """Numbers without history."""
    return torch.randn(*(size or (3, 4)))


def leaf(*size: int) -> torch.Tensor:
    """A leaf that requires grad."""
    return plain(*size).requires_grad_()


def non_leaf(*size: int) -> torch.Tensor:
    """What requires grad and may be written."""
    return leaf(*size) * 1.5


def two(*size: int) -> torch.Tensor:
    """Two tensors in one."""
    return TwoTensor(plain(*size), plain(*size))


def two_non_leaf(*size: int) -> torch.Tensor:
    """Two tensors in one, which require grad and may be written."""
    return two(*size).requires_grad_() * 1.5
