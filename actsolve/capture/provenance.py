"""Where in the user's model each traced op comes from: module and source line."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.nn.modules import module as nn_module
from torch.overrides import TorchFunctionMode

from actsolve.capture.torch_internals import annotate

_TORCH_DIRECTORY = str(Path(torch.__file__).parent)
_OWN_DIRECTORY = str(Path(__file__).parents[1])


@dataclass(frozen=True, slots=True)
class Origin:
    """Module path and ``file:line`` that an op was traced from."""

    module: str
    source: str


class _Recorder(TorchFunctionMode):
    """Annotates traced nodes with the module that runs and the innermost line outside torch."""

    def __init__(self, module_names: dict[torch.nn.Module, str]) -> None:
        super().__init__()
        self._names = module_names
        self._running: list[str] = []

    def enter_module(self, module: torch.nn.Module, _inputs: Any) -> None:
        self._running.append(self._names.get(module, self._running[-1] if self._running else ""))

    def leave_module(self, _module: torch.nn.Module, _inputs: Any, _output: Any) -> None:
        if self._running:
            self._running.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        annotate(Origin(self._running[-1] if self._running else "", _user_line(sys._getframe(1))))
        return func(*args, **(kwargs or {}))


def _user_line(frame: FrameType | None) -> str:
    """Return ``file:line`` of the innermost frame that is neither torch's nor ours."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH_DIRECTORY, _OWN_DIRECTORY)):
            return f"{_short(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _short(file: str) -> str:
    """Return ``file`` relative to the working directory or to its import root, whichever is shorter."""
    path = Path(file)
    for root in (Path.cwd(), *map(Path, sys.path)):
        try:
            return str(path.relative_to(root))
        except ValueError:
            continue
    return file


@contextlib.contextmanager
def recorded_origins(root: torch.nn.Module) -> Iterator[None]:
    """Within this context, nodes traced from ``root`` and its submodules carry their `Origin`."""
    recorder = _Recorder({module: name for name, module in root.named_modules()})
    enter = nn_module.register_module_forward_pre_hook(recorder.enter_module)
    leave = nn_module.register_module_forward_hook(recorder.leave_module, always_call=True)
    try:
        with recorder:
            yield
    finally:
        enter.remove()
        leave.remove()
