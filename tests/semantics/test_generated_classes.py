"""Random programs over the tensor classes that aotdist knows, see `test_generated.py`."""

import pytest
from hypothesis import given

from tests.semantics.meshes import mesh
from tests.semantics.programs import programs
from tests.semantics.searching import compare, search_of_classes, timeout, words
from tests.semantics.vocabulary import (
    ARITHMETIC,
    EIGHT_BITS,
    NARROW_VIEWS,
    NARROW_WRITES,
    NESTED,
    PLACEMENTS,
    PRODUCTS_OF_8_BITS,
    PRODUCTS_OF_SPARSE,
    SPARSE,
    SQUARE_NESTED,
    VIEWS,
    WRITES,
)

pytestmark = [timeout, pytest.mark.usefixtures("mesh")]
__all__ = ["mesh"]


@search_of_classes
@given(
    programs(
        words(inputs=EIGHT_BITS, squares=(), values=(PRODUCTS_OF_8_BITS, NARROW_VIEWS), writes=NARROW_WRITES)
    )
)
def test_8_bits(program):
    compare(program)


@search_of_classes
@given(
    programs(
        words(inputs=SPARSE, squares=(), values=(PRODUCTS_OF_SPARSE, NARROW_VIEWS), writes=NARROW_WRITES)
    )
)
def test_2_4_sparse(program):
    compare(program)


@search_of_classes
@given(programs(words(inputs=NESTED, squares=SQUARE_NESTED, values=(ARITHMETIC, VIEWS), writes=WRITES)))
def test_nested_wrappers(program):
    compare(program, mixes=True)


@search_of_classes
@given(
    programs(
        words(inputs=NESTED, squares=SQUARE_NESTED, values=(ARITHMETIC, VIEWS, PLACEMENTS), writes=WRITES)
    )
)
def test_wrappers_taken_apart(program):
    compare(program, mixes=True)
