"""The models whose kernels are checked one by one, at sizes that fill a GPU, or tiny."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Size:
    """How large a model is.

    Args:
        hidden: features of a token, or channels.
        heads: of attention.
        layers: of each kind.
        vocab: classes of a token.
        batch: samples.
        length: tokens of a sample.
        image: pixels along a side.
    """

    hidden: int
    heads: int
    layers: int
    vocab: int
    batch: int
    length: int
    image: int


LARGE = Size(hidden=1024, heads=16, layers=2, vocab=32_000, batch=8, length=1024, image=224)
SMALL = Size(hidden=32, heads=2, layers=1, vocab=64, batch=2, length=16, image=32)


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of model.

    Args:
        build: makes the module, on the device that is current.
        inputs: keyword arguments of a call, on the device that is current.
        dtype: of parameters and activations.
        layout: of images and their weights.
    """

    build: Callable[[Size], nn.Module]
    inputs: Callable[[Size], Mapping[str, Tensor]]
    dtype: torch.dtype = torch.bfloat16
    layout: torch.memory_format = torch.contiguous_format

    def program(self, size: Size, device: torch.device) -> tuple[nn.Module, dict[str, Tensor]]:
        """The model in training mode without dropout, and a batch; the same numbers at every call."""
        torch.manual_seed(0)
        with torch.device(device):
            module = self.build(size).to(self.dtype).train()
            given = {name: self._placed(value) for name, value in self.inputs(size).items()}
        return module.to(memory_format=self.layout), given  # pyright: ignore[reportCallIssue]

    def _placed(self, value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        return value.to(self.dtype).to(
            memory_format=self.layout if value.dim() == 4 else torch.preserve_format
        )


def loss_of(outputs: Any) -> Tensor:
    """What is differentiated: the model's own loss, or the mean square of what it returns."""
    loss = getattr(outputs, "loss", None)
    return outputs.float().square().mean() if loss is None else loss


def _config(made: Any, **options: Any) -> Any:
    """A config with options of its base class, which its own signature does not show."""
    return made(**options)


def _llama(size: Size) -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=size.vocab,
            hidden_size=size.hidden,
            intermediate_size=3 * size.hidden,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads // 2,
        )
    )


def _gpt2(size: Size) -> nn.Module:
    return transformers.GPT2LMHeadModel(
        _config(
            transformers.GPT2Config,
            vocab_size=size.vocab,
            n_embd=size.hidden,
            n_layer=size.layers,
            n_head=size.heads,
            n_positions=size.length,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            pad_token_id=None,
            loss_type="ForCausalLMLoss",
        )
    )


def _t5(size: Size) -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        _config(
            transformers.T5Config,
            vocab_size=size.vocab,
            d_model=size.hidden,
            d_ff=3 * size.hidden,
            d_kv=size.hidden // size.heads,
            num_layers=size.layers,
            num_heads=size.heads,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


def _mixtral(size: Size) -> nn.Module:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=size.vocab,
            hidden_size=size.hidden,
            intermediate_size=2 * size.hidden,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads // 2,
            num_local_experts=4,
            output_router_logits=True,
        )
    )


def _convnext(size: Size) -> nn.Module:
    widths = [size.hidden // 8 * 2**stage for stage in range(4)]
    return transformers.ConvNextForImageClassification(
        _config(transformers.ConvNextConfig, hidden_sizes=widths, depths=[1] * 4, num_labels=10)
    )


def _resnet(size: Size) -> nn.Module:
    widths = [size.hidden // 8 * 2**stage for stage in range(4)]
    return transformers.ResNetForImageClassification(
        _config(
            transformers.ResNetConfig,
            embedding_size=size.hidden // 16,
            hidden_sizes=widths,
            depths=[1] * 4,
            num_labels=10,
        )
    )


class Residual(nn.Module):
    """A block of a UNet: two convolutions with group norms, and an embedding of the time between them."""

    def __init__(self, before: int, after: int, time: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(8, before), nn.GroupNorm(8, after)])
        self.convolutions = nn.ModuleList(
            [nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)]
        )
        self.time = nn.Linear(time, after)
        self.skip = nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Shapes: (n, before, h, w), (n, time) -> (n, after, h, w)."""
        y = self.convolutions[0](F.silu(self.norms[0](x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.convolutions[1](F.silu(self.norms[1](y)))


class UNet(nn.Module):
    """Down, attention between all places, and up again beside what came down."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, width, 3, padding=1)
        self.down = Residual(width, 2 * width, width)
        self.heads = heads
        self.queries = nn.Conv2d(2 * width, 6 * width, 1)
        self.up = Residual(3 * width, width, width)
        self.last = nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, image: Tensor, time: Tensor) -> Tensor:
        """Shapes: (n, 4, h, w), (n, width) -> (n, 4, h, w)."""
        x = self.first(image)
        y = self.down(F.avg_pool2d(x, 2), time)
        parts = self.queries(y).flatten(2).unflatten(1, (3, self.heads, -1)).transpose(-1, -2).unbind(1)
        y = y + F.scaled_dot_product_attention(*parts).transpose(-1, -2).reshape(y.shape)
        return self.last(self.up(torch.cat([x, F.interpolate(y, scale_factor=2.0)], 1), time))


def _unet(size: Size) -> nn.Module:
    return UNet(size.hidden // 4, size.heads // 2)


def _tokens(size: Size) -> Mapping[str, Tensor]:
    tokens = torch.randint(1, size.vocab, (size.batch, size.length))
    return {"input_ids": tokens, "labels": tokens.clone()}


def _images(size: Size) -> Mapping[str, Tensor]:
    return {
        "pixel_values": torch.randn(4 * size.batch, 3, size.image, size.image),
        "labels": torch.randint(10, (4 * size.batch,)),
    }


def _noise(size: Size) -> Mapping[str, Tensor]:
    side = size.image // 4
    return {
        "image": torch.randn(size.batch, 4, side, side),
        "time": torch.randn(size.batch, size.hidden // 4),
    }


FAMILIES: Mapping[str, Family] = {
    "Llama": Family(_llama, _tokens),
    "ResNet": Family(_resnet, _images, torch.float32, torch.channels_last),
    "GPT-2": Family(_gpt2, _tokens),
    "UNet": Family(_unet, _noise),
    "UNet, channels last": Family(_unet, _noise, layout=torch.channels_last),
    "T5": Family(_t5, _tokens, torch.float32),
    "Mixtral": Family(_mixtral, _tokens),
    "ConvNeXt": Family(_convnext, _images),
}
"""By name, those that the short form checks first."""
