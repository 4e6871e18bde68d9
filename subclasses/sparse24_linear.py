"""`sparsify_24`: linear layers that multiply by a 2:4 matrix, converted in place and back.

A converted layer keeps its identity, its parameters and their names; its class changes, and its forward::

    operand="weight"   y = x @ sparse(weight).T + bias    chosen in each forward, or held, or packed for good
    operand="input"    y = sparse(x) @ weight.T + bias    for inputs that are mostly zero

Unless it is packed, the weight stays dense and in high precision for optimizers, FSDP2 and checkpoints. A
held choice is a buffer, `weight_meta`, of two bits for each kept weight, so it is part of a checkpoint.

The squared-ReLU recipe (Haziza et al., "Accelerating Transformer Inference and Training with 2:4 Activation
Sparsity", arXiv:2503.16672) is `operand="input"` for the layer that follows `relu(x) ** 2`. The backward
product for the weight unpacks the activation, whose groups run along rows; the paper's split by features is
left out.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from aotdist.errors import BadSettings
from aotdist.subclasses.conversion import (
    Conversion,
    ConvertedLayer,
    Filter,
    convert,
    linears_to_convert,
)
from aotdist.subclasses.protocol import CONVERSION
from aotdist.subclasses.sparse24_operators import choose_24
from aotdist.subclasses.sparse24_packing import MaskKind, refusal
from aotdist.subclasses.sparse24_selection import Gradient, sparsify

Operand: TypeAlias = Literal["weight", "input"]
Select: TypeAlias = Literal["forward", "held", "packed"]

HELD = "weight_meta"
"""The buffer of a held choice."""


class Scheme(NamedTuple):
    """How a layer is sparse; a constant, on which compiled programs are specialised."""

    operand: Operand = "weight"
    mask: MaskKind = "row"
    select: Select = "forward"
    gradient: Gradient = "straight-through"
    decay: float = 0.0

    def check(self) -> None:
        """Check the options.

        Raises:
            BadSettings: one is unknown, or two contradict each other.
        """
        for name, values in (
            ("operand", Operand),
            ("mask", MaskKind),
            ("select", Select),
            ("gradient", Gradient),
        ):
            value, known = getattr(self, name), get_args(values)
            if value not in known:
                raise BadSettings(f"{name}={value!r} is unknown", fix=f"choose one of {', '.join(known)}")
        if type(self.decay) not in (int, float) or not self.decay >= 0:
            raise BadSettings(f"decay={self.decay!r} is no strength", fix="give a number, 0 or more")
        if self.decay and (self.gradient == "masked" or self.operand == "input"):
            raise BadSettings(
                f"decay={self.decay} with operand={self.operand!r} and gradient={self.gradient!r}",
                fix="decay draws dropped weights to zero: give 0 or more, operand='weight', straight-through",
            )
        if self.operand == "input" and (self.mask != "row" or self.select != "forward"):
            raise BadSettings(
                f"inputs cannot have mask={self.mask!r} and select={self.select!r}",
                fix="they are new in every forward, token by token: mask='row', select='forward'",
            )

    def __str__(self) -> str:
        chosen = {"forward": "chosen in each forward", "held": "held", "packed": "packed and frozen"}[
            self.select
        ]
        return f"2:4 {self.operand}, {self.mask} mask, {chosen}, {self.gradient} gradient"


class Sparse24Linear(nn.Linear):
    """A linear layer with one 2:4 operand, made from an `nn.Linear` by `sparsify_24`.

    Attributes:
        scheme: how it is sparse.
        weight_meta: the held choice, if it holds one. Shapes: (out, in / 8) uint8.
    """

    scheme: Scheme
    weight_meta: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Shapes: (..., in) -> (..., out)."""
        rows = input.reshape(-1, self.in_features)
        if self.scheme.operand == "input":
            kept = sparsify(rows.contiguous(), gradient=self.scheme.gradient)
            output = nn.functional.linear(kept, self.weight, self.bias)
        else:
            output = nn.functional.linear(rows, self.sparse_weight(), self.bias)
        return output.view(*input.shape[:-1], self.out_features)

    def sparse_weight(self) -> torch.Tensor:
        """The 2:4 weight that this forward multiplies by."""
        _, mask, select, gradient, decay = self.scheme
        if select == "packed":
            return self.weight
        meta = self.weight_meta if select == "held" else None
        return sparsify(self.weight, mask, meta=meta, gradient=gradient, decay=decay)

    @torch.no_grad()
    def choose(self) -> None:
        """Renew the held choice, by the present magnitudes."""
        held = self.weight_meta
        # Tensor parallelism replicates buffers: every rank has the whole choice.
        held = held.to_local() if isinstance(held, DTensor) else held
        held.copy_(_choice(self.weight, self.scheme.mask))

    def extra_repr(self) -> str:
        """The sizes, and how it is sparse."""
        return f"{super().extra_repr()}, {self.scheme}"


@dataclass(frozen=True, slots=True)
class Sparsified(Conversion):
    """What `sparsify_24` did; `print` it.

    Args:
        converted: paths of the layers that are 2:4 now.
        skipped: why each of the other linear layers was left dense, by path.
        dense_bytes: of the converted weights as dense ones; 0 if inputs are sparse.
        packed_bytes: of the converted weights packed, which products read.
    """

    dense_bytes: int
    packed_bytes: int

    def choose(self) -> None:
        """Renew the held choices (`select="held"`), by the present magnitudes; a collective if sharded.

        Raises:
            BadSettings: nothing is held, or a layer is no longer what `sparsify_24` made it.
        """
        linears: list[Any] = [layer.linear for layer in self._layers]
        if any(getattr(linear, HELD, None) is None for linear in linears):
            raise BadSettings("no choice is held that could be made anew", fix='convert with select="held"')
        for linear in linears:
            linear.choose()

    def __str__(self) -> str:
        lines = [f"2:4 sparse: {len(self.converted)} layers: {', '.join(self.converted)}"]
        if self.dense_bytes:
            share = self.packed_bytes / self.dense_bytes
            lines.append(
                f"  weights: {self.packed_bytes:,} bytes packed of {self.dense_bytes:,}: {share:.1%}"
            )
        lines += [f"  dense: {name} {reason}" for name, reason in self.skipped.items()]
        return "\n".join(lines)


def sparsify_24(
    module: nn.Module,
    filter: Filter | None = None,
    *,
    operand: Operand = "weight",
    mask: MaskKind = "row",
    select: Select = "forward",
    gradient: Gradient = "straight-through",
    decay: float = 0.0,
) -> Sparsified:
    """Make linear layers 2:4 sparse, in place; `undo()` of what it returns makes them dense again.

    Convert before `fully_shard` or `parallelize_module`, and before or after `aotdist.compile`.

    Args:
        module: its `nn.Linear`s are converted, itself included.
        filter: which of them, by name and layer; None for all that can be.
        operand: which one is 2:4: the "weight", or the "input" (of a layer behind a squared ReLU).
        mask: "row" keeps two of four neighbours in a row; "transposable" in a column too, so that the product
            for the input's gradient is sparse as well.
        select: "forward" chooses by magnitude in each forward; "held" chooses now and when `choose()` is
            called; "packed" stores the 2:4 weight alone, and frozen: for inference, or under adapters.
        gradient: "straight-through" hands the dense gradient to all weights; "masked" to the kept ones.
        decay: share of the dropped weights that is added to their gradient (SR-STE: 2e-4).

    Raises:
        BadSettings: an option is unknown or contradicts another, or no layer could be converted.
    """
    scheme = Scheme(operand, mask, select, gradient, decay)
    scheme.check()
    uses = functools.cache(
        lambda: Counter(id(p) for m in module.modules() for p in m.parameters(recurse=False))
    )
    chosen, skipped = linears_to_convert(
        module, filter, lambda layer: _reason_against(layer, scheme, uses()), "be made 2:4"
    )
    weights = [layer.weight for layer in chosen.values() if operand == "weight"]
    dense_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
    packed_bytes = sum(_packed_bytes(weight, mask) for weight in weights)
    layers = tuple(_convert(path, layer, scheme) for path, layer in chosen.items())
    return Sparsified(tuple(chosen), skipped, layers, dense_bytes, packed_bytes)


def _reason_against(layer: nn.Linear, scheme: Scheme, uses: Mapping[int, int]) -> str | None:
    weight = layer.weight
    if type(weight) is not nn.Parameter:
        return f"has a {type(weight).__name__} for its weight: convert it before it is sharded or quantised"
    if scheme.operand == "input":
        return None if layer.in_features % 8 == 0 else f"takes rows of {layer.in_features}, no multiple of 8"
    if uses[id(weight)] > 1:
        return "shares its weight with another module"
    reasons = refusal(weight, scheme.mask)
    return None if reasons is None else f"has a weight that {reasons[0]}"


def _packed_bytes(weight: torch.Tensor, mask: MaskKind) -> int:
    """Half of the values and a byte for eight elements, for the matrix and a transposed packing."""
    once = weight.numel() // 2 * weight.element_size() + weight.numel() // 8
    return once if mask == "row" else 2 * once


@torch.no_grad()
def _convert(path: str, layer: nn.Linear, scheme: Scheme) -> ConvertedLayer:
    weight, packed = layer.weight, None
    if scheme.select == "packed":
        packed = nn.Parameter(sparsify(weight, scheme.mask), requires_grad=False)
    buffers = {HELD: _choice(weight, scheme.mask)} if scheme.select == "held" else None
    attributes = {"scheme": scheme, CONVERSION: str(scheme)}
    return convert(path, layer, Sparse24Linear, attributes, buffers=buffers, weight=packed)


def _choice(weight: torch.Tensor, mask: MaskKind) -> torch.Tensor:
    whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return choose_24(whole, transposable=mask == "transposable")
