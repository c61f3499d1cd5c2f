"""Checks for networks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from fairflower.clients import ClientData, Trainer
from fairflower.clients.fedproc import FedProc
from fairflower.clients.fedprox import FedProx
from fairflower.clients.moon import MOON
from fairflower.data import Split
from fairflower.errors import ConfigError
from fairflower.models import (
    Classifier,
    Model,
    check_exchanged,
    copy_arrays,
    exchanged_arrays,
    initialize_lazy,
    local_tensors,
    set_arrays,
    trainable,
)
from fairflower.registry import KINDS
from fairflower.strategies import Uniform
from fairflower.tasks import CLASSIFICATION, Task, task_of
from fairflower.testing.failures import as_assertions
from fairflower.testing.federations import SETTINGS, run_toy_rounds

_CLASSES, _BATCH = 3, 4


def check_model(
    made_by: Callable[..., Model],
    shape: tuple[int, ...] = (1, 16, 16),
    *,
    task: str = CLASSIFICATION,
    **arguments: Any,
) -> None:
    """Check a network's output, head, exchanged arrays and trained parameters.

    The subclass of `Model`, or function that returns a `Model`, is called with the number of
    classes, ``shape`` and ``arguments``; for classification it is a `Classifier`. The shape of an
    example is (channels, height, width) for images, (D,) for D features, or (vocabulary, length)
    for token ids. ``task`` is what the network can learn. Raises ``AssertionError`` if a property
    is violated; the message explains how to correct it.

    Examples
    --------
    >>> from fairflower.models.small import CNN
    >>> check_model(CNN, shape=(1, 16, 16))
    """
    with as_assertions(made_by):
        _check(made_by, arguments, shape, task_of(task))


def _check(
    made_by: Callable[..., Model], arguments: Any, shape: tuple[int, ...], task: Task
) -> None:
    name = getattr(made_by, "__name__", str(made_by))
    kinds, kind = getattr(made_by, "kinds", Model.kinds), KINDS[len(shape)]
    assert kind in kinds, (
        f"checked on {kind}, but it takes {' or '.join(kinds)}. Set kinds = ({kind!r},), or pass "
        "another shape to `check_model`."
    )

    def make(seed: int) -> Model:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            initialize_lazy(model := made_by(_CLASSES, shape, **arguments), shape)
            return model

    model, again, other = make(0), make(0), make(1)
    output = task.output_shape(_CLASSES, shape)
    expected = Classifier if len(output) == 1 else Model
    assert isinstance(model, expected), f"made {type(model)}, expected a {expected.__name__}."
    if isinstance(model, Classifier):
        assert isinstance(model.head, nn.Linear), "the head must be a torch.nn.Linear."
    draws = torch.Generator().manual_seed(0)
    if kind == "tokens":
        x = torch.randint(shape[0], (_BATCH, shape[1]), generator=draws)
    else:
        x = torch.randn(_BATCH, *shape, generator=draws)
    y = torch.from_numpy(task.made_up(_BATCH, _CLASSES, shape))

    for network in (model, again, other):
        network.eval()
    with torch.no_grad():
        logits = model(x)
        sizes, single = tuple(logits.shape), tuple(model(x[:1]).shape)
        assert sizes == (_BATCH, *output), (
            f"logits of {_BATCH} examples in {_CLASSES} classes have shape {sizes}."
        )
        assert single == (1, *output), f"logits of a single example have shape {single}."
        if isinstance(model, Classifier):
            same = torch.equal(logits, model.head(model.features(x)))
            assert same, "forward(x) is not head(features(x))."
            assert model.represent(x).shape[:1] == (_BATCH,), (
                "`represent` does not return one row for each example."
            )
        assert torch.equal(logits, again(x)), (
            "two models with the same seed differ. Draw only from torch's generator."
        )
        set_arrays(other, copy_arrays(model), name)
        assert torch.equal(logits, other(x)), (
            "a model that received all exchanged arrays has different outputs. Arrays outside the "
            "state dict, or outside `exchanged_arrays`, must be the same for all seeds."
        )
    check_exchanged(model, name)
    examples, settings = made_up(shape, _CLASSES, task), replace(SETTINGS, batch_size=_BATCH)
    for method in (Trainer, MOON, FedProc) if expected is Classifier else (Trainer, FedProx):
        train = partial(method, make(0), examples, settings, seed=0)
        rehearse(lambda k, train=train: train(client_id=k), method.make_exchanges({}))  # type: ignore[misc]

    model.train()
    task.loss(model(x), y).backward()  # type: ignore[no-untyped-call]
    assert trainable(model), "the model has no trainable parameters."
    idle = [key for key, parameter in trainable(model).items() if parameter.grad is None]
    assert not idle, f"{', '.join(idle)} get no gradient. Freeze or remove these parameters."


def made_up(shape: tuple[int, ...], classes: int, task: Task | None = None) -> ClientData:
    """Return a client's examples for `rehearse`, drawn at random: two batches of `_BATCH`."""
    draws, n, sides = np.random.default_rng(0), 2 * _BATCH, shape[0]
    x: Any = draws.standard_normal((n, *shape), np.float32)
    if KINDS[len(shape)] == "images":
        x = draws.integers(256, size=x.shape, dtype=np.uint8)
    elif KINDS[len(shape)] == "tokens":
        x, sides = draws.integers(shape[0], size=(n, shape[1])), 0
    task = task or task_of(CLASSIFICATION)
    split = Split(x, task.made_up(n, classes, shape))
    return ClientData(split, split, (0.0,) * sides, (1.0,) * sides, classes, task=task)


def rehearse(
    make: Callable[[int], Trainer], exchanges: Sequence[Any] = (), needs: Sequence[str] = ()
) -> None:
    """Train and test two clients for two rounds; raise what the network or its trainer raises.

    ``needs`` are measurements, and ``exchanges`` those of the trainer's method.
    """
    trainer = make(0)
    trained = trainable(trainer.model).keys()
    strategy = Uniform(exchanges=exchanges, buffers=trainer.send().keys() - trained)
    strategy.measurements, strategy._trained = tuple(needs), trained
    before = unsent_buffers(trainer.model)
    run_toy_rounds(strategy, make, clients=2, rounds=2)
    make(0).test()
    check_unsent(before, trainer.model, "changes in training")


def unsent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the buffers that server and clients do not exchange."""
    known = (*exchanged_arrays(model).values(), *local_tensors(model).values())
    places = {tensor.data_ptr() for tensor in known}
    buffers = model.named_buffers()
    return {n: b.detach().clone() for n, b in buffers if b.data_ptr() not in places}


def check_unsent(before: Mapping[str, torch.Tensor], model: nn.Module, problem: str) -> None:
    """Raise ``ConfigError`` if buffers that are not exchanged differ from those ``before``."""
    for name, buffer in unsent_buffers(model).items():
        if name in before and not torch.equal(before[name].nan_to_num(), buffer.nan_to_num()):
            raise ConfigError(
                f"the buffer {name!r} {problem}, but is not exchanged: server and clients would "
                "have other values. Register it with persistent=True, or keep it constant."
            )
