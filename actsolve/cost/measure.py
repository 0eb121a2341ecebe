"""What each op takes on this machine: ``--hardware auto``.

Every distinct signature is run on real tensors and timed; its workspace is read from the allocator. Figures are kept on disk.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

from actsolve.capture.eager_regions import taken_by
from actsolve.capture.to_graph import tensors_of
from actsolve.capture.torch_internals import storage_key
from actsolve.cost.machine import device_name, environment, free_bytes, require_device
from actsolve.cost.measured_cache import Measured, MeasuredCache
from actsolve.cost.roofline import moved_bytes
from actsolve.cost.sample_call import SampleCall, sample_call, storage_bytes
from actsolve.cost.spot_check import still_true
from actsolve.cost.timing import COPY_BYTES, Spread, Timed, copy, get_state, restore_state, timed
from actsolve.graph import RNG_STATE_TARGET, Graph
from actsolve.problem import Costs
from actsolve.runtime.memory_events import MemoryRecorder, measure_peak, peak_of
from actsolve.units import format_bytes

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with how many signatures are done, and of how many."""

_BATCH = 32  # signatures that share a profile, and are written to the cache together
_LAUNCH_S = 5e-6  # added to an estimate by bytes
_COLLECTIVES = ("c10d", "symm_mem", "fsdp")
_GET_STATE, _RESTORE_STATE, _COPY = f"{RNG_STATE_TARGET}:get", f"{RNG_STATE_TARGET}:restore", "actsolve.copy"


def measure_costs(
    graph: Graph,
    nodes: Sequence[Node | None],
    *,
    cache: MeasuredCache | None = None,
    progress: Progress | None = None,
) -> Costs:
    """Return what each op of ``graph`` takes on the device that its nodes name.

    Args:
        graph: The training step.
        nodes: Per op the call that it was captured from, with fake tensors in its and its arguments'
            ``meta["val"]``; None for an ``actsolve.rng_state`` op.
        cache: What was measured before; the user's cache on disk if left out.
        progress: Told how far it is.

    Returns:
        Costs whose `unknown` lists ops that could not be run alone: they are costed by their bytes at
        the copy bandwidth measured here, without workspace, and the log says why. The random state
        and the step's own tensors are left as they were.

    Raises:
        UsageError: the step's device is not here.
    """
    devices = list(dict.fromkeys(_device_of(node) for node in nodes if node is not None))
    main = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
    for device in devices:
        require_device(device)
    cache = cache or MeasuredCache(environment(main))
    known = cache.read()
    in_eager = _of_regions(graph, nodes, known)
    called = [(op.signature, node) for op, node in zip(graph.ops, nodes, strict=True) if node is not None]
    wanted = {signature: node for signature, node in called if signature not in in_eager}
    n_runs = Counter(signature for signature, _ in called if signature in wanted)
    with undisturbed(devices):
        known = still_true(known, n_runs, lambda s: _seconds_now(wanted[s]))
        todo = {s: node for s, node in wanted.items() if s not in known}
        found, failed = _measure_all(todo, cache, progress)
        extras = _measure_extras({*devices, main}, known, cache)
    cache.add({s: figures for s, figures in in_eager.items() if figures != known.get(s)})
    return _costs(graph, nodes, {**known, **found, **extras, **in_eager}, failed, main)


def _of_regions(graph: Graph, nodes: Sequence[Node | None], known: Mapping[str, Measured]) -> dict[str, Measured]:
    """Return the figures of what is left in eager, measured on the step's own inputs; its time as it was known, if at all."""
    found: dict[str, Measured] = {}
    for op, node in zip(graph.ops, nodes, strict=True):
        if node is not None and (taken := taken_by(node)) is not None:
            workspace_bytes = max(0, taken.peak_bytes - _fresh_bytes(node))
            before = found.get(op.signature, known.get(op.signature))
            seconds = taken.seconds if before is None else before.seconds
            most_bytes = max(workspace_bytes, found[op.signature].workspace_bytes if op.signature in found else 0)
            found[op.signature] = Measured(seconds=seconds, workspace_bytes=most_bytes)
    return found


def _costs(
    graph: Graph, nodes: Sequence[Node | None], known: Mapping[str, Measured], failed: Mapping[str, str], main: torch.device
) -> Costs:
    seconds, replay_seconds, workspace_bytes, unknown = [], [], [], []
    for op, node in zip(graph.ops, nodes, strict=True):
        device = main if node is None else _device_of(node)
        if node is None:
            figures = Measured(seconds=0.0)  # a state is saved for a replay, which pays for it
        elif op.signature in failed:
            copy_s = known[f"{_COPY}@{device.type}"].seconds
            figures = Measured(seconds=moved_bytes(graph, op) * copy_s / (2 * COPY_BYTES) + _LAUNCH_S)
            unknown.append(op.name)
            logger.warning("%s cannot be measured alone (%s) and is costed by its bytes", op.name, failed[op.signature])
        else:
            figures = known[op.signature]
        restore_s = sum(known[f"{name}@{device.type}"].seconds for name in (_GET_STATE, _RESTORE_STATE)) if op.random else 0.0
        seconds.append(figures.seconds)
        replay_seconds.append(figures.seconds + restore_s)
        workspace_bytes.append(figures.workspace_bytes)
    return Costs(
        seconds=tuple(seconds),
        replay_seconds=tuple(replay_seconds),
        workspace_bytes=tuple(workspace_bytes),
        source=f"measured on {device_name(main)}, torch {torch.__version__}, {torch.get_num_threads()} threads",
        unknown=tuple(unknown),
    )


# -- which signatures --------------------------------------------------------------------------------------------------


def _measure_all(
    todo: Mapping[str, Node], cache: MeasuredCache, progress: Progress | None
) -> tuple[dict[str, Measured], dict[str, str]]:
    """Return figures by signature, and the reason for each signature that could not be run."""
    found: dict[str, Measured] = {}
    failed: dict[str, str] = {}
    spread = Spread()
    items = list(todo.items())
    for start in range(0, len(items), _BATCH):
        batch = dict(items[start : start + _BATCH])
        times: dict[str, Timed] = {}
        for done, (signature, node) in enumerate(batch.items(), start=start + 1):
            try:
                times[signature] = timed(_checked_call(node), _device_of(node))
                spread.add(times[signature])
            except Exception as error:  # whatever a kernel raises on made-up arguments
                failed[signature] = _first_line(error)
            if progress is not None:
                progress(done, len(items))
        workspaces = _workspaces({s: batch[s] for s in times}, failed)
        now = time.time()
        fresh = {
            s: Measured(seconds=times[s].seconds, workspace_bytes=size, rough_at=now if times[s].rough else None, at=now)
            for s, size in workspaces.items()
        }
        cache.add(fresh)
        found.update(fresh)
    spread.warn_if_busy()
    return found, failed


def _seconds_now(node: Node) -> float | None:
    """Return what an op that was measured before takes; None if it cannot be run now."""
    try:
        return timed(_checked_call(node), _device_of(node)).seconds
    except Exception as error:  # such as that memory is short
        logger.info("%s is not measured again (%s)", node, _first_line(error))
        return None


def _checked_call(node: Node) -> SampleCall:
    namespace = node.target.namespace if isinstance(node.target, torch._ops.OpOverload) else ""
    if any(word in namespace for word in _COLLECTIVES):
        raise TypeError("a collective waits for other processes")
    needed, free = 2 * storage_bytes(node), free_bytes(_device_of(node))
    if needed > free:
        raise MemoryError(f"it may take {format_bytes(needed)}, and {format_bytes(int(free))} are free")
    return sample_call(node)


def _measure_extras(devices: set[torch.device], known: Mapping[str, Measured], cache: MeasuredCache) -> dict[str, Measured]:
    """Return what the generator's state and a large copy take on each kind of device, where it is not known."""
    extras: dict[str, Measured] = {}
    for device in {d.type: d for d in devices}.values():
        for name, prepare in ((_GET_STATE, get_state), (_RESTORE_STATE, restore_state), (_COPY, copy)):
            key = f"{name}@{device.type}"
            if key not in known:
                extras[key] = Measured(seconds=timed(prepare(device), device).seconds)
    cache.add(extras)
    return extras


# -- workspace ---------------------------------------------------------------------------------------------------------


def _workspaces(nodes: Mapping[str, Node], failed: dict[str, str]) -> dict[str, int]:
    """Return per signature the most bytes that a run allocates at once beyond the storages that the graph knows of."""
    peaks: dict[str, int] = {}
    on_cpu = {s: node for s, node in nodes.items() if _device_of(node).type == "cpu"}
    recorded = []
    with MemoryRecorder() as recorder:
        for signature, node in on_cpu.items():
            try:
                call = _checked_call(node)
            except Exception as error:
                failed[signature] = _first_line(error)
                continue
            with recorder.region():
                result = call()
            del result, call
            recorded.append(signature)
    for signature, timeline in zip(recorded, recorder.timelines(), strict=True):
        peaks[signature] = peak_of(timeline)
    for signature in nodes.keys() - on_cpu.keys():
        measured = measure_peak(_checked_call(nodes[signature]), _device_of(nodes[signature]))
        peaks[signature] = measured.peak_bytes
    return {s: max(0, peaks[s] - _fresh_bytes(nodes[s])) for s in nodes if s in peaks}


def _fresh_bytes(node: Node) -> int:
    """Bytes of the storages that ``node`` makes."""
    read = {storage_key(t) for n in node.all_input_nodes for t in tensors_of(n)}
    return sum({storage_key(t): t.untyped_storage().nbytes() for t in tensors_of(node) if storage_key(t) not in read}.values())


# -- surroundings ------------------------------------------------------------------------------------------------------


@contextmanager
def undisturbed(devices: Iterable[torch.device]) -> Iterator[None]:
    """Run plain kernels whatever the caller's modes are, and leave the generators as they were."""
    cuda = sorted({d.index or 0 for d in devices if d.type == "cuda"})
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())  # private, but for a fake mode around us nothing else will do
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices=cuda))
        for kind in {"cpu", *(["cuda"] if cuda else [])}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _device_of(node: Node) -> torch.device:
    """Where ``node`` runs: the device of its result, or of what it reads."""
    tensors = [*tensors_of(node), *(t for n in node.all_input_nodes for t in tensors_of(n))]
    return tensors[0].device if tensors else torch.device("cpu")


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
