"""Numbers that a traced program meets: sizes, counters, scalars, and what depends on data.

Promises: a number is a constant, a symbol that each call binds, or refused with its source line;
whatever was assumed of one becomes a guard that each call tests.

Symbolic sizes
--------------
With `dynamic=True`, or a marked dimension, the trace runs on fakes whose sizes are symbols
(`trace/numbers/symbols.py`), and facts and plans are expressed in them (`sizes.py`): a view's arguments, the
strides of a result, the parts of a span. A graph never computes a size: each expression that it needs is an
argument of role `size`. So a compiler sees plain symbols, and what the backward needs is computed again from
the symbols instead of saved. The printed call reads the symbols off the tensors, tests the guards, and
evaluates the expressions of the plan.

A stride is a product of the tensor's own sizes where it can be, and otherwise a symbol, too, which each call
reads off the tensor: `ids[:, :-1]` has a stride that only the base's size says. Strides of 0 and 1 are
numbers.

A backward that is compiled at once has its guards tested before the forward; one that is compiled later (for
some of the results, or to be differentiated) tests those that it adds before it runs. Strides are compared by
the sizes of the example, so a layout never becomes a guard by being looked at. Sizes of 0 and 1 are numbers;
inputs that share memory keep their sizes; if a PyTorch operator does not take symbols, the program is traced
again with numbers, with a warning. Guards are simplified: `prove_guards` (`runtime/guards.py`) proves that
nothing was lost.

With `dynamic="auto"` a program's second shape opens the dimensions in which it differs from artifacts of the
same modes (`runtime/signature.py`). The call is traced with numbers and with symbols, as for numbers that a
program counts in; if both are the same operators and constants, but for slices that take all of a dimension,
the one with symbols is compiled. Ranks decide by themselves: what they agree on holds no local sizes, so both
programs are the same to the others. So are numbers that have changed, among the arguments and in the places
where the program finds them; one that cannot be a symbol is a constant from then on.

Numbers that depend on data
---------------------------
How many elements a mask selects is not known before a call, and neither is what `count.item()` returns. A
program that needs such a number fails its first trace, and is traced once more, on fakes that give each a
symbol without a value (`trace/numbers/unbacked.py`). These numbers are no arguments of graphs: a node reads
each off a tensor, nodes compute what follows from it, and none is ever saved. The backward reads a number
again off a tensor that is saved, so partitions know nothing of them; of a tensor that is read by `item()` a
copy is taken, which nobody can write. Floats are computed by the operations that Python made, one node each,
since an expression of theirs may round otherwise.

Where a library asks about such a number (is there nothing to do? is there one element, to be expanded?) it is
answered for many elements, as if it were two or more; the user's own questions are refused, by the line that
asks (`origins.py`). What is said to hold of numbers (`torch._check`, and that two sizes are equal) is
checked by nodes. What a call needs outside of the graph, to make views, or to return or keep a number, the
graph returns as tensors of one element (`Facts.numbers`), and the printed call reads these. A number that no
operator takes is not read in the graph at all: it returns the tensor. Floats that Python computes become
nodes only if an operator takes them; outside, the printed call computes them again, by the same functions
(`NumberStep`). A backward that keeps a number keeps the tensor, and notes how the number follows from it
(`EffectLog.numbers`).
"""
