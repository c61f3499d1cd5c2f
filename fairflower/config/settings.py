"""Tables of a run config: each setting with its default, help text and allowed range."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from fairflower.arguments import EXECUTION, ArgumentSpec, Range
from fairflower.config.methods import DataSpec, ModelSpec
from fairflower.config.text import argument_to_key, split_spec
from fairflower.errors import ConfigError, is_text, quoted
from fairflower.registry import RANDOM_WEIGHTS

Count = Annotated[int, Range(0)]
PositiveCount = Annotated[int, Range(1)]
Amount = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(0, 1)]
Engine = Literal["auto", "ray", "flower", "inline"]

#: Settings for tables, which need not be in older runs.
OF_TABLES = ("target", "features", "drop", "domain_column", "split", "time", "event", "schema")

#: The largest integer that TOML and Flower's messages can represent.
MAX_INT = 2**63 - 1


def setting_specs(table: type) -> dict[str, ArgumentSpec]:
    """Return the settings of a table by key, with defaults, help texts and allowed values.

    A setting is a field with an annotation: type, `Range` of a number, `EXECUTION` if it does not
    affect the result, and a help text: what it controls, its unit, and the meaning of 0 or "".
    """
    hints = get_type_hints(table, include_extras=True)
    fields = [f for f in dataclasses.fields(table) if f.default is not dataclasses.MISSING]
    return {argument_to_key(f.name): ArgumentSpec.of(f.default, hints[f.name]) for f in fields}


def checked(key: str, value: Any, spec: ArgumentSpec) -> Any:
    """Convert a value to its key's type; raise ``ConfigError`` if it is not allowed."""
    if spec.text and not spec.number and type(value) in (int, float):
        raise ConfigError(
            f"{key} = {quoted(value)}: expected text, got {type(value).__name__}. On a command "
            f"line, quote it twice: '{key}=\"{quoted(value)}\"'."
        )
    text = isinstance(value, str)
    wrong = ""
    if text and key == "run-name" and (Path(value).name != value or value == ".."):
        wrong = "the name of a folder, not a path"
    elif text and not is_text(value):
        wrong = "text that UTF-8 can encode"
    elif spec.whole and isinstance(value, int) and value > MAX_INT:
        wrong = f"at most {MAX_INT}"
    if wrong:
        raise ConfigError(f"{key} = {quoted(value)}: expected {wrong}.")
    spec.check(key, value)
    return float(value) if spec.number and not (text or spec.whole) else value


@dataclass(frozen=True)
class DataConfig:
    """Data set and its partition among clients."""

    name: Annotated[str, "Data set: a name from `fairflower list data`, or module:Class."] = (
        "uci-digits"
    )
    task: Annotated[
        str,
        "What is learnt: a name from `fairflower list tasks`, or module:Class. Empty means the "
        "data set's own task.",
    ] = ""
    dir: Annotated[
        str,
        EXECUTION,
        "Folder of local data. Empty means $FAIRFLOWER_DATA or, without it, a download from the "
        "Hugging Face Hub.",
    ] = ""
    domains: Annotated[str, "Comma-separated list of domains to use. Empty means all."] = ""
    held_out: Annotated[
        str,
        "Domain that no client has, and on which the server tests. Empty means none.",
    ] = ""
    groups: Annotated[
        str,
        "Sensitive attribute for group fairness: sex, health or age in the embedded tables, or "
        "a column. Empty means none.",
    ] = ""
    patient: Annotated[
        str,
        "Column with the patient, family or device, whose examples stay in one split and at one "
        "client. Empty means none.",
    ] = ""
    target: Annotated[
        str,
        "Comma-separated columns that are predicted. Empty means the schema's targets.",
    ] = ""
    features: Annotated[
        str,
        "Comma-separated columns by which the target is predicted. Empty means all others that "
        "all domains have.",
    ] = ""
    drop: Annotated[str, "Comma-separated columns that are not used. Empty means none."] = ""
    domain_column: Annotated[
        str,
        "Column with the domain of each row, if a table is in one file. Empty means a file for "
        "each domain.",
    ] = ""
    split: Annotated[
        str,
        "Column with the split, train or test. Empty means that every fifth row or patient of a "
        "class is a test example.",
    ] = ""
    time: Annotated[str, "Column with times, for survival. Empty means none."] = ""
    event: Annotated[
        str,
        "Column that says whether a time is an event's (1) or the end of the observation (0). "
        "Empty means none.",
    ] = ""
    schema: Annotated[
        str,
        "File in data.dir that says what columns mean. Empty means schema.toml, if there is one.",
    ] = ""
    smallest_group: Annotated[
        PositiveCount,
        EXECUTION,
        "Smallest number of a site's examples that share a name, or of which it sends numbers.",
    ] = 5
    clients_per_domain: Annotated[
        Count,
        "Clients per domain, unless imbalance-factor is above 1. 0 means 5, or 1 for your own "
        "data.",
    ] = 0
    fraction: Annotated[
        Fraction,
        "Fraction of a domain's training examples for each client. 0: the data set's default.",
    ] = 0.0
    examples_per_client: Annotated[
        Count,
        "Number of training examples per client. 0 means that data.fraction applies.",
    ] = 0
    seed: Annotated[Count, "Random seed for the partition and the clients' data."] = 0
    image_size: Annotated[
        int,
        Range(0, 1024),
        "Width and height of images in pixels. 0 means the data set's default.",
    ] = 0
    augment: Annotated[bool, "Whether to apply the data set's augmentation during training."] = True
    test_examples: Annotated[
        Count, "Number of test examples per domain, drawn with data.seed. 0 means all."
    ] = 0
    dirichlet_alpha: Annotated[
        float,
        Range(0, 1e6),
        "Alpha of a Dirichlet partition of each domain, which gives clients different labels "
        "and sizes (FedISM: 1.0). 0 means equal parts at random.",
    ] = 0.0
    corrupted_clients: Annotated[
        Count,
        "Number of clients per domain, the last ones, whose images are corrupted. 0 means none.",
    ] = 0
    corruption: Annotated[
        Literal["noise", "blur"],
        "Type of corruption: noise (Gaussian) or blur (motion).",
    ] = "noise"
    severity: Annotated[
        int, Range(1, 5), "Severity of the corruption, 1 to 5 (FedISM: noise 3; its code: blur 1)."
    ] = 3
    redraw: Annotated[
        str,
        "Draw the test examples of your own data with data.seed: rows (or whole patients), or "
        "by a column. Empty means rows for several federations if nothing fixes them.",
    ] = ""
    validation_fraction: Annotated[
        Fraction,
        "Fraction of each client's training examples that are validation examples instead. 0 "
        "means none.",
    ] = 0.0
    validation_examples: Annotated[
        Count,
        "Number of validation examples per domain, of training examples that no client has, as "
        "an alternative to validation-fraction; all if there are fewer. 0 means none.",
    ] = 0
    imbalance_factor: Annotated[
        PositiveCount,
        "The first domain has this many times as many clients as the last, with a geometric "
        "sequence between (FedGCR's DIF: 1, 5, 10). 1 means clients-per-domain.",
    ] = 1

    def __post_init__(self) -> None:
        """Store the number of clients that 0 stands for, so that stored runs have the number.

        Raises ``ConfigError`` if ``patient`` and ``redraw`` name two columns.
        """
        if self.patient and self.redraw not in ("", "rows", self.patient):
            raise ConfigError(
                f"data.patient = {self.patient!r}, data.redraw = {self.redraw!r}: these are two "
                "columns. Set data.redraw to rows, which then draws whole patients."
            )
        if not self.clients_per_domain:
            clients = 1 if DataSpec.read(self.name).own else 5
            object.__setattr__(self, "clients_per_domain", clients)

    @property
    def unit(self) -> tuple[str, str]:
        """The setting that names the column of examples that stay together, and the column."""
        if self.patient:
            return "data.patient", self.patient
        return "data.redraw", "" if self.redraw == "rows" else self.redraw

    @property
    def validated(self) -> bool:
        """Whether examples are held out for validation."""
        return bool(self.validation_fraction or self.validation_examples)


@dataclass(frozen=True)
class ModelConfig:
    """Network and its pretrained weights."""

    name: Annotated[
        str,
        "Model: a name from `fairflower list models`, or module:Class. Default for features: "
        "mlp; for token ids: embedding-bag, and gpt for next-token; for masks: unet.",
    ] = "cnn"
    weights: Annotated[
        str,
        "Pretrained weights: a file, imagenet (prompt-vit-*, vpt-vit-*, resnet18), or random "
        "(timm:NAME, hf:NAME). Empty means those in the cache or folder for timm:NAME and "
        "hf:NAME, random weights for resnet18 and smp:NAME.",
    ] = ""
    adapter: Annotated[
        str,
        "Adapter for a frozen timm:NAME or hf:NAME network, such as "
        "lora:r=8:alpha=16:targets=qkv,proj. Empty means that the whole network is trained and "
        "sent.",
    ] = ""

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
        network = ModelSpec.read(self.name).factory
        if self.adapter or not getattr(network, "sent_whole", False):
            return self
        adaptable = getattr(network, "adaptable", False)
        return dataclasses.replace(self, weights=RANDOM_WEIGHTS if adaptable else "")


@dataclass(frozen=True)
class TrainConfig:
    """Settings for local training that all methods share."""

    local_epochs: Annotated[Count, "Number of passes over a client's data in each round."] = 5
    batch_size: Annotated[
        PositiveCount, "Number of examples per training step (FedHEAL on Digits: 64)."
    ] = 64
    optimizer: Annotated[
        Literal["sgd", "adam", "adamw"],
        "Optimizer: sgd, adam or adamw, which begins anew in every round.",
    ] = "sgd"
    lr: Annotated[Amount, "Learning rate."] = 0.05
    lr_schedule: Annotated[
        Literal["constant", "linear", "cosine", "step"],
        "Learning rate over rounds. linear, cosine: decay from lr to lr-final times lr; step: "
        "multiplication by lr-factor every lr-every rounds.",
    ] = "constant"
    lr_final: Annotated[
        Fraction,
        "Final learning rate of linear and cosine, as a fraction of lr.",
    ] = 0.0
    lr_factor: Annotated[
        float,
        Range(above=0, high=1),
        "Factor of each step of the step schedule.",
    ] = 0.1
    lr_every: Annotated[PositiveCount, "Number of rounds between two steps."] = 10
    lr_warmup: Annotated[
        Count,
        "Number of rounds of linear warm-up, which starts at lr / (lr-warmup + 1), before "
        "lr-schedule begins. 0 disables it.",
    ] = 0
    momentum: Annotated[Fraction, "Momentum of sgd; adam and adamw ignore it."] = 0.9
    weight_decay: Annotated[
        Amount,
        "Weight decay: an L2 penalty for sgd and adam, decoupled for adamw.",
    ] = 1e-5
    sharpness: Annotated[
        Literal["none", "sam", "gsam"],
        "Sharpness-aware minimization: none, sam, or gsam (FedISM's SALT).",
    ] = "none"
    rho: Annotated[Amount, "Perturbation radius of sam and gsam (FedISM: 0.05)."] = 0.05
    alpha: Annotated[Amount, "Weight of the surrogate gap in gsam (FedISM: 0.1)."] = 0.1
    logit_adjustment: Annotated[
        bool,
        "Whether the logits get the logarithm of the client's class frequencies during training "
        "(FedISM).",
    ] = False
    device: Annotated[
        str, "Device for training and evaluation: auto, cpu, cuda, cuda:N or mps."
    ] = "auto"
    precision: Annotated[
        Literal["float32", "bf16"],
        "Precision of local training steps: float32, or bf16 (autocast to bfloat16).",
    ] = "float32"

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

    memory_mb: Annotated[int, Range(1, 2**30), "Memory limit for per-sample gradients, in MiB."] = (
        512
    )
    rho: Annotated[
        Amount,
        "Radius for measuring sharpness (FedISM: 0.05).",
    ] = 0.05


@dataclass(frozen=True)
class ObserveConfig:
    """Additional diagnostics that the server records."""

    window: Annotated[
        Count,
        "Number of rounds of the report's sign consistency of updates (FedHEAL, Fig. 2: 10 and "
        "100). 0 disables it.",
    ] = 0


@dataclass(frozen=True)
class StopConfig:
    """Early stopping."""

    patience: Annotated[
        Count,
        "Stop after this many rounds without an improvement in the loss on validation examples "
        "or, without them, in the training loss; 0 disables early stopping.",
    ] = 0
    min_delta: Annotated[Amount, "Minimum decrease in the loss that counts as an improvement."] = (
        0.0
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints for resuming stopped or killed runs."""

    every: Annotated[
        Count, EXECUTION, "Number of rounds between two checkpoints. 0 disables checkpoints."
    ] = 1
    keep: Annotated[
        PositiveCount,
        EXECUTION,
        "Number of recent checkpoints to keep. A completed run keeps one, unless keep is above 2.",
    ] = 2
    best: Annotated[
        Literal["auto", "none", "average", "worst", "worst-half"],
        EXECUTION,
        "Criterion for the best round, whose model is also kept: the primary score on "
        "validation examples, averaged over domains, in the worst domain, or in the worst half "
        "of the domains. auto: average with stop.patience and validation examples.",
    ] = "auto"


@dataclass(frozen=True)
class ParticipationConfig:
    """Selection and availability of clients."""

    policy: Annotated[
        str,
        "Policy that selects the clients of each round: uniform, by-examples, round-robin, "
        "power-of-choice:d=10, or module:Class.",
    ] = "uniform"
    availability: Annotated[
        str,
        "Which clients are available: always; markov:leave=0.1:back=0.5, where clients leave "
        "and come back with these probabilities; or a CSV file of rounds and clients.",
    ] = "always"


@dataclass(frozen=True)
class BoundConfig:
    """Bounds on the influence of a single client, for every strategy."""

    max_client_weight: Annotated[
        float,
        Range(above=0, high=1),
        "Cap on a client's weight; the excess goes to the other clients. 1 means no cap.",
    ] = 1.0
    clip_update_norm: Annotated[
        Amount,
        "Cap on the norm of a client's update. 0 means no cap.",
    ] = 0.0
    clip_update_median: Annotated[
        Amount,
        "Cap on the norm of a client's update, as a multiple of the round's median norm. 0 "
        "means no cap.",
    ] = 0.0


#: Server optimizer -> default of its learning rate, as in Flower.
SERVER_LR = {"sgd": 1.0, "momentum": 1.0, "adam": 0.1, "yogi": 0.01, "adagrad": 0.1}


@dataclass(frozen=True)
class ServerConfig:
    """The server's step along the merged update, for every strategy."""

    optimizer: Annotated[
        Literal["none", "sgd", "momentum", "adam", "yogi", "adagrad"],
        "Server optimizer: sgd, momentum (FedAvgM), adam, yogi or adagrad (FedAdam, ...) steps "
        "along the merged model minus the one before.",
    ] = "none"
    lr: Annotated[
        Amount,
        "Server learning rate. 0 means Flower's: 1 for sgd and momentum, 0.1 for adam and "
        "adagrad, 0.01 for yogi.",
    ] = 0.0
    momentum: Annotated[
        float,
        Range(0, 0.9999),
        "Beta of momentum, and beta_1 of adam and yogi.",
    ] = 0.9
    tau: Annotated[float, Range(above=0), "Adaptivity of adam, yogi and adagrad."] = 1e-3
    beta_2: Annotated[float, Range(0, 0.9999), "Beta_2 of adam and yogi."] = 0.99


@dataclass(frozen=True)
class EvaluateConfig:
    """Evaluation of the global model."""

    by: Annotated[
        Literal["server", "clients", "both"],
        "Where the global model is tested: server, on the test set of every domain (as in the "
        "papers); clients, each on its own test data; or both.",
    ] = "server"
    model: Annotated[
        str,
        "Model to test without training: a run folder or a file. Empty trains a model.",
    ] = ""
    every: Annotated[
        PositiveCount, "Number of rounds between two tests. The last model is always tested."
    ] = 1
    batch_size: Annotated[PositiveCount, "Number of examples per forward pass in a test."] = 500
    test: Annotated[bool, "Whether to test on test examples, not only on validation examples."] = (
        True
    )
    auc: Annotated[
        bool, "Whether the server also computes the AUC, as always for medical data sets."
    ] = False
    adabn: Annotated[
        bool,
        "Whether the server also tests on the held-out domain with BatchNorm statistics of its "
        "unlabeled test examples (AdaBN).",
    ] = False
    margin: Annotated[
        Amount,
        "Margin of equivalence in reports for the worst domain, in the score's unit or points; "
        "half of it for STD. 0 means 2 points or, for a score that is no fraction, the task's "
        "margin or 2 %.",
    ] = 0.0
    metrics: Annotated[
        str, "Comma-separated list of your own metrics, each module:function. Empty means none."
    ] = ""
    metric_errors: Annotated[
        Literal["stop", "skip"],
        EXECUTION,
        "What to do if one of your own metrics fails. stop: end the run; skip: leave it out in "
        "this test.",
    ] = "stop"
    keep_examples: Annotated[
        bool,
        EXECUTION,
        "Whether the server stores a few test examples for figures of reports.",
    ] = True


#: Short name (of a command's option or a Python argument) -> run config key.
SHORT_NAMES = {
    "data": "data.name",
    "data_dir": "data.dir",
    "model": "model.name",
    "rounds": "num-server-rounds",
    "fraction_train": "fraction-train",
    "epochs": "train.local-epochs",
    "lr": "train.lr",
    "seed": "seed",
    "engine": "engine",
    "ray_address": "ray-address",
    "workers": "workers",
    "output_dir": "output-dir",
}
