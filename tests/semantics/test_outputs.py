"""What comes back: inputs, views of inputs, views of intermediates, the same object twice."""

import collections
from dataclasses import dataclass

import pytest
import torch

import aotdist
from aotdist.errors import UnsupportedProgram
from aotdist.torch_seam.trees import pytree
from tests.semantics.functions import Detached
from tests.semantics.makers import non_leaf, plain, two_non_leaf
from tests.semantics.observation import Scene, same_as_eager


def leaf(*size: int) -> torch.Tensor:
    return torch.randn(*(size or (3, 4)), requires_grad=True)


OUTPUTS = {
    "an input": lambda x: x,
    "an input twice": lambda x: (x, x),
    "an intermediate twice": lambda x: [x * 2] * 2,
    "a view of an input": lambda x: x.t(),
    "a view of a view of an input": lambda x: x.t()[1:, 0],
    "views of an input that overlap": lambda x: (x[:2], x[1:], x),
    "all results of a multi-output view": lambda x: x.split(2, 1),
    "one result of unbind": lambda x: x.unbind(0)[1],
    "a view of an intermediate": lambda x: (x * 2).t(),
    "two views of an intermediate": lambda x: ((y := x * 2).t(), y[0]),
    "a view and its base": lambda x: ((y := x * 2), y[0]),
    "a view before its base": lambda x: ((y := x * 2)[0], y),
    "a view of a view, and the view": lambda x: ((v := (x * 2).t())[0], v),
    "a detached input": lambda x: x.detach(),
    "a detached intermediate beside the original": lambda x: ((y := x * 2), y.detach()),
    "a view of a detached tensor, and that": lambda x: ((d := x.detach()).t(), d),
    "an expanded view": lambda x: x[0].expand(5, 4),
    "a reshape that copies": lambda x: x.t().reshape(-1),
    "a reshape that does not": lambda x: x.reshape(-1),
    "contiguous of what is": lambda x: x.contiguous(),
    "contiguous of what is not": lambda x: x.t().contiguous(),
    "to the dtype that it has": lambda x: x.to(torch.float32),
    "to another dtype": lambda x: x.to(torch.float64),
    "another dtype of the same bits": lambda x: x.detach().view(torch.int32),
    "the real part": lambda x: torch.view_as_real(torch.complex(x, x)),
    "a conjugate": lambda x: torch.complex(x, x).conj(),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 4), 1),
    "a diagonal": lambda x: x.diagonal(),
    "a tensor made inside": lambda x: torch.zeros(3),
    "a literal": lambda x: torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t(),
    "integers": lambda x: x.argmax(-1),
    "booleans": lambda x: x > 0,
    "nothing": lambda x: None,
    "an empty tuple": lambda x: (),
    "no dimensions": lambda x: x.sum(),
    "no elements": lambda x: x[:0] * 2,
}


@pytest.mark.parametrize("around", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", OUTPUTS)
def test_each_kind_of_output(name, around):
    same_as_eager(lambda: Scene(OUTPUTS[name], (leaf(),)), calls=2, around=around)


@pytest.mark.parametrize("name", OUTPUTS)
def test_each_kind_of_output_of_a_non_leaf(name):
    same_as_eager(lambda: Scene(OUTPUTS[name], (leaf() * 1.5,)))


INFERENCE = {
    "views of one": lambda x: (y := x * 2, y[0], y.t(), y)[1:],
    "only views": lambda x: (y := x * 2, y[0], y.t())[1:],
    "written": lambda x: (y := (x * 2).add_(1), y[0].mul_(2), y)[1:],
    "transposed in place": lambda x: (y := x * 2, y.t_(), y[0])[1:],
    "a view of what is given": lambda x: (x[0], x * 2),
}


@pytest.mark.parametrize("name", INFERENCE)
def test_what_inference_mode_makes_inside_is_a_normal_tensor(name):
    x, program = leaf(), torch.inference_mode()(INFERENCE[name])
    made, found = program(x), aotdist.compile(program, backend="fx")(x)
    for expected, result in zip(made, found, strict=True):
        assert torch.equal(result, expected) and result.requires_grad == expected.requires_grad
        assert not result.is_inference()
        assert result.stride() == expected.stride()
    (found[-1] * x.sum()).sum().backward()


def test_used_outside_of_inference_mode():
    def program(x):
        with torch.inference_mode():
            y = x * 2
        return y + 1, y * 3

    same_as_eager(lambda: Scene(program, (leaf(),)))


@pytest.mark.parametrize("ask", [lambda x: x._base, torch.Tensor._is_view, torch.is_inference])
def test_what_the_stand_in_of_an_input_cannot_answer_is_refused(ask):
    with pytest.raises(UnsupportedProgram, match=r"the program asks for `args\[0\]"):
        aotdist.compile(lambda x: x * (2 if ask(x) else 3), backend="fx")(torch.ones(4)[:2])


LAYOUTS = {
    "transposed": lambda: torch.empty_strided((3, 4), (1, 3)).normal_().requires_grad_(),
    "expanded": lambda: torch.randn(1, 4).expand(3, 4),
    "with gaps": lambda: torch.randn(3, 8)[:, ::2],
    "with an offset": lambda: torch.randn(6, 4)[2:5],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "name", ["a view of an input", "a reshape that copies", "to another dtype", "a diagonal"]
)
def test_layouts_of_inputs(name, layout):
    same_as_eager(lambda: Scene(OUTPUTS[name], (LAYOUTS[layout](),)))


def test_an_output_made_by_a_write_through_a_view_may_be_written():
    """Functionalisation makes such a tensor as a view; to its user it is none."""

    def program(x):
        y = x * 2
        y.t()[0].mul_(3)
        return y

    x = leaf()
    y = aotdist.compile(program, backend="fx")(x)
    y.add_(1)
    y.sum().backward()
    assert torch.equal(x.grad, torch.tensor([6.0, 2.0, 2.0, 2.0]).expand(3, 4))


def test_a_write_to_an_output_reaches_the_input_that_it_shows():
    x = torch.zeros(3, 4)
    aotdist.compile(lambda x: x.t()[0], backend="fx")(x).fill_(1)
    assert torch.equal(x[:, 0], torch.ones(3)) and x.sum() == 3


def test_a_write_to_an_output_has_eagers_history():
    def write_after(call):
        x = torch.arange(12.0).view(3, 4).requires_grad_()
        y, row = call(x)
        row.mul_(10)
        y.sum().backward()
        return x.grad

    def program(x):
        y = x * 2
        return y, y[0]

    assert torch.equal(write_after(aotdist.compile(program, backend="fx")), write_after(program))


def test_outputs_do_not_share_memory_that_they_do_not_share_in_eager():
    def program(x):
        y = x + 1
        return y, y.clone(), y.detach().clone()

    outputs = aotdist.compile(program, backend="fx")(leaf())
    assert len({out.untyped_storage().data_ptr() for out in outputs}) == 3


Pair = collections.namedtuple("Pair", "first second")


@dataclass
class Output:
    """As libraries return them: a dataclass that is registered as a pytree."""

    loss: torch.Tensor
    logits: torch.Tensor | None = None


pytree.register_dataclass(Output)


class Mapping(collections.OrderedDict):
    """A dictionary of a class of its own, which is no pytree: it is returned as it is."""


STRUCTURES = {
    "nested": lambda p: {"a": [p.first * 2, (p.second,)], "b": {"c": None}},
    "a named tuple": lambda p: Pair(p.second, [p.first * 2]),
    "a dataclass": lambda p: Output(p.first.sum(), p.first * 2),
    "a dataclass with holes": lambda p: Output(p.first.sum()),
    "an ordered dictionary": lambda p: collections.OrderedDict(b=p.first * 2, a=p.second),
    "a default dictionary": lambda p: collections.defaultdict(list, {"a": [p.first * 2]}),
    "a deque": lambda p: collections.deque([p.first * 2]),
    "constants": lambda p: (p.first * 2, 3, "text", None, 2.5, torch.float32, torch.Size([2]), slice(1, 2)),
    "keys of any kind": lambda p: {1: p.first * 2, ("a", 2): p.second, None: 0},
    "one element": lambda p: (p.first * 2,),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures(name):
    same_as_eager(lambda: Scene(STRUCTURES[name], (Pair(leaf(), torch.ones(2)),)), calls=2)


def test_keyword_arguments_are_named_not_ordered():
    def program(x, *, mask=None, options):
        return x * options["scale"] if mask is None else x * mask + options["shift"]

    def build():
        options = {"scale": torch.tensor(2.0), "shift": torch.tensor(1.0)}
        return [
            Scene(program, (leaf(),), {"mask": torch.ones(4), "options": options}),
            Scene(program, (leaf(),), {"options": options, "mask": torch.ones(4)}),
        ]

    compiled = same_as_eager(build)
    assert len(compiled.artifacts) == 1
    x, options = leaf(), {"scale": torch.tensor(2.0), "shift": torch.tensor(1.0)}
    assert torch.equal(compiled(x, options=options), x * 2)


def test_arguments_of_every_structure():
    def program(nested, output, *rest, **named):
        total = nested["a"][0] + nested["b"].first * output.logits + rest[0]
        return total * named["x"][1] if rest[1] is None else total

    def build():
        nested = {"a": [leaf()], "b": Pair(leaf(), 2)}
        return Scene(program, (nested, Output(leaf(), leaf()), leaf(), None), {"x": (1, leaf())})

    same_as_eager(build, calls=2)


METADATA_WRITES = {
    "of an intermediate": lambda x: (x * 2).t_(),
    "of a view": lambda x: x.t().unsqueeze_(0),
    "of a view, before a view of it": lambda x: x[1:].t_()[0],
    "of a view that is returned": lambda x: (v := x.t(), v.unsqueeze_(0), v.squeeze_())[0],
    "of an intermediate, before a view of it": lambda x: ((y := x * 2).t_(), y[0]),
    "of another dtype": lambda x: x.detach().view(torch.int32).t_().view(torch.float32),
}


@pytest.mark.parametrize("name", METADATA_WRITES)
def test_sizes_written_in_place(name):
    same_as_eager(lambda: Scene(METADATA_WRITES[name], (leaf() * 1.5,)))


def test_a_view_of_what_has_changed_its_size():
    def program(x):
        y = x * 2
        y.t_()
        return y, y[0]

    same_as_eager(lambda: Scene(program, (leaf(),)))


def written_by_a_weight(x, w):
    part = x.detach()
    part.mul_(w)
    return part


def views_of_what_was_written(x, w):
    part = (x * 2).detach()
    part.mul_(w)
    return part.t(), part[0]


def written_result_of_a_function(x, w):
    y = Detached.apply(x * w)
    y.mul_(2)
    return y


def views_of_the_result_of_a_function(x, w):
    y = Detached.apply(x * w)
    return y.t(), y[0]


@pytest.mark.parametrize("make", [plain, leaf, non_leaf, two_non_leaf])
@pytest.mark.parametrize(
    "program",
    [
        written_by_a_weight,
        views_of_what_was_written,
        written_result_of_a_function,
        views_of_the_result_of_a_function,
    ],
)
def test_what_is_detached_has_a_history_of_its_own_once_written(program, make):
    same_as_eager(lambda: Scene(program, (make(), leaf())))
