"""``fairflower data``: inspect data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fairflower.cli.options import ConfigOverrides, with_settings
from fairflower.cli.terminal import console, say_where
from fairflower.config import RunConfig
from fairflower.errors import ConfigError


@with_settings("data_dir")
def show(
    *,
    name: Annotated[str, typer.Argument(help="Data set: a name from `fairflower list data`.")],
    overrides: ConfigOverrides,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Output file (.png). Default: <data set>.png in the working directory.",
        ),
    ] = None,
) -> None:
    """Print the domains, clients and class counts of a data set, and save a sheet of sample images.

    For features and token ids, the command prints statistics of the training examples instead of
    saving images.
    """
    if (other := overrides.assigned.get("data.name", name)) != name:
        raise ConfigError(f"--set data.name={other}: the command names {name}. Remove one of them.")
    settings = overrides.file | {"data.name": name} | overrides.options | overrides.assigned
    config = RunConfig.from_flat(settings)
    path = (out or Path(f"{name}.png")).absolute()
    if path.suffix != ".png":
        raise ConfigError(f"--out {out}: expected a file name that ends in .png.")
    from fairflower.data import prepare
    from fairflower.data.cache import make_data_set
    from fairflower.data.show import clients_table, contact_sheet, examples_table

    federation = prepare(config.data)
    if (factor := config.data.imbalance_factor) > 1 and "data.clients-per-domain" in settings:
        console.print(
            f"data.clients-per-domain has no effect, because data.imbalance-factor = {factor} "
            "determines the number of clients per domain.",
            soft_wrap=True,
            highlight=False,
        )
    if federation.kind != "images":
        if out:
            raise ConfigError(
                f"--out {out}: {federation.kind} cannot be drawn as images. Remove --out."
            )
        names = getattr(make_data_set(config.data), "feature_names", ())
        console.print(clients_table(federation), examples_table(federation, names))
        return
    console.print(clients_table(federation))
    contact_sheet(federation, path)
    say_where("contact sheet", path)
