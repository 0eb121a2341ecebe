"""Graph files, format ``actsolve-graph-1``: a training step, and what its ops cost where that is known.

The models mirror `Graph`, `Op`, `Value` and `Costs` field by field, with two differences: a value's producer is not written,
since the ops say it, and FLOPs that are not written are unknown, not 0. Values and ops are referred to by index.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field, ValidationError

from actsolve.errors import FileFormatError
from actsolve.graph import Graph, GraphError, Kind, Op, Phase, Value
from actsolve.json_file import Count, FileModel, Name, Seconds, Text, first_problem, read_model, shown, write_json
from actsolve.problem import Costs

FORMAT = "actsolve-graph-1"
_WHAT = "graph file"
_MAX_LENGTH = 2_000_000

Indices = Annotated[tuple[Count, ...], FailFast()]


class ValueModel(FileModel):
    name: Name
    size_bytes: Count
    kind: Kind = Kind.ACTIVATION
    shape: Indices = ()
    dtype: Text = ""


class OpModel(FileModel):
    name: Name
    target: Name
    phase: Phase
    inputs: Indices
    outputs: Indices
    flops: Count | None = None
    replayable: bool = True
    why_not: Text = ""
    replay_inputs: Indices = ()
    random: bool = False
    optional: bool = False
    in_place: tuple[Count, Count] | None = None
    module: Text = ""
    layer: Count | None = None
    source: Text = ""
    signature: Text = ""


class CostsModel(FileModel):
    seconds: Annotated[tuple[Seconds, ...], FailFast()]
    replay_seconds: Annotated[tuple[Seconds, ...], FailFast()]
    workspace_bytes: Annotated[tuple[Count, ...], FailFast()]
    source: Text = ""
    unknown: tuple[Text, ...] = ()


class GraphFile(FileModel):
    format: Literal["actsolve-graph-1"]
    name: Text = ""
    outputs: Indices = ()
    gradients: Indices = ()
    updates: tuple[tuple[Count, Count], ...] = ()
    values: Annotated[tuple[ValueModel, ...], FailFast(), Field(max_length=_MAX_LENGTH)]
    ops: Annotated[tuple[OpModel, ...], FailFast(), Field(max_length=_MAX_LENGTH)]
    costs: CostsModel | None = None


def save_graph(path: str | os.PathLike[str], graph: Graph, costs: Costs | None = None) -> None:
    """Write a graph, and its costs where given. The file appears whole or not at all.

    Raises:
        FileFormatError: a field holds what no graph file may: a negative size, a control character in a
            name, a NaN.
        UsageError: the path cannot be written.
    """
    write_json(path, graph_content(graph, costs, where=path), what=_WHAT)


def graph_content(graph: Graph, costs: Costs | None = None, *, where: str | os.PathLike[str] = "") -> dict[str, Any]:
    """Return what a graph file holds, as plain JSON data.

    Raises:
        FileFormatError: as `save_graph`; its message names ``where``.
    """
    fields = ("name", "outputs", "gradients", "updates", "values", "ops")
    try:
        file = GraphFile.model_validate({"format": FORMAT, "costs": costs, **{f: getattr(graph, f) for f in fields}})
    except ValidationError as error:
        raise FileFormatError(f"cannot write the {_WHAT}", where=shown(where), why=first_problem(error)) from None
    content = {"format": FORMAT, **file.model_dump(mode="json", exclude_defaults=True)}
    if costs is not None:
        content["costs"] = file.costs.model_dump(mode="json")  # type: ignore[union-attr]
    return content


def load_graph(path: str | os.PathLike[str]) -> tuple[Graph, Costs | None]:
    """Return the graph of a file, verified, and its costs, or None where it has none.

    Raises:
        FileFormatError: the file cannot be read or is malformed, or its graph breaks an invariant.
    """
    return graph_of_file(path, read_model(path, GraphFile, what=_WHAT, format_name=FORMAT))


def graph_of_file(path: str | os.PathLike[str], file: GraphFile) -> tuple[Graph, Costs | None]:
    """Return the graph of a file that has been read from ``path``, and its costs.

    Raises:
        FileFormatError: the graph breaks an invariant.
    """
    producer = {value: index for index, op in enumerate(file.ops) for value in op.outputs}
    values = tuple(Value(producer=producer.get(index), **v.__dict__) for index, v in enumerate(file.values))
    ops = tuple(Op(**op.__dict__) for op in file.ops)
    graph = Graph(ops, values, file.outputs, file.gradients, file.updates, file.name)
    try:
        graph.verify()
    except GraphError as error:
        why = f"{error.what}, at {shown(error.where)}"
        raise FileFormatError(
            f"cannot read the {_WHAT}", where=shown(path), why=shown(why), try_=f"write the {_WHAT} again"
        ) from None
    return graph, None if file.costs is None else _costs(path, graph, file.costs)


def _costs(path: str | os.PathLike[str], graph: Graph, model: CostsModel) -> Costs:
    for field in ("seconds", "replay_seconds", "workspace_bytes"):
        if (length := len(getattr(model, field))) != len(graph.ops):
            why = f"costs.{field} has {length} entries for {len(graph.ops)} ops"
            raise FileFormatError(f"cannot read the {_WHAT}", where=shown(path), why=why, try_=f"write the {_WHAT} again")
    return Costs(**model.__dict__)
