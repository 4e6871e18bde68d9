"""`aotdist.prepare` on two ranks without a GPU, next to FSDP2 by hand, uncompiled."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import aotdist
from aotdist.errors import BadSettings, UnsupportedProgram
from tests.ranks.harness import World

pytestmark = pytest.mark.ranks


class Tied(nn.Module):
    """Sizes that two ranks share unevenly, a tied weight, a buffer, a parameter that one rank has alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.shift = nn.Parameter(torch.zeros(1))
        self.register_buffer("scale", torch.rand(()))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x * self.scale + self.shift)


@contextmanager
def accelerating(**options) -> Generator[Accelerator]:
    """An accelerator that has joined the ranks, and is forgotten afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "LOCAL_RANK"):
            patch.setenv(name, str(dist.get_rank()))
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            patch.setenv(name, str(dist.get_world_size()))
        try:
            yield Accelerator(cpu=True, **options)
        finally:
            GradientState._reset_state()
            AcceleratorState._reset_state(reset_partial_state=True)


def tokens(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randint(7, (4, 6), generator=generator)


def loss_of(model: nn.Module, step: int) -> Tensor:
    batch = tokens(step)
    return F.cross_entropy(model(batch)[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())


def by_hand(model: nn.Module, precision: torch.dtype | None) -> torch.optim.Optimizer:
    options = (
        {} if precision is None else {"mp_policy": MixedPrecisionPolicy(precision, precision, precision)}
    )
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def trains_as_by_hand(precision: str) -> None:
    torch.manual_seed(0)
    expected = Tied()
    eager = by_hand(expected, {"no": None, "bf16": torch.bfloat16}[precision])
    torch.manual_seed(dist.get_rank())  # what rank 1 has made does not count
    model = Tied()
    with accelerating(gradient_accumulation_steps=2, mixed_precision=precision) as accelerator:
        given = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer = aotdist.prepare(accelerator, model, given, backend="fx")
        for step in range(6):
            expected.set_requires_gradient_sync(step % 2 == 1)
            loss = loss_of(expected, step)
            (loss / 2).backward()
            with accelerator.accumulate(model):
                found = loss_of(model, step)
                accelerator.backward(found)
                assert torch.equal(found, loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    hand = torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
                    assert torch.equal(norm.full_tensor(), hand.full_tensor())
                optimizer.step()
                optimizer.zero_grad()
            if step % 2:
                eager.step()
                eager.zero_grad()
        assert accelerator.unwrap_model(model) is model
        assert model.head.weight is model.embed.weight
        for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(mine.to_local(), theirs.to_local())
        full = accelerator.get_state_dict(model)
        whole = {
            name: value.full_tensor() for name, value in expected.state_dict().items() if name != "scale"
        }
        if accelerator.is_main_process:
            assert all(torch.equal(full[name], value) for name, value in whole.items())
        else:
            assert not full


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_prepared_training_is_fsdp2_by_hand_bit_for_bit(world2: World, precision: str) -> None:
    world2.run(trains_as_by_hand, precision)


def goes_on(folder: Path) -> None:
    with accelerating() as accelerator:
        torch.manual_seed(0)
        model = Tied()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer = aotdist.prepare(accelerator, model, optimizer, backend="fx")

        def train(start: int) -> list[Tensor]:
            found = []
            for step in range(start, start + 2):
                found.append(loss := loss_of(model, step))
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            return [loss.detach() for loss in found]

        train(0)
        accelerator.save_state(str(folder))
        after = train(2)
        accelerator.load_state(str(folder))
        assert train(2) == after
        assert {"pytorch_model_fsdp_0", "optimizer_0"} <= {path.name for path in folder.iterdir()}


def test_saved_state_goes_on_bit_for_bit(world2: World, tmp_path: Path) -> None:
    world2.run(goes_on, tmp_path)


def keeps_moments() -> None:
    with accelerating() as accelerator:
        torch.manual_seed(0)
        model = Tied()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        F.cross_entropy(model(torch.arange(6)), torch.arange(6)).backward()
        optimizer.step()
        optimizer.zero_grad()
        before = {name: optimizer.state[each] for name, each in model.named_parameters()}
        aotdist.prepare(accelerator, model, optimizer, backend="fx")
        for name, each in model.named_parameters():
            state = optimizer.state[each]
            assert isinstance(state["exp_avg"], DTensor) and state["step"] == 1
            assert torch.equal(state["exp_avg"].full_tensor(), before[name]["exp_avg"])
        assert len(optimizer.state) == len(before)


def test_optimizers_keep_their_state(world2: World) -> None:
    world2.run(keeps_moments)


def refuses() -> None:
    os.environ.pop("FSDP_VERSION", None)
    with accelerating() as accelerator:
        model = nn.Linear(2, 2)
        stranger = torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1)
        with pytest.raises(UnsupportedProgram, match=r"parameter 0 of group 0 of the SGD, of size \[2, 3\]"):
            aotdist.prepare(accelerator, model, stranger)
        assert type(model) is nn.Linear  # nothing was changed
        aotdist.prepare(accelerator, model, backend="fx")
        with pytest.raises(UnsupportedProgram, match="is sharded already"):
            aotdist.prepare(accelerator, model)
    with accelerating() as accelerator, pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
        with pytest.raises(BadSettings, match="`activation_checkpointing`"):
            aotdist.prepare(accelerator, nn.Linear(2, 2))


def test_what_cannot_be_combined_is_refused(world2: World) -> None:
    world2.run(refuses)
