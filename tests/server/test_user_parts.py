"""Errors in a user's model, strategy, exchange, trainer or data set: the message names it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import pytest
import torch
from runs import config, history, run
from torch import nn

from fairflower.arguments import ArgumentSpec, Range
from fairflower.clients import SGD
from fairflower.clients.scaffold import SCAFFOLD
from fairflower.config import RunConfig, StrategyConfig
from fairflower.data import DataError, FeatureSet
from fairflower.errors import ConfigError, RoundFailed, StrategyError, UserError
from fairflower.exchanges import ControlVariates
from fairflower.models import Classifier
from fairflower.participation import Participation
from fairflower.server.contents import read_facts
from fairflower.strategies import AFL, FairStrategy, FedAvg
from fairflower.testing import check_data, check_model, check_strategy, check_trainer

HERE = __name__


# --- models --------------------------------------------------------------------------------------


class Linear(Classifier):
    kinds = ("features",)

    def __init__(self, num_classes: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.head = nn.Linear(shape[0], num_classes)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return x


class InPlace(Linear):
    def features(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return x


class Pair(Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), x


class Classes(Linear):
    def __init__(self, num_classes: int, shape: tuple[int, ...]) -> None:
        super().__init__(num_classes + 3, shape)


class Listed(Linear):
    def __init__(self, num_classes: int, shape: tuple[int, ...]) -> None:
        super().__init__(num_classes, shape)
        self.layers = [nn.Linear(shape[0], shape[0])]

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)


class Hides(Linear):
    def __init__(self, num_classes: int, shape: tuple[int, ...]) -> None:
        super().__init__(num_classes, shape)
        self.hidden = [nn.Linear(2, 2).requires_grad_(False), self.head]


class DrawsFrozen(Linear):
    """Keeps a frozen array to itself, which is drawn by the run's seed."""

    def __init__(self, num_classes: int, shape: tuple[int, ...]) -> None:
        super().__init__(num_classes, shape)
        self.register_buffer("scale", self.draw(shape[0]))

    def draw(self, n: int) -> torch.Tensor:
        return torch.rand(n)

    def exchanged_arrays(self) -> dict[str, torch.Tensor]:
        return {k: a for k, a in super().exchanged_arrays().items() if k != "scale"}


class SameFrozen(DrawsFrozen):
    def draw(self, n: int) -> torch.Tensor:
        return torch.linspace(1, 2, n)


class Headless(Linear):
    def __init__(self, num_classes: int, shape: tuple[int, ...]) -> None:
        super().__init__(num_classes, shape)
        self.last = self.head
        del self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x)


class Misspelt(Linear):
    features = Classifier.features  # as if the class defined `feature`


TABLE = {"data.name": "heart-disease", "data.clients-per-domain": 1}


def test_a_model_that_changes_its_input_sees_the_same_examples_in_every_round(
    tmp_path: Path,
) -> None:
    settings = {**TABLE, "model.name": f"{HERE}:InPlace", "train.lr": 1e-30}
    rows = history(run(config(tmp_path, **settings)))
    losses: dict[str, set[str]] = {}
    for row in rows:
        if row["metric"] == "loss":
            losses.setdefault(row["name"], set()).add(row["value"])
    assert losses
    assert all(len(values) == 1 for values in losses.values())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "Pair",
            r"Pair maps two examples of shape .* to tuple, expected an output of shape \(2, 2",
        ),
        ("Classes", r"Classes maps two examples .* to \(2, 5\), expected"),
        ("Listed", "Listed.layers holds layers in a list.*nn.ModuleList"),
        ("Headless", "Headless.head is None, expected"),
        ("Misspelt", "Misspelt: define the method features"),
    ],
)
def test_an_invalid_model_is_named_before_the_run_starts(
    tmp_path: Path, model: str, message: str
) -> None:
    with pytest.raises(UserError, match=rf"model.name = .*{HERE}:{model}.*{message}"):
        run(config(tmp_path, **TABLE, **{"model.name": f"{HERE}:{model}"}))
    with pytest.raises(AssertionError, match=model):
        check_model(globals()[model], shape=(5,))


def test_frozen_layers_may_be_in_a_plain_list(tmp_path: Path) -> None:
    folder = run(config(tmp_path, **TABLE, **{"model.name": f"{HERE}:Hides"}))
    assert read_facts(folder)["status"] == "completed"


def test_networks_whose_frozen_weights_differ_between_server_and_clients_do_not_train(
    tmp_path: Path,
) -> None:
    """Clients do not draw by the run's seed, because they receive the server's weights."""
    settings = TABLE | {"seed": 3}
    with pytest.raises(UserError, match=r":DrawsFrozen.* depends on the seed, but is not ex"):
        run(config(tmp_path, **settings, **{"model.name": f"{HERE}:DrawsFrozen"}))
    folder = run(config(tmp_path, **settings, **{"model.name": f"{HERE}:SameFrozen"}))
    assert read_facts(folder)["frozen"]


# --- strategies ----------------------------------------------------------------------------------


class DropsOptions(FedAvg):
    def __init__(self, **options: Any) -> None:
        super().__init__()


class Doubles(FedAvg):
    def merge(self, cohort: Any) -> Any:
        return {name: a.astype(np.float64) for name, a in super().merge(cohort).items()}


class Loses(FedAvg):
    def merge(self, cohort: Any) -> Any:
        merged = super().merge(cohort)
        merged.pop("head.bias", None)
        merged.pop("conv.weight", None)
        return merged


class ReturnsNothing(FedAvg):
    def merge(self, cohort: Any) -> Any:
        super().merge(cohort)


class Forgets(FairStrategy):
    def weigh(self, cohort: Any) -> Any:
        return cohort.metrics["received_loss"]


class KeepsTexts(FedAvg):
    STATE = ("names",)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.names = np.array(["a", "b"])


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (DropsOptions, r"DropsOptions does not pass on the run's settings. Accept \*\*options"),
        (Doubles, r"Doubles.merge: array '.*' has dtype float64, expected float32\. Return a dict"),
        (
            Loses,
            r"Loses.merge: its arrays .*: missing \['head.bias'\], unexpected \[\]\. Return a dict",
        ),
        (ReturnsNothing, "ReturnsNothing.merge returned NoneType. Return a dict"),
        (Forgets, "Clients send 'received_loss' if the class has it in `measurements`"),
        (KeepsTexts, "cannot keep array.*Use numbers, None, arrays of numbers"),
    ],
)
def test_an_invalid_strategy_fails_the_run_with_advice(
    tmp_path: Path, strategy: type[FedAvg], message: str
) -> None:
    name = strategy.__name__
    with pytest.raises(UserError, match=message):
        run(config(tmp_path, **{"strategy.name": f"{HERE}:{name}"}))
    with pytest.raises(AssertionError, match=name):
        check_strategy(strategy)


class Counts(AFL):
    STATE = ("count",)
    count = 0


def test_a_subclass_keeps_the_state_of_its_base() -> None:
    assert Counts.STATE == ("lambdas", "count")
    assert {"rule/own/count!", "rule/own/lambdas{"} <= {*Counts().state_dict()}


@pytest.mark.parametrize(
    ("base", "attribute", "value", "message"),
    [
        (FairStrategy, "STATE", "losses", r"X.STATE = 'losses': write a tuple, \('losses',\)"),
        (FairStrategy, "needs", "received_loss", "X.needs = 'received_loss'"),
        (Participation, "STATE", "seen", "X.STATE = 'seen'"),
        (SGD, "exchanges", ControlVariates, r"write a tuple, \(ControlVariates,\)"),
    ],
)
def test_a_class_attribute_that_should_be_a_tuple_is_refused(
    base: type, attribute: str, value: Any, message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        type("X", (base,), {attribute: value})


class Earlier(FedAvg):
    """Uses the names that attributes had before."""

    needs = ("received_loss",)
    reads = ("train_loss",)
    FROM_CONFIG: ClassVar[Any] = {"lr": ("train.lr",)}

    def __init__(self, *, lr: Annotated[float | None, Range(0)] = None, **options: Any) -> None:
        super().__init__(**options)
        self.lr = lr
        self.learns = ("trained_loss",)
        self.needs = (*self.needs, *self.learns)

    def tell(self, client_id: int) -> dict[str, float]:
        return {**super().tell(client_id), "rho": 0.1}


def test_earlier_names_of_attributes_are_accepted() -> None:
    strategy = Earlier()
    assert strategy.measurements == strategy.needs == ("received_loss", "trained_loss")
    assert strategy.used_next_round == ("trained_loss",)
    assert strategy.reported_metrics == Earlier.reads == ("train_loss",)
    strategy.read_config({"train.lr": 0.3})
    assert (strategy.lr, strategy.client_config(1)) == (0.3, {"rho": 0.1})


class Flagged(FedAvg):
    def __init__(
        self, *, flag: bool = True, p: Annotated[float, Range(0)] = 1.0, **options: Any
    ) -> None:
        super().__init__(**options)
        self.flag = flag


def test_a_boolean_argument_accepts_only_true_and_false() -> None:
    spec = ArgumentSpec.of(True, bool)
    assert spec.bounded
    spec.check("flag", False)
    for wrong in ("False", "no", 1):
        with pytest.raises(ConfigError, match=r"flag = .*: expected true or false\."):
            spec.check("flag", wrong)
    chosen = StrategyConfig.read(f"{HERE}:Flagged:flag=false")
    assert chosen.label.endswith("flag=false")
    assert chosen.make().flag is False
    with pytest.raises(ConfigError, match="flag = 'False': expected true or false"):
        RunConfig.from_flat({"strategy.name": f"{HERE}:Flagged:flag=False"})
    check_strategy(Flagged)


# --- exchanges and clients -----------------------------------------------------------------------


class Breaks(ControlVariates):
    def collect(self, cohort: Any) -> None:
        raise KeyError("w")


class WithBreaks(SCAFFOLD):
    exchanges: ClassVar[Any] = (Breaks,)


def test_an_exchange_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match="The exchange Breaks failed with KeyError: 'w'"):
        run(config(tmp_path, **{"client.name": f"{HERE}:WithBreaks"}))


class LosesItsGraph(SGD):
    def loss(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return super().loss(x, y).item()


class Stacks(SGD):
    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, y])  # the shapes differ, so torch raises


class NoClassMethod(SGD):
    def local_arrays(self) -> list[str]:  # type: ignore[override]
        return self.names


def test_a_failing_trainer_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(
        RoundFailed, match=r"LosesItsGraph.loss returned float \(\); expected a scalar"
    ):
        run(config(tmp_path, **{"client.name": f"{HERE}:LosesItsGraph"}))
    with pytest.raises(RoundFailed, match=r"\(test_user_parts.py, line \d+, in loss\)"):
        run(config(tmp_path, **{"client.name": f"{HERE}:Stacks"}))
    with pytest.raises(UserError, match=r"client.name = .*NoClassMethod': it failed with"):
        run(config(tmp_path, **{"client.name": f"{HERE}:NoClassMethod"}))
    with pytest.raises(AssertionError, match=r"LosesItsGraph failed with .*expected a scalar"):
        check_trainer(LosesItsGraph)


class Misspells(SGD):
    def los(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().loss(x, y)


def test_a_misspelled_hook_is_named() -> None:
    with pytest.raises(AssertionError, match=r"Misspells.los: .*Did you mean loss"):
        check_trainer(Misspells)


# --- data sets -----------------------------------------------------------------------------------


class Tables(FeatureSet):
    classes = ("no", "yes")
    mean, std = (0.0, 0.0), (1.0, 1.0)

    def all_domains(self) -> list[str]:
        return ["here", "there"]

    def labels(self, domain: str, split: str) -> Any:
        return np.arange(40) % 2

    def features(self, domain: str, split: str, rows: Any) -> Any:
        return np.stack([np.arange(40) % 2, np.ones(40)], axis=1).astype(np.float32)[rows]

    def fingerprint(self) -> Any:
        return [type(self).__name__, self.mean, self.std]

    def source(self, domain: str) -> str:
        return "made up"


class Nowhere(Tables):
    def source(self, domain: str) -> Any:
        pass


class Constant(Tables):
    std = (1.0, 0.0)


class Few(Tables):
    mean, std = (0.0,), (1.0,)


class Unordered(Tables):
    def all_domains(self) -> Any:
        return {"here"}


class Numbered(Tables):
    def all_domains(self) -> Any:
        return [1]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Nowhere, r"source\('here'\) returned None. Return a text"),
        (Constant, "For a constant column declare std = 1"),
        (Few, "2 channels or features, but 1 means"),
        (Unordered, r"all_domains\(\) returned {'here'}: expected a list or tuple of names"),
        (Numbered, r"all_domains\(\) returned \[1\]: expected a list or tuple of names"),
    ],
)
def test_an_invalid_data_set_is_refused_before_the_run_starts(
    tmp_path: Path, kind: type[Tables], message: str
) -> None:
    check_data(Tables)
    settings = {"data.name": f"{HERE}:{kind.__name__}", "model.name": "mlp"}
    with pytest.raises(DataError, match=message):
        run(config(tmp_path, **settings))
    with pytest.raises(AssertionError, match=message):
        check_data(kind)
