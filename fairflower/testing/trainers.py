"""Checks for trainers, alone and with strategies."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairflower.clients import ClientData, Trainer
from fairflower.config import TrainConfig
from fairflower.engines.inline import InlineGrid
from fairflower.models import Classifier, trainable
from fairflower.strategies import FairStrategy, FedEquilibria, FedHEAL, Uniform
from fairflower.testing.failures import as_assertions, check_arrays, check_hooks, check_ranges
from fairflower.testing.federations import (
    CLASSES,
    SETTINGS,
    data,
    models_equal,
    run_toy_rounds,
    tiny_model,
)

Model = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class TrainerCase:
    """A trainer with toy data."""

    kind: type[Trainer]
    #: Returns the same network on every call, for 8x8 gray images in `CLASSES` classes.
    model: Callable[[], Classifier] = tiny_model
    arguments: Mapping[str, Any] = field(default_factory=dict)
    #: Makes the exchanges. Default: the exchanges that the method declares.
    exchanges: Callable[[], Sequence[Any]] | None = None

    def trainer(
        self,
        client: int = 0,
        *,
        model: Classifier | None = None,
        data_: ClientData | None = None,
        settings: TrainConfig = SETTINGS,
    ) -> Trainer:
        """Create a client's trainer."""
        network = self.model() if model is None else model
        examples = data(client) if data_ is None else data_
        return self.kind(network, examples, settings, client_id=client, seed=0, **self.arguments)

    def strategy(self, kind: type[FairStrategy] = Uniform, **options: Any) -> FairStrategy:
        """Create a strategy with the method's exchanges."""
        make = self.exchanges or (lambda: self.kind.make_exchanges(self.arguments))
        return kind(exchanges=make(), **options)

    def two_rounds(
        self,
        strategy: type[FairStrategy] = Uniform,
        *,
        model: Classifier | None = None,
        reverse: bool = False,
        settings: TrainConfig = SETTINGS,
    ) -> tuple[Model, InlineGrid]:
        """Run two rounds with three of five clients, which share ``model`` if it is given."""
        return run_toy_rounds(
            self.strategy(strategy, fraction_train=0.6),
            lambda client: self.trainer(client, model=model, settings=settings),
            5,
            2,
            self.start(),
            reverse,
        )

    def start(self) -> Model:
        """Return the initial global model."""
        return self.trainer().send()


def check_trainer(
    kind: type[Trainer], *, model: Callable[[], Classifier] = tiny_model, **arguments: Any
) -> None:
    """Run all `CHECKS` on a trainer; this takes a few seconds.

    The subclass of `Trainer` is constructed many times with ``arguments``. ``model`` returns the
    same network on every call, for 8x8 gray images in 4 classes; by default a small network with
    batch norm. Raises ``AssertionError`` if a property is violated; the message explains how to
    correct it.

    Examples
    --------
    >>> from fairflower.clients.fedprox import FedProx
    >>> check_trainer(FedProx, mu=0.1)
    """
    check_hooks(kind, Trainer)
    with as_assertions(kind):
        for check in CHECKS:
            check(TrainerCase(kind, model, arguments))


def check_training(method: TrainerCase, strategy: type[FairStrategy]) -> None:
    """Check that the method trains with a strategy and does not depend on the order of clients."""
    start, (model, _) = method.start(), method.two_rounds(strategy)
    problem = f"with {strategy.__name__}: "
    check_arrays(model, start, problem)
    assert not models_equal(model, start), f"{problem}two rounds did not change the model."
    again, _ = method.two_rounds(strategy, reverse=True)
    assert models_equal(model, again), (
        f"{problem}a different order of clients gave a different model. Draw from "
        "derive_seed(server_round, purpose) or torch's generator, and do not store state in "
        "global variables."
    )


def check_training_under_strategies(method: TrainerCase) -> None:
    """Check training with a plain, a gradient-based and a coordinate-wise strategy."""
    for strategy in (Uniform, FedEquilibria, FedHEAL):
        check_training(method, strategy)


def check_reused_model(method: TrainerCase) -> None:
    """Check that clients that share a worker's model do not influence each other."""
    separate, contexts = method.two_rounds()
    shared, shared_contexts = method.two_rounds(model=method.model(), reverse=True)
    problem = (
        "clients that share a worker's network train differently than with separate networks. "
        "Store a client's state in self.state, and undo the changes made in `begin`."
    )
    assert models_equal(separate, shared), problem
    for node, context in contexts.contexts.items():
        states = [c.state.array_records for c in (context, shared_contexts.contexts[node])]
        assert states[0].keys() == states[1].keys(), problem
        for key in states[0]:
            kept = [{name: a.data for name, a in state[key].items()} for state in states]
            assert kept[0] == kept[1], problem


def check_no_steps(method: TrainerCase) -> None:
    """Check that a learning rate of 0 does not change the parameters, and 0 epochs no array."""
    start, trained = method.start(), trainable(method.model())
    for cause, settings, names in (
        ("train.lr = 0", replace(SETTINGS, lr=0.0, sharpness="none"), trained),
        ("train.local-epochs = 0", replace(SETTINGS, local_epochs=0), start),
    ):
        model, _ = method.two_rounds(settings=settings)
        for key in filter(start.__contains__, names):
            assert np.array_equal(model[key], start[key]), f"{key} changed although {cause}."


def check_diverging_loss(method: TrainerCase) -> None:
    """Check that the error about a diverging loss names the client and the round."""
    settings = replace(SETTINGS, local_epochs=4, batch_size=2, lr=1e30)
    text = ""
    try:
        method.trainer(3, settings=settings).train(7)
    except FloatingPointError as error:
        text = str(error)
    assert text, (
        "train.lr = 1e30 raised no FloatingPointError. Return the batch's mean loss from `step`."
    )
    for named in ("Client 3: ", "round 7"):
        assert named in text, f"the error about a diverging loss does not name {named!r}."


def check_without_exchanges(method: TrainerCase) -> None:
    """Check training with a server that has no exchanges, as in other apps."""
    model, _ = run_toy_rounds(Uniform(), method.trainer, 2, 2)
    check_arrays(model, method.start(), "with a server that has no exchanges: ")


def check_absent_class(method: TrainerCase) -> None:
    """Check training of a client that has no examples of a class."""
    clients = (lambda k: method.trainer(k, data_=data(k, classes=CLASSES - k)), 3, 2)
    model, _ = run_toy_rounds(method.strategy(), *clients)
    check_arrays(model, method.start(), "with a client that has no examples of a class: ")


def check_arguments(method: TrainerCase) -> None:
    """Check that arguments declare ranges, and that exchanges have the same defaults."""
    check_ranges(method.kind)
    defaults = method.kind.arguments()
    for exchange in method.kind.exchanges:
        for name, default in exchange.arguments().items():
            assert defaults.get(name, default) == default, (
                f"{name} has a different default in {exchange.__name__}."
            )


CHECKS: tuple[Callable[[TrainerCase], None], ...] = (
    check_arguments,
    check_training_under_strategies,
    check_reused_model,
    check_no_steps,
    check_diverging_loss,
    check_without_exchanges,
    check_absent_class,
)
