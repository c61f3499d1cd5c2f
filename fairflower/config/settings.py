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
        "What is learnt: a name from `fairflower list tasks` with its arguments, or module:Class. "
        "Empty means the data set's own task.",
    ] = ""
    dir: Annotated[
        str,
        EXECUTION,
        "Folder of local data. Empty means $FAIRFLOWER_DATA or, if this variable is not set, a "
        "download from the Hugging Face Hub.",
    ] = ""
    domains: Annotated[
        str, "Comma-separated list of domains to use. Empty means all domains of the data set."
    ] = ""
    held_out: Annotated[
        str,
        "Domain to hold out: no client has its data, and the server tests on it as an unseen "
        "domain. Empty means none.",
    ] = ""
    groups: Annotated[
        str,
        "Sensitive attribute for measuring group fairness: sex, health or age in the embedded "
        "tables, or an array or column in your own files. Empty means none.",
    ] = ""
    patient: Annotated[
        str,
        "Column, or array of an npz file, with the patient, family or device of each example, "
        "whose examples are kept together in one split and one client. Empty means none.",
    ] = ""
    target: Annotated[
        str,
        "Column of a table that is predicted, or several, separated by commas. Empty means those "
        "that the schema calls targets.",
    ] = ""
    features: Annotated[
        str,
        "Comma-separated columns of a table by which the target is predicted. Empty means all "
        "others that all domains have.",
    ] = ""
    drop: Annotated[
        str, "Comma-separated columns of a table that are not used. Empty means none."
    ] = ""
    domain_column: Annotated[
        str,
        "Column with the domain of each row, if all domains of a table are in one file. Empty "
        "means a file for each domain.",
    ] = ""
    split: Annotated[
        str,
        "Column of a table with the split of each row, train or test. Empty means that every fifth "
        "row or patient of each class is a test example.",
    ] = ""
    time: Annotated[
        str, "Column of a table with times, for data.task = survival. Empty means none."
    ] = ""
    event: Annotated[
        str,
        "Column of a table that says whether a time is an event's (1) or the end of the "
        "observation (0). Empty means none.",
    ] = ""
    schema: Annotated[
        str,
        "File in data.dir that says what the columns of a table mean. Empty means schema.toml, if "
        "it is there.",
    ] = ""
    smallest_group: Annotated[
        PositiveCount,
        EXECUTION,
        "Smallest number of a site's examples that share a name, or of which it sends numbers.",
    ] = 5
    clients_per_domain: Annotated[
        Count,
        "Clients per domain; ignored if imbalance-factor > 1. 0 means 5, as in papers, or 1 for "
        "your own data.",
    ] = 0
    fraction: Annotated[
        Fraction,
        "Fraction of a domain's training examples for each client. 0: the data set's default.",
    ] = 0.0
    examples_per_client: Annotated[
        Count,
        "Number of training examples per client, as an alternative to data.fraction. 0 "
        "means that data.fraction applies.",
    ] = 0
    seed: Annotated[Count, "Random seed for the partition and the clients' data."] = 0
    image_size: Annotated[
        int,
        Range(0, 1024),
        "Width and height of the images, in pixels. 0 means the data set's default.",
    ] = 0
    augment: Annotated[bool, "Whether to apply the data set's augmentation during training."] = True
    test_examples: Annotated[
        Count, "Number of test examples per domain, drawn once at random (data.seed). 0 means all."
    ] = 0
    dirichlet_alpha: Annotated[
        float,
        Range(0, 1e6),
        "Concentration parameter alpha of a Dirichlet partition of each domain, which gives the "
        "clients different label distributions and sizes (FedISM: 1.0). 0 means a random "
        "partition into equal parts.",
    ] = 0.0
    corrupted_clients: Annotated[
        Count,
        "Number of clients per domain whose images are corrupted: the last clients of each "
        "domain. 0 means none.",
    ] = 0
    corruption: Annotated[
        Literal["noise", "blur"],
        "Type of corruption: noise (Gaussian noise) or blur (motion blur).",
    ] = "noise"
    severity: Annotated[
        int, Range(1, 5), "Severity of the corruption, 1 to 5 (FedISM: noise 3; its code: blur 1)."
    ] = 3
    redraw: Annotated[
        str,
        "Draw the test examples of your own data with data.seed: rows (with data.patient, whole "
        "patients), or by a column or array. Empty means no, but rows for several federations if "
        "nothing fixes them.",
    ] = ""
    validation_fraction: Annotated[
        Fraction,
        "Fraction of each client's training examples to hold out for validation, for example to "
        "choose hyper-parameters. They are drawn at random with data.seed. 0 means none.",
    ] = 0.0
    validation_examples: Annotated[
        Count,
        "Number of validation examples per domain (with corrupted-clients: for its clean and its "
        "corrupted clients each), as an alternative to validation-fraction. "
        "They are drawn at random with data.seed from the training examples that no client has; "
        "if there are fewer, all are used. 0 means none.",
    ] = 0
    imbalance_factor: Annotated[
        PositiveCount,
        "Domain imbalance: the first domain has this many times as many clients as the last, "
        "and the numbers in between form a geometric sequence (FedGCR's DIF: 1, 5, 10). 1 means "
        "clients-per-domain in every domain.",
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
        "Model: a name from `fairflower list models`, or module:Class. Default for features: mlp; "
        "for token ids: embedding-bag, and gpt for next-token; for masks: unet.",
    ] = "cnn"
    weights: Annotated[
        str,
        "Pretrained weights. For prompt-vit-*, vpt-vit-* and resnet18: a .safetensors or .pth "
        "file, or imagenet; empty means the model's default weights, which are random for "
        "resnet18. For smp:NAME: a file; empty means random weights. For timm:NAME and hf:NAME: "
        "empty means the pretrained weights in the cache or folder, and random means random "
        "weights; timm:NAME also accepts a file.",
    ] = ""
    adapter: Annotated[
        str,
        "Adapter for a frozen timm:NAME or hf:NAME network, such as "
        "lora:r=8:alpha=16:targets=qkv,proj; only the adapter and the head are trained and "
        "sent. Empty means that the whole network is trained and sent.",
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

    local_epochs: Annotated[
        Count, "Number of local epochs: passes over a client's data in each round."
    ] = 5
    batch_size: Annotated[
        PositiveCount, "Number of examples per training step (FedHEAL on Digits: 64)."
    ] = 64
    optimizer: Annotated[
        Literal["sgd", "adam", "adamw"],
        "Optimizer: sgd, adam or adamw, the latter two with betas 0.9 and 0.999. Its state is "
        "reset in every round.",
    ] = "sgd"
    lr: Annotated[Amount, "Learning rate."] = 0.05
    lr_schedule: Annotated[
        Literal["constant", "linear", "cosine", "step"],
        "Learning rate schedule over rounds. constant: lr in every round; linear and cosine: decay "
        "from lr to lr-final times lr; step: multiplication by lr-factor every lr-every rounds.",
    ] = "constant"
    lr_final: Annotated[
        Fraction,
        "Final learning rate of the linear and cosine schedules, as a fraction of lr; the "
        "schedules reach it one round after the last.",
    ] = 0.0
    lr_factor: Annotated[
        float,
        Range(above=0, high=1),
        "Factor by which the step schedule multiplies the learning rate.",
    ] = 0.1
    lr_every: Annotated[
        PositiveCount, "Number of rounds between two steps of the step schedule."
    ] = 10
    lr_warmup: Annotated[
        Count,
        "Number of rounds of linear warm-up, which starts at lr / (lr-warmup + 1); lr-schedule "
        "begins after the warm-up. 0 disables it.",
    ] = 0
    momentum: Annotated[Fraction, "Momentum of sgd; adam and adamw ignore it."] = 0.9
    weight_decay: Annotated[
        Amount,
        "Weight decay: an L2 penalty for sgd and adam, and decoupled weight decay for adamw.",
    ] = 1e-5
    sharpness: Annotated[
        Literal["none", "sam", "gsam"],
        "Sharpness-aware minimization: none, sam, or gsam (FedISM's SALT).",
    ] = "none"
    rho: Annotated[Amount, "Perturbation radius of sam and gsam (FedISM: 0.05)."] = 0.05
    alpha: Annotated[Amount, "Weight of the surrogate gap in gsam (FedISM: 0.1)."] = 0.1
    logit_adjustment: Annotated[
        bool,
        "Whether to add the logarithm of the client's class frequencies to the logits "
        "during training (FedISM).",
    ] = False
    device: Annotated[
        str, "Device for training and evaluation: auto, cpu, cuda, cuda:N or mps."
    ] = "auto"
    precision: Annotated[
        Literal["float32", "bf16"],
        "Floating-point precision of local training steps: float32, or bf16 (autocast to "
        "bfloat16). Weights, optimizer states, tests, measurements and messages are always "
        "float32. (On NVIDIA GPUs convolutions use TF32, PyTorch's default.)",
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
        "Radius for measuring sharpness (FedISM: 0.05). train.rho is the radius for training.",
    ] = 0.05


@dataclass(frozen=True)
class ObserveConfig:
    """Additional diagnostics that the server records."""

    window: Annotated[
        Count,
        "Number of rounds over which the report shows the sign consistency of each client's "
        "updates (FedHEAL, Fig. 2: 10 and 100). 0 disables it.",
    ] = 0


@dataclass(frozen=True)
class StopConfig:
    """Early stopping."""

    patience: Annotated[
        Count,
        "Stop after this many rounds without an improvement in the loss; 0 disables early "
        "stopping. The loss is the mean over domains on the server's validation examples; "
        "without them, it is the train_loss in history.csv.",
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
        "Criterion for the best round, whose model is also kept (best.safetensors): the primary "
        "score on validation examples, as the average over domains, in the worst domain, or in the "
        "worst half of the domains. auto: average with stop.patience and validation examples, "
        "else none.",
    ] = "auto"


@dataclass(frozen=True)
class ParticipationConfig:
    """Selection and availability of clients."""

    policy: Annotated[
        str,
        "Policy that selects the clients of each round: uniform, by-examples, round-robin, "
        "power-of-choice:d=10, or module:Class. With by-examples, fedavg counts examples twice.",
    ] = "uniform"
    availability: Annotated[
        str,
        "Which clients are available in each round. always: all clients; "
        "markov:leave=0.1:back=0.5: clients leave and come back with these probabilities; or a "
        "CSV file with the columns round and client.",
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
        "Cap on the norm of a client's update; larger updates are scaled down. 0 means no cap.",
    ] = 0.0
    clip_update_median: Annotated[
        Amount,
        "Cap on the norm of a client's update, as a multiple of the round's median norm; larger "
        "updates are scaled down. 0 means no cap.",
    ] = 0.0


#: Server optimizer -> default of its learning rate, as in Flower.
SERVER_LR = {"sgd": 1.0, "momentum": 1.0, "adam": 0.1, "yogi": 0.01, "adagrad": 0.1}


@dataclass(frozen=True)
class ServerConfig:
    """The server's step along the merged update, for every strategy."""

    optimizer: Annotated[
        Literal["none", "sgd", "momentum", "adam", "yogi", "adagrad"],
        "Server optimizer: sgd, momentum (FedAvgM), adam, yogi or adagrad (FedAdam, ...) steps "
        "along the merged model minus the one before; none takes the merged model.",
    ] = "none"
    lr: Annotated[
        Amount,
        "Server learning rate. 0 means Flower's: 1 for sgd and momentum, 0.1 for adam and adagrad, "
        "0.01 for yogi.",
    ] = 0.0
    momentum: Annotated[
        float,
        Range(0, 0.9999),
        "Beta of momentum, and beta_1 of adam and yogi; the other server optimizers ignore it.",
    ] = 0.9
    tau: Annotated[float, Range(above=0), "Adaptivity of adam, yogi and adagrad."] = 1e-3
    beta_2: Annotated[float, Range(0, 0.9999), "Beta_2 of adam and yogi."] = 0.99


@dataclass(frozen=True)
class EvaluateConfig:
    """Evaluation of the global model."""

    by: Annotated[
        Literal["server", "clients", "both"],
        "Where the global model is tested. server: on the server, on the test set of every "
        "domain (as in the papers); clients: on each client, on its own test data; both: on the "
        "server and on the clients.",
    ] = "server"
    model: Annotated[
        str,
        "Model that is tested without training: a run folder, or its best.safetensors or another "
        "file. Empty trains a model. fairflower evaluate sets it, with the run's other settings.",
    ] = ""
    every: Annotated[
        PositiveCount, "Number of rounds between two tests. The last model is always tested."
    ] = 1
    batch_size: Annotated[PositiveCount, "Number of examples per forward pass in a test."] = 500
    test: Annotated[
        bool, "Whether to test on test examples. false: only on validation examples, as trials do."
    ] = True
    auc: Annotated[
        bool, "Whether the server also computes the AUC. For medical data sets it always does."
    ] = False
    adabn: Annotated[
        bool,
        "Whether the server also tests on the held-out domain with BatchNorm statistics that "
        "are estimated from its unlabeled test examples (AdaBN).",
    ] = False
    margin: Annotated[
        Amount,
        "Margin of equivalence in reports, which a run declares before it begins: a difference "
        "between the worst domains in the primary score's unit, in points for fractions; half of "
        "it for STD. 0 means 2 points or, for a score that is no fraction, the task's margin or "
        "2 % of the average of the method compared with.",
    ] = 0.0
    metrics: Annotated[
        str, "Comma-separated list of your own metrics, each as module:function. Empty means none."
    ] = ""
    metric_errors: Annotated[
        Literal["stop", "skip"],
        EXECUTION,
        "What to do if one of your own metrics fails on a domain. stop: end the run; skip: "
        "leave the metric out for this domain in this round.",
    ] = "stop"
    keep_examples: Annotated[
        bool,
        EXECUTION,
        "Whether the server stores a few test examples (masks or numbers) for figures of reports.",
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
