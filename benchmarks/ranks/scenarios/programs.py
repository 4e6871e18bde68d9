"""What is compiled differs: shapes, orders, reductions, dtypes, names, settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.ranks.part import WIDTH, Part, everyone, mlp, plane, sgd, twin, weights_of
from benchmarks.ranks.scenarios.scenario import Scenario


def of_model(make: Callable[[bool], nn.Module]) -> Callable[[Part], None]:
    """Train a model that depends on whether the rank is odd."""
    return lambda part: part.train(part.model(make(part.odd)))


def of_sharding(shard: Callable[[Part, nn.Sequential], nn.Module]) -> Callable[[Part], None]:
    """Train one model that is sharded otherwise."""
    return lambda part: part.train(part.compiled(shard(part, mlp(WIDTH, WIDTH, WIDTH, WIDTH))))


def of_settings(**settings: Any) -> Callable[[Part], None]:
    """Train one model that the odd rank compiles with these settings."""
    return lambda part: part.train(part.model(mlp(), **(settings if part.odd else {})))


def of_function(choose: Callable[[bool], Callable[[torch.Tensor], torch.Tensor]]) -> Callable[[Part], None]:
    """Call a function of this rank's numbers, which communicates by itself."""

    def act(part: Part) -> None:
        function = part.compiled(choose(part.odd))
        for _, x in part.batches():
            part.note(result=function(x).sum())

    return act


class Branches(nn.Module):
    """Two layers of one size."""

    def __init__(self, names: tuple[str, str] = ("a", "b")) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = {"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)}
        for name in names:
            self.add_module(name, layers[name])

    def called(self, order: str, x: torch.Tensor) -> torch.Tensor:
        for name in order:
            x = self.get_submodule(name)(x).relu()
        return x


class Ordered(Branches):
    """Calls them in an order."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.called(self.order, x)


class Weights(nn.Module):
    """Two weights of one size, registered in an order, in one unit."""

    def __init__(self, order: str) -> None:
        super().__init__()
        for name in order:
            torch.manual_seed(ord(name))
            self.register_parameter(name, nn.Parameter(torch.randn(WIDTH, WIDTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.get_parameter("a")).relu() @ self.get_parameter("b")


class Transposed(nn.Module):
    """A weight of 8 by 4, or of 4 by 8."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        weight = torch.randn(WIDTH, WIDTH // 2)
        self.weight = nn.Parameter(weight.t().contiguous() if transposed else weight)
        self.transposed = transposed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight.t() if self.transposed else self.weight)


class Named(nn.Module):
    """A layer under a name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.name = name
        self.add_module(name, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule(self.name)(x)


class Tied(nn.Module):
    """Two layers, which may be one."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = self.a if tied else nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu())


class Experts(nn.Module):
    """Sends each row to the rank that its larger score names, which has the expert, and back."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores, self.expert = nn.Linear(width, 2), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, rank = self.scores(x).softmax(-1).max(-1)
        order, group = rank.argsort(stable=True), everyone()
        sent = F.one_hot(rank, 2).sum(0)
        there = collectives.all_to_all_single(sent, None, None, group)
        sends, receives = sent.tolist(), there.tolist()
        rows = collectives.all_to_all_single_autograd(x[order], receives, sends, group)
        rows = collectives.all_to_all_single_autograd(self.expert(rows), sends, receives, group)
        return torch.zeros_like(x).index_copy(0, order, rows) * weight[:, None]


def frozen(model: nn.Sequential, odd: bool) -> nn.Module:
    """`model`, of which the odd rank does not train the first layer."""
    model[0].requires_grad_(not odd)
    return model


def two_models(part: Part) -> None:
    """Two models of one size: the odd rank calls the second one first."""
    models = [part.model(mlp()), part.model(nn.Sequential(*reversed(mlp())))]
    order = models[::-1] if part.odd else models
    for _, x in part.batches():
        losses = [model(x).square().mean() for model in order]
        torch.stack(losses).sum().backward()
        part.note(first=losses[0], second=losses[1])


def rows_of_batches(part: Part) -> None:
    """Every batch of every rank has another number of rows."""
    model, optimizer = part.model(mlp()), None
    optimizer = sgd(model)
    for step in range(3):
        part.begin()
        x = torch.ones(2 + step + 3 * part.rank, WIDTH)
        loss = model(x).square().mean()
        part.learn(model, optimizer, loss)


def experts(part: Part) -> None:
    model = part.compiled(Experts())
    for _, x in part.batches(rows=6):
        loss = model(x).square().sum()
        loss.backward()
        part.note(loss=loss, weights=weights_of(model))


def tensor_parallel(part: Part, width: int = WIDTH, rows: int = 4) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = mlp(WIDTH, width, WIDTH)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    part.train(part.compiled(model), rows=rows)


def group_in_group(part: Part) -> None:
    """Sums over all ranks and over an axis of their mesh, which the odd rank takes in the other order."""
    along = plane().get_group("tp")
    first, second = (along, everyone()) if part.odd else (everyone(), along)

    def function(x: torch.Tensor) -> torch.Tensor:
        return collectives.all_reduce(collectives.all_reduce(x * 2, "sum", first), "sum", second)

    compiled = part.compiled(function)
    for _, x in part.batches():
        part.note(result=compiled(x).sum())


def hybrid(part: Part) -> None:
    """Hybrid sharding over a mesh of four ranks; the odd rank has a wider layer."""
    model = mlp(WIDTH, 12 if part.odd else WIDTH, WIDTH)
    part.train(part.compiled(part.sharded(model, mesh=plane())))


def other_backend(part: Part) -> None:
    """The odd rank compiles in the way that is asked for, the other one with `fx`."""
    way = part.way if part.odd or part.way == "eager" else "fx"
    part.train(replace(part, way=way).model(mlp()))


def in_other_dtype(part: Part) -> None:
    dtype = torch.float64 if part.odd else torch.float32
    model = part.model(mlp(dtype=dtype))
    optimizer = sgd(model)
    for _, x in part.batches():
        loss = model(x.to(dtype)).square().mean()
        part.learn(model, optimizer, loss)


def not_compiled(part: Part) -> None:
    model = part.sharded(mlp())
    part.train(model if part.odd else part.compiled(model))


def unit_of(part: Part, model: nn.Sequential) -> nn.Module:
    fully_shard(model[2 if part.odd else 1])
    fully_shard(model)
    return model


def gathered_until_backward(part: Part, model: nn.Sequential) -> nn.Module:
    return part.sharded(model, reshard_after_forward=not part.odd)


def of_policy(**policy: Any) -> Callable[[Part], None]:
    """The odd rank has another mixed precision."""
    return of_sharding(
        lambda part, model: part.sharded(
            model, mp_policy=MixedPrecisionPolicy(**(policy if part.odd else {}))
        )
    )


def divided(part: Part, model: nn.Sequential) -> nn.Module:
    sharded = part.sharded(model)
    assert isinstance(sharded, FSDPModule)
    if part.odd:
        for module in sharded.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(4.0)
    return sharded


def reduced(op: str) -> Callable[[torch.Tensor], torch.Tensor]:
    def function(x: torch.Tensor) -> torch.Tensor:
        return collectives.all_reduce(x * 2, op, everyone())

    return function


def gathered(rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def function(x: torch.Tensor) -> torch.Tensor:
        return collectives.all_gather_tensor(x[:rows] * 2, 0, everyone())

    return function


def in_dtype(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    def function(x: torch.Tensor) -> torch.Tensor:
        return collectives.all_reduce((x * 2).to(dtype), "sum", everyone()).float()

    return function


def over_twin(part: Part) -> None:
    """Two groups of the same ranks, which the odd rank takes the other way round."""
    groups = [twin(), twin()]
    first, second = reversed(groups) if part.odd else groups

    def function(x: torch.Tensor) -> torch.Tensor:
        return collectives.all_reduce(x, "sum", first) * collectives.all_reduce(x + 1, "sum", second)

    compiled = part.compiled(function)
    for _, x in part.batches():
        part.note(result=compiled(x).sum())


def in_autocast(part: Part) -> None:
    model = part.model(mlp())
    optimizer = sgd(model)
    for _, x in part.batches():
        with torch.autocast("cpu", enabled=part.odd):
            loss = model(x).float().square().mean()
        part.learn(model, optimizer, loss)


SCENARIOS = (
    Scenario("Shapes", "its hidden layer is wider", "differs",
             of_model(lambda odd: mlp(WIDTH, 12 if odd else WIDTH, WIDTH)), ways=("fx", "inductor")),
    Scenario("Shapes", "a weight is transposed: other shape, same size", "differs",
             of_model(Transposed)),
    Scenario("Shapes", "it has one more layer", "differs",
             of_model(lambda odd: mlp(*[WIDTH] * (4 if odd else 3)))),
    Scenario("Shapes", "its layers have no bias", "differs", of_model(lambda odd: mlp(bias=not odd))),
    Scenario("Shapes", "its batches are smaller", "runs",
             lambda part: part.train(part.model(mlp()), rows=2 if part.odd else 4), ways=("fx", "inductor")),
    Scenario("Shapes", "every batch has another length, on both ranks", "runs", rows_of_batches),
    Scenario("Shapes", "it sends other numbers of rows to the experts", "runs", experts),
    Scenario("Shapes", "it gathers more rows", "differs",
             of_function(lambda odd: gathered(3 if odd else 2))),
    Scenario("Shapes", "tensor parallelism: its layer is wider", "differs",
             lambda part: tensor_parallel(part, width=12 if part.odd else WIDTH)),
    Scenario("Shapes", "tensor parallelism: its batch is larger", "differs",
             lambda part: tensor_parallel(part, rows=6 if part.odd else 4)),
    Scenario("Shapes", "hybrid sharding on 4 ranks: its layer is wider", "differs",
             hybrid, num_ranks=4, odd_rank=3),
    Scenario("Order", "it calls two layers of one size in the other order", "differs",
             of_model(lambda odd: Ordered("ba" if odd else "ab")), ways=("fx", "inductor")),
    Scenario("Order", "it registers two weights of one size in the other order", "differs",
             of_model(lambda odd: Weights("ba" if odd else "ab"))),
    Scenario("Order", "it calls two models of one size in the other order", "differs", two_models),
    Scenario("Order", "it calls one of the layers twice", "differs",
             of_model(lambda odd: Ordered("aab" if odd else "ab"))),
    Scenario("Order", "it leaves a layer out", "differs",
             of_model(lambda odd: Ordered("a" if odd else "ab"))),
    Scenario("Order", "another layer of its is a unit of its own", "differs", of_sharding(unit_of)),
    Scenario("Order", "it takes two groups of the same ranks in the other order", "differs", over_twin),
    Scenario("Order", "it sums over all 4 ranks and over an axis of their mesh in the other order", "differs",
             group_in_group, num_ranks=4, odd_rank=3),
    Scenario("Reductions", "it takes the maximum, not the sum", "differs",
             of_function(lambda odd: reduced("max" if odd else "sum")), ways=("fx", "inductor")),
    Scenario("Reductions", "it gathers where the other sums up", "differs",
             of_function(lambda odd: gathered(4) if odd else reduced("sum"))),
    Scenario("Reductions", "it divides gradients by another number", "differs", of_sharding(divided)),
    Scenario("Reductions", "it keeps weights gathered until the backward", "differs",
             of_sharding(gathered_until_backward)),
    Scenario("Dtypes", "its model is in float64", "differs",
             in_other_dtype),
    Scenario("Dtypes", "its weights are gathered in bfloat16", "differs",
             of_policy(param_dtype=torch.bfloat16)),
    Scenario("Dtypes", "its gradients are reduced in float64", "differs",
             of_policy(reduce_dtype=torch.float64)),
    Scenario("Dtypes", "it sums integers, not floats, of one size", "differs",
             of_function(lambda odd: in_dtype(torch.int32 if odd else torch.float32))),
    Scenario("Dtypes", "it computes under autocast", "differs", in_autocast),
    Scenario("Names", "its layer has another name", "differs",
             of_model(lambda odd: Named("up" if odd else "fc"))),
    Scenario("Names", "two of its layers share their weights", "differs", of_model(Tied)),
    Scenario("Names", "it does not train its first layer", "differs",
             of_model(lambda odd: frozen(mlp(), odd))),
    Scenario("Settings", "it merges smaller buckets", "differs", of_settings(bucket_bytes=64)),
    Scenario("Settings", "it leaves the passes on collectives out", "differs",
             of_settings(disabled_passes=("bucket", "overlap"))),
    Scenario("Settings", "it has `partition=\"min_cut\"`", "differs", of_settings(partition="min_cut")),
    Scenario("Settings", "it has `dynamic=True`", "runs", of_settings(dynamic=True)),
    Scenario("Settings", "it has `emulate_casts=True`", "runs", of_settings(emulate_casts=True)),
    Scenario("Settings", "it compiles with `inductor`, the other one with `fx`", "runs", other_backend,
             ways=("inductor",)),
    Scenario("Settings", "it does not compile its model", "absent", not_compiled),
)  # fmt: skip
