"""A training step of hundreds of layers, made without a model: for planners at a size that no model of ours has.

Layers are chains with a residual skip: norms, linear and pointwise ops, attention with a second small output. Costs are those of
a roofline at 180 TFLOP/s and 1.2 TB/s, 3 us an op, in bf16.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from actsolve.graph import Graph, Kind, Op, Phase, Value
from actsolve.problem import Costs, Problem

FLOPS_PER_S = 180e12
BYTES_PER_S = 1.2e12
LAUNCH_S = 3e-6
ELEMENT = 2  # bytes
LAYERS = ("attention", "mlp", "gated", "plain")


def layered_problem(n_layers: int, *, tokens: int = 8192, width: int = 2048, alike: bool = True, seed: int = 0) -> Problem:
    """Return a training step with no budget yet: about 12 forward and 19 backward ops for each layer.

    Args:
        n_layers: How many.
        tokens: Rows of each activation.
        width: Columns of the residual stream.
        alike: Each layer is attention and a multilayer perceptron. Else each is of a random kind, and wider or narrower inside.
        seed: Of what is random.
    """
    rng = random.Random(seed)
    step = _Step(tokens)
    stream = step.given("x", width, Kind.INPUT)
    for layer in range(n_layers):
        step.layer = layer
        for kind in ("attention", "gated") if alike else rng.choices(LAYERS, k=2):
            inner = width if alike else int(width * rng.uniform(0.6, 1.4)) // 64 * 64
            stream = step.block(stream, kind, width, inner)
    return step.problem(stream)


@dataclass
class _Step:
    """A forward that is written down op by op; `problem` adds its backward."""

    tokens: int
    ops: list[Op] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    columns: dict[int, int] = field(default_factory=dict)  # of each activation
    gradients: list[int] = field(default_factory=list)
    layer: int = 0

    def given(self, name: str, columns: int, kind: Kind) -> int:
        return self._value(name, columns, kind, None)

    def block(self, stream: int, kind: str, width: int, inner: int) -> int:
        """Append a residual branch; return the stream after it."""
        h = self.forward("norm", (stream,), width)
        if kind == "attention":
            q, k, v = (self.forward("linear", (h,), inner) for _ in range(3))
            h = self.forward("attention", (q, k, v), inner)
        elif kind == "gated":
            gate, up = self.forward("linear", (h,), 3 * inner), self.forward("linear", (h,), 3 * inner)
            h = self.forward("mul", (self.forward("silu", (gate,), 3 * inner), up), 3 * inner)
        else:
            h = self.forward("linear", (h,), (4 if kind == "mlp" else 1) * inner)
            h = self.forward("gelu" if kind == "mlp" else "relu", (h,), self.columns[h])
        h = self.forward("linear", (h,), width)
        return self.forward("add", (stream, h), width)

    def forward(self, kind: str, inputs: tuple[int, ...], columns: int) -> int:
        """Append a forward op; return its first output."""
        index = len(self.ops)
        read = inputs
        if kind == "linear":
            weight = Value(f"w{index}", self.columns[inputs[0]] * columns * ELEMENT, Kind.PARAMETER)
            self.values.append(weight)
            read = (*inputs, len(self.values) - 1)
        out = self._value(f"v{index}", columns, Kind.ACTIVATION, index)
        outputs = [out]
        if kind in ("norm", "attention"):  # its statistics
            outputs.append(self._value(f"s{index}", 2 if kind == "norm" else 32, Kind.ACTIVATION, index))
        self._op(kind, Phase.FORWARD, read, tuple(outputs))
        return out

    def problem(self, last: int) -> Problem:
        gradient_of = {last: self._value("tangent", self.columns[last], Kind.TANGENT, None)}
        for forward in reversed(self.ops[:]):
            self.layer = forward.layer or 0
            self._backward(forward, gradient_of)
        graph = Graph(tuple(self.ops), tuple(self.values), (last,), tuple(self.gradients), name="layered").verify()
        seconds = tuple(self.seconds)
        return Problem(graph, Costs(seconds, seconds, (0,) * len(seconds), "layered"), 1 << 62)

    def _backward(self, forward: Op, gradient_of: dict[int, int]) -> None:
        """Append the gradients of one forward op, and their sum with those that are there."""
        incoming = gradient_of[forward.outputs[0]]
        activations = [v for v in forward.inputs if self.values[v].kind is not Kind.PARAMETER]
        kind = forward.target.removeprefix("layered.")
        if kind == "add":
            made = [incoming] * 2
        elif kind == "linear":
            (x,), weight = activations, forward.inputs[-1]
            made = [self._gradient("linear_input", (incoming, weight), x)]
            self.gradients.append(self._gradient("linear_weight", (incoming, x), weight))
        elif kind == "mul":
            made = [self._gradient("mul", (incoming, other), v) for v, other in zip(activations, activations[::-1], strict=True)]
        elif kind == "attention":
            read = (incoming, *activations, *forward.outputs)
            outputs = tuple(
                self._value(f"g{len(self.ops)}_{i}", self.columns[v], producer=len(self.ops)) for i, v in enumerate(activations)
            )
            self._op("attention_backward", Phase.BACKWARD, read, outputs)
            made = list(outputs)
        else:
            saved = {"relu": forward.outputs[0]}.get(kind, activations[0])
            read = (incoming, saved, *(forward.outputs[1:] if kind == "norm" else ()))
            made = [self._gradient(kind, read, activations[0])]
        for v, gradient in zip(activations, made, strict=True):
            gradient_of[v] = self._gradient("sum", (gradient_of[v], gradient), v) if v in gradient_of else gradient

    def _gradient(self, kind: str, read: tuple[int, ...], of: int) -> int:
        """Append a backward op that makes the gradient of a value; return that."""
        self.values.append(Value(f"g{len(self.ops)}", self.values[of].size_bytes, producer=len(self.ops)))
        made = len(self.values) - 1
        self.columns[made] = self.columns.get(of, 0)
        self._op(f"{kind}_backward" if kind != "sum" else "sum", Phase.BACKWARD, read, (made,))
        return made

    def _value(self, name: str, columns: int, kind: Kind = Kind.ACTIVATION, producer: int | None = None) -> int:
        self.values.append(Value(name, self.tokens * columns * ELEMENT, kind, producer))
        self.columns[len(self.values) - 1] = columns
        return len(self.values) - 1

    def _op(self, kind: str, phase: Phase, read: tuple[int, ...], made: tuple[int, ...]) -> None:
        moved = sum(self.values[v].size_bytes for v in (*read, *made))
        flops = 0.0
        if kind.startswith("linear"):  # rows x columns x columns, and each of these is a factor of two of the three sizes
            sizes = [self.values[v].size_bytes / ELEMENT for v in (read[0], read[1], made[0])]
            flops = 2 * (sizes[0] * sizes[1] * sizes[2]) ** 0.5
        elif kind.startswith("attention"):
            flops = 2 * self.tokens * 2048 * self.columns[read[0]] * (1 if phase is Phase.FORWARD else 2.5)
        self.seconds.append(max(flops / FLOPS_PER_S, moved / BYTES_PER_S) + LAUNCH_S)
        replayable = phase is Phase.FORWARD
        self.ops.append(
            Op(
                f"op{len(self.ops)}",
                f"layered.{kind}",
                phase,
                tuple(dict.fromkeys(read)),
                made,
                int(flops),
                replayable,
                layer=self.layer,
            )
        )
