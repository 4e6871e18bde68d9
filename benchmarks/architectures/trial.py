"""One row's part about one way to run: a model trained, and asked to generate, as eager is and does.

Runs in a process of its own. Both models start from the same weights, see the same batches and draw the same
random numbers; what they compute and leave behind is compared after each step.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import set_seed

import aotdist
from aotdist.errors import AotdistError
from benchmarks.architectures.making import make, make_batch
from benchmarks.architectures.vocabulary import Found, Half, Way
from benchmarks.timing import Contender, Pace, take_turns
from benchmarks.zoo.cell import difference, in_a_line

_NUM_TOKENS = 4
_OF_THIS_MACHINE = re.compile(r"(?<![\w.])/\S*?/(?=(?:site-packages|benchmarks|aotdist)/)(?:site-packages/)?")
_ADDRESS = re.compile(r" (?:object )?at 0x[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Job:
    """What a process is asked.

    Args:
        model: the name of its class.
        way: how to run it.
        num_steps: training steps that are compared.
        pace: of the steps that are timed.
    """

    model: str
    way: Way
    num_steps: int
    pace: Pace


class Training:
    """A model and its optimizer.

    Args:
        model: the name of its class.
        way: how to run it; None for eager.
        settings: of aotdist.
    """

    def __init__(self, model: str, way: Way | None, **settings: Any) -> None:
        self._name = model
        self.plain = make(model)
        self._model = compiled(self.plain, way, **settings)
        self._optimizer = torch.optim.AdamW(self.plain.parameters(), lr=1e-2)

    def clear(self) -> None:
        """Forget gradients."""
        self._optimizer.zero_grad()

    def step(self, number: int = 0) -> Tensor:
        """Forward and backward on a batch; the loss."""
        set_seed(number)
        loss: Tensor = self._model(**make_batch(self._name, number)).loss
        loss.backward()
        return loss.detach()

    def train(self, number: int) -> dict[str, Tensor]:
        """A whole step; what it computed and left behind, by name."""
        self.clear()
        seen = {"loss": self.step(number), "random state": torch.get_rng_state()}
        grads = ((name, parameter.grad) for name, parameter in self.plain.named_parameters())
        seen |= {f"{name}.grad": grad for name, grad in grads if grad is not None}
        self._optimizer.step()
        seen |= dict(self.plain.named_parameters()) | dict(self.plain.named_buffers())
        return {name: tensor.detach().clone() for name, tensor in seen.items()}


def compiled(model: Any, way: Way | None, **settings: Any) -> Any:
    """The model, to be called in this way."""
    match way:
        case None:
            return model
        case "aotdist.compile":
            return aotdist.compile(model, backend="fx", settings=settings)
        case _:
            return torch.compile(model, **_options(way))


def _options(way: Way) -> dict[str, Any]:
    """What `torch.compile` is told."""
    # aot_eager runs what was captured operator by operator, as `fx` does.
    return (
        {"backend": "aot_eager"}
        if way == "aot_eager"
        else {"backend": "aotdist", "options": {"backend": "fx"}}
    )


def generate(name: str, way: Way | None) -> tuple[dict[str, Tensor], Any]:
    """Tokens that a model draws, with what it computed for each; and the model."""
    model: Any = make(name).eval()
    if way == "aotdist.compile":
        compiled(model, way)
    elif way is not None:
        # In place: `generate` of what `torch.compile` returns is the method of the model inside.
        model.compile(**_options(way))
    prompt = {key: value for key, value in make_batch(name, 0).items() if key != "labels"}
    set_seed(0)
    found = model.generate(
        **prompt,
        max_new_tokens=_NUM_TOKENS,
        min_new_tokens=_NUM_TOKENS,
        do_sample=True,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = {f"logits of token {number}": each for number, each in enumerate(found.logits)}
    return {"tokens": found.sequences, **logits, "random state": torch.get_rng_state()}, model


def fill(job: Job) -> Found:
    """What is found about a model run in one way."""
    found = Found()
    eager = Training(job.model, None)
    expected = [eager.train(number) for number in range(job.num_steps)]
    found.training = _attempt(job.way, lambda half: _train(job, eager, expected, found, half))
    if job.way == "aotdist.compile" and "is_compiling=True" in found.training.failure:
        told = {"is_compiling": True}
        found.told = _attempt(job.way, lambda half: _train(job, eager, expected, found, half, **told))
    if eager.plain.can_generate():
        tokens, _ = generate(job.model, None)
        found.generation = _attempt(job.way, lambda half: _generate(job, tokens, half))
    return found


def _train(
    job: Job,
    eager: Training,
    expected: list[dict[str, Tensor]],
    found: Found,
    half: Half,
    **settings: Any,
) -> None:
    training = Training(job.model, job.way, **settings)
    start = time.perf_counter()
    steps = [training.train(0)]
    found.first = time.perf_counter() - start
    steps += (training.train(number) for number in range(1, job.num_steps))
    half.differs, half.where = difference(expected, steps)
    half.num_graphs = _num_graphs(training.plain, job.way)
    ours = Contender("ours", training.step, training.clear)
    samples = take_turns([Contender("eager", eager.step, eager.clear), ours], job.pace)
    found.seconds, found.eager_seconds = tuple(samples["ours"]), tuple(samples["eager"])


def _generate(job: Job, expected: dict[str, Tensor], half: Half) -> None:
    tokens, model = generate(job.model, job.way)
    half.differs, half.where = difference([expected], [tokens])
    half.num_graphs = _num_graphs(model, job.way)


def _attempt(way: Way, work: Callable[[Half], None]) -> Half:
    """Fill a half, or say why that failed."""
    torch._dynamo.reset()
    counters.clear()
    half = Half()
    try:
        work(half)
    except Exception as error:
        half.failure, half.is_ours = _said(error)
    half.breaks = () if way == "aotdist.compile" else _breaks(counters["graph_break"])
    return half


def _num_graphs(model: Any, way: Way) -> int:
    return len(model.graphs) if way == "aotdist.compile" else counters["stats"]["unique_graphs"]


def _said(error: BaseException) -> tuple[str, bool]:
    """What an error says, in a line, and whether it is ours."""
    inner = getattr(error, "inner_exception", None) or error
    if not isinstance(inner, AotdistError):
        return _anywhere(in_a_line(inner)), False
    parts = {"": inner.what, "at ": inner.where, "stage: ": inner.stage, "fix: ": inner.fix}
    text = "; ".join(f"{head}{part}" for head, part in parts.items() if part)
    return _anywhere(f"{type(inner).__name__}: {' '.join(text.split())}"), True


def _breaks(reasons: Mapping[str, int]) -> tuple[str, ...]:
    """A reason for each break: the first line of what Dynamo says."""
    return tuple(
        _anywhere(reason.strip().splitlines()[0]) for reason, times in reasons.items() for _ in range(times)
    )


def _anywhere(text: str) -> str:
    """The text without what is different on another machine, or in another process."""
    return _ADDRESS.sub("", _OF_THIS_MACHINE.sub("", text))
