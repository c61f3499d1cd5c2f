"""What can be named in a run config besides strategies.

Kept apart from the code that it names, so that a run config can be checked
(and ``fairflower list`` can answer) without importing torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fairflower.config import ConfigError, kebab


@dataclass(frozen=True)
class Argument:
    """A trainer's own argument: its default and the values it may take, both included."""

    default: float | str
    min: float = float("-inf")
    max: float = float("inf")


@dataclass(frozen=True)
class ClientMethod:
    """A method of local training.

    Attributes
    ----------
    module, attribute
        Where the `fairflower.clients.Trainer` is.
    summary
        One line, with the paper.
    arguments
        The keyword arguments of its constructor, beside every trainer's.
    exchanges
        What has to travel beside the model: names of `fairflower.strategies.EXCHANGES`.
    """

    module: str
    attribute: str
    summary: str
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    exchanges: tuple[str, ...] = ()

    def defaults(self) -> dict[str, Any]:
        """Its own arguments with their defaults."""
        return {name: argument.default for name, argument in self.arguments.items()}

    def check(self, args: Mapping[str, Any]) -> None:
        """Refuse values out of bounds.

        Raises
        ------
        ConfigError
            Naming the key, the value and what is allowed.
        """
        for name, value in args.items():
            bounds = self.arguments[name]
            if isinstance(bounds.default, str):
                continue
            if value is None or not bounds.min <= value <= bounds.max:
                raise ConfigError(
                    f"client.{kebab(name)} = {value}: expected a number from {bounds.min} to "
                    f"{bounds.max}."
                )


CLIENTS: dict[str, ClientMethod] = {
    "sgd": ClientMethod(
        "fairflower.clients.sgd",
        "SGD",
        "plain local training, FedAvg's ClientUpdate (McMahan et al. 2017; settings of "
        "FedHEAL \N{SECTION SIGN}4.1)",
    ),
    "sam": ClientMethod(
        "fairflower.clients.sam", "SAM", "sharpness-aware minimisation (Foret et al. 2021; FedSAM)"
    ),
    "gsam": ClientMethod(
        "fairflower.clients.sam",
        "GSAM",
        "surrogate-gap SAM (Zhuang et al. 2022), the steps of FedISM's SALT",
    ),
    "fedprox": ClientMethod(
        "fairflower.clients.fedprox",
        "FedProx",
        "a penalty on the distance to the global model (Li et al. 2020)",
        {"mu": Argument(1.0, min=0)},
    ),
    "scaffold": ClientMethod(
        "fairflower.clients.scaffold",
        "SCAFFOLD",
        "control variates against client drift (Karimireddy et al. 2020)",
        exchanges=("control",),
    ),
}

#: name -> (module, attribute, one line)
MODELS: dict[str, tuple[str, str, str]] = {
    "cnn": (
        "fairflower.models.cnn",
        "cnn",
        "three convolutions with group norm, 26 k to 34 k parameters",
    ),
    "resnet10": ("fairflower.models.resnet", "resnet10", "the papers' ResNet-10, 4.9 M parameters"),
    "resnet12": ("fairflower.models.resnet", "resnet12", "the papers' ResNet-12, 5.0 M parameters"),
    "resnet18": (
        "fairflower.models.resnet",
        "resnet18",
        "torchvision's ResNet-18, 11.2 M parameters",
    ),
    "prompt-vit-tiny": (
        "fairflower.models.prompt_vit",
        "prompt_vit_tiny",
        "FedGCR's prompts for a frozen ViT, small enough for a CPU: 0.76 M parameters pretrained "
        "on printed characters; 0.13 M are trained",
    ),
    "prompt-vit-b-16": (
        "fairflower.models.prompt_vit",
        "prompt_vit_b_16",
        "FedGCR's prompts for a frozen ViT-B/16: 85.8 M parameters pretrained on ImageNet; 4.7 M "
        "are trained",
    ),
}

#: Those with a pretrained part, which take ``model.weights``.
PRETRAINED = frozenset({"prompt-vit-tiny", "prompt-vit-b-16"})

DATA_SETS: dict[str, tuple[str, str, str]] = {
    "uci-digits": (
        "fairflower.data.uci_digits",
        "UCIDigits",
        "embedded: UCI handwritten digits in four domains (plain, inverted on texture, "
        "rotated and noisy, printed fonts)",
    ),
    "digits": (
        "fairflower.data.digits",
        "Digits",
        "MNIST, USPS, SVHN and SYN, the Digits benchmark of FedHEAL and FedEquilibria",
    ),
    "office-caltech": (
        "fairflower.data.office_caltech",
        "OfficeCaltech",
        "Office-Caltech-10 from a folder: ten kinds of objects in amazon, caltech, dslr and "
        "webcam images (FedHEAL, FedEquilibria)",
    ),
    "pacs": (
        "fairflower.data.pacs",
        "PACS",
        "seven kinds of objects in photos, art paintings, cartoons and sketches (FedEquilibria)",
    ),
    "npz": (
        "fairflower.data.folder",
        "NpzFolder",
        "your own: a folder with one <domain>.npz per domain (x_train, y_train, x_test, y_test)",
    ),
}
