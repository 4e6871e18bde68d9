"""`AotdistPlugin` and `aotdist.prepare`, as a loop of accelerate's meets them."""

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, DynamoBackend
from torch import Tensor, nn

import aotdist
from aotdist.errors import BadSettings, UnsupportedProgram
from aotdist.launch.accelerate import AotdistPlugin
from aotdist.launch.prepare import blocks_of, chosen


@pytest.fixture(autouse=True)
def forgotten():
    """accelerate keeps what the first `Accelerator` of a process was told."""
    forget()
    yield
    forget()


def forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(6, 4), torch.randint(3, (6,))) for _ in range(3)]


def losses(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    found = []
    for x, y in batches():
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found


def prepared(accelerator: Accelerator, model: nn.Module, **options) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return losses(accelerator, *aotdist.prepare(accelerator, model, optimizer, **options))


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_prepare_is_eager_bit_for_bit(precision: str) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    eager = mlp()
    expected = losses(
        accelerator, *accelerator.prepare(eager, torch.optim.AdamW(eager.parameters(), lr=1e-2))
    )
    model = mlp()
    assert prepared(accelerator, model, backend="fx") == expected
    assert all(map(torch.equal, model.parameters(), eager.parameters()))
    assert len(model.graphs) == 1
    assert accelerator.unwrap_model(model) is model


@pytest.mark.parametrize("how", ["argument", "plugin", "prepared by accelerate"])
def test_eager_compiles_nothing(how: str) -> None:
    plugin = None if how == "argument" else AotdistPlugin("eager")
    accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
    plain, model = mlp(), mlp()
    expected = losses(accelerator, plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    if how == "prepared by accelerate":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = losses(accelerator, *accelerator.prepare(model, optimizer))
    else:
        found = prepared(accelerator, model, backend="eager" if how == "argument" else None)
    assert found == expected and not hasattr(model, "graphs")


def test_plugin_compiles_by_way_of_dynamo() -> None:
    accelerator = Accelerator(cpu=True, dynamo_plugin=AotdistPlugin("fx"))
    eager, model = mlp(), mlp()
    expected = losses(accelerator, eager, torch.optim.AdamW(eager.parameters(), lr=1e-2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compiled, optimizer = accelerator.prepare(model, optimizer)
    assert losses(accelerator, compiled, optimizer) == expected
    assert isinstance(accelerator.unwrap_model(compiled, keep_torch_compile=False), nn.Sequential)


def test_plugin_says_how_prepare_compiles() -> None:
    accelerator = Accelerator(cpu=True, dynamo_plugin=AotdistPlugin("fx", {"partition": "min_cut"}))
    model = mlp()
    prepared(accelerator, model)
    assert "fx" in str(model.explain())
    assert accelerator.state.dynamo_plugin.settings.partition == "min_cut"


def test_plugin_shows_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "1")
    plugin = AotdistPlugin("fx", {"verify": True})
    assert plugin.backend is not DynamoBackend.NO
    shown = plugin.to_dict()
    assert (shown["backend"], shown["dynamic"], shown["settings"]["verify"]) == ("aotdist", True, True)
    with pytest.raises(BadSettings, match="no backend 'fxx'"):
        AotdistPlugin("fxx")


def test_prepare_returns_what_it_was_given_in_order() -> None:
    accelerator = Accelerator(cpu=True)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    loader = torch.utils.data.DataLoader(torch.arange(4))
    results = aotdist.prepare(accelerator, loader, schedule, model, "else", optimizer, backend="fx")
    kinds = ["DataLoaderShard", "AcceleratedScheduler", "Sequential", "str", "AcceleratedOptimizer"]
    assert [type(result).__name__ for result in results] == kinds
    assert results[1].optimizers == [results[4]]


def test_blocks() -> None:
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2))
    model = nn.ModuleDict({"blocks": blocks, "head": nn.Sequential(nn.Linear(2, 2))})
    assert blocks_of(model) == [*blocks]
    assert blocks_of(mlp()) and all(isinstance(block, nn.Linear) for block in blocks_of(mlp()))
    nested = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)])])
    assert blocks_of(nested) == [nested[0][0]]
    assert chosen(model, lambda module: module in {blocks, blocks[0]}) == [blocks[0], blocks]


@pytest.mark.parametrize(
    "kind", [DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA]
)
def test_other_ways_to_shard_are_refused(kind: DistributedType) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = kind
    with pytest.raises(BadSettings, match="shards with FSDP2"):
        aotdist.prepare(accelerator, mlp())


def test_other_compilers_are_refused() -> None:
    accelerator = Accelerator(cpu=True, dynamo_backend="eager")
    with pytest.raises(BadSettings, match="compiles by EAGER"):
        aotdist.prepare(accelerator, mlp())


def test_ranks_that_have_not_met_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BadSettings, match="cpu=True"):
        aotdist.prepare(accelerator, mlp())


def test_no_model_and_two_are_refused() -> None:
    accelerator = Accelerator(cpu=True)
    for models in ((), (mlp(), mlp())):
        with pytest.raises(BadSettings, match=f"was given {len(models)}"):
            aotdist.prepare(accelerator, *models)


def test_wrapped_models_are_refused() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(UnsupportedProgram, match="compiled by torch.compile already"):
        aotdist.prepare(accelerator, torch.compile(mlp(), backend="eager"))
    with pytest.raises(UnsupportedProgram, match="prepared by accelerate already"):
        aotdist.prepare(accelerator, accelerator.prepare(mlp()))
    with pytest.raises(UnsupportedProgram, match=r"`0.weight` is on the meta device"):
        aotdist.prepare(accelerator, mlp().to("meta"))


def test_optimizers_of_other_parameters_are_refused() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    with pytest.raises(UnsupportedProgram, match="parameter 0 of group 0 of the SGD, of size .* is not the"):
        aotdist.prepare(Accelerator(cpu=True), mlp(), optimizer)


def test_a_forgotten_accelerator_is_refused() -> None:
    model = mlp()
    with pytest.raises(BadSettings, match="was given a Sequential"):
        aotdist.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(BadSettings, match="was given a int"):
        aotdist.prepare(3, model)


def test_accelerate_takes_no_other_names() -> None:
    """Why there is a plugin; when this fails, accelerate takes the name by itself."""
    with pytest.raises(ValueError, match="AOTDIST"):
        Accelerator(cpu=True, dynamo_backend="aotdist")
    assert PartialState().num_processes == 1


def accumulated(*, compiled: bool) -> tuple[list[object], int]:
    """What two epochs of eleven batches leave, four to an update and the last as well, and the programs."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(66, 4), torch.randint(3, (66,)))
    loader = torch.utils.data.DataLoader(data, batch_size=6)
    if compiled:
        model, optimizer, loader = aotdist.prepare(accelerator, model, optimizer, loader, backend="fx")
    else:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def step(x: Tensor, y: Tensor) -> Tensor:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    run = aotdist.compile(step, backend="fx") if compiled else step
    found: list[object] = []
    for _ in range(3):
        for x, y in loader:
            loss = run(x, y)
            found += [loss, accelerator.step, accelerator.sync_gradients, type(accelerator.sync_gradients)]
            found += [param.detach().clone() for param in model.parameters()]
    return found, len(run.graphs) if compiled else 0


def test_accumulate_in_a_compiled_step() -> None:
    """It counts, and asks the loader for its last batch; three programs go round, one is there before."""
    expected, _ = accumulated(compiled=False)
    forget()
    found, programs = accumulated(compiled=True)
    for ours, eager in zip(found, expected, strict=True):
        assert torch.equal(ours, eager) if isinstance(eager, Tensor) else ours is eager or ours == eager
    assert programs <= 6
