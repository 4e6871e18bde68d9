"""What kernels call, as the source that goes before them."""

HELPERS = '''\
@triton.jit
def greater(a, b):
    """The greater of two numbers; of one that is none, that."""
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def less(a, b):
    """The lesser of two numbers; of one that is none, that."""
    return tl.where((a < b) | (a != a), a, b)


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
def one_more_exponential(total, greatest, value):
    """A sum of exponentials of what values are less than the greatest so far, and that: with another."""
    now = tl.maximum(greatest, value, propagate_nan=tl.PropagateNan.ALL)
    kept = tl.where(greatest == now, total, total * tl.exp(greatest - now))
    return kept + tl.where(value == now, 1.0, tl.exp(value - now)), now


@triton.jit
def all_exponentials(total, greatest):
    """The sum of all lanes; no number where the greatest is infinite, as what is less than it is none."""
    most = tl.reduce(greatest, 1, greater)[:, None]
    total = tl.sum(total * tl.exp(greatest - most), 1)[:, None]
    return tl.where(most - most == 0, total, float("nan"))


@triton.jit
def one_more_deviation(squares, mean, count, value):
    """A sum of squares of what values are off their mean, the mean and their number, with another value."""
    off = value - mean
    mean += off / (count + 1)
    return squares + off * (value - mean), mean, count + 1


@triton.jit
def all_deviations(squares, mean, count):
    """The sum of all lanes, off the mean of all."""
    off = mean - tl.sum(mean * count, 1)[:, None] / tl.sum(count, 1)[:, None]
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
