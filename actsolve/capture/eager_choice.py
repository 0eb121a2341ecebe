"""Which parts of a step to leave in eager: the smallest that hold what no trace can follow, and those that are like them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch

from actsolve.eager_parts import is_callable_attribute, is_called, module_at


def left_in_eager(
    model: torch.nn.Module, eager: tuple[str, ...], module: str | None, around: Mapping[str, str] = MappingProxyType({})
) -> tuple[str, ...] | None:
    """Return what to leave in eager where a trace that left ``eager`` failed; None if that would be the whole model.

    Args:
        model: What is traced.
        eager: Names of the parts that were left in eager.
        module: That of the one that failed; None if what is left in eager is to be wider.
        around: Per part the one that called it, where that is known; else it is the module around it.
    """
    if module is None or any(_is_inside(module, path) for path in eager):
        wider = [around.get(path) or _around(model, path) for path in eager if module is None or _is_inside(module, path)]
        wider += [path for path in eager if module is not None and not _is_inside(module, path)]
    else:
        wider = [*eager, module]
    return None if "" in wider else outermost([*wider, *(p for path in wider for p in _alike(model, path))])


def left_besides(model: torch.nn.Module, eager: tuple[str, ...], modules: Iterable[str]) -> tuple[str, ...] | None:
    """Return what to leave in eager so that none of ``modules`` is traced; likewise."""
    wider: tuple[str, ...] | None = eager
    for module in modules:
        assert wider is not None
        if any(_is_inside(module, path) for path in wider if path not in eager):
            continue
        wider = left_in_eager(model, wider, module) if module else None
        if wider is None:
            return None
    return wider


def outermost(paths: Iterable[str]) -> tuple[str, ...]:
    """Return ``paths`` without those that are inside of another."""
    unique = list(dict.fromkeys(paths))
    return tuple(path for path in unique if not any(path != other and _is_inside(path, other) for other in unique))


def _around(model: torch.nn.Module, path: str) -> str:
    """Return the path of the module around one: of those that are called, which a list of modules is not."""
    around = path.rpartition(".")[0]
    while around and ((module := module_at(model, around)) is None or not is_called(module)):
        around = around.rpartition(".")[0]
    return around


def _is_inside(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}.")


def _alike(model: torch.nn.Module, path: str) -> list[str]:
    """Return the paths of what is called so in modules of the same class, unless that is one of torch's: as one does all do."""
    module, name = module_at(model, path), ""
    if module is None:
        around, _, name = path.rpartition(".")
        module = module_at(model, around)
    if module is None or type(module).__module__.partition(".")[0] == "torch":
        return []
    others = [other for other, m in model.named_modules() if type(m) is type(module) and other]
    return [f"{other}.{name}" for other in others if is_callable_attribute(model.get_submodule(other), name)] if name else others
