"""Tables of a run config: every setting with its default, help text and bounds."""

from __future__ import annotations

import dataclasses
import math
import sys
from dataclasses import Field, dataclass, field
from pathlib import Path
from typing import Any

from fairflower.config.text import split_spec
from fairflower.errors import ConfigError, is_text, quoted
from fairflower.registry import ADAPTABLE, INIT_ONLY_WEIGHTS, RANDOM_WEIGHTS


def setting(
    default: Any,
    help: str,
    *,
    min: float = 0,
    max: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] | None = None,
    execution: bool = False,
    word: str = "",
) -> Any:
    """Declare a run config key.

    Parameters
    ----------
    default : scalar
        Default value; its type is the type of the key.
    help : str
        Help text: what the key controls, its unit, and the meaning of 0 or "".
    min, max, above : float
        Allowed range; ``above`` is an exclusive lower bound.
    choices : tuple of str, optional
        Allowed texts.
    execution : bool
        Whether the key affects only where and how a run is executed, and not its result.
    word : str, optional
        Word that is allowed instead of a number.
    """
    facts = {"help": help, "min": min, "max": max, "above": above, "choices": choices}
    return field(default=default, metadata=facts | {"execution": execution, "word": word})


@dataclass(frozen=True)
class DataConfig:
    """Data set, and its partition among the clients."""

    name: str = setting(
        "uci-digits", "Data set; `fairflower list data` shows all, or module:Class."
    )
    dir: str = setting(
        "",
        "Folder of local data. Empty means $FAIRFLOWER_DATA or, if that is not set, the Hub.",
        execution=True,
    )
    domains: str = setting(
        "", "Comma-separated domains to use. Empty means all domains of the data set."
    )
    held_out: str = setting(
        "",
        "Domain that no client has and the server tests as an unseen domain (leave one domain "
        "out). Empty means none.",
    )
    groups: str = setting(
        "",
        "Sensitive attribute by which group fairness is measured: sex, health or age of the "
        "embedded tables, or an array or column of your own files. Empty means none.",
    )
    clients_per_domain: int = setting(
        5, "Clients per domain (papers: 5); ignored if imbalance-factor is above 1.", min=1
    )
    fraction: float = setting(
        0.0,
        "Share of a domain's training examples per client. 0 means the data set's default.",
        max=1,
    )
    examples_per_client: int = setting(
        0, "Training examples per client, instead of a fraction. 0 means data.fraction decides."
    )
    seed: int = setting(0, "Seed of the partition and of the clients' data.")
    image_size: int = setting(
        0, "Side of the images in pixels. 0 means the data set's size.", max=1024
    )
    augment: bool = setting(True, "Whether training uses the data set's augmentation.")
    test_examples: int = setting(0, "Test examples per domain, a fixed random subset. 0 means all.")
    dirichlet_alpha: float = setting(
        0.0,
        "Concentration (alpha) of a Dirichlet partition of each domain, with label shift and "
        "unequal "
        "sizes (FedISM: 1.0). 0 means equal shares drawn at random.",
    )
    corrupted_clients: int = setting(
        0,
        "Number of clients per domain with corrupted images; they are the domain's last "
        "clients. 0 means none.",
    )
    corruption: str = setting(
        "noise",
        "Corruption of these images: Gaussian noise or motion blur.",
        choices=("noise", "blur"),
    )
    severity: int = setting(
        3,
        "Severity of the corruption, 1 to 5 (FedISM: noise 3; its released code: blur 1).",
        min=1,
        max=5,
    )
    validation_fraction: float = setting(
        0.0,
        "Share of each client's training examples held out for validation (choice of "
        "hyper-parameters), drawn by data.seed. 0 disables it.",
        max=1,
    )
    validation_examples: int = setting(
        0,
        "Validation examples per domain, instead of validation-fraction: drawn by data.seed from "
        "training examples that no client holds, all of them if fewer are left. 0 disables it.",
    )
    imbalance_factor: int = setting(
        1,
        "Ratio of the numbers of clients in the first and in the last domain, a geometric series "
        "in between (FedGCR's DIF: 1, 5, 10). 1 means clients-per-domain in every domain.",
        min=1,
    )

    @property
    def validated(self) -> bool:
        """Whether examples are held out for validation."""
        return bool(self.validation_fraction or self.validation_examples)


@dataclass(frozen=True)
class ModelConfig:
    """Network."""

    name: str = setting(
        "cnn",
        "Model; `fairflower list models` shows all, or module:Class. Default for features: mlp; "
        "for token ids: embedding-bag.",
    )
    weights: str = setting(
        "",
        "Pretrained weights of prompt-vit-*, vpt-vit-* and resnet18: a .safetensors or .pth file, "
        "or imagenet. Empty means the model's default weights; for resnet18 they are random. For "
        "timm:NAME and hf:NAME: empty means the pretrained weights of the cache or folder, and "
        "random means none.",
    )

    adapter: str = setting(
        "",
        "Adapter of a frozen timm:NAME or hf:NAME, such as lora:r=8:alpha=16:targets=qkv,proj: "
        "only adapters and head are trained and sent. Empty means that the whole network is.",
    )

    @property
    def file(self) -> str:
        """The file of pretrained weights; empty if they are not in a file."""
        return "" if self.weights in ("imagenet", RANDOM_WEIGHTS) else self.weights

    def resolve(self) -> ModelConfig:
        """Return the config with absolute paths, for processes in other working directories."""
        weights, name = self.weights, self.name
        if self.file:
            weights = str(Path(self.file).expanduser().absolute())
        family, *rest = split_spec(name)
        if family == "hf" and rest and Path(rest[0]).expanduser().is_dir():
            name = ":".join(["hf", str(Path(rest[0]).expanduser().absolute()), *rest[1:]])
        return dataclasses.replace(self, weights=weights, name=name)

    def to_receive(self) -> ModelConfig:
        """Return the config without pretrained weights, for a receiver that is sent all weights."""
        if self.name in INIT_ONLY_WEIGHTS:
            return dataclasses.replace(self, weights="")
        if self.name.partition(":")[0] in ADAPTABLE and not self.adapter:
            return dataclasses.replace(self, weights=RANDOM_WEIGHTS)
        return self


@dataclass(frozen=True)
class TrainConfig:
    """Local training of every method."""

    local_epochs: int = setting(5, "Local epochs: passes over a client's data per round.")
    batch_size: int = setting(64, "Examples per training step (FedHEAL, Digits: 64).", min=1)
    optimizer: str = setting(
        "sgd",
        "Optimizer: sgd, adam or adamw (betas 0.9 and 0.999). Its state is reset every round.",
        choices=("sgd", "adam", "adamw"),
    )
    lr: float = setting(0.05, "Learning rate.")
    lr_schedule: str = setting(
        "constant",
        "Schedule of the learning rate over rounds: constant; linear or cosine down to lr-final "
        "of it; step, which multiplies it by lr-factor every lr-every rounds.",
        choices=("constant", "linear", "cosine", "step"),
    )
    lr_final: float = setting(
        0.0,
        "Share of lr that linear and cosine reach one round after the last.",
        max=1,
    )
    lr_factor: float = setting(0.1, "Factor of the step schedule.", above=0, max=1)
    lr_every: int = setting(10, "Rounds between two steps of the step schedule.", min=1)
    lr_warmup: int = setting(
        0,
        "Rounds of a linear warm-up from 1 / (lr-warmup + 1) of the learning rate; lr-schedule "
        "begins after them. 0 disables the warm-up.",
    )
    momentum: float = setting(0.9, "Momentum of sgd; adam and adamw do not use it.", max=1)
    weight_decay: float = setting(
        1e-5, "Weight decay: an L2 penalty for sgd and adam, decoupled for adamw."
    )
    sharpness: str = setting(
        "none",
        "Sharpness-aware training steps: none, sam, or gsam (FedISM's SALT).",
        choices=("none", "sam", "gsam"),
    )
    rho: float = setting(0.05, "Radius of the perturbation of sam and gsam (FedISM: 0.05).")
    alpha: float = setting(0.1, "Weight of gsam's surrogate gap (FedISM: 0.1).")
    logit_adjustment: bool = setting(
        False, "Add the log of the client's class frequencies to the logits in training (FedISM)."
    )
    device: str = setting("auto", "Device of training and tests: auto, cpu, cuda, cuda:N or mps.")
    precision: str = setting(
        "float32",
        "float32, or bf16: local steps under autocast to bfloat16. Weights, optimizers, tests, "
        "measurements and messages are float32 in both.",
        choices=("float32", "bf16"),
    )

    def lr_in(self, server_round: int, num_rounds: int) -> float:
        """Return the learning rate of a round, counted from 1.

        With a warm-up of W rounds, round r <= W has ``lr r / (W + 1)``. The schedule covers the
        rounds after it: its first round, W + 1, has ``lr``.

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
    """Measurements that clients make for a strategy."""

    memory_mb: int = setting(512, "Memory limit of per-sample gradients, in megabytes.", min=1)
    rho: float = setting(
        0.05,
        "Radius of the sharpness measurement (FedISM: 0.05); train.rho is the radius of "
        "training steps.",
    )


@dataclass(frozen=True)
class ObserveConfig:
    """Diagnostics that the server records."""

    window: int = setting(
        0,
        "Window, in rounds, of the sign consistency of clients' updates in the report (FedHEAL, "
        "Fig. 2: 10 and 100). 0 disables it.",
    )


@dataclass(frozen=True)
class StopConfig:
    """Early stopping."""

    patience: int = setting(
        0,
        "Stop after this many rounds without improvement; 0 disables early stopping. The loss is "
        "the mean over domains on validation examples if the server tests on any; otherwise "
        "train_loss in history.csv.",
    )
    min_delta: float = setting(0.0, "Minimum decrease of the loss that counts as an improvement.")


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints, from which stopped or killed runs are resumed."""

    every: int = setting(
        1, "Rounds between two checkpoints. 0 disables checkpoints.", execution=True
    )
    keep: int = setting(2, "Number of checkpoints to keep.", min=1, execution=True)


@dataclass(frozen=True)
class ParticipationConfig:
    """Which clients train in a round."""

    policy: str = setting(
        "uniform",
        "Policy that chooses the clients of a round: uniform, by-examples, round-robin, "
        "power-of-choice:d=10, or module:Class.",
    )
    availability: str = setting(
        "always",
        "Clients that can train in a round: always, markov:leave=0.1:back=0.5, or a CSV file with "
        "the columns round and client.",
    )


@dataclass(frozen=True)
class BoundConfig:
    """Bounds on a client's influence under every strategy."""

    max_client_weight: float = setting(
        1.0,
        "Cap on a client's weight; the excess goes to the other clients. 1 means no cap.",
        above=0,
        max=1,
    )
    clip_update_norm: float = setting(
        0.0, "Cap on the norm of a client's update; larger updates are scaled down. 0 means no cap."
    )
    clip_update_median: float = setting(
        0.0,
        "Cap on the norm of a client's update, as a multiple of the round's median norm; larger "
        "updates are scaled down. 0 means no cap.",
    )


@dataclass(frozen=True)
class EvaluateConfig:
    """Tests of the global model."""

    by: str = setting(
        "server",
        "Where models are tested. server: on every domain's test set (papers); clients: on their "
        "own test data; both: at both places.",
        choices=("server", "clients", "both"),
    )
    every: int = setting(1, "Rounds between two tests; the last round is always tested.", min=1)
    batch_size: int = setting(500, "Examples per forward pass of a test.", min=1)
    test: bool = setting(
        True,
        "Whether to test on the test examples. false means tests on validation examples only, as "
        "in trials of `fairflower tune`.",
    )
    auc: bool = setting(
        False, "Whether the server computes the AUC, too; for medical data sets it always does."
    )
    adabn: bool = setting(
        False,
        "Whether the server tests the held-out domain a second time, with BatchNorm statistics of "
        "its test examples, without their labels (AdaBN).",
    )
    metrics: str = setting(
        "", "Comma-separated metrics of your own, module:function. Empty means none."
    )
    metric_errors: str = setting(
        "stop",
        "What happens if a metric of your own fails on a domain. stop: the run ends; skip: the "
        "run goes on without this metric of this domain in this round.",
        choices=("stop", "skip"),
        execution=True,
    )


#: The largest whole number that TOML and Flower's messages hold.
MOST = 2**63 - 1


def checked(key: str, value: Any, spec: Field[Any]) -> Any:
    """Return the value as the key's type; ``ConfigError`` if its type or range is wrong."""
    word = spec.metadata["word"]
    if word and value == word:
        return value
    kind = float if word else type(spec.default)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) <= sys.float_info.max else math.inf
    if type(value) is not kind:
        raise ConfigError(
            f"{key} = {quoted(value)}: expected {_NAMES[kind]}{f' or {word!r}' if word else ''}, "
            f"got {type(value).__name__}."
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
