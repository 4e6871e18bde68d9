"""Writes `docs/troubleshooting.md`: programs that aotdist refuses, what it says, and the way out.

`python docs/troubleshooting.py` prints the page. A function here is an entry: its docstring is the heading
and the words, its body the program, and the message is what running it raises.
"""

from __future__ import annotations

import inspect
import os
import re
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import aotdist
from aotdist import AotdistError, BadArtifact, BadSettings, SignatureMismatch, UnsupportedProgram


def value_of_a_tensor():
    """The program needs the value of a tensor

    A program is captured once and runs for other data later, so it cannot branch on the contents of a tensor:
    `if`, `while`, `range(count.item())`. A number that is read (`count.item()`) may be computed with, may be
    a size or a position, and may be returned and kept (`log.append(loss.item())`, `self.loss = loss.item()`).
    What Python needs at once (`float(tensor)`, a text of the number) may not.
    """

    def step(x):
        return x if x.sum() > 0 else -x

    aotdist.compile(step)(torch.ones(3))


def size_by_data():
    """A program chooses by a size that depends on data

    How many elements a mask selects may differ from call to call, and so may the sizes of all that follows.
    `if`, `while`, and `len` and `tolist` of such a tensor need the number while the program is captured. In
    the code of an installed package they get that of the call, if it follows from the inputs alone: a call
    with another is compiled again, so pad images and videos to few layouts (`max_artifacts` programs are
    kept, and a warning says what keeps changing).
    """

    def step(x):
        chosen = x[x > 0]
        return chosen.mean() if chosen.shape[0] > 0 else x.sum()

    aotdist.compile(step)(torch.ones(3))


def opaque_argument():
    """An argument is neither a tensor nor a constant

    Arguments are flattened: tuples, lists, dictionaries, objects of any class; but not sets, iterators and
    NumPy arrays.
    """
    aotdist.compile(lambda x, scales: x * len(scales))(torch.ones(3), {2.0, 3.0})


def sparse_argument():
    """A tensor is sparse

    Programs take dense tensors, and wrappers around dense tensors: 2:4 sparse and jagged tensors are such.
    Sparse matrices (COO, CSR) are multiplied by dense ones, and nothing else.
    """
    aotdist.compile(lambda x: x * 2)(torch.eye(3).to_sparse())


def lazy_module():
    """A parameter has no shape yet

    A lazy module makes its parameters at its first call.
    """
    aotdist.compile(nn.LazyLinear(3))(torch.ones(2, 4))


def backward_inside():
    """A module calls `backward()`

    Modules leave gradients to their caller; the error is an `UnsupportedProgram`. A function that calls
    `backward()`, or lets an optimizer step, is compiled as a [whole step](train_step.md); what that
    refuses is listed there.
    """

    class Trains(nn.Linear):
        def forward(self, x):
            super().forward(x).sum().backward()

    aotdist.compile(Trains(2, 2))(torch.ones(1, 2))


def hook_inside():
    """A hook for an accumulated gradient is registered inside

    Eager would add one more hook at every call; a graph cannot express that.
    """

    class Hooked(nn.Linear):
        def forward(self, x):
            self.weight.register_post_accumulate_grad_hook(lambda weight: None)
            return super().forward(x)

    aotdist.compile(Hooked(2, 2))(torch.ones(2, 2))


def generator_inside():
    """A random generator is made, or seeded, inside

    The graph draws from the generators that the caller has, so that they advance as in eager.
    """

    def noisy(x):
        torch.manual_seed(0)
        return x + torch.rand_like(x)

    aotdist.compile(noisy)(torch.ones(3))


def written_after_use():
    """A tensor that the backward needs is written

    Eager raises at `backward()`; here it is known when the program is compiled.
    """

    def step(x):
        y = x.exp()
        y.add_(1)
        return y

    aotdist.compile(step)(torch.ones(3, requires_grad=True))


def dynamic_size_that_is_not():
    """A size that was marked as dynamic is decided by the program

    The message says what the size has to be.
    """
    x = torch.ones(4, 3)
    aotdist.mark_dynamic(x, 0)
    aotdist.compile(lambda x: x.view(2, 2, 3))(x)


def unknown_backend():
    """An unknown backend

    The backends are `fx`, `inductor`, `triton`, `auto`, and any function `(graph_module, fake_arguments) ->
    callable`.
    """
    aotdist.compile(lambda x: x, backend="inducto")


def unknown_setting():
    """An unknown setting

    The names are the fields of `aotdist.Settings`.
    """
    aotdist.compile(lambda x: x, settings={"partitions": "default"})


def wrong_variable():
    """An environment variable with an invalid value

    Each setting is also read from the variable `AOTDIST_` plus its name, in capitals.
    """
    os.environ["AOTDIST_PARTITION"] = "best"
    try:
        aotdist.compile(lambda x: x)
    finally:
        del os.environ["AOTDIST_PARTITION"]


def not_callable():
    """The object to compile cannot be called

    Modules, functions, methods and objects with a `__call__` can be compiled.
    """
    aotdist.compile(torch.ones(3))


def of_torch_compile():
    """An argument of torch.compile

    `aotdist.compile` takes `backend`, `dynamic` and `settings`; the error names what is meant by the others.
    """
    aotdist.compile(nn.Linear(2, 2), mode="reduce-overhead")


def not_compiled():
    """The object to explain was not compiled

    `source`, `graphs` and `explain` exist for objects that went through `compile`.
    """
    aotdist.explain(nn.Linear(2, 2))


def optimizer_of_another_model():
    """An optimizer with parameters of another model

    After `to_empty`, `to_float8` or FSDP2 a model may have other parameters than the optimizer was made for:
    it would train what nobody uses any more. `aotdist.train_step` and `aotdist.prepare` compare the two.
    `compile` does not: a model whose optimizer was made before `fully_shard` is silently not trained, as in
    eager.
    """
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    aotdist.train_step(nn.Linear(2, 2), lambda model, x: model(x).sum(), optimizer)


def optimizer_with_a_closure():
    """An optimizer that runs the model by itself

    `LBFGS` calls the forward as often as its search asks for.
    """
    model = nn.Linear(2, 2)
    aotdist.train_step(model, lambda model, x: model(x).sum(), torch.optim.LBFGS(model.parameters()))


def no_artifact():
    """A file that is not an artifact, or is damaged

    Artifacts have a version and a checksum. Build it again: `aotdist build`.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "step.aot")
        path.write_bytes(b"something else")
        aotdist.load(path, nn.Linear(2, 2))


def artifact_for_another_call():
    """A call that an artifact was not built for

    `aotdist.load` never compiles; the message says what differs.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "step.aot")
        aotdist.build(lambda: (nn.Linear(2, 2), (torch.ones(3, 2),)), path)
        aotdist.load(path, nn.Linear(2, 2))(torch.ones(5, 2))


SECTIONS: dict[type[AotdistError], tuple[str, list[Callable[[], None]]]] = {
    UnsupportedProgram: (
        "A program, at its first call with arguments of this kind, cannot be compiled ahead of time. Nothing "
        "was changed: buffers, random numbers and gradients are as before. Under "
        '`aotdist.disable` the call runs as it was written; `torch.compile(backend="aotdist")` leaves the '
        'rejected part to eager by itself. With `Settings(unsupported="eager")` '
        "(`AOTDIST_UNSUPPORTED=eager`), calls of this kind run as they were "
        "written, on all ranks if one rank's is rejected; a warning and `explain()` say why. Still errors "
        "are: what is rejected in a backward; on ranks, a call for which modes and `train()` or `eval()` are "
        "those of calls that the ranks run compiled; and whatever `aotdist.freeze`, `build` and `export` "
        "reject.",
        [
            value_of_a_tensor,
            size_by_data,
            opaque_argument,
            sparse_argument,
            lazy_module,
            backward_inside,
            hook_inside,
            generator_inside,
            written_after_use,
            dynamic_size_that_is_not,
        ],
    ),
    BadSettings: (
        "An option does not exist, or options are incompatible. It is raised before anything is compiled.",
        [
            unknown_backend,
            unknown_setting,
            wrong_variable,
            not_callable,
            of_torch_compile,
            not_compiled,
            optimizer_of_another_model,
            optimizer_with_a_closure,
        ],
    ),
    BadArtifact: ("A file cannot be used here.", [no_artifact]),
    SignatureMismatch: ("No artifact fits the call.", [artifact_for_another_call]),
}

HEAD = """\
# Troubleshooting

Errors by name. Each is an `aotdist.AotdistError`, which is a `RuntimeError`, and says what happened to which
tensor, at which line of your program, at which stage, and how to fix it. `docs/troubleshooting.py` writes
this page, and runs the programs that it shows.

`aotdist doctor` checks the machine: versions, compilers, GPUs, the cache. `TORCH_LOGS="+aotdist"` shows what
is compiled, stage by stage.

What your program raises while it is captured has eager's type and words, and names the module. Tracebacks
show your lines, those of `torch.nn`, and one of aotdist's; `AOTDIST_TRACEBACK=full` shows all of them.
"""

REST = """\
## IndexOutOfBounds

An index or a label lies outside of its dimension, in a graph that runs as C++ kernels. It is an `IndexError`,
as in eager, and lists the lines of the program that pick elements in that graph; the kernel does not tell the
index. With `backend="fx"` the message is eager's. On a GPU kernels assert, as everywhere. Code that
`torch.compile` made ends the process instead where several threads compute (torch 2.13).

## RankDivergence

The ranks of a process group are about to run different programs, which would hang, abort the process, or mix
parameters or batches. It is raised on every rank before they communicate, and names the first difference: a
shared parameter's name, shape or placement, the order in which these are used, or a collective. The usual
causes are a branch on the rank, parameters ordered by iterating over a set, and a backward or a step that one
rank skips. `check_ranks` says how often ranks compare ([how](design.md#ranks)).

## RankLost

A rank died, or did not come to a collective in time (`rank_timeout_s`). It is raised on all other ranks,
and names the lost ones: their last output says why. `py-spy dump` shows where a process hangs. One rank
alone may have a smaller batch, since the collectives are the same.

## CacheCorrupt

An entry of the compile cache is damaged, or others may have written it. A call never raises it; it warns, and
compiles the program anew. `aotdist cache verify` lists such entries, `aotdist cache clear` removes them
([cache.md](cache.md)).

## BadCheckpoint

The trainer has no checkpoint to resume from: all are damaged, or of another model. The message says of each
what is wrong, or names the first parameter that differs. Give the options of the run that saved it, or start
another run ([checkpoints.md](checkpoints.md)).

## CheckpointFailed

The last checkpoint of a run of the trainer could not be written, because the disk is full, say; the message
names the one before it, which is whole. Make room, and resume the run with `--resume FOLDER`.

## RunInUse

Another process trains in the folder of the run that was to be resumed; the message names it. Wait for its
end, or end its launcher (it saves first). The folder is locked by the file system, so a process that is gone
holds nothing; where the machine of the other process is gone, its lock ends after a minute or two
([checkpoints.md](checkpoints.md)).

## TrainingDiverged

The loss of a run of the trainer is no longer a number. Resume from the last checkpoint with a lower
`--optim.lr`, more `--optim.warmup-steps` or a smaller `--optim.clip-norm`.

## InternalError

A bug in aotdist. Please report it with the program. `aotdist.disable` runs the function eagerly until then.

## terminate called without an active exception

This is not an error of aotdist or of the training, which is complete: on ranks without a GPU a process may
abort (`SIGABRT`, exit code 134 or -6) while Python shuts down; uncompiled programs do, too. A gloo thread
releases the tensor of the last collective, asks Python for the lock, and is ended instead, inside of C++ that
does not survive it (PyTorch's pull request 179291). It becomes more likely the busier the machine is, and the
sooner the script ends after a collective. End a script with

```
dist.barrier()  # waits without Python's lock, so that gloo's threads get it
dist.destroy_process_group()
```

which makes it rare, but not impossible: a group whose mesh FSDP2 or DTensor still knows keeps its threads
after `destroy_process_group`. Write checkpoints and metrics before that. In `Fabric` the call is
`fabric.barrier()`, in accelerate `accelerator.wait_for_everyone()` before `accelerator.end_training()`.
"""


def told_by(case: Callable[[], None], kind: type[AotdistError]) -> str:
    """What a program's user reads."""
    try:
        case()
    except kind as error:
        # Neither where this file lies nor where its lines are is of interest.
        text = re.sub(r"(\.py):\d+", r"\1", f"{type(error).__name__}: {error}")
        text = re.sub(r"\S*/(troubleshooting\.py|step\.aot)", r"\1", text)
        return text.replace(f"{__name__}.{case.__name__}.<locals>.", "")
    raise AssertionError(f"{case.__name__} raises no {kind.__name__}")


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for kind, (words, cases) in SECTIONS.items():
        parts.append(f"## {kind.__name__}\n\n{textwrap.fill(words, 110)}\n")
        parts += [_entry(case, kind) for case in cases]
    parts.append(REST)
    return "\n".join(parts)


def _entry(case: Callable[[], None], kind: type[AotdistError]) -> str:
    title, _, words = inspect.cleandoc(case.__doc__ or "").partition("\n")
    body = inspect.getsource(case).partition('"""')[2].partition('"""')[2]
    words = textwrap.fill(" ".join(words.split()), 110)
    program = f"```python\n{textwrap.dedent(body).strip()}\n```"
    message = f"```\n{told_by(case, kind)}\n```"
    return f"### {title}\n\n{words}\n\n{program}\n\n{message}\n"


if __name__ == "__main__":
    print(page(), end="")
