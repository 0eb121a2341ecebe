"""Plain PyTorch models with sample inputs, one family a file, to plan, test and measure with.

>>> step = models_zoo.get("gpt-mini")(batch=4, dtype="bf16")
>>> loss = step.model(*step.args)

A factory takes keyword overrides only and returns a `TrainingStep` on the default device (`with
torch.device(...)`), in train mode. Under `FakeTensorMode` it allocates nothing, so llama-70b builds on a
laptop. Weights come from the global random state; inputs are fixed.
"""

from __future__ import annotations

import difflib

from models_zoo import bert, conv_chain, gpt, llama, mlp, mobilenet, resnet, unet, vgg, vit
from models_zoo.size import Size

__all__ = ["Size", "describe", "get", "names"]

FAMILIES = (gpt, llama, bert, vit, resnet, vgg, mobilenet, unet, mlp, conv_chain)
SIZES: dict[str, Size] = {size.name: size for family in FAMILIES for size in family.SIZES}
ALIASES = {  # a family's name where it is not itself a size
    "gpt": "gpt-mini",
    "llama": "llama-mini",
    "bert": "bert-mini",
    "vit": "vit-mini",
    "resnet": "resnet18-mini",
    "vgg": "vgg16-mini",
    "mobilenet": "mobilenet_v2-mini",
}


def names() -> list[str]:
    """Return the name of every size, family by family, smallest first; aliases are left out."""
    return list(SIZES)


def get(name: str) -> Size:
    """Return the factory of a size, or of a family's mini size.

    Raises:
        KeyError: no such name; the message lists those nearest to it.
    """
    name = ALIASES.get(name, name)
    if name not in SIZES:
        near = difflib.get_close_matches(name, [*SIZES, *ALIASES], n=5, cutoff=0.5)
        hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(SIZES)}"
        raise KeyError(f"no model named {name!r} in the zoo; {hint}")
    return SIZES[name]


def describe() -> dict[str, str]:
    """Return one line for each name: what it is and its default settings."""
    return {name: size.describe() for name, size in SIZES.items()}
