"""Field cases of what goes into a forward and comes out of it."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from field import Case, Optimize, Seen, begin, case, model, noise, randn, sgd, step
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence


class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 4, batch_first=True)

    def forward(self, h: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]


case(
    "sequences that are packed in the forward",
    "pytorch/pytorch#162375",
    "Packing and unpacking sequences stops the trace.",
    Packs,
    lambda number: ((randn(number, 3, 5, 4, grad=True), torch.tensor([5, 2, 3])), {}),
    refused="cannot trace Packs",
)


class TakesPacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rnn = nn.Linear(4, 4), nn.GRU(4, 4)

    def forward(self, packed: PackedSequence) -> PackedSequence:
        return self.rnn(packed._replace(data=self.layer(packed.data)))[0]


case(
    "a packed sequence in and out",
    "pytorch/pytorch#107797",
    "The lengths of packed sequences must be on the CPU, and fake tensors are not.",
    TakesPacked,
    lambda number: ((pack_padded_sequence(randn(number, 5, 3, 4), torch.tensor([5, 3, 2])),), {}),
    loss=lambda packed: packed.data.square().mean(),
    refused="cannot trace TakesPacked",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    logits: torch.Tensor
    extra: dict[str, Any]

    def loss(self) -> torch.Tensor:
        return self.logits.square().mean()


case(
    "a frozen dataclass with slots and methods as the output",
    "openvinotoolkit/openvino#37551",
    "A model that returns a plain dataclass cannot be traced.",
    model(lambda m, h: Result(m.a(h), {"hidden": (m.b(h), None, "tanh")})),
    noise(3, 4, grad=True),
    loss=lambda output: output.loss() + output.extra["hidden"][0].sum(),
)


class Batch(collections.UserDict):  # type: ignore[type-arg]
    """As tokenizers return it."""


case(
    "a mapping that is no dict",
    "pytorch/tensordict#1680",
    "A mapping of its own kind that is changed inside of a checkpoint cannot be compiled.",
    model(lambda m, batch: m.a(batch["h"])),
    lambda number: ((Batch(h=randn(number, 3, 4)),), {}),
    refused="an input is a Batch, which hides a Tensor",
)


def fills(m: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    batch["hidden"] = m.a(batch["h"])
    return m.b(batch["hidden"])


case(
    "a dict that each layer adds to",
    "huggingface/peft#1199",
    "Logic in Python around the layers keeps them from being one graph.",
    model(fills),
    lambda number: (({"h": randn(number, 3, 4)},), {}),
    refused="changes a list, dict or object that is one of its inputs",
)


def grows_while_read(m: Any, h: torch.Tensor) -> torch.Tensor:
    found = [m.a(h)]

    def read() -> Any:
        for item in found:
            if len(found) < 3:
                found.append(m.b(item).tanh())
            yield item

    return torch.stack(list(read())).sum(0)


case(
    "a list that grows while it is read",
    "pytorch/pytorch#175855",
    "The items that were appended during the iteration are left out.",
    model(grows_while_read),
    noise(3, 4, grad=True),
)


def by_identity(m: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return m.a(query) if query is key else m.a(query) * m.b(key)


def train_by_identity(case: Case, optimize: Optimize, seen: Seen) -> None:
    module = begin(case, optimize)
    for number in range(4):
        h, other = randn(number, 3, 4, grad=True), randn(number, 3, 4)
        given = [(h, h), (h, other), (h, h.detach()), (h, h.view(3, 4))][number]
        output = module(*given)
        output.square().sum().backward()
        seen.put(f"step {number}", (output, h.grad))
        seen.gradients(f"step {number}", module)


case(
    "a branch on whether two inputs are one",
    "pytorch/pytorch#196173",
    "Control flow on the identity of objects takes the way of the trace.",
    model(by_identity),
    lambda number: ((randn(number, 3, 4), randn(number + 9, 3, 4)), {}),
    drive=train_by_identity,
)

case(
    "a causal mask that torch looks for",
    "pytorch/pytorch#91171",
    "An encoder compares its mask with a causal one, which depends on data.",
    lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1, 4, batch_first=True), 1, enable_nested_tensor=False),
    lambda number: ((randn(number, 1, 3, 4),), {"mask": nn.Transformer.generate_square_subsequent_mask(3)}),
    refused=r"cannot trace TransformerEncoder.*without data-dependent Python",
)

case(
    "a generator among the inputs",
    "pytorch/pytorch#169635",
    "Random functions with a generator that the user passes.",
    model(lambda m, h, generator: m.a(h) + torch.randn(h.shape, generator=generator)),
    lambda number: ((randn(number, 3, 4), torch.Generator().manual_seed(number)), {}),
)


def with_function(m: Any, h: torch.Tensor, activation: Any, layer: Any = None, **more: Any) -> torch.Tensor:
    y = activation(m.a(h))
    return (layer or m.b)(y) * more.get("scale", 1)


def train_with_functions(case: Case, optimize: Optimize, seen: Seen) -> None:
    module = begin(case, optimize)
    optimizer = sgd(module)
    for number, activation in enumerate((torch.tanh, F.relu, torch.tanh)):
        output = module(case.inputs(number)[0][0], activation=activation, scale=number % 2 + 1)
        output.square().sum().backward()
        seen.put(f"output {number}", output)
        seen.gradients(f"step {number}", module)
        optimizer.step()
        optimizer.zero_grad()


case(
    "functions among the inputs",
    "pytorch/pytorch#197889",
    "What Python is given changes between calls and stays as it was in the graph.",
    model(with_function),
    lambda number: ((randn(number, 3, 4), torch.tanh), {}),
    drive=train_with_functions,
)


class WithModelOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(11, 4), nn.Linear(4, 11)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        from transformers.modeling_outputs import CausalLMOutput

        hidden = self.table(ids)
        logits = self.out(hidden)
        return CausalLMOutput(loss=F.cross_entropy(logits.view(-1, 11), labels.view(-1)), logits=logits, hidden_states=(hidden,))


def ids(number: int) -> Any:
    found = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(number))
    return (found,), {"labels": found}


def train_by_attributes(case: Case, optimize: Optimize, seen: Seen) -> None:
    module = begin(case, optimize)
    optimizer = sgd(module)
    for number in range(2):
        args, kwargs = case.inputs(number)
        output = module(*args, **kwargs)
        output.loss.backward()
        seen.put(f"output {number}", (type(output).__name__, list(output), output["logits"], output[0], output.attentions))
        seen.gradients(f"step {number}", module)
        optimizer.step()
        optimizer.zero_grad()
    seen.state("end", module)


case(
    "an output with attributes, keys and positions",
    "huggingface/transformers#8530",
    "Outputs are read as attributes, by key and by position.",
    WithModelOutput,
    ids,
    drive=train_by_attributes,
    needs="transformers",
)


def train_in_pieces(case: Case, optimize: Optimize, seen: Seen) -> None:
    """What was optimized is a part of the model that is trained."""
    model = case.make()
    args, kwargs = case.inputs(0)
    model[1] = optimize(model[1], (model[0](*args),), kwargs)
    optimizer = sgd(model)
    for number in range(3):
        step(case, model, number, seen)
        optimizer.step()
        optimizer.zero_grad()
    seen.state("end", model)


case(
    "a part of a larger model",
    "Lightning-AI/pytorch-lightning#17529",
    "A compiled module inside of another is not known as what it was.",
    lambda: nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 4)), nn.Tanh()
    ),
    noise(3, 4, grad=True),
    drive=train_in_pieces,
)


def train_with_an_optimized_part(case: Case, optimize: Optimize, seen: Seen) -> None:
    """What was optimized already is a part of what is optimized now."""
    made: Any = case.make()
    args, kwargs = case.inputs(0)
    made[1] = optimize(made[1], (made[0](*args),), kwargs)
    module = optimize(made, args, kwargs)
    for number in range(2):
        step(case, module, number, seen)
        module.zero_grad()


case(
    "an optimized part of a model that is optimized",
    "Lightning-AI/pytorch-lightning#19192",
    "What is compiled already is compiled again with the model around it.",
    lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4), nn.Dropout(0.2)), nn.Linear(4, 4)),
    noise(3, 4, grad=True),
    drive=train_with_an_optimized_part,
)
