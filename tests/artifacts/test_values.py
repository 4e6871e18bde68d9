"""What an artifact holds comes back as it was; what is no kind of ours is refused, on both ways."""

import collections
import json
import math
import operator
from typing import Any, NamedTuple

import pytest
import torch

import aotdist
from aotdist import facts
from aotdist.program import PrimalIdx, Row, Slot
from aotdist.store.live import Live
from aotdist.store.values import Values
from aotdist.subclasses.protocol import Plain
from aotdist.torch_seam.autograd import CreationMeta
from aotdist.torch_seam.trees import pytree


@pytest.fixture
def values() -> Values:
    return Values(Live("cpu", {}, {}, {}), {})


class Point(NamedTuple):
    x: Any
    y: Any


SPEC = pytree.tree_structure({"a": [0, (1, None)], "b": collections.OrderedDict(c=Point(2, 3))})
VIEW = facts.ViewStep(torch.ops.aten.slice.Tensor, (0, 1, 3), (("step", 2),), grad=False, serial=7)
EXAMPLES = [
    *(None, True, 0, -1, 2**70, 1.5, -0.0, math.inf, -math.inf, 1 + 2j, complex(-0.0, math.inf), "text", ...),
    *((), (1, (2, 3)), [1, [2]], {1: "a", (2, 3): [None]}, frozenset({1, 2}), slice(1, None, 2)),
    *(torch.Size([2, 3]), torch.float8_e4m3fn, torch.device("meta"), torch.strided, torch.channels_last),
    *(Row([1, 2]), Slot("primal", "x", "._local_tensor"), Plain(torch.Size([2]), (1,), torch.int8)),
    *(VIEW, facts.ViewOfInput(PrimalIdx(1), (VIEW,)), facts.Inside("._a"), CreationMeta.MULTI_OUTPUT_NODE),
    *(torch.ops.aten.add.Tensor, torch.ops.higher_order.cond, operator.getitem, facts.data_of, SPEC),
    *(torch.Tensor.detach_, torch.Tensor, Point, aotdist.Settings(disabled_passes=frozenset({"bucket"}))),
]


@pytest.mark.parametrize("value", EXAMPLES)
def test_it_comes_back(value: Any, values: Values) -> None:
    text = json.dumps(values.written(value, "it"), allow_nan=False)
    found = values.read(json.loads(text))
    assert type(found) is type(value) and repr(found) == repr(value) and found == value


def test_not_a_number_comes_back(values: Values) -> None:
    assert math.isnan(values.read(values.written(math.nan, "it")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
@pytest.mark.parametrize("size", [(), (0, 2), (3, 2)])
def test_constants_of_graphs_come_back(dtype: torch.dtype, size: tuple[int, ...], values: Values) -> None:
    tensor = torch.randn(size).to(dtype).t() if len(size) == 2 else torch.randn(size).to(dtype)
    found = values.read(json.loads(json.dumps(values.written(tensor, "it"))))
    assert found.dtype == dtype and torch.equal(found, tensor)


@pytest.mark.parametrize("value", [object(), lambda: 0, print, {"a": {1, 2}}, (torch.Generator(),)])
def test_what_has_no_name_is_not_written(value: Any, values: Values) -> None:
    with pytest.raises(aotdist.UnsupportedProgram, match="`x` holds a .*, which an artifact cannot hold"):
        values.written(value, "`x`")


@pytest.mark.parametrize(
    "json_",
    [
        {"is": "eval", "of": "print()"},
        {"is": 3},
        {"no": "kind"},
        {"is": "function", "name": "system"},
        {"is": "operator", "name": "aten.no_such.default"},
        {"is": "operator", "name": "__class__.__name__.x"},
        {"is": "higher_order", "name": "__class__"},
        {"is": "torch", "name": "load"},
        {"is": "tensor", "dtype": "load", "size": [1], "device": "cpu", "base64": "AAAA"},
        {"is": "tree", "class": "os.system", "context": None, "of": []},
        {"is": "Slot", "role": "primal"},
        {"is": "Slot", "role": "primal", "path": "x", "more": 1},
        {"is": "packed", "code": "missing", "metadata": "", "pointers": {}, "blocks": {}},
        {"is": "device", "name": "tape:0"},
    ],
    ids=str,
)
def test_what_we_never_write_is_not_read(json_: Any, values: Values) -> None:
    with pytest.raises(aotdist.BadArtifact):
        values.read(json_)


@pytest.mark.parametrize(
    "json_",
    [
        {"is": "class", "module": "subprocess", "name": "Popen"},
        {"is": "class", "module": "os", "name": "system"},
        {"is": "class", "module": "not_imported", "name": "Tensor"},
        {"is": "class", "module": "torch", "name": "Tensor.__class__"},
    ],
    ids=str,
)
def test_only_classes_of_tensors_and_tuples_are_looked_up(json_: Any, values: Values) -> None:
    with pytest.raises(aotdist.SignatureMismatch):
        values.read(json_)
