"""Short names of run config keys: options of commands and arguments of Python functions."""

from __future__ import annotations

#: Option -> run config key, type and help text.
SHORT_NAMES: dict[str, tuple[str, type, str]] = {
    "data": ("data.name", str, "Data set"),
    "data_dir": ("data.dir", str, "Folder of local data"),
    "model": ("model.name", str, "Model"),
    "rounds": ("num-server-rounds", int, "Rounds of training"),
    "fraction_train": ("fraction-train", float, "Share of the clients that train in a round"),
    "epochs": ("train.local-epochs", int, "Local epochs"),
    "lr": ("train.lr", float, "Learning rate"),
    "seed": ("seed", int, "Seed of everything but the partition"),
    "engine": ("engine", str, "Engine: auto, ray, flower (Flower's on Ray) or inline"),
    "ray_address": ("ray-address", str, "Ray cluster: auto, host:port or ray://host:port"),
    "workers": ("workers", int, "Parallel clients on Ray"),
    "output_dir": ("output-dir", str, "Parent of run folders"),
}
