"""Train a character-level GPT on English text, as it is and within a memory budget.

    python examples/character_model.py --mem-budget 50%

Both runs start from the same seed and see the same batches. Their losses are bitwise equal, dropout included; what differs is
the peak memory. The text is Python's own language reference, which comes with Python.
"""

from __future__ import annotations

import argparse
import sys
import time
from pydoc_data.topics import topics

import torch
from side_by_side import Batch, Run, same_state, show, train

import actsolve
from models_zoo.gpt import character_model


def encoded_text() -> tuple[torch.Tensor, int]:
    """Return the text as character numbers, and how many distinct ones there are."""
    text = "\n".join(topics.values())
    number = {c: i for i, c in enumerate(sorted(set(text)))}
    return torch.tensor([number[c] for c in text]), len(number)


def batches(text: torch.Tensor, steps: int, batch: int, length: int) -> list[Batch]:
    """Return for each step ``batch`` random passages, and the same passages one character on."""
    random = torch.Generator().manual_seed(1)
    starts = torch.randint(len(text) - length, (steps, batch, 1), generator=random)
    passages = text[starts + torch.arange(length + 1)]
    return [(p[:, :-1].contiguous(), p[:, 1:].contiguous()) for p in passages]


def run(options: argparse.Namespace, mem_budget: str | None) -> tuple[Run, torch.nn.Module]:
    """Train from the seed; within ``mem_budget`` if there is one."""
    text, vocab = encoded_text()
    data = batches(text, options.steps, options.batch, options.length)
    torch.manual_seed(options.seed)
    model: torch.nn.Module = character_model(
        vocab=vocab, block_size=options.length, layers=options.layers, width=options.width, heads=options.heads
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    start = time.perf_counter()
    if mem_budget is not None:
        model = actsolve.optimize(
            model, args=data[0], mem_budget=mem_budget, optimizer=optimizer, time_limit_s=options.time_limit
        )
    setup_s = time.perf_counter() - start
    torch.manual_seed(options.seed)  # dropout draws the same numbers in both runs
    return train(model, optimizer, data, setup_s), model


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mem-budget", default="50%", help="8GiB, 7500MB, bytes, a share of what the step needs, or min")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=128, help="characters per passage")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds for the solver")
    options = parser.parse_args(arguments)
    try:
        budgeted, optimized = run(options, options.mem_budget)
    except actsolve.ActsolveError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    plain, model = run(options, None)
    return 0 if show(plain, budgeted, optimized.plan.budget_bytes, same_state(model, optimized)) else 1


if __name__ == "__main__":
    sys.exit(main())
