"""Random programs with numbers and sizes that depend on data."""

import torch
from hypothesis import given

from tests.semantics.programs import programs
from tests.semantics.searching import compare, search_of_classes, timeout, words
from tests.semantics.vocabulary import ARITHMETIC, OF_DATA, RESHAPES, VIEWS, WRITES, WRITES_OF_DATA

pytestmark = timeout

WORDS = words(values=(ARITHMETIC, VIEWS, OF_DATA, OF_DATA), writes=(*WRITES, *WRITES_OF_DATA))


@search_of_classes
@given(programs(WORDS))
def test_with_gradients(program):
    compare(program)


@search_of_classes
@given(programs(WORDS))
def test_under_no_grad(program):
    compare(program, torch.no_grad)


@search_of_classes
@given(programs(words(values=WORDS.values, writes=(*WORDS.writes, *RESHAPES), share_memory=True)))
def test_inputs_that_share_memory(program):
    compare(program)


@search_of_classes
@given(programs(WORDS))
def test_with_symbolic_sizes(program):
    compare(program, dynamic=True)
