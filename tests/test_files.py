"""Graph and plan files: what is written reads back equal, and a file appears whole or not at all."""

from __future__ import annotations

import json
import math
import os
import random
import stat
import subprocess
import sys
import threading
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from file_samples import a_plan, an_offload_plan, keep_all, message_of, quick
from hand_made import HAND_MADE
from hypothesis import given
from hypothesis import strategies as st
from offload_plans import drawn_plan, with_links
from replayed_often import random_replays
from strategies import costs_for, problems, random_problem, random_training_graph, training_graphs

from actsolve.errors import FileFormatError, UsageError
from actsolve.graph import Graph, Op, Value
from actsolve.graph_file import CostsModel, OpModel, ValueModel, load_graph, save_graph
from actsolve.plan import Decision, Plan, Status
from actsolve.plan_file import load_plan, offloaded_by, plan_file
from actsolve.plan_schedule import schedule_of
from actsolve.planners import PLANNERS, PlannerOptions, plan
from actsolve.problem import Costs, Problem
from actsolve.replays import saved_by
from actsolve.schedule import build_schedule

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


def test_a_plan_that_replays_anywhere_decodes(tmp_path: Path) -> None:
    """What is kept is what the backward reads of the forward's, though a replay there made it."""
    n_in_forward = 0
    for seed in range(60):
        problem = random_problem(seed)
        graph = problem.graph
        replays = random_replays(graph, seed, anywhere=True)
        told = Plan("none", saved_by(graph, replays), replays=replays)
        schedule = schedule_of(graph, told)
        plan_file(problem, told, schedule).save(tmp_path / "plan.json")
        assert load_plan(tmp_path / "plan.json").decode(graph) == (schedule, told.kept)
        n_in_forward += any(index < graph.n_forward for index in replays)
    assert n_in_forward > 30


def test_plans_that_offload_read_back_and_decode(tmp_path: Path) -> None:
    n_offloaded = 0
    for seed in range(60):
        problem = replace(with_links(random_problem(seed)), host_budget_bytes=10**6)
        found = drawn_plan(problem, random.Random(seed))
        schedule = build_schedule(problem.graph, found.kept, offloaded=found.offloaded)
        file = plan_file(problem, found, schedule)
        file.save(tmp_path / "plan.json")
        loaded = load_plan(tmp_path / "plan.json")
        assert loaded == file and loaded.link_speeds() == problem.links and loaded.host_budget_bytes == 10**6
        assert loaded.decode(problem.graph) == (schedule, found.kept)
        copies = offloaded_by(problem.graph, schedule)
        assert build_schedule(problem.graph, found.kept, offloaded=copies) == schedule
        offloaded = {problem.graph.values[v].name for v in found.offloaded}
        assert {name for name, d in loaded.decisions.items() if d is Decision.OFFLOAD} == offloaded
        n_offloaded += len(offloaded)
    assert n_offloaded > 60


def test_a_plan_that_offloads_as_text() -> None:
    file = an_offload_plan()
    assert file.steps[:4] == (("compute", "mm"), ("copy_out", "a"), ("compute", "split"), ("wait_out", "a"))
    moves = [step for step in file.steps if step[0] not in ("compute", "compute_in_place", "free")]
    assert [step for step in moves if step[1] == "a"] == [(c, "a") for c in ("copy_out", "wait_out", "copy_back", "wait_back")]
    assert file.links is not None and file.links.model_dump() == {"d2h": 1e6, "h2d": 2e6, "d2h_both": 0.75e6, "h2d_both": 0.5e6}
    assert file.decisions["a"] is Decision.OFFLOAD and file.host_budget_bytes == 8192


def test_a_plan_of_before_there_were_links_is_read(tmp_path: Path) -> None:
    problem, file = a_plan()
    old = {k: v for k, v in file.model_dump(mode="json").items() if k not in ("links", "host_budget_bytes")}
    (tmp_path / "old.json").write_text(json.dumps(old))
    loaded = load_plan(tmp_path / "old.json")
    assert loaded == file.model_copy(update={"links": None, "host_budget_bytes": None}) and loaded.link_speeds() is None
    loaded.decode(problem.graph)


def test_copies_that_cannot_be_are_refused() -> None:
    file, where = an_offload_plan(), "plan of hand-made"

    def tampered(**update: Any) -> str:
        return message_of(lambda: file.model_copy(update=update).decode(HAND_MADE), where)

    def without(*steps: tuple[str, str]) -> Any:
        return tuple(step for step in file.steps if step not in steps)

    assert "its steps copy to the host, and it names no speed of a link" in tampered(links=None)
    assert "6144 bytes are offloaded, more than the host's budget of 6143 bytes" in tampered(host_budget_bytes=6143)
    for code in ("copy_out", "wait_out", "copy_back", "wait_back"):
        assert "no valid schedule" in tampered(steps=without((code, "a"))), code
        assert "no valid schedule" in tampered(steps=((code, "a"), *file.steps)), code
        assert "a step names nobody, which the graph has not" in tampered(steps=(*file.steps, (code, "nobody"))), code
        assert "a step names mm, which the graph has not" in tampered(steps=(*file.steps, (code, "mm"))), code
    for decision in (Decision.KEEP, Decision.RECOMPUTE):
        assert f"a is '{decision}', and the steps say otherwise" in tampered(decisions={**file.decisions, "a": decision})
    assert "e is 'offload', and the steps say otherwise" in tampered(decisions={**file.decisions, "e": Decision.OFFLOAD})


def test_a_copy_that_never_comes_back_or_twice_is_refused() -> None:
    """Steps that the checker lets pass, and that no plan can say."""
    file = an_offload_plan()

    def changed(*steps: Any) -> str:
        return message_of(lambda: file.model_copy(update={"steps": steps}).decode(HAND_MADE), "plan of hand-made")

    without_b = [step for step in file.steps if step != ("free", "b")]  # b is read in the forward alone
    after = without_b.index(("compute", "dropout")) + 1
    moves = (("copy_out", "b"), ("wait_out", "b"), ("free", "b"))
    assert "b is copied out and never back" in changed(*without_b[:after], *moves, *without_b[after:])
    assert "a is copied back twice" in changed(*file.steps, ("copy_back", "a"), ("wait_back", "a"), ("free", "a"))


def test_what_is_no_value_to_decide_on_is_not_copied() -> None:
    """The new content of a buffer, copied out and back when the forward has ended: the checker lets it pass."""
    file = an_offload_plan()
    without = [step for step in file.steps if step != ("free", "new")]
    after = without.index(("compute", "loss")) + 1
    moves = [(code, "new") for code in ("copy_out", "wait_out", "free", "copy_back", "wait_back", "free")]
    odd = file.model_copy(update={"steps": (*without[:after], *moves, *without[after:])})
    message = message_of(lambda: odd.decode(HAND_MADE), "plan of hand-made")
    assert "a step copies new, which is no value to decide on" in message


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


def test_decisions_that_are_not_those_of_the_steps_are_refused() -> None:
    flip = {Decision.KEEP: Decision.RECOMPUTE, Decision.RECOMPUTE: Decision.KEEP}
    n_single = 0
    for seed in range(30):
        problem = random_problem(seed)
        graph = problem.graph
        kept = frozenset(v for v in graph.decidable if not graph.ops[graph.values[v].producer or 0].replayable or v % 2)
        file = plan_file(problem, Plan("milp", kept), build_schedule(graph, kept), target="gpt")
        assert file.decode(graph)[1] == kept
        if not any(graph.backward_readers[v] for v in graph.decidable):
            continue  # nothing is saved for the backward, whatever is decided
        edits = [
            {name: flip[d] for name, d in file.decisions.items()},
            dict.fromkeys(file.decisions, Decision.OFFLOAD),
            *({**file.decisions, graph.values[v].name: Decision.RECOMPUTE} for v in kept if graph.backward_readers[v]),
            *({**file.decisions, name: Decision.OFFLOAD} for name in file.decisions),
        ]
        n_single += len(edits) - 2
        for decisions in edits:
            changed_file = file.model_copy(update={"decisions": decisions})
            message = message_of(lambda: changed_file.decode(graph), "plan of gpt")  # noqa: B023
            assert "and the steps say otherwise" in message
    assert n_single > 100


def test_what_the_planners_decide_is_what_their_steps_do() -> None:
    for seed in range(30):
        problem = random_problem(seed)
        for planner in PLANNERS:
            found = plan(problem, planner, PlannerOptions(time_limit_s=2.0))
            if found.found:
                schedule = schedule_of(problem.graph, found)
                assert plan_file(problem, found, schedule).decode(problem.graph) == (schedule, found.kept), (seed, planner)


def test_a_schedule_under_a_status_that_has_none_is_refused() -> None:
    problem, file = a_plan()
    for status in (Status.INFEASIBLE, Status.UNKNOWN):
        odd = file.model_copy(update={"status": status})
        assert f"its status is '{status}'" in message_of(lambda: odd.decode(problem.graph), "plan of gpt_mini")  # noqa: B023


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
