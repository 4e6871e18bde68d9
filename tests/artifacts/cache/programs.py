"""Small programs, and what compiling and running one shows."""

from pathlib import Path
from typing import Any

import torch

import aotdist
from aotdist.artifacts.cache.folder import Folder
from aotdist.errors import InternalError
from aotdist.settings import Settings


def mlp() -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))
    return model, torch.randn(5, 4)


def settings_in(folder: Path) -> Settings:
    return Settings(cache_folder=str(folder))


def folder_of(folder: Path) -> Folder:
    return Folder(folder / "compiled", Settings().cache_bytes)


def trained(folder: Path) -> tuple[torch.nn.Module, torch.Tensor]:
    """A model after a training step, and the loss: the lines are in the key, so these are the same lines."""
    model, x = mlp()
    aotdist.compile(model, backend="inductor", settings=settings_in(folder))
    loss = model(x).square().sum()
    loss.backward()
    return model, loss.detach()


def stepped(folder: Path) -> tuple[list[torch.Tensor], str, list[str]]:
    """The results of a training step, the printed source, and that of the graphs."""
    model, loss = trained(folder)
    compiled = aotdist.api.compiled_call(model)
    graphs = compiled.artifacts[0].compilation.emitted()
    grads = [parameter.grad for parameter in model.parameters()]
    return [loss, *grads], compiled.source, [emitted.source for emitted in graphs.values()]


def refuse_to_compile(*args: Any, **kwargs: Any) -> Any:
    raise InternalError("something is compiled")


def same(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> bool:
    tensors = all(map(torch.equal, ours[0], theirs[0]))
    return tensors and ours[1:] == theirs[1:]
