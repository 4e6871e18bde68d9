"""What kernels call, as the source that goes before them."""

HELPERS = '''\
@triton.jit
def greater(a, b):
    """The greater of two numbers; of one that is none, that."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def less(a, b):
    """The lesser of two numbers; of one that is none, that."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def product(a, b):
    """The product of two numbers."""
    return a * b


@triton.jit
def remainder(number, by):
    """What `by` leaves of a number, never below 0; Triton's own has the number's sign."""
    left = number % by
    return tl.where(left < 0, left + by, left)


@triton.jit
def quotient(number, by):
    """How often `by` is in a number, rounded down; Triton's own is rounded towards 0."""
    return (number - remainder(number, by)) // by


@triton.jit
def more_exponentials(total, greatest, values):
    """Sums of exponentials of what values are less than the greatest so far, and that: with a block of more.

    A lane takes neighbours, which one thread has: an exponential for each, and one for the sum so far.
    """
    parts = tl.reshape(values, [values.shape[0], total.shape[1], values.shape[1] // total.shape[1]])
    now = greater(greatest, tl.reduce(parts, 2, greater))
    base = tl.where(now == float("-inf"), 0, now)
    return total * tl.exp(greatest - base) + tl.sum(tl.exp(parts - base[:, :, None]), 2), now


@triton.jit
def all_exponentials(total, greatest):
    """The sum of all lanes; no number where the greatest is infinite, as what is less than it is none."""
    most = tl.reduce(greatest, 1, greater)[:, None]
    total = tl.sum(total * tl.exp(greatest - most), 1)[:, None]
    return tl.where(most - most == 0, total, float("nan"))


@triton.jit
def one_more_deviation(squares, mean, value, turn):
    """A sum of squares of what values are off their mean, and the mean: with another value, the `turn`-th."""
    off = value - mean
    mean += off * (tl.full([1, 1], 1, value.dtype) / turn)
    return squares + off * (value - mean), mean


@triton.jit
def all_deviations(squares, mean, size):
    """The sum of all lanes, off the mean of all `size` values, of which the first lanes may have one more."""
    after = size - tl.arange(0, squares.shape[1])[None, :]
    count = ((after + squares.shape[1] - 1) // squares.shape[1]).to(squares.dtype)
    off = mean - tl.sum(mean * count, 1)[:, None] / size
    return tl.sum(squares + count * off * off, 1)[:, None]


@triton.jit
def random_word(seed, block, which):
    """One of the four words of a block of the stream of a seed: Philox-4x32-10."""
    low, high = (block & 0xFFFFFFFF).to(tl.uint32), (block >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    a, b, c, d = tl.philox(seed, low, high, zero, zero)
    word = tl.where(which < 2, tl.where(which == 0, a, b), tl.where(which == 2, c, d))
    return word.to(tl.int64)
'''
