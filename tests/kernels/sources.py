"""The programs that the tests of the emitter interpret, for tests that do something else with all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from tests.kernels.test_fusion import ONE_KERNEL
from tests.kernels.test_operators import RANDOM
from tests.kernels.test_programs import SIZES, program_of, tensors
from tests.op_db.samples import Walk, operator_cases, operator_names

NUM_RANDOM = 150


@dataclass(frozen=True)
class Program:
    """What is compiled.

    Args:
        label: where it is from.
        function: what is called.
        args: what with.
        kwargs: and with which keywords.
        settings: of the compilation.
        leaves: tensors that gradients are taken of, beside arguments.
    """

    label: str
    function: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    leaves: Sequence[Tensor] = ()


def operators(every: int) -> Iterator[Program]:
    """The first sample of each operator of PyTorch's database that eager runs."""
    for name in operator_names()[::every]:
        for case in operator_cases(name, Walk(torch.float32)) if name not in RANDOM else ():
            if case.number or case.program.endswith("_"):
                break
            scene = case.build()
            args, kwargs = scene.arguments()
            try:
                scene.target(*args, **kwargs)
            except Exception:
                continue
            yield Program(str(case), scene.target, args, kwargs)


def random_programs(every: int) -> Iterator[Program]:
    """Programs at random, half of them of any sizes."""
    made: list[Program] = []

    @settings(
        max_examples=NUM_RANDOM // every,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(program_of(), SIZES, st.booleans(), st.booleans())
    def keep(program: Callable[..., Any], sizes: list[int], transposed: bool, dynamic: bool) -> None:
        given_tensors = tensors(sizes, torch.float32, transposed=transposed, grad=True)
        label = f"{program} of {sizes}{', transposed' * transposed}{', of any size' * dynamic}"
        made.append(Program(label, program, given_tensors, settings={"dynamic": dynamic}))

    keep()
    yield from made


def one_kernel(every: int) -> Iterator[Program]:
    """What `test_fusion` says is one kernel, of sizes that a block holds and of others."""
    for sizes, name in list(itertools.product(((6, 64), (6, 9216), (2304, 64)), ONE_KERNEL))[::every]:
        generator = torch.Generator().manual_seed(sum(sizes))
        rows, length = (sizes[0], 64) if name == "rotated halves" else sizes
        x = torch.randn(rows, length, generator=generator, requires_grad=True)
        yield Program(f"{name} of {sizes}", ONE_KERNEL[name], (x,))


class Residual(nn.Module):
    """A block of a diffusion model's UNet: norms by groups, convolutions, what time says, attention."""

    def __init__(self, width: int, more: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(8, size) for size in (width, more, more))
        self.first = nn.Conv2d(width, more, 3, padding=1)
        self.second = nn.Conv2d(more, more, 3, padding=1)
        self.skip = nn.Conv2d(width, more, 1)
        self.time = nn.Linear(width, more)
        self.qkv = nn.Conv2d(more, 3 * more, 1)
        self.out = nn.Conv2d(more, more, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.first(F.silu(self.norms[0](x))) + self.time(F.silu(time))[:, :, None, None]
        y = self.second(F.dropout(F.silu(self.norms[1](y)), 0.1)) + self.skip(x)
        heads = self.qkv(self.norms[2](y)).flatten(2).transpose(1, 2).chunk(3, -1)
        seen = F.scaled_dot_product_attention(
            *(head.unflatten(-1, (4, -1)).transpose(1, 2) for head in heads)
        )
        return y + self.out(seen.transpose(1, 2).flatten(2).transpose(1, 2).reshape(y.shape))


class UNet(nn.Module):
    """One block down, one up, and what is joined across."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = Residual(width, 2 * width), Residual(3 * width, width)
        self.halved = nn.Conv2d(2 * width, 2 * width, 3, stride=2, padding=1)
        self.time = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        low = F.interpolate(self.halved(self.down(x, time)), scale_factor=2.0, mode="nearest")
        return F.mse_loss(self.up(torch.cat([low, x], 1), self.time(time)), x)


class Scan(nn.Module):
    """A selective state space: a loop over time."""

    def __init__(self, width: int, state: int = 8) -> None:
        super().__init__()
        self.given, self.chosen = nn.Linear(width, 2 * width), nn.Linear(width, 2 * state + 1)
        self.bias, self.log = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width, state))
        self.out, self.width = nn.Linear(width, width), state

    def forward(self, x: Tensor) -> Tensor:
        y, gate = self.given(x).chunk(2, -1)
        b, c, step = self.chosen(y).split([self.width, self.width, 1], -1)
        step = F.softplus(step + self.bias)
        decay = torch.exp(-step[..., None] * self.log.exp())
        more = (step * y)[..., None] * b[..., None, :]
        h, seen = torch.zeros_like(more[:, 0]), []
        for at in range(x.shape[1]):
            h = decay[:, at] * h + more[:, at]
            seen.append((h * c[:, at, None]).sum(-1))
        return self.out(torch.stack(seen, 1) * F.silu(gate)).square().mean()


def _of_transformers(name: str, width: int, layers: int) -> nn.Module:
    import transformers

    heads, vocab = max(4, width // 64), 96 if width < 512 else 32000
    usual: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    text = usual | {"vocab_size": vocab, "intermediate_size": 2 * width, "num_key_value_heads": heads // 2}
    match name:
        case "Llama":
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**text))
        case "Mixtral":
            config = transformers.MixtralConfig(**text, num_local_experts=4, output_router_logits=True)
            return transformers.MixtralForCausalLM(config)
        case "GPT-2":
            config = transformers.GPT2Config(n_embd=width, n_layer=layers, n_head=heads, vocab_size=vocab)
            return transformers.GPT2LMHeadModel(config)
        case "T5":
            config = transformers.T5Config(
                vocab_size=vocab, d_model=width, d_kv=width // heads, d_ff=2 * width, num_layers=layers,
                num_heads=heads, decoder_start_token_id=0, pad_token_id=0,
            )  # fmt: skip
            return transformers.T5ForConditionalGeneration(config)
        case _:
            hidden = [width // 4, width // 2, width, 2 * width]
            config = transformers.ConvNextConfig(hidden_sizes=hidden, depths=[1] * 4, image_size=64)
            return transformers.ConvNextForImageClassification(config)


MODELS = ("Llama", "GPT-2", "T5", "Mixtral", "ConvNeXt", "UNet", "UNet in channels-last", "scan")


def model(name: str, width: int, dtype: torch.dtype) -> Program:
    """A model and a batch.

    Args:
        name: one of `MODELS`.
        width: of it; one from 512 on lies in memory that is never written.
        dtype: of its parameters.
    """
    is_wide = width >= 512
    with torch.device("meta" if is_wide else "cpu"):
        net = _built(name, width).to(dtype)
    if is_wide:
        net = net.to_empty(device="cpu")
        getattr(net, "tie_weights", int)()
    leaves = list(net.parameters())
    batch, length = (4, 512) if is_wide else (2, 16)

    def numbers(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=dtype) if is_wide else torch.randn(sizes, dtype=dtype)

    if "UNet" in name:
        layout = torch.channels_last if "last" in name else torch.contiguous_format
        x = numbers(batch, width // 4, *(32, 32) if is_wide else (8, 8)).to(memory_format=layout)
        x.requires_grad_()  # without, PyTorch's backward of a group norm in channels-last ends the process
        return Program(name, net.to(memory_format=layout), (x, numbers(batch, width // 4)), leaves=leaves)
    if name == "scan":
        return Program(name, net, (numbers(batch, 16, width),), leaves=leaves)
    if name == "ConvNeXt":
        labels = torch.zeros(batch, dtype=torch.int64)
        return _with_loss(name, net, {"pixel_values": numbers(batch, 3, 64, 64), "labels": labels})
    ids = torch.arange(batch * length).reshape(batch, length) % 90
    return _with_loss(name, net, {"input_ids": ids, "labels": ids.clone()})


def _built(name: str, width: int) -> nn.Module:
    if "UNet" in name:
        return UNet(width // 4)
    return Scan(width) if name == "scan" else _of_transformers(name, width, 2)


def _with_loss(name: str, net: nn.Module, batch: Mapping[str, Any]) -> Program:
    return Program(name, partial(_loss, net), (), batch, leaves=list(net.parameters()))


def _loss(net: nn.Module, **batch: Tensor) -> Tensor:
    return net(**batch).loss


def narrow_models(every: int) -> Iterator[Program]:
    """Those that the tests interpret."""
    for name in MODELS[::every]:
        for dynamic in (False, True):
            label = f"{name} of 64{' of any size' * dynamic}"
            options = {"functional_rng": True, "dynamic": dynamic}
            yield replace(model(name, 64, torch.float32), label=label, settings=options)


def wide_models(every: int) -> Iterator[Program]:
    """Those of a size that is trained."""
    for name in MODELS[::every]:
        for dtype in (torch.float32, torch.bfloat16):
            label = f"{name} of 1024 {dtype}"
            yield replace(model(name, 1024, dtype), label=label, settings={"functional_rng": True})


SOURCES: Mapping[str, Callable[[int], Iterator[Program]]] = {
    "operators": operators,
    "random": random_programs,
    "one_kernel": one_kernel,
    "narrow_models": narrow_models,
    "wide_models": wide_models,
}
"""Programs by where they are from: all of them, or one in so many."""
