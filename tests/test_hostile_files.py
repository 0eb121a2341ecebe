"""Graph and plan files that are damaged, forged or absurd: each ends in one message, without a traceback."""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from file_samples import a_plan, message_of, quick
from hypothesis import given
from hypothesis import strategies as st
from strategies import random_training_graph

from actsolve import json_file
from actsolve.cost.hardware import profile
from actsolve.dag_file import load_any, load_dag
from actsolve.errors import FileFormatError
from actsolve.graph_file import load_graph, save_graph
from actsolve.plan_file import load_plan


def texts(tmp_path: Path) -> list[tuple[str, Callable[[Path], object]]]:
    problem, file = a_plan()
    file.save(tmp_path / "plan.json")
    save_graph(tmp_path / "graph.json", problem.graph, problem.costs)
    return [((tmp_path / "plan.json").read_text(), load_plan), ((tmp_path / "graph.json").read_text(), load_graph)]


def test_a_truncated_file_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "cut.json"
    for text, load in texts(tmp_path):
        places = set(range(0, len(text.rstrip()), 29))
        for mark in '{}[],:" \n':  # some places of each kind
            places |= set([i for i, c in enumerate(text.rstrip()) if c == mark][::13])
        for place in sorted(places):
            path.write_text(text[:place])
            assert "not JSON, or cut short" in message_of(lambda: load(path), path)  # noqa: B023


def test_flipped_bytes_are_refused_or_harmless(tmp_path: Path) -> None:
    """Whatever a byte turns into, the file loads or ends in one message."""
    path = tmp_path / "flipped.json"
    rng = random.Random(0)
    for text, load in texts(tmp_path):
        raw = text.encode()
        refused = 0
        for _ in range(300):
            damaged = bytearray(raw)
            for _ in range(rng.choice((1, 1, 3))):
                damaged[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
            path.write_bytes(damaged)
            try:
                load(path)
            except FileFormatError:
                refused += 1
        assert refused > 150


HOSTILE = {
    "an empty file": (b"", "not JSON, or cut short"),
    "not UTF-8": (b'{"format": "\xff"}', "not UTF-8 text: byte 12 is 0xff"),
    "UTF-16": ('{"format": 1}'.encode("utf-16"), "not UTF-8 text"),
    "a byte-order mark": (b'\xef\xbb\xbf{"format": 1}', "not JSON"),
    "a null byte": (b'{"format": "\x00"}', "not JSON"),
    "deep lists": (b"[" * 100_000, "nested too deeply"),
    "deep objects": (b'{"a":' * 100_000, "nested too deeply"),
    "a list": (b"[]", "it has no field 'format'"),
    "a number": (b"3", "it has no field 'format'"),
    "no format": (b"{}", "it has no field 'format'"),
    "null": (b'{"format": null}', "it has no field 'format'"),
    "the wrong format": (b'{"format": "zip"}', "its format is 'zip', not 'actsolve-"),
    "a later version": (b'{"format": "actsolve-plan-2"}', "its format is 'actsolve-plan-2', not 'actsolve-"),
    "a format of the wrong type": (b'{"format": {"a": [1]}}', "its format is {'a': [1]}, not"),
    "an escape sequence": (b'{"format": "\\u001b[2Jgone\\u202e"}', r"its format is '\x1b[2Jgone\u202e'"),
    "a duplicate key": (b'{"format": "a", "format": "b"}', "the key format stands twice"),
    "a duplicate key within": (b'{"format": "a", "x": [{"b": 1, "b": 1}]}', "the key b stands twice"),
    "NaN": (b'{"format": NaN}', "NaN is not a number that JSON allows"),
    "Infinity": (b'{"format": Infinity}', "Infinity is not"),
    "minus Infinity": (b'{"format": -Infinity}', "-Infinity is not"),
    "an integer of 5000 digits": (b'{"format": ' + b"9" * 5000 + b"}", "thousands of digits"),
    "two values": (b"{} {}", "not JSON, or cut short: extra data"),
    "a comment": (b"{} // plan", "not JSON, or cut short: extra data"),
    "single quotes": (b"{'format': 1}", "not JSON"),
}


@pytest.mark.parametrize("load", [load_plan, load_graph, load_dag, load_any])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_json(tmp_path: Path, name: str, load: Callable[[Path], object]) -> None:
    content, expected = HOSTILE[name]
    path = tmp_path / "hostile.json"
    path.write_bytes(content)
    assert expected in message_of(lambda: load(path), path)


BAD_NUMBERS = (-1, 2**62 + 1, 10**400, 1.5, "1", None, True, [], {})
PLAN_EDITS = [
    *[("budget_bytes", bad) for bad in BAD_NUMBERS],
    *[("predicted.peak_bytes", bad) for bad in BAD_NUMBERS],
    *[("objective_s", bad) for bad in (-1e-9, 1e300, 10**400, "1", True, [])],
    *[("solve_s", bad) for bad in (None, -1.0)],
    *[("status", bad) for bad in ("OPTIMAL", "", None, 3)],
    *[
        ("steps", bad)
        for bad in (
            None,
            {},
            "compute",
            [["compute"]],
            [["compute", "a", "b"]],
            [["jump", "a"]],
            [["copy", "a"]],
            [["copy_out", 1]],
            [["free", 1]],
            [[]],
        )
    ],
    *[("links.d2h", bad) for bad in (0, 0.5, -1.0, 2**63, 10**400, 1e300, "25GB/s", None, True, [])],
    *[("links.h2d_both", bad) for bad in (0, -1.0, 1e300, "1", [])],
    *[("links", bad) for bad in ({}, {"d2h": 1e9}, 25e9, [1e9, 1e9], {"d2h": 1e9, "h2d": 1e9, "nvme": 1e9})],
    *[("host_budget_bytes", bad) for bad in BAD_NUMBERS if bad is not None],
    *[("decisions", bad) for bad in (None, [], {"v0": "burn"}, {"v0": None}, {"": "keep"})],
    *[("graph.fingerprint", bad) for bad in (None, "", 3)],
    *[("target", bad) for bad in (None, 3, "\x1b[31m", "a\nb", "x" * (2**20 + 1), "\u202eevil")],
    ("baselines.sqrt_l.speed", 3),
    ("surprise", 1),
]
GRAPH_EDITS = [
    *[("values.0.size_bytes", bad) for bad in BAD_NUMBERS],
    *[("ops.0.flops", bad) for bad in (-1, 2**62 + 1, 1.5, "1", [])],
    *[("ops.0.inputs", bad) for bad in (None, 3, [-1], [10**9], [0, 0], [0.0], ["x"], [None], [[0]])],
    *[("ops.0.outputs", bad) for bad in ([10**9], [0], None, [-1])],
    *[("ops.0.phase", bad) for bad in ("backward", "sideways", None)],
    *[("ops.0.in_place", bad) for bad in ([0], [0, 1, 2], [0, 10**9], [10**9, 10**9], 3)],
    *[("ops.0.name", bad) for bad in ("", "f1", "a\x00b", None)],
    *[("ops.0.replayable", bad) for bad in (0, 1, "yes", None)],
    *[("ops.0.replay_inputs", bad) for bad in ([10**9], [-1])],
    *[("values.0.kind", bad) for bad in ("activation", "magic", None)],
    *[("values.0.name", bad) for bad in ("", 3, "v0")],
    *[("values.0.shape", bad) for bad in ([-1], ["n"], 3)],
    *[("outputs", bad) for bad in ([10**9], [-1], None)],
    *[("updates", bad) for bad in ([[0]], [[0, 10**9]], [[10**9, 0]])],
    *[("costs.seconds", bad) for bad in ([], [1.0], [-1.0], None, ["1"])],
    *[("costs.workspace_bytes", bad) for bad in ([], [0.5], [-1])],
    ("costs.currency", "s"),
    ("ops.0.producer", 3),
    ("values.0.producer", 0),
    ("ops", {}),
    ("values", []),
]


def edited(text: str, place: str, value: Any) -> str:
    data = json.loads(text)
    *path, last = [int(p) if p.isdigit() else p for p in place.split(".")]
    target = data
    for part in path:
        target = target[part]
    target[last] = value
    return json.dumps(data)


def test_fields_of_the_wrong_type_or_size(tmp_path: Path) -> None:
    path = tmp_path / "edited.json"
    for (text, load), field_edits in zip(texts(tmp_path), (PLAN_EDITS, GRAPH_EDITS), strict=True):
        assert json.loads(edited(text, "format", json.loads(text)["format"])) == json.loads(text)
        for place, value in field_edits:
            path.write_text(edited(text, place, value))
            message_of(lambda: load(path), path)  # noqa: B023
        for key in json.loads(text):
            data = json.loads(text)
            del data[key]
            path.write_text(json.dumps(data))
            with contextlib.suppress(FileFormatError):  # a field with a default may be missing
                load(path)


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity"])
def test_numbers_that_are_not_finite(tmp_path: Path, number: str) -> None:
    path = tmp_path / "infinite.json"
    for (text, load), old in zip(texts(tmp_path), ('"solve_s": ', '"seconds": ['), strict=True):
        assert old in text
        path.write_text(text.replace(old, f"{old}{number}, " if "[" in old else f'{old}{number}, "was": '))
        message = message_of(lambda: load(path), path)  # noqa: B023
        assert "is not a number" in message or old.strip('": [') in message


def test_backward_edges_are_refused(tmp_path: Path) -> None:
    """Every op in turn reads what a later op makes."""
    graph = random_training_graph(7)
    save_graph(tmp_path / "graph.json", graph)
    text = (tmp_path / "graph.json").read_text()
    for index, op in enumerate(graph.ops[:-1]):
        later = [v for o in graph.ops[index:] for v in o.outputs]
        (tmp_path / "bad.json").write_text(edited(text, f"ops.{index}.inputs", [*op.inputs, later[-1]]))
        message = message_of(lambda: load_graph(tmp_path / "bad.json"), tmp_path / "bad.json")
        assert "is read before it is produced" in message and op.name in message


def test_the_wrong_kind_of_file(tmp_path: Path) -> None:
    texts(tmp_path)
    plan, graph = tmp_path / "plan.json", tmp_path / "graph.json"
    assert "its format is 'actsolve-graph-1', not 'actsolve-plan-1'" in message_of(lambda: load_plan(graph), graph)
    assert "its format is 'actsolve-plan-1', not 'actsolve-graph-1'" in message_of(lambda: load_graph(plan), plan)


def test_paths_that_cannot_be_read(tmp_path: Path) -> None:
    assert "it is a directory" in message_of(lambda: load_plan(tmp_path), tmp_path)
    missing = tmp_path / "missing.json"
    assert "no such file or directory" in message_of(lambda: load_graph(missing), missing)
    assert "null" in message_of(lambda: load_graph("a\0b"), "a\0b")
    long = "x" * 5000
    with pytest.raises(FileFormatError, match="file name too long"):
        load_plan(long)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert "symbolic links" in message_of(lambda: load_plan(loop), loop)


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated, since tests may run as root, who may read everything."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(FileFormatError, match="permission denied"):
        load_plan("plan.json")


def test_an_absurd_size_is_refused_before_reading(tmp_path: Path) -> None:
    path = tmp_path / "huge.json"
    with open(path, "wb") as file:
        file.truncate(json_file.MAX_FILE_BYTES + 1)  # sparse: takes no disk
    assert "it is larger than 512 MiB" in message_of(lambda: load_plan(path), path)


@pytest.mark.parametrize("load", [load_plan, load_graph, load_dag, profile])
def test_what_is_no_regular_file_is_refused_before_reading(tmp_path: Path, load: Callable[[str], object]) -> None:
    """A pipe that nobody writes to would be waited for; a device may never end."""
    pipe = str(tmp_path / "pipe.json")
    os.mkfifo(pipe)
    zero = str(tmp_path / "zero.json")
    os.symlink("/dev/zero", zero)
    for path in (pipe, zero):
        assert "it is no regular file" in message_of(lambda: load(path), path)  # noqa: B023


@quick
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    )
)
def test_any_json_is_refused_with_a_message(tmp_path: Path, data: Any) -> None:
    path = tmp_path / "any.json"
    path.write_text(json.dumps(data))
    for load in (load_plan, load_graph, load_dag):
        message_of(lambda: load(path), path)  # noqa: B023
