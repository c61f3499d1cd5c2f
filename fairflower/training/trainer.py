"""Trainer: what a client does in a round, whatever its method of local training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairflower.arguments import ArgumentSpec, Configurable
from fairflower.config import TrainConfig
from fairflower.data import Split
from fairflower.errors import ConfigError, renamed_attribute
from fairflower.models import copy_arrays, set_arrays, trainable, travelling
from fairflower.seeds import derive_seed
from fairflower.training.batches import ClientData, Examples, examples_of
from fairflower.training.modes import at_least_float32, reproducible, use_running_stats
from fairflower.training.optim import apply_sam_gradient, build_optimizer

NDArray = np.ndarray[Any, np.dtype[Any]]
Arrays = dict[str, NDArray]


class TrainerSpec(Configurable):
    """What a method of local training says of itself, beside its arguments."""

    #: Where the method comes from, for ``fairflower list``.
    paper: ClassVar[str] = ""
    #: What has to travel beside the model: subclasses of `Exchange`.
    exchanges: ClassVar[tuple[type[Any], ...]] = ()
    #: The only ``train.optimizer`` that it is defined for; empty: any.
    optimizer: ClassVar[str] = ""
    #: The only models that it trains; empty: any.
    models: ClassVar[tuple[str, ...]] = ()
    #: The only kinds of examples that it trains on, "images", "features" or "tokens"; empty: any.
    kinds: ClassVar[tuple[str, ...]] = ()
    #: Sharpness-aware steps, where the method prescribes them: "sam" or "gsam".
    sharpness: ClassVar[str | None] = None

    @classmethod
    def argument_specs(cls) -> dict[str, ArgumentSpec]:
        """The method's own arguments, and those of its exchanges that say what they allow."""
        own = super().argument_specs()
        for exchange in cls.exchanges:
            for name, argument in exchange.argument_specs().items():
                if argument.bounded:
                    own.setdefault(name, argument)
        return own

    @classmethod
    def make_exchanges(cls, arguments: Mapping[str, Any]) -> list[Any]:
        """Make the method's exchanges, each with those of its arguments that it takes, too."""
        return [exchange.made_with(arguments) for exchange in cls.exchanges]

    @classmethod
    def adapt(cls, model: Any, federation: Any, **arguments: Any) -> None:
        """Change a network before anybody uses it, clients or server; by default not at all."""

    @classmethod
    def check_model(cls, model: str) -> None:
        """Raise ``ConfigError`` for a model that it does not train, with those that it does."""
        if cls.models and model not in cls.models:
            raise ConfigError(
                f"model.name = {model!r}: {cls.__name__} trains {' or '.join(cls.models)}. "
                "Set one of them, or choose another client.name."
            )

    @classmethod
    def check_kind(cls, kind: str) -> None:
        """Raise ``ConfigError`` for examples that it does not train on."""
        if cls.kinds and kind not in cls.kinds:
            raise ConfigError(
                f"{cls.__name__} trains on {' or '.join(cls.kinds)}, and the data are {kind}. "
                "Choose another client.name, or another data.name."
            )

    @classmethod
    def check_steps(cls, settings: TrainConfig) -> None:
        """Raise ``ConfigError`` for an optimiser, or a kind of step, that it is not defined for."""
        if cls.optimizer not in ("", settings.optimizer):
            raise ConfigError(
                f"train.optimizer = {settings.optimizer!r}: {cls.__name__} is defined for "
                f"{cls.optimizer!r} alone. Set it, or choose another client.name."
            )
        if cls.sharpness is not None and settings.sharpness != "none":
            raise ConfigError(
                f"train.sharpness = {settings.sharpness!r}: {cls.__name__} has sharpness-aware "
                "steps of its own. Remove it, or choose another client.name."
            )


class Trainer(TrainerSpec, Configurable):
    """One client's local training; a method is a subclass that varies a step of it.

    A round is ``receive(arrays)``, ``train(server_round)``, ``send()``. What comes
    out depends on the received arrays, ``shared`` and ``state``, the data, the
    settings, the seed, the client id and the round, and on nothing else: not on the
    worker, nor on what the same object did before. `make_client_app` does it for Flower's
    messages, `fairflower.classic.client.NumPyTrainer` for classic apps.

    A subclass redefines some of ``begin``, ``loss``, ``adjust_gradients``, ``step``
    and ``end``. Its own hyper-parameters are keyword arguments of its constructor.

    Parameters
    ----------
    model
        Moved to ``device``. Its state dict names the arrays that travel, parameters
        and buffers, float32 as float32 and int64 as int64; a `Classifier` may leave
        some out (``Classifier.travelling``).
    data
        The client's examples; a ``ConfigError`` if the method is not for such.
    settings
        Epochs, batch size, learning rate, momentum, weight decay and precision. Whatever
        that is, the model's arrays, the optimiser's and those of ``send`` are float32, and so
        is all that is computed outside of a step.
    client_id
        The partition id; sent with every reply as ``client-id``.
    seed
        The run's seed, from which the seeds of a client's rounds are derived.
    device
        See `fairflower.clients.choose_device`.

    Attributes
    ----------
    state
        What the client keeps from round to round, here and on no other machine:
        named arrays by what they are, empty in its first round. Read it in ``begin``,
        write it in ``end``.
    shared
        What travels beside the model, as the server sent it: named arrays by the
        exchange's name, none where it sent nothing.
    returns
        What goes back to those exchanges; written in ``end``.
    steps
        Optimiser steps of this round so far.
    round_config
        What the server said with this round's message.
    num_rounds
        Rounds that the run is to have, for methods with a schedule; 0: not known.
    """

    #: Examples per forward pass when nothing is trained: a matter of speed and memory.
    eval_batch_size = 500

    #: Memory for measuring what a strategy asks for; see `fairflower.training.measurements`.
    measure_memory_mb = 512

    #: Radius of sharpness.
    measure_rho = 0.05

    def __init__(
        self,
        model: nn.Module,
        data: ClientData,
        settings: TrainConfig,
        *,
        client_id: int,
        seed: int,
        device: str | torch.device = "cpu",
    ) -> None:
        self.check_kind(data.kind)
        self.device = torch.device(device)
        self.model = model.to(self.device)
        self.data = data
        self.settings = settings
        self.client_id = client_id
        self.seed = seed
        self.state: dict[str, Arrays] = {}
        self.shared: dict[str, Arrays] = {}
        self.returns: dict[str, Arrays] = {}
        self.steps = 0
        self.round_config: Mapping[str, Any] = {}
        self.num_rounds = 0

    # --- what a method varies ----------------------------------------------------------

    def begin(self, server_round: int) -> None:
        """Prepare a round of training: the model holds what was received."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean loss of a batch, the cross entropy: labels [B] of images [B, C, H, W].

        Or of features [B, D], or of token ids [B, L].
        """
        return self.criterion(self.model(x), y)

    def criterion(self, logits: Tensor, y: Tensor) -> Tensor:
        """Mean cross entropy of logits [B, classes], adjusted if ``train`` says so, in float32."""
        logits = at_least_float32(logits)
        if self.settings.logit_adjustment:
            logits = logits + self.log_prior
        return F.cross_entropy(logits, y)

    def adjust_gradients(self) -> None:
        """Change the parameters' ``grad`` before the optimiser sees them."""

    def end(self, server_round: int) -> None:
        """Finish a round of training: write ``state`` and ``returns``."""

    def test(self) -> dict[str, float]:
        """Test the model on the client's own test examples."""
        loss, accuracy = self.measure(self.test_examples)
        return {"eval_loss": loss, "accuracy": accuracy}

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Make the round's optimiser; its state does not outlive the round."""
        return build_optimizer(self.trainable, self.settings)

    def step(self, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        """Take one optimiser step on a batch; return the batch's mean loss before it."""
        optimizer.zero_grad()
        loss = self.objective(x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        rule = self.sharpness or self.settings.sharpness
        if rule != "none":
            alpha = self.settings.alpha if rule == "gsam" else 0.0
            apply_sam_gradient(self.model, lambda: self.objective(x, y), self.settings.rho, alpha)
        self.adjust_gradients()
        optimizer.step()
        return loss.detach()

    def objective(self, x: Tensor, y: Tensor) -> Tensor:
        """``loss`` as a step computes it: under autocast, if ``train.precision`` says so."""
        if self.settings.precision == "float32":
            return self.loss(x, y)
        with torch.autocast(self.device.type, torch.bfloat16):
            return at_least_float32(self.loss(x, y))

    @property
    def trainable(self) -> list[nn.Parameter]:
        """The parameters that are trained, in the model's order."""
        return list(trainable(self.model).values())

    def copy_trainable(self) -> list[Tensor]:
        """Values of ``trainable`` at this moment."""
        return [p.detach().clone() for p in self.trainable]

    def to_named(self, values: Sequence[Tensor]) -> Arrays:
        """One value for each of ``trainable``, as arrays by the parameters' names."""
        named = zip(trainable(self.model), values, strict=True)
        return {name: value.cpu().numpy() for name, value in named}

    def from_named(self, arrays: Mapping[str, NDArray]) -> list[Tensor]:
        """Undo ``to_named``; zero for what is not there."""
        return [
            torch.tensor(arrays[name], device=p.device) if name in arrays else torch.zeros_like(p)
            for name, p in trainable(self.model).items()
        ]

    def to_device(self, arrays: Mapping[str, NDArray]) -> dict[str, Tensor]:
        """Arrays as tensors on the device, by the same names."""
        return {name: torch.tensor(array, device=self.device) for name, array in arrays.items()}

    def drift(self, values: Sequence[Tensor]) -> Iterator[Tensor]:
        """Differences of ``trainable`` from values such as ``copy_trainable``'s, one by one."""
        return (p - value for p, value in zip(self.trainable, values, strict=True))

    def add_to_gradients(self, terms: Iterable[Tensor], scale: float = 1.0) -> None:
        """Add ``scale * terms`` to the gradients of ``trainable``, where there are any."""
        with torch.no_grad():
            for p, term in zip(self.trainable, terms, strict=True):
                if p.grad is not None:
                    p.grad.add_(term, alpha=scale)

    @cached_property
    def log_prior(self) -> Tensor:
        """Log of the local class frequencies [classes]; minus infinity for an absent class.

        Added to the logits in training, it takes the client's class imbalance off the
        model (Menon et al., ICLR 2021, with tau = 1). An absent class is no label of
        this client, so its logit just drops out: no NaN, and no gradient.
        """
        counts = np.bincount(self.data.train.y, minlength=self.data.num_classes)
        with np.errstate(divide="ignore"):
            prior = np.log(counts / counts.sum())
        return torch.tensor(prior, dtype=torch.float32, device=self.device)

    # --- a round -----------------------------------------------------------------------

    def receive(self, arrays: Mapping[str, NDArray]) -> None:
        """Copy named arrays into the model; ``ValueError`` if they are not exactly its own."""
        set_arrays(self.model, arrays, str(self))

    def train(self, server_round: int) -> dict[str, float]:
        """Train the model on the local data for ``local_epochs``.

        Gives ``train_loss``: the mean loss over all examples seen, each before the step that it
        took part in (Flower's convention). With no local epochs, the received model's loss on the
        training examples as they are. ``FloatingPointError`` when the loss is no longer finite.
        """
        self.steps, self.returns = 0, {}
        with reproducible(self.derive_seed(server_round, "torch"), self.device):
            self.begin(server_round)
            loss = self.run_epochs(server_round)
            self.end(server_round)
        return {"train_loss": loss}

    def run_epochs(self, server_round: int) -> float:
        """Take the round's optimiser steps; return the mean loss as ``train`` reports it.

        A second time in the same round gives the same batches.
        """
        epochs, batch_size = self.settings.local_epochs, self.settings.batch_size
        if epochs == 0:
            return self.measure(self.train_examples)[0]
        draws = torch.Generator().manual_seed(self.derive_seed(server_round, "batches"))
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        self.model.train()
        optimizer = self.make_optimizer()
        for epoch in range(1, epochs + 1):
            for x, y in self.train_examples.epoch_batches(batch_size, draws):
                with use_running_stats(self.model) if len(y) == 1 else nullcontext():
                    total += self.step(optimizer, x, y) * len(y)
                self.steps += 1
            # Once an epoch: asking a GPU after every batch would wait for it.
            if not math.isfinite(total.item()):
                raise FloatingPointError(
                    f"{self}: the training loss became {total.item()} in epoch {epoch} of "
                    f"round {server_round}. Lower train.lr (now {self.settings.lr})."
                )
        return total.item() / (epochs * len(self.train_examples))

    def snapshot(self) -> dict[str, Tensor]:
        """Copy the model's arrays on the device, by name."""
        return {name: tensor.detach().clone() for name, tensor in travelling(self.model).items()}

    def send(self) -> Arrays:
        """Copy the model's arrays, by name."""
        return copy_arrays(self.model)

    def measure(self, images: Examples) -> tuple[float, float]:
        """Mean cross entropy and accuracy (0 to 1) of the model on examples as they are."""
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        correct = torch.zeros((), dtype=torch.int64, device=self.device)
        self.model.eval()
        with torch.inference_mode():
            for x, y in images.eval_batches(self.eval_batch_size):
                logits = self.model(x)
                loss += F.cross_entropy(logits, y, reduction="sum")
                correct += (logits.argmax(1) == y).sum()
        return loss.item() / len(images), correct.item() / len(images)

    def derive_seed(self, server_round: int, purpose: str) -> int:
        """Derive the seed of this client's draws for one purpose in one round."""
        return derive_seed(self.seed, self.client_id, server_round, purpose)

    @cached_property
    def train_examples(self) -> Examples:
        """The training images, features or token ids on the device."""
        return self._images(self.data.train, "training")

    @cached_property
    def test_examples(self) -> Examples:
        """Those to test on."""
        return self._images(self.data.test, "test")

    def _images(self, split: Split, purpose: str) -> Examples:
        data = self.data
        if not len(split.y):
            raise ValueError(f"{self} has no {purpose} {data.kind}. Give it some, or leave it out.")
        return examples_of(
            split,
            data.mean,
            data.std,
            data.augment,
            device=self.device,
            model=self.model,
            first_stages=data.first_stages,
        )

    # Names of the last version.
    train_images = renamed_attribute("train_images", "train_examples")
    test_images = renamed_attribute("test_images", "test_examples")
    descend = renamed_attribute("descend", "run_epochs")

    def __str__(self) -> str:
        """Name the client, for error messages."""
        return f"Client {self.client_id}"


def server_round(config: Mapping[str, Any]) -> int:
    """Read the round from a message's config, where Flower's strategies put it."""
    if "server-round" not in config:
        raise ValueError(
            "The config sent for training has no 'server-round', from which the client's seeds "
            "are derived. Flower's message strategies send it; give a classic strategy "
            "on_fit_config_fn=lambda r: {'server-round': r}."
        )
    return int(config["server-round"])
