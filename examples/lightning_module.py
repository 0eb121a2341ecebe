"""Train a character-level GPT in a LightningModule, as it is and within a memory budget.

    pip install "actsolve[lightning]"
    python examples/lightning_module.py --mem-budget 50%

The LightningModule holds the optimized model in place of the original; it is planned for at the first batch. Both runs start from
the same seed and see the same batches. Their losses are bitwise equal, dropout included, and so are the trained weights.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from typing import Any

import lightning
import torch
from character_model import batches, encoded_text
from side_by_side import Batch, Run, Watch, compare, held_bytes, parser

import actsolve
from models_zoo.gpt import character_model


class Language(lightning.LightningModule):
    """A model whose call returns its loss."""

    def __init__(self, model: torch.nn.Module, lr: float) -> None:
        super().__init__()
        self.model, self._lr = model, lr

    def training_step(self, batch: Batch, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(*batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self._lr)


class Watching(lightning.Callback):
    """Tells a `Watch` of the Trainer's steps."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Batch, batch_idx: int) -> None:
        self._watch.begin(batch_idx, held_bytes(module, trainer.optimizers[0], batch))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self._watch.end()
        self._watch.losses.append(outputs["loss"].item())


def run(options: argparse.Namespace, mem_budget: str | None) -> tuple[Run, torch.nn.Module]:
    """Train from the seed; within ``mem_budget`` if there is one."""
    text, vocab = encoded_text()
    data = batches(text, options.steps, options.batch, options.length)
    torch.manual_seed(options.seed)
    model: torch.nn.Module = character_model(
        vocab=vocab, block_size=options.length, layers=options.layers, width=options.width, heads=options.heads
    )
    if mem_budget is not None:
        model = actsolve.optimize(model, mem_budget=mem_budget, optimizer="adamw", time_limit_s=options.time_limit)
    watch = Watch()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", callbacks=[Watching(watch)], **quiet)
    torch.manual_seed(options.seed)  # dropout draws the same numbers in both runs
    trainer.fit(Language(model, options.lr), torch.utils.data.DataLoader(data, batch_size=None))
    return watch.run(), model


def main(arguments: list[str] | None = None) -> int:
    flags = parser(__doc__, budget="50%", steps=20, batch=16, lr=1e-3)
    flags.add_argument("--length", type=int, default=128, help="characters per passage")
    flags.add_argument("--layers", type=int, default=6)
    flags.add_argument("--width", type=int, default=128)
    flags.add_argument("--heads", type=int, default=4)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    return compare(run, flags.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
