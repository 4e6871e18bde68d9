"""What is known not to be the same, why, and how it shows; each is checked to hold still where it is met."""

from __future__ import annotations

import enum
import itertools
import re
import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from aotdist.torch_seam.trees import pytree
from tests.op_db.comparison import Outcome, Verdict, compare
from tests.op_db.samples import Case, Walk

FLOAT = Walk(torch.float32)
WITHOUT_GRAD = Walk(torch.float32, grad=False)
COMPLEX = Walk(torch.complex64)
BFLOAT = Walk(torch.bfloat16)
DYNAMIC = Walk(torch.float32, dynamic=True)
WALKS = (FLOAT, WITHOUT_GRAD, COMPLEX, BFLOAT)
WITH_GRAD = (FLOAT, COMPLEX, BFLOAT)


class Kind(enum.Enum):
    """Why a program is not the same compiled."""

    DATA = "what it does depends on data: refused by name"
    LAYOUT = "its tensors are sparse, or have no shape yet: refused by name"
    UNDEFINED = "eager returns what was in memory: compared with new memory filled"
    EAGER = "eager raises"
    NO_BACKWARD = "eager raises in the backward: refused by name"
    DIFFERS = "a defect of aotdist"


OUTCOMES: Mapping[Kind, tuple[Outcome, ...]] = {
    Kind.DATA: ("refused",),
    Kind.LAYOUT: ("refused",),
    Kind.UNDEFINED: (),
    Kind.EAGER: ("eager raised",),
    Kind.NO_BACKWARD: ("refused",),
    Kind.DIFFERS: ("differs", "raised"),
}


@dataclass(frozen=True)
class Known:
    """One exception.

    Args:
        program: name of the program; see `Case`.
        first: number of the first sample that shows it; None if that depends on the machine's kernels.
        walks: walks of the database that show it.
        kind: why.
        says: a pattern for the error, or for each fact that differs.
        why: for a defect, what it is.
    """

    program: str
    first: int | None
    walks: tuple[Walk, ...]
    kind: Kind
    says: str
    why: str

    def must_show(self, case: Case) -> bool:
        """Whether this sample is the one that shows it."""
        return case.number == self.first and case.walk in self.walks

    def explains(self, outcome: Outcome, line: str) -> bool:
        """Whether this is what a line of a verdict says."""
        return outcome in OUTCOMES[self.kind] and re.search(self.says, line) is not None


def _known(
    kind: Kind,
    says: str,
    first: Mapping[str, int] | Mapping[str, int | None],
    *,
    walks: tuple[Walk, ...] = WALKS,
    why: str = "",
) -> list[Known]:
    return [Known(program, number, walks, kind, says, why) for program, number in first.items()]


EXCEPTIONS: list[Known] = [
    *_known(
        Kind.DATA,
        "`.*` reads a tensor's data",
        {"allclose": 0, "equal": 0},
    ),
    *_known(Kind.DATA, "`.*` reads a tensor's data", {"item": 0}, walks=(COMPLEX,)),
    *_known(
        Kind.DATA,
        "`float\\(tensor\\)` needs the value of a number that is read off a tensor",
        {"nn.BatchNorm1d train": 2, "nn.BatchNorm2d train": 1, "nn.BatchNorm3d train": 1},
    ),
    *_known(Kind.DATA, "read off a tensor|a tensor's value is needed", {"tensor_split": 0}),
    *_known(
        Kind.LAYOUT,
        "`args.0.` has layout torch.sparse_csr",
        {"sparse.mm.reduce": 0, "sparse.sampled_addmm": 0},
    ),
    *_known(
        Kind.UNDEFINED,
        "values",
        {
            "empty": 0,
            "empty_like": 0,
            "empty_permuted": 0,
            "empty_strided": 0,
            "new_empty": 0,
            "new_empty_strided": 0,
        },
    ),
    *_known(
        Kind.EAGER,
        "Jiterator is only supported on CUDA",
        {
            "jiterator_2inputs_2outputs": 0,
            "jiterator_4inputs_with_extra_args": 0,
            "jiterator_binary": 0,
            "jiterator_binary_return_by_ref": 0,
            "jiterator_unary": 0,
        },
    ),
    *_known(Kind.EAGER, "the operation's result requires dtype", {"float_power_": 0}),
    *_known(Kind.EAGER, "In-place abs is not supported for complex", {"abs_": 0}, walks=(COMPLEX,)),
    # Its clone has no more memory than it shows.
    *_known(Kind.EAGER, "out of bounds for storage", {"as_strided.partial_views_": 2}),
    *_known(
        Kind.EAGER,
        "in backward: .* in the complex case are specified up to",
        {"linalg.eig": 0},
        walks=(FLOAT, COMPLEX),
    ),
    *_known(
        Kind.EAGER,
        "in backward: .* in the complex case are specified up to",
        {"linalg.eigh": 0, "linalg.svd": None, "pca_lowrank": 0, "svd": None, "svd_lowrank": 0},
        walks=(COMPLEX,),
    ),
    *_known(
        Kind.NO_BACKWARD,
        "the program has no backward, as in eager",
        {"acosh_": 0, "asinh_": 0, "atanh_": 0},
        walks=WITH_GRAD,
    ),
    *_known(
        Kind.DIFFERS,
        "out . values differ in the last bits",
        {"linalg.lstsq": None, "linalg.lstsq.grad_oriented": None},
        walks=(*WALKS, DYNAMIC),
        why="the driver gelsy rounds otherwise from call to call, in eager too",
    ),
    *_known(
        Kind.DIFFERS,
        "(out|grad) . values differ in the last bits",
        {"nn.LinearCrossEntropyLoss train": None, "nn.LinearCrossEntropyLoss eval": None},
        walks=(FLOAT,),
        why="with weights and label smoothing, it sums the weights of the targets that are not ignored; in a "
        "trace it sums all, with zeros for the ignored. `cross_entropy` is corrected, which it calls unheard",
    ),
    *_known(
        Kind.DIFFERS,
        "grad 0 values differ (in the last bits|much)",
        {"prod": None, "masked.prod": None},
        walks=WITH_GRAD,
        why="eager divides by each element where none is zero, and a trace does not ask whether one is",
    ),
    *_known(
        Kind.DIFFERS,
        "grad 0 stride is",
        {"ormqr": 0},
        walks=WITH_GRAD,
        why="the gradient of the first argument is laid out by rows, in eager by columns",
    ),
    *_known(
        Kind.DIFFERS,
        "out 0 is_view is False in eager, True compiled",
        {"nn.functional.max_pool1d": 1},
        walks=(WITHOUT_GRAD,),
        why="a trace computes the indices too, in two dimensions",
    ),
    *_known(
        Kind.DIFFERS,
        "out 0 is_view is False in eager, True compiled",
        {"empty_permuted": 0},
        why="a trace sees the permutation, eager makes a tensor",
    ),
    *_known(
        Kind.DIFFERS,
        "(arg|out) 0 values differ in the last bits",
        {"addcmul_": None, "addr_": None, "div.no_rounding_mode_": None, "true_divide_": None},
        walks=(COMPLEX,),
        why="PyTorch's kernel rounds otherwise when it writes its own operand, and the graph does not",
    ),
    *_known(
        Kind.LAYOUT,
        "the program makes a sparse tensor",
        {"to_sparse": 0},
    ),
    *_known(
        Kind.LAYOUT,
        "has no shape yet: its module is lazy",
        {
            f"nn.Lazy{module} {mode}": 0
            for module in (
                "Conv1d",
                "Conv2d",
                "Conv3d",
                "ConvTranspose1d",
                "ConvTranspose2d",
                "ConvTranspose3d",
            )
            for mode in ("train", "eval")
        },
    ),
]
KNOWN: Mapping[str, tuple[Known, ...]] = {
    program: tuple(known)
    for program, known in itertools.groupby(
        sorted(EXCEPTIONS, key=lambda known: known.program), lambda known: known.program
    )
}


def spread(cases: Iterable[Case]) -> Iterator[Case]:
    """The first sample of each program, and those that show an exception."""
    for case in cases:
        if case.number == 0 or any(known.must_show(case) for known in KNOWN.get(case.program, ())):
            yield case


def assert_same_as_eager(cases: Iterable[Case]) -> None:
    """Fail with what nothing explains."""
    found = problems(cases)
    assert not found, f"{len(found)} of:\n" + "\n".join(found)


def problems(cases: Iterable[Case]) -> list[str]:
    """What nothing explains: differences without an exception, and exceptions that do not show."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [problem for case in cases for problem in _problems(case)]


def _problems(case: Case) -> Iterator[str]:
    known = [each for each in KNOWN.get(case.program, ()) if case.walk in each.walks]
    undefined = [each for each in known if each.kind is Kind.UNDEFINED]
    with filled_memory() if undefined else nullcontext():
        verdict = compare(case)
    unexplained = [s for s in verdict.lines if not any(each.explains(verdict.outcome, s) for each in known)]
    if unexplained:
        yield str(Verdict(verdict.outcome, (str(case), *unexplained)))
    for each in known:
        if each.must_show(case) and not _shows(each, case, verdict):
            reason = f"{each.kind.value}: {each.why or each.says}"
            yield f"{case} does not show its exception any more ({reason}): {verdict}"


def _shows(known: Known, case: Case, verdict: Verdict) -> bool:
    if known.kind is Kind.UNDEFINED:
        return _returns_new_memory(case)
    return any(known.explains(verdict.outcome, line) for line in verdict.lines)


@contextmanager
def filled_memory() -> Generator[None]:
    """Let PyTorch fill memory that an operator leaves as it was."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _returns_new_memory(case: Case) -> bool:
    """Whether eager's results are nothing but what new memory is filled with."""
    scene = case.build()
    args, kwargs = scene.arguments()
    with filled_memory():
        outs = pytree.tree_leaves(scene.target(*args, **kwargs))
    return all(bool(out.isnan().all()) for out in outs)
