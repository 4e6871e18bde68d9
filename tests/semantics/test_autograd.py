"""Gradients: which, when, how often, through hooks, custom functions and checkpoints."""

import contextlib
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import aotdist
from aotdist.errors import UnsupportedProgram
from aotdist.subclasses.protocol import plain_tensors
from tests.semantics.functions import Alias, Identity
from tests.semantics.observation import Scene, same_as_eager


def leaf(*size: int, **options) -> torch.Tensor:
    return torch.randn(*(size or (3, 4)), requires_grad=True, **options)


def compiled(fn):
    return aotdist.compile(fn, backend="fx")


def both(fn, use):
    """What `use` returns for the eager and for the compiled function."""
    return use(fn), use(compiled(fn))


def assert_equal_grads(fn, use):
    eager, ours = both(fn, use)
    for a, b in zip(eager, ours, strict=True):
        assert (a is None) == (b is None), (a, b)
        assert a is None or torch.equal(a, b)


# --- how often, and from where -------------------------------------------------------------------


def test_retained_graphs_may_be_used_again():
    def use(call):
        x = torch.arange(4.0, requires_grad=True)
        y = call(x)
        for _ in range(2):
            y.sum().backward(retain_graph=True)
        y.sum().backward()
        return [x.grad]

    assert_equal_grads(lambda x: x.exp().sin(), use)


def test_a_graph_that_was_not_retained_may_not():
    y = compiled(lambda x: x.exp().sin())(leaf())
    y.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


def test_two_calls_before_their_backwards():
    def use(call):
        x = torch.arange(4.0, requires_grad=True)
        first, second = call(x), call(x * 2)
        second.sum().backward()
        first.sum().backward()
        return [x.grad]

    assert_equal_grads(lambda x: x.exp() * x, use)


def test_grad_with_respect_to_some_inputs():
    def use(call):
        a, b = torch.ones(3, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)
        return torch.autograd.grad(call(a, b).sum(), b)

    assert_equal_grads(lambda a, b: (a * b).exp(), use)


def test_inputs_that_nothing_depends_on_get_no_gradient():
    def use(call):
        a, b = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        call(a, b).sum().backward()
        return [a.grad, b.grad]

    assert_equal_grads(lambda a, b: a * b.detach(), use)


def test_outputs_that_are_left_out_send_no_gradient():
    """None, not zeros: optimizers skip the one and step on the other."""

    def use(call):
        a, b = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        first, _ = call(a, b)
        first.sum().backward()
        return [a.grad, b.grad]

    assert_equal_grads(lambda a, b: (a * 2, b * 3), use)


def test_non_leaves_that_no_gradient_passes_get_none():
    """A foreach operator has one node for all its tensors; what no result depends on gets nothing from it."""

    def use(call):
        x, y = leaf(), leaf()
        return torch.autograd.grad(call(x * 1.5, y).sum(), (x, y), allow_unused=True)

    assert_equal_grads(lambda x, y: torch._foreach_mul([x, y], 2.0)[1], use)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@pytest.mark.parametrize("chosen", [(0,), (1,), (0, 1)])
def test_a_foreach_operator_sends_zeros_through_functions(chosen):
    """To a function of the user's it sends nothing, of which that makes zeros."""

    def program(x, y):
        twice = Twice.apply(x)
        return twice, torch._foreach_mul([twice, y], 2.0)[1]

    def use(call):
        x, y = leaf(), leaf()
        outs = call(x, y)
        torch.autograd.backward([outs[k].sum() for k in chosen])
        return [x.grad, y.grad]

    assert_equal_grads(program, use)


def test_outputs_that_are_left_out_do_not_poison_the_others():
    """Zero times infinity is no number; eager never computes it."""

    def use(call):
        x = torch.zeros(3, requires_grad=True)
        first, _ = call(x)
        first.sum().backward()
        return [x.grad]

    assert_equal_grads(lambda x: (x * 2, x.sqrt()), use)


def test_outputs_that_are_left_out_keep_the_sign_of_zero():
    def use(call):
        x = torch.zeros(3, requires_grad=True)
        call(x)[0].backward(torch.full((3,), -0.0))
        return [x.grad]

    eager, ours = both(lambda x: (x * 2, x * 3), use)
    assert torch.equal(eager[0].signbit(), ours[0].signbit())


@pytest.mark.parametrize("chosen", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)])
def test_every_choice_of_outputs(chosen):
    def program(a, b, c):
        shared = a * b
        return shared.sum(), (shared @ c).exp(), c.sin()

    def use(call):
        torch.manual_seed(0)
        inputs = [leaf(3, 3), leaf(3, 3), leaf(3, 3)]
        outputs = call(*inputs)
        torch.autograd.backward([outputs[k].sum() for k in chosen])
        return [x.grad for x in inputs]

    assert_equal_grads(program, use)


def test_a_choice_of_outputs_of_a_retained_graph():
    def use(call):
        x = torch.arange(1.0, 4.0, requires_grad=True)
        first, second = call(x)
        first.sum().backward(retain_graph=True)
        second.sum().backward(retain_graph=True)
        (first.sum() + second.sum()).backward()
        return [x.grad]

    assert_equal_grads(lambda x: (x.exp(), x.sin()), use)


def test_a_detached_output_is_no_end_of_the_backward():
    """The base of `y.detach()` requires grad, and nobody can send it any."""
    program = compiled(lambda x: ((y := x.exp()).sum(), y.detach()))
    program(leaf())
    (artifact,) = program.artifacts
    assert [str(slot) for slot in artifact.compilation.traced.graph.ins if slot.role == "tangent"] == [
        "out[0]"
    ]


TANGENTS = {
    "expanded": lambda: torch.ones(()).expand(3, 4),
    "transposed": lambda: torch.randn(4, 3).t(),
    "with gaps": lambda: torch.randn(3, 8)[:, ::2],
    "with an offset": lambda: torch.randn(6, 4)[3:],
}


@pytest.mark.parametrize("layout", TANGENTS)
def test_layouts_of_tangents(layout):
    def use(call):
        torch.manual_seed(0)
        x = leaf()
        call(x).backward(TANGENTS[layout]())
        return [x.grad]

    assert_equal_grads(lambda x: x.exp().cumsum(0), use)


class Contiguous(torch.autograd.Function):
    """Its backward needs pairs that lie side by side."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return torch.view_as_real(torch.view_as_complex(grad.contiguous()) * 1j)


BOUND_TO_STRIDES = {
    "group norm": (nn.GroupNorm(3, 6), (2, 6, 4, 4)),
    "group norm, transposed": (lambda x: F.group_norm(x, 3).mT, (2, 6, 4, 4)),
    "group norm beside": (lambda x: x + F.group_norm(x.exp(), 2), (2, 6, 4, 4)),
    "weight norm": (lambda x: torch._weight_norm(x, x.new_ones(2, 1, 1, 1), 0), (2, 6, 4, 4)),
    "distances": (lambda x: torch.cdist(x, x.exp()), (2, 6, 4)),
    "a function": (Contiguous.apply, (3, 4, 2)),
}
USES = {
    "expanded": lambda y: y.sum(),
    "permuted": lambda y: (y.transpose(0, -1).contiguous() @ torch.ones(y.shape[0], 3)).square().sum(),
    "channels last": lambda y: y.movedim(1, -1).reshape(-1).cumsum(0).sum(),
}


@pytest.mark.parametrize("way", USES)
@pytest.mark.parametrize("name", BOUND_TO_STRIDES)
def test_kernels_that_rely_on_strides(name, way):
    program, shape = BOUND_TO_STRIDES[name]

    def use(call):
        torch.manual_seed(0)
        x = torch.randn(shape, requires_grad=True)
        USES[way](call(x)).backward()
        return [x.grad]

    assert_equal_grads(program, use)


@pytest.mark.parametrize(
    "twist", [torch.conj, lambda t: torch.complex(-t.imag, t.real).conj()], ids=["conjugate", "both"]
)
def test_tangents_that_are_conjugated_lazily(twist):
    def use(call):
        torch.manual_seed(0)
        x = leaf()
        call(x).backward(twist(torch.randn(3, 4, dtype=torch.complex64)))
        return [x.grad]

    assert_equal_grads(lambda x: torch.complex(x, x * 2), use)


def test_tangents_that_are_negated_lazily():
    def use(call):
        x = torch.arange(3.0, requires_grad=True)
        call(x).backward(torch.randn(3, dtype=torch.complex64).conj().imag)
        return [x.grad]

    torch.manual_seed(0)
    eager = use(lambda x: x.exp())
    torch.manual_seed(0)
    assert torch.equal(eager[0], use(compiled(lambda x: x.exp()))[0])


# --- versions ------------------------------------------------------------------------------------


def test_a_saved_input_that_is_written_before_the_backward_is_an_error():
    a, b = leaf(3), leaf(3)
    y = compiled(lambda a, b: a * b)(a, b)
    with torch.no_grad():
        b.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_saved_output_that_is_written_before_the_backward_is_an_error():
    x = leaf(3)
    y = compiled(lambda x: x.exp())(x)
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_an_output_that_is_not_saved_may_be_written():
    def use(call):
        x = torch.arange(3.0, requires_grad=True)
        y = call(x)
        y.add_(1).mul_(2)
        y.sum().backward()
        return [x.grad]

    assert_equal_grads(lambda x: x * 3, use)


def test_a_buffer_that_the_program_itself_writes_is_no_error():
    model = compiled(nn.BatchNorm1d(4))
    y = model(leaf(5, 4))
    model(leaf(5, 4))
    y.sum().backward()


# --- hooks, custom functions, checkpoints --------------------------------------------------------


def test_tensor_hooks_inside():
    def program(x):
        y = x.exp()
        y.register_hook(lambda grad: grad * 10)
        return y.sin()

    same_as_eager(lambda: Scene(program, (leaf(),)), calls=2)


def test_hooks_on_inputs_and_outputs():
    def use(call):
        seen = []
        x = torch.arange(3.0, requires_grad=True)
        x.register_hook(lambda grad: seen.append(grad.clone()) or grad * 2)
        y = call(x)
        y.register_hook(lambda grad: seen.append(grad.clone()) or grad * 3)
        y.sum().backward()
        return [*seen, x.grad]

    assert_equal_grads(lambda x: x.exp(), use)


def test_module_hooks_inside():
    def build():
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        model[1].register_forward_hook(lambda module, args, output: output * 2)
        model[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        model[0].register_full_backward_hook(lambda module, grads, outputs: (grads[0] * 5,))
        return Scene(model, (leaf(3, 4),))

    same_as_eager(build, calls=2)


class Tripled(torch.autograd.Function):
    """Its backward is not its forward's derivative, so that nobody can make it up."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x * ctx.factor, None


def test_a_custom_function_keeps_its_backward():
    same_as_eager(lambda: Scene(lambda x: Tripled.apply(x.sin(), 3).exp(), (leaf(),)), calls=2)


class WritesItsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad.mul_(3)


@pytest.mark.parametrize("first", [True, False])
def test_a_gradient_is_written_that_others_read(first: bool) -> None:
    """Who reads it afterwards reads what was written; who did before does not."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x * 2
        parts = (WritesItsGradient.apply(y), y.sin())
        return (parts[first] + parts[not first]) * w

    same_as_eager(lambda: Scene(program, (leaf(), torch.randn(3, 4))), calls=2)


class Flat(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view(-1)

    @staticmethod
    def backward(ctx, grad):
        return grad.view(3, 4) * 7


def test_a_custom_function_that_returns_a_view_keeps_its_backward():
    x = leaf()
    y = compiled(Flat.apply)(x * 1)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((3, 4), 7.0))


class TwoOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        index = x.argmax(-1)
        ctx.mark_non_differentiable(index)
        return x * 2, index

    @staticmethod
    def backward(ctx, grad, _):
        return grad * 5


@pytest.mark.parametrize("gives", [lambda grad: grad[:2], lambda grad: (grad, grad)])
def test_a_custom_function_whose_gradients_do_not_fit(gives):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return gives(grad)

    compiled = aotdist.compile(lambda x: Wrong.apply(x), backend="fx")
    with pytest.raises(UnsupportedProgram, match="of an autograd function gives gradients that do not fit"):
        compiled(leaf())
    with torch.no_grad():
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))


def test_a_custom_function_with_an_output_without_gradient():
    same_as_eager(lambda: Scene(TwoOutputs.apply, (leaf(),)))


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad * w, 2 * grad * x


bound_product = Product.apply

FUNCTIONS_OF_WHAT_IS_CLOSED_OVER = {
    "a function": lambda x, w: Product.apply(x, w),
    "a view of it": lambda x, w: Product.apply(x, w.view(3, 4)),
    "an identity": lambda x, w: (Identity.apply(w), x * w),
    "a view that a function makes": lambda x, w: (Alias.apply(w), x * w),
    "in a checkpoint": lambda x, w: checkpoint(Product.apply, x, w, use_reentrant=True),
    "gradients taken inside": lambda x, w: torch.autograd.grad(
        Product.apply(x, w).sin().sum(), w, create_graph=True
    ),
}


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS_OF_WHAT_IS_CLOSED_OVER)
def test_a_function_is_first_to_meet_what_is_closed_over(name, wraps):
    """No torch function is called with it: a parameter of a module would have a stand-in already."""

    def build():
        w = leaf().detach()
        w = (TwoTensor(w, w + 1) if wraps else w).requires_grad_()
        fn = FUNCTIONS_OF_WHAT_IS_CLOSED_OVER[name]
        return Scene(lambda x: fn(x, w), (leaf(),), held={"w": w})

    same_as_eager(build, calls=2)


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("is_leaf", [True, False])
def test_a_bound_function_is_first_to_meet_what_is_closed_over(is_leaf, wraps):
    """From torch 2.14 on nothing hears which tensors it takes: refused, where one would get a gradient."""

    def build():
        w = leaf().detach()
        w = (TwoTensor(w, w + 1) if wraps else w).requires_grad_()
        used = w if is_leaf else w * 2
        return Scene(lambda x: bound_product(x, used) + bound_product(used, used), (leaf(),), held={"w": w})

    if torch.__version__ < "2.14":
        same_as_eager(build)
    else:
        scene = build()
        with pytest.raises(UnsupportedProgram, match=r"bound to the `apply` .*\(of ProductBackward\)"):
            compiled(scene.fn)(*scene.args)


@pytest.mark.parametrize("wraps", [False, True])
def test_a_function_returns_what_is_closed_over_as_a_gradient(wraps):
    def build():
        held = [TwoTensor(torch.randn(3, 4), torch.randn(3, 4)) if wraps else torch.randn(3, 4)]

        class Constant(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

            @staticmethod
            def backward(ctx, grad):
                return held[0]

        x = leaf().detach()
        x = (TwoTensor(x, x + 1) if wraps else x).requires_grad_()
        return Scene(Constant.apply, (x,), held={"held": held})

    same_as_eager(build, calls=2)


def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x * w).sin() + w


@pytest.mark.parametrize("by_name", [False, True])
def test_a_scripted_function_is_first_to_meet_what_is_closed_over(by_name):
    scripted = torch.jit.script(scaled)

    def build():
        w = leaf()
        return Scene(lambda x: scripted(x, w=w) if by_name else scripted(x, w), (leaf(),), held={"w": w})

    same_as_eager(build, calls=2)


def test_gradients_taken_inside():
    def program(x, w):
        (grad,) = torch.autograd.grad((x * w).exp().sum(), w, create_graph=True)
        return (grad**2).sum()

    same_as_eager(lambda: Scene(program, (torch.randn(3), leaf(3))))


def test_grad_mode_switched_on_inside():
    def program(x):
        with torch.enable_grad():
            (grad,) = torch.autograd.grad(x.exp().sum(), x)
        return grad * 2

    same_as_eager(lambda: Scene(program, (leaf(),)), around=torch.no_grad)


def test_history_that_begins_under_no_grad():
    def program(x):
        with torch.enable_grad():
            y = x.exp()
        return y, y * 2

    same_as_eager(lambda: Scene(program, (leaf(),)), around=torch.no_grad)


CHECKPOINTED = {
    "a function": lambda x: checkpoint(lambda x: x.exp().sin(), x, use_reentrant=False),
    "twice": lambda x: checkpoint(
        torch.sin, checkpoint(torch.exp, x, use_reentrant=False), use_reentrant=False
    ),
    "nested": lambda x: checkpoint(
        lambda x: checkpoint(torch.exp, x.sin(), use_reentrant=False).cos(), x, use_reentrant=False
    ),
    "with dropout": lambda x: checkpoint(lambda x: F.dropout(x.exp(), 0.5).sin(), x, use_reentrant=False),
    "with dropouts around": lambda x: F.dropout(
        checkpoint(lambda x: F.dropout(F.dropout(x).exp()).sin(), F.dropout(x, 0.1), use_reentrant=False)
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_checkpoints_inside(name):
    same_as_eager(lambda: Scene(CHECKPOINTED[name], (leaf(),)), calls=2)


def test_a_checkpoint_saves_nothing_but_its_input():
    program = compiled(CHECKPOINTED["a function"])
    program(leaf())
    (artifact,) = program.explain().artifacts
    assert artifact.saved_bytes == 0


def test_a_checkpoint_around():
    def use(call):
        x = torch.arange(3.0, requires_grad=True)
        checkpoint(call, x, use_reentrant=False).sum().backward()
        return [x.grad]

    assert_equal_grads(lambda x: x.exp().sin(), use)


def test_saved_tensor_hooks_around():
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor.clone()

    x = leaf()
    program = compiled(lambda x: x.exp().sin())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = program(x)
    assert packed and all(type(tensor) is torch.Tensor for tensor in packed)
    y.sum().backward()
    assert torch.equal(x.grad, x.exp().cos() * x.exp())


SCALE = torch.tensor(2.0)
SAVED_TENSOR_HOOKS = {
    "scaled by what is closed over": (lambda tensor: tensor * SCALE, lambda tensor: tensor / SCALE),
    "rounded": (
        lambda tensor: (tensor.to(torch.bfloat16), SCALE),
        lambda packed: packed[0].float() * packed[1],
    ),
    "drawn": (lambda tensor: tensor + torch.rand_like(tensor), lambda tensor: tensor),
}


@pytest.mark.parametrize("wraps", [False, True], ids=["plain", "TwoTensor"])
@pytest.mark.parametrize("recomputes", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize("name", SAVED_TENSOR_HOOKS)
def test_saved_tensor_hooks_inside(name, recomputes, wraps):
    """Autograd calls them in the middle of the operators that save: what they close over is met there."""
    hooks = SAVED_TENSOR_HOOKS[name]

    def program(x):
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            y = (x * SCALE).sin()
            z = checkpoint(lambda y: (y * SCALE).exp(), y, use_reentrant=False) if recomputes else y.exp()
            with torch.autograd.graph.saved_tensors_hooks(*hooks):
                return z.cos()

    def scene():
        x = leaf()
        return Scene(program, (TwoTensor(x, x * 2).detach().requires_grad_() if wraps else x,))

    same_as_eager(scene, calls=2)


# --- autocast ------------------------------------------------------------------------------------


def bfloat16():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def under_autocast(x, w):
    with bfloat16():
        y = x @ w
        return y, (y @ w).float().softmax(-1)


@pytest.mark.parametrize("around", [contextlib.nullcontext, bfloat16], ids=["without", "autocast"])
def test_autocast_inside(around):
    same_as_eager(lambda: Scene(under_autocast, (torch.randn(3, 3), leaf(3, 3))), around=around, calls=2)


def test_autocast_around():
    """The cast weights that autocast keeps for the next call must not be those of the trace."""
    same_as_eager(lambda: Scene(lambda x, w: (x @ w) @ w, (leaf(3, 3), leaf(3, 3))), around=bfloat16, calls=2)


def test_autocast_switched_off_inside():
    def program(x, w):
        with torch.autocast("cpu", enabled=False):
            return x @ w

    same_as_eager(lambda: Scene(program, (leaf(3, 3), leaf(3, 3))), around=bfloat16)


# --- what is refused -----------------------------------------------------------------------------


def test_second_derivatives_that_are_refused_do_no_harm():
    start = leaf()
    x = start * 1.0
    y = aotdist.compile(lambda x: (x.mul_(2) ** 3).sum(), backend="fx")(x)
    with pytest.raises(UnsupportedProgram, match="old history is needed"):
        y.backward(create_graph=True)
    # What was refused did no harm: the first derivative is still there to be taken.
    torch.autograd.backward(y)
    torch.testing.assert_close(start.grad, 2 * 3 * x.detach() ** 2)


# --- functions that tell None from zeros, and checkpoints that are reentrant ------------------------


class Unmaterialised(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, first, second):
        if first is None or second is None:
            return second * 5 if first is None else first * 7
        return first + second


class Materialised(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, first, second):
        return first.exp() + second.cos()


@pytest.mark.parametrize("chosen", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("function", [Unmaterialised, Materialised])
def test_custom_functions_with_several_results(function, chosen):
    def program(x):
        first, second = function.apply(x.sin())
        return first.exp(), second.cos()

    def use(call):
        x = torch.arange(1.0, 4.0, requires_grad=True)
        results = call(x)
        torch.autograd.backward([results[k].sum() for k in chosen])
        return [x.grad]

    assert_equal_grads(program, use)


def test_gradients_are_of_the_kind_of_what_they_are_gradients_of():
    """A wrapper within a wrapper gets a gradient of one level from the one result, of two from the other."""

    def program(x, y):
        y.mul_(x)
        return x * x

    def use(call):
        inner = TwoTensor(torch.ones(2), torch.ones(2))
        x = TwoTensor(inner, torch.ones(2)).requires_grad_()
        y = TwoTensor(torch.full((2,), 3.0), torch.full((2,), 4.0))
        call(x, y)
        y.backward(torch.ones_like(y))
        return plain_tensors(x.grad)

    assert_equal_grads(program, use)


@pytest.mark.parametrize("where", ["input", "middle"])
def test_reentrant_checkpoints(where):
    def build():
        model = nn.Linear(4, 4)

        def program(x):
            given = x if where == "input" else x * 2
            return checkpoint(lambda x: F.dropout(model(x).sin(), 0.3), given, use_reentrant=True).exp()

        return Scene(program, (leaf(),), held={"model": model})

    same_as_eager(build, calls=2)


# --- what backward writes --------------------------------------------------------------------------


class WritesInBoth(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, buffer):
        ctx.buffer = buffer
        buffer.add_(1)
        return x * buffer

    @staticmethod
    def backward(ctx, grad):
        ctx.buffer.mul_(3)
        return grad * ctx.buffer, None


class WritesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, buffer):
        ctx.buffer = buffer
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.buffer.add_(grad)
        return grad, None


def writes_in_a_hook(x, buffer):
    y = x.exp()
    y.register_hook(lambda grad: (buffer.add_(grad), None)[1])
    return y.sin()


def writes_views_in_a_hook(x, buffer):
    """Views that the forward made: the backward finds in them what the buffer holds by then."""
    y, alias, rest = x.exp(), buffer.detach(), buffer[1:]
    y.register_hook(lambda grad: (alias.add_(grad), rest.mul_(2), grad * alias)[2])
    return y.sin()


BACKWARD_WRITES = {
    "both": lambda x, buffer: WritesInBoth.apply(x, buffer).sin(),
    "backward": lambda x, buffer: WritesInBackward.apply(x, buffer).sin(),
    "hook": writes_in_a_hook,
    "views": writes_views_in_a_hook,
}


@pytest.mark.parametrize("wraps", [False, True], ids=["plain", "TwoTensor"])
@pytest.mark.parametrize("name", BACKWARD_WRITES)
def test_what_backward_writes_it_writes_at_every_run(name, wraps):
    def use(call):
        seen = []
        tensor = (lambda t: TwoTensor(t, t + 1)) if wraps else (lambda t: t)
        buffer = tensor(torch.ones(3))
        for _ in range(2):
            x = tensor(torch.arange(3.0)).requires_grad_()
            y = call(x, buffer)
            seen += [buffer.clone()]
            y.sum().backward(retain_graph=True)
            seen += [buffer.clone(), x.grad.clone()]
            with torch.no_grad():
                buffer.mul_(2)
            y.sum().backward()
            seen += [buffer.clone(), x.grad.clone(), torch.tensor(buffer._version)]
        return [plain for tensor in seen for plain in plain_tensors(tensor)]

    assert_equal_grads(BACKWARD_WRITES[name], use)


# --- hooks that come later -------------------------------------------------------------------------


def test_hooks_on_all_modules():
    def use(call):
        x = torch.arange(12.0).view(3, 4)
        results = [call(x)]
        handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: output * 2)
        results.append(call(x))
        handle.remove()
        return [*results, call(x)]

    assert_equal_grads(nn.Linear(4, 4), use)


@pytest.mark.parametrize("kind", ["argument", "parameter"])
def test_forward_mode(kind):
    """It differentiates the operators that it sees; so the function runs as it was written."""

    def use(call):
        x = torch.arange(3.0)
        w = torch.ones(3, requires_grad=True)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x if kind == "argument" else w, torch.full((3,), 2.0))
            args = (dual, w) if kind == "argument" else (x, dual)
            return list(forward_ad.unpack_dual(call(*args)))

    assert_equal_grads(lambda x, w: x.sin() * w.exp(), use)


def two(*size: int) -> TwoTensor:
    return TwoTensor(torch.randn(size or (3, 4)), torch.randn(size or (3, 4)))


def product(w, x):
    return w * x


def exponential(w, x):
    y = w.exp()
    return y, y * 2, y.detach(), y[0]


WRITTEN_SINCE = {
    "an input": (product, lambda x, out: x.add_(100)),
    "a slice of an input": (product, lambda x, out: x[1:].add_(100)),
    "what is detached from an input": (product, lambda x, out: x.detach().add_(100)),
    "a result": (exponential, lambda x, out: out[0].add_(100)),
    "what is detached from a result": (exponential, lambda x, out: out[2].add_(100)),
    "a row of a result": (exponential, lambda x, out: out[3].add_(100)),
}


@pytest.mark.parametrize("written", WRITTEN_SINCE)
def test_a_wrapper_that_the_backward_needs_is_written(written):
    """It counts writes, and what lies inside of it does not."""
    fn, write = WRITTEN_SINCE[written]

    def use(call):
        w, x = two().requires_grad_(), two()
        out = call(w, x)
        end = out[1] if isinstance(out, tuple) else out
        with torch.no_grad():
            write(x, out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            end.sum().backward()
        return w.grad

    assert both(fn, use) == (None, None)


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: (x.mul_(2), w * x)[1],
        lambda w, x: (x.t_(), w.t() * x)[1],
        lambda w, x: (y := w.exp(), y * 2, y.detach())[:2],
    ],
    ids=["written before", "transposed before", "a result"],
)
def test_a_wrapper_that_the_backward_needs_is_written_before_and_after(fn):
    """What the program itself writes before it needs a tensor is not written since."""

    def use(call):
        torch.manual_seed(0)
        w, x = two().requires_grad_(), two()
        out = call(w, x)
        end = out[1] if isinstance(out, tuple) else out
        end.sum().backward(retain_graph=True)
        end.sum().backward()
        with torch.no_grad():
            (out[0] if isinstance(out, tuple) else x).add_(1)
        return [*plain_tensors(w.grad), *plain_tensors(x)]

    for ours, eager in zip(*both(fn, use), strict=True):
        assert torch.equal(ours, eager)


def test_a_saved_result_in_a_wrapper_keeps_nothing_alive():
    w = two().requires_grad_()
    out, double = compiled(lambda w: (y := w.exp(), y * 2))(w)
    watched = weakref.ref(out)
    del out
    gc.collect()
    assert watched() is None and double.grad_fn is not None
