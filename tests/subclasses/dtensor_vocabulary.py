"""What random programs over DTensors are made of; see `tests/semantics/vocabulary.py`."""

from tests.semantics.programs import Vocabulary

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

ARITHMETIC = (
    "{a} * {b}",
    "{a} + {b}",
    "{a} - 1.5",
    "{a}.sin()",
    "{a}.relu()",
    "{a}.sum(0)",
    "{a}.mean(1)",
    "{a}.mean()",
    "{a}.clone()",
    "{a}.contiguous()",
    "{a}.softmax(-1)",
    "{a}.softmax(0)",
    "{a}.cumsum(0)",
    "{a} > 0",
    "{a}.double()",
    "{a} @ {b}",
    "{a}.transpose(0, 1) @ {b}",
    "torch.cat([{a}, {b}])",
    "torch.where({a} > 0, {a}, {b})",
    "torch.zeros_like({a})",
    "F.layer_norm({a}, {a}.shape[-1:])",
    "checkpoint(lambda x: x.sin() * x, {a}, use_reentrant=False)",
    "torch._foreach_mul([{a}, {b}], 2.0)[1]",
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
    "{a}.t()",
    "{a}.view(-1)",
    "{a}.reshape(-1)",
    "{a}[0]",
    "{a}[1:]",
    "{a}[..., 1:]",
    "{a}[:, None]",
    "{a}.unsqueeze(0)",
    "{a}.squeeze()",
    "{a}.expand(2, *{a}.shape)",
    "{a}.split(2)[0]",
    "{a}.chunk(2, -1)[1]",
    "{a}.detach()",
    "{a}.view_as({a})",
    "{a}.data",
)

WRITES = (
    "{a}.add_(1)",
    "{a}.mul_({b})",
    "{a}.add_({b}, alpha=2)",
    "{a}.zero_()",
    "{a}.copy_({b})",
    "{a}[0] = 2.5",
    "{a}.relu_()",
    "{a}.sin_()",
    "{a}.fill_(0.5)",
    "{a}.detach().mul_(2)",
    "{a}.t().mul_(3)",
    "{a}.to_local().mul_(2)",
    "{a}.clamp_(min=0)",
    "torch._foreach_add_([{a}], 1.0)",
)

VOCABULARY = Vocabulary(
    inputs=INPUTS, values=(ARITHMETIC, PLACED, VIEWS), writes=WRITES, leave_out=True, max_statements=6
)
