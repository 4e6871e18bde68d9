"""Names for objects, and source that is loaded from memory."""

import pytest

from aotdist.codegen.python_source import Bindings, identifier, load_function


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("aten.add.Tensor", "aten_add_Tensor"),
        ("cuda:0", "cuda_0"),
        ("<lambda>", "_lambda"),
        ("2d", "_2d"),
        ("", "value"),
    ],
)
def test_identifiers(text: str, name: str):
    assert identifier(text) == name
    assert name.isidentifier()


def test_one_object_has_one_name():
    bindings = Bindings()
    first, second = object(), object()
    assert bindings.name(first, "thing") == "thing"
    assert bindings.name(second, "thing") == "thing_1"
    assert bindings.name(first, "other") == "thing"
    assert bindings.values() == {"thing": first, "thing_1": second}


def test_reserved_names_are_left_free():
    bindings = Bindings({"thing"})
    assert bindings.reserve("thing") == "thing_1"
    assert bindings.name(object(), "thing") == "thing_2"


def test_source_is_loaded_with_what_is_bound():
    loaded = load_function("def run(x):\n    return x + amount\n", "run", {"amount": 3}, "test")
    assert loaded(4) == 7
