"""Pretrained weights from files, without unpickling anything."""

from __future__ import annotations

import base64
import json
import pickle
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


def from_text(text: str) -> dict[str, Tensor]:
    """Named tensors of JSON: real numbers as float16 in base 85, whole numbers as a list.

    A Flower app bundle carries text alone; ``experiments/pretrain_vit_tiny.py`` wrote it.
    """
    arrays = {}
    for name, entry in json.loads(text).items():
        if "float16" in entry:
            flat = np.frombuffer(base64.b85decode(entry["float16"]), "<f2").astype(np.float32)
        else:
            flat = np.array(entry["int64"], np.int64)
        arrays[name] = torch.tensor(flat.reshape(entry["shape"]))
    return arrays


def from_file(path: str) -> dict[str, Tensor]:
    """Named tensors of a .safetensors file, or of one that torch.save wrote of a state dict.

    ``ConfigError`` if the file cannot be read so; it names ``model.weights``.
    """
    file = Path(path).expanduser()
    check_file(path)
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        arrays: Any = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"model.weights = {path!r}: {reason}. Expected a .safetensors file, or a .pth file "
            "with a state dict of tensors."
        ) from error
    if not (isinstance(arrays, Mapping) and all(isinstance(a, Tensor) for a in arrays.values())):
        raise ConfigError(
            f"model.weights = {path!r}: it holds no state dict of tensors but "
            f"{type(arrays).__name__}. Save model.state_dict()."
        )
    return dict(arrays)


def check_file(path: str) -> None:
    """Raise a ``ConfigError`` if ``model.weights`` names no file; without reading it."""
    if not Path(path).expanduser().is_file():
        raise ConfigError(
            f"model.weights = {path!r}: there is no such file. Name a .safetensors file, or a .pth "
            "file with a state dict of tensors."
        )


def from_torchvision(weights: WeightsEnum) -> dict[str, Tensor]:
    """Named tensors that torchvision publishes, downloaded once to torch's cache.

    ``ConfigError`` if they cannot be had, or are not what their hash says; it names their address.
    """
    try:
        return dict(weights.get_state_dict(progress=False, check_hash=True, weights_only=True))
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"The weights {weights} cannot be downloaded ({error}). Get {weights.url} elsewhere, "
            "and name it in model.weights."
        ) from error


def copy_into(
    network: nn.Module, arrays: Mapping[str, Tensor], head: str, kind: str, source: str
) -> None:
    """Copy pretrained weights into a network that has no head, whatever head they had.

    The arrays whose names begin with ``head`` are left out. BatchNorm's step counters, which
    older files lack, may be missing. ``ConfigError`` on arrays that are missing, unknown or of
    another shape; it names the first of them, the ``kind`` of network and their ``source``.
    """
    body = {name: array for name, array in arrays.items() if not name.startswith(head)}
    try:
        network.load_state_dict(body)
    except RuntimeError as error:
        reason = textwrap.shorten(str(error).partition("\n")[2], 300, placeholder=" ...")
        raise ConfigError(
            f"model.weights = {source!r} are another network's: {reason} "
            f"Name a file with the state dict of {kind}."
        ) from error
