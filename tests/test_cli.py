"""The command line: what it plans, compares and traces, and what it prints where."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cli_calls import FIELDS, PROFILE, SMALL, alone, called, done, folder, only_object, refused

from actsolve.plan_file import load_plan
from actsolve.planners import BASELINES, QUICK

__all__ = ["alone", "folder"]  # fixtures


def test_optimize_says_what_it_planned(folder: Path) -> None:
    found = done("optimize", *SMALL, "--mem-budget", "60%", *PROFILE, "--out", "plan.json")
    assert set(found) >= FIELDS
    assert "measured" not in found
    assert set(found["predicted"]) == {
        *("peak_bytes", "step_s", "recompute_s", "stall_s", "d2h_bytes", "h2d_bytes", "host_peak_bytes")
    }
    assert set(found["decisions"]) == {"keep", "recompute", "offload"}
    assert set(found["baselines"]) == set(QUICK)
    assert set(found["baselines"]["sqrt_l"]) >= {"peak_bytes", "step_s", "fits"}
    assert (found["target"], found["planner"], found["status"]) == ("gpt-mini", "milp", "optimal")
    assert found["predicted"]["peak_bytes"] <= found["budget_bytes"] < found["keep_all"]["peak_bytes"]
    assert found["decisions"]["recompute"]["count"] > 0 and found["predicted"]["recompute_s"] > 0
    assert 0 <= found["gap"] <= 0.01 or found["step_gap"] <= 0.0005
    assert found["static_bytes"] == sum(found["static"].values())
    plan = load_plan(folder / "plan.json")
    assert plan.budget_bytes == found["budget_bytes"] and plan.target == "gpt-mini"


def test_the_report_is_on_stdout_and_the_progress_on_stderr(folder: Path) -> None:
    result = called("optimize", "mine.py:step", "--mem-budget", "100%", *PROFILE)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("mine.py:step fits ")
    assert "nothing is recomputed" in result.stdout.splitlines()[0]
    assert "noise" not in result.stdout and "noise from the factory" in result.stderr and "more noise" in result.stderr
    assert "actsolve: tracing" in result.stderr and "actsolve: planning by milp" in result.stderr


def test_a_share_is_of_what_keeping_everything_needs_above_static() -> None:
    found = {
        share: done("optimize", *SMALL, "--mem-budget", share, "--hardware", "a100", "--reserve", "0")
        for share in ("100%", "80%")
    }
    static, keep_all = found["100%"]["static_bytes"], found["100%"]["keep_all"]["peak_bytes"]
    assert found["100%"]["budget_bytes"] == keep_all
    assert found["80%"]["budget_bytes"] == static + int(0.8 * (keep_all - static))
    assert found["100%"]["decisions"]["recompute"]["count"] == 0 and found["100%"]["objective_s"] == 0


@pytest.mark.slow
def test_a_gpu_has_a_reserve_and_a_flag_overrides_it() -> None:
    found = done("optimize", *SMALL, "--mem-budget", "80%", *PROFILE)
    assert found["static"]["reserve"] == int(0.05 * found["budget_bytes"])
    given = done("optimize", *SMALL, "--mem-budget", "80%", *PROFILE, "--reserve", "1MiB")
    assert given["static"]["reserve"] == 2**20
    assert given["budget_bytes"] - 2**20 == pytest.approx(0.95 * found["budget_bytes"], abs=2)
    static = done("optimize", *SMALL, "--mem-budget", "80%", *PROFILE, "--static-bytes", "10MB")
    assert static["static"] == {"given": 10_000_000}


def test_flags_change_what_is_static() -> None:
    adamw, sgd, accumulated = (
        done("optimize", *SMALL, "--mem-budget", "100%", *PROFILE, *flags)["static"]
        for flags in ((), ("--optimizer", "sgd"), ("--grads", "accumulate"))
    )
    assert adamw["optimizer_state"] > 2 * adamw["parameters"] and sgd["optimizer_state"] == 0
    assert (adamw["gradients"], accumulated["gradients"]) == (0, adamw["parameters"])


def test_a_shard_holds_its_part_and_no_gradients_but_its_own() -> None:
    wide = ("gpt-mini", "--set", "layers=1", "--set", "width=256", "--set", "vocab=64", "--set", "seq=64", "--set", "batch=4")
    whole, part = (done("optimize", *wide, "--mem-budget", "100%", *PROFILE, *flags) for flags in ((), ("--shards", "4")))
    shared = whole["static"]["parameters"], whole["static"]["optimizer_state"], whole["static"]["parameters"]
    held = part["static"]["parameters"], part["static"]["optimizer_state"], part["static"]["gradients"]
    assert all(4 * own - 4 < of_all <= 4 * own for own, of_all in zip(held, shared, strict=True))
    without_static = [found["keep_all"]["peak_bytes"] - sum(found["static"].values()) for found in (whole, part)]
    assert without_static[1] < without_static[0]  # no gradient is there but while it is made
    assert "a shard cannot be run" in refused("optimize", *SMALL, "--mem-budget", "100%", "--shards", "2", "--run")
    assert "shards=0" in refused("optimize", *SMALL, "--mem-budget", "100%", *PROFILE, "--shards", "0")


def test_pins_are_kept() -> None:
    free = done("optimize", *SMALL, "--mem-budget", "100%", *PROFILE)
    pinned = done("optimize", *SMALL, "--mem-budget", "100%", *PROFILE, "--recompute", "blocks.0")
    assert free["objective_s"] == 0 < pinned["objective_s"]


def test_run_measures_what_was_planned(folder: Path) -> None:
    found = done("optimize", "mine.py:step", "--set", "batch=64", "--set", "width=32", "--mem-budget", "85%", "--run")
    measured = found["measured"]
    assert set(measured) >= {"peak_bytes", "step_s", "eager_peak_bytes", "eager_step_s", "gradients"}
    assert measured["gradients"] == "bitwise"
    assert measured["peak_bytes"] <= found["budget_bytes"]
    assert measured["step_s"] > 0 and measured["eager_step_s"] > 0


def test_a_plan_is_trained_with_again(folder: Path) -> None:
    planned = done("optimize", *SMALL, "--mem-budget", "75%", "--out", "plan.json")
    trained = done("run", *SMALL, "--plan", "plan.json", "--steps", "4")
    assert len(trained["losses"]) == 4 and trained["losses"][3] < trained["losses"][0]
    assert trained["peak_bytes"] <= trained["budget_bytes"] == planned["budget_bytes"]
    assert trained["predicted_peak_bytes"] == planned["predicted"]["peak_bytes"]
    text = called("run", *SMALL, "--plan", "plan.json", "--steps", "1").stdout
    assert re.search(r"^step 1  4\.\d{6}\n\npeak  [\d.]+ MiB  within the budget of [\d.]+ MiB; predicted", text), text


# -- compare, trace ----------------------------------------------------------------------------------------------------


def test_compare_puts_planners_side_by_side() -> None:
    found = done("compare", *SMALL, "--mem-budget", "85%", *PROFILE)
    planners = found["planners"]
    assert set(planners) == {"milp", *BASELINES}
    ours = planners["milp"]
    assert ours["fits"] and ours["peak_bytes"] <= found["budget_bytes"]
    assert not planners["keep_all"]["fits"] and planners["keep_all"]["overhead"] == 0
    for name in ("sqrt_l", "per_layer"):
        assert ours["below"][name] == pytest.approx(1 - ours["step_s"] / planners[name]["step_s"])
        assert ours["step_s"] <= planners[name]["step_s"] or not planners[name]["fits"]
    text = called("compare", *SMALL, "--mem-budget", "85%", *PROFILE).stdout
    assert [line.split()[0] for line in text.splitlines()[3:7]] == ["milp", "keep_all", "sqrt_l", "per_layer"]


def test_compare_runs_what_fits(folder: Path) -> None:
    found = done("compare", "mine.py:step", "--set", "batch=64", "--mem-budget", "100%", "--run", "--out", "table.json")
    assert json.loads(Path("table.json").read_text()) == found
    for name, figures in found["planners"].items():
        assert figures["fits"] == ("measured" in figures), name
        if figures["fits"]:
            assert figures["measured"]["gradients"] == "bitwise", name
            assert figures["measured"]["peak_bytes"] <= found["budget_bytes"], name


def test_compare_where_nothing_fits() -> None:
    result = called("compare", *SMALL, "--mem-budget", "1MB", *PROFILE, "--json")
    assert result.exit_code == 3
    planners = only_object(result.stdout)["planners"]
    assert planners["milp"]["status"] == "infeasible" and planners["milp"]["peak_bytes"] is None
    assert planners["milp"]["smallest_budget_bytes"] > 10**6
    assert not any(p["fits"] for p in planners.values())


def test_trace_prints_the_graph_and_writes_it(folder: Path) -> None:
    text = called("trace", "mine.py:step").stdout
    assert text.startswith("graph mine.py:step: ") and "aten.addmm.default" in text and "mine.py:" in text
    summary = called("trace", "mine.py:step", "--summary").stdout
    assert text.startswith(summary) and "aten" not in summary
    found = done("trace", "mine.py:step", "--out", "graph.json", *PROFILE)
    from actsolve.graph_file import load_graph

    graph, costs = load_graph("graph.json")
    assert (found["forward_ops"], found["backward_ops"]) == (graph.n_forward, len(graph.ops) - graph.n_forward)
    assert costs is not None and found["step_s"] == sum(costs.seconds)
    assert found["graph"] == json.loads(Path("graph.json").read_text())
    assert found["fingerprint"] == graph.fingerprint


def test_a_model_of_any_size_is_traced_without_its_memory() -> None:
    found = done("trace", "llama-70b", "--set", "layers=2", "--set", "batch=1")
    assert found["values"]["parameter"]["bytes"] > 4e9
    assert done("trace", "mlp")["values"]["constant"]["count"] == 1  # the targets that its loss closes over
