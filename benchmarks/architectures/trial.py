"""One row's part about one way to run: a model trained, and asked to generate, as eager is and does.

Runs in a process of its own. Both models start from the same weights, see the same batches and draw the same
random numbers; what they compute and leave behind is compared after each step.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import set_seed

import aotdist
from aotdist.errors import AotdistError
from aotdist.torch_seam.control_flow import said_to_be_compiling
from benchmarks.architectures.making import make, make_batch
from benchmarks.architectures.vocabulary import Found, Half, Way
from benchmarks.timing import Contender, Pace, take_turns
from benchmarks.zoo.cell import difference, in_a_line

Answer = TypeVar("Answer")

_NUM_TOKENS = 3
_OF_THIS_MACHINE = re.compile(r"(?<![\w.])/(?:\S*/site-packages/|\S*?/(?=(?:benchmarks|aotdist)/))")
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
        name: of the model's class.
        call: makes of the model what is called in its place.
    """

    def __init__(self, name: str, call: Callable[[Any], Any]) -> None:
        self._name = name
        self.plain = make(name)
        self._model = call(self.plain)
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


def generate(
    name: str, call: Callable[[Any], Any], *, with_cache: bool = True
) -> tuple[dict[str, Tensor], Any]:
    """Tokens that a model draws, with what it computed for each; and the model."""
    model: Any = make(name).eval()
    call(model)
    prompt = {key: value for key, value in make_batch(name, 0).items() if key != "labels"}
    set_seed(0)
    found = model.generate(
        **prompt,
        max_new_tokens=_NUM_TOKENS,
        min_new_tokens=_NUM_TOKENS,
        do_sample=True,
        return_dict_in_generate=True,
        output_logits=True,
        **({} if with_cache else {"use_cache": False}),
    )
    logits = {f"logits of token {number}": each for number, each in enumerate(found.logits)}
    return {"tokens": found.sequences, **logits, "random state": torch.get_rng_state()}, model


def _eager(model: Any) -> Any:
    return model


def _compiled(way: Way, **settings: Any) -> Callable[[Any], Any]:
    """Has a model called in this way, in place: `generate` calls the model that it is a method of."""
    match way:
        case "aotdist.compile":
            return partial(aotdist.compile, backend="fx", settings=settings)
        case "backend aotdist":
            return partial(_compiled_by_dynamo, backend="aotdist", options={"backend": "fx"})
        case _:
            # `aot_eager`. It runs what was captured operator by operator, as `fx` does.
            return partial(_compiled_by_dynamo, backend="aot_eager")


def _compiled_by_dynamo(model: Any, **options: Any) -> Any:
    model.compile(**options)
    return model


def _as_program(way: Way, run: Callable[[Callable[[Any], Any]], Answer]) -> Answer:
    """What eager gives for the program that is compiled in this way."""
    torch.compiler.reset()
    if way != "aotdist.compile":
        return run(partial(_compiled_by_dynamo, backend="eager"))
    with said_to_be_compiling():
        return run(_eager)


def fill(job: Job) -> Found:
    """What is found about a model run in one way."""
    found = Found()
    eager = Training(job.model, _eager)
    expected = _all_steps(eager, job.num_steps)
    found.training = _attempt(lambda half: _train(job, eager, expected, found, half))
    if job.way == "aotdist.compile" and "is_compiling=True" in found.training.failure:
        told = {"is_compiling": True}
        found.told = _attempt(lambda half: _train(job, eager, expected, found, half, **told))
    if eager.plain.can_generate() and job.way != "aot_eager":
        found.generation = _attempt(lambda half: _generate(job, half))
        if found.generation.is_ours:
            found.told_generation = _told_generation(job)
    return found


def _told_generation(job: Job) -> Half:
    """Generation as aotdist proposes it where it refuses it otherwise."""
    told = {"is_compiling": True}
    half = _attempt(lambda half: _generate(job, half, **told))
    if not half.failure:
        return half
    return _attempt(lambda half: _generate(job, half, with_cache=False, **told))


def _train(
    job: Job,
    eager: Training,
    expected: list[dict[str, Tensor]],
    found: Found,
    half: Half,
    **settings: Any,
) -> None:
    training = Training(job.model, _compiled(job.way, **settings))
    start = time.perf_counter()
    steps = [training.train(0)]
    found.first = time.perf_counter() - start
    steps += (training.train(number) for number in range(1, job.num_steps))
    half.num_graphs = _num_graphs(training.plain, job.way)
    half.breaks = _breaks(counters["graph_break"])
    ours = Contender("ours", training.step, training.clear)
    samples = take_turns([Contender("eager", eager.step, eager.clear), ours], job.pace)
    found.seconds, found.eager_seconds = tuple(samples["ours"]), tuple(samples["eager"])
    half.differs, half.where = difference(expected, steps)
    if half.differs:
        captured = _as_program(job.way, lambda call: _all_steps(Training(job.model, call), job.num_steps))
        half.is_programs = difference(captured, steps)[0] == 0


def _all_steps(training: Training, num_steps: int) -> list[dict[str, Tensor]]:
    return [training.train(number) for number in range(num_steps)]


def _generate(job: Job, half: Half, *, with_cache: bool = True, **settings: Any) -> None:
    expected, _ = generate(job.model, _eager, with_cache=with_cache)
    tokens, model = generate(job.model, _compiled(job.way, **settings), with_cache=with_cache)
    half.with_cache = with_cache
    half.num_graphs = _num_graphs(model, job.way)
    half.breaks = _breaks(counters["graph_break"])
    half.differs, half.where = difference([expected], [tokens])
    if half.differs:
        captured = _as_program(job.way, lambda call: generate(job.model, call, with_cache=with_cache)[0])
        half.is_programs = difference([captured], [tokens])[0] == 0


def _attempt(work: Callable[[Half], None]) -> Half:
    """Fill a half, or say why that failed."""
    torch.compiler.reset()
    counters.clear()
    half = Half()
    try:
        work(half)
    except Exception as error:
        half.failure, half.is_ours = said(error)
    return half


def _num_graphs(model: Any, way: Way) -> int:
    return len(model.graphs) if way == "aotdist.compile" else counters["stats"]["unique_graphs"]


def said(error: BaseException) -> tuple[str, bool]:
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
