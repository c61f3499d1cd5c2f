"""What every network has to keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fairflower.models import Classifier, copy_arrays, set_arrays, trainable
from fairflower.registry import KINDS

_CLASSES, _BATCH = 3, 4


def check_model(
    made_by: Callable[..., Classifier],
    shape: tuple[int, ...] = (1, 16, 16),
    **arguments: Any,
) -> None:
    """Check what every network keeps: its head, its classes, what travels, what is trained.

    Parameters
    ----------
    made_by
        A subclass of `Classifier`, or a function that makes one, called with the number of
        classes, ``shape`` and these ``arguments``.
    shape
        Channels, height and width of the images that it is tried on; (D,) for D features, or
        (vocabulary, length) for token ids.

    Raises
    ------
    AssertionError
        With what is broken, and what to do.
    """
    name = getattr(made_by, "__name__", str(made_by))
    kinds, kind = getattr(made_by, "kinds", Classifier.kinds), KINDS[len(shape)]
    assert kind in kinds, (
        f"{name}: tried on {kind}, and it takes {' or '.join(kinds)}. Give it kinds = ({kind!r},), "
        "or `check_model` another shape."
    )

    def make(seed: int) -> Classifier:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return made_by(_CLASSES, shape, **arguments)

    model, again, other = make(0), make(0), make(1)
    assert isinstance(model, Classifier), f"{name}: made {type(model)}, expected a Classifier."
    assert isinstance(model.head, nn.Linear), f"{name}: its head has to be a torch.nn.Linear."
    draws = torch.Generator().manual_seed(0)
    if kind == "tokens":
        x = torch.randint(shape[0], (_BATCH, shape[1]), generator=draws)
    else:
        x = torch.randn(_BATCH, *shape, generator=draws)
    y = torch.arange(_BATCH) % _CLASSES

    for one in (model, again, other):
        one.eval()
    with torch.no_grad():
        logits, features = model(x), model.features(x)
        found = tuple(logits.shape)
        assert found == (_BATCH, _CLASSES), (
            f"{name}: logits of {_BATCH} images in {_CLASSES} classes have shape {found}."
        )
        assert torch.equal(logits, model.head(features)), (
            f"{name}: forward(x) is not head(features(x))."
        )
        assert model.represent(x).shape[:1] == (_BATCH,), f"{name}: `represent` loses images."
        assert torch.equal(logits, again(x)), (
            f"{name}: two of the same seed differ. Draw from torch's generator alone."
        )
        set_arrays(other, copy_arrays(model), name)
        assert torch.equal(logits, other(x)), (
            f"{name}: a copy that got all that travels computes something else. What is not in "
            "the state dict, or left out of `travelling`, has to be the same for every seed."
        )

    model.train()
    F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    idle = [key for key, parameter in trainable(model).items() if parameter.grad is None]
    assert trainable(model), f"{name}: it has nothing to train."
    assert not idle, f"{name}: {', '.join(idle)} get no gradient. Freeze or remove them."
