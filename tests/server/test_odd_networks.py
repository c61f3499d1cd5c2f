"""Networks as people write them: each trains, or is refused before round 1 with its name."""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parametrize import mark_others_nightly
from runs import config, history, run
from safetensors.numpy import load_file
from torch import Tensor, nn

from fairflower.config import TrainConfig
from fairflower.errors import ConfigError
from fairflower.models import Classifier, build, copy_arrays, set_arrays
from fairflower.testing import check_model
from fairflower.testing.models import made_up
from fairflower.training.batches import batch_slices, examples_of
from fairflower.training.fisher import fisher_diagonal
from fairflower.training.gradients import mean_gradient
from fairflower.training.trainer import Trainer

HERE = __name__
SHAPE = (1, 8, 8)


class Dense(Classifier):
    dtype = torch.float32

    def __init__(self, num_classes: int, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(np.prod(shape).item(), 6), nn.ReLU())
        self.head = nn.Linear(6, num_classes)
        self.add(shape)
        self.to(self.dtype)

    def add(self, shape: tuple[int, int, int]) -> None:
        pass

    def features(self, x: Tensor) -> Tensor:
        return self.body(x.to(self.dtype))  # type: ignore[no-any-return]


class Recurrent(Dense):
    """Rows as a sequence; torch.func refuses it in words without "vmap"."""

    def add(self, shape: tuple[int, int, int]) -> None:
        self.body = nn.GRU(shape[0] * shape[2], 6, batch_first=True)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x.transpose(1, 2).flatten(2))[0][:, -1]  # type: ignore[no-any-return]


class Numbered(Dense):
    def add(self, shape: tuple[int, int, int]) -> None:
        self.register_buffer("id", torch.tensor([2**61 - 1, 10**12 + 39]))
        self.register_buffer("chosen", torch.tensor([True, False]))


class Masked(Dense):
    def add(self, shape: tuple[int, int, int]) -> None:
        self.register_buffer("mask", torch.tensor([0.0, 1, float("-inf"), 0, 0, 0]))

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) + self.mask.exp()


class OfTheBatch(Dense):
    """Batch norm of the batch at hand, in tests, too."""

    def add(self, shape: tuple[int, int, int]) -> None:
        self.body.append(nn.BatchNorm1d(6, track_running_stats=False))


class Squeezed(Dense):
    """A single example loses its first dimension."""

    def features(self, x: Tensor) -> Tensor:
        return super().features(x).squeeze()


class Double(Dense):
    dtype = torch.float64


class Half(Dense):
    dtype = torch.float16


class Brain(Dense):
    dtype = torch.bfloat16


class NamedLikeABuffer(Dense):
    def add(self, shape: tuple[int, int, int]) -> None:
        self.running_mean = nn.Parameter(torch.zeros(6))
        self.running_var = nn.Parameter(torch.full((6,), -1.0))

    def features(self, x: Tensor) -> Tensor:
        return (super().features(x) - self.running_mean) * self.running_var


class Expanded(Dense):
    def add(self, shape: tuple[int, int, int]) -> None:
        self.gain = nn.Parameter(torch.ones(1).expand(6))
        self.register_buffer("places", torch.arange(3).expand(2, -1))

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) * self.gain


class ExtraState(Dense):
    def get_extra_state(self) -> Any:
        return {"version": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


class ExtraTensor(ExtraState):
    def get_extra_state(self) -> Any:
        return torch.ones(2)


class KeptExtraState(ExtraState):
    def exchanged_arrays(self) -> dict[str, Tensor]:
        return {k: a for k, a in super().exchanged_arrays().items() if isinstance(a, Tensor)}


class Complex(Dense):
    def __init__(self, num_classes: int, shape: tuple[int, int, int]) -> None:
        super().__init__(num_classes, shape)
        self.filter = nn.Parameter(torch.ones(6, dtype=torch.complex64))


class Infinite(Dense):
    def add(self, shape: tuple[int, int, int]) -> None:
        self.gain = nn.Parameter(torch.full((6,), float("inf")))


class Lazy(Dense):
    """Layers whose shapes the first input tells."""

    def add(self, shape: tuple[int, int, int]) -> None:
        self.body = nn.Sequential(
            nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(6)
        )


class Turned(Dense):
    """Tables that are not sent: they are the same everywhere."""

    def __init__(self, num_classes: int, shape: tuple[int, int, int]) -> None:
        super().__init__(num_classes, shape)
        table = torch.polar(torch.ones(6), torch.arange(6.0))
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("ids", torch.arange(6), persistent=False)
        self.register_buffer("causal", torch.tensor([0, float("nan"), 1]), persistent=False)

    def features(self, x: Tensor) -> Tensor:
        return super().features(x)[:, self.ids] * self.table.real


class Aliased(Dense):
    """A buffer in the memory of a parameter."""

    def add(self, shape: tuple[int, int, int]) -> None:
        self.head.register_buffer("seen", self.head.weight.detach())


class UnsentDraws(Dense):
    """As random Fourier features are often written."""

    def add(self, shape: tuple[int, int, int]) -> None:
        self.register_buffer("scale", torch.rand(6), persistent=False)

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) * self.scale


class UnsentState(Dense):
    """A worker's next client would start from the state of the one before."""

    def add(self, shape: tuple[int, int, int]) -> None:
        self.register_buffer("mean", torch.zeros(6), persistent=False)

    def features(self, x: Tensor) -> Tensor:
        x = super().features(x)
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


TRAINS = (
    "Lazy",
    "Turned",
    "Aliased",
    "Recurrent",
    "Numbered",
    "Masked",
    "OfTheBatch",
    "Squeezed",
    "Double",
    "Half",
    "Brain",
    "NamedLikeABuffer",
    "Expanded",
    "KeptExtraState",
)
REFUSED = {
    "ExtraState": "ExtraState: its state '_extra_state' is of type dict, but only tensors can be",
    "ExtraTensor": "ExtraTensor: '_extra_state' is a new tensor in every state dict",
    "Complex": "Complex: 'filter' is complex",
    "UnsentState": "UnsentState.*'mean' changes in training, but is not exchanged",
    "Infinite": "Infinite: 'gain' holds NaN or infinite values before training",
}
SMALL = {"data.examples-per-client": 9, "data.test-examples": 9, "evaluate.batch-size": 8}


def trained(tmp_path: Path, name: str, **settings: Any) -> dict[str, np.ndarray]:
    folder = run(config(tmp_path, **{**SMALL, "model.name": f"{HERE}:{name}", **settings}))
    assert {float(row["value"]) for row in history(folder) if row["metric"] == "loss"} - {np.nan}
    return load_file(folder / "model.safetensors")


def made(name: str) -> Dense:
    return build(f"{HERE}:{name}", 3, SHAPE, seed=0)  # type: ignore[return-value]


@pytest.mark.parametrize("name", TRAINS)
def test_odd_networks_train(tmp_path: Path, name: str) -> None:
    model = trained(tmp_path, name)
    first = copy_arrays(build(f"{HERE}:{name}", 10, (1, 8, 8), seed=0))
    for key in ("id", "chosen", "mask", "places"):
        if key in model:
            np.testing.assert_array_equal(model[key], first[key])
    if name == "NamedLikeABuffer":
        assert (model["running_var"] < 0).all()
        assert model["running_mean"].any()
    if name == "Expanded":
        assert len(set(model["gain"].tolist())) > 1  # each element is trained by itself


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_before_round_1(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[name]):
        trained(tmp_path, name)
    with pytest.raises(AssertionError, match=REFUSED[name]):
        check_model(globals()[name])
    assert not list(tmp_path.glob("*/history.csv"))


def test_a_buffer_in_a_parameters_memory_does_not_overwrite_it() -> None:
    model = made("Aliased")
    assert "head.seen" not in copy_arrays(model)
    arrays = {name: array + 1 for name, array in copy_arrays(model).items()}
    set_arrays(model, arrays, "test")
    np.testing.assert_array_equal(model.head.seen.numpy(), arrays["head.weight"])


def test_buffers_that_are_not_sent_must_not_depend_on_the_seed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"UnsentDraws.*'scale' depends on the seed, but is not"):
        trained(tmp_path, "UnsentDraws", seed=1)
    assert not list(tmp_path.glob("*/history.csv"))


def test_lazy_layers_are_drawn_from_the_seed() -> None:
    torch.rand(3)
    first, again, other = (copy_arrays(build(f"{HERE}:Lazy", 3, SHAPE, seed=s)) for s in (0, 0, 1))
    assert first["body.3.weight"].shape == (6, 4 * 36)
    for name in ("body.0.weight", "body.3.weight"):
        np.testing.assert_array_equal(first[name], again[name])
        assert (first[name] != other[name]).any()


class DrawsEverywhere(Dense):
    def features(self, x: Tensor) -> Tensor:
        noise = torch.rand(6) + random.random() + np.random.rand()
        return super().features(x) + noise if self.training else super().features(x)


def test_draws_of_every_global_generator_in_training_are_reproducible() -> None:
    models = []
    for _ in range(2):
        model = made("DrawsEverywhere")
        settings = TrainConfig(local_epochs=1, batch_size=4)
        trainer = Trainer(model, made_up(SHAPE, 3), settings, client_id=0, seed=0)
        before = np.random.get_state()[1].tolist(), random.getstate()
        trainer.train(1)
        assert (np.random.get_state()[1].tolist(), random.getstate()) == before
        models.append(trainer.send())
        np.random.rand()
        random.random()
    for name, array in models[0].items():
        np.testing.assert_array_equal(array, models[1][name])


@pytest.mark.parametrize("name", ["Double", "Half", "Brain"])
@pytest.mark.parametrize("client", ["fedproc", "fedlsa", "fedproto", "moon"])
def test_clients_of_features_train_networks_of_every_dtype(
    tmp_path: Path, name: str, client: str
) -> None:
    trained(tmp_path, name, **{"client.name": client})


def test_a_network_that_cannot_be_measured_is_refused_before_round_1(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"OfTheBatch' failed on made-up .*'fedequilibria'.*odd"):
        trained(tmp_path, "OfTheBatch", **{"strategy.name": "fedequilibria"})


class RefusesTwo(Dense):
    """Fails with the arrays of another model, as MOON uses it."""

    def features(self, x: Tensor) -> Tensor:
        if not isinstance(self.head.weight, nn.Parameter):
            raise KeyError("only mine")
        return super().features(x)


def test_a_diverging_run_is_not_the_networks_fault(tmp_path: Path) -> None:
    """A learning rate may be too large for made-up examples only; the run decides."""
    from fairflower.errors import Diverged

    with pytest.raises(Diverged):
        trained(tmp_path, "Dense", **{"train.lr": 1e30})


class FailsAtNine(Dense):
    def features(self, x: Tensor) -> Tensor:
        if len(x) == 9 and not self.training:
            raise IndexError("nine")
        return super().features(x)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            *("RefusesTwo", {"client.name": "moon"}),  # the client's own ways, before round 1
            "' failed on made-up examples with client.name = 'moon' .*KeyError.*only mine",
        ),
        (
            *("FailsAtNine", {"evaluate.batch-size": 9}),
            r"': the server's test of a batch of shape \(9, 3, 16, 16\).*IndexError: nine",
        ),
    ],
)
def test_errors_of_a_network_name_what_was_tried(
    tmp_path: Path, name: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=name + message):
        trained(tmp_path, name, **settings)


# --- batches --------------------------------------------------------------------------------------


def test_only_networks_that_need_it_get_a_last_example_in_the_batch_before() -> None:
    """Other networks keep their batches, and with them the bits of their tests."""
    assert made("Dense").takes_single
    for name in ("OfTheBatch", "Squeezed"):
        network = made(name)
        assert not network.takes_single
        data = made_up(SHAPE, 3)
        split = data.test._replace(x=data.test.x[:7], y=data.test.y[:7])
        for size, lengths in ((3, [3, 4]), (4, [4, 3]), (6, [7]), (7, [7]), (9, [7])):
            got = examples_of(split, data.mean, data.std, model=network).eval_batches(size)
            assert [len(y) for _, y in got] == lengths
    got = examples_of(split, data.mean, data.std, model=made("Dense")).eval_batches(3)
    assert [len(y) for _, y in got] == [3, 3, 1]
    assert batch_slices(1, 5, single=False) == [slice(0, 1)]
    assert batch_slices(0, 5, single=True) == []


# --- memory ---------------------------------------------------------------------------------------


def test_expanded_arrays_get_memory_of_their_own_in_any_trainer() -> None:
    """A fused optimizer would write beyond an expanded parameter's memory."""
    settings = TrainConfig(local_epochs=1, batch_size=4, lr=0.1)
    network = Expanded(3, SHAPE)
    assert network.gain.untyped_storage().nbytes() == 4
    trainer = Trainer(network, made_up(SHAPE, 3), settings, client_id=0, seed=0)
    assert network.gain.untyped_storage().nbytes() == 24
    arrays = trainer.send()
    arrays["gain"] = np.arange(6, dtype=np.float32)
    set_arrays(network, arrays, "test")
    assert network.gain.tolist() == [0, 1, 2, 3, 4, 5]
    trainer.train(1)
    assert network.gain.grad_fn is None


# --- Fisher information ---------------------------------------------------------------------------


def test_fisher_information_without_torch_func_is_that_of_each_example() -> None:
    network, data = made("Recurrent"), made_up(SHAPE, 3)
    examples = examples_of(data.train, data.mean, data.std)
    fisher = fisher_diagonal(network, examples)
    squares = {name: torch.zeros_like(value) for name, value in fisher.items()}
    for x, y in examples.eval_batches(1):
        for name, gradient in mean_gradient(network, [(x, y)]).items():
            squares[name] += gradient.square() / len(examples)
    assert any(value.any() for value in fisher.values())
    for name, value in fisher.items():
        torch.testing.assert_close(value, squares[name])


class Misspelt(Recurrent):
    def features(self, x: Tensor) -> Tensor:
        return super().features(x) + (self.nothing if not self.training else 0)


def test_an_error_of_the_network_itself_is_raised_by_fisher() -> None:
    data = made_up(SHAPE, 3)
    with pytest.raises(AttributeError, match="nothing"):
        fisher_diagonal(Misspelt(3, SHAPE), examples_of(data.train, data.mean, data.std))


# --- check_model ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [n for n in TRAINS if n not in ("OfTheBatch", "Squeezed", "Expanded")]
)
def test_odd_networks_pass_check_model(name: str) -> None:
    check_model(globals()[name])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("OfTheBatch", "OfTheBatch failed with ValueError: Expected more than 1 value per channel"),
        ("Squeezed", r"Squeezed: logits of a single example have shape \(3,\)"),
        ("RefusesTwo", "RefusesTwo failed with .*only mine"),
    ],
)
def test_check_model_names_what_a_network_cannot_do(name: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_model(globals()[name])


# --- all together ---------------------------------------------------------------------------------


#: Pairs of a strategy and a client.
PAIRS = [
    *(("fedavg", "sgd"), ("fedheal", "gsam"), ("fedequilibria", "scaffold")),
    *(("fedism", "fedproto"), ("fedgcr", "moon"), ("qffl", "fedbn")),
]
#: Networks that are refused by clients that measure what FedEquilibria needs.
WITHOUT_FISHER = ("OfTheBatch", "Squeezed")
EVERY = [(name, *pair) for name in TRAINS for pair in PAIRS]
#: Each network with every other pair, and those with errors of their own.
CHOSEN = {
    *(x for n, x in enumerate(EVERY) if (n // len(PAIRS) + n) % 2 == 0),
    *((name, *PAIRS[2]) for name in WITHOUT_FISHER),
}


@pytest.mark.few(13)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy", "client"), mark_others_nightly(EVERY, CHOSEN))
def test_odd_networks_train_with_strategies_and_clients_or_are_refused(
    tmp_path: Path, name: str, strategy: str, client: str
) -> None:
    settings = {"strategy.name": strategy, "client.name": client}
    refused = strategy == "fedequilibria" and name in WITHOUT_FISHER
    error = pytest.raises(ConfigError, match=f"{name}' failed on made-up examples")
    with error if refused else nullcontext():
        trained(tmp_path, name, **settings)
