"""Measurements for strategies: against loops and closed forms, and without side effects."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from scipy.optimize import minimize
from sklearn.metrics import balanced_accuracy_score
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, TensorDataset

from fairflower import models
from fairflower.arrays import arrays_of, record_of
from fairflower.client_app import trainer_of
from fairflower.clients import (
    SGD,
    ClientData,
    Images,
    fisher_diagonal,
    make_client_app,
    mean_gradient,
    mean_loss,
    sharpness,
)
from fairflower.config import RunConfig, TrainConfig
from fairflower.data import Augment, Split
from fairflower.errors import ConfigError
from fairflower.registry.measurements import MEASUREMENTS, Measurement
from fairflower.strategies import FedEquilibria
from fairflower.tasks import CLASSIFICATION, Task, task_of
from fairflower.testing.rounds import Rounds
from fairflower.training import fisher as module
from fairflower.training import modes
from fairflower.training.fisher import chunk_size
from fairflower.training.gradients import losses_at
from fairflower.training.measurements import (
    COMPUTE,
    LAST_TRAINED,
    requested,
    train_and_measure,
)
from fairflower.training.modes import attention_for_vmap, plain_attention

TASK = task_of(CLASSIFICATION)
CLASSES = 4
Named = dict[str, Tensor]


# --- models, smooth so that rounding cannot switch a ReLU -------------------------------


def convolutions() -> nn.Module:
    """Strided, padded, dilated, grouped, depthwise, oblong, with and without bias."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(6, 8, (3, 1), padding=(2, 1), dilation=(2, 1), groups=2, bias=False),
        nn.Tanh(),
        nn.Conv2d(8, 8, (2, 3), stride=(1, 2), groups=8),
        nn.Tanh(),
        nn.Flatten(),
        nn.LazyLinear(CLASSES),
    )


def norms() -> nn.Module:
    batch_norm = nn.BatchNorm2d(6)
    batch_norm.running_mean = torch.randn(6)
    batch_norm.running_var = torch.rand(6) + 0.5
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 3, padding=1), batch_norm, nn.Tanh()),
        *(nn.Conv2d(6, 8, 3, stride=2), nn.GroupNorm(2, 8), nn.Tanh()),
        *(nn.Flatten(), nn.LazyLinear(8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5)),
        nn.Linear(8, CLASSES),
    )


class Sequence(nn.Module):
    """Rows of the image as a sequence; layers between a raw parameter and a mean."""

    def __init__(self, *layers: nn.Module, first: str = "sample") -> None:
        super().__init__()
        self.first = first
        self.position = nn.Parameter(torch.randn(8, 24)) if first == "sample" else None
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 1, 3).flatten(2)  # [N, 8 rows, 24]
        if self.position is not None:
            return self.head(self.layers(x + self.position).mean(1))
        if self.first == "row":
            return self.head(self.layers(x.transpose(0, 1)).mean(0))
        return self.head(self.layers(x[:, :2].transpose(0, 1)).mean(0))


def layer_norm() -> nn.Module:
    return Sequence(nn.Linear(24, 24), nn.LayerNorm(24), nn.Tanh())


def linear_in_rows() -> nn.Module:
    """Without a trained raw parameter, the layers are sufficient."""
    model = Sequence(nn.Linear(24, 24), nn.Tanh())
    model.position = nn.Parameter(torch.zeros(8, 24), requires_grad=False)
    return model


def attention() -> nn.Module:
    return Sequence(
        nn.TransformerEncoderLayer(24, 2, 16, dropout=0.1, activation="gelu", batch_first=True)
    )


def rows_first() -> nn.Module:
    """The first dimension of the layers is not the samples'."""
    return Sequence(nn.Linear(24, 24), nn.Tanh(), first="row")


def two_rows_first() -> nn.Module:
    """The first dimension has as many rows as samples are used for the check."""
    return Sequence(nn.Linear(24, 24), nn.Tanh(), first="two rows")


class Tied(nn.Module):
    """A weight shared by two layers, one called twice, one used by its weight alone."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.enter, self.one, self.two = nn.Linear(192, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        if kind == "shared":
            self.two.weight = self.one.weight
        self.head = nn.Linear(8, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(torch.tanh(self.enter(x.flatten(1))))
        x = self.one(x) if self.kind == "twice" else torch.tanh(self.two(x))
        if self.kind == "cosine":
            return 5 * F.linear(F.normalize(x), F.normalize(self.head.weight))
        if self.kind == "also":
            return self.head(x) + F.linear(x.square(), self.head.weight)
        return self.head(x)


class InPlace(nn.Module):
    """Works in place on a copy of its input, and on the outputs of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x.clone().sub_(0.1))).tanh_()
        return self.head(x.mean((2, 3))).mul_(2)


class FrozenBody(nn.Module):
    """Only the head is trained, on features taken without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(192, 8), nn.Linear(8, CLASSES)
        self.body.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = torch.tanh(self.body(x.flatten(1)))
        return self.head(x)


def own_kind() -> nn.Module:
    """Convolutions with other padding, and layers without a special case."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(4, 4, 3, padding="same"),
        nn.PReLU(4, init=1.0),
        nn.ConvTranspose2d(4, 4, 2, bias=False),
        nn.InstanceNorm2d(4, affine=True),
        nn.Flatten(),
        nn.LazyLinear(CLASSES),
    )


#: name -> (model, whether the Fisher diagonal can be computed layer by layer)
MODELS: dict[str, tuple[Any, bool]] = {
    "convolutions": (convolutions, True),
    "norms": (norms, True),
    "linear in rows": (linear_in_rows, True),
    "in place": (InPlace, True),
    "layer norm, raw parameter": (layer_norm, False),
    "attention": (attention, False),
    "rows first": (rows_first, False),
    "two rows first": (two_rows_first, False),
    "shared weight": (lambda: Tied("shared"), False),
    "layer called twice": (lambda: Tied("twice"), False),
    "layer never called": (lambda: Tied("cosine"), False),
    "weight used elsewhere, too": (lambda: Tied("also"), False),
    "frozen body": (FrozenBody, False),
    "layers of other kinds": (own_kind, False),
}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = MODELS[name][0]()
    model.eval()(batch(1)[0])  # decides the lazy layers' shapes
    return model.train()


def batch(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, 8, 8, generator=generator)
    return x, torch.randint(CLASSES, (n,), generator=generator)


def loop(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Named, Named]:
    """Return mean gradient and mean squared gradient, sample by sample in float64."""
    model = copy.deepcopy(model).eval().double()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    mean = {name: torch.zeros_like(p) for name, p in named.items()}
    square = {name: torch.zeros_like(p) for name, p in named.items()}
    for i in range(len(y)):
        model.zero_grad()
        F.cross_entropy(model(x[i : i + 1].double()), y[i : i + 1]).backward()
        for name, p in named.items():
            if p.grad is not None:  # one layer of a model below is not used
                mean[name] += p.grad / len(y)
                square[name] += p.grad**2 / len(y)
    return mean, square


def assert_close(actual: Named, expected: Named, tolerance: float = 1e-5) -> None:
    """Compare to 1e-5 of a parameter's largest entry, and larger entries to 0.1 %."""
    assert list(actual) == list(expected)
    for name, value in expected.items():
        assert actual[name].dtype == torch.float32
        assert actual[name].shape == value.shape
        largest = value.abs().max().item()
        torch.testing.assert_close(actual[name].double(), value, rtol=0, atol=tolerance * largest)
        torch.testing.assert_close(actual[name].double(), value, rtol=1e-3, atol=1e-6 * largest)


# --- the fisher diagonal ----------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_fisher_and_gradient_match_a_loop_over_samples(name: str) -> None:
    model, (x, y) = make(name), batch(7)
    mean, square = loop(model, x, y)
    assert_close(fisher_diagonal(model, [(x[:4], y[:4]), (x[4:], y[4:])]), square)
    assert_close(mean_gradient(model, [(x[:4], y[:4]), (x[4:], y[4:])]), mean)


@pytest.mark.parametrize("name", MODELS)
def test_the_fisher_by_layer_and_by_vmap_agree_where_both_are_exact(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (x, y) = make(name).eval(), batch(5)
    assert module._is_exact_by_layer(model, TASK, x, y) == MODELS[name][1]
    expected = {key: 5 * value for key, value in loop(model, x, y)[1].items()}
    monkeypatch.setattr(module, "gradients_of", None)  # neither goes sample by sample
    for add in [module._add_by_sample, module._add_by_layer][: 1 + MODELS[name][1]]:
        total = {key: torch.zeros(value.shape) for key, value in expected.items()}
        with sdpa_kernel(SDPBackend.MATH):
            add(total, model, TASK, x, y)
        assert_close(total, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn", "resnet10", "resnet18"])
def test_the_papers_networks_compute_the_fisher_by_layer(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.build(name, CLASSES, (3, 8, 8), seed=0)
    monkeypatch.setattr(module, "_add_by_sample", None)
    x, y = batch(2)
    actual = fisher_diagonal(model, [(x, y)])
    expected = loop(model, x, y)[1]
    for key, value in expected.items():  # ReLUs may switch: compare norms, not entries
        assert torch.dist(actual[key].double(), value) <= 1e-2 * value.norm(), key


def test_softmax_regression_matches_its_closed_form() -> None:
    torch.manual_seed(0)
    model, (x, y) = nn.Sequential(nn.Flatten(), nn.Linear(192, CLASSES)), batch(9)
    flat = x.flatten(1)
    error = (model(x).softmax(1) - F.one_hot(y, CLASSES)).detach()
    fisher, gradient = fisher_diagonal(model, [(x, y)]), mean_gradient(model, [(x, y)])
    torch.testing.assert_close(fisher["1.weight"], error.square().T @ flat.square() / 9)
    torch.testing.assert_close(fisher["1.bias"], error.square().mean(0))
    torch.testing.assert_close(gradient["1.weight"], error.T @ flat / 9)
    torch.testing.assert_close(gradient["1.bias"], error.mean(0))


@pytest.mark.parametrize("name", ["norms", "attention"])
def test_the_fisher_of_one_sample_is_its_squared_gradient(name: str) -> None:
    model, (x, y) = make(name), batch(1)
    gradient, fisher = mean_gradient(model, [(x, y)]), fisher_diagonal(model, [(x, y)])
    squared = {key: value.double().square() for key, value in gradient.items()}
    assert_close(fisher, squared)


# --- batches and memory ----------------------------------------------


@pytest.mark.parametrize("name", ["norms", "attention"])
def test_chunks_change_only_rounding_and_repetitions_nothing(name: str) -> None:
    model, (x, y) = make(name), batch(11)
    fisher = fisher_diagonal(model, [(x, y)])
    expected = {key: value.double() for key, value in fisher.items()}
    assert_close(fisher_diagonal(model, [(x, y)], memory_mb=1e-9), expected)
    assert_close(
        fisher_diagonal(model, [(x[i : i + 3], y[i : i + 3]) for i in (0, 3, 6, 9)]), expected
    )
    again = fisher_diagonal(model, [(x, y)])
    assert all(torch.equal(again[key], fisher[key]) for key in fisher)


@pytest.mark.parametrize("block", [1, 600, 2000])
def test_blocks_within_a_layer_change_only_rounding(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (x, y) = make("convolutions"), batch(7)
    fisher = fisher_diagonal(model, [(x, y)])
    monkeypatch.setattr(module, "_BLOCK", block)
    expected = {key: value.double() for key, value in fisher.items()}
    assert_close(fisher_diagonal(model, [(x, y)]), expected)


def test_images_and_a_data_loader_give_equal_measurements() -> None:
    images, model = Images(split(70), *STATISTICS, Augment(2, True)), make("norms")
    (x, y), (rest_x, rest_y) = images.eval_batches(64)
    loader = DataLoader(TensorDataset(torch.cat([x, rest_x]), torch.cat([y, rest_y])), batch_size=9)
    assert sharpness(model, images) == pytest.approx(sharpness(model, loader), abs=1e-6)
    for measure in (fisher_diagonal, mean_gradient):
        from_loader = measure(model, loader)
        expected = {key: value.double() for key, value in from_loader.items()}
        assert_close(measure(model, images), expected)


@pytest.mark.parametrize("measure", [fisher_diagonal, mean_gradient, sharpness])
def test_measuring_no_samples_is_an_error(measure: Any) -> None:
    with pytest.raises(ValueError, match="no samples"):
        measure(make("norms"), [])


@pytest.mark.parametrize("measure", [mean_loss, mean_gradient, sharpness, fisher_diagonal])
@pytest.mark.parametrize(
    ("outputs", "labels", "problem"),
    [
        (1, torch.tensor([0, 0]), r"shape \(2, 1\): expected \[B, classes\] with at least two"),
        (1, torch.tensor([[0.0], [1.0]]), r"labels of shape \(2, 1\) and type torch.float32"),
        (3, torch.tensor([[0.0, 1, 0], [1, 0, 0]]), r"labels of shape \(2, 3\)"),
    ],
)
def test_outputs_and_labels_unfit_for_cross_entropy_are_refused(
    measure: Any, outputs: int, labels: Tensor, problem: str
) -> None:
    """A single logit has cross entropy 0, whatever the labels."""
    batch = torch.tensor([[0.5, 1.0], [2.0, -1.0]]), labels
    with pytest.raises(ValueError, match=problem):
        measure(nn.Linear(2, outputs), [batch])


@pytest.mark.parametrize("name", ["norms", "attention"])
def test_the_memory_limit_sets_the_chunk_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks: list[int] = []
    sizes: list[int] = []

    def spy(*args: Any, **options: Any) -> int:
        chunks.append(chunk_size(*args, **options))
        return chunks[-1]

    def add(total: Named, model: nn.Module, task: Task, x: Tensor, y: Tensor) -> None:
        sizes.append(len(y))

    monkeypatch.setattr(module, "chunk_size", spy)
    monkeypatch.setattr(module, "_is_exact_by_layer", lambda *args: MODELS[name][1])
    for way in ("_add_by_layer", "_add_by_sample"):
        monkeypatch.setattr(module, way, add)
    model = make(name)
    budgets = (0.001, 0.1, 0.2, 512)
    for memory_mb in budgets:
        sizes.clear()
        fisher_diagonal(model, [batch(12), batch(5)], memory_mb=memory_mb)
        assert max(sizes) == min(chunks[-1], 12)
        assert sum(sizes) == 17
    assert sizes == [12, 5]
    assert len(chunks) == len(budgets)
    assert chunks[0] == 1
    assert chunks[2] == pytest.approx(2 * chunks[1], abs=1)


def test_the_chunk_size_counts_gradients_and_activations_twice() -> None:
    model, (x, y) = nn.Sequential(nn.Flatten(), nn.Linear(192, CLASSES)), batch(50)
    gradient = 4 * (192 * CLASSES + CLASSES)
    activations = 4 * (192 + 2 * CLASSES) + 8  # input, logits and their log-softmax; label
    for k in (1, 50):  # for any number of given samples
        both = chunk_size(model, TASK, x[:k], y[:k], memory_mb=1)
        assert both == pytest.approx(2**20 / 2 / (gradient + activations), rel=0.02)
        alone = chunk_size(model, TASK, x[:k], y[:k], memory_mb=1, gradients=False)
        assert alone == pytest.approx(2**20 / 2 / activations, rel=0.02)
    assert chunk_size(model, TASK, x, y, memory_mb=1e-6) == 1


def test_counting_activations_keeps_no_tensors() -> None:
    model, (x, y) = nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU()), batch(5)

    def tensors() -> int:
        gc.collect()
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())

    chunk_size(model, TASK, x, y, memory_mb=1)
    before = tensors()
    for _ in range(3):
        chunk_size(model, TASK, x, y, memory_mb=1)
    assert tensors() == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_measurements_have_the_dtypes_that_strategies_expect(dtype) -> None:
    model = nn.Linear(3, CLASSES).to(dtype)
    data = [(torch.ones(5, 3, dtype=dtype), torch.arange(5) % CLASSES)]
    assert sharpness(model, data) > 0
    start = {name: p.detach().numpy() for name, p in model.named_parameters()}
    for measure, space in ((fisher_diagonal, "fisher"), (mean_gradient, "gradient")):
        values = {name: value.numpy() for name, value in measure(model, data).items()}
        rounds = Rounds(FedEquilibria(space=space), start, range(2))
        still = {name: np.zeros_like(array) for name, array in start.items()}
        rounds.step(dict.fromkeys(range(2), still), measured={k: {space: values} for k in range(2)})
        assert rounds.strategy.client_ids == (0, 1)


def test_an_empty_parameter_has_an_empty_fisher_diagonal() -> None:
    model = nn.Linear(3, CLASSES)
    model.register_parameter("unused", nn.Parameter(torch.empty(0)))
    actual = fisher_diagonal(model, [(torch.ones(5, 3), torch.arange(5) % CLASSES)])
    assert actual["unused"].shape == (0,)


# --- sharpness --------------------------------------------------------------------------


def loss_at(model: nn.Module, moves: Named, x: Tensor, y: Tensor) -> float:
    """Return the loss of a float64 copy whose parameters are moved."""
    model = copy.deepcopy(model).eval().double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in moves:
                p += moves[name]
        return F.cross_entropy(model(x.double()), y).item()


def rise(model: nn.Module, rho: float, x: Tensor, y: Tensor) -> float:
    """L(theta + rho g / ||g||) - L(theta), one sample and one parameter after another."""
    gradient, _ = loop(model, x, y)
    norm = torch.sqrt(sum((g**2).sum() for g in gradient.values()))
    moves = {name: rho * g / norm for name, g in gradient.items()}
    return loss_at(model, moves, x, y) - loss_at(model, {}, x, y)


@pytest.mark.parametrize("rho", [0.05, 0.5])
@pytest.mark.parametrize("name", MODELS)
def test_sharpness_matches_a_brute_force_evaluation(name: str, rho: float) -> None:
    model, (x, y) = make(name), batch(7)
    actual = sharpness(model, [(x[:4], y[:4]), (x[4:], y[4:])], rho=rho)
    expected = max(rise(model, rho, x, y), 0)
    assert actual == pytest.approx(expected, abs=1e-5)
    assert expected > 1e-3  # otherwise the line above would prove little


def test_sharpness_for_a_small_rho_is_rho_times_the_gradient_norm() -> None:
    model, (x, y) = make("norms"), batch(7)
    slope = torch.sqrt(sum((g**2).sum() for g in loop(model, x, y)[0].values())).item()
    assert sharpness(model, [(x, y)], rho=1e-2) == pytest.approx(1e-2 * slope, rel=0.05)
    assert sharpness(model, [(x, y)], rho=0) == 0


def test_sharpness_is_never_negative() -> None:
    """A net whose loss falls again beyond a ridge: the step of norm 3 leads down."""

    class Ridge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor(-0.1))

        def forward(self, x: Tensor) -> Tensor:
            away = self.w.square().expand(len(x))
            return torch.stack([away, torch.zeros_like(away)], dim=1)

    model, data = Ridge(), [(torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64))]
    gradient = mean_gradient(model, data)["w"].item()
    assert gradient > 0
    beyond = loss_at(model, {"w": torch.tensor(3.0)}, *data[0])
    assert beyond < loss_at(model, {}, *data[0])
    assert sharpness(model, data, rho=3.0) == 0
    _, perturbed = losses_at(model, data, rho=3.0)
    assert perturbed == pytest.approx(beyond, rel=1e-3)
    model.w.data.zero_()  # no gradient at all
    assert sharpness(model, data) == 0


# --- no side effects ------------------------------------------------------------------

STATISTICS = ((0.5,) * 3, (0.25,) * 3)
SETTINGS = TrainConfig(local_epochs=2, batch_size=8, lr=0.05, momentum=0.9, weight_decay=0.01)
#: Measurements of any network; representations need a Classifier, group counts need groups.
ALL = ",".join(
    name for name in MEASUREMENTS if "representation" not in name and "group" not in name
)


def split(n: int, seed: int = 0) -> Split:
    rng = np.random.default_rng(seed)
    return Split(rng.integers(0, 256, (n, 3, 8, 8), dtype=np.uint8), rng.integers(0, CLASSES, n))


def trainer(name: str = "norms", n: int = 20, **changes: Any) -> SGD:
    data = ClientData(split(n), split(5, 1), *STATISTICS, CLASSES, Augment(2, True))
    return SGD(make(name), data, changes.pop("settings", SETTINGS), client_id=3, seed=0, **changes)


@pytest.mark.parametrize("name", ["norms", "attention"])
def test_measuring_does_not_change_training(name: str) -> None:
    plain, measured = trainer(name), trainer(name)
    metrics, arrays = train_and_measure(plain, {"server-round": 2})
    assert arrays == {}
    more, arrays = train_and_measure(measured, {"server-round": 2, "measure": ALL})
    assert metrics["train_loss"] == more["train_loss"]
    assert arrays.keys() == {"fisher", "gradient", "class_counts"}
    assert metrics.keys() == {"train_loss"}
    expected, actual = plain.send(), measured.send()
    assert all(np.array_equal(expected[key], actual[key]) for key in expected)
    for one, other in zip(plain.model.modules(), measured.model.modules(), strict=True):
        assert one.training == other.training
    for p in (*plain.model.parameters(), *measured.model.parameters()):
        assert p.grad is None, "the memory of gradients is free after a round"


@pytest.mark.parametrize("name", ["norms", "attention", "frozen body"])
def test_measuring_leaves_the_model_and_torch_unchanged(name: str) -> None:
    model, data = make(name), [batch(6)]
    next(iter(model.children())).eval()  # one part frozen, the rest in training
    state = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    expected = [p.requires_grad for p in model.parameters()]
    random = torch.get_rng_state()
    with torch.no_grad():
        fisher_diagonal(model, data)
        mean_gradient(model, data)
        sharpness(model, data)
        assert not torch.is_grad_enabled()
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == expected
    assert all(p.grad is None for p in model.parameters())
    assert all(not module._forward_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), random)


def test_a_failed_measurement_leaves_the_model_unchanged() -> None:
    model, (x, _) = make("norms"), batch(3)
    with pytest.raises(IndexError):
        fisher_diagonal(model, [(x, torch.full((3,), CLASSES))])
    assert all(module.training for module in model.modules())
    assert all(not module._forward_hooks for module in model.modules())


def test_every_measurement_can_be_computed() -> None:
    assert set(COMPUTE) == set(MEASUREMENTS)


def test_a_random_measurement_is_reproducible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MEASUREMENTS.data, "draw", Measurement("trained"))
    monkeypatch.setitem(COMPUTE, "draw", lambda trainer: torch.rand(()).item())
    config = {"server-round": 1, "measure": "draw"}
    configs = [config, config, config | {"measure": ALL + ",draw"}, config | {"server-round": 2}]
    clients = [trainer() for _ in configs]
    before = torch.get_rng_state()
    draws = [train_and_measure(*pair)[0]["draw"] for pair in zip(clients, configs, strict=True)]
    assert draws[0] == draws[1] == draws[2] != draws[3]
    assert torch.equal(torch.get_rng_state(), before)


def test_the_number_of_planned_rounds_comes_with_the_message() -> None:
    client = trainer()
    train_and_measure(client, {"server-round": 1, "num-server-rounds": 7})
    assert client.num_rounds == 7
    train_and_measure(client, {"server-round": 2})
    assert client.num_rounds == 7


def test_deterministic_algorithms_are_used_for_a_block_only() -> None:
    def state() -> tuple[bool, bool, bool]:
        filling: Any = torch.utils.deterministic
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            filling.fill_uninitialized_memory,
        )

    before = state()
    with modes.process_wide(modes._DETERMINISTIC):
        assert state() == (True, True, False)
    assert state() == before == (False, False, True)


# --- what is measured, on which model ---------------------------------------------------


def test_measurements_use_the_documented_model_on_the_training_images() -> None:
    client = trainer()
    received = copy.deepcopy(client.model)
    metrics, arrays = train_and_measure(client, {"server-round": 1, "measure": ALL})
    (x, y), *none = client.train_examples.eval_batches(64)
    assert not none
    logits = received.eval()(x)
    assert metrics["received_loss"] == pytest.approx(F.cross_entropy(logits, y).item(), rel=1e-5)
    assert metrics["received_accuracy"] == (logits.argmax(1) == y).float().mean().item()
    assert metrics["received_balanced_accuracy"] == pytest.approx(
        balanced_accuracy_score(y, logits.argmax(1))
    )
    assert metrics["sharpness"] == pytest.approx(rise(received, 0.05, x, y), abs=1e-5)
    trained = client.model.eval()(x)
    assert metrics["trained_loss"] == pytest.approx(F.cross_entropy(trained, y).item(), rel=1e-5)
    assert metrics["trained_loss"] != metrics["received_loss"]
    tensors = {key: {n: torch.tensor(a) for n, a in named.items()} for key, named in arrays.items()}
    assert_close(tensors["gradient"], loop(received, x, y)[0])
    assert_close(tensors["fisher"], loop(client.model, x, y)[1])


def test_fisher_and_gradient_ignore_the_clients_own_loss() -> None:
    class Doubled(SGD):
        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return 2 * super().loss(x, y)

    still = TrainConfig(local_epochs=0)
    client, plain = trainer(settings=still), trainer(settings=still)
    client.__class__ = Doubled
    config = {"server-round": 1, "measure": "fisher,gradient"}
    _, expected = train_and_measure(plain, config)
    _, actual = train_and_measure(client, config)
    for name in expected:
        for key in expected[name]:
            assert np.array_equal(actual[name][key], expected[name][key])


def test_sharpness_uses_the_trainers_measure_rho() -> None:
    config = {"server-round": 1, "measure": "sharpness"}
    wide, narrow = trainer(), trainer()
    wide.measure_rho = 0.5
    metrics = [train_and_measure(client, config)[0]["sharpness"] for client in (wide, narrow)]
    assert metrics[0] > 3 * metrics[1]


def test_the_servers_rho_is_used_in_measurements_and_steps() -> None:
    """A round with ``rho`` from the server equals one of a client with that radius configured."""
    sam = replace(SETTINGS, sharpness="sam", rho=0.05)
    told, own, other = trainer(settings=sam), trainer(settings=replace(sam, rho=0.2)), trainer()
    other.settings, own.measure_rho = sam, 0.2
    measure = {"server-round": 1, "measure": "sharpness,perturbed_loss,received_loss"}
    actual, _ = train_and_measure(told, measure | {"rho": 0.2})
    assert actual == train_and_measure(own, measure)[0]
    assert actual["perturbed_loss"] - actual["received_loss"] == pytest.approx(actual["sharpness"])
    train_and_measure(other, measure)
    for name, array in told.send().items():
        assert np.array_equal(array, own.send()[name])
    assert any(not np.array_equal(a, other.send()[n]) for n, a in told.send().items())
    assert (told.measure_rho, told.settings) == (trainer().measure_rho, sam), "of one message only"


def test_trainers_get_the_settings_of_the_run() -> None:
    flat = {"measure.rho": 0.2, "measure.memory-mb": 7, "evaluate.batch-size": 9}
    node = {"partition-id": 0, "num-partitions": 20}
    client = trainer_of(Context(1, 1, node, RecordDict(), {}), RunConfig.from_flat(flat).to_flat())
    assert (client.measure_rho, client.measure_memory_mb, client.eval_batch_size) == (0.2, 7, 9)


@pytest.mark.parametrize("rho", [-0.1, np.nan, np.inf])
def test_an_invalid_rho_from_the_server_is_refused(rho: float) -> None:
    with pytest.raises(ConfigError, match=r"rho = .* from the server: expected a number >= 0"):
        train_and_measure(trainer(), {"server-round": 1, "rho": rho})


def test_balanced_accuracy_ignores_classes_without_images() -> None:
    client = trainer()
    y = np.where(client.data.train.y == 0, 1, client.data.train.y)
    data = ClientData(
        Split(client.data.train.x, y), client.data.test, *STATISTICS, CLASSES, Augment(2, True)
    )
    client = SGD(make("norms"), data, SETTINGS, client_id=3, seed=0)
    config = {"server-round": 1, "measure": "received_balanced_accuracy"}
    (x, _), *_ = client.train_examples.eval_batches(64)
    guesses = client.model.eval()(x).argmax(1).numpy()
    recalls = [(guesses[y == c] == c).mean() for c in (1, 2, 3)]
    assert train_and_measure(client, config)[0]["received_balanced_accuracy"] == pytest.approx(
        np.mean(recalls)
    )


# --- representations -------------------------------------------------------------


def images_of(y: np.ndarray, seed: int = 0) -> ClientData:
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 256, (len(y), 3, 8, 8), dtype=np.uint8)
    return ClientData(Split(x, y), split(5, 1), *STATISTICS, CLASSES, Augment(2, True))


@pytest.mark.parametrize("name", ["cnn", "prompt-vit-tiny"])
def test_a_representation_is_the_mean_of_class_means(name: str) -> None:
    """Not the mean of images, so that class frequencies have no effect."""
    y = np.array([0, 0, 0, 0, 0, 0, 2, 3, 3])  # no image of class 1
    model = models.build(name, CLASSES, (3, 8, 8), seed=0)
    client = SGD(model, images_of(y), SETTINGS, client_id=3, seed=0)
    client.eval_batch_size = 4
    measure = "representation,received_representation"
    received = copy.deepcopy(model).eval()
    _, arrays = train_and_measure(client, {"server-round": 1, "measure": measure})
    x = torch.tensor(client.data.train.x) / 255
    x = (x - 0.5) / 0.25
    for key, network in (("received_representation", received), ("representation", model.eval())):
        assert list(arrays[key]) == ["h"]
        assert arrays[key]["h"].dtype == np.float32
        with torch.no_grad():
            each = network.represent(x).numpy().astype(float)
        expected = np.mean([each[y == c].mean(0) for c in (0, 2, 3)], axis=0)
        np.testing.assert_allclose(arrays[key]["h"], expected, rtol=1e-4, atol=1e-5)
    assert not np.allclose(arrays["representation"]["h"], arrays["received_representation"]["h"])


@torch.no_grad()
def test_a_representation_is_gc_nets_prompt_or_the_features() -> None:
    x = torch.randn(2, 3, 32, 32)
    cnn = models.build("cnn", CLASSES, (3, 32, 32), seed=0).eval()
    assert torch.equal(cnn.represent(x), cnn.features(x))
    prompted: Any = models.build("prompt-vit-tiny", CLASSES, (3, 32, 32), seed=0).eval()
    assert torch.equal(prompted.represent(x), prompted.gc_net(prompted.first_stage(x)))


def test_a_representation_requires_a_classifier() -> None:
    with pytest.raises(TypeError, match=r"representation.*Sequential.*Classifier"):
        train_and_measure(trainer(), {"server-round": 1, "measure": "representation"})


# --- training alone --------------------------------------------------------------------

STANDALONE = {"server-round": 1, "measure": "local_loss"}


def noisy_line(**changes: Any) -> SGD:
    """A linear classifier of features that no line separates."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 2)).astype(np.float32)
    y = (x[:, 0] + rng.normal(size=80) > 0.3).astype(np.int64)
    data = ClientData(Split(x, y), Split(x, y), (0.0, 0.0), (1.0, 1.0), 2)
    settings = replace(TrainConfig(batch_size=16, lr=0.1, momentum=0.0), **changes)
    model = nn.Linear(2, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return SGD(model, data, settings, client_id=0, seed=0)


def test_the_local_loss_is_close_to_the_minimum_loss() -> None:
    client = noisy_line()
    x, y = (a.astype(float) for a in client.data.train)

    def loss(w: np.ndarray) -> float:
        return float(np.logaddexp(0, -(2 * y - 1) * (x @ w[:2] + w[2])).mean())

    lowest = minimize(loss, np.zeros(3)).fun
    actual = train_and_measure(client, STANDALONE)[0]["local_loss"]
    assert lowest < actual < lowest + 0.02
    assert loss(np.zeros(3)) > lowest + 0.2  # the initial loss


def test_the_local_loss_is_measured_once_with_plain_steps() -> None:
    class Doubled(SGD):
        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return 2 * super().loss(x, y)

    client, other = noisy_line(), noisy_line(logit_adjustment=True, sharpness="sam")
    other.__class__ = Doubled
    first = train_and_measure(client, STANDALONE)[0]["local_loss"]
    assert train_and_measure(other, STANDALONE)[0]["local_loss"] == first
    client.receive({name: a + 1 for name, a in client.send().items()})
    assert train_and_measure(client, STANDALONE | {"server-round": 2})[0]["local_loss"] == first


def test_the_local_loss_after_divergence_is_the_initial_loss() -> None:
    client = noisy_line(lr=1e30, local_epochs=0)
    metrics, _ = train_and_measure(client, STANDALONE | {"measure": "local_loss,received_loss"})
    assert metrics["local_loss"] == metrics["received_loss"] == pytest.approx(np.log(2))


# --- the received model without the client's part ----------------------------------------

MINUS = {"measure": "received_accuracy,minus_accuracy,minus_balanced_accuracy"}


def test_minus_accuracy_measures_the_mean_of_the_other_clients() -> None:
    """With two clients, the merged model without one client's part is the other's model."""
    mine, other = trainer(), trainer()
    mine.settings = other.settings = TrainConfig(local_epochs=1, batch_size=4, lr=0.5)
    other.client_id = 4
    for client in (mine, other):
        metrics, _ = train_and_measure(client, {"server-round": 1, **MINUS})
        assert metrics["minus_accuracy"] == metrics["received_accuracy"]  # no previous part
    c = 0.3
    one, two = mine.send(), other.send()
    merged = {k: (c * one[k] + (1 - c) * two[k]).astype(one[k].dtype) for k in one}
    expected = other.evaluate(mine.train_examples)["accuracy"]
    (x, y), *_ = mine.train_examples.eval_batches(64)
    balanced = balanced_accuracy_score(y, other.model.eval()(x).argmax(1))

    mine.receive(merged)
    state = {name: dict(arrays) for name, arrays in mine.state.items()}
    metrics, _ = train_and_measure(mine, {"server-round": 2, "coefficient": c, **MINUS})
    assert metrics["minus_accuracy"] == expected
    assert metrics["minus_balanced_accuracy"] == pytest.approx(balanced)
    assert metrics["minus_accuracy"] != metrics["received_accuracy"]
    assert set(state) == {LAST_TRAINED}
    assert all(np.array_equal(one[k], state[LAST_TRAINED][k]) for k in one)
    assert all(np.array_equal(mine.send()[k], mine.state[LAST_TRAINED][k]) for k in one)


def test_minus_measurements_restore_the_model_exactly() -> None:
    plain, measured = trainer(), trainer()
    config = {"server-round": 1, "coefficient": 0.4}
    measured.state[LAST_TRAINED] = {k: a + np.ones((), a.dtype) for k, a in measured.send().items()}
    train_and_measure(plain, config)
    train_and_measure(measured, config | {"measure": "minus_accuracy"})
    assert all(np.array_equal(plain.send()[k], measured.send()[k]) for k in plain.send())


@pytest.mark.parametrize("coefficient", [None, 0.0, 1.0])
@pytest.mark.parametrize("kept", [True, False])
def test_minus_accuracy_falls_back_to_the_received_model(
    coefficient: float | None, kept: bool
) -> None:
    client = trainer()
    if kept:
        client.state[LAST_TRAINED] = {k: a + np.ones((), a.dtype) for k, a in client.send().items()}
    config = {"server-round": 2} | ({} if coefficient is None else {"coefficient": coefficient})
    metrics, _ = train_and_measure(client, config | MINUS)
    assert metrics["minus_accuracy"] == metrics["received_accuracy"]


def test_minus_models_have_no_negative_variance_and_keep_counters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client contributes all of a channel's variance, so only rounding errors are left."""
    client = trainer()
    seen: list[tuple[float, int]] = []
    received = client.send()
    own = {k: np.array(a) for k, a in received.items()}
    own["1.running_var"] = np.full(6, 1234.5678, np.float32)
    c = 0.999
    received["1.running_var"] = (c * own["1.running_var"]).astype(np.float32) * np.float32(0.999999)
    received["1.num_batches_tracked"] = np.array(7)
    client.receive(received)
    client.state[LAST_TRAINED] = own

    def spy(images: Images) -> dict[str, float]:
        state = client.model.state_dict()
        variance, batches = state["1.running_var"].min(), state["1.num_batches_tracked"]
        seen.append((variance.item(), int(batches)))
        return {"loss": 0.0, "accuracy": 0.0}

    monkeypatch.setattr(client, "evaluate", spy)
    config = {"server-round": 2, "coefficient": c, "measure": "minus_accuracy"}
    train_and_measure(client, config)
    assert seen == [(0.0, 7)]


def test_the_fisher_uses_the_trainers_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        "fairflower.training.measurements.fisher_diagonal",
        lambda model, data, memory_mb, task: seen.append(memory_mb) or {},
    )
    client = trainer()
    client.measure_memory_mb = 77
    train_and_measure(client, {"server-round": 1, "measure": "fisher"})
    assert seen == [77]


def test_requested_names_may_have_spaces_repeat_or_be_empty() -> None:
    assert requested({"measure": " fisher,gradient , fisher,"}) == ["fisher", "gradient"]
    assert requested({"measure": ""}) == requested({}) == []


# --- behind Flower's message API ----------------------------------------------------------


def ask(client: SGD, context: Context, measure: str | None) -> RecordDict:
    config = ConfigRecord({"server-round": 5})
    if measure is not None:
        config["measure"] = measure
    content = RecordDict({"arrays": record_of(client.send()), "config": config})
    app = make_client_app(lambda context, config: client)
    return app(Message(content, 1, "train"), context).content


def test_requested_measurements_are_in_the_reply(context: Context) -> None:
    plain = ask(trainer(), context, None)
    content = ask(trainer(), context, "fisher,received_loss,gradient")
    assert content.array_records.keys() == {"arrays", "fisher", "gradient"}
    shapes = {name: p.shape for name, p in make("norms").named_parameters()}
    for name in ("fisher", "gradient"):
        arrays = arrays_of(content.array_records[name])
        assert {key: array.shape for key, array in arrays.items()} == shapes
        assert all(array.dtype == np.float32 for array in arrays.values())
        assert all(np.isfinite(array).all() for array in arrays.values())
    assert all((a >= 0).all() for a in arrays_of(content.array_records["fisher"]).values())
    metrics = dict(content.metric_records["metrics"])
    assert metrics.pop("received_loss") > 0  # type: ignore[operator]
    assert metrics == dict(plain.metric_records["metrics"])
    sent, expected = (arrays_of(reply.array_records["arrays"]) for reply in (content, plain))
    assert all(np.array_equal(sent[key], expected[key]) for key in expected)


def test_nothing_is_measured_unless_requested(context: Context) -> None:
    for measure in (None, ""):
        content = ask(trainer(), context, measure)
        assert content.array_records.keys() == {"arrays"}
        assert content.metric_records["metrics"].keys() == {
            *("num-examples", "client-id", "train_loss")
        }


def test_an_unknown_measurement_is_refused_before_training(context: Context) -> None:
    client = trainer()
    before = client.send()
    with pytest.raises(ConfigError, match=r"'fischer'.*mean 'fisher'.*gradient.*received_loss"):
        ask(client, context, "received_loss,fischer")
    after = client.send()
    assert all(np.array_equal(after[key], before[key]) for key in before)


def test_measurements_of_a_client_with_one_image_are_finite(context: Context) -> None:
    client = trainer(n=1)
    client.model = models.build("resnet10", CLASSES, (3, 8, 8), seed=0)
    content = ask(client, context, ALL)
    for name in ("gradient", "fisher"):
        arrays = arrays_of(content.array_records[name])
        assert all(np.isfinite(array).all() for array in arrays.values())
    assert dict(content.metric_records["metrics"])["received_accuracy"] in (0, 1)


def test_threads_that_leave_in_any_order_restore_the_kernels_of_attention() -> None:
    first, second = attention_for_vmap(), plain_attention()
    assert torch.backends.cuda.flash_sdp_enabled()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not torch.backends.cuda.flash_sdp_enabled()
    second.__exit__(None, None, None)
    assert torch.backends.cuda.flash_sdp_enabled()


def test_threads_that_leave_in_any_order_restore_the_flags_of_cudnn() -> None:
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    first, second = (modes.process_wide(modes._REPRODUCIBLE) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.backends.cudnn.deterministic
    second.__exit__(None, None, None)
    assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == before
