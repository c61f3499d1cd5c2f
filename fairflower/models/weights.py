"""Pretrained weights from files, without unpickling anything."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fairflower.config import ConfigError


def to_text(arrays: Mapping[str, Tensor]) -> str:
    """Named tensors as JSON: real numbers as float16 in base 85, whole numbers as a list.

    A Flower app bundle carries text alone. Half precision keeps three digits of a
    weight, and takes 2.5 bytes.
    """
    named = {}
    for name, tensor in arrays.items():
        array = tensor.detach().cpu().numpy()
        if array.dtype.kind == "f":
            text = base64.b85encode(array.astype("<f2").tobytes()).decode()
            named[name] = {"shape": list(array.shape), "float16": text}
        else:
            named[name] = {"shape": list(array.shape), "int64": array.ravel().tolist()}
    return json.dumps(named, indent=0) + "\n"


def from_text(text: str) -> dict[str, Tensor]:
    """Undo ``to_text``, float16 as float32."""
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

    Raises
    ------
    ConfigError
        If the file cannot be read so; ``model.weights`` names it.
    """
    file = Path(path).expanduser()
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        arrays: Any = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).strip().partition("\n")[0]
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
