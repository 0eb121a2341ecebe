"""Field cases of training loops: who steps, and how the module is called."""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
from field import Case, Optimize, Seen, begin, case, model, noise, randn, sgd, step
from torch import nn


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 4))


def step_in_backward(case: Case, optimize: Optimize, seen: Seen) -> None:
    module = begin(case, optimize)
    optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in module.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(update)
    for number in range(3):
        step(case, module, number, seen)
    seen.state("end", module)


case(
    "an optimizer that steps in the backward",
    "pytorch/tutorials#2568",
    "Each parameter is updated as soon as its gradient is there, and the gradient dropped.",
    net,
    noise(3, 4, grad=True),
    drive=step_in_backward,
)


def halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def scale_in_hook(case: Case, optimize: Optimize, seen: Seen) -> None:
    module = begin(case, optimize)
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(halve)
    for number in range(3):
        step(case, module, number, seen)  # gradients accumulate


case(
    "a hook that edits accumulated gradients",
    "pytorch/pytorch#112446",
    ".grad is None in a hook on a parameter.",
    net,
    noise(3, 4, grad=True),
    drive=scale_in_hook,
)


def closures(case: Case, optimize: Optimize, seen: Seen) -> None:
    module = begin(case, optimize)
    optimizer = torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")
    args, _ = case.inputs(0)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = module(*args).square().mean()
        loss.backward()
        return loss

    for number in range(2):
        seen.put(f"loss {number}", optimizer.step(closure))
    seen.state("end", module)


case(
    "closures that an optimizer calls several times",
    "f-dangel/singd#56",
    "Optimizers of higher order hook into the model and call it again.",
    lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)),
    noise(3, 4),
    drive=closures,
)


def other_weights(case: Case, optimize: Optimize, seen: Seen) -> None:
    module = begin(case, optimize)
    names = dict(module.named_parameters())
    (h,), _ = case.inputs(0)
    for number in range(3):
        fast = {name: (p * (1 + 0.1 * number)).clone() for name, p in names.items()}
        output = torch.func.functional_call(module, fast, (h,))
        output.square().mean().backward()
        seen.put(f"output {number}", output)
        seen.gradients(f"step {number}", module)
    seen.put("zeros", torch.func.functional_call(module, {n: torch.zeros_like(p) for n, p in names.items()}, (h,)))


case(
    "a call with other weights",
    "pytorch/pytorch#97909",
    "functional_call with other parameters gives what the module's own give.",
    net,
    noise(3, 4),
    drive=other_weights,
)


def inner_loop(case: Case, optimize: Optimize, seen: Seen) -> None:
    module = begin(case, optimize)
    (h,), _ = case.inputs(0)
    names = dict(module.named_parameters())
    loss = torch.func.functional_call(module, names, (h,)).square().mean()
    gradients = torch.autograd.grad(loss, list(names.values()), create_graph=True)
    fast = {n: p - 0.1 * g for (n, p), g in zip(names.items(), gradients, strict=True)}
    torch.func.functional_call(module, fast, (h,)).square().mean().backward()
    seen.gradients("outer step", module)


case(
    "a loss through an inner step of training",
    "dbaranchuk/memory-efficient-maml#2",
    "Weights that were updated in an inner loop are differentiated a second time.",
    lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)),
    noise(3, 4),
    drive=inner_loop,
    refused="a planned step is differentiated twice.*module.original",
)


def rows_of_jacobian(case: Case, optimize: Optimize, seen: Seen) -> None:
    module = begin(case, optimize)
    (h,), _ = case.inputs(0)
    output = module(h).sum(0)
    rows = torch.autograd.grad(output, h, torch.eye(4), retain_graph=True, is_grads_batched=True)
    seen.put("rows", rows)


case(
    "many gradients in one backward",
    "pytorch/pytorch#138422",
    "vmap over autograd.grad does not work on the output of a compiled function.",
    lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)),
    noise(3, 4, grad=True),
    drive=rows_of_jacobian,
)


def with_anomalies(case: Case, optimize: Optimize, seen: Seen) -> None:
    module = begin(case, optimize)
    for number in range(2):
        with torch.autograd.detect_anomaly(check_nan=number == 0):
            step(case, module, number, seen)


case(
    "anomaly detection",
    "pytorch/pytorch#160016",
    "Where a gradient became NaN is to be found.",
    net,
    noise(3, 4, grad=True),
    drive=with_anomalies,
)


def in_threads(case: Case, optimize: Optimize, seen: Seen) -> None:
    module = begin(case, optimize)
    twins = [copy.deepcopy(module), module]
    found: dict[tuple[int, int], Any] = {}

    def run(which: int) -> None:
        for number in range(3):
            args, _ = case.inputs(number)
            output = twins[which](*args)
            output.square().sum().backward()
            found[which, number] = output.detach().clone(), args[0].grad.clone()

    threads = [threading.Thread(target=run, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for key in sorted(found):
        seen.put(f"thread and step {key}", found[key])
    for which, twin in enumerate(twins):
        seen.gradients(f"thread {which}", twin)


case(
    "two threads that train",
    "pytorch/pytorch#136833",
    "Compiling in two threads crashes.",
    lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)),
    noise(3, 4, grad=True),
    drive=in_threads,
)


def rollout(case: Case, optimize: Optimize, seen: Seen) -> None:
    module = begin(case, optimize)
    optimizer = sgd(module)
    for number in range(2):
        args, _ = case.inputs(number)
        h, states = args[0], []
        for _ in range(3):
            h = module(h)
            states.append(h)
        torch.stack(states).square().mean().backward()
        seen.put(f"states {number}", states)
        seen.gradients(f"step {number}", module, args)
        optimizer.step()
        optimizer.zero_grad()


case(
    "calls that each take the output of the one before",
    "lucidrains/rotary-embedding-torch#18",
    "A graph that was kept from an earlier call is differentiated a second time.",
    net,
    noise(3, 4, grad=True),
    drive=rollout,
)


def changes_of_type(case: Case, optimize: Optimize, seen: Seen) -> None:
    module = begin(case, optimize)
    for number, dtype in enumerate((torch.float32, torch.float64, torch.bfloat16)):
        module.to(dtype)
        h = randn(number, 2, 3, 4, 4).to(dtype)
        h = h.to(memory_format=torch.channels_last) if number else h
        output = module(h)
        output.float().square().sum().backward()
        seen.put(f"output {number}", output)
        seen.gradients(f"step {number}", module)
        module.zero_grad()


case(
    "another type and layout at each step",
    "huggingface/peft#2765",
    "What is switched on a module between calls is coupled to what it was when it was set up.",
    lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
    lambda number: ((randn(number, 2, 3, 4, 4),), {}),
    drive=changes_of_type,
)


case(
    "an alias of a parameter in a trained loss",
    "pytorch/functorch#373",
    "Outputs of which some require no gradient.",
    model(lambda m, h: (m.a(h), m.a.weight, m.a.weight.detach(), h.argmax(1), m.b(h).tanh())),
    noise(3, 4),
)
