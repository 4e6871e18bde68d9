"""What an artifact holds comes back as it was; what is no kind of ours is refused, on both ways."""

import collections
import json
import math
import operator
import sys
import types
from typing import Any, NamedTuple

import pytest
import torch

import aotdist
from aotdist import facts
from aotdist.artifacts.live import NOTHING_LIVE, Live
from aotdist.artifacts.values import Values
from aotdist.program import PrimalIdx, Row, Slot
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
    *(torch.Tensor.detach_, torch.Tensor, Point),
]


@pytest.mark.parametrize("value", EXAMPLES)
def test_it_comes_back(value: Any, values: Values) -> None:
    text = json.dumps(values.written(value, "it"), allow_nan=False)
    found = values.read(json.loads(text))
    assert type(found) is type(value) and repr(found) == repr(value) and found == value


def test_settings_come_back_but_for_the_cache_which_is_the_loaders(values: Values) -> None:
    settings = aotdist.Settings(disabled_passes=frozenset({"bucket"}), cache_folder="/theirs", cache_bytes=1)
    found = values.read(json.loads(json.dumps(values.written(settings, "it"))))
    assert found == aotdist.Settings(disabled_passes=frozenset({"bucket"}))


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
        {"is": "operator", "name": "aten.from_file.default"},
        {"is": "operator", "name": "aten.save.default"},
        {"is": "operator", "name": "aten.manual_seed.default"},
        {"is": "higher_order", "name": "call_torchbind"},
        {"is": "tensor", "dtype": "uint8", "size": [10**12], "device": "cpu", "base64": "AAAA"},
        {"is": "size", "of": [2**63]},
        {"is": "Slot", "role": "primal", "path": "x\nexit()", "inner": ""},
        {"is": "Slot", "role": "primal", "path": "x", "inner": "._a()"},
        {"is": "Slot", "role": "primal", "path": "x", "inner": ".__class__"},
        {"is": "Slot", "role": "size", "path": "exit()", "inner": ""},
        {"is": "Inside", "path": ".a\n    exit()"},
        {"is": "Check", "error": "exec", "message": "exit()"},
        {"is": "Check", "error": "SystemExit", "message": None},
        {"is": "Fresh", "value": "0"},
        {"is": "Fresh", "value": True},
        {"is": "IsInput", "input": -1},
        {"is": "Partial", "reduce_op": "x"},
        {"is": "Settings", "cache_bytes": "1"},
        {"is": "place", "name": "x"},
        {"is": "tree", "class": "builtins.list", "context": {"is": "function", "name": "add"}, "of": []},
    ],
    ids=str,
)
def test_what_we_never_write_is_not_read(json_: Any, values: Values) -> None:
    with pytest.raises(aotdist.BadArtifact):
        values.read(json_)


def step(**fields: Any) -> dict[str, Any]:
    plain = {"args": [], "kwargs": [], "pick": None, "grad": True, "serial": 0}
    return {"is": "ViewStep", "op": {"is": "operator", "name": "aten.t.default"}, **plain, **fields}


@pytest.mark.parametrize(
    "fields",
    [
        {"kwargs": [["x=exit()", 1]]},
        {"pick": "0"},
        {"pick": 1.0},
        {"serial": "0"},
        {"args": [{"is": "function", "name": "add"}]},
        {"op": {"is": "class", "module": "torch", "name": "Tensor"}},
        {"op": "exit"},
        {"grad": "True"},
    ],
    ids=str,
)
def test_what_is_printed_is_of_its_type(fields: dict[str, Any], values: Values) -> None:
    values.read(step())
    with pytest.raises(aotdist.BadArtifact, match="`ViewStep"):
        values.read(step(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": json.dumps({"name": "../../evil"})},
        {"metadata": json.dumps([])},
        {"metadata": "{"},
        {"pointers": {"is": "dict", "of": [["in_0", "*fp32; system()"]]}},
        {"pointers": {"is": "dict", "of": [["a b", "*fp32"]]}},
        {"blocks": {"is": "dict", "of": [["BLOCK", "8"]]}},
    ],
    ids=str,
)
def test_a_kernel_has_names_that_are_names(fields: dict[str, Any]) -> None:
    """They become those of files, and stand in the C of Triton's launcher."""
    values = Values(NOTHING_LIVE, {"code": b"machine code"})
    kernel = {
        "is": "packed",
        "code": "code",
        "metadata": json.dumps({"name": "kernel_0"}),
        "pointers": {"is": "dict", "of": [["in_0", "*fp32"]]},
        "blocks": {"is": "dict", "of": [["BLOCK", 8]]},
        "registers": 8,
    }
    assert values.read(kernel).blocks == {"BLOCK": 8}
    with pytest.raises(aotdist.BadArtifact):
        values.read(kernel | fields)


def test_looking_for_a_class_imports_nothing(values: Values) -> None:
    """Lazy modules import what `getattr` asks them for."""
    lazy = types.ModuleType("a_lazy_module")
    lazy.__getattr__ = lambda name: pytest.fail(f"{name} is imported")  # type: ignore[method-assign]
    sys.modules["a_lazy_module"] = lazy
    try:
        with pytest.raises(aotdist.SignatureMismatch):
            values.read({"is": "class", "module": "a_lazy_module", "name": "Tensor"})
    finally:
        del sys.modules["a_lazy_module"]


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
