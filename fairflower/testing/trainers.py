"""What every method of local training has to keep, alone and with strategies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairflower.clients import ClientData, Trainer
from fairflower.config import TrainConfig
from fairflower.engines.inline import InlineGrid
from fairflower.errors import renamed
from fairflower.models import Classifier, trainable
from fairflower.strategies import FairStrategy, FedEquilibria, FedHEAL, Uniform
from fairflower.testing.federations import (
    CLASSES,
    SETTINGS,
    data,
    models_equal,
    run_toy_rounds,
    tiny_model,
)

Model = dict[str, NDArray[Any]]

__getattr__ = renamed(
    __name__,
    Method="TrainerCase",
    check_shared_model="check_reused_model",
    check_explosion="check_diverging_loss",
    check_alone="check_without_exchanges",
)


@dataclass(frozen=True)
class TrainerCase:
    """A method of local training on tiny data."""

    kind: type[Trainer]
    #: Makes the network, for images of 8x8 pixels in `CLASSES` classes, always the same one.
    model: Callable[[], Classifier] = tiny_model
    arguments: Mapping[str, Any] = field(default_factory=dict)
    #: Makes what has to travel beside the model; by default what the method says.
    exchanges: Callable[[], Sequence[Any]] | None = None

    def trainer(
        self,
        client: int = 0,
        *,
        model: Classifier | None = None,
        data_: ClientData | None = None,
        settings: TrainConfig = SETTINGS,
    ) -> Trainer:
        """A client's trainer."""
        own = self.model() if model is None else model
        there = data(client) if data_ is None else data_
        return self.kind(own, there, settings, client_id=client, seed=0, **self.arguments)

    def strategy(self, kind: type[FairStrategy] = Uniform, **options: Any) -> FairStrategy:
        """A strategy that carries the method's exchanges."""
        made = self.exchanges or (lambda: self.kind.make_exchanges(self.arguments))
        return kind(exchanges=made(), **options)

    def two_rounds(
        self,
        strategy: type[FairStrategy] = Uniform,
        *,
        model: Classifier | None = None,
        reverse: bool = False,
        settings: TrainConfig = SETTINGS,
    ) -> tuple[Model, InlineGrid]:
        """Five clients of which three take part; one model for all if given, else one each."""
        return run_toy_rounds(
            self.strategy(strategy, fraction_train=0.6),
            lambda client: self.trainer(client, model=model, settings=settings),
            5,
            2,
            self.start(),
            reverse,
        )

    def start(self) -> Model:
        """The first global model."""
        return self.trainer().send()

    @property
    def name(self) -> str:
        """How messages call it."""
        return self.kind.__name__


def check_trainer(
    kind: type[Trainer], *, model: Callable[[], Classifier] = tiny_model, **arguments: Any
) -> None:
    """Check what every method of local training keeps: all of `CHECKS`; a few seconds.

    Parameters
    ----------
    kind
        A subclass of `Trainer`, of which many are made, with these ``arguments``.
    model
        Makes the network that it trains, for grey images of 8x8 pixels in 4 classes and each
        time the same one; by default a small one with batch norm.

    Raises
    ------
    AssertionError
        With what is broken, and what to do.
    """
    for check in CHECKS:
        check(TrainerCase(kind, model, arguments))


def check_training(method: TrainerCase, strategy: type[FairStrategy]) -> None:
    """It trains under a strategy, and whoever works first moves no bit."""
    start, (model, _) = method.start(), method.two_rounds(strategy)
    words = f"{method.name} with {strategy.__name__}"
    assert list(model) == list(start), f"{words}: arrays were added, lost or reordered."
    for key, array in model.items():
        found, wanted = ((a.dtype, a.shape) for a in (array, start[key]))
        assert found == wanted, f"{words}: {key} became {found}, it was {wanted}."
        assert np.isfinite(array).all(), f"{words}: {key} is no longer finite."
    moved = any(not np.array_equal(model[key], start[key]) for key in start)
    assert moved, f"{words}: two rounds changed nothing."
    again, _ = method.two_rounds(strategy, reverse=True)
    assert models_equal(model, again), (
        f"{words}: clients that worked in another order trained another model. Draw from "
        "derive_seed(server_round, purpose) or torch's generator, and keep nothing in globals."
    )


def check_training_under_strategies(method: TrainerCase) -> None:
    """It trains under strategies that ask for nothing, for gradients, and merge by coordinate."""
    for strategy in (Uniform, FedEquilibria, FedHEAL):
        check_training(method, strategy)


def check_reused_model(method: TrainerCase) -> None:
    """Clients that share a worker's model do not see each other."""
    alone, contexts = method.two_rounds()
    shared, also = method.two_rounds(model=method.model(), reverse=True)
    words = (
        f"{method.name}: clients of one worker, who share its network, train otherwise than each "
        "with its own. Keep what is a client's in self.state, and put back what `begin` changes."
    )
    assert models_equal(alone, shared), words
    for node, context in contexts.contexts.items():
        own, other = (c.state.array_records for c in (context, also.contexts[node]))
        assert own.keys() == other.keys(), words
        for key in own:
            kept = [{name: a.data for name, a in state[key].items()} for state in (own, other)]
            assert kept[0] == kept[1], words


def check_steps_of_length_zero(method: TrainerCase) -> None:
    """With a learning rate of 0 the parameters come back as they were received."""
    start = method.start()
    model, _ = method.two_rounds(settings=replace(SETTINGS, lr=0.0, sharpness="none"))
    for key in filter(start.__contains__, trainable(method.model())):
        assert np.array_equal(model[key], start[key]), (
            f"{method.name}: with train.lr = 0, {key} changed all the same."
        )


def check_no_epochs(method: TrainerCase) -> None:
    """With no epochs the model comes back as it was received."""
    start = method.start()
    model, _ = method.two_rounds(settings=replace(SETTINGS, local_epochs=0))
    for key in start:
        assert np.array_equal(model[key], start[key]), (
            f"{method.name}: with train.local-epochs = 0, {key} changed all the same."
        )


def check_diverging_loss(method: TrainerCase) -> None:
    """A loss that is no longer finite names client and round."""
    settings = replace(SETTINGS, local_epochs=4, batch_size=2, lr=1e30)
    said = ""
    try:
        method.trainer(3, settings=settings).train(7)
    except FloatingPointError as error:
        said = str(error)
    assert said, (
        f"{method.name}: train.lr = 1e30 raised no FloatingPointError. Return the batch's mean "
        "loss from `step`."
    )
    assert "Client 3: " in said, f"{method.name}: an exploded loss does not name the client."
    assert "round 7" in said, f"{method.name}: an exploded loss does not name the round."


def check_without_exchanges(method: TrainerCase) -> None:
    """It trains where the server shares nothing, as in somebody else's app."""
    model, _ = run_toy_rounds(Uniform(), method.trainer, 2, 2)
    _expect_finite(method, model, "with a server that shares nothing")


def check_absent_class(method: TrainerCase) -> None:
    """A class that a client lacks does no harm."""
    model, _ = run_toy_rounds(
        method.strategy(),
        lambda k: method.trainer(k, data_=data(k, classes=CLASSES - k)),
        3,
        2,
    )
    _expect_finite(method, model, "with a client that lacks a class")


def check_arguments(method: TrainerCase) -> None:
    """Its own arguments say what they allow, and exchanges have the same defaults."""
    own = method.kind.argument_specs()
    for name, argument in own.items():
        assert argument.bounded or argument.text, (
            f"{method.name}: {name} does not say what it allows. Declare it as "
            "Annotated[float, Range(0, 1)] or Literal['a', 'b']."
        )
    for exchange in method.kind.exchanges:
        for name, default in exchange.arguments().items():
            assert name not in own or own[name].default == default, (
                f"{method.name}: {name} has another default in {exchange.__name__}."
            )


CHECKS: tuple[Callable[[TrainerCase], None], ...] = (
    check_arguments,
    check_training_under_strategies,
    check_reused_model,
    check_steps_of_length_zero,
    check_no_epochs,
    check_diverging_loss,
    check_without_exchanges,
    check_absent_class,
)


def _expect_finite(method: TrainerCase, model: Model, words: str) -> None:
    for key, array in model.items():
        assert np.isfinite(array).all(), f"{method.name}: {words}, {key} is no longer finite."
