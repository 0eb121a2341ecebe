"""Fine-tune a GPT-2 of Hugging Face with `transformers.Trainer` on real text, as it is and within a memory budget.

    pip install "actsolve[transformers]"
    python examples/huggingface_trainer.py --mem-budget 50%

The Trainer is given the optimized model in place of the original and does not notice; it is planned for at the first batch. The
weights are random and the text is Python's own language reference, so that nothing is downloaded. Both runs start from the
same seed; their losses are bitwise equal, dropout included, and so are the trained weights.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pydoc_data.topics import topics
from typing import Any

import torch
from side_by_side import Run, Watch, compare, held_bytes, parser
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import actsolve


class Passages(Dataset[dict[str, torch.Tensor]]):
    """Passages of the text, a byte a token."""

    def __init__(self, length: int) -> None:
        text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()
        self._passages = text[: len(text) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self._passages)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self._passages[index]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


class Watching(TrainerCallback):
    """Tells a `Watch` of the Trainer's steps."""

    def __init__(self, watch: Watch, batch_bytes: int) -> None:
        self._watch, self._batch_bytes = watch, batch_bytes

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._watch.begin(state.global_step, held_bytes(kwargs["model"], kwargs["optimizer"], ()) + self._batch_bytes)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._watch.end()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs is not None and "loss" in logs:
            self._watch.losses.append(logs["loss"])


def run(options: argparse.Namespace, mem_budget: str | None) -> tuple[Run, torch.nn.Module]:
    """Train from the seed; within ``mem_budget`` if there is one."""
    torch.manual_seed(options.seed)
    sizes = {"n_layer": options.layers, "n_embd": options.width, "n_head": options.heads, "n_positions": options.length}
    model: torch.nn.Module = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **sizes))
    if mem_budget is not None:
        model = actsolve.optimize(model, mem_budget=mem_budget, optimizer="adamw", time_limit_s=options.time_limit)
    watch = Watch()
    watching = Watching(watch, batch_bytes=3 * options.batch * options.length * 8)
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch,
            learning_rate=options.lr,
            seed=options.seed,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        Trainer(model, arguments, train_dataset=Passages(options.length), callbacks=[watching]).train()
    return watch.run(), model


def main(arguments: list[str] | None = None) -> int:
    flags = parser(__doc__, budget="50%", steps=20, batch=4, lr=1e-3)
    flags.add_argument("--length", type=int, default=128, help="tokens per passage")
    flags.add_argument("--layers", type=int, default=6)
    flags.add_argument("--width", type=int, default=192)
    flags.add_argument("--heads", type=int, default=6)
    return compare(run, flags.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
