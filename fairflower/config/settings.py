"""The tables of a run config: every setting with its default, meaning and bounds."""

from __future__ import annotations

import dataclasses
import math
import sys
from dataclasses import Field, dataclass, field
from pathlib import Path
from typing import Any

from fairflower.errors import ConfigError, is_text, quoted
from fairflower.registry import INIT_ONLY_WEIGHTS


def setting(
    default: Any,
    help: str,
    *,
    min: float = 0,
    max: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] | None = None,
    execution: bool = False,
) -> Any:
    """Declare one key of the run config: its default, meaning and bounds; no number is negative.

    One of ``execution`` says where and how a run is executed: it moves no bit of its result.
    """
    facts = {"help": help, "min": min, "max": max, "above": above, "choices": choices}
    return field(default=default, metadata=facts | {"execution": execution})


@dataclass(frozen=True)
class DataConfig:
    """Which benchmark, and how it is divided among the clients."""

    name: str = setting(
        "uci-digits", "Data set; `fairflower list data` shows all, or module:Class."
    )
    dir: str = setting(
        "", "Folder of local data; empty: $FAIRFLOWER_DATA, else the Hub.", execution=True
    )
    domains: str = setting("", "Comma-separated domains to keep; empty: all of the data set.")
    clients_per_domain: int = setting(
        5, "Clients in each domain (papers: 5), unless imbalance-factor is above 1.", min=1
    )
    fraction: float = setting(
        0.0, "Share of a domain's training examples per client; 0: the data set's own.", max=1
    )
    examples_per_client: int = setting(
        0, "Training examples per client, instead of a fraction; 0: off."
    )
    seed: int = setting(0, "Seed of the partition; nothing else moves it.")
    image_size: int = setting(0, "Side in pixels; 0: the data set's own.", max=1024)
    augment: bool = setting(True, "The data set's training augmentation.")
    test_examples: int = setting(
        0, "Test examples per domain (a fixed random subset); 0: all of them."
    )
    dirichlet_alpha: float = setting(
        0.0,
        "Label shift between a domain's clients: alpha of a Dirichlet partition, which is then "
        "of unequal sizes (FedISM: 1.0); 0: equal shares drawn at random.",
    )
    corrupted_clients: int = setting(
        0, "How many of a domain's clients, its last, have corrupted images; 0: none."
    )
    corruption: str = setting(
        "noise", "What corrupts them: Gaussian noise or motion blur.", choices=("noise", "blur")
    )
    severity: int = setting(
        3, "How much, from 1 to 5 (FedISM: 3 of noise; its released code: 1 of blur).", min=1, max=5
    )
    validation_fraction: float = setting(
        0.0,
        "Share of every client's training examples that is kept out of training, and of tests, to "
        "choose hyper-parameters by, drawn by data.seed; 0: none.",
        max=1,
    )
    validation_examples: int = setting(
        0,
        "Validation examples per domain, drawn by data.seed from the training examples that no "
        "client holds, instead of validation-fraction; as many as there are, if fewer; 0: none.",
    )
    imbalance_factor: int = setting(
        1,
        "Clients of the first domain for one of the last, in a geometric series (FedGCR's DIF: "
        "1, 5, 10), instead of clients-per-domain; 1: equally many.",
        min=1,
    )

    @property
    def validated(self) -> bool:
        """Whether examples are kept out of training for validation."""
        return bool(self.validation_fraction or self.validation_examples)


@dataclass(frozen=True)
class ModelConfig:
    """Which network."""

    name: str = setting(
        "cnn",
        "Model; `fairflower list models` shows all, or module:Class. If it is left out, mlp for "
        "features and embedding-bag for token ids.",
    )
    weights: str = setting(
        "",
        "Pretrained weights of prompt-vit-*, vpt-vit-* and resnet18: a .safetensors or .pth file, "
        "or imagenet; empty: the model's own, resnet18's being random.",
    )

    def resolve(self) -> ModelConfig:
        """The same with an absolute path, for processes in another working directory."""
        if self.weights in ("", "imagenet"):
            return self
        return dataclasses.replace(self, weights=str(Path(self.weights).expanduser().absolute()))

    def to_receive(self) -> ModelConfig:
        """The same for who is to overwrite it: without weights that are then all replaced."""
        return dataclasses.replace(self, weights="") if self.name in INIT_ONLY_WEIGHTS else self


@dataclass(frozen=True)
class TrainConfig:
    """Local training, the same for every method."""

    local_epochs: int = setting(5, "Passes over a client's data per round.")
    batch_size: int = setting(64, "Examples per step (FedHEAL, Digits: 64).", min=1)
    optimizer: str = setting(
        "sgd",
        "sgd, adam (betas .9 and .999) or adamw; a new one every round.",
        choices=("sgd", "adam", "adamw"),
    )
    lr: float = setting(0.05, "Learning rate.")
    lr_schedule: str = setting(
        "constant",
        "How the learning rate falls from round to round: not at all; linear or cosine, towards "
        "lr-final of it; step, by lr-factor after every lr-every rounds.",
        choices=("constant", "linear", "cosine", "step"),
    )
    lr_final: float = setting(
        0.0,
        "Share of the learning rate that linear and cosine would reach one round after the last.",
        max=1,
    )
    lr_factor: float = setting(0.1, "What step multiplies the learning rate by.", above=0, max=1)
    lr_every: int = setting(10, "Rounds between two steps.", min=1)
    lr_warmup: int = setting(
        0,
        "Rounds in which the learning rate first rises linearly, from lr / (lr-warmup + 1); "
        "lr-schedule begins after them. 0 disables the warm-up.",
    )
    momentum: float = setting(0.9, "Momentum of sgd; adam has its own.", max=1)
    weight_decay: float = setting(
        1e-5, "Weight decay: coupled L2 of sgd and adam, decoupled of adamw."
    )
    sharpness: str = setting(
        "none",
        "Sharpness-aware steps: none, sam, or gsam (FedISM's SALT).",
        choices=("none", "sam", "gsam"),
    )
    rho: float = setting(0.05, "Radius of sam and gsam (FedISM: 0.05).")
    alpha: float = setting(0.1, "Weight of gsam's surrogate gap (FedISM: 0.1).")
    logit_adjustment: bool = setting(
        False, "Add the log of the client's class frequencies to the logits in training (FedISM)."
    )
    device: str = setting("auto", "auto, cpu, cuda or cuda:N.")
    precision: str = setting(
        "float32",
        "float32, or bf16: local steps under autocast to bfloat16. Weights, optimisers, tests, "
        "measurements and all that is sent are float32 in both.",
        choices=("float32", "bf16"),
    )

    def lr_in(self, server_round: int, num_rounds: int) -> float:
        """The learning rate of a round, counted from 1: that of the warm-up, then the schedule's.

        With a warm-up of W rounds, round r <= W has ``lr r / (W + 1)``, and the schedule is that
        of the rounds that are left: its first round, W + 1, has ``lr``.

        >>> [TrainConfig(lr=0.5, lr_schedule="linear").lr_in(r, 4) for r in (1, 2, 3, 4)]
        [0.5, 0.375, 0.25, 0.125]
        >>> [TrainConfig(lr=0.75, lr_warmup=2).lr_in(r, 4) for r in (1, 2, 3, 4)]
        [0.25, 0.5, 0.75, 0.75]
        """
        if server_round <= self.lr_warmup:
            return self.lr * server_round / (self.lr_warmup + 1)
        server_round, num_rounds = server_round - self.lr_warmup, num_rounds - self.lr_warmup
        done = (server_round - 1) / num_rounds
        if self.lr_schedule == "step":
            return self.lr * self.lr_factor ** ((server_round - 1) // self.lr_every)
        if self.lr_schedule == "linear":
            left = 1 - done
        elif self.lr_schedule == "cosine":
            left = (1 + math.cos(math.pi * done)) / 2
        else:
            return self.lr
        return self.lr * (self.lr_final + (1 - self.lr_final) * left)


@dataclass(frozen=True)
class MeasureConfig:
    """How clients measure what a strategy asks for."""

    memory_mb: int = setting(512, "Memory for per-sample gradients, in megabytes.", min=1)
    rho: float = setting(0.05, "How far from the model sharpness looks (FedISM: 0.05).")


@dataclass(frozen=True)
class ObserveConfig:
    """What the server looks at beside what it needs."""

    window: int = setting(
        0,
        "Rounds over which the report shows how steadily parameters move (FedHEAL, Fig. 2: 10 "
        "and 100); 0: off.",
    )


@dataclass(frozen=True)
class StopConfig:
    """When a run ends before its last round."""

    patience: int = setting(
        0,
        "Rounds in a row without a lower loss after which a run ends; 0: it makes all. (The loss "
        "is the mean over domains of that of examples for validation, where the server tests on "
        "some; else that of train_loss in history.csv, the mean over the round's examples.)",
    )
    min_delta: float = setting(0.0, "By how much a loss has to be lower to be a lower one.")


@dataclass(frozen=True)
class CheckpointConfig:
    """How a run can be continued that was stopped or killed."""

    every: int = setting(1, "Write a checkpoint after every n-th round; 0: none.", execution=True)
    keep: int = setting(2, "Checkpoints to keep.", min=1, execution=True)


@dataclass(frozen=True)
class BoundConfig:
    """Bounds on one client's influence, whatever the strategy."""

    max_client_weight: float = setting(
        1.0, "Largest weight of a client, its excess going to the others; 1: any.", above=0, max=1
    )
    clip_update_norm: float = setting(
        0.0, "Length to which longer updates are scaled down; 0: any."
    )
    clip_update_median: float = setting(
        0.0, "The same as a multiple of the round's median length; 0: any."
    )


@dataclass(frozen=True)
class EvaluateConfig:
    """Where and how often the global model is tested."""

    by: str = setting(
        "server",
        "server: on every domain's test set, as the papers do; clients: on their own data.",
        choices=("server", "clients", "both"),
    )
    every: int = setting(1, "Test after every n-th round (and after the last).", min=1)
    batch_size: int = setting(500, "Examples per forward pass.", min=1)
    test: bool = setting(
        True,
        "Test on the test examples; false: on those for validation alone, as trials of "
        "`fairflower tune` do.",
    )
    auc: bool = setting(False, "At the server, the AUC, too; medical data sets always have it.")


#: The largest whole number that TOML and Flower's messages hold.
MOST = 2**63 - 1


def checked(key: str, value: Any, spec: Field[Any]) -> Any:
    """The value as the key's type, or one clear error."""
    kind = type(spec.default)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) <= sys.float_info.max else math.inf
    if type(value) is not kind:
        raise ConfigError(
            f"{key} = {quoted(value)}: expected {_NAMES[kind]}, got {type(value).__name__}."
        )
    low, high, above, choices = (spec.metadata[n] for n in ("min", "max", "above", "choices"))
    is_path = key == "run-name" and (Path(str(value)).name != value or value == "..")
    bounds = [
        (isinstance(value, float) and not math.isfinite(value), "a finite number"),
        (above is not None and value <= above, f"more than {above}"),
        (not isinstance(value, str) and value < low, f"at least {low}"),
        (high is not None and value > high, f"at most {high}"),
        (isinstance(value, int) and value > MOST, f"at most {MOST}"),
        (choices and value not in choices, f"one of {', '.join(choices or ())}"),
        (is_path, "a folder's name, not a path"),
        (isinstance(value, str) and not is_text(value), "a text that UTF-8 can hold"),
    ]
    for broken, allowed in bounds:
        if broken:
            raise ConfigError(f"{key} = {quoted(value)}: expected {allowed}.")
    return value


_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
