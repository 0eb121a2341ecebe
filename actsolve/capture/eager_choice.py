"""Which submodules to leave in eager: the smallest that hold what no trace can follow, and those that are like them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from actsolve.capture.provenance import origin_of


def module_that_raised(error: BaseException, model: torch.nn.Module) -> str | None:
    """Return the path of the innermost submodule of ``model`` whose forward raised ``error``; None if no submodule's did."""
    origin = origin_of(error)
    if origin is not None:
        return origin.module or None
    paths = {id(module): path for path, module in model.named_modules()}
    found, traceback = "", error.__traceback__
    while traceback is not None:
        found = paths.get(id(traceback.tb_frame.f_locals.get("self")), found)
        traceback = traceback.tb_next
    return found or None


def left_in_eager(model: torch.nn.Module, eager: tuple[str, ...], module: str | None) -> tuple[str, ...] | None:
    """Return what to leave in eager where a trace that left ``eager`` failed; None if that would be the whole model.

    Args:
        model: What is traced.
        eager: Paths of the submodules that were left in eager.
        module: Path of the one that failed; None if what is left in eager is to be wider.
    """
    if module is None or any(_is_inside(module, path) for path in eager):
        wider = [_around(model, path) for path in eager if module is None or _is_inside(module, path)]
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
    while around and not is_called(model.get_submodule(around)):
        around = around.rpartition(".")[0]
    return around


def is_called(module: torch.nn.Module) -> bool:
    """Whether ``module`` has a forward."""
    return getattr(type(module), "forward", None) is not torch.nn.Module.forward


def _is_inside(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}.")


def _alike(model: torch.nn.Module, path: str) -> list[str]:
    """Return the paths of the modules of the same class, unless that is one of torch's: what one of them does all do."""
    kind = type(model.get_submodule(path))
    if kind.__module__.partition(".")[0] == "torch":
        return []
    return [other for other, module in model.named_modules() if type(module) is kind and other]
