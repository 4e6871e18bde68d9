"""What every rank runs of `test_real_models.py`; only ranks import transformers, which takes seconds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import DynamicCache, PreTrainedModel

import aotdist
from aotdist.api import compiled_call
from benchmarks.timing import Pace
from benchmarks.zoo.cell import Job, Training, difference
from benchmarks.zoo.families import Size, make, make_batch
from benchmarks.zoo.layouts import mesh_of, spread
from benchmarks.zoo.vocabulary import Family, Layout, Precision

SMALL = Size(hidden=64, inner=128, sequence=16, batch=2)


def same_bits_case(family: Family, layout: Layout, precision: Precision) -> None:
    """Two steps of SGD: loss, gradients, parameters and buffers."""
    job = Job(
        "operators", family, layout, precision, ("eager", "aotdist"), SMALL, num_steps=2, pace=Pace(rounds=0)
    )
    mesh = mesh_of(layout)
    trainings = [Training(job, mesh, compiler) for compiler in job.compilers]
    assert trainings[0].num_converted > 0 or precision in ("fp32", "bf16")
    eager, ours = ([training.train(number) for number in range(2)] for training in trainings)
    assert difference(eager, ours) == (0.0, "")
    assert trainings[1].num_graphs() == 1


def loss_of(model: PreTrainedModel, family: Family) -> torch.Tensor:
    """Of a batch that all ranks share, nothing dropped."""
    return model.eval()(**make_batch(family, SMALL, seed=0)).loss


def as_a_whole_case(family: Family, layout: Layout) -> None:
    """A model that is split computes what it does whole."""
    whole, split = make(family, SMALL), make(family, SMALL)
    spread(split, layout, mesh_of(layout), None)
    losses = [loss_of(model, family) for model in (whole, split)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for (name, p), q in zip(whole.named_parameters(), split.parameters(), strict=True):
        if _keeps_its_order(name, family) and p.grad is not None:
            torch.testing.assert_close(p.grad, _whole(q.grad), msg=name)


def _keeps_its_order(name: str, family: Family) -> bool:
    packed = {"GPT2": "c_attn", "Mixtral": "gate_up_proj"}.get(family)
    return packed is None or packed not in name


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def eager_and_compiled(family: Family, **settings: Any) -> list[PreTrainedModel]:
    """The same model twice, under FSDP2."""
    models = [make(family, SMALL) for _ in range(2)]
    for model in models:
        spread(model, "FSDP2", mesh_of("FSDP2"), None)
    aotdist.compile(models[1], backend="fx", settings=settings)
    return models


def cache_case(family: Family) -> None:
    """Called as by default, a model returns keys and values in an object, a new one each time."""
    models = eager_and_compiled(family)
    batch = {k: v for k, v in make_batch(family, SMALL, seed=0).items() if k != "use_cache"}
    before = None
    for _ in range(2):
        caches = []
        for model in models:
            torch.manual_seed(0)
            caches.append(model(**batch).past_key_values)
        assert type(caches[1]) is DynamicCache and caches[1] is not before
        before = caches[1]
        for theirs, ours in zip(caches[0].layers, caches[1].layers, strict=True):
            assert torch.equal(theirs.keys, ours.keys) and torch.equal(theirs.values, ours.values)


def padding_case(family: Family) -> None:
    """A batch with a padding mask, which transformers looks into: a program for each way that it goes."""
    models = eager_and_compiled(family)
    for num_padded in (4, 0):
        mask = torch.ones(SMALL.batch, SMALL.sequence, dtype=torch.int64)
        mask[0, SMALL.sequence - num_padded :] = 0
        losses = []
        for model in models:
            torch.manual_seed(0)
            loss = model(**make_batch(family, SMALL, seed=0), attention_mask=mask).loss
            loss.backward()
            losses.append(loss)
        assert torch.equal(*losses)


def lengths_case(family: Family) -> None:
    """Batches of any length share one artifact, the shifted labels of the model's own loss included."""
    models = eager_and_compiled(family, dynamic=True, is_compiling=True)
    for sequence in (16, 24, 10):
        batch = make_batch(family, replace(SMALL, sequence=sequence), seed=sequence)
        grads = []
        for model in models:
            torch.manual_seed(0)
            loss = model(**batch).loss
            loss.backward()
            grads.append([loss.detach(), *(_local(p.grad).clone() for p in model.parameters())])
            model.zero_grad()
        assert all(map(torch.equal, *grads))
    assert len(compiled_call(models[1]).artifacts) == 1


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
