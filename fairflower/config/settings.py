"""Tables of a run config: each setting with its default, help text and allowed range."""

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
        Default value; it also defines the key's type.
    help : str
        What the key controls, its unit, and the meaning of 0 or "".
    min, max, above, choices
        Allowed range (``above`` is an exclusive lower bound), or allowed values.
    execution : bool
        Whether the key affects only how and where a run is executed, but not its result.
    word : str, optional
        A word that may be given instead of a number.
    """
    facts = {"help": help, "min": min, "max": max, "above": above, "choices": choices}
    return field(default=default, metadata=facts | {"execution": execution, "word": word})


@dataclass(frozen=True)
class DataConfig:
    """Data set and its partition among clients."""

    name: str = setting(
        "uci-digits", "Data set: a name from `fairflower list data`, or module:Class."
    )
    dir: str = setting(
        "",
        "Folder of local data. Empty means $FAIRFLOWER_DATA or, if this variable is not set, a "
        "download from the Hugging Face Hub.",
        execution=True,
    )
    domains: str = setting(
        "", "Comma-separated list of domains to use. Empty means all domains of the data set."
    )
    held_out: str = setting(
        "",
        "Domain to hold out: no client has its data, and the server tests on it as an unseen "
        "domain. Empty means none.",
    )
    groups: str = setting(
        "",
        "Sensitive attribute for measuring group fairness: sex, health or age in the embedded "
        "tables, or an array or column in your own files. Empty means none.",
    )
    smallest_group: int = setting(
        5,
        "Smallest number of a site's examples that share a name, or of which it sends numbers.",
        min=1,
        execution=True,
    )
    clients_per_domain: int = setting(
        5,
        "Clients per domain (5 in the papers, 1 for your data); ignored if imbalance-factor > 1.",
        min=1,
    )
    fraction: float = setting(
        0.0,
        "Fraction of a domain's training examples for each client. 0: the data set's default.",
        max=1,
    )
    examples_per_client: int = setting(
        0,
        "Number of training examples per client, as an alternative to data.fraction. 0 "
        "means that data.fraction applies.",
    )
    seed: int = setting(0, "Random seed for the partition and the clients' data.")
    image_size: int = setting(
        0, "Width and height of the images, in pixels. 0 means the data set's default.", max=1024
    )
    augment: bool = setting(True, "Whether to apply the data set's augmentation during training.")
    test_examples: int = setting(
        0, "Number of test examples per domain, drawn once at random (data.seed). 0 means all."
    )
    dirichlet_alpha: float = setting(
        0.0,
        "Concentration parameter alpha of a Dirichlet partition of each domain, which gives the "
        "clients different label distributions and sizes (FedISM: 1.0). 0 means a random "
        "partition into equal parts.",
        max=1e6,
    )
    corrupted_clients: int = setting(
        0,
        "Number of clients per domain whose images are corrupted: the last clients of each "
        "domain. 0 means none.",
    )
    corruption: str = setting(
        "noise",
        "Type of corruption: noise (Gaussian noise) or blur (motion blur).",
        choices=("noise", "blur"),
    )
    severity: int = setting(
        3, "Severity of the corruption, 1 to 5 (FedISM: noise 3; its code: blur 1).", min=1, max=5
    )
    redraw: str = setting(
        "",
        "Draw the test examples of your own data with data.seed: rows, or by a column or array such"
        " as patient. Empty means no, but rows for several federations if nothing fixes them.",
    )
    validation_fraction: float = setting(
        0.0,
        "Fraction of each client's training examples to hold out for validation, for example to "
        "choose hyper-parameters. They are drawn at random with data.seed. 0 means none.",
        max=1,
    )
    validation_examples: int = setting(
        0,
        "Number of validation examples per domain (with corrupted-clients: for its clean and its "
        "corrupted clients each), as an alternative to validation-fraction. "
        "They are drawn at random with data.seed from the training examples that no client has; "
        "if there are fewer, all are used. 0 means none.",
    )
    imbalance_factor: int = setting(
        1,
        "Domain imbalance: the first domain has this many times as many clients as the last, "
        "and the numbers in between form a geometric sequence (FedGCR's DIF: 1, 5, 10). 1 means "
        "clients-per-domain in every domain.",
        min=1,
    )

    @property
    def validated(self) -> bool:
        """Whether examples are held out for validation."""
        return bool(self.validation_fraction or self.validation_examples)


@dataclass(frozen=True)
class ModelConfig:
    """Network and its pretrained weights."""

    name: str = setting(
        "cnn",
        "Model: a name from `fairflower list models`, or module:Class. Default for features: mlp; "
        "for token ids: embedding-bag.",
    )
    weights: str = setting(
        "",
        "Pretrained weights. For prompt-vit-*, vpt-vit-* and resnet18: a .safetensors or .pth "
        "file, or imagenet; empty means the model's default weights, which are random for "
        "resnet18. For timm:NAME and hf:NAME: empty means the pretrained weights in the cache "
        "or folder, and random means random weights; timm:NAME also accepts a file.",
    )
    adapter: str = setting(
        "",
        "Adapter for a frozen timm:NAME or hf:NAME network, such as "
        "lora:r=8:alpha=16:targets=qkv,proj; only the adapter and the head are trained and "
        "sent. Empty means that the whole network is trained and sent.",
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
        """Return the config without pretrained weights, for a process that receives all weights."""
        if self.name in INIT_ONLY_WEIGHTS:
            return dataclasses.replace(self, weights="")
        if self.name.partition(":")[0] in ADAPTABLE and not self.adapter:
            return dataclasses.replace(self, weights=RANDOM_WEIGHTS)
        return self


@dataclass(frozen=True)
class TrainConfig:
    """Settings for local training that all methods share."""

    local_epochs: int = setting(
        5, "Number of local epochs: passes over a client's data in each round."
    )
    batch_size: int = setting(
        64, "Number of examples per training step (FedHEAL on Digits: 64).", min=1
    )
    optimizer: str = setting(
        "sgd",
        "Optimizer: sgd, adam or adamw, the latter two with betas 0.9 and 0.999. Its state is "
        "reset in every round.",
        choices=("sgd", "adam", "adamw"),
    )
    lr: float = setting(0.05, "Learning rate.")
    lr_schedule: str = setting(
        "constant",
        "Learning rate schedule over rounds. constant: lr in every round; linear and cosine: "
        "decay from lr to lr-final times lr; step: multiplication by lr-factor every lr-every "
        "rounds.",
        choices=("constant", "linear", "cosine", "step"),
    )
    lr_final: float = setting(
        0.0,
        "Final learning rate of the linear and cosine schedules, as a fraction of lr; the "
        "schedules reach it one round after the last.",
        max=1,
    )
    lr_factor: float = setting(
        0.1, "Factor by which the step schedule multiplies the learning rate.", above=0, max=1
    )
    lr_every: int = setting(10, "Number of rounds between two steps of the step schedule.", min=1)
    lr_warmup: int = setting(
        0,
        "Number of rounds of linear warm-up, which starts at lr / (lr-warmup + 1); lr-schedule "
        "begins after the warm-up. 0 disables it.",
    )
    momentum: float = setting(0.9, "Momentum of sgd; adam and adamw ignore it.", max=1)
    weight_decay: float = setting(
        1e-5, "Weight decay: an L2 penalty for sgd and adam, and decoupled weight decay for adamw."
    )
    sharpness: str = setting(
        "none",
        "Sharpness-aware minimization: none, sam, or gsam (FedISM's SALT).",
        choices=("none", "sam", "gsam"),
    )
    rho: float = setting(0.05, "Perturbation radius of sam and gsam (FedISM: 0.05).")
    alpha: float = setting(0.1, "Weight of the surrogate gap in gsam (FedISM: 0.1).")
    logit_adjustment: bool = setting(
        False,
        "Whether to add the logarithm of the client's class frequencies to the logits "
        "during training (FedISM).",
    )
    device: str = setting(
        "auto", "Device for training and evaluation: auto, cpu, cuda, cuda:N or mps."
    )
    precision: str = setting(
        "float32",
        "Floating-point precision of local training steps: float32, or bf16 (autocast to "
        "bfloat16). Weights, optimizer states, tests, measurements and messages are always "
        "float32. (On NVIDIA GPUs convolutions use TF32, PyTorch's default.)",
        choices=("float32", "bf16"),
    )

    def lr_in(self, server_round: int, num_rounds: int) -> float:
        """Return the learning rate of a round, counted from 1.

        With a warm-up of W rounds, round r <= W has ``lr r / (W + 1)``. The schedule starts in
        round W + 1 with ``lr``.

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
    """Settings for the measurements that strategies request from clients."""

    memory_mb: int = setting(
        512, "Memory limit for per-sample gradients, in MiB.", min=1, max=2**30
    )
    rho: float = setting(
        0.05, "Radius for measuring sharpness (FedISM: 0.05). train.rho is the radius for training."
    )


@dataclass(frozen=True)
class ObserveConfig:
    """Additional diagnostics that the server records."""

    window: int = setting(
        0,
        "Number of rounds over which the report shows the sign consistency of each client's "
        "updates (FedHEAL, Fig. 2: 10 and 100). 0 disables it.",
    )


@dataclass(frozen=True)
class StopConfig:
    """Early stopping."""

    patience: int = setting(
        0,
        "Stop after this many rounds without an improvement in the loss; 0 disables early "
        "stopping. The loss is the mean over domains on the server's validation examples; "
        "without them, it is the train_loss in history.csv.",
    )
    min_delta: float = setting(0.0, "Minimum decrease in the loss that counts as an improvement.")


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints for resuming stopped or killed runs."""

    every: int = setting(
        1, "Number of rounds between two checkpoints. 0 disables checkpoints.", execution=True
    )
    keep: int = setting(2, "Number of recent checkpoints to keep.", min=1, execution=True)


@dataclass(frozen=True)
class ParticipationConfig:
    """Selection and availability of clients."""

    policy: str = setting(
        "uniform",
        "Policy that selects the clients of each round: uniform, by-examples, round-robin, "
        "power-of-choice:d=10, or module:Class. With by-examples, fedavg counts examples twice.",
    )
    availability: str = setting(
        "always",
        "Which clients are available in each round. always: all clients; "
        "markov:leave=0.1:back=0.5: clients leave and come back with these probabilities; or a "
        "CSV file with the columns round and client.",
    )


@dataclass(frozen=True)
class BoundConfig:
    """Bounds on the influence of a single client, for every strategy."""

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
    """Evaluation of the global model."""

    by: str = setting(
        "server",
        "Where the global model is tested. server: on the server, on the test set of every "
        "domain (as in the papers); clients: on each client, on its own test data; both: on the "
        "server and on the clients.",
        choices=("server", "clients", "both"),
    )
    every: int = setting(
        1, "Number of rounds between two tests. The last model is always tested.", min=1
    )
    batch_size: int = setting(500, "Number of examples per forward pass in a test.", min=1)
    test: bool = setting(
        True, "Whether to test on test examples. false: only on validation examples, as trials do."
    )
    auc: bool = setting(
        False, "Whether the server also computes the AUC. For medical data sets it always does."
    )
    adabn: bool = setting(
        False,
        "Whether the server also tests on the held-out domain with BatchNorm statistics that "
        "are estimated from its unlabeled test examples (AdaBN).",
    )
    metrics: str = setting(
        "", "Comma-separated list of your own metrics, each as module:function. Empty means none."
    )
    metric_errors: str = setting(
        "stop",
        "What to do if one of your own metrics fails on a domain. stop: end the run; skip: "
        "leave the metric out for this domain in this round.",
        choices=("stop", "skip"),
        execution=True,
    )


#: The largest integer that TOML and Flower's messages can represent.
MAX_INT = 2**63 - 1


def checked(key: str, value: Any, spec: Field[Any]) -> Any:
    """Convert a value to its key's type; raise ``ConfigError`` if it is invalid."""
    word = spec.metadata["word"]
    if word and value == word:
        return value
    kind = float if word else type(spec.default)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) <= sys.float_info.max else math.inf
    if type(value) is not kind:
        twice = f" On a command line, quote it twice: '{key}=\"{quoted(value)}\"'."
        raise ConfigError(
            f"{key} = {quoted(value)}: expected {_NAMES[kind]}{f' or {word!r}' if word else ''}, "
            f"got {type(value).__name__}.{twice * (kind is str and type(value) in (int, float))}"
        )
    low, high, above, choices = (spec.metadata[n] for n in ("min", "max", "above", "choices"))
    is_path = key == "run-name" and (Path(str(value)).name != value or value == "..")
    bounds = [
        (isinstance(value, float) and not math.isfinite(value), "a finite number"),
        (above is not None and value <= above, f"more than {above}"),
        (not isinstance(value, str) and value < low, f"at least {low}"),
        (high is not None and value > high, f"at most {high}"),
        (isinstance(value, int) and value > MAX_INT, f"at most {MAX_INT}"),
        (choices and value not in choices, f"one of {', '.join(choices or ())}"),
        (is_path, "the name of a folder, not a path"),
        (isinstance(value, str) and not is_text(value), "text that UTF-8 can encode"),
    ]
    for broken, allowed in bounds:
        if broken:
            raise ConfigError(f"{key} = {quoted(value)}: expected {allowed}.")
    return value


_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}

#: Short name (of a command's option or a Python argument) -> run config key, type and help text.
SHORT_NAMES: dict[str, tuple[str, type, str]] = {
    "data": ("data.name", str, "Data set"),
    "data_dir": ("data.dir", str, "Folder of local data"),
    "model": ("model.name", str, "Model"),
    "rounds": ("num-server-rounds", int, "Number of training rounds"),
    "fraction_train": ("fraction-train", float, "Fraction of the clients that train in each round"),
    "epochs": ("train.local-epochs", int, "Local epochs"),
    "lr": ("train.lr", float, "Learning rate"),
    "seed": ("seed", int, "Random seed for everything except the partition"),
    "engine": (
        "engine",
        str,
        "Simulation engine: auto, ray, flower (Flower's engine on Ray) or inline",
    ),
    "ray_address": (
        "ray-address",
        str,
        "Address of a Ray cluster: auto, host:port or ray://host:port",
    ),
    "workers": ("workers", int, "Number of parallel clients on Ray"),
    "output_dir": ("output-dir", str, "Parent folder of run folders"),
}
