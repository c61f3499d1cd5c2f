"""Run config keys under shorter names: options of the commands, arguments of the functions."""

from __future__ import annotations

#: Option -> its run config key, type and meaning.
SHORT_NAMES: dict[str, tuple[str, type, str]] = {
    "data": ("data.name", str, "Data set"),
    "data_dir": ("data.dir", str, "Folder of local data"),
    "model": ("model.name", str, "Model"),
    "rounds": ("num-server-rounds", int, "Rounds of training"),
    "fraction_train": ("fraction-train", float, "Share of the clients asked in a round"),
    "epochs": ("train.local-epochs", int, "Local epochs per round"),
    "lr": ("train.lr", float, "Learning rate"),
    "seed": ("seed", int, "Seed of everything but the partition"),
    "engine": ("engine", str, "ray: ours on Ray; flower: Flower's on Ray; inline: this process"),
    "ray_address": ("ray-address", str, "Ray cluster: auto, host:port or ray://host:port"),
    "workers": ("workers", int, "Clients at a time"),
    "output_dir": ("output-dir", str, "Where run folders go"),
}
