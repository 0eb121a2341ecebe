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
from side_by_side import Batch, Run, compare, parser, train

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
    flags = parser(__doc__, budget="50%", steps=60, batch=16, lr=1e-3)
    flags.add_argument("--length", type=int, default=128, help="characters per passage")
    flags.add_argument("--layers", type=int, default=6)
    flags.add_argument("--width", type=int, default=128)
    flags.add_argument("--heads", type=int, default=4)
    return compare(run, flags.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
