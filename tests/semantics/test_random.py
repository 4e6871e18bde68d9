"""Random numbers: eager's own, bit for bit, and the generator left where eager leaves it."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import aotdist
from aotdist.errors import UnsupportedProgram
from tests.semantics.observation import Scene, same_as_eager


def leaf(*size: int) -> torch.Tensor:
    return torch.randn(*(size or (6, 5)), requires_grad=True)


DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout of what is transposed": lambda x: F.dropout(x.t(), 0.5),
    "dropout of what has gaps": lambda x: F.dropout(x[:, ::2] * 1, 0.5),
    "dropout in place": lambda x: F.dropout(x * 2, 0.5, inplace=True),
    "dropout of whole channels": lambda x: F.dropout1d(x[None], 0.5),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
    "rand_like": lambda x: torch.rand_like(x) * x,
    "rand_like of what is transposed": lambda x: torch.rand_like(x.t()) * x.t(),
    "randn": lambda x: torch.randn(6, 5) * x,
    "randint": lambda x: x[torch.randint(0, 6, (3,))],
    "randperm": lambda x: x[torch.randperm(6)],
    "bernoulli": lambda x: torch.bernoulli(x.detach().sigmoid()) * x,
    "bernoulli of what is transposed": lambda x: torch.bernoulli(x.detach().sigmoid().t()),
    "bernoulli in place, with gaps": lambda x: x.detach().clone()[:, ::2].bernoulli_(0.3),
    "bernoulli in place, by probabilities": lambda x: torch.empty(5, 6).t().bernoulli_(x.detach().sigmoid()),
    "normal": lambda x: torch.normal(x.detach(), 1.0),
    "multinomial": lambda x: torch.multinomial(x.detach().softmax(-1), 2),
    "several": lambda x: F.dropout(F.dropout(x, 0.1) + torch.rand_like(x), 0.2),
    "drawn and not used": lambda x: (torch.rand(3), x * 2)[1],
}


@pytest.mark.parametrize("around", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("name", DRAWS)
def test_each_kind_of_draw(name, around):
    same_as_eager(lambda: Scene(DRAWS[name], (leaf(),)), calls=3, around=around)


FILLS = {
    "uniform_": (),
    "normal_": (),
    "exponential_": (),
    "random_": (0, 10),
    "bernoulli_": (),
    "geometric_": (0.5,),
}


@pytest.mark.parametrize("make", [lambda: torch.empty(4, 3).t(), lambda: torch.empty(3, 8)[:, ::2]])
@pytest.mark.parametrize("fill", FILLS)
def test_draws_into_an_argument(fill, make):
    def build():
        return Scene(lambda x: getattr(x, fill)(*FILLS[fill]).sum(), (make().zero_(),))

    same_as_eager(build, calls=2)


def test_channels_last_dropout():
    def build():
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.5)).to(memory_format=torch.channels_last)
        return Scene(model, (torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last),))

    same_as_eager(build, calls=2)


def test_a_transformer_layer():
    def build():
        return Scene(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), (torch.randn(2, 5, 4),))

    same_as_eager(build, calls=2)


def test_compiling_draws_nothing():
    program = aotdist.compile(lambda x: F.dropout(x, 0.5), backend="fx")
    x = leaf()
    torch.manual_seed(7)
    first = program(x)
    torch.manual_seed(7)
    assert torch.equal(first, program(x))


def _rewound(x, last=F.dropout):
    """Two draws, the first of them again, and another one from where that left the generator."""
    state = torch.get_rng_state()
    first, second = F.dropout(x), F.dropout(x)
    torch.set_rng_state(state)
    return first + second + F.dropout(x) + last(x)


SEEDINGS = {
    "manual_seed": lambda x: (torch.manual_seed(0), F.dropout(x))[1],
    "manual_seed after a draw": lambda x: (F.dropout(x), torch.manual_seed(0), F.dropout(x))[2],
    "a method of the generator": lambda x: (torch.default_generator.manual_seed(5), F.dropout(x))[1],
    "a seed that nothing uses": lambda x: (torch.manual_seed(0), x * 2)[1],
    "a draw again, and then a new one": lambda x: _rewound(x, lambda x: x * torch.rand(5)),
    "a draw again, and none after it": lambda x: _rewound(x, torch.relu),
    "set_rng_state": lambda x: (F.dropout(x), torch.set_rng_state(torch.get_rng_state()), torch.seed(), x)[3],
}


@pytest.mark.parametrize("name", SEEDINGS)
def test_seeding_inside_is_refused_and_undone(name):
    x = leaf()
    before = torch.get_rng_state()
    with pytest.raises(UnsupportedProgram, match="sets the state of the random generator"):
        aotdist.compile(SEEDINGS[name], backend="fx")(x)
    assert torch.equal(torch.get_rng_state(), before)


def test_draws_again():
    same_as_eager(lambda: Scene(_rewound, (leaf(),)), calls=2)


def test_gradients_of_checkpoints_inside():
    """Each draws, and the first is computed again when the last one was."""

    def build():
        blocks = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5)) for _ in range(3)))

        def program(x):
            out = x
            for block in blocks:
                out = checkpoint(block, out, use_reentrant=False)
            return torch.autograd.grad(out.sum(), list(blocks.parameters())), F.dropout(x)

        return Scene(program, (leaf(),))

    same_as_eager(build, calls=2)


def test_a_fork_of_the_generator_is_refused():
    def program(x):
        with torch.random.fork_rng():
            return F.dropout(x)

    with pytest.raises(UnsupportedProgram, match="sets the state of the random generator"):
        aotdist.compile(program, backend="fx")(leaf())


@pytest.mark.parametrize("checkpoints", [False, True])
def test_other_threads_draw_while_a_program_is_captured(checkpoints):
    """Theirs are other numbers than the program's; a checkpoint meets its own again."""
    stop, drawn = threading.Event(), list[torch.Tensor]()

    def draw() -> None:
        while not stop.is_set():
            drawn.append(torch.rand(8))

    def program(x):
        return checkpoint(F.dropout, x, use_reentrant=False) * 2 if checkpoints else F.dropout(x) * 2

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for _ in range(3):
            compiled, x = aotdist.compile(program, backend="fx"), leaf()
            y = compiled(x)
            y.sum().backward()
            assert torch.equal(y.detach(), x.detach() * x.grad)
    finally:
        stop.set()
        thread.join()
    assert len(drawn) == len({tuple(numbers.tolist()) for numbers in drawn})


def test_a_generator_of_the_users_moves_as_in_eager():
    def build():
        generator = torch.Generator().manual_seed(3)
        return Scene(lambda x: x * torch.rand(5, generator=generator), (leaf(),))

    same_as_eager(build, calls=3)


def test_a_generator_among_the_arguments():
    """In a container, too; each is a compilation of its own."""

    def program(x, noise, sources):
        noise.normal_(generator=sources["noise"])
        return (x + noise) * torch.rand(5, generator=sources["mask"])

    def build():
        one, other = (torch.Generator().manual_seed(seed) for seed in (3, 4))
        layouts = ((one, other), (other, one), (one, one), (one, other))
        return [
            Scene(program, (leaf(), torch.zeros(6, 5), {"noise": noise, "mask": mask}))
            for noise, mask in layouts
        ]

    same_as_eager(build, compilations=3)


def test_a_compiler_of_the_users_is_given_a_generator():
    def build():
        generator = torch.Generator().manual_seed(3)
        return Scene(lambda x: x * torch.rand(5, generator=generator), (leaf(),))

    same_as_eager(build, calls=2, backend=lambda gm, examples: gm.forward)


@pytest.mark.parametrize("again", [False, True])
def test_the_default_generator_may_be_named(again):
    """What a checkpoint computes again has the numbers that it had."""

    def drawn(x):
        return x.sin() * torch.rand(5, generator=torch.default_generator)

    def build():
        return Scene(lambda x: checkpoint(drawn, x, use_reentrant=False) if again else drawn(x), (leaf(),))

    same_as_eager(build, calls=3)


def test_a_generator_of_the_programs_own_is_refused():
    """It would be made once, at capture, and go on from there."""

    def program(x):
        return x * torch.rand(5, generator=torch.Generator().manual_seed(3))

    with pytest.raises(UnsupportedProgram, match="a random generator that it makes itself"):
        aotdist.compile(program, backend="fx")(leaf())
