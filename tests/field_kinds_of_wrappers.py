"""Field cases of what is put around a module: data parallelism, averages, hooks, adapters."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from field import Case, Optimize, Seen, begin, case, noise, sgd, step
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import swa_utils


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 4))


@contextmanager
def one_process() -> Iterator[None]:
    """A process group of this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(os.path.join(folder, "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, h: torch.Tensor, second: bool = True) -> torch.Tensor:
        y = F.dropout(self.a(h).tanh(), 0.3)
        return self.b(y) if second else y


def distributed(case: Case, optimize: Optimize, seen: Seen) -> None:
    with one_process():
        module = DistributedDataParallel(begin(case, optimize), find_unused_parameters=True)
        optimizer = sgd(module)
        for number, second in enumerate((True, False, True)):
            args, _ = case.inputs(number)
            module(*args, second=second).square().mean().backward()
            seen.gradients(f"step {number}", module, args)
            optimizer.step()
            optimizer.zero_grad()
        seen.state("end", module)


case(
    "data parallel, with parameters that are not used",
    "huggingface/transformers#4659",
    "Looking for unused parameters and recomputing do not go together: a parameter is ready twice.",
    Unused,
    noise(3, 4, grad=True),
    drive=distributed,
)


def accumulate_without_sync(case: Case, optimize: Optimize, seen: Seen) -> None:
    with one_process():
        module = DistributedDataParallel(begin(case, optimize), gradient_as_bucket_view=True)
        optimizer = sgd(module)
        for number in range(4):
            args, _ = case.inputs(number)
            if number % 2 == 0:
                with module.no_sync():
                    module(*args).square().mean().backward()
            else:
                module(*args).square().mean().backward()
                seen.gradients(f"step {number}", module, args)
                optimizer.step()
                optimizer.zero_grad()
        seen.state("end", module)


case(
    "data parallel, accumulating without synchronizing",
    "karpathy/build-nanogpt#30",
    "Gradients are wrong where only the backward was told not to synchronize.",
    net,
    noise(3, 4, grad=True),
    drive=accumulate_without_sync,
)


def shard(case: Case, optimize: Optimize, seen: Seen) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_module

    with one_process():
        module = distribute_module(case.make(), init_device_mesh("cpu", (1,)))
        args, kwargs = case.inputs(0)
        optimize(module, args, kwargs)


case(
    "sharded parameters",
    "pytorch/pytorch#153354",
    "Plain tensors and sharded ones meet where a block is computed again.",
    lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
    noise(3, 4),
    drive=shard,
    refused="cannot plan for a DTensor",
)


def shard_fully(case: Case, optimize: Optimize, seen: Seen) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with one_process():
        module = fully_shard(case.make(), mesh=init_device_mesh("cpu", (1,)))
        args, kwargs = case.inputs(0)
        optimize(module, args, kwargs)(*args).sum().backward()


case(
    "fully sharded data parallel",
    "pytorch/pytorch#122459",
    "The compiler stops in a sharded module.",
    lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
    noise(3, 4),
    drive=shard_fully,
    refused="cannot plan for a DTensor",
)


def averaged(case: Case, optimize: Optimize, seen: Seen) -> None:
    module = begin(case, optimize)
    average = swa_utils.AveragedModel(module, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5), use_buffers=True)
    optimizer = sgd(module)
    for number in range(3):
        step(case, module, number, seen)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(module)
    swa_utils.update_bn([case.inputs(number)[0][0] for number in range(2)], average)
    average.eval()
    seen.put("of the average", average(*case.inputs(9)[0]))
    seen.state("average", average)


case(
    "a weight average with its own batch statistics",
    "pytorch/pytorch#84053",
    "The deep copy that is averaged does not get the buffers.",
    lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4)),
    noise(5, 4),
    drive=averaged,
    refused="data-dependent",
)


def hooks_on_the_module(case: Case, optimize: Optimize, seen: Seen) -> None:
    module = begin(case, optimize)
    step(case, module, 0, seen)
    module.register_full_backward_hook(lambda m, given, taken: tuple(None if g is None else g * 2 for g in given))
    step(case, module, 1, seen)
    module.register_full_backward_pre_hook(lambda m, taken: tuple(g * 3 for g in taken))
    step(case, module, 2, seen)
    module.register_forward_pre_hook(lambda m, args, kwargs: ((args[0] * 0.5,), kwargs), with_kwargs=True)
    module.register_forward_hook(lambda m, args, kwargs, output: output + 1, with_kwargs=True)
    step(case, module, 3, seen)


case(
    "hooks on the module that come between steps",
    "pytorch/pytorch#115750",
    "Hooks of the backward that are added later are not called.",
    net,
    noise(3, 4, grad=True),
    drive=hooks_on_the_module,
)


def hooks_inside(case: Case, optimize: Optimize, seen: Seen) -> None:
    module: Any = begin(case, optimize)
    step(case, module, 0, seen)
    module[0].register_full_backward_pre_hook(lambda m, taken: tuple(g * 3 for g in taken))
    step(case, module, 1, seen)


case(
    "a hook on a layer that comes between steps",
    "pytorch/pytorch#117265",
    "A hook before a layer's backward is ignored in silence.",
    net,
    noise(3, 4, grad=True),
    drive=hooks_inside,
    refused="0 has a backward pre hook",
)


class Adapters(nn.Module):
    """A frozen layer and two adapters, of which one is active."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.down = nn.ModuleDict({name: nn.Linear(4, 2, bias=False) for name in ("one", "two")})
        self.up = nn.ModuleDict({name: nn.Linear(2, 4, bias=False) for name in ("one", "two")})
        self.active = ["one"]

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        y = self.base(h)
        for name in self.active:
            y = y + self.up[name](F.dropout(self.down[name](h), 0.1))
        return y


def switch_adapters(case: Case, optimize: Optimize, seen: Seen) -> None:
    module = begin(case, optimize)
    losses = []
    for number, active in enumerate((["one"], ["two"], ["one", "two"], ["one"])):
        module.active = active
        for name in ("one", "two"):
            module.up[name].requires_grad_(name in active)
        losses.append(module(*case.inputs(number)[0]).square().mean())
    torch.stack(losses).sum().backward()  # all forwards are pending
    seen.put("losses", losses)
    seen.gradients("step", module)


case(
    "adapters that are switched between pending forwards",
    "huggingface/peft#2832",
    "A block that is computed again sees the adapter that is active by then.",
    Adapters,
    noise(3, 4),
    drive=switch_adapters,
)


def hooks_around(case: Case, optimize: Optimize, seen: Seen) -> None:
    module = begin(case, optimize)
    for number in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy().copy("K"), torch.from_numpy):
            output = module(*case.inputs(number)[0])
        output.square().sum().backward()
        seen.put(f"output {number}", output)
        seen.gradients(f"step {number}", module)


case(
    "hooks on what is saved around the module",
    "pytorch/pytorch#146878",
    "What is saved is packed by the trainer; states of generators are saved as well.",
    net,
    noise(3, 4),
    drive=hooks_around,
)


def data_parallel(case: Case, optimize: Optimize, seen: Seen) -> None:
    module = nn.DataParallel(begin(case, optimize))
    optimizer = sgd(module)
    for number in range(3):
        step(case, module, number, seen)
        optimizer.step()
        optimizer.zero_grad()
    seen.state("end", module)


case(
    "DataParallel on a machine without devices",
    "pytorch/pytorch#143931",
    "A compiled model under nn.DataParallel runs in threads and fails.",
    net,
    noise(3, 4, grad=True),
    drive=data_parallel,
)
