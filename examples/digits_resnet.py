"""Train a small ResNet on scikit-learn's handwritten digits, as it is and within a memory budget.

    python examples/digits_resnet.py --mem-budget 60%

Both runs start from the same seed and see the same batches. Their losses and batch-norm statistics are bitwise equal, and so is
what they have learnt; what differs is the peak memory.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from side_by_side import Batch, Run, compare, parser, train
from sklearn.datasets import load_digits

import actsolve
from models_zoo.resnet import ResNet

TEST_IMAGES = 297


def digits(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the 1,797 images, scaled up to ``size`` and in three equal channels, and their labels, in random order."""
    data = load_digits()
    order = torch.randperm(len(data.images), generator=torch.Generator().manual_seed(1))
    images = torch.tensor(data.images, dtype=torch.float32)[order, None] / 8 - 1
    images = torch.nn.functional.interpolate(images, size=(size, size), mode="bilinear")
    return images.expand(-1, 3, -1, -1).contiguous(), torch.tensor(data.target)[order]


def batches(images: torch.Tensor, labels: torch.Tensor, steps: int, batch: int) -> list[Batch]:
    """Return for each step ``batch`` random images and their labels."""
    random = torch.Generator().manual_seed(2)
    picks = torch.randint(len(images), (steps, batch), generator=random)
    return [(images[p], labels[p]) for p in picks]


@torch.no_grad()
def accuracy(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of images that are classified right."""
    model.eval()
    guesses = torch.cat([model(part).argmax(1) for part in images.split(100)])
    model.train()
    return (guesses == labels).float().mean().item()


def run(options: argparse.Namespace, mem_budget: str | None) -> tuple[Run, torch.nn.Module]:
    """Train from the seed; within ``mem_budget`` if there is one. Print what was learnt."""
    images, labels = digits(options.size)
    data = batches(images[:-TEST_IMAGES], labels[:-TEST_IMAGES], options.steps, options.batch)
    torch.manual_seed(options.seed)
    model: torch.nn.Module = ResNet(depth=options.depth, width=options.width, classes=10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    start = time.perf_counter()
    if mem_budget is not None:
        model = actsolve.optimize(
            model, args=data[0], mem_budget=mem_budget, optimizer=optimizer, time_limit_s=options.time_limit
        )
    result = train(model, optimizer, data, time.perf_counter() - start)
    learnt = accuracy(model, images[:-TEST_IMAGES], labels[:-TEST_IMAGES])
    unseen = accuracy(model, images[-TEST_IMAGES:], labels[-TEST_IMAGES:])
    name = f"within {mem_budget}" if mem_budget else "as it is"
    print(f"{name}: accuracy {learnt:.4f} on the training images, {unseen:.4f} on unseen ones")
    return result, model


def main(arguments: list[str] | None = None) -> int:
    flags = parser(__doc__, budget="60%", steps=250, batch=64, lr=4e-3)
    flags.add_argument("--size", type=int, default=32, help="side of the images")
    flags.add_argument("--depth", type=int, default=50)
    flags.add_argument("--width", type=int, default=8, help="channels of the first layer")
    return compare(run, flags.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
