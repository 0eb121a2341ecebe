"""Files of general graphs: what they hold, and that a damaged, forged or absurd one ends in one message."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from dag_samples import content_of, random_dag, write_dag
from file_samples import message_of
from strategies import random_problem

from actsolve.check_dag import replayed_peak_bytes
from actsolve.dag import Dag, general_dag
from actsolve.dag_file import load_any, load_dag
from actsolve.errors import FileFormatError, ScheduleError
from actsolve.graph_file import save_graph

DIAMOND = general_dag((4, 3, 2, 1), ((), (0,), (0,), (1, 2)), (1, 2, 3, 4), 0)


def test_a_file_is_read_as_it_is_meant(tmp_path: Path) -> None:
    path = write_dag(tmp_path / "d.json", DIAMOND, note="a diamond", peak_bytes_in_order=9, total_time=10)
    assert load_dag(path) == ("sample", DIAMOND) == load_any(path)
    assert replayed_peak_bytes(DIAMOND, range(4)) == 9


def test_a_graph_without_a_name_is_called_as_its_file(tmp_path: Path) -> None:
    assert load_dag(write_dag(tmp_path / "d.json", DIAMOND, name=""))[0] == "d"


def test_integers_stay_exact(tmp_path: Path) -> None:
    big = 2**62 - 1
    dag = general_dag((1, 1), ((), (0,)), (big, 0.5), 0)
    _, loaded = load_dag(write_dag(tmp_path / "d.json", dag))
    assert loaded.time == (big, 0.5) and isinstance(loaded.time[0], int)


def test_a_training_step_is_told_from_a_general_graph(tmp_path: Path) -> None:
    problem = random_problem(3)
    save_graph(tmp_path / "g.json", problem.graph, problem.costs)
    name, loaded = load_any(tmp_path / "g.json")
    assert not isinstance(loaded, Dag)
    assert (name, loaded[0].fingerprint) == (problem.graph.name or "g", problem.graph.fingerprint)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a backward edge": ({"edges": [[0, 1], [2, 1]]}, "edges[1] is [2, 1], a backward edge: node 1 does not run after node 2"),
    "an edge to itself": ({"edges": [[1, 1]]}, "edges[0] is [1, 1], a backward edge"),
    "an edge twice": ({"edges": [[0, 1], [0, 2], [0, 1]]}, "edges[2] is [0, 1], which stands there twice"),
    "an edge to nowhere": ({"edges": [[0, 4]]}, "edges[0] is [0, 4], and the nodes are 0 to 3"),
    "an edge from nowhere": ({"edges": [[10**9, 3]]}, "and the nodes are 0 to 3"),
    "half an edge": ({"edges": [[0]]}, "edges[0]"),
    "an edge of three": ({"edges": [[0, 1, 2]]}, "edges[0]"),
    "a negative edge": ({"edges": [[-1, 2]]}, "edges[0][0]"),
    "an edge of text": ({"edges": [["0", 2]]}, "edges[0][0]"),
    "no nodes": ({"nodes": [], "edges": []}, "nodes: "),
    "nodes that are none": ({"nodes": {}}, "nodes: "),
    "a node of numbers": ({"nodes": [[1, 2]]}, "nodes[0]"),
    "a size for a fraction": ({"nodes": [{"size_bytes": 1.5, "time": 1}], "edges": []}, "nodes[0].size_bytes"),
    "a negative size": ({"nodes": [{"size_bytes": -1, "time": 1}], "edges": []}, "nodes[0].size_bytes"),
    "an absurd size": ({"nodes": [{"size_bytes": 2**62 + 1, "time": 1}], "edges": []}, "nodes[0].size_bytes"),
    "an absurd sum": ({"nodes": [{"size_bytes": 2**61, "time": 1}] * 2, "edges": []}, "more than 2**62"),
    "a negative time": ({"nodes": [{"size_bytes": 1, "time": -1e-9}], "edges": []}, "nodes[0].time"),
    "a time that is true": ({"nodes": [{"size_bytes": 1, "time": True}], "edges": []}, "nodes[0].time"),
    "an absurd time": ({"nodes": [{"size_bytes": 1, "time": 1e300}], "edges": []}, "nodes[0].time"),
    "no time": ({"nodes": [{"size_bytes": 1}], "edges": []}, "nodes[0].time: the field is missing"),
    "a field of a node too many": ({"nodes": [{"size_bytes": 1, "time": 1, "x": 1}], "edges": []}, "there is no such field"),
    "a field too many": ({"links": 3}, "links: there is no such field"),
    "a name that forges": ({"name": "a\x1b[31m"}, "name: "),
    "a peak that is negative": ({"peak_bytes_in_order": -1}, "peak_bytes_in_order"),
    "a total of text": ({"total_time": "10"}, "total_time"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_bad_file_is_refused(tmp_path: Path, kind: str) -> None:
    fields, expected = REFUSED[kind]
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(content_of(DIAMOND, **fields)))
    assert expected in message_of(lambda: load_any(path), path)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_numbers_that_are_not_finite(tmp_path: Path, number: str) -> None:
    path = tmp_path / "infinite.json"
    path.write_text(json.dumps(content_of(DIAMOND)).replace('"time": 1}', f'"time": {number}}}'))
    message = message_of(lambda: load_any(path), path)
    assert "is not a number that JSON allows" in message or "nodes[0].time" in message


def test_a_file_of_neither_format_is_told_both(tmp_path: Path) -> None:
    path = write_dag(tmp_path / "d.json", DIAMOND, format="actsolve-plan-1")
    message = message_of(lambda: load_any(path), path)
    assert "its format is 'actsolve-plan-1', not 'actsolve-dag-1' or 'actsolve-graph-1'" in message


def test_a_damaged_file_is_refused_or_harmless(tmp_path: Path) -> None:
    """Cut anywhere, or with a bit turned: it loads or ends in one message."""
    text = json.dumps(content_of(random_dag(0, 8))).encode()
    path, rng, refused = tmp_path / "damaged.json", random.Random(0), 0
    for place in range(0, len(text) - 1, 5):
        path.write_bytes(text[:place])
        assert "not JSON, or cut short" in message_of(lambda: load_any(path), path)
    for _ in range(200):
        damaged = bytearray(text)
        damaged[rng.randrange(len(text))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            load_any(path)
        except FileFormatError:
            refused += 1
    assert refused > 100


def test_a_chain_of_20000_nodes_is_read_at_once(tmp_path: Path) -> None:
    n = 20_000
    chain = general_dag((1,) * n, ((), *((i,) for i in range(n - 1))), (1,) * n, 0)
    path = write_dag(tmp_path / "chain.json", chain)
    begin = time.perf_counter()
    _, dag = load_dag(path)
    assert replayed_peak_bytes(dag, range(n)) == 2
    assert time.perf_counter() - begin < 5


@pytest.mark.parametrize(
    ("schedule", "why"),
    [([0, 1, 2], "runs 3 of 4 nodes"), ([1], "out of order"), ([0, 2, 1, 3], "out of order"), ([], "runs 0 of 4 nodes")],
)
def test_the_checker_refuses_what_is_no_schedule(schedule: list[int], why: str) -> None:
    with pytest.raises(ScheduleError, match=why):
        replayed_peak_bytes(DIAMOND, schedule)


def test_the_checker_counts_copies_apart() -> None:
    """Node 0 again for node 2: its first copy ends with node 1, its second is there for one run."""
    dag = general_dag((4, 3, 2, 1), ((), (0,), (0,), (1, 2)), (1, 2, 3, 4), 0)
    assert replayed_peak_bytes(dag, [0, 1, 0, 2, 3]) == 9
    long = general_dag((8, 1, 1, 1), ((), (0,), (1,), (0, 2)), (1,) * 4, 0)
    assert (replayed_peak_bytes(long, range(4)), replayed_peak_bytes(long, [0, 1, 2, 0, 3])) == (10, 10)


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ('[{"size_bytes": 1, "time": -1}]', "nodes[0].time: input should be greater than or equal to 0"),
        ('[{"size_bytes": 1, "time": "x"}]', "nodes[0].time: input should be a valid number"),
        ("[]", "nodes: it is too short"),
    ],
)
def test_what_is_wrong_is_said_in_words_of_the_file(nodes: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_text(f'{{"format": "actsolve-dag-1", "nodes": {nodes}, "edges": []}}')
    with pytest.raises(FileFormatError) as refused:
        load_dag(path)
    assert refused.value.why == why
