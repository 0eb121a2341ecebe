"""Graph files of planners in general, format ``actsolve-dag-1``: nodes in execution order, each with one value, and edges.

There is no forward or backward, no link and no host: any node may run again at any time. `load_any` reads these and our own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal, NoReturn

from pydantic import FailFast, Field

from actsolve.dag import Dag, general_dag
from actsolve.errors import FileFormatError
from actsolve.graph import Graph
from actsolve.graph_file import FORMAT as GRAPH_FORMAT
from actsolve.graph_file import GraphFile, graph_of_file
from actsolve.json_file import MAX_NUMBER, Count, FileModel, Text, read_model, read_one_of, shown
from actsolve.problem import Costs

FORMAT = "actsolve-dag-1"
_WHAT = "graph file"
_MAX_LENGTH = 2_000_000

Time = Annotated[int, Field(ge=0, le=MAX_NUMBER)] | Annotated[float, Field(ge=0, le=MAX_NUMBER)]  # integers stay exact


class NodeModel(FileModel):
    size_bytes: Count
    time: Time


class DagFile(FileModel):
    format: Literal["actsolve-dag-1"]
    name: Text = ""
    note: Text = ""
    peak_bytes_in_order: Count | None = None
    total_time: Time | None = None
    nodes: Annotated[tuple[NodeModel, ...], FailFast(), Field(min_length=1, max_length=_MAX_LENGTH)]
    edges: Annotated[tuple[tuple[Count, Count], ...], FailFast(), Field(max_length=_MAX_LENGTH)]


def load_dag(path: str | os.PathLike[str]) -> tuple[str, Dag]:
    """Return the name of the graph in a file, that of the file if it has none, and its nodes, with a budget of 0.

    Raises:
        FileFormatError: the file cannot be read or is malformed, or an edge leads backward or nowhere or stands twice.
    """
    return _dag_of_file(path, read_model(path, DagFile, what=_WHAT, format_name=FORMAT))


def load_any(path: str | os.PathLike[str]) -> tuple[str, Dag | tuple[Graph, Costs | None]]:
    """Return the name of the graph in a file of either format, and what `load_dag` or `graph_file.load_graph` return of it.

    Raises:
        FileFormatError: as these two.
    """
    models: dict[str, type[DagFile] | type[GraphFile]] = {FORMAT: DagFile, GRAPH_FORMAT: GraphFile}
    file = read_one_of(path, models, what=_WHAT)
    if isinstance(file, DagFile):
        return _dag_of_file(path, file)
    return file.name or _stem(path), graph_of_file(path, file)


def _dag_of_file(path: str | os.PathLike[str], file: DagFile) -> tuple[str, Dag]:
    sizes = tuple(node.size_bytes for node in file.nodes)
    if sum(sizes) >= MAX_NUMBER:
        _refuse(path, f"the sizes of all nodes are {sum(sizes)} bytes in sum: more than 2**62")
    reads: list[list[int]] = [[] for _ in sizes]
    seen: set[tuple[int, int]] = set()
    for index, (producer, consumer) in enumerate(file.edges):
        edge = f"edges[{index}] is [{producer}, {consumer}]"
        if max(producer, consumer) >= len(sizes):
            _refuse(path, f"{edge}, and the nodes are 0 to {len(sizes) - 1}")
        if producer >= consumer:
            _refuse(path, f"{edge}, a backward edge: node {consumer} does not run after node {producer}")
        if (producer, consumer) in seen:
            _refuse(path, f"{edge}, which stands there twice")
        seen.add((producer, consumer))
        reads[consumer].append(producer)
    times = tuple(node.time for node in file.nodes)
    return file.name or _stem(path), general_dag(sizes, tuple(map(tuple, reads)), times, 0)


def _stem(path: str | os.PathLike[str]) -> str:
    return shown(Path(path).stem)


def _refuse(path: str | os.PathLike[str], why: str) -> NoReturn:
    raise FileFormatError(f"cannot read the {_WHAT}", where=shown(path), why=why, try_=f"write the {_WHAT} again")
