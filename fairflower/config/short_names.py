"""Short names of run config keys, for command-line options and arguments of Python functions."""

from __future__ import annotations

#: Option -> run config key, type and help text.
SHORT_NAMES: dict[str, tuple[str, type, str]] = {
    "data": ("data.name", str, "Data set"),
    "data_dir": ("data.dir", str, "Folder of local data"),
    "model": ("model.name", str, "Model"),
    "rounds": ("num-server-rounds", int, "Number of training rounds"),
    "fraction_train": ("fraction-train", float, "Fraction of the clients that train in each round"),
    "epochs": ("train.local-epochs", int, "Local epochs"),
    "lr": ("train.lr", float, "Learning rate"),
    "seed": ("seed", int, "Random seed for everything except the partition"),
    "engine": (
        "engine",
        str,
        "Simulation engine: auto, ray, flower (Flower's engine on Ray) or inline",
    ),
    "ray_address": (
        "ray-address",
        str,
        "Address of a Ray cluster: auto, host:port or ray://host:port",
    ),
    "workers": ("workers", int, "Number of parallel clients on Ray"),
    "output_dir": ("output-dir", str, "Parent folder of run folders"),
}
