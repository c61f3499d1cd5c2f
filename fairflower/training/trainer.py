"""The base class of all trainers."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fairflower.arguments import ArgumentSpec, Configurable
from fairflower.config import TrainConfig
from fairflower.config.methods import output_dims
from fairflower.data import Augment, Federation, Split
from fairflower.errors import ConfigError
from fairflower.files import Arrays
from fairflower.models import (
    copy_arrays,
    exchanged_arrays,
    make_dense,
    require_classifier,
    set_arrays,
    to_numpy,
    trainable,
)
from fairflower.numerics.scores import as_numbers
from fairflower.seeds import derive_seed
from fairflower.tasks import Task
from fairflower.training.batches import ClientData, Examples, examples_of
from fairflower.training.device import float64_on
from fairflower.training.modes import (
    at_least_float32,
    no_stats_update,
    reproducible,
    use_running_stats,
)


class TrainerSpec(Configurable):
    """Declarations of a trainer, as class attributes and class methods."""

    #: Paper of the method, for ``fairflower list``.
    paper: ClassVar[str] = ""
    #: Subclasses of `Exchange` whose arrays are sent with the model.
    exchanges: ClassVar[tuple[type[Any], ...]] = ()
    #: The ``train.optimizer`` that the method needs; empty allows any.
    optimizer: ClassVar[str] = ""
    #: The models that the method can train; empty allows any.
    models: ClassVar[tuple[str, ...]] = ()
    #: Kinds of examples for training, "images", "features" or "tokens"; empty allows any.
    kinds: ClassVar[tuple[str, ...]] = ()
    #: What the method needs of the task: "classes", a "head" of the network for a vector of outputs
    #: (`fairflower.models.Classifier`), or nothing.
    needed: ClassVar[str] = ""
    #: The method's own sharpness-aware steps, "sam" or "gsam"; None uses ``train.sharpness``.
    sharpness: ClassVar[str | None] = None
    #: What a mean that a client returns is over, as in ``Exchange.mean_of``, or "cluster".
    mean_of: ClassVar[str] = ""
    #: Why secure aggregation does not support the method; empty if it does.
    secure_aggregation_problem: ClassVar[str] = ""

    @classmethod
    def argument_specs(cls) -> Mapping[str, ArgumentSpec]:
        """Return the arguments of the method, and those of its exchanges that declare a range."""
        specs = dict(super().argument_specs())
        for exchange in cls.exchanges:
            for name, argument in exchange.argument_specs().items():
                if argument.bounded:
                    specs.setdefault(name, argument)
        return specs

    @classmethod
    def make_exchanges(cls, arguments: Mapping[str, Any]) -> list[Any]:
        """Make the method's exchanges, each with the arguments that it accepts."""
        return [exchange.made_with(arguments) for exchange in cls.exchanges]

    @classmethod
    def adapt(cls, model: nn.Module, federation: Federation, **arguments: Any) -> None:
        """Adapt a network before the clients and the server use it; by default it is unchanged."""

    @classmethod
    def local_arrays(cls, model: nn.Module) -> Sequence[str]:
        """Return the names of each client's own arrays; see `LocalArraysTrainer`."""
        return ()

    @classmethod
    def run_warning(cls, model: nn.Module, by: str) -> str:
        """Return a warning about a run with this network and ``evaluate.by``, or ""."""
        return ""

    @classmethod
    def check_model(cls, model: str) -> None:
        """Raise ``ConfigError`` if the method cannot train a model."""
        family = f"{model.partition(':')[0]}:NAME"
        if cls.models and model not in cls.models and family not in cls.models:
            raise ConfigError(
                f"model.name = {model!r}: {cls.__name__} trains {' or '.join(cls.models)}. "
                "Set one of these, or choose another client.name."
            )

    @classmethod
    def check_kind(cls, kind: str) -> None:
        """Raise ``ConfigError`` if the method cannot train on this kind of examples."""
        if cls.kinds and kind not in cls.kinds:
            raise ConfigError(
                f"{cls.__name__} trains on {' or '.join(cls.kinds)}, but the data are {kind}. "
                "Choose another client.name, or another data.name."
            )

    @classmethod
    def check_task(cls, task: Task, kind: str, settings: TrainConfig | None = None) -> None:
        """Raise ``ConfigError`` if the method or a setting is not defined for a task.

        ``kind`` is that of the examples.
        """
        reason = ""  # a "head" is of a vector of outputs
        if cls.needed == "classes" and not task.classes:
            reason = "one class per example as target"
        elif cls.needed and output_dims(task, kind) > 1:
            reason = "features of an example and a linear head"
        if reason:
            raise ConfigError(
                f"{cls.__name__} needs {reason}, which the task {task} of the data lacks. Choose "
                "another client.name, such as sgd, fedprox or fedbn."
            )
        if settings and settings.logit_adjustment and not task.classes:
            raise ConfigError(
                f"train.logit-adjustment is defined for classes, but the task is {task}. Set it to "
                "false."
            )

    @classmethod
    def check_steps(cls, settings: TrainConfig) -> None:
        """Raise ``ConfigError`` if the method does not support the optimizer or its steps."""
        if cls.optimizer not in ("", settings.optimizer):
            raise ConfigError(
                f"train.optimizer = {settings.optimizer!r}: {cls.__name__} is defined for "
                f"{cls.optimizer!r} only. Set train.optimizer = {cls.optimizer!r}, or choose "
                "another client.name."
            )
        if cls.sharpness is not None and settings.sharpness != "none":
            raise ConfigError(
                f"train.sharpness = {settings.sharpness!r}: {cls.__name__} has its own "
                "sharpness-aware steps. Set train.sharpness = 'none', or choose another "
                "client.name."
            )


# A direct subclass of Configurable is a base class of methods, whose arguments are shared.
class Trainer(TrainerSpec, Configurable):
    """Base class of all trainers; on its own, it does plain local training.

    A round is ``receive(arrays)``, ``train(server_round)``, ``send()``. The result depends only on
    the received arrays, ``shared``, ``state``, the data, the settings, the seed, the client id and
    the round. It does not depend on the worker, nor on earlier calls. `make_client_app` runs rounds
    for Flower's messages, and `fairflower.classic.client.NumPyTrainer` for classic apps.

    A method is a subclass that overrides some of ``begin``, ``loss``, ``adjust_gradients``,
    ``step`` and ``end``. Its hyper-parameters are keyword arguments of its constructor.

    Parameters
    ----------
    model
        The network, which is moved to ``device``. Server and clients exchange the arrays of its
        state dict (parameters and buffers), with their types (bfloat16 as float32); a `Classifier`
        may exclude some (``Classifier.exchanged_arrays``).
    data
        The client's examples. Raises ``ConfigError`` if the method cannot train on their kind.
    settings
        Epochs, batch size, learning rate, momentum, weight decay and precision. With any precision,
        the arrays of the model, of the optimizer and of ``send`` are float32, as are all
        computations outside of training steps.
    client_id
        The partition id; sent with every reply as ``client-id``.
    seed
        The run's seed, from which the seeds of a client's rounds are derived.
    device
        See `fairflower.clients.choose_device`.

    Attributes
    ----------
    state
        The client's state between rounds, which stays on its machine: a dict of named arrays for
        each part of the state. It is empty in the client's first round. Read it in ``begin``, and
        write it in ``end``.
    shared
        Arrays that the server sent with the model: a dict of named arrays for each exchange.
    returns
        Arrays for the exchanges, which are sent with the trained model. Write them in ``end``.
    steps
        Number of optimizer steps in this round so far.
    round_config
        Config of this round's message.
    num_rounds
        Number of rounds of the run, for methods with a schedule; 0 means unknown.

    Examples
    --------
    >>> from fairflower.testing.federations import SETTINGS, data, tiny_model
    >>> trainer = Trainer(tiny_model(), data(), SETTINGS, client_id=0, seed=0)
    >>> list(trainer.train(server_round=1))
    ['train_loss']

    See Also
    --------
    fairflower.testing.check_trainer : Checks a subclass.
    """

    #: Number of examples per forward pass without training; affects only speed and memory.
    eval_batch_size = 500

    #: Memory for measurements, in MiB; see `fairflower.training.measurements`.
    measure_memory_mb = 512

    #: The user's metrics that a test computes; see `fairflower.registry.user_metrics`.
    user_metrics = ""

    #: Radius of the measured sharpness.
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
        self.check_task(data.task, data.kind, settings)
        self.device = torch.device(device)
        make_dense(model)
        self.model = model.to(self.device)
        self.data = data
        self.task: Task = data.task
        self.settings = settings
        self.client_id = client_id
        self.seed = seed
        self.state: dict[str, Arrays] = {}
        self.shared: dict[str, Arrays] = {}
        self.returns: dict[str, Arrays] = {}
        self.steps = 0
        self.round_config: Mapping[str, Any] = {}
        self.num_rounds = 0

    # --- hooks that a method overrides -------------------------------------------------

    def load_local_arrays(self) -> None:
        """Set arrays that stay with the client, before any measurement, training or test."""

    def begin(self, server_round: int) -> None:
        """Prepare a round of training; the model is the received model."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a batch, by default the task's.

        ``x`` has images [B, C, H, W], features [B, D] or token ids [B, L], and ``y`` targets, for
        classes [B].
        """
        return self.criterion(self.model(x), y)

    def criterion(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the task's mean loss, with logit adjustment of logits [B, classes] if set.

        Raises ``ValueError`` if the output does not fit the task.
        """
        output = at_least_float32(output)
        if self.settings.logit_adjustment:
            output = output + self.log_prior
        return self.task.loss(output, y)

    def adjust_gradients(self) -> None:
        """Change the parameters' ``grad`` before the optimizer's step."""

    def end(self, server_round: int) -> None:
        """Finish a round of training: write ``state`` and ``returns``."""

    def represent(self, x: Tensor) -> Tensor:
        """Return the model's representations of a batch, [B, d]; see `Classifier.represent`."""
        if not hasattr(self.model, "represent"):
            require_classifier(self.model, "A representation")
        return self.model.represent(x)  # type: ignore[operator]

    def test(self) -> dict[str, float]:
        """Test the model on the client's test examples; return ``eval_loss`` and `evaluate`."""
        values = self.evaluate(self.test_examples)
        return {"eval_loss": values.pop("loss"), **values}

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer for a round; its state is discarded after the round."""
        return build_optimizer(self.trainable, self.settings)

    def step(self, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        """Take an optimizer step on a batch; return the batch's mean loss before the step."""
        optimizer.zero_grad()
        loss = self.objective(x, y)
        if not (isinstance(loss, Tensor) and loss.ndim == 0 and loss.requires_grad):
            got = f"{type(loss).__name__} {tuple(getattr(loss, 'shape', ()))}"
            name = type(self).__name__
            raise TypeError(f"{name}.loss returned {got}; expected a scalar with a gradient.")
        loss.backward()  # type: ignore[no-untyped-call]
        sharpness = self.sharpness or self.settings.sharpness
        if sharpness != "none":
            alpha = self.settings.alpha if sharpness == "gsam" else 0.0
            apply_sam_gradient(self.model, lambda: self.objective(x, y), self.settings.rho, alpha)
        self.adjust_gradients()
        optimizer.step()
        return loss.detach()

    # --- helpers for methods -----------------------------------------------------------

    def objective(self, x: Tensor, y: Tensor) -> Tensor:
        """Return ``loss``, computed under autocast if ``train.precision`` is not float32."""
        if self.settings.precision == "float32":
            return self.loss(x, y)
        with torch.autocast(self.device.type, torch.bfloat16):
            return at_least_float32(self.loss(x, y))

    @property
    def trainable(self) -> list[nn.Parameter]:
        """The parameters that are trained, in the model's order."""
        return list(trainable(self.model).values())

    def copy_trainable(self) -> list[Tensor]:
        """Return a copy of the values of ``trainable``."""
        return [p.detach().clone() for p in self.trainable]

    def to_named(self, values: Sequence[Tensor]) -> Arrays:
        """Return values, one per trainable parameter, as arrays on the CPU, by parameter name."""
        named = zip(trainable(self.model), values, strict=True)
        return {name: to_numpy(value) for name, value in named}

    def from_named(self, arrays: Mapping[str, NDArray[Any]]) -> list[Tensor]:
        """Return one tensor per trainable parameter from named arrays; zeros if one is missing."""
        return [
            torch.tensor(arrays[name], device=p.device) if name in arrays else torch.zeros_like(p)
            for name, p in trainable(self.model).items()
        ]

    def to_device(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
        """Return copies of named arrays on the device."""
        return {name: torch.tensor(array, device=self.device) for name, array in arrays.items()}

    def drift(self, values: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield the differences between the trainable parameters and earlier ``values``."""
        return (p - value for p, value in zip(self.trainable, values, strict=True))

    def add_to_gradients(self, terms: Iterable[Tensor], scale: float = 1.0) -> None:
        """Add ``scale`` times each term to the gradient of its trainable parameter."""
        with torch.no_grad():
            for p, term in zip(self.trainable, terms, strict=True):
                if p.grad is not None:
                    p.grad.add_(term, alpha=scale)

    @cached_property
    def log_prior(self) -> Tensor:
        """Logarithm of the local class frequencies [classes]; minus infinity for an absent class.

        Adding it to the logits in training keeps the client's class imbalance out of the model
        (Menon et al., ICLR 2021, with tau = 1). The logit of an absent class has no gradient and
        causes no NaN, because no label is of this class.
        """
        counts = np.bincount(self.data.train.y, minlength=self.data.num_classes)
        with np.errstate(divide="ignore"):
            prior = np.log(counts / counts.sum())
        return torch.tensor(prior, dtype=torch.float32, device=self.device)

    # --- a round -----------------------------------------------------------------------

    def receive(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Copy arrays into the model; raise ``ValueError`` if names, shapes or types differ."""
        set_arrays(self.model, arrays, str(self))

    def train(self, server_round: int) -> dict[str, float]:
        """Train the model on the local data for ``local_epochs``.

        Returns ``train_loss``, the mean loss over all examples, each before its step (Flower's
        convention). With 0 local epochs it is the received model's loss on the training examples
        without augmentation. Raises ``FloatingPointError`` if the loss becomes NaN or infinite.
        """
        self.steps, self.returns = 0, {}
        with reproducible(self.derive_seed(server_round, "torch"), self.device):
            self.begin(server_round)
            loss = self.run_epochs(server_round)
            self.end(server_round)
        return {"train_loss": loss}

    def run_epochs(self, server_round: int) -> float:
        """Run the local epochs of a round; return the mean loss as ``train`` does.

        A second call in the same round uses the same batches.
        """
        epochs, batch_size = self.settings.local_epochs, self.settings.batch_size
        if epochs == 0:
            return self.evaluate(self.train_examples)["loss"]
        draws = torch.Generator().manual_seed(self.derive_seed(server_round, "batches"))
        total = torch.zeros((), dtype=float64_on(self.device), device=self.device)
        self.model.train()
        optimizer = self.make_optimizer()
        for epoch in range(1, epochs + 1):
            for x, y in self.train_examples.epoch_batches(batch_size, draws):
                with use_running_stats(self.model) if len(y) == 1 else nullcontext():
                    total += self.step(optimizer, x, y) * len(y)
                self.steps += 1
            # Once per epoch, because the check waits for the GPU.
            if not math.isfinite(total.item()):
                raise FloatingPointError(
                    f"{self}: the training loss became {total.item()} in epoch {epoch} of "
                    f"round {server_round}. Lower train.lr (now {self.settings.lr})."
                )
        optimizer.zero_grad()  # frees as much memory as the model has
        return total.item() / (epochs * len(self.train_examples))

    def snapshot(self) -> dict[str, Tensor]:
        """Return a copy of the model's arrays on the device, by name."""
        return {
            name: tensor.detach().clone() for name, tensor in exchanged_arrays(self.model).items()
        }

    def send(self) -> Arrays:
        """Return a copy of the model's arrays, by name."""
        return copy_arrays(self.model)

    def evaluate(self, examples: Examples) -> dict[str, float]:
        """Return ``loss``, the task's other means and its scores, without augmentation.

        Scores that are undefined are NaN. For classes these are ``loss``, the mean cross entropy,
        and ``accuracy``, 0 to 1.
        """
        wide = float64_on(self.device)
        totals: dict[str, Tensor] = {}
        kept: list[tuple[Tensor, Tensor]] = []
        self.model.eval()
        with torch.inference_mode():
            for x, y in examples.eval_batches(self.eval_batch_size):
                output = self.model(x)
                for name, value in self.task.sums(output, y).items():
                    value = value.to(wide)
                    totals[name] = totals[name] + value if name in totals else value
                if self.task.keeps == "outputs":
                    kept.append((y, output.to(wide)))
        means = {n: (total.cpu().double() / len(examples)).tolist() for n, total in totals.items()}
        scores = self.task.score(means)
        if kept:
            y, output = (torch.cat(parts) for parts in zip(*kept, strict=True))
            arrays = (v.numpy(force=True) for v in (y, self.task.predict(output), output))
            scores |= self.task.whole(*arrays)
        return as_numbers(means) | scores

    def derive_seed(self, server_round: int, purpose: str) -> int:
        """Derive the seed of this client's random numbers for a purpose in a round."""
        return derive_seed(self.seed, self.client_id, server_round, purpose)

    @cached_property
    def train_examples(self) -> Examples:
        """The training examples on the device."""
        return self.prepared(self.data.train, "training", self.data.augment)

    @cached_property
    def test_examples(self) -> Examples:
        """The test examples on the device."""
        return self.prepared(self.data.test, "test")

    def prepared(self, split: Split, purpose: str, augment: Augment | None = None) -> Examples:
        """Return a split on the device; raise ``ValueError`` if it is empty."""
        data = self.data
        if not len(split.y):
            raise ValueError(f"{self} has no {purpose} {data.kind}. Add some, or omit the client.")
        options: dict[str, Any] = {"device": self.device, "model": self.model}
        options["first_stages"] = data.first_stages
        return examples_of(split, data.mean, data.std, augment, **options)

    def __str__(self) -> str:
        return f"Client {self.client_id}"


def personal_score(trainer: Trainer) -> dict[str, float]:
    """Return the primary score on the test examples, as that of a client's own model."""
    name = trainer.task.primary.name
    return {f"personal_{name}": trainer.evaluate(trainer.test_examples)[name]}


def round_of(config: Mapping[str, Any]) -> int:
    """Return the round in a message's config, under the key of Flower's strategies."""
    if "server-round" not in config:
        raise ValueError(
            "The config sent for training has no 'server-round', from which the client's seeds "
            "are derived. Flower's message strategies send it; for a classic strategy, pass "
            "on_fit_config_fn=lambda r: {'server-round': r}."
        )
    return int(config["server-round"])


def build_optimizer(
    parameters: Sequence[nn.Parameter], settings: TrainConfig
) -> torch.optim.Optimizer:
    """Return torch's optimizer for ``train.optimizer``: ``sgd``, ``adam`` or ``adamw``."""
    arguments = {"lr": settings.lr, "weight_decay": settings.weight_decay, "fused": True}
    if settings.optimizer == "sgd":
        return _eager(torch.optim.SGD)(parameters, momentum=settings.momentum, **arguments)
    adam = torch.optim.AdamW if settings.optimizer == "adamw" else torch.optim.Adam
    return _eager(adam)(parameters, **arguments)


@cache
def _eager(kind: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """Return an optimizer class without its preparations for ``torch.compile``.

    These import torch's compiler when an optimizer is created and at its first step, which takes
    more than a second of CPU time in every process that trains: on a SuperNode, for every message.
    """
    methods: dict[str, Any] = {
        name: inspect.unwrap(getattr(kind, name)) for name in ("add_param_group", "zero_grad")
    }
    methods["step"] = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (kind,), methods)


def apply_sam_gradient(
    model: nn.Module, loss: Callable[[], Tensor], rho: float, alpha: float
) -> None:
    """Replace the gradient at w with the gradient of SAM (alpha = 0) or GSAM.

    Let g be the current gradient. Norms are over all parameters::

        g_p = gradient of the loss at w + rho g / ||g||           (Foret et al., ICLR 2021)
        grad <- g_p - alpha (g - <g, g_p> / ||g_p||^2 g_p)        (Zhuang et al., ICLR 2022)

    GSAM subtracts the part of g that is orthogonal to g_p, so that a step lowers the loss in the
    neighborhood and its gap to the loss at w. The second pass does not change batch norm's
    statistics and step counter. It uses a new dropout mask, as in the authors' code.

    Published optimizers (pytorch_optimizer has both) are not used, because they wrap the optimizer,
    update batch norm statistics twice, restore w by subtraction with rounding errors, and take
    GSAM's radius from a schedule.

    Parameters without a gradient are not perturbed, and w is restored exactly. FedISM (IJCAI 2024)
    uses a constant rho = 0.05 and alpha = 0.1.
    """
    moved = [p for p in model.parameters() if p.grad is not None]
    w = [p.detach().clone() for p in moved]
    g = [p.grad for p in moved if p.grad is not None]
    scale = rho / (nn.utils.get_total_norm(g) + 1e-12)
    with torch.no_grad():
        for p, direction in zip(moved, g, strict=True):
            p.addcmul_(direction, scale)
            p.grad = None
    with no_stats_update(model):
        loss().backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for p, before in zip(moved, w, strict=True):
            p.copy_(before)
        if alpha == 0:
            return
        g_p = [torch.zeros_like(p) if p.grad is None else p.grad for p in moved]
        share = _dot(g, g_p) / (_dot(g_p, g_p) + 1e-24)
        for p, a, b in zip(moved, g, g_p, strict=True):
            p.grad = b - alpha * (a - share * b)


def _dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    return torch.stack([torch.sum(x * y) for x, y in zip(a, b, strict=True)]).sum()
