"""Which nodes of a graph Inductor will run as one kernel, by rules much simpler than its own.

A matrix product, a convolution, attention, and whatever else Inductor has no code for, is a kernel of its own. Of the rest,
elementwise ops and reductions, a node joins the kernel that made one of its inputs where both go over as many elements, and
where no kernel would have to run before itself. Views are no part of any kernel; nor is what is made from nothing, such as
``full``: Inductor writes that into whatever reads it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from torch.fx import Graph, Node

from actsolve.capture import replay
from actsolve.capture.to_graph import tensors_of
from actsolve.inductor.torch_inductor import draws_seeds, is_fused, is_reduction, is_view


@dataclass
class Kernel:
    """Nodes that run together.

    Attributes:
        nodes: In order.
        fused: Whether Inductor generates it, so that it may be fused further.
        elements: How many elements it goes over.
        group: Kernels of different groups are not joined.
    """

    nodes: list[Node] = field(default_factory=list)
    fused: bool = False
    elements: int = 0
    group: Hashable = None

    @property
    def name(self) -> str:
        return self.nodes[-1].name if self.fused else self.nodes[0].name


def has_effect(node: Node) -> bool:
    """Whether leaving ``node`` out would change more than its result."""
    return draws_seeds(node) or replay.has_effect(node)


def is_item(node: Node) -> bool:
    """Whether ``node`` is one of several outputs of another."""
    return node.target is operator.getitem


def is_inlined(node: Node) -> bool:
    """Whether ``node`` takes no memory and no kernel: a view, an output picked from one, or made from nothing."""
    if node.op != "call_function" or has_effect(node):
        return False
    if is_item(node):
        source = node.args[0]
        return isinstance(source, Node) and is_view(source)
    return is_view(node) or (not node.all_input_nodes and is_fused(node))


def base_of(node: Node) -> Node:
    """Return the node whose storage ``node`` shows."""
    while is_inlined(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def sources_of(node: Node) -> list[Node]:
    """Return what ``node`` reads, each once: whole storages, without what is made from nothing."""
    bases = (base_of(n) for n in node.all_input_nodes)
    return list(dict.fromkeys(n for n in bases if not is_inlined(n)))


def kernels_of(graph: Graph, group: Callable[[Node], Hashable] = lambda _: None) -> list[Kernel]:
    """Return the kernels of ``graph`` in an order in which they can run.

    Args:
        graph: A forward or a backward graph.
        group: Only nodes of equal group share a kernel.
    """
    build = _Builder(group)
    for node in graph.nodes:
        if node.op == "call_function" and not is_inlined(node):
            build.add(node)
    return build.in_order()


def _elements(node: Node) -> int:
    """How many elements a generated kernel goes over: of a reduction, those that it reads."""
    over = [t for n in node.all_input_nodes for t in tensors_of(n)] if is_reduction(node) else tensors_of(node)
    return max((t.numel() for t in over), default=0)


class _Builder:
    def __init__(self, group: Callable[[Node], Hashable]) -> None:
        self._group = group
        self.kernels: dict[int, Kernel] = {}
        self._of: dict[Node, int] = {}
        self._before: dict[int, int] = {}  # per kernel a bit for each that has to run before it

    def add(self, node: Node) -> None:
        if is_item(node) and node.args[0] in self._of:
            self._put(node, self._of[node.args[0]])  # type: ignore[index]
            return
        effect = has_effect(node)
        needs = {self._of[n] for n in sources_of(node) if n in self._of}
        if effect:  # after all that there is: what it changes may be read there
            needs |= set(self.kernels)
        fused, elements, group = is_fused(node) and not effect, _elements(node), self._group(node)
        home = next((k for k in sorted(needs, reverse=True) if fused and self._takes(k, elements, group, needs)), None)
        if home is None:
            home = max(self.kernels, default=-1) + 1
            self.kernels[home], self._before[home] = Kernel(fused=fused, elements=elements, group=group), 0
        self._put(node, home)
        self._after(home, needs - {home})
        for other in sorted(needs - {home}, reverse=True) if fused else ():
            self._merge(other, home)

    def _put(self, node: Node, home: int) -> None:
        self.kernels[home].nodes.append(node)
        self._of[node] = home

    def _takes(self, kernel: int, elements: int, group: Hashable, needs: set[int]) -> bool:
        """Whether a node may join: a smaller one only where nothing else is needed for it, as what follows a reduction."""
        k = self.kernels[kernel]
        small = elements < k.elements and needs == {kernel}
        if not k.fused or k.group != group or not (elements == k.elements or small):
            return False
        return not any(self._before[other] >> kernel & 1 for other in needs)

    def _after(self, home: int, needs: set[int]) -> None:
        new = 0
        for other in needs:
            new |= 1 << other | self._before[other]
        if new & ~self._before[home]:
            self._before[home] |= new
            for kernel, before in self._before.items():
                if before >> home & 1:
                    self._before[kernel] = before | self._before[home]

    def _merge(self, other: int, home: int) -> None:
        """Join two kernels that make inputs of the same node, unless a third has to run between them."""
        a, b = self.kernels[other], self.kernels[home]
        if not a.fused or a.group != b.group or a.elements != b.elements or not self._before[home] >> other & 1:
            return
        between = self._before[home] & ~(1 << other)
        if any(between >> k & 1 and before >> other & 1 for k, before in self._before.items()):
            return
        for node in a.nodes:
            self._of[node] = home
        b.nodes += a.nodes
        del self.kernels[other]
        self._before[home] = (self._before[home] | self._before.pop(other)) & ~(1 << other)
        for kernel, before in self._before.items():
            if before >> other & 1:
                self._before[kernel] = before & ~(1 << other) | 1 << home | self._before[home]

    def in_order(self) -> list[Kernel]:
        position = {node: i for i, node in enumerate(self._of)}
        for kernel in self.kernels.values():
            kernel.nodes.sort(key=position.__getitem__)
        waiting = {k: before.bit_count() for k, before in self._before.items()}
        ready = [(position[self.kernels[k].nodes[0]], k) for k, n in waiting.items() if n == 0]
        order = []
        while ready:
            _, done = heappop(ready)
            order.append(self.kernels[done])
            for k, before in self._before.items():
                if before >> done & 1:
                    waiting[k] -= 1
                    if waiting[k] == 0:
                        heappush(ready, (position[self.kernels[k].nodes[0]], k))
        assert len(order) == len(self.kernels), "kernels that wait for each other"
        return order
