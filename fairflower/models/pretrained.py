"""Pretrained weights, read without unpickling code, and networks from other libraries.

An adapter adds a few trained parameters to a frozen network (``model.adapter``).
"""

from __future__ import annotations

import base64
import json
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from fairflower.arguments import Range
from fairflower.errors import ConfigError, quoted, require
from fairflower.models import PlainNetwork

if TYPE_CHECKING:
    from torchvision.models import WeightsEnum

_EXPECTED = "Expected a .safetensors file, or a .pth file with a state dict of tensors."


class BodyClassifier(PlainNetwork):
    """A classifier with a network from another library as ``body`` and a linear head.

    The body maps an input to features [N, width]. Without an adapter, all arrays are trained and
    exchanged. After `freeze`, only the head and the parameters that an adapter has added to the
    body are trained and exchanged; all clients have the other arrays from the start.
    """

    def __init__(self, body: nn.Module, width: int, num_classes: int) -> None:
        super().__init__(body, nn.Linear(width, num_classes))
        self.frozen = False

    def freeze(self) -> None:
        """Exchange only trained arrays from now on; an adapter has frozen the others."""
        self.frozen = True
        new = {id(parameter) for parameter in self.new_parameters()}
        for module in self.body.modules():
            own = [p for p in module.parameters(recurse=False) if id(p) in new]
            if any(p.dtype != torch.float32 for p in own):  # in a network of 16 bits
                module.register_forward_pre_hook(_in_float32)
            for parameter in own:
                parameter.data = parameter.data.float()
                parameter.requires_grad_(True)
        self.train(self.training)

    def new_parameters(self) -> Iterator[nn.Parameter]:
        """Yield parameters of the body that are new in this run and are trained with the head."""
        yield from ()

    def exchanged_arrays(self) -> dict[str, Tensor]:
        """Return all arrays or, for a frozen body, only the trained arrays."""
        state = self.state_dict()
        if not self.frozen:
            return state
        trained = {name for name, p in self.named_parameters() if p.requires_grad}
        return {name: array for name, array in state.items() if name in trained}

    def train(self, mode: bool = True) -> BodyClassifier:
        """Set the mode of all layers; batch norm layers of a frozen body stay in eval mode."""
        super().train(mode)
        for module in self.body.modules() if self.frozen else ():
            if isinstance(module, _BatchNorm):
                module.eval()
        return self

    def to_head(self, features: Tensor) -> Tensor:
        return features.to(self.head.weight.dtype)


def _in_float32(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.float() for x in inputs)


@contextmanager
def same_for_every_seed() -> Iterator[None]:
    """Draw random weights from a fixed seed, because all clients need the same frozen weights."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        yield


def as_rgb(x: Tensor, name: str) -> Tensor:
    """Convert images [N, 1 or 3, H, W] to three channels; ``name`` names the model in errors."""
    if x.shape[1] not in (1, 3):
        raise ConfigError(
            f"{name} needs images with 1 or 3 channels, but the data have {x.shape[1]}. Choose "
            "another model.name."
        )
    return x.expand(-1, 3, -1, -1)


def resized(x: Tensor, size: tuple[int, int] | None) -> Tensor:
    """Resize images [N, C, H, W] to this height and width; None means no resizing."""
    if size is None or tuple(x.shape[2:]) == size:
        return x
    return F.interpolate(x, size, mode="bilinear", antialias=True)


def lora(
    body: nn.Module,
    *,
    r: Annotated[int, Range(1, 4096)] = 8,
    alpha: Annotated[float, Range(above=0)] = 16,
    dropout: Annotated[float, Range(0, 0.99)] = 0.0,
    targets: str = "all",
) -> None:
    """Freeze a network and add low-rank adapters to some of its layers, using PEFT.

    A layer W x becomes W x + (alpha / r) B A x, with A [r, inputs] and B [outputs, r]. B is
    initially 0 (E. Hu et al., *LoRA: Low-rank adaptation of large language models*, ICLR 2022).
    ``r`` is by default PEFT's, and ``alpha`` twice the rank, as in the paper's code. ``dropout`` is
    the probability of dropout before A; with 1 the adapters would never be trained. ``targets`` are
    comma-separated last parts of layer names, such as ``query,value``, or ``all`` for every linear
    layer, except the last one of a language model.

    Raises ``ConfigError`` if a target does not match any layer (the message lists the available
    names) or PEFT cannot adapt the layer, and ``NotInstalled`` if PEFT is not installed.
    """
    require("hf", "model.adapter = 'lora'", "peft")
    from peft import LoraConfig, inject_adapter_in_model

    chosen = _matching(body, targets)
    config = LoraConfig(r=r, lora_alpha=alpha, lora_dropout=dropout, target_modules=chosen)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out")  # of GPT-2's layers, which PEFT sets
        try:
            inject_adapter_in_model(config, body)
        except ValueError as error:  # of grouped convolutions, among others
            raise ConfigError(
                f"model.adapter: PEFT cannot adapt these layers: {error} Choose other targets."
            ) from error
    for parameter in body.parameters():
        if parameter.requires_grad:  # also beside layers of 16 bits
            parameter.data = parameter.data.float()


def _matching(body: nn.Module, targets: str) -> list[str]:
    """Return the full names of the layers that ``targets`` selects."""
    layers = [  # Conv1D is the linear layer of GPT-2
        name
        for name, module in body.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d)) or type(module).__name__ == "Conv1D"
    ]
    last = getattr(body, "get_output_embeddings", lambda: None)()
    inner = [name for name in layers if body.get_submodule(name) is not last]
    linear = [name for name in inner if not isinstance(body.get_submodule(name), nn.Conv2d)]
    if targets == "all" and linear:
        return linear
    chosen = []
    for target in targets.split(","):
        wanted = target.strip()
        matches = [name for name in layers if f".{name}".endswith(f".{wanted}") and wanted]
        if not matches:
            # The last part of a name or, if it is a number, the last two.
            last_parts = (re.search(r"([^.]+\.)?\d+$|[^.]+$", name) for name in layers)
            called = ", ".join(dict.fromkeys(part[0] for part in last_parts if part))
            none = "none (the network has neither linear layers nor convolutions)"
            raise ConfigError(
                f"model.adapter: targets = {quoted(targets)}: no layer is called {quoted(wanted)}. "
                f"Choose from {called or none}; or set targets = all, for all linear layers."
            )
        chosen += matches
    return chosen


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
