"""The zoo: mini sizes train, published sizes have their published parameter counts, errors say what to do."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import models_zoo
from actsolve.training_step import TrainingStep
from models_zoo import gpt, inputs, llama

MINIS = [name for name in models_zoo.names() if name.endswith("-mini")]

PUBLISHED_PARAMETERS = {
    "gpt-small": 124_439_808,
    "gpt-medium": 354_823_168,
    "gpt-large": 774_030_080,
    "gpt-xl": 1_557_611_200,
    "llama-1b": 1_235_814_400,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "bert-base": 109_514_298,  # with the masked-token head, without the pooler
    "bert-large": 335_174_458,
    "vit-b16": 86_567_656,
    "vit-l16": 304_326_632,
    "resnet18": 11_689_512,
    "resnet18-mini": 11_689_512,
    "resnet50": 25_557_032,
    "resnet152": 60_192_808,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "mobilenet_v2": 3_504_872,
}


def loss_of(step: TrainingStep) -> Tensor:
    """Return the step's loss (0-d), wherever it is computed."""
    output = step.model(*step.args, **step.kwargs)
    return output if step.loss_fn is None else step.loss_fn(output)


def fake_step(name: str, **overrides: object) -> TrainingStep:
    """Build a size without allocating it."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"):
        return models_zoo.get(name)(**overrides)


def saved_bytes_and_loss(step: TrainingStep) -> tuple[int, Tensor]:
    """Return the storage bytes that autograd saves beyond parameters, buffers and inputs, and the loss."""
    static = {t.untyped_storage().data_ptr() for t in (*step.model.parameters(), *step.model.buffers(), *step.args)}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in static:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(step)
    return sum(saved.values()), loss


@pytest.mark.parametrize("name", MINIS)
def test_a_mini_size_trains_and_activations_dominate(name: str) -> None:
    torch.manual_seed(0)
    step = models_zoo.get(name)()
    assert step.model.training
    saved_bytes, loss = saved_bytes_and_loss(step)
    loss.backward()

    assert loss.dtype == torch.float32 and loss.shape == () and loss.isfinite()
    for parameter_name, parameter in step.model.named_parameters():
        grad = parameter.grad
        assert grad is not None and grad.isfinite().all() and grad.any(), parameter_name
    parameter_bytes = sum(parameter.nbytes for parameter in step.model.parameters())
    if name != "resnet18-mini":  # the full network on small images: its parameters dominate
        assert saved_bytes >= 4 * parameter_bytes


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("name", "small"),  # half-precision backwards are slow on many CPUs
    [
        ("gpt-mini", {"batch": 1, "seq": 16}),
        ("llama-mini", {"batch": 1, "seq": 16}),
        ("resnet18-mini", {"batch": 2}),
        ("unet-mini", {"batch": 1, "image": 32}),
        ("mlp-mini", {"batch": 16}),
    ],
)
def test_low_precision(name: str, small: dict[str, int], dtype: str) -> None:
    step = models_zoo.get(name)(dtype=dtype, **small)
    norms = [m for m in step.model.modules() if isinstance(m, nn.BatchNorm2d)]
    in_norms = {id(parameter) for norm in norms for parameter in norm.parameters()}
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    for parameter in step.model.parameters():
        assert parameter.dtype == (torch.float32 if id(parameter) in in_norms else wanted)
    loss = loss_of(step)
    loss.backward()
    assert loss.dtype == torch.float32 and loss.isfinite()
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("name", models_zoo.names())
def test_every_size_builds_fake_with_its_published_parameters(name: str) -> None:
    step = fake_step(name)
    count = sum(parameter.numel() for parameter in step.model.parameters())
    assert count == PUBLISHED_PARAMETERS.get(name, count)
    assert step.model.training
    assert all(tensor.device.type == "cpu" for tensor in (*step.model.parameters(), *step.args))


@pytest.mark.parametrize("name", MINIS)
def test_a_fake_step_has_a_loss_and_gradients(name: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"):
        step = models_zoo.get(name)()
        loss = loss_of(step)
        loss.backward()
    assert loss.shape == ()
    assert all(parameter.grad is not None for parameter in step.model.parameters())


def test_it_builds_on_the_device_of_the_context() -> None:
    for name in ("llama-70b", "unet"):
        with FakeTensorMode(allow_non_fake_inputs=True), torch.device("meta"):
            step = models_zoo.get(name)()
        tensors = (*step.model.parameters(), *step.model.buffers(), *step.args)
        assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_without_targets_models_return_logits() -> None:
    logits = {
        "gpt": (2, 16, 256),
        "llama": (2, 16, 256),
        "bert": (2, 16, 256),
        "vit": (2, 10),
        "vgg": (2, 10),
    }
    for name, shape in logits.items():
        overrides = {"batch": 2} | ({"seq": 16} if len(shape) == 3 else {})
        step = fake_step(name, **overrides)
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert step.model(torch.zeros_like(step.args[0])).shape == shape


@pytest.mark.parametrize("name", ["gpt-mini", "llama-mini"])
def test_language_models_do_not_look_ahead(name: str) -> None:
    step = models_zoo.get(name)(batch=1, seq=32, layers=2)
    model = step.model.eval()
    idx = step.args[0]
    changed = idx.clone()
    changed[0, 20] = (idx[0, 20] + 1) % 256
    before, after = model(idx), model(changed)
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20], after[:, 20])


def test_rotary_products_depend_on_distance_alone() -> None:
    cos, sin = llama.rotary_tables(64, 32)
    q, k = torch.randn(2, 32)
    rotated_q, rotated_k = llama.rotate(q, cos, sin), llama.rotate(k, cos, sin)
    torch.testing.assert_close(rotated_q[7] @ rotated_k[3], rotated_q[57] @ rotated_k[53])
    torch.testing.assert_close(rotated_q[0], q)


def test_tied_weights_are_one_parameter() -> None:
    model = fake_step("gpt-mini", dtype="bf16").model
    assert model.get_parameter("head.weight") is model.get_parameter("tokens.weight")
    bert = fake_step("bert-mini").model
    assert bert.get_parameter("decoder.weight") is bert.get_parameter("tokens.weight")


@pytest.mark.slow
def test_a_character_model_learns() -> None:
    torch.manual_seed(0)
    text = "to be or not to be, that is the question: "
    letters = sorted(set(text))
    idx = torch.tensor([letters.index(letter) for letter in text * 4])
    model = gpt.character_model(vocab=len(letters), block_size=64, layers=2, width=32, heads=2, dropout=0.0)
    batch, targets = (torch.stack([idx[i : i + 64] for i in range(start, start + 8)]) for start in (0, 1))
    for _ in range(150):
        loss = model(batch, targets)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():  # by hand: the first torch.optim step imports all of Dynamo, for seconds
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(0.3 * gradient)
    assert loss < 1.0


def test_inputs_are_fixed_and_leave_the_random_state_alone() -> None:
    state = torch.get_rng_state()
    tokens, noise = inputs.integers((64, 64), 50), inputs.floats((64, 64))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(tokens, inputs.integers((64, 64), 50))
    assert not torch.equal(tokens, inputs.integers((64, 64), 50, seed=1))
    assert tokens.min() == 0 and tokens.max() == 49
    assert abs(noise.mean()) < 0.05 and abs(noise.var() - 1) < 0.05
    assert abs(torch.corrcoef(torch.stack((noise[:, :-1].flatten(), noise[:, 1:].flatten())))[0, 1]) < 0.05


def test_overrides_reach_the_model() -> None:
    step = fake_step("gpt-small", layers=3, batch=2, seq=64, dropout=0.0, dtype="bf16")
    assert len(step.model.get_submodule("blocks")) == 3  # type: ignore[arg-type]
    assert step.args[0].shape == (2, 64)
    assert fake_step("unet-mini", image=32, batch=1).args[0].shape == (1, 3, 32, 32)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert loss_of(models_zoo.get("unet-mini")(image=32, batch_norm=False)).shape == ()


def test_a_factory_has_a_signature_and_a_description() -> None:
    factory = models_zoo.get("gpt-xl")
    parameters = inspect.signature(factory).parameters
    assert {name: p.default for name, p in parameters.items()} == factory.settings
    assert factory.settings["width"] == 1600
    assert list(models_zoo.describe()) == models_zoo.names()
    assert models_zoo.describe()["resnet18"] == ("ResNet-18: depth=18, width=64, image=224, batch=64, classes=1000, dtype=fp32")


def test_a_family_stands_for_its_mini_size() -> None:
    for family in ("gpt", "llama", "bert", "vit"):
        assert models_zoo.get(family) is models_zoo.get(f"{family}-mini")
    assert models_zoo.get("mlp").name == "mlp"


def test_unknown_names_list_near_matches() -> None:
    with pytest.raises(KeyError) as error:
        models_zoo.get("gpt2-xl")
    assert error.value.args[0].startswith("no model named 'gpt2-xl' in the zoo; did you mean gpt-xl")
    with pytest.raises(KeyError, match=r"known: gpt-mini, gpt-small.*conv-chain"):
        models_zoo.get("####")


def test_unknown_overrides_name_the_accepted_ones() -> None:
    with pytest.raises(TypeError) as error:
        models_zoo.get("resnet18")(widht=32)
    assert str(error.value) == (
        "resnet18: unknown override 'widht' (did you mean 'width'?); accepted: depth, width, image, batch, classes, dtype"
    )


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("gpt-mini", {"dtype": "int8"}, "unknown dtype 'int8'; accepted: fp32, bf16, fp16"),
        ("gpt-mini", {"width": 100}, "width 100 is not a multiple of heads 8"),
        ("llama-mini", {"kv_heads": 3}, "heads 8 is not a multiple of kv_heads 3"),
        ("vit-mini", {"image": 60}, "image 60 is not a multiple of patch 8"),
        ("unet-mini", {"image": 40}, "image 40x40 is not a multiple of 16, for 4 halvings"),
        ("resnet18", {"depth": 19}, "unknown depth 19; accepted: 18, 34, 50, 101, 152"),
        ("vgg16", {"depth": 13}, "unknown depth 13; accepted: 16, 19"),
    ],
)
def test_unusable_overrides_say_why(name: str, overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as error:
        fake_step(name, **overrides)
    assert str(error.value) == message
