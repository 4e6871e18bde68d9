"""What a program prints and logs, at every call; and that it is told when it reads the time."""

from __future__ import annotations

import datetime
import logging
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import nn

import aotdist
from aotdist.errors import UnsupportedProgram
from aotdist.export import aot_export_module

logger = logging.getLogger("tests.prints")


def prints(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    print("y", y, y.mean(), y.shape, sep=" | ", end="!\n")
    y.add_(1)
    print({"y": [y, y.sum().item()]}, flush=True)
    print()
    return y * x


def prints_in_the_backward(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.register_hook(lambda grad: print("grad", grad.norm(), grad.max().item() / 2))
    y.register_hook(lambda _: print("and another"))
    return y * x


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.step, self.has_warned = 0, False
        nn.init.ones_(self.linear.weight)
        nn.init.ones_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        print(f"in the {type(self).__name__}:", self.step, self.linear, self.linear.bias.detach())
        if not self.has_warned:
            print("for the first time")
            self.has_warned = True
        return self.linear(x)


def printed(target: Callable[..., torch.Tensor], read: Callable[[], Any]) -> str:
    """What three calls and their backwards print, without the histories of tensors."""
    for scale in range(1, 4):
        target((torch.ones(2) * scale).requires_grad_()).sum().backward()
    return re.sub(r", grad_fn=<\w+>", "", read().out)


@pytest.mark.parametrize("make", [lambda: prints, lambda: prints_in_the_backward, Counting])
def test_every_call_prints_what_eager_prints(
    make: Callable[[], Callable[..., torch.Tensor]], capsys: pytest.CaptureFixture[str]
) -> None:
    eagers = printed(make(), capsys.readouterr)
    assert eagers
    assert printed(aotdist.compile(make(), backend="fx"), capsys.readouterr) == eagers


def test_loggers_are_called_with_values_and_the_users_line(caplog: pytest.LogCaptureFixture) -> None:
    def logs(x: torch.Tensor) -> torch.Tensor:
        logger.info("loss %.3f of %s", x.sum().item(), x.shape)
        logger.debug("nobody hears %s", x)
        return x * 2

    caplog.set_level(logging.INFO, logger="tests.prints")
    compiled = aotdist.compile(logs, backend="fx")
    for scale in (1, 2):
        compiled(torch.ones(3) * scale)
    ours = [record for record in caplog.records if record.name == "tests.prints"]
    assert [record.getMessage() for record in ours] == [
        "loss 3.000 of torch.Size([3])",
        "loss 6.000 of torch.Size([3])",
    ]
    assert {(record.funcName, record.filename) for record in ours} == {("logs", "test_prints.py")}


def test_a_training_step_prints_its_loss(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        print("loss", loss.item())
        return loss

    step = aotdist.train_step(model, loss_fn, optimizer, backend="fx")
    for _ in range(3):
        step(torch.ones(1, 2))
    assert capsys.readouterr().out.splitlines() == ["loss 2.0", "loss 1.0", "loss 0.0"]


def test_what_was_printed_before_an_error_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        print("given", x.shape, x)
        return x @ torch.ones(5)

    with pytest.raises(RuntimeError, match="size"):
        aotdist.compile(fails, backend="fx")(torch.ones(3))
    found = capsys.readouterr().out
    assert found.startswith("given torch.Size([3]) <tensor of size [3]")


def test_a_text_of_a_tensor_is_told_and_not_kept() -> None:
    log: list[str] = []

    def prints_it(x: torch.Tensor) -> torch.Tensor:
        print(f"loss {x.sum()}")
        return x * 2

    def keeps_it(x: torch.Tensor) -> torch.Tensor:
        log.append(f"loss {x.sum()}")
        return x * 2

    with pytest.warns(UserWarning, match=r"a text of a tensor is printed.*test_prints.py:\d+"):
        aotdist.compile(prints_it, backend="fx")(torch.ones(3))
    with pytest.raises(UnsupportedProgram, match="is given a text of a tensor"):
        aotdist.compile(keeps_it, backend="fx")(torch.ones(3))
    assert log == []


@dataclass
class Record:
    loss: torch.Tensor


def test_an_object_that_hides_tensors_is_refused_by_name() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        print(Record(x.sum()))
        return x * 2

    with pytest.raises(UnsupportedProgram, match="a Record is printed that holds tensors"):
        aotdist.compile(program, backend="fx")(torch.ones(3))


class Printing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("exported", x.sum())
        return x * 2


def test_what_is_exported_prints_once_and_returns_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    graph, _ = aot_export_module(Printing(), (torch.ones(1, 2),), trace_joint=False)
    assert capsys.readouterr().out.startswith("exported")
    assert len(graph(torch.ones(1, 2))) == 1
    assert capsys.readouterr().out == ""


CLOCKS: dict[str, Callable[[], Any]] = {
    "time.time": lambda: time.time(),
    "perf_counter": lambda: perf_counter(),
    "datetime.now": lambda: datetime.datetime.now(tz=datetime.UTC),
}


@pytest.mark.parametrize("clock", CLOCKS)
def test_reading_the_time_is_told(clock: str) -> None:
    read = CLOCKS[clock]

    def program(x: torch.Tensor) -> torch.Tensor:
        read()
        return x * 2

    with pytest.warns(UserWarning, match=rf"reads the time \(`{clock}`\)"):
        aotdist.compile(program, backend="fx")(torch.ones(3))


def test_sleeping_reads_no_time() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        time.sleep(0)
        return x * 2

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        aotdist.compile(program, backend="fx")(torch.ones(3))
