"""`backend`: actsolve as a partitioner for ``torch.compile``."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from actsolve.capture.torch_internals import storage_key
from actsolve.cost.hardware import profile
from actsolve.cost.optimizers import optimizer_memory
from actsolve.errors import ActsolveError, CaptureError, InfeasibleBudget, UsageError
from actsolve.inductor.costs import costs_of
from actsolve.inductor.operand_copies import with_operand_copies
from actsolve.inductor.search import Round, Step, needed, rounds_of
from actsolve.inductor.split import Split, split_of, symbolic_shapes
from actsolve.inductor.torch_inductor import Modules, Partitioner, Strides, compiled, frame_id, has_checkpoints, passing_through
from actsolve.inductor.trial import Trial, trial
from actsolve.problem import Problem
from actsolve.settings import Settings
from actsolve.static_memory import GPU_RESERVE, Budget, OptimizerMemory, Reserve, parse_budget
from actsolve.units import MAX_BYTES, format_bytes

_HERE = Path(__file__).parent


def backend(
    mem_budget: str | int | float,
    *,
    optimizer: str | torch.optim.Optimizer = "adamw",
    hardware: str = "auto",
    gap: float = 0.01,
    time_limit_s: float = 60.0,
    reserve_bytes: int | None = None,
    rounds: int = 4,
    options: Mapping[str, Any] | None = None,
) -> CompileBackend:
    """Return a backend for ``torch.compile``: Inductor, within a memory budget.

        model = torch.compile(model, backend=actsolve.backend("60%"), dynamic=False)

    At its first call a graph is compiled as Inductor does by itself, and run, forward and backward, on the inputs of that
    call. If that fits the budget, it is what is used. Else plans are made, compiled and run likewise, up to ``rounds`` of them,
    and the fastest that fits by measurement is used. Gradients, parameters, buffers and random state stay as they were. What a
    plan computed is compared to what Inductor's own did: a difference is warned of, and reported.

    Each graph that is trained is planned for by itself. A share is of what that graph needs above its own inputs and
    optimizer state; so with graph breaks every graph gets the same share. Bytes and ``"min"`` are of a whole step, so that
    there the step must be one graph: a second one is refused. A graph for inputs of another shape is planned for anew. Use one
    backend per model. Graphs without a backward are compiled as Inductor does. Shapes must be static.

    Args:
        mem_budget: Cap on device memory of the whole training step, as in `actsolve.optimize`: ``"8GiB"``, bytes; a share such
            as ``"60%"`` or 0.6 of what Inductor's own step needs above static memory; or ``"min"``.
        optimizer: Its state is part of static memory: a name or an instance.
        hardware: ``"auto"`` measures the kernels that Inductor calls; or a profile's name, such as ``"a100"``.
        gap: Relative gap at which the solver may stop.
        time_limit_s: Seconds after which it stops all the same, per plan.
        reserve_bytes: Left free for the allocator; by default 0 on a CPU and 5% of the budget on a GPU.
        rounds: How many plans are compiled and measured at most; where none of them fits, the smallest one is too.
        options: Of Inductor (`torch._inductor.config`), as ``torch.compile`` takes them for its own backend.

    Raises:
        UsageError: an argument cannot be used; at a call, also a graph that cannot be planned.
        InfeasibleBudget: at a call: no plan that was tried fits.
    """
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise UsageError(f"cannot use rounds={rounds!r}", why="it is not a positive number of plans", try_="4")
    if "_pre_fusion_custom_pass" in (options or {}):
        raise UsageError(
            "cannot use options with _pre_fusion_custom_pass", why="a plan has one of its own there", try_="options without it"
        )
    settings = Settings(
        optimizer=optimizer,
        hardware=hardware,
        gap=gap,
        time_limit_s=time_limit_s,
        reserve_bytes=reserve_bytes,
        host_budget_bytes=0,
    )
    if hardware != "auto":
        profile(hardware)  # an unknown name is told now
    return CompileBackend(parse_budget(mem_budget), settings, rounds, dict(options or {}))


@dataclass(frozen=True)
class CompiledGraph:
    """What became of one graph that is trained. Bytes include static memory.

    Attributes:
        budget_bytes: The cap.
        static_bytes: Inputs of the graph (parameters and buffers among them) and optimizer state.
        stock_bytes: Measured peak of Inductor's own step; None where it did not fit into the device's memory.
        peak_bytes: Measured peak of the step that is used.
        predicted_bytes: What the plan said; None where Inductor's own step is used.
        extra_s: Seconds that the plan adds to Inductor's own step, by its costs.
        difference: The largest relative difference to what Inductor's own step computed; None where all bits are equal.
        compared: Whether there was something to compare with.
        tried: Per plan the bytes that were planned for, and those that were measured.
    """

    budget_bytes: int
    static_bytes: int
    stock_bytes: int | None
    peak_bytes: int
    predicted_bytes: int | None = None
    extra_s: float = 0.0
    difference: float | None = None
    compared: bool = True
    tried: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        stock = "does not fit here" if self.stock_bytes is None else format_bytes(self.stock_bytes)
        bits = "not compared" if not self.compared else "bitwise" if self.difference is None else f"within {self.difference:.1e}"
        return (
            f"budget {format_bytes(self.budget_bytes)}, static {format_bytes(self.static_bytes)}, Inductor's own {stock}, "
            f"this one {format_bytes(self.peak_bytes)}, {len(self.tried)} plans tried, {1e3 * self.extra_s:.3g} ms more, {bits}"
        )


@dataclass
class CompileBackend:
    """What ``torch.compile`` calls with each graph; `backend` makes it.

    Attributes:
        graphs: What became of the graphs that are trained, in order.
    """

    budget: Budget
    settings: Settings
    rounds: int
    options: dict[str, Any]
    graphs: list[CompiledGraph] = field(default_factory=list)
    _frames: set[object] = field(default_factory=set)

    __name__ = "actsolve"

    def report(self) -> str:
        """Return a line per graph."""
        return "\n".join(map(str, self.graphs)) or "nothing was compiled for training yet"

    def __call__(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            return self._compiled(module, inputs)
        except ActsolveError as error:
            raise passing_through(error) from error

    def _compiled(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if not torch.is_grad_enabled() or not any(isinstance(t, torch.Tensor) and t.requires_grad for t in inputs):
            return compiled(module, inputs, None, self.options)
        _refuse_symbols(inputs)
        splits: list[Split] = []

        def observe(joint: torch.fx.GraphModule, stock: Callable[[], Modules], n_outputs: int) -> Modules:
            _refuse_checkpoints(joint)
            modules = stock()
            splits.append(split_of(*modules, n_outputs))
            copies = split_of(*with_operand_copies(*modules, n_outputs), n_outputs)
            if copies.graph.fingerprint != splits[0].graph.fingerprint:
                splits.insert(0, copies)  # what it tells is nearer to what Inductor does; the other may come nearer to its bits
            return modules

        observer = Partitioner(observe, None)
        function = compiled(module, inputs, observer, self.options)
        if not splits:  # nothing that is returned requires a gradient
            return function
        self._refuse_second_graph()
        own = _tried(function, inputs)
        steps, static_bytes = [], 0
        for split in splits:
            problem, static_bytes = self._problem(split, inputs, observer.strides)
            steps.append(Step(module, inputs, split, problem, self.options, _own_code(), copies=split is not splits[-1]))
        problem = steps[0].problem
        if self.budget.is_smallest:
            least = (step.run_smallest(self._planner) for step in steps)
            smallest = min(least, key=lambda found: needed(found.trial, problem))
            if own is not None and needed(own, problem) <= needed(smallest.trial, problem):
                return self._use_own(
                    function, own, static_bytes, self._reserve(inputs).budget_for(static_bytes + needed(own, problem)), problem
                )
            needs_bytes = self._reserve(inputs).budget_for(static_bytes + needed(smallest.trial, problem))
            return self._use([smallest], own, static_bytes, needs_bytes, problem)
        budget_bytes = self._budget_bytes(own, static_bytes, problem, inputs)
        dynamic_bytes = budget_bytes - self._reserve(inputs).of(budget_bytes) - static_bytes
        if own is not None and needed(own, problem) <= dynamic_bytes:
            return self._use_own(function, own, static_bytes, budget_bytes, problem)
        del function
        found = rounds_of(steps, dynamic_bytes, own, self._planner, self.rounds)
        if needed(found[-1].trial, problem) > dynamic_bytes:
            raise _infeasible(found, own, budget_bytes, static_bytes, problem)
        return self._use(found, own, static_bytes, budget_bytes, problem)

    @property
    def _planner(self) -> Any:
        return self.settings.planner_options()

    def _refuse_second_graph(self) -> None:
        """With a budget in bytes the step must be one graph; the same code compiled again is not a second one."""
        self._frames.add(frame_id())
        if len(self._frames) > 1 and self.budget.share is None:
            raise UsageError(
                "the step is more than one graph, and the budget is that of the whole step",
                why="what the others need is not known when the first is compiled",
                try_="torch.compile(..., fullgraph=True), which says what breaks it; a share such as 60%, for each graph by "
                "itself; one backend per model",
            )

    def _problem(self, split: Split, inputs: Sequence[Any], strides: Mapping[str, Strides]) -> tuple[Problem, int]:
        """Return the problem without static memory, whose budget is set per round; and the static bytes."""
        tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
        memory = _optimizer_memory(self.settings, tensors)
        storages = {storage_key(t): t.untyped_storage().nbytes() for t in tensors}
        costs = costs_of(split, self.settings.hardware, _device(inputs), strides)
        problem = Problem(split.graph, costs, MAX_BYTES, optimizer_bytes=memory.temporary_bytes)
        return problem, sum(storages.values()) + memory.state_bytes

    def _reserve(self, inputs: Sequence[Any]) -> Reserve:
        if self.settings.reserve_bytes is not None:
            return Reserve(size_bytes=self.settings.reserve_bytes)
        return Reserve(share=GPU_RESERVE) if _device(inputs).type == "cuda" else Reserve()

    def _budget_bytes(self, own: Trial | None, static_bytes: int, problem: Problem, inputs: Sequence[Any]) -> int:
        if self.budget.size_bytes is not None:
            return self.budget.size_bytes
        if own is None:
            raise UsageError(
                "a share of what Inductor's own step needs is not known",
                why="that step does not fit into the device's memory, so that it cannot be measured",
                try_="a budget in bytes",
            )
        return self._reserve(inputs).budget_for(self.budget.resolve(static_bytes, static_bytes + needed(own, problem)))

    def _use_own(
        self, function: Callable[..., Any], own: Trial, static_bytes: int, budget_bytes: int, problem: Problem
    ) -> Callable[..., Any]:
        peak_bytes = static_bytes + needed(own, problem)
        self.graphs.append(CompiledGraph(budget_bytes, static_bytes, peak_bytes, peak_bytes))
        return function

    def _use(
        self, found: list[Round], own: Trial | None, static_bytes: int, budget_bytes: int, problem: Problem
    ) -> Callable[..., Any]:
        used = found[-1]
        difference = None if own is None else used.trial.difference(own)
        graph = CompiledGraph(
            budget_bytes,
            static_bytes,
            None if own is None else static_bytes + needed(own, problem),
            static_bytes + needed(used.trial, problem),
            static_bytes + used.timeline.peak_bytes,
            used.timeline.extra_s,
            difference,
            own is not None,
            tuple((static_bytes + r.timeline.peak_bytes, static_bytes + needed(r.trial, problem)) for r in found),
        )
        self.graphs.append(graph)
        if difference is not None:
            warnings.warn(
                f"the compiled step differs from Inductor's own by up to {difference:.1e}, relative to the largest figure: "
                "a kernel that is fused in another way rounds in another way",
                stacklevel=2,
            )
        return used.function


def _tried(function: Callable[..., Any], inputs: Sequence[Any]) -> Trial | None:
    """Return what Inductor's own step takes; None where the device has not that much."""
    try:
        return trial(function, inputs)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None


def _optimizer_memory(settings: Settings, tensors: list[torch.Tensor]) -> OptimizerMemory:
    return optimizer_memory(settings.optimizer, [t for t in tensors if isinstance(t, torch.nn.Parameter) and t.requires_grad])


def _device(inputs: Sequence[Any]) -> torch.device:
    devices = [t.device for t in inputs if isinstance(t, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _infeasible(
    found: list[Round], own: Trial | None, budget_bytes: int, static_bytes: int, problem: Problem
) -> InfeasibleBudget:
    trials = [found[-1].trial, *([] if own is None else [own])]
    smallest_bytes = static_bytes + min(needed(one, problem) for one in trials)
    return InfeasibleBudget(
        f"no compiled step fits {format_bytes(budget_bytes)} ({budget_bytes} bytes)",
        where="torch.compile",
        why=f"the smallest of {len(found)} that were compiled and measured takes {format_bytes(smallest_bytes)}, of which "
        f"{format_bytes(static_bytes)} are static",
        try_=f"a budget of {smallest_bytes} bytes, or a smaller batch; actsolve.optimize, whose plans run as they are, may fit",
        smallest_bytes=smallest_bytes,
    )


def _refuse_symbols(inputs: Sequence[Any]) -> None:
    if any(not isinstance(t, torch.Tensor) or any(not isinstance(n, int) for n in t.shape) for t in inputs):
        raise symbolic_shapes()


def _refuse_checkpoints(joint: torch.fx.GraphModule) -> None:
    if has_checkpoints(joint):
        raise CaptureError(
            "the model recomputes by torch.utils.checkpoint",
            why="what is recomputed is for the plan to decide",
            try_="the model without it",
        )


def _own_code() -> str:
    """Return a key for what is done with a plan: this folder's code, and torch's version."""
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted(_HERE.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
