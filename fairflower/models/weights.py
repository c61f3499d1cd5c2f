"""Reading pretrained weights, without unpickling code."""

from __future__ import annotations

import base64
import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fairflower.errors import ConfigError

if TYPE_CHECKING:
    from torchvision.models import WeightsEnum

_EXPECTED = "Expected a .safetensors file, or a .pth file with a state dict of tensors."


def decode_json_weights(text: str) -> dict[str, Tensor]:
    """Decode named tensors from JSON, where floats are float16 in base 85 and integers are lists.

    The format is JSON, because Flower app bundles contain only text files.
    ``experiments/pretrain_vit_tiny.py`` writes the weights.

    >>> decode_json_weights('{"steps": {"int64": [3, 4], "shape": [2]}}')
    {'steps': tensor([3, 4])}
    """
    arrays = {}
    for name, entry in json.loads(text).items():
        if "float16" in entry:
            flat = np.frombuffer(base64.b85decode(entry["float16"]), "<f2").astype(np.float32)
        else:
            flat = np.array(entry["int64"], np.int64)
        arrays[name] = torch.tensor(flat.reshape(entry["shape"]))
    return arrays


def load_weights_file(path: str) -> dict[str, Tensor]:
    """Load named tensors from a .safetensors file or from a state dict saved by torch.save.

    Raises ``ConfigError`` if the file is missing or cannot be read.
    """
    file = Path(path).expanduser()
    check_file(path)
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        arrays: Any = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0]
        raise ConfigError(f"model.weights = {path!r}: {reason}. {_EXPECTED}") from error
    except Exception as error:  # torch raises many kinds, and advises to trust the file
        raise ConfigError(
            f"model.weights = {path!r}: torch.save did not write this file, or it contains more "
            f"than tensors; it may be a page or a pointer that was downloaded instead. {_EXPECTED}"
        ) from error
    if not (isinstance(arrays, Mapping) and all(isinstance(a, Tensor) for a in arrays.values())):
        raise ConfigError(
            f"model.weights = {path!r}: expected a state dict of tensors, got "
            f"{type(arrays).__name__}. Save model.state_dict()."
        )
    return dict(arrays)


def check_file(path: str) -> None:
    """Raise ``ConfigError`` if ``model.weights`` is not an existing file; the file is not read."""
    if not Path(path).expanduser().is_file():
        raise ConfigError(f"model.weights = {path!r}: file not found. {_EXPECTED}")


def load_weights(weights: str, published: WeightsEnum) -> dict[str, Tensor]:
    """Load named tensors from a file, or those ``published`` by torchvision for "" or "imagenet".

    The latter are downloaded once to torch's cache. Raises ``ConfigError``, with the address, if
    the download fails or does not match its hash.
    """
    if weights not in ("", "imagenet"):
        return load_weights_file(weights)
    try:
        return dict(published.get_state_dict(progress=False, check_hash=True, weights_only=True))
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"The weights {published} cannot be downloaded ({error}). Download {published.url} in "
            "another way, and set model.weights to the file."
        ) from error


def copy_into(
    network: nn.Module,
    arrays: Mapping[str, Tensor],
    head: str | tuple[str, ...],
    kind: str,
    source: str,
) -> None:
    """Copy pretrained weights, except those of the head, into a network without a head.

    Step counters of BatchNorm may be missing, because older files do not have them. ``head`` is the
    prefix, or several, of the names of the head's arrays; ``kind`` and ``source`` name the network
    and the file in error messages.

    Raises ``ConfigError`` if arrays are missing or unknown, or have the wrong shape.
    """
    body = {name: array for name, array in arrays.items() if not name.startswith(head)}
    try:
        network.load_state_dict(body)
    except RuntimeError as error:
        reason = textwrap.shorten(str(error).partition("\n")[2], 300, placeholder=" ...")
        raise ConfigError(
            f"model.weights = {source!r}: these weights belong to another network: {reason} Set "
            f"model.weights to a file with the state dict of {kind}."
        ) from error
