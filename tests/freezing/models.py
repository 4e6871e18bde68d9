"""Models to freeze."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn
from torch.fx import GraphModule

from aotdist.freezing.frozen import Frozen


class Block(nn.Module):
    """The residual block of a ResNet."""

    def __init__(self, ins: int, outs: int, stride: int = 1):
        super().__init__()
        self.conv1 = nn.Conv2d(ins, outs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outs)
        self.conv2 = nn.Conv2d(outs, outs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outs)
        shortcut = nn.Sequential(nn.Conv2d(ins, outs, 1, stride, bias=False), nn.BatchNorm2d(outs))
        self.shortcut = shortcut if stride != 1 else nn.Identity()

    def forward(self, x):
        y = self.norm1(self.conv1(x)).relu_()
        y = self.norm2(self.conv2(y))
        y += self.shortcut(x)
        return y.relu_()


class ResNet(nn.Module):
    """Small, and complete: a stem with a pool, two blocks, a head; it returns its features, too."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 7, 2, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        self.blocks = nn.Sequential(Block(8, 8), Block(8, 16, 2))
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        y = self.blocks(self.stem(x))
        pooled = nn.functional.adaptive_avg_pool2d(y, 1)
        return {"logits": self.head(torch.flatten(pooled, 1)), "features": y}


def trained(module: nn.Module, *sizes: int) -> nn.Module:
    """A module in evaluation whose batch norms have seen data."""
    with torch.no_grad():
        for _ in range(3):
            module(torch.randn(sizes) * 2 + 1)
        for norm in (m for m in module.modules() if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d))):
            for parameter in norm.parameters():
                parameter.uniform_(0.5, 2)
    return module.eval()


def resnet() -> tuple[nn.Module, torch.Tensor]:
    return trained(ResNet(), 4, 3, 32, 32), torch.randn(2, 3, 32, 32)


def graph_of(frozen: Frozen) -> GraphModule:
    """The graph that was compiled last."""
    return frozen.graphs[0]["inference"]


def targets(frozen: Frozen) -> Counter[str]:
    """How often the graph calls each operator."""
    return Counter(str(node.target) for node in graph_of(frozen).graph.nodes if node.op == "call_function")
