"""`as_strided` and `unfold`: views that count from the storage, and show what is around an input in it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.two_tensor import TwoTensor

import aotdist
from aotdist.errors import UnsupportedProgram
from tests.semantics.makers import leaf, non_leaf, plain, two, two_non_leaf
from tests.semantics.meshes import sharded
from tests.semantics.observation import Scene, play, same_as_eager


def quietly(op: Callable[..., Any], *args: Any) -> Any:
    with torch.no_grad():
        return op(*args)


READ: dict[str, Callable[[torch.Tensor], Any]] = {
    "read": lambda x: x.as_strided((5,), (1,)) * 2,
    "returned": lambda x: x.as_strided((5,), (1,)),
    "beside another write": lambda x: (v := x.as_strided((5,), (1,)), (x * 1).mul_(2), v * 1)[1:],
}

WRITTEN: dict[str, Callable[[torch.Tensor], Any]] = {
    "read after a write": lambda x: (quietly(x.mul_, 2), x.as_strided((5,), (1,)) * 1)[1],
    "read by a view of before": lambda x: (v := x.as_strided((5,), (1,)), quietly(x.mul_, 2), v * 1)[2],
    "through the view": lambda x: (quietly(x.as_strided((5,), (1,)).mul_, 2), x * 1)[1],
    "through a view": lambda x: (quietly(x[1:].as_strided((2, 2), (2, 1)).mul_, 2), x * 1)[1],
    "detached": lambda x: (x.detach().as_strided((5,), (1,)).mul_(2), x * 1)[1],
    "with history": lambda x: (x.as_strided((5,), (1,)).mul_(2), x * 1)[1],
    "too far": lambda x: quietly(x.as_strided((500,), (1,)).mul_, 2),
}

PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the beginning": lambda memory: memory[:3],
    "the middle": lambda memory: memory[2:5],
    "with gaps": lambda memory: memory[1:8:2],
}

MEMORIES: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: plain(16),
    "leaf": lambda: leaf(16),
    "non-leaf": lambda: non_leaf(16),
}


@pytest.mark.parametrize("program", READ)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("make", MEMORIES)
def test_memory_around_an_input_is_read(make: str, part: str, program: str) -> None:
    def build() -> Scene:
        memory = MEMORIES[make]()
        return Scene(READ[program], (PARTS[part](memory),), held={"memory": memory})

    same_as_eager(build)


@pytest.mark.parametrize("program", WRITTEN)
@pytest.mark.parametrize("part", PARTS)
def test_memory_around_an_input_that_is_written_is_refused(part: str, program: str) -> None:
    memory = plain(16)
    before, other = memory.clone(), memory.detach()[4:9]
    wrapped = TwoTensor(PARTS[part](memory), PARTS[part](plain(16)))
    for inputs in ((PARTS[part](memory),), (PARTS[part](memory), other), (wrapped,)):
        with pytest.raises(UnsupportedProgram, match="memory around it"):
            aotdist.compile(lambda x, *_: WRITTEN[program](x), backend="fx")(*inputs)
        assert torch.equal(memory, before)


UNFOLDED: dict[str, Callable[[torch.Tensor], Any]] = {
    "read": lambda x: x.unfold(1, 2, 1) * 2,
    "with a rest": lambda x: (x.unfold(1, 3, 3).mul_(3), x * 1)[1],
    "with gaps": lambda x: (x.unfold(1, 1, 2).mul_(3), x * 1)[1],
    "with gaps, from the end": lambda x: (x.unfold(-1, 1, 3).mul_(3), x * 1)[1],
    "of rows": lambda x: (x.unfold(0, 2, 2).mul_(3), x * 1)[1],
    "of a part": lambda x: (x[1:].unfold(1, 1, 2).mul_(3), x * 1)[1],
    "of what is transposed": lambda x: (x.t().unfold(0, 1, 2).mul_(3), x * 1)[1],
    "of what is made inside": lambda x: ((y := x * 2).unfold(1, 1, 3).mul_(3), y)[1],
    "of a part of what is made inside": lambda x: ((y := x * 2)[1:].unfold(1, 1, 3).mul_(3), y)[1],
    "returned": lambda x: ((v := x.unfold(1, 1, 2)).mul_(3), v)[1],
    "as_strided of a part": lambda x: (x[1:].as_strided((2, 2), (4, 2), 4).mul_(3), x * 1)[1],
    "as_strided of what is made inside": lambda x: ((y := x * 2)[1:].as_strided((2, 2), (4, 2)).mul_(3), y)[
        1
    ],
    "as_strided twice": lambda x: (x.as_strided((2, 3), (4, 1)).as_strided((2,), (3,)).mul_(3), x * 1)[1],
}
OF_A_PART = ("of a part", "of what is transposed", "as_strided of a part", "as_strided twice")


@pytest.mark.parametrize("program", UNFOLDED)
@pytest.mark.parametrize(
    "make",
    [plain, leaf, non_leaf, lambda: non_leaf(4, 3).t(), two, two_non_leaf],
    ids=["plain", "leaf", "non-leaf", "view of a non-leaf", "two", "two, non-leaf"],
)
def test_unfold(make: Callable[[], torch.Tensor], program: str) -> None:
    def build() -> list[Scene]:
        return [Scene(UNFOLDED[program], (make(),))]

    compare_all(build)


@pytest.mark.parametrize("program", UNFOLDED)
def test_unfold_of_what_lies_inside_of_memory(program: str) -> None:
    def build() -> list[Scene]:
        return [Scene(UNFOLDED[program], (plain(5, 4)[1:4],))]

    if program in OF_A_PART:
        with pytest.raises(UnsupportedProgram, match="`as_strided` shows"):
            same_as_eager(build)
    else:
        compare_all(build)


@pytest.mark.parametrize("program", UNFOLDED)
def test_unfold_of_dtensors(mesh: DeviceMesh, program: str) -> None:
    compare_all(lambda: [Scene(UNFOLDED[program], (sharded(mesh, plain()) * 1.5,))])


WINDOWS_AND_WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "returned": lambda x: (x.unfold(0, 2, 1), x.mul_(2))[0],
    "read later": lambda x: (v := x.unfold(0, 2, 1), x.mul_(2), v * 1)[2],
    "read before": lambda x: (x.unfold(0, 2, 1) * 3, x.mul_(2))[0],
    "made later": lambda x: (x.mul_(2), x.unfold(0, 2, 1))[1],
    "of a part": lambda x: (v := x[1:].unfold(0, 2, 1), x.sin_(), v * 1)[2],
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("make", MEMORIES)
def test_windows_of_an_input_that_is_written(make: str, part: str) -> None:
    """An input's windows show nothing around it, wherever the input has gaps."""
    for program in WINDOWS_AND_WRITES.values():

        def build(program: Callable[[torch.Tensor], Any] = program) -> Scene:
            memory = MEMORIES[make]() * 1
            return Scene(program, (PARTS[part](memory),), held={"m": memory})

        same_as_eager(build)


def compare_all(build: Callable[[], list[Scene]]) -> None:
    try:
        for scene in build():
            play(scene, scene.fn)
    except Exception as error:  # wrappers refuse in many words
        pytest.skip(f"eager refuses it: {str(error)[:60]}")
    same_as_eager(build)


def test_what_shows_an_element_twice_is_not_written() -> None:
    for write in (lambda x: x.unfold(1, 2, 1).mul_(3), lambda x: x.as_strided((3, 4), (1, 1)).mul_(3)):
        with pytest.raises(UnsupportedProgram, match="whose elements share memory"):
            aotdist.compile(write, backend="fx")(plain())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32, torch.float64, torch.int16])
def test_inputs_of_two_dtypes_with_gaps(dtype: torch.dtype) -> None:
    def build(program: Callable[..., Any]) -> Scene:
        memory = torch.arange(24.0).view(3, 8)
        return Scene(program, (memory[:, ::2], memory.view(dtype)[:, :2]), held={"memory": memory})

    same_as_eager(lambda: build(lambda u, v: (u * 1, v.clone())))
    for program in (lambda u, v: u.add_(1), lambda u, v: v[1].add_(1)):
        scene = build(aotdist.compile(program, backend="fx"))
        with pytest.raises(UnsupportedProgram, match="shares memory with .* as another dtype"):
            scene.fn(*scene.args)


def test_memory_of_an_input_as_another_dtype() -> None:
    def program(x: torch.Tensor) -> None:
        x.view(torch.int32).as_strided((2, 2), (2, 1)).add_(1)

    def written(u: torch.Tensor, v: torch.Tensor) -> None:
        u.as_strided((2, 2), (8, 2)).mul_(2)

    memory = torch.arange(24.0).view(3, 8)
    beside = memory[:, ::2], memory.view(torch.int32)[:, :2]
    for fn, args in ((program, (torch.randn(3, 4),)), (written, beside)):
        with pytest.raises(UnsupportedProgram, match="memory around it"):
            aotdist.compile(fn, backend="fx")(*args)
