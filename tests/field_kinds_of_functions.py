"""Field cases of functions and ops with gradients of one's own, and of derivatives in the forward."""

from __future__ import annotations

from typing import Any

import torch
from field import case, model, noise
from torch import nn

# -- functions and ops -------------------------------------------------------------------------------------------------


class TripledInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(h)
        return h.mul_(3)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


def triples(m: Any, h: torch.Tensor) -> torch.Tensor:
    y = m.a(h)
    TripledInPlace.apply(y)  # what it returns is not looked at
    return m.b(y.tanh())


case(
    "a function that edits its input, its result dropped",
    "pytorch/pytorch#184113",
    "The gradient misses the factor of the function, since only its returned tensor was taken to be new.",
    model(triples),
    noise(3, 4, grad=True),
)


class TwoSines(torch.autograd.Function):
    """Leaves out what no gradient comes for."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(h)
        return h.sin(), h.cos()

    @staticmethod
    def backward(ctx: Any, of_sine: torch.Tensor | None, of_cosine: torch.Tensor | None) -> torch.Tensor:
        (h,) = ctx.saved_tensors
        gradient = torch.zeros_like(h) if of_sine is None else of_sine * h.cos()
        return gradient * 2 if of_cosine is None else gradient - of_cosine * h.sin()


def one_sine(m: Any, h: torch.Tensor) -> Any:
    sine, cosine = TwoSines.apply(m.a(h))
    return {"sine": m.b(sine), "cosine": cosine}


case(
    "a function that asks which of its gradients there are, one of two used",
    "pytorch/pytorch#106391",
    "set_materialize_grads(False) is not known to the compiler.",
    model(one_sine),
    noise(3, 4, grad=True),
    loss=lambda output: output["sine"].square().mean(),
    open="a gradient that does not come is traced as one that does, and is zero",
)

case(
    "a function that asks which of its gradients there are, both used",
    "pytorch/pytorch#118396",
    "set_materialize_grads may be ignored in silence.",
    model(one_sine),
    noise(3, 4, grad=True),
)


class Swish(torch.autograd.Function):
    """Its gradient is once differentiable, and computed in place from what is no tensor too."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, beta: float, name: str) -> torch.Tensor:
        ctx.save_for_backward(h)
        ctx.beta, ctx.name = beta, name
        y = h.clone()
        y *= torch.sigmoid(beta * h)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (h,) = ctx.saved_tensors
        s = torch.sigmoid(ctx.beta * h)
        return gradient * (s + ctx.beta * h * s * (1 - s)) if ctx.name == "swish" else None, None, None


case(
    "a function that is once differentiable",
    "pytorch/pytorch#113625",
    "once_differentiable makes the compiler stop with no clear word.",
    model(lambda m, h: m.b(Swish.apply(m.a(h), 1.5, "swish"))),
    noise(3, 4, grad=True),
)

case(
    "a function that edits in place what it returns",
    "pytorch/pytorch#180642",
    "An in-place operation in a function's forward sends its gradient to the wrong slot.",
    model(lambda m, h: m.b(Swish.apply(m.a(h), 0.5, "swish") + Swish.apply(h, 0.5, "none"))),
    noise(3, 4, grad=True),
)


class WithJvp(torch.autograd.Function):
    @staticmethod
    def forward(h: torch.Tensor, sign: int) -> torch.Tensor:
        return h.exp() * sign

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.saved_tensors[0], None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: Any) -> torch.Tensor:
        return tangent * ctx.saved_tensors[0]


case(
    "a function with a jvp that nobody uses",
    "pytorch/pytorch#180284",
    "That a function has a jvp makes its compiled backward fail on a shape.",
    model(lambda m, h: m.b(WithJvp.apply(m.a(h), -1))),
    noise(3, 4, grad=True),
)


class Invertible(torch.autograd.Function):
    """Keeps its outputs only, and computes its inputs from them in the backward."""

    @staticmethod
    def forward(ctx: Any, x1: torch.Tensor, x2: torch.Tensor, f: nn.Module, *weights: torch.Tensor) -> Any:
        with torch.no_grad():
            y1 = x1 + f(x2)
        ctx.f, ctx.weights = f, weights
        ctx.save_for_backward(y1, x2)
        return y1, x2.clone()

    @staticmethod
    def backward(ctx: Any, g1: torch.Tensor, g2: torch.Tensor) -> Any:
        _, x2 = ctx.saved_tensors
        x2 = x2.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.f(x2)
        of_x2, *of_weights = torch.autograd.grad(y, (x2, *ctx.f.parameters()), g1)
        return g1, g2 + of_x2, None, *of_weights


def reversible(m: Any, h: torch.Tensor) -> torch.Tensor:
    y1, y2 = Invertible.apply(m.a(h), h, m.b, *m.b.parameters())
    return y1 * y2


case(
    "a reversible block",
    "HomebrewML/revlib#2",
    "A function runs a module again in its backward, with gradients for its parameters.",
    model(reversible),
    noise(3, 4, grad=True),
)


class CountsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        ctx.total = total
        return h * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.total.add_(gradient.abs().sum())
        return gradient * 2, None


case(
    "a buffer that is edited in the backward",
    "pytorch/pytorch#172956",
    "A tensor that the backward edits makes a graph that is not valid.",
    model(lambda m, h: m.b(CountsInBackward.apply(m.a(h), m.total)), total=lambda: torch.zeros(())),
    noise(3, 4, grad=True),
)


@torch.library.custom_op("actsolve_field::scaled", mutates_args=())
def scaled(h: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.from_numpy(h.detach().numpy() * factor)


@scaled.register_fake
def _(h: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.empty_like(h)


def _keep_factor(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    ctx.factor = inputs[1]


scaled.register_autograd(lambda ctx, gradient: (gradient * ctx.factor, None), setup_context=_keep_factor)


@torch.library.custom_op("actsolve_field::count_up", mutates_args={"counter"})
def count_up(counter: torch.Tensor, by: torch.Tensor) -> None:
    counter.add_(by.abs().sum())


@count_up.register_fake
def _(counter: torch.Tensor, by: torch.Tensor) -> None:
    return None


case(
    "an op of one's own with a backward",
    "pytorch/pytorch#168393",
    "An op that is written in NumPy and registered with its gradient loses what was kept for it.",
    model(lambda m, h: m.b(torch.ops.actsolve_field.scaled(m.a(h).tanh(), 1.5))),
    noise(3, 4, grad=True),
)


def counts_up(m: Any, h: torch.Tensor) -> torch.Tensor:
    y = m.a(h)
    torch.ops.actsolve_field.count_up(m.counter, y.detach())
    return m.b(y.tanh()) * m.counter


case(
    "an op of one's own that edits a buffer",
    "pytorch/pytorch#153389",
    "What a mutable op writes is not seen by the op after it.",
    model(counts_up, counter=lambda: torch.zeros(())),
    noise(3, 4, grad=True),
    refused="cannot trace Of.*auto_functionalized",
)

# -- derivatives in the forward ----------------------------------------------------------------------------------------


def score(m: Any, h: torch.Tensor) -> torch.Tensor:
    def energy(h: torch.Tensor) -> torch.Tensor:
        return m.a(h).tanh().sum()

    return m.b(torch.func.grad(energy)(h))


case(
    "the gradient of an energy",
    "pytorch/pytorch#136662",
    "torch.func.grad inside of a compiled function is wrong in silence.",
    model(score),
    noise(3, 4, grad=True),
)


def mean_flow(m: Any, h: torch.Tensor) -> torch.Tensor:
    value, slope = torch.func.jvp(lambda h: m.a(h).tanh(), (h,), (torch.ones_like(h),))
    return m.b(value) + slope.detach()


case(
    "a forward derivative in the forward",
    "pytorch/pytorch#96041",
    "torch.func.jvp in a compiled function finds tensors without storage.",
    model(mean_flow),
    noise(3, 4, grad=True),
)


def either(m: Any, h: torch.Tensor) -> torch.Tensor:
    return torch.cond(h.sum() > 0, lambda h: m.a(h).tanh(), lambda h: m.b(h).sin(), (h,))


case(
    "a branch as an op",
    "pytorch/pytorch#126911",
    "Gradients of torch.cond.",
    model(either),
    noise(3, 4, grad=True),
    refused="cannot trace Of.*higher order operator",
)
