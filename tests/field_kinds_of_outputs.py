"""Field cases of what a caller does with outputs."""

from __future__ import annotations

from typing import Any

import torch
from field import Case, Optimize, Seen, begin, case, model, noise, sgd

case(
    "a loss and the same loss detached",
    "pytorch/pytorch#100348",
    "The loss and its detached twin are one tensor once compiled, and there is nothing to differentiate.",
    model(lambda m, h: {"loss": (loss := m.a(h).square().mean()), "for the log": loss.detach()}),
    noise(3, 4, grad=True),
    loss=lambda output: output["loss"],
)


def makes_a_leaf(m: Any, h: torch.Tensor) -> Any:
    shift = torch.zeros(4, requires_grad=True)
    return m.a(h + shift), shift


def train_and_read_leaf(case: Case, optimize: Optimize, seen: Seen) -> None:
    module = begin(case, optimize)
    output, shift = module(*case.inputs(0)[0])
    output.square().sum().backward()
    seen.put("shift", (shift.requires_grad, shift.grad))
    seen.gradients("step", module)


case(
    "a tensor with a gradient that is made in the forward",
    "pytorch/pytorch#99455",
    "A tensor that the function makes and returns does not require a gradient any more.",
    model(makes_a_leaf),
    noise(3, 4),
    drive=train_and_read_leaf,
    open="a leaf of autograd's graph that the forward makes is a constant of the plan",
)


def edit_output(case: Case, optimize: Optimize, seen: Seen) -> None:
    module = begin(case, optimize)
    optimizer = sgd(module)
    for number in range(3):
        args, _ = case.inputs(number)
        logits, hidden = module(*args)
        logits /= 2.0
        logits[:, 0] = -1.0
        hidden.add_(1.0)
        (logits.exp().sum() + hidden.square().sum()).backward()
        seen.put(f"step {number}: output", (logits, hidden))
        seen.gradients(f"step {number}", module, args)
        optimizer.step()
        optimizer.zero_grad()


case(
    "outputs that the caller edits in place",
    "pytorch/pytorch#90507",
    "An output that is a view inside of the compiled function may not be edited by its caller.",
    model(lambda m, h: (m.a(h), m.b(h).view(-1).unsqueeze(0))),
    noise(3, 4, grad=True),
    drive=edit_output,
)


def edit_saved_output(case: Case, optimize: Optimize, seen: Seen) -> None:
    module = begin(case, optimize)
    output = module(*case.inputs(0)[0])
    output.mul_(0.5)
    seen.raises("backward raises", output.sum().backward)


case(
    "an output that the backward needs, edited by the caller",
    "pytorch/pytorch#9391",
    "Eager says that the result of a sigmoid was edited before its backward.",
    model(lambda m, h: m.a(h).sigmoid()),
    noise(3, 4, grad=True),
    drive=edit_saved_output,
)


def retain_gradients(case: Case, optimize: Optimize, seen: Seen) -> None:
    module = begin(case, optimize)
    for number in range(2):
        args, _ = case.inputs(number)
        hidden, output = module(*args)
        hidden.retain_grad()
        hidden.register_hook(lambda gradient: gradient * 3)
        (hidden.square().sum() + output.sum()).backward()
        seen.put(f"gradient of hidden {number}", hidden.grad)
        seen.gradients(f"step {number}", module, args)


case(
    "gradients of outputs, kept and hooked by the caller",
    "pytorch/pytorch#91468",
    "retain_grad and register_hook may be wrong in silence with compiled functions.",
    model(lambda m, h: ((y := m.a(h).tanh()), m.b(y))),
    noise(3, 4, grad=True),
    drive=retain_gradients,
    refused="has a hook",
)


def edits_and_detaches(m: Any, h: torch.Tensor) -> Any:
    before = h.detach()
    h.mul_(2)
    return m.a(h), before.clone()


def train_on_computed_inputs(case: Case, optimize: Optimize, seen: Seen) -> None:
    module = begin(case, optimize)
    for number in range(2):
        leaf = noise(3, 4, grad=True)(number)[0][0]
        given = leaf * 1.0
        output, before = module(given)
        (output.square().sum() + given.sum()).backward()
        seen.put(f"step {number}", (output, before, given, leaf.grad))
        seen.gradients(f"step {number}", module)


case(
    "an input that is detached, then edited",
    "pytorch/pytorch#128035",
    "Gradients are zero where an input was detached and edited in a compiled function.",
    model(edits_and_detaches),
    lambda number: ((noise(3, 4, grad=True)(number)[0][0] * 1.0,), {}),
    drive=train_on_computed_inputs,
)


def between_outputs(case: Case, optimize: Optimize, seen: Seen) -> None:
    module = begin(case, optimize)
    output, latent = module(*case.inputs(0)[0])
    (gradient,) = torch.autograd.grad(output.sum(), latent, retain_graph=True, allow_unused=True)
    seen.put("gradient of one output by another", gradient)


case(
    "the gradient of one output by another",
    "pytorch/pytorch#132929",
    "autograd.grad from one output of a compiled module to another finds nothing.",
    model(lambda m, h: (m.b(y := m.a(h).tanh()), y)),
    noise(3, 4),
    drive=between_outputs,
    open="outputs of a planned step do not depend on each other for autograd",
)


def odd_gradients(case: Case, optimize: Optimize, seen: Seen) -> None:
    module = begin(case, optimize)
    for number in range(3):
        args, _ = case.inputs(number)
        output = module(*args)
        given = [torch.ones(()).expand(3, 4), torch.arange(12.0).view(4, 3).t(), torch.arange(24.0)[::2].view(3, 4)][number]
        output.backward(given)
        seen.gradients(f"step {number}", module, args)


case(
    "gradients that are expanded, transposed, strided",
    "pytorch/functorch#848",
    "The backward that was traced takes its gradient to be contiguous.",
    model(lambda m, h: m.b(m.a(h).tanh())),
    noise(3, 4, grad=True),
    drive=odd_gradients,
)
