"""Random programs over the tensor classes that aotdist knows, see `test_generated.py`."""

import torch
from hypothesis import given

from tests.semantics.programs import programs
from tests.semantics.searching import compare, search, timeout, words
from tests.semantics.vocabulary import (
    ARITHMETIC,
    ATTRIBUTE_WRITES,
    CLASSES,
    FUNCTION_CALLS,
    RECLASSINGS,
    VIEWS,
    WRITES,
)

pytestmark = timeout

OF_CLASSES = words(
    inputs=CLASSES,
    values=(ARITHMETIC, VIEWS, FUNCTION_CALLS, RECLASSINGS),
    writes=(*WRITES, *ATTRIBUTE_WRITES),
)


@search
@given(programs(OF_CLASSES))
def test_classes_that_hear_of_functions(program):
    compare(program)


@search
@given(programs(OF_CLASSES))
def test_classes_that_hear_of_functions_under_no_grad(program):
    compare(program, torch.no_grad)
