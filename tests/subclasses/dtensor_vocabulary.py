"""What random programs over DTensors are made of; see `tests/semantics/vocabulary.py`."""

from tests.semantics.programs import Vocabulary
from tests.semantics.vocabulary import COMMON_ARITHMETIC, COMMON_VIEWS, COMMON_WRITES

INPUTS = (
    "leaf((4, 6), S0)(row())",
    "leaf((4, 6), S1)(row())",
    "leaf((4, 6), R)(row())",
    "leaf((5, 3), S0)(row())",
    "leaf((5, 3), S1)(row())",
    "leaf((4, 6), P)(row())",
    "non_leaf((4, 6), S0)(row())",
    "non_leaf((5, 3), S1)(row())",
    "non_leaf((4, 6), P)(row())",
    "spread(row(), (4, 6), S0)",
    "spread(row(), (5, 3), R)",
    "spread(row(), (4, 6), P)",
    "spread(row(), (6, 4), S0).t()",
    "mine((2, 6)).requires_grad_()",
    "mine((2, 6))",
)
"""Even and uneven shards, whole ones, partial sums, and each rank's own tensors beside them."""
SQUARES = (
    "leaf((4, 4), S0)(row())",
    "leaf((4, 4), S1)(row())",
    "non_leaf((4, 4), R)(row())",
    "non_leaf((4, 4), S0)(row()).t()",
    "non_leaf((4, 4), P)(row())",
    "spread(row(), (4, 4), S1)",
    "spread(row(), (4, 4), S0).t()",
    "mine((4, 4)).requires_grad_() * 1.5",
)

ARITHMETIC = (
    *COMMON_ARITHMETIC,
    "{a}.mean(1)",
    "{a}.softmax(0)",
    "{a} @ {b}",
    "Scaled.apply({a})",
)

PLACED = (
    "{a}.redistribute(placements=[R])",
    "{a}.redistribute(placements=[S0])",
    "{a}.redistribute(placements=[S1])",
    "{a}.redistribute(placements=[R], async_op=True) * 1",
    "{a}.to_local()",
    "{a}.to_local(grad_placements=[P])",
    "{a}.full_tensor()",
    "DTensor.from_local({a}, row(), [S0])",
    "DTensor.from_local({a}, row(), [R])",
    "DTensor.from_local({a}, row(), [P])",
    "DTensor.from_local({a}, row(), [S1], grad_placements=[S1])",
)
"""Given other placements, taken out, put in."""

VIEWS = (
    *COMMON_VIEWS,
    "{a}[..., 1:]",
    "{a}.expand(2, *{a}.shape)",
)

WRITES = (
    *COMMON_WRITES,
    "{a}.t().mul_(3)",
    "{a}.to_local().mul_(2)",
)

VOCABULARY = Vocabulary(
    inputs=INPUTS,
    squares=SQUARES,
    values=(ARITHMETIC, PLACED, VIEWS),
    writes=WRITES,
    leave_out=True,
    max_statements=6,
)
