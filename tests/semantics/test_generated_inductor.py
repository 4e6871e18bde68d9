"""Random programs under Inductor: they differ from eager by rounding only, see `test_generated.py`."""

from collections.abc import Mapping
from contextlib import nullcontext

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.semantics.observation import Around
from tests.semantics.programs import Vocabulary, programs
from tests.semantics.searching import EVERYTHING, SWEEP, compare, words
from tests.semantics.test_generated_data import WORDS as OF_DATA
from tests.semantics.vocabulary import (
    ARITHMETIC,
    COMPLEX,
    COMPLEX_VIEWS,
    COMPLEX_WRITES,
    MOVES,
    RESHAPES,
    SQUARE_COMPLEX,
    SQUARE_WRAPPERS,
    VIEWS,
    WRAPPERS,
    WRITES,
)

WORDS: Mapping[str, tuple[Vocabulary, Around]] = {
    "with gradients": (EVERYTHING, nullcontext),
    "under no_grad": (EVERYTHING, torch.no_grad),
    "inputs that share memory": (words(share_memory=True, other_layouts=True), nullcontext),
    "writes of metadata and storage": (words(writes=(*WRITES, *RESHAPES, *MOVES)), nullcontext),
    "some results": (words(leave_out=True), nullcontext),
    "wrappers": (words(inputs=WRAPPERS, squares=SQUARE_WRAPPERS, share_memory=True), nullcontext),
    "complex numbers": (
        words(
            inputs=COMPLEX,
            squares=SQUARE_COMPLEX,
            values=(ARITHMETIC, VIEWS, COMPLEX_VIEWS),
            writes=(*WRITES, *COMPLEX_WRITES),
        ),
        nullcontext,
    ),
    "sizes by data": (OF_DATA, nullcontext),
}

search = settings(
    # A C++ compiler takes seconds for each program, so one that fails is not made smaller.
    max_examples=60 if SWEEP else 4,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.mark.timeout(3600 if SWEEP else 120)
@pytest.mark.parametrize("name", WORDS)
@search
@given(data=st.data())
def test_differs_by_rounding_only(name: str, data: st.DataObject) -> None:
    vocabulary, around = WORDS[name]
    program = data.draw(programs(vocabulary))
    compare(program, around, mixes=name == "wrappers", backend="inductor", rounded=True)
