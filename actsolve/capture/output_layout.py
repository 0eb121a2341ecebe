"""What a traced step returns, flat, and what its caller expects: the same nested, and the module changed as the forward does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from actsolve.capture.state import Setting, Write
from actsolve.capture.structure import Made, Structure, refuse_hidden_data, take_apart


@dataclass
class OutputLayout:
    """How the flat tensors that the traced step returns become what its caller expects.

    Attributes:
        writes: What the first of them are assigned to.
        settings: Plain values that the forward puts into the module; a forward of a module that has them makes none.
        structure: How the others were nested.
        constants: Leaves that are no tensors, by position.
        which: Per leaf that is a tensor, which of the others it is: one that is returned in two places is one tensor.
    """

    writes: tuple[Write, ...] = ()
    settings: tuple[Setting, ...] = ()
    structure: Structure | None = None
    constants: dict[int, Any] = field(default_factory=dict)
    which: tuple[int, ...] = ()

    def record(
        self, writes: dict[Write, torch.Tensor], settings: Sequence[Setting], output: Any, given: list[Any]
    ) -> list[torch.Tensor]:
        """Take ``output`` of a forward that was ``given`` some leaves apart; return the tensors and remember the rest."""
        leaves, self.structure = take_apart(output, Made(given))
        self.constants = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
        for constant in self.constants.values():
            refuse_hidden_data(constant, "an output")
        self.writes, self.settings = tuple(writes), tuple(settings)
        tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
        numbers = {key: number for number, key in enumerate(tensors)}
        self.which = tuple(numbers[id(leaf)] for leaf in leaves if isinstance(leaf, torch.Tensor))
        return [*writes.values(), *tensors.values()]

    def restore(self, model: torch.nn.Module, tensors: list[torch.Tensor]) -> Any:
        """Assign to ``model`` what the traced forward did, and return the output with ``tensors`` in it."""
        assert self.structure is not None
        n_writes = len(self.writes)
        for write, tensor in zip(self.writes, tensors[:n_writes], strict=True):
            write.assign(model, tensor)
        for setting in self.settings:
            setting.assign(model)
        rest = (tensors[n_writes + number] for number in self.which)
        return self.structure.restore(
            [self.constants[i] if i in self.constants else next(rest) for i in range(self.structure.n_leaves)]
        )
