"""Graph and plan files: what is written reads back equal, and what is hostile ends in one message."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import costs_for, problems, random_problem, random_training_graph, training_graphs

from actsolve import json_file
from actsolve.errors import ActsolveError, FileFormatError, UsageError
from actsolve.graph import Graph, Op, Value
from actsolve.graph_file import CostsModel, OpModel, ValueModel, load_graph, save_graph
from actsolve.plan import Plan, Status
from actsolve.plan_file import PlanFile, load_plan, plan_file
from actsolve.problem import Costs, Problem
from actsolve.schedule import Schedule, build_schedule

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def keep_all(problem: Problem) -> tuple[Plan, Schedule]:
    kept = frozenset(problem.graph.decidable)
    return Plan("keep_all", kept, bound_s=0.0, solve_s=0.25), build_schedule(problem.graph, kept)


def a_plan(seed: int = 5) -> tuple[Problem, PlanFile]:
    """A plan file with every field in use."""
    problem = random_problem(seed)
    plan, schedule = keep_all(problem)
    figures: dict[str, Any] = {
        "static_bytes": {"parameters": 12, "reserve": 0},
        "objective_s": 0.125,
        "gap": 0.0,
        "step_gap": 1e-9,
        "global_bound_s": None,
        "predicted": {"peak_bytes": 80, "step_s": 1.5, "recompute_s": 0.0, "stall_s": 0.0},
        "keep_all": {"peak_bytes": 99, "step_s": 1.375},
        "baselines": {"sqrt_l": {"peak_bytes": 70, "step_s": 2.0, "fits": True}, "per_layer": {"note": "no layers"}},
    }
    return problem, plan_file(problem, plan, schedule, target="gpt_mini", **figures)


def message_of(action: Callable[[], object], path: Path | str, error: type[ActsolveError] = FileFormatError) -> str:
    """The message of an action that must fail as a bad file does."""
    with pytest.raises(error) as raised:
        action()
    message = str(raised.value)
    assert raised.value.exit_code == 2
    assert raised.value.where is not None and raised.value.where in json_file.shown(path)
    assert raised.value.why
    assert all(line.isprintable() for line in message.split("\n"))
    assert len(message) < 1500
    return message


# ---- round trips


@quick
@given(graph=training_graphs(), seed=st.integers(0, 99), with_costs=st.booleans())
def test_a_graph_reads_back_equal(tmp_path: Path, graph: Graph, seed: int, with_costs: bool) -> None:
    costs = costs_for(graph, seed) if with_costs else None
    save_graph(tmp_path / "graph.json", graph, costs)
    loaded, loaded_costs = load_graph(tmp_path / "graph.json")
    assert (loaded, loaded_costs) == (graph, costs)
    assert loaded.fingerprint == graph.fingerprint


def test_every_field_of_a_graph_reads_back(tmp_path: Path) -> None:
    """Also those that random graphs leave at their defaults."""
    graph = random_training_graph(3)
    odd = replace(graph.ops[0], flops=None, module='a."b"\\', layer=7, source="modèle.py:3", signature="(2, 3):float32 🙂")
    graph = replace(graph, ops=(odd, *graph.ops[1:]), name="ResNet-50")
    costs = Costs((0.1 + 0.2,) * len(graph.ops), (1e-300,) * len(graph.ops), (2**62,) * len(graph.ops), "a100", ("f1",))
    save_graph(tmp_path / "graph.json", graph, costs)
    assert load_graph(tmp_path / "graph.json") == (graph, costs)


def test_the_file_models_mirror_the_dataclasses() -> None:
    """A field that is added to one and not to the other would be lost in the file."""
    assert list(OpModel.model_fields) == [f.name for f in fields(Op)]
    assert list(ValueModel.model_fields) == [f.name for f in fields(Value) if f.name != "producer"]
    assert list(CostsModel.model_fields) == [f.name for f in fields(Costs)]


@quick
@given(problem=problems())
def test_a_plan_reads_back_equal_and_decodes(tmp_path: Path, problem: Problem) -> None:
    plan, schedule = keep_all(problem)
    file = plan_file(problem, plan, schedule, target="x", objective_s=0.0)
    file.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded == file
    assert loaded.decode(problem.graph) == (schedule, plan.kept)


def test_a_plan_with_replays_decodes(tmp_path: Path) -> None:
    n_replays = 0
    for seed in range(40):
        problem = random_problem(seed)
        graph = problem.graph
        kept = frozenset(v for v in graph.decidable if not graph.ops[graph.values[v].producer or 0].replayable)
        schedule = build_schedule(graph, kept)
        plan_file(problem, Plan("none", kept), schedule).save(tmp_path / "plan.json")
        assert load_plan(tmp_path / "plan.json").decode(graph) == (schedule, kept)
        n_replays += sum(step.kind == "replay" for step in schedule.steps)
    assert n_replays > 40


def test_a_plan_with_all_its_figures_reads_back_equal(tmp_path: Path) -> None:
    _, file = a_plan()
    file.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == file


def test_a_plan_that_was_not_found_reads_back_and_does_not_decode(tmp_path: Path) -> None:
    problem = random_problem(5)
    file = plan_file(problem, Plan("milp", status=Status.INFEASIBLE, bound_s=None), None, target="gpt")
    file.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded == file and loaded.decisions == {}
    assert "holds no schedule" in message_of(lambda: loaded.decode(problem.graph), "plan of gpt")


def test_the_files_are_readable(tmp_path: Path) -> None:
    """One line per step and per decision."""
    problem, file = a_plan()
    file.save(tmp_path / "plan.json")
    lines = (tmp_path / "plan.json").read_text().split("\n")
    assert lines[1] == '"format": "actsolve-plan-1",'
    assert '  ["compute", "f0"],' in lines
    assert '"baselines": {' in lines
    save_graph(tmp_path / "graph.json", problem.graph)
    assert '  {"name": "x", ' in (tmp_path / "graph.json").read_text()


# ---- plans of another model


def changed(graph: Graph, index: int, **values: Any) -> Graph:
    ops = list(graph.ops)
    ops[index] = replace(ops[index], **values)
    return replace(graph, ops=tuple(ops))


def test_a_plan_of_another_model_is_refused_and_the_difference_named() -> None:
    problem, file = a_plan()
    graph = problem.graph
    file.check_matches(graph)
    file.check_matches(replace(graph, name="renamed"))
    where = "plan of gpt_mini"

    message = message_of(lambda: file.check_matches(changed(graph, 2, signature="(4, 4)", source="net.py:7")), where)
    assert "made for another training step" in message
    assert f"the first op that differs is op 2, here {graph.ops[2].name} ({graph.ops[2].target}) at net.py:7" in message

    values = (replace(graph.values[0], size_bytes=2**20), *graph.values[1:])
    assert "the first op that differs is op 0, here f0" in message_of(
        lambda: file.check_matches(replace(graph, values=values)), where
    )

    shorter = replace(graph, ops=graph.ops[:-1])
    n, n_forward = len(graph.ops), graph.n_forward
    expected = f"it has {n_forward} forward ops of {n} ops, this one {n_forward} of {n - 1}; the shared ops are equal"
    assert expected in message_of(lambda: file.check_matches(shorter), where)

    assert "all ops are equal; outputs, gradients or buffer updates differ" in message_of(
        lambda: file.check_matches(replace(graph, gradients=())), where
    )
    with pytest.raises(FileFormatError, match="another training step"):
        file.decode(shorter)


def test_a_tampered_plan_is_refused_when_it_is_decoded() -> None:
    problem, file = a_plan()
    graph, where = problem.graph, "plan of gpt_mini"

    def tampered(**update: Any) -> str:
        return message_of(lambda: file.model_copy(update=update).decode(graph), where)

    assert "no valid schedule" in tampered(steps=file.steps[1:])
    assert "no valid schedule" in tampered(steps=file.steps[:-1])
    assert "a step names nobody, which the graph has not" in tampered(steps=(("compute", "nobody"), *file.steps))
    assert "a step names f0, which the graph has not" in tampered(steps=(("free", "f0"), *file.steps))
    assert "is missing, or is no value to decide on" in tampered(decisions={})
    assert "nobody is missing, or is no value to decide on" in tampered(decisions={**file.decisions, "nobody": "keep"})


# ---- hostile files


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
    "an integer of 5000 digits": (b'{"format": ' + b"9" * 5000 + b"}", "limit"),
    "two values": (b"{} {}", "not JSON, or cut short: extra data"),
    "a comment": (b"{} // plan", "not JSON, or cut short: extra data"),
    "single quotes": (b"{'format': 1}", "not JSON"),
}


@pytest.mark.parametrize("load", [load_plan, load_graph])
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
        for bad in (None, {}, "compute", [["compute"]], [["compute", "a", "b"]], [["jump", "a"]], [["free", 1]], [[]])
    ],
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


def test_a_stream_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_file, "MAX_FILE_BYTES", 2**20)
    assert "it is larger than 1 MiB" in message_of(lambda: load_plan("/dev/zero"), "/dev/zero")


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
    for load in (load_plan, load_graph):
        message_of(lambda: load(path), path)  # noqa: B023


# ---- writing


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_no_nan_infinity_or_negative_is_written(tmp_path: Path, bad: float) -> None:
    problem = random_problem(5)
    plan, schedule = keep_all(problem)
    with pytest.raises(FileFormatError, match="objective_s"):
        plan_file(problem, plan, schedule, objective_s=bad)
    with pytest.raises(FileFormatError, match=r"costs\.seconds"):
        save_graph(tmp_path / "graph.json", problem.graph, replace(problem.costs, seconds=(bad,) * len(problem.graph.ops)))
    assert list(tmp_path.iterdir()) == []


def test_what_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    graph = random_training_graph(5)
    for bad in (changed(graph, 0, name="a\nb"), changed(graph, 0, flops=-1), changed(graph, 0, source="\ud800")):
        with pytest.raises(FileFormatError, match="cannot write the graph file"):
            save_graph(tmp_path / "graph.json", bad)
    with pytest.raises(FileFormatError, match="surprise"):
        plan_file(random_problem(5), Plan("x"), None, surprise=1)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, file = a_plan()
    path = tmp_path / "plan.json"
    file.save(path)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    message = message_of(lambda: file.model_copy(update={"target": "new"}).save(path), path, UsageError)
    assert "no space left on device" in message
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    _, file = a_plan()
    assert "it is no regular file" in message_of(lambda: file.save(tmp_path), tmp_path, UsageError)
    assert "it is no regular file" in message_of(lambda: file.save("/dev/null"), "/dev/null", UsageError)
    missing = tmp_path / "no" / "plan.json"
    assert "no such file or directory" in message_of(lambda: file.save(missing), missing, UsageError)
    below = tmp_path / "plan.json" / "plan.json"
    file.save(tmp_path / "plan.json")
    assert "not a directory" in message_of(lambda: file.save(below), below, UsageError)
    assert "null" in message_of(lambda: file.save("a\0b"), "a\0b", UsageError)


def test_a_link_stays_a_link_and_the_mode_is_that_of_a_new_file(tmp_path: Path) -> None:
    _, file = a_plan()
    (tmp_path / "link.json").symlink_to(tmp_path / "plan.json")
    file.save(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert load_plan(tmp_path / "plan.json") == file
    (tmp_path / "plain").touch()
    mode = stat.S_IMODE((tmp_path / "plan.json").stat().st_mode)
    assert mode == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_a_reader_sees_a_whole_file_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    versions = [a_plan()[1].model_copy(update={"target": str(n)}) for n in range(2)]
    versions[0].save(path)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for version in versions:
                version.save(path)

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(100):
            assert load_plan(path) in versions
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert list(tmp_path.iterdir()) == [path]


def test_a_writer_that_is_killed_leaves_the_old_file_whole(tmp_path: Path) -> None:
    """Killed between the write and the rename."""
    _, file = a_plan()
    path = tmp_path / "plan.json"
    file.save(path)
    code = (
        "import os, signal, sys; from actsolve.plan_file import load_plan\n"
        "file = load_plan(sys.argv[1]); os.replace = lambda *a: os.kill(os.getpid(), signal.SIGKILL)\n"
        "file.model_copy(update={'target': 'new'}).save(sys.argv[1])"
    )
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=root, timeout=60, check=False)
    assert done.returncode == -9
    assert load_plan(path) == file
