"""The networks, by name, and the shape that they share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fairflower.config import ModelChoice
from fairflower.errors import ConfigError
from fairflower.registry import KINDS, PRETRAINED


class Classifier(nn.Module):
    """A feature extractor under a linear head: ``forward(x) = head(features(x))``.

    Methods that look at the representation (MOON, FedProto, ...) need the two apart; a
    subclass sets ``head`` and defines ``features``. It is made of the number of classes and the
    shape of an example: (channels, height, width) of an image; if its ``kinds`` say so (D,)
    of D features, or (vocabulary, length) of token ids, which are 0 to below the vocabulary.
    """

    head: nn.Linear

    #: What it can be given: "images", "features" or "tokens".
    kinds: ClassVar[tuple[str, ...]] = ("images",)

    #: True if ``features`` begins with a stage that is frozen, ``first_stage``: what that
    #: makes of an image never changes, and those who deal batches may ``remember`` it.
    two_stages: ClassVar[bool] = False

    def features(self, x: Tensor) -> Tensor:
        """Normalised images [N, C, H, W], or what else it takes, to the head's input [N, D]."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """The same to logits [N, classes]."""
        logits: Tensor = self.head(self.features(x))
        return logits

    def represent(self, x: Tensor) -> Tensor:
        """The same to what tells their client's type, [N, D]: the features."""
        return self.features(x)

    def first_stage(self, x: Tensor) -> Tensor:
        """The frozen stage of ``features``, without a gradient."""
        raise NotImplementedError

    def travelling(self) -> dict[str, Tensor]:
        """The arrays that server and clients exchange, by name: all of the state dict.

        A network leaves out what is frozen and everybody has from the start.
        """
        return self.state_dict()


def travelling(model: nn.Module) -> dict[str, Tensor]:
    """The arrays of any model that server and clients exchange; not copies."""
    return model.travelling() if isinstance(model, Classifier) else model.state_dict()


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of any model that are trained, by name and in its order."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def copy_arrays(model: nn.Module) -> dict[str, NDArray[Any]]:
    """Copies of the arrays that travel, by name."""
    return {
        name: tensor.to("cpu", copy=True, memory_format=torch.contiguous_format).numpy()
        for name, tensor in travelling(model).items()
    }


def set_arrays(model: nn.Module, arrays: Mapping[str, NDArray[Any]], owner: str) -> None:
    """Copy named arrays into those that travel; the error names the model's ``owner``.

    ``ValueError`` where they are not exactly the model's: their names, shapes and dtypes.
    """
    own = travelling(model)
    missing = ", ".join([name for name in own if name not in arrays][:3])
    excess = ", ".join([name for name in arrays if name not in own][:3])
    if missing or excess:
        raise ValueError(
            f"{owner}: expected the {len(own)} arrays of the model, got {len(arrays)}. "
            f"Missing: {missing or 'none'}. Unknown: {excess or 'none'}."
        )
    for name, tensor in own.items():
        got = (arrays[name].dtype, arrays[name].shape)
        expected = (torch.empty(0, dtype=tensor.dtype).numpy().dtype, tuple(tensor.shape))
        if got != expected:
            raise ValueError(
                f"{owner}: array {name!r} should be {expected[0]} {expected[1]}, "
                f"got {got[0]} {got[1]}. Send the model's own shapes and types "
                "(Flower's FedAvg makes integer buffers float64, fairflower's does not)."
            )
    for name, tensor in own.items():
        if tensor.device.type == "cpu":
            np.copyto(tensor.numpy(), arrays[name])  # takes read-only views as they are
        else:
            tensor.copy_(torch.tensor(arrays[name]))


def remember(x: Tensor, result: Tensor) -> Tensor:
    """Note on a batch [N, C, H, W] what ``Classifier.first_stage`` makes of it, [N, D].

    The note is this tensor's. What is computed from it (augmented, mixed, cut) has none,
    and is looked at anew.
    """
    noted: Any = x
    noted.first_stage = (result, _version(x))
    return x


def recall(x: Tensor) -> Tensor | None:
    """Give what was noted on a batch; None if nothing was, or it was changed in place since."""
    result, version = getattr(x, "first_stage", (None, None))
    return result if version == _version(x) else None


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version  # inference tensors count no versions


def build(
    name: str, num_classes: int, shape: tuple[int, ...], seed: int, weights: str = ""
) -> Classifier:
    """Make a network; the seed alone decides its initial weights, but for pretrained ones.

    ``name`` is what ``model.name`` may be, ``num_classes`` the width of the head and ``shape``
    that of an example (`Classifier`). Torch's global generator is left as it was. A network that
    can be pretrained gets its ``weights`` from a file, or ``imagenet``; empty for its own default.
    ``ConfigError`` on an unknown name, examples that the network cannot take, or weights that are
    not there or not the network's.
    """
    chosen = ModelChoice.read(name)
    chosen.check()
    chosen.check_kind(KINDS[len(shape)])
    pretrained = {"weights": weights} if name in PRETRAINED else {}
    # devices=[]: weights are drawn on the CPU, whatever device they go to later.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = chosen.made_by(num_classes, shape, **pretrained, **chosen.args)
    if not isinstance(model, Classifier):
        raise ConfigError(f"model.name = {name!r}: expected a Classifier, got {type(model)!r}.")
    return model
