"""What training with a saved plan gave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actsolve.json_file import shown
from actsolve.report.table import aligned
from actsolve.units import format_bytes, format_seconds


def run_text(result: Mapping[str, Any]) -> str:
    """Return the losses, a line each, the peak and the step time, from the fields of ``run --json``."""
    losses = [(f"step {i}", "not finite" if x is None else f"{x:.6f}") for i, x in enumerate(result["losses"], start=1)]
    peak, budget, predicted = result["peak_bytes"], result["budget_bytes"], result["predicted_peak_bytes"]
    within = "within" if peak <= budget else "OVER"
    rows = [("peak", format_bytes(peak), f"{within} the budget of {format_bytes(budget)}; predicted {format_bytes(predicted)}")]
    if result["step_s"] is not None:
        rows.append(("step", format_seconds(result["step_s"]), f"predicted {format_seconds(result['predicted_step_s'])}"))
    if result["d2h_bytes"]:
        moved = f"{format_bytes(result['d2h_bytes'])} out and {format_bytes(result['h2d_bytes'])} back a step"
        stalls = f"predicted stalls {format_seconds(result['predicted_stall_s'])}"
        rows.append(("host", format_bytes(result["host_peak_bytes"]), f"{moved}; {stalls}"))
    notes = [f"note: {shown(note)}" for note in result["notes"]]
    return "\n".join([*aligned(losses, indent=""), "", *aligned(rows, {1}, ""), *notes]) + "\n"
