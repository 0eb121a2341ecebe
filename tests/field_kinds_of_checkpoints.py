"""Field cases of forwards that hook into autograd: checkpoints, hooks on what is saved, hooks on gradients."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from field import case, model, noise, train
from torch import nn
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import CheckpointPolicy, checkpoint


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


def selective(m: Any, h: torch.Tensor) -> torch.Tensor:
    def block(h: torch.Tensor) -> torch.Tensor:
        return F.dropout(m.a(h).tanh(), 0.3)

    contexts = functools.partial(checkpoints.create_selective_checkpoint_contexts, _policy)
    return m.b(checkpoint(block, h, use_reentrant=False, context_fn=contexts))


case(
    "a selective checkpoint",
    "pytorch/pytorch#161889",
    "Compiling has no effect where a checkpoint with a policy is around it.",
    model(selective),
    noise(3, 4, grad=True),
)


def nested(m: Any, h: torch.Tensor) -> torch.Tensor:
    def inner(h: torch.Tensor) -> torch.Tensor:
        return F.dropout(m.a(h).tanh(), 0.3)

    def outer(h: torch.Tensor, *, scale: float) -> dict[str, torch.Tensor]:
        return {"h": m.b(checkpoint(inner, h, use_reentrant=False)) * scale}

    return checkpoint(outer, h, use_reentrant=False, scale=0.5)["h"]


case(
    "a checkpoint in a checkpoint, with keywords and a dict",
    "pytorch/tensordict#1680",
    "A checkpointed function that returns a mapping cannot be compiled.",
    model(nested),
    noise(3, 4, grad=True),
)


def reentrant(m: Any, h: torch.Tensor) -> torch.Tensor:
    def block(h: torch.Tensor) -> torch.Tensor:
        return F.dropout(m.a(h).tanh(), 0.3)

    return m.b(checkpoint(block, checkpoint(block, m.b(h), use_reentrant=True), use_reentrant=True))


case(
    "reentrant checkpoints of one layer",
    "huggingface/accelerate#2017",
    "A layer in two reentrant checkpoints: its gradient is ready twice.",
    model(reentrant),
    noise(3, 4, grad=True),
    refused="cannot trace Of.*use_reentrant=False",
)


def doubles_saved(m: Any, h: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * 2):
        return m.a(h) * m.b(h)


case(
    "hooks on what is saved that change it",
    "pytorch/pytorch#116221",
    "Hooks that double each saved tensor are ignored once compiled, and gradients differ in silence.",
    model(doubles_saved),
    noise(3, 4, grad=True),
    refused="sets hooks on the tensors that are saved",
)


def saves_on_cpu(m: Any, h: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return m.b(m.a(h).tanh())


case(
    "what is saved is moved to the host by the model",
    "pytorch/pytorch#116221",
    "As above, with torch's own hooks, which change no value.",
    model(saves_on_cpu),
    noise(3, 4, grad=True),
)


class NotesGradient(nn.Module):
    """What visualisations of attention do: keeps the gradient of a layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.gradient = nn.Linear(4, 4), nn.Linear(4, 4), None

    def note(self, gradient: torch.Tensor) -> None:
        self.gradient = gradient

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        y = self.a(h)
        if y.requires_grad:
            y.register_hook(self.note)
        return self.b(y.tanh())


case(
    "a hook in the forward that keeps a gradient",
    "pytorch/pytorch#181763",
    "Hooks on intermediate tensors: what they do besides computing is lost.",
    NotesGradient,
    noise(3, 4),
    drive=lambda case, optimize, seen: train(
        case, optimize, seen, lambda module, number: seen.put(f"gradient {number}", module.gradient)
    ),
    refused="changes gradient",
)


class CountsGradients(NotesGradient):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def note(self, gradient: torch.Tensor) -> None:
        self.calls += 1


case(
    "a hook in the forward that counts",
    "pytorch/pytorch#172020",
    "Hooks on intermediate tensors cannot be compiled.",
    CountsGradients,
    noise(3, 4),
    drive=lambda case, optimize, seen: train(
        case, optimize, seen, lambda module, number: seen.put(f"calls {number}", module.calls)
    ),
    refused="changes calls",
)
