"""Building models by name, and their common base class `Classifier`."""

import hashlib
import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from fairflower.config.methods import AdapterSpec, ModelSpec
from fairflower.errors import ConfigError
from fairflower.registry import KINDS
from fairflower.tasks import CLASSIFICATION, Task, task_of

logger = logging.getLogger(__name__)

#: Batch and instance norm layers of all dimensions, and norm layers without running statistics.
NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


class Model(nn.Module):
    """Base class of models: what trainers, the server and clients that keep arrays need.

    A constructor gets the number of outputs, such as classes, and the shape of an example:
    (channels, height, width) for an image, (D,) for D features, or (vocabulary, length) for token
    ids from 0 to vocabulary - 1. If it has a parameter ``weights``, it also gets the setting
    ``model.weights``, unless this is empty; if it has a parameter ``output``, it also gets the
    shape of the output for an example, (classes,) for classes. A function that builds a network may
    have the same attributes.
    """

    #: Kinds of examples that the model accepts: "images", "features" or "tokens".
    kinds: ClassVar[tuple[str, ...]] = ("images",)

    #: Numbers of dimensions that an example's output may have: 1 for a vector, such as logits
    #: [classes], 2 for a vector at each place of a text, [L, vocabulary], 3 for one at each pixel,
    #: [C, H, W].
    output_dims: ClassVar[tuple[int, ...]] = (1,)

    #: Whether all arrays are exchanged (without an adapter), so that only the server has to read
    #: ``model.weights``; other processes build the network without.
    sent_whole: ClassVar[bool] = False

    #: Whether ``model.adapter`` can be set: the network has a ``body`` and a method ``freeze``, and
    #: is sent whole without an adapter.
    adaptable: ClassVar[bool] = False

    #: Whether ``features`` begins with a frozen stage, ``first_stage``. The output of this stage
    #: for an image never changes, so it can be cached (`cache_first_stage`).
    two_stages: ClassVar[bool] = False

    #: Whether a single example can be tested; `build` sets this for a user's network. If not, a
    #: last example left over is tested with the batch before it.
    takes_single: bool = True

    def exchanged_arrays(self) -> dict[str, Tensor]:
        """Return the arrays that server and clients exchange; by default, the state dict.

        A model may exclude frozen arrays that all clients have from the start.
        """
        return self.state_dict()


class Classifier(Model):
    """Base class of models with a feature extractor and a linear head, ``head(features(x))``.

    Some clients, such as MOON and FedProto, use the features. A subclass sets ``head`` and defines
    ``features``.

    >>> class Linear(Classifier):
    ...     kinds = ("features",)
    ...     def __init__(self, num_classes, shape):
    ...         super().__init__()
    ...         self.head = nn.Linear(shape[0], num_classes)
    ...     def features(self, x):
    ...         return x
    >>> Linear(num_classes=3, shape=(5,))(torch.zeros(2, 5)).shape
    torch.Size([2, 3])
    """

    head: nn.Linear

    def features(self, x: Tensor) -> Tensor:
        """Map examples, such as normalized images [N, C, H, W], to the head's inputs [N, D]."""
        raise NotImplementedError(f"{type(self).__name__}: define the method features.")

    def forward(self, x: Tensor) -> Tensor:
        """Map examples to logits [N, classes]."""
        return self.head(self.features(x))

    def represent(self, x: Tensor) -> Tensor:
        """Map examples to vectors [N, D] that represent the client; by default, the features."""
        return self.features(x)

    def first_stage(self, x: Tensor) -> Tensor:
        """Return the output of the frozen stage of ``features``, without gradients."""
        raise NotImplementedError(f"{type(self).__name__}: define the method first_stage.")


def require_classifier(model: nn.Module, who: str) -> Classifier:
    """Return the model if it is a `Classifier`; raise ``TypeError`` if not."""
    if not isinstance(model, Classifier):
        raise TypeError(
            f"{who} needs the network's features, which {type(model).__name__} does not define. "
            "Make it a fairflower.models.Classifier that sets head and defines features(x)."
        )
    return model


class PlainNetwork(Classifier):
    """A network whose last linear layer is ``head``; ``body`` is the rest of it."""

    def __init__(self, body: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.body, self.head = body, head

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)


class WholeNetwork(Model):
    """A network without a head, ``body``, whose output is the model's."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def cache_first_stage(x: Tensor, result: Tensor) -> Tensor:
    """Attach the output [N, D] of ``Classifier.first_stage`` to a batch [N, C, H, W].

    The output belongs to this tensor object only. Tensors computed from the batch, for example by
    augmentation, mixing or slicing, do not have it.
    """
    batch: Any = x
    batch.first_stage = (result, _version(x))
    return x


def cached_first_stage(x: Tensor) -> Tensor | None:
    """Return the output attached to a batch, or None if it is missing or the batch has changed.

    >>> x = cache_first_stage(torch.zeros(2, 3), torch.ones(2, 1))
    >>> cached_first_stage(x).shape, cached_first_stage(x + 1)
    (torch.Size([2, 1]), None)
    """
    result, version = getattr(x, "first_stage", (None, None))
    return result if version == _version(x) else None


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version  # inference tensors count no versions


def exchanged_arrays(model: nn.Module) -> dict[str, Tensor]:
    """Return the arrays of a model that server and clients exchange, without copying.

    Arrays that stay on the clients (`keep_local`) are not included.
    """
    local = initial_local_arrays(model)
    return {name: tensor for name, tensor in _arrays(model).items() if name not in local}


def keep_local(model: nn.Module, names: Iterable[str]) -> None:
    """Mark arrays of a new model as staying on the clients, and remember their initial values.

    Names of arrays that are never exchanged are ignored. A second call has no effect.
    """
    if not hasattr(model, "_initial_local_arrays"):
        arrays, chosen = _arrays(model), set(names)
        initial = {name: a.detach().clone() for name, a in arrays.items() if name in chosen}
        object.__setattr__(model, "_initial_local_arrays", initial)


def initial_local_arrays(model: nn.Module) -> dict[str, Tensor]:
    """Return the initial values of the arrays that stay on the clients, by name."""
    return getattr(model, "_initial_local_arrays", {})


def local_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the arrays that stay on the clients, by name, without copying."""
    local = initial_local_arrays(model)
    return {name: tensor for name, tensor in _arrays(model).items() if name in local}


def _arrays(model: nn.Module) -> dict[str, Tensor]:
    """Return the arrays that may travel; a parameter with several names only by the first.

    A buffer in a parameter's memory would overwrite what a strategy does with the parameter.
    """
    arrays = model.exchanged_arrays() if isinstance(model, Model) else model.state_dict()
    for name, value in arrays.items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"{type(model).__name__}: its state {name!r} is of type {type(value).__name__}, "
                "but only tensors can be exchanged. Store it in buffers, or leave it out of "
                "Model.exchanged_arrays."
            )
    first: dict[int, str] = {}
    named = [(n, p) for n, p in model.named_parameters(remove_duplicate=False) if n in arrays]
    again = {name for name, p in named if first.setdefault(id(p), name) != name}
    held = {p.data_ptr() for p in model.parameters() if p.numel()}
    again |= {name for name, buffer in model.named_buffers() if buffer.data_ptr() in held}
    return {name: tensor for name, tensor in arrays.items() if name not in again}


def norm_arrays(model: nn.Module, *, affine: bool) -> list[str]:
    """Return the names of running statistics and, with ``affine``, of scales and shifts.

    >>> norm_arrays(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), affine=False)
    ['1.running_mean', '1.running_var', '1.num_batches_tracked']
    >>> norm_arrays(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), affine=True)
    ['1.weight', '1.bias']
    """
    names = []
    for prefix, module in model.named_modules():
        if isinstance(module, NORMS):
            arrays = [*(module.named_parameters(recurse=False) if affine else ())]
            arrays += module.named_buffers(recurse=False)
            names += [f"{prefix}.{name}" if prefix else name for name, _ in arrays]
    return names


def head_and_body(model: nn.Module) -> tuple[list[str], list[str]]:
    """Return the names of the exchanged arrays of ``model.head``, and of the others.

    Raises ``ConfigError`` if there are none of either.

    >>> head_and_body(build("mlp", num_classes=3, shape=(5,), seed=0))[0]
    ['head.weight', 'head.bias']
    """
    names = list({**exchanged_arrays(model), **local_tensors(model)})
    head = [name for name in names if name.startswith("head.")]
    body = [name for name in names if not name.startswith("head.")]
    if not (head and body):
        raise ConfigError(
            f"{type(model).__name__} has no {'body' if head else 'head'}: its arrays are "
            f"{', '.join(names[:6])}{', ...' if len(names) > 6 else ''}. This client needs a "
            "network with a layer named `head` and other layers. Name the last layer `head`, as in "
            "a Classifier, or choose another client.name."
        )
    return head, body


def frozen_digest(model: nn.Module) -> str:
    """Return a digest of the arrays that all clients have from the start; empty if none."""
    moving = {tensor.data_ptr() for tensor in _arrays(model).values()}
    still, digest = False, hashlib.sha256()
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor) and tensor.numel() and tensor.data_ptr() not in moving:
            still = True
            digest.update(name.encode())
            digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16] if still else ""


def make_dense(model: nn.Module) -> None:
    """Give every element of expanded parameters and buffers memory of its own.

    PyTorch's fused optimizers would write outside of the memory that the elements share.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
            tensor.data = tensor.detach().clone(memory_format=torch.contiguous_format)


def initialize_lazy(model: Any, shape: tuple[int, ...]) -> None:
    """Draw the weights of layers that are made by their first input (``torch.nn.LazyLinear``)."""
    if isinstance(model, Model) and any(map(is_lazy, model.parameters())):
        with torch.no_grad():
            model.eval()(_two_examples(shape))
        model.train()


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of a model by name, in the order of the model."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def copy_arrays(model: nn.Module) -> dict[str, NDArray[Any]]:
    """Copy the arrays that server and clients exchange; bfloat16 becomes float32.

    >>> {name: array.shape for name, array in copy_arrays(nn.Linear(3, 2)).items()}
    {'weight': (2, 3), 'bias': (2,)}
    """
    return {name: to_numpy(tensor, copy=True) for name, tensor in exchanged_arrays(model).items()}


def to_numpy(tensor: Tensor, copy: bool = False) -> NDArray[Any]:
    """Return a tensor as an array on the CPU; bfloat16 becomes float32."""
    dense = torch.contiguous_format
    return tensor.detach().to("cpu", _sent_as(tensor), copy=copy, memory_format=dense).numpy()


def _sent_as(tensor: Tensor) -> torch.dtype:
    """Return a tensor's dtype in messages: float32 for bfloat16, which NumPy does not have."""
    return torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype


def set_arrays(model: nn.Module, arrays: Mapping[str, NDArray[Any]], owner: str) -> None:
    """Copy arrays into a model; error messages begin with ``owner``.

    Raises ``ValueError`` if names, shapes or dtypes of the arrays differ from those of the model.

    >>> model = nn.Linear(3, 2)
    >>> set_arrays(model, copy_arrays(model), owner="client 0")
    """
    tensors = exchanged_arrays(model)
    missing = ", ".join([name for name in tensors if name not in arrays][:3])
    excess = ", ".join([name for name in arrays if name not in tensors][:3])
    if missing or excess:
        hint, tied = "", dict(model.named_parameters(remove_duplicate=False)).keys()
        if set(arrays) & tied - dict(model.named_parameters()).keys():
            hint = " Of tied parameters, send only the first: fairflower.models.copy_arrays(model)."
        elif set(arrays) & local_tensors(model).keys():
            hint = (
                " Of clients that keep arrays, the server sends only the others: "
                "shared_arrays(model) of the client's class, for example FedBN.shared_arrays(net)."
            )
        raise ValueError(
            f"{owner}: expected {len(tensors)} arrays, as in the model, but got {len(arrays)}. "
            f"Missing: {missing or 'none'}. Unknown: {excess or 'none'}.{hint}"
        )
    for name, tensor in tensors.items():
        got = (arrays[name].dtype, arrays[name].shape)
        expected = (torch.empty(0, dtype=_sent_as(tensor)).numpy().dtype, tuple(tensor.shape))
        if got != expected:
            raise ValueError(
                f"{owner}: array {name!r}: expected {expected[0]} {expected[1]}, but got {got[0]} "
                f"{got[1]}. Send arrays with the shapes and dtypes of the model. (Flower's FedAvg "
                "converts integer buffers to float64; fairflower's FedAvg does not.)"
            )
    for name, tensor in tensors.items():
        if tensor.device.type == "cpu" and tensor.dtype != torch.bfloat16:
            np.copyto(tensor.numpy(), arrays[name])  # accepts read-only views
        else:
            tensor.copy_(torch.tensor(arrays[name]))


def build(
    name: str,
    num_classes: int,
    shape: tuple[int, ...],
    seed: int,
    weights: str = "",
    adapter: str = "",
    task: Task | None = None,
) -> Model:
    """Build a model by name (``model.name``), for examples of a shape (see `Model`).

    The initial weights depend only on the seed; torch's global generator is unchanged. ``weights``
    are pretrained weights, for models that support them: a file, or ``imagenet``. Empty means the
    model's default, and models from libraries also support ``random``. ``adapter`` is one for a
    frozen ``timm:NAME`` or ``hf:NAME`` network; empty means none. ``task`` is what is learnt, by
    default classification; for another task ``num_classes`` is the number of outputs.

    Raises ``ConfigError`` if the name is unknown, the model does not accept the examples or has
    another kind of output than the task, or the weights are missing or belong to another model.

    >>> build("mlp", num_classes=3, shape=(5,), seed=0)(torch.zeros(2, 5)).shape
    torch.Size([2, 3])
    """
    chosen = ModelSpec.read(name)
    chosen.check()
    task = task or task_of(CLASSIFICATION)
    output = task.output_shape(num_classes, shape)
    chosen.check_fit(KINDS[len(shape)], task)
    given: dict[str, Any] = {"weights": weights} if weights and chosen.takes("weights") else {}
    given |= {"output": output} if chosen.takes("output") else {}
    # devices=[], because weights are drawn on the CPU, even if they are moved to a GPU later.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = chosen.make(num_classes, shape, **given)
        if adapter:  # freezes the body of a `BodyClassifier`
            added = AdapterSpec.read(adapter)
            added.check()
            added.make(model.body)
            model.freeze()
        with chosen.naming_failures():
            initialize_lazy(model, shape)
            if isinstance(model, nn.Module) and not isinstance(model, Model):
                whole = len(output) > 1
                model = WholeNetwork(model) if whole else _with_head(chosen.name, model, shape)
    if not isinstance(model, Model):
        raise ConfigError(f"model.name = {name!r}: expected a network, got {type(model)!r}.")
    if not (task.classes and chosen.known):
        _check_model(chosen, model, output, shape, task)
    return model


def _check_model(
    chosen: ModelSpec, model: Model, output: tuple[int, ...], shape: tuple[int, ...], task: Task
) -> None:
    """Raise ``ConfigError`` or ``UserError`` if a network does not fit two examples.

    A network of a user is also searched for common mistakes.
    """
    start, x = f"model.name = {chosen.name!r}: {type(model).__name__}", _two_examples(shape)
    own = not chosen.known
    if own:
        _check_lists(model, start)
    with chosen.naming_failures(), torch.random.fork_rng(devices=[]), torch.no_grad():
        make_dense(model)
        logits, head = model.eval()(x), getattr(model, "head", None)
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        problem = task.problem(model, x) if got == (2, *output) else ""
        model.train()
    if own and len(output) == 1 and not isinstance(head, nn.Linear):
        raise ConfigError(f"{start}.head is {head!r}, expected a torch.nn.Linear.")
    if got != (2, *output):
        raise ConfigError(
            f"{start} maps two examples of shape {shape} to {got}, expected an output of shape "
            f"{(2, *output)}."
        )
    if problem:
        raise ConfigError(f"{start}: {problem}.")
    if own:
        with suppress(Exception), torch.random.fork_rng(devices=[]), torch.no_grad():
            model.takes_single = False
            model.takes_single = model.eval()(x[:1]).shape == (1, *output)
        model.train()
        check_exchanged(model, start)


def _check_lists(model: nn.Module, start: str) -> None:
    found = {id(parameter) for parameter in model.parameters()}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            layers = value if isinstance(value, (list, tuple)) else ()
            parameters = [p for v in layers if isinstance(v, nn.Module) for p in v.parameters()]
            if any(p.requires_grad and id(p) not in found for p in parameters):
                raise ConfigError(
                    f"{start}.{f'{name}.' * bool(name)}{attribute} holds layers in a "
                    f"{type(value).__name__}, where PyTorch does not find them. Use nn.ModuleList."
                )


def check_exchanged(model: nn.Module, start: str) -> None:
    """Raise ``ConfigError`` for arrays that cannot be exchanged; ``start`` begins its message."""
    arrays, again, trained = exchanged_arrays(model), exchanged_arrays(model), trainable(model)
    for name, tensor in arrays.items():
        problem = ""
        if tensor.is_complex():
            problem = "is complex. Store its real and imaginary parts (torch.view_as_real)"
        elif tensor.data_ptr() != again[name].data_ptr():
            problem = "is a new tensor in every state dict, so a received value would be lost. "
            problem += "Store it in a buffer, or leave it out of Model.exchanged_arrays"
        elif name in trained and not tensor.isfinite().all():
            problem = "holds NaN or infinite values before training. Initialize it"
        if problem:
            raise ConfigError(f"{start}: {name!r} {problem}.")


def _with_head(name: str, network: nn.Module, shape: tuple[int, ...]) -> PlainNetwork:
    """Divide a network into body and head; raise ``ConfigError`` if no linear layer is its last."""
    outputs: list[tuple[str, Tensor]] = []
    linear = {n: m for n, m in network.named_modules() if n and isinstance(m, nn.Linear)}
    hooks = [
        layer.register_forward_hook(lambda *call, n=n: outputs.append((n, call[-1])))
        for n, layer in linear.items()
    ]
    x = _two_examples(shape)
    with torch.no_grad():
        logits = network.eval()(x)
        for hook in hooks:
            hook.remove()
        place = next((n for n, out in outputs if out is logits), "")
        if [n for n, _ in outputs].count(place) == 1:
            parent, _, own = place.rpartition(".")
            setattr(network.get_submodule(parent), own, nn.Identity())
            model = PlainNetwork(network, linear[place])
            if torch.equal(model.eval()(x), logits):
                _warn_once(f"model.name = {name!r}: the last linear layer, {place}, is the head.")
                return model
    raise ConfigError(
        f"model.name = {name!r}: {type(network).__name__} is no fairflower.models.Classifier, and "
        "its output is not that of a last linear layer, which would be its head. Return "
        "fairflower.models.PlainNetwork(body, head), where head is a torch.nn.Linear and "
        "head(body(x)) are the logits."
    )


@cache
def _warn_once(text: str) -> None:
    logger.warning(text)


def _two_examples(shape: tuple[int, ...]) -> Tensor:
    tokens = KINDS[len(shape)] == "tokens"
    return torch.zeros((2, shape[1]), dtype=torch.int64) if tokens else torch.zeros((2, *shape))
