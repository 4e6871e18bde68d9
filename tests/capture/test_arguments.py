"""Structure of a call: paths, constants, what fits."""

from __future__ import annotations

import collections
import enum

import numpy as np
import pytest
import torch

from aotdist.capture.arguments import ConstantLeaf, TensorLeaf, read_arguments
from aotdist.errors import UnsupportedProgram

Pair = collections.namedtuple("Pair", "first second")


class Colour(enum.Enum):
    RED = 1


def read(*args, **kwargs):
    return read_arguments(args, kwargs)[0]


def test_paths_are_what_the_user_would_write():
    t = torch.ones(1)
    arguments = read(t, {"x": [t, 3]}, Pair(t, None), mask=t, options={"a": (t,)})
    assert [leaf.path for leaf in arguments.leaves] == [
        "args[0]",
        "args[1]['x'][0]",
        "args[1]['x'][1]",
        "args[2].first",
        "args[2].second",
        "mask",
        "options['a'][0]",
    ]


def test_tensors_and_constants_are_told_apart():
    arguments = read(torch.ones(1), 3)
    assert [type(leaf) for leaf in arguments.leaves] == [TensorLeaf, ConstantLeaf]
    assert arguments.tensor_paths() == ["args[0]"]


def test_unflatten_is_the_inverse():
    tensors = [torch.ones(1), torch.zeros(2)]
    arguments = read(tensors[0], [tensors[1], "text"], k=None)
    args, kwargs, objects = arguments.unflatten(tensors)
    assert objects == []
    assert (
        args[0] is tensors[0] and args[1][0] is tensors[1] and args[1][1] == "text" and kwargs == {"k": None}
    )


CONSTANTS = [
    1,
    1.5,
    True,
    None,
    "text",
    b"bytes",
    1j,
    ...,
    Colour.RED,
    torch.float32,
    torch.device("cpu"),
    torch.strided,
    torch.contiguous_format,
    torch.Size([2, 3]),
    slice(1, None),
    range(3),
]


@pytest.mark.parametrize("value", CONSTANTS, ids=repr)
def test_each_kind_of_constant(value):
    arguments = read(value)
    assert arguments.match((value,), {}) == ([], [], [])
    assert all(arguments.match((other,), {}) is None for other in CONSTANTS if other is not value)
    (given,), _, _ = arguments.unflatten([])
    assert given is value


def test_nan_is_itself():
    assert read(float("nan")).match((float("nan"),), {}) == ([], [], [])


def test_one_is_neither_true_nor_a_float():
    assert all(read(1).match((other,), {}) is None for other in (1.0, True))
    assert read((1, 2)).match(((1, 2.0),), {}) is None


def test_other_structures_do_not_fit():
    t = torch.ones(1)
    arguments = read([t, t], k=t)
    assert arguments.match(([t, t],), {"k": t}) == ([t, t, t], [], [])
    for args, kwargs in (
        (([t],), {"k": t}),
        (((t, t),), {"k": t}),
        (([t, t],), {}),
        (([t, t],), {"j": t}),
        (([t, t], t), {"k": t}),
        (([t, 1],), {"k": t}),
        (([t, t],), {"k": 1}),
    ):
        assert arguments.match(args, kwargs) is None


def test_keyword_arguments_fit_in_any_order():
    a, b = torch.ones(1), torch.zeros(1)
    arguments = read(a=[a], b=b)
    assert arguments.match((), {"b": b, "a": [a]}) == ([a, b], [], [])


def test_what_is_neither_is_refused_by_name():
    with pytest.raises(UnsupportedProgram) as raised:
        read(torch.ones(1), options={"mode": object()})
    assert str(raised.value).startswith(
        "`options['mode']` is a builtins.object, neither a tensor nor a constant"
    )
    assert "register_pytree_node" in str(raised.value)


@pytest.mark.parametrize("value", [np.float32(2), np.int64(2), np.bool_(True), np.ones(3)], ids=repr)
def test_what_is_numpys_is_refused_with_how_to_pass_it(value: object) -> None:
    with pytest.raises(UnsupportedProgram, match=r"fix: pass `torch.from_numpy\(array\)`.*`scalar.item\(\)`"):
        read(torch.ones(1), value)
