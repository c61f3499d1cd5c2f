"""The networks: the papers' sizes, structure and initial weights."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torch
import torchvision
from invalid_files import Malicious
from parametrize import mark_others_nightly
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import ResNet18_Weights

from fairflower import models
from fairflower.clients.fedbn import FedBN
from fairflower.config import ModelConfig
from fairflower.config.methods import ModelSpec
from fairflower.errors import ConfigError
from fairflower.models import Classifier, copy_arrays, keep_local, resnet, set_arrays
from fairflower.registry import DATA_SETS, MODELS
from fairflower.tasks import task_of
from fairflower.testing import check_model

COLOR = (3, 32, 32)


def num_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("name", "shape", "count"),
    [
        ("resnet10", COLOR, 4_903_242),
        ("resnet12", COLOR, 4_977_226),
        ("resnet18", COLOR, 11_181_642),
        ("cnn", COLOR, 33_946),
        ("cnn", (3, 16, 16), 26_266),
        ("cnn:norm=batch", (3, 16, 16), 26_266),
        ("prompt-vit-tiny", COLOR, 133_514),
        ("vpt-vit-tiny", COLOR, 1_802),
        ("mlp", (13,), 64 * (13 + 1 + 64 + 1) + 650),
        ("mlp:hidden=8", COLOR, 8 * (3072 + 1 + 8 + 1) + 90),
        ("embedding-bag", (100, 20), 6_400 + 650),
    ],
)
def test_models_have_the_expected_number_of_parameters(
    name: str, shape: tuple[int, ...], count: int
) -> None:
    assert num_parameters(models.build(name, 10, shape, seed=0)) == count


def test_resnet10_has_the_papers_number_of_arrays() -> None:
    model = models.build("resnet10", 10, COLOR, seed=0)
    assert len(list(model.parameters())) == 38
    assert len(list(model.buffers())) == 36


@pytest.mark.parametrize(("name", "first_stage"), [("resnet10", 1), ("resnet12", 2)])
def test_resnets_match_the_papers_description(name: str, first_stage: int) -> None:
    model = models.build(name, 10, COLOR, seed=1)
    state = {key.removeprefix("body."): value for key, value in model.state_dict().items()}
    x = torch.randn(4, *COLOR, generator=torch.Generator().manual_seed(0))

    def norm(x: Tensor, at: str) -> Tensor:
        return F.batch_norm(x, None, None, state[f"{at}.weight"], state[f"{at}.bias"], True)

    h = F.relu(norm(F.conv2d(x, state["conv1.weight"], padding=1), "bn1"))
    for stage, (blocks, stride) in enumerate([(first_stage, 1), (1, 2), (1, 2), (1, 2)], 1):
        for block in range(blocks):
            at = f"layer{stage}.{block}"
            out = F.conv2d(h, state[f"{at}.conv1.weight"], stride=stride, padding=1)
            out = F.conv2d(F.relu(norm(out, f"{at}.bn1")), state[f"{at}.conv2.weight"], padding=1)
            if f"{at}.downsample.0.weight" in state:
                h = F.conv2d(h, state[f"{at}.downsample.0.weight"], stride=stride)
                h = norm(h, f"{at}.downsample.1")
            h = F.relu(norm(out, f"{at}.bn2") + h)
    assert h.shape == (4, 512, 4, 4)
    h = F.avg_pool2d(h, 4).flatten(1)
    logits = F.linear(h, state["head.weight"], state["head.bias"])
    torch.testing.assert_close(model(x), logits, rtol=1e-4, atol=1e-4)


def test_resnet10_starts_from_pytorchs_default_weights() -> None:
    """nn.Conv2d and nn.Linear draw uniformly from +-1/sqrt(fan in)."""
    for module in models.build("resnet10", 10, COLOR, seed=0).modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            weight = module.weight.detach()
            bound = 1 / math.sqrt(weight[0].numel())
            assert weight.abs().max() <= bound
            assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
        elif isinstance(module, nn.BatchNorm2d):
            assert torch.equal(module.weight, torch.ones_like(module.weight))
            assert torch.equal(module.bias, torch.zeros_like(module.bias))


def test_resnet18_equals_torchvisions() -> None:
    model = models.build("resnet18", 7, COLOR, seed=5).eval()
    with torch.random.fork_rng():
        torch.manual_seed(5)
        reference = torchvision.models.resnet18(num_classes=7).eval()
    x = torch.randn(2, *COLOR, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(x), reference(x))


#: All models except those with downloaded weights (tests/models/test_prompt_vit.py) and bags.
AT_HAND = [name for name in MODELS if not name.endswith(("b-16", "bag", "gpt"))]


def task_for(name: str) -> str:
    return "segmentation" if name == "unet" else "classification"


SHAPES = ((3, 32, 32), (1, 8, 8), (3, 20, 13))


@pytest.mark.parametrize(
    ("name", "shape"),
    mark_others_nightly(
        itertools.product(AT_HAND, SHAPES),
        [  # each by one shape; ResNet-12 differs from ResNet-10 only in a number of blocks
            pair
            for pair in zip(AT_HAND, itertools.cycle(SHAPES), strict=False)
            if pair[0] != "resnet12"
        ],
    ),
)
def test_every_model_passes_check_model(name: str, shape: tuple[int, int, int]) -> None:
    check_model(MODELS[name], shape, task=task_for(name))


class Headless(Classifier):
    def __init__(self, num_classes: int, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.layer = nn.Linear(math.prod(shape), 5)
        self.head = nn.Linear(5, num_classes)

    def features(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1))  # type: ignore[no-any-return]


class TwoTiered(Headless):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Idle(Headless):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.spare = nn.Linear(2, 2)


class KeepsBack(Headless):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.scale = torch.rand(1)

    def features(self, x: Tensor) -> Tensor:
        return self.scale * super().features(x)


class Widened(Headless):
    def __init__(self, num_classes: int, shape: tuple[int, int, int]) -> None:
        super().__init__(num_classes + 1, shape)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (TwoTiered, r"forward\(x\) is not head\(features\(x\)\)"),
        (Idle, r"spare.weight, spare.bias get no gradient"),
        (KeepsBack, "a model that received all exchanged arrays has different outputs"),
        (Widened, r"in 3 classes have shape \(4, 4\)"),
        (lambda classes, shape: nn.Linear(3, classes), "expected a Classifier"),
    ],
)
def test_check_model_reports_broken_requirements(kind: Any, message: str) -> None:
    check_model(Headless)
    with pytest.raises(AssertionError, match=message):
        check_model(kind)


@pytest.mark.parametrize("side", [8, 16, 28, 64])
def test_cnn_accepts_images_of_many_sizes(side: int) -> None:
    model = models.build("cnn", 10, (3, side, side), seed=0)
    assert model(torch.zeros(2, 3, side, side)).shape == (2, 10)


@pytest.mark.parametrize(
    ("name", "shape"), [*((name, COLOR) for name in AT_HAND), ("embedding-bag", (9, 4))]
)
def test_the_weights_depend_only_on_the_seed(name: str, shape: tuple[int, ...]) -> None:
    before = torch.get_rng_state()
    task = task_of(task_for(name))
    first = models.build(name, 10, shape, seed=3, task=task).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    again = models.build(name, 10, shape, seed=3, task=task).state_dict()
    other = models.build(name, 10, shape, seed=4, task=task).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    last = "last.weight" if name == "unet" else "head.weight"
    assert not torch.equal(first[last], other[last])


def test_an_unknown_model_is_named_with_its_nearest_match() -> None:
    with pytest.raises(ConfigError, match=r"'cnnn'.*'cnn'.*cnn, .*resnet10, resnet12"):
        models.build("cnnn", 10, COLOR, seed=0)


def test_cnn_refuses_images_that_are_too_small() -> None:
    with pytest.raises(ConfigError, match=r"8x8.*the images are 7x9.*data\.image-size"):
        models.build("cnn", 10, (3, 7, 9), seed=0)


# --- pretrained weights of ResNet-18 ------------------------------------------------------


@pytest.fixture(scope="module")
def published() -> dict[str, Tensor]:
    """Return a state dict like torchvision's, with running statistics that are not initial ones."""
    with torch.random.fork_rng():
        torch.manual_seed(9)
        network = torchvision.models.resnet18(weights=None).train()
        network(torch.randn(4, *COLOR))  # moves the running statistics
    return dict(network.state_dict())


def save(arrays: Any, path: Path) -> str:
    save_file(arrays, path) if path.suffix == ".safetensors" else torch.save(arrays, path)
    return str(path)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_resnet18_loads_weights_from_a_file(
    published: dict[str, Tensor], tmp_path: Path, suffix: str
) -> None:
    path = save(published, tmp_path / f"resnet18{suffix}")
    model = models.build("resnet18", 7, COLOR, seed=5, weights=path).eval()
    reference = torchvision.models.resnet18(weights=None).eval()
    reference.load_state_dict(published)
    reference.fc = model.head  # seven classes, not a thousand
    x = torch.randn(2, *COLOR, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(x), reference(x))
    assert torch.equal(model.head.weight, models.build("resnet18", 7, COLOR, seed=5).head.weight)
    other = models.build("resnet18", 7, COLOR, seed=6, weights=path)
    assert not torch.equal(model.head.weight, other.head.weight)


def test_files_without_step_counters_are_accepted(
    published: dict[str, Tensor], tmp_path: Path
) -> None:
    """As torchvision publishes them."""
    arrays = {k: v for k, v in published.items() if not k.endswith("num_batches_tracked")}
    path = save(arrays, tmp_path / "resnet18.pth")
    state = models.build("resnet18", 7, COLOR, seed=0, weights=path).state_dict()
    assert torch.equal(state["body.bn1.running_var"], arrays["bn1.running_var"])
    assert state["body.bn1.num_batches_tracked"] == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda a: {k: v for k, v in a.items() if k != "layer2.0.conv1.weight"},
         r'Missing key.*: "layer2\.0\.conv1\.weight"\.'),
        (lambda a: a | {"conv1.weight": torch.zeros(64, 3, 3, 3)},
         r"size mismatch for conv1\.weight.*\[64, 3, 3, 3\].*\[64, 3, 7, 7\]"),
        (lambda a: a | {"layer5.weight": torch.zeros(1)}, r'Unexpected key.*"layer5\.weight"\.'),
        (lambda a: {f"module.{k}": v for k, v in a.items()},
         r'Missing key.*"conv1\.weight", .* \.\.\.'),
    ],
)  # fmt: skip
def test_weights_of_another_network_are_refused_with_the_reason(
    published: dict[str, Tensor], tmp_path: Path, change: Any, reason: str
) -> None:
    path = save(change(published), tmp_path / "other.pth")
    with pytest.raises(ConfigError, match=rf"other\.pth.*another network.*{reason}.*resnet18\."):
        models.build("resnet18", 7, COLOR, seed=0, weights=path)


def test_files_without_a_state_dict_are_refused_and_not_executed(
    published: dict[str, Tensor], tmp_path: Path
) -> None:
    for arrays in (Malicious(), {"state_dict": published}, [torch.zeros(1)]):
        path = save(arrays, tmp_path / "no.pth")
        with pytest.raises(ConfigError, match=r"model\.weights = '.*no\.pth'.*state"):
            models.build("resnet18", 7, COLOR, seed=0, weights=path)
    for text in (
        "",
        "hi\n",
        "https://example.org/x.pth",
        "version https://git-lfs.github.com/spec/v1",
    ):
        (tmp_path / "page.pth").write_text(text)
        with pytest.raises(ConfigError, match=r"torch\.save did not write this file") as refused:
            models.build("resnet18", 7, COLOR, seed=0, weights=str(tmp_path / "page.pth"))
        assert "weights_only" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"nowhere\.pth': file not found"):
        models.build("resnet18", 7, COLOR, seed=0, weights=str(tmp_path / "nowhere.pth"))


def test_pretrained_weights_are_refused_for_gray_images(
    published: dict[str, Tensor], tmp_path: Path
) -> None:
    path = save(published, tmp_path / "resnet18.pth")
    with pytest.raises(
        ConfigError, match=r"3 channels, but the data have 1\. Leave model\.weights empty"
    ):
        models.build("resnet18", 7, (1, 32, 32), seed=0, weights=path)


def test_weights_imagenet_are_torchvisions(
    published: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(weights: ResNet18_Weights, **options: Any) -> dict[str, Tensor]:
        assert weights is ResNet18_Weights.IMAGENET1K_V1
        assert options["check_hash"]
        assert options["weights_only"]
        return published

    monkeypatch.setattr(ResNet18_Weights, "get_state_dict", get)
    state = models.build("resnet18", 7, COLOR, seed=0, weights="imagenet").state_dict()
    assert torch.equal(state["body.conv1.weight"], published["conv1.weight"])

    def fail(*args: Any, **options: Any) -> None:
        raise URLError("no route to host")

    monkeypatch.setattr(ResNet18_Weights, "get_state_dict", fail)
    with pytest.raises(ConfigError, match=r"no route.*https://.*resnet18.*model\.weights"):
        models.build("resnet18", 7, COLOR, seed=0, weights="imagenet")


@pytest.mark.usefixtures("published")
def test_receivers_of_all_arrays_load_no_weights() -> None:
    for name in (name for name in AT_HAND if ModelSpec(name).takes("weights")):
        model = models.build(name, 7, COLOR, seed=0)
        whole = model.exchanged_arrays().keys() == model.state_dict().keys()
        assert whole == getattr(MODELS[name], "sent_whole", False)
        received = ModelConfig(name, "/nowhere.pth").to_receive()
        assert received.weights == ("" if whole else "/nowhere.pth")


def test_the_docstring_names_the_data_sets_with_imagenet_normalization() -> None:
    expected = ResNet18_Weights.IMAGENET1K_V1.transforms()
    suited = {
        name
        for name, data_set in DATA_SETS.items()
        if (list(data_set.mean), list(data_set.std)) == (expected.mean, expected.std)
    }
    text = " ".join((resnet.resnet18.__doc__ or "").split())
    (named,) = re.findall(r"built-in data sets, (.*) are normalized in this way", text)
    assert set(re.split(r", | and ", named)) == suited


def test_a_tied_parameter_is_sent_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2, bias=False))
    model[2].weight = model[0].weight
    arrays = copy_arrays(model)
    assert list(arrays) == ["0.weight", "0.bias"]
    set_arrays(model, {name: array + 1 for name, array in arrays.items()}, "client 0")
    np.testing.assert_array_equal(model[2].weight.detach(), arrays["0.weight"] + 1)
    whole = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"Unknown: 2\.weight\. Of tied parameters, send only"):
        set_arrays(model, whole, "client 0")


def test_local_arrays_are_refused_with_a_hint_at_shared_arrays() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    shared, whole = FedBN.shared_arrays(model), copy_arrays(model)
    keep_local(model, FedBN.local_arrays(model))
    assert set(shared) == set(copy_arrays(model)) == {"0.weight", "0.bias"}
    set_arrays(model, shared, "client 0")
    with pytest.raises(ValueError, match=r"Unknown: 1\.\w+, .*FedBN\.shared_arrays\(net\)"):
        set_arrays(model, whole, "client 0")


def test_padding_is_ignored_even_after_noise_was_added_to_its_embedding() -> None:
    """Differential privacy adds noise to all arrays, and clients never train this row."""
    model = models.build("embedding-bag", 10, (100, 8), 0).eval()
    short = torch.tensor([[5, 7, 9]])
    padded = torch.tensor([[5, 7, 9, 0, 0, 0, 0, 0]])
    with torch.no_grad():
        model.tokens.weight[0] = 3.0
        torch.testing.assert_close(model.features(padded), model.features(short))
