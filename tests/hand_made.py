"""A training step small enough to follow by hand, with one of each oddity."""

from __future__ import annotations

from actsolve.graph import RNG_STATE_TARGET, Graph, Kind, Op, Phase, Value

F, B = Phase.FORWARD, Phase.BACKWARD

X, W, STAT, A, BB, C, S, D, E, NEW, OUT, TANGENT, GE, GD, GC, GB, GA, GW = range(18)

VALUES = (
    Value("x", 4096, Kind.INPUT, shape=(32, 32), dtype="float32"),
    Value("w", 1024, Kind.PARAMETER, shape=(16, 16), dtype="float32"),
    Value("stat", 128, Kind.BUFFER, shape=(32,), dtype="float32"),
    Value("a", 4096, producer=0, shape=(32, 32), dtype="float32"),
    Value("b", 2048, producer=1, shape=(16, 32), dtype="float32"),
    Value("c", 2048, producer=1, shape=(16, 32), dtype="float32"),
    Value("s", 5056, producer=2, shape=(5056,), dtype="uint8"),
    Value("d", 2048, producer=3, shape=(16, 32), dtype="float32"),
    Value("e", 2048, producer=4, shape=(16, 32), dtype="float32"),
    Value("new", 128, producer=4, shape=(32,), dtype="float32"),
    Value("out", 4, producer=5, dtype="float32"),
    Value("tangent", 4, Kind.TANGENT, dtype="float32"),
    Value("ge", 2048, producer=6),
    Value("gd", 2048, producer=7),
    Value("gc", 2048, producer=7),
    Value("gb", 2048, producer=8),
    Value("ga", 4096, producer=9),
    Value("gw", 1024, producer=10),
)
OPS = (
    Op("mm", "aten.mm.default", F, (X, W), (A,), flops=1_234_567, module="net.fc", layer=0, source="net.py:10"),
    Op("split", "aten.split_copy.Tensor", F, (A,), (BB, C), source="net.py:11"),
    Op("state", RNG_STATE_TARGET, F, (), (S,), replayable=False, why_not="RNG state", optional=True),
    Op("dropout", "aten.native_dropout.default", F, (BB,), (D,), flops=None, replay_inputs=(S,), random=True, source="net.py:12"),
    Op("norm", "my::norm", F, (D, C, STAT), (E, NEW), flops=999, replayable=False, why_not="a custom op", source="net.py:13"),
    Op("loss", "aten.sum.default", F, (E,), (OUT,), flops=512, source="net.py:14"),
    Op("loss_b", "aten.expand.default", B, (TANGENT, E), (GE,), replayable=False),
    Op("norm_b", "my::norm_backward", B, (GE, D), (GD, GC), flops=5_000_000_000_000, replayable=False, in_place=(GE, GD)),
    Op("dropout_b", "aten.mul.Tensor", B, (GD, D), (GB,), replayable=False, in_place=(GD, GB)),
    Op("split_b", "aten.cat.default", B, (GB, GC, A), (GA,), replayable=False),
    Op("mm_b", "aten.mm.default", B, (GA, X), (GW,), flops=2_469_134, replayable=False),
)
HAND_MADE = Graph(OPS, VALUES, outputs=(OUT,), gradients=(GW,), updates=((NEW, STAT),), name="hand-made")
