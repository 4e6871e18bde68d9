"""A workload of convolutions and batch norms: a small ResNet."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class ResNetShape:
    """Sizes of the model and of a batch: those of a ResNet-18 of half the width, on small images."""

    widths: tuple[int, ...] = (32, 64, 128, 256)
    blocks_per_width: int = 2
    num_classes: int = 10
    image: int = 64
    batch: int = 16


def _convolution(width_in: int, width: int, kernel: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(width_in, width, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(width))


class Block(nn.Module):
    """Two convolutions beside a residual."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = _convolution(width_in, width, 3, stride)
        self.second = _convolution(width, width, 3)
        same = width_in == width and stride == 1
        self.shortcut = nn.Identity() if same else _convolution(width_in, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (batch, width_in, h, w) -> (batch, width, h / stride, w / stride)."""
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


class ResNet(nn.Module):
    """A classifier whose forward returns the loss."""

    def __init__(self, shape: ResNetShape) -> None:
        super().__init__()
        self.stem = _convolution(3, shape.widths[0], 7, stride=2)
        pairs = zip((shape.widths[0], *shape.widths), shape.widths, strict=False)
        blocks = [
            Block(width if at else before, width, 2 if at == 0 and before != width else 1)
            for before, width in pairs
            for at in range(shape.blocks_per_width)
        ]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(shape.widths[-1], shape.num_classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy. Shapes: (batch, 3, image, image), (batch,) -> ()."""
        x = F.max_pool2d(F.relu(self.stem(images)), 3, stride=2, padding=1)
        return F.cross_entropy(self.head(self.blocks(x).mean((2, 3))), labels)


def make_images(shape: ResNetShape, *, seed: int) -> tuple[Tensor, Tensor]:
    """Random images (batch, 3, image, image) and labels (batch,)."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(shape.batch, 3, shape.image, shape.image, generator=generator)
    return images, torch.randint(shape.num_classes, (shape.batch,), generator=generator)
