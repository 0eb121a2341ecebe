"""Models of transformers with parts that no trace can follow: speech that NumPy masks, detectors whose matcher SciPy computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import actsolve
from actsolve.errors import CaptureError

transformers = pytest.importorskip("transformers")
pytest.importorskip("scipy")

SPEECH: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 37,
    "conv_dim": (16, 16),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 8),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 20,
    "mask_time_prob": 0.3,
    "mask_time_length": 2,
    "mask_feature_prob": 0.3,
    "mask_feature_length": 4,
    "layerdrop": 0.0,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 37,
    "image_size": [64, 64],
    "num_detection_tokens": 9,
    "num_labels": 5,
}
BACKBONE: dict[str, Any] = {
    "embedding_size": 8,
    "hidden_sizes": [8, 8, 16, 16],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
    "out_features": ["stage4"],
}
DETECTION: dict[str, Any] = {
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "num_queries": 9,
    "num_labels": 5,
    "auxiliary_loss": True,
}


def speech(name: str) -> nn.Module:
    return getattr(transformers, f"{name}ForCTC")(getattr(transformers, f"{name}Config")(**SPEECH))  # type: ignore[no-any-return]


def detector(name: str, **settings: Any) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**settings)
    return getattr(transformers, f"{name}ForObjectDetection")(config)  # type: ignore[no-any-return]


def detr() -> nn.Module:
    return detector("Detr", **DETECTION, backbone_config=transformers.ResNetConfig(**BACKBONE))


def sounds(seed: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {"input_values": torch.randn(2, 800, generator=g), "labels": torch.randint(1, 20, (2, 5), generator=g)}


def images(seed: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    labels = [
        {"class_labels": torch.randint(0, 5, (n,), generator=g), "boxes": 0.1 + 0.4 * torch.rand(n, 4, generator=g)}
        for n in (2, 3)
    ]
    return {"pixel_values": torch.randn(2, 3, 64, 64, generator=g), "labels": labels}


MATCHER = "transformers.loss.loss_for_object_detection.HungarianMatcher"
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Any]], tuple[str, ...], str]] = {
    "Wav2Vec2": (lambda: speech("Wav2Vec2"), sounds, (), "wav2vec2._mask_hidden_states"),
    "Hubert, named": (lambda: speech("Hubert"), sounds, ("hubert._mask_hidden_states",), "hubert._mask_hidden_states"),
    "Yolos": (lambda: detector("Yolos", **VISION), images, (), MATCHER),
    "Yolos, named": (lambda: detector("Yolos", **VISION), images, ("loss_function",), "loss_function"),
    "DETR with losses of all layers": (detr, images, (), MATCHER),
}


@pytest.mark.parametrize("kind", CASES)
def test_it_trains_as_in_eager(kind: str) -> None:
    made, batch, eager, found = CASES[kind]
    torch.manual_seed(0)
    model = made().train()
    twin = copy.deepcopy(model)
    module = actsolve.optimize(model, (), batch(99), mem_budget="min", eager=eager)
    assert f"Left in eager: {found}." in module.report()  # type: ignore[operator]
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (module, twin)]
    for step in range(3):
        seen = []
        for m, optimizer in zip((module, twin), optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(step)
            np.random.seed(step)
            out = m(**batch(step))
            out.loss.backward()
            seen.append((out, torch.rand(1), np.random.rand(), [p.grad for p in m.parameters()]))
            optimizer.step()
        (out, drawn, number, gradients), (out_twin, drawn_twin, number_twin, gradients_twin) = seen
        assert torch.equal(out.loss, out_twin.loss) and torch.equal(out.logits, out_twin.logits), f"step {step}"
        assert torch.equal(drawn, drawn_twin) and number == number_twin, f"step {step}: random state"
        for (name, _), a, b in zip(module.named_parameters(), gradients, gradients_twin, strict=True):
            assert (a is None) == (b is None) and (a is None or torch.equal(a, b)), f"step {step}: {name}"
        assert all(map(torch.equal, module.parameters(), twin.parameters())), f"step {step}"


def test_a_loss_that_returns_views_of_what_it_is_given_is_refused() -> None:
    with pytest.raises(CaptureError, match="loss_function, which is left in eager, returns what is in memory of its inputs"):
        actsolve.optimize(detr().train(), (), images(99), mem_budget="min", eager=["loss_function"])
