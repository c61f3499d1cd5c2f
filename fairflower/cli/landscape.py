"""``fairflower landscape``: plot the loss around a run's final model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from fairflower.cli.options import NUMBER, DataDir, Device, RunFolders
from fairflower.cli.terminal import console, friendly_errors, say_where
from fairflower.errors import ConfigError
from fairflower.paths import run_folders

if TYPE_CHECKING:
    from fairflower.final_model.landscape import Landscape


@friendly_errors()
def landscape(
    runs: RunFolders,
    grid: Annotated[
        int, typer.Option(help="Number of points along each side of the grid; must be odd.")
    ] = 21,
    span: Annotated[
        float,
        typer.Option(
            help="Largest step along each direction; a step of 1 moves each filter by the "
            "filter's norm.",
            **NUMBER,
        ),
    ] = 1.0,
    images: Annotated[
        int,
        typer.Option(help="Number of training and of test examples per domain. 0 means all."),
    ] = 500,
    seed: Annotated[
        int, typer.Option(help="Random seed for choosing the directions and the examples.")
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Output folder. Default: each run's own folder."),
    ] = None,
    data_dir: DataDir = None,
    device: Device = "auto",
) -> None:
    """Plot the loss around the final model, on training and test examples of every domain.

    Writes landscape.png, landscape.svg and landscape.csv. Figures of several runs use the same
    contour levels.
    """
    from fairflower.final_model.contours import draw, levels_of
    from fairflower.final_model.landscape import landscape as explore
    from fairflower.report import read_run
    from fairflower.server.progress import counting_bar

    if out and out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file. Name a folder.")
    selected = [read_run(folder) for folder in run_folders(*runs)]
    if out and len({run.path.name for run in selected}) < len(selected):
        raise ConfigError(
            f"--out {out}: several runs have the same folder name, so their files would "
            "overwrite each other. Remove --out."
        )
    landscapes, places = [], []
    with counting_bar(console, "points", transient=True) as bar:
        tasks = [bar.add_task(run.path.name, total=grid**2) for run in selected]
        for run, task in zip(selected, tasks, strict=True):
            landscapes.append(
                explore(
                    run,
                    grid=grid,
                    span=span,
                    images=images,
                    seed=seed,
                    data_dir=data_dir or "",
                    device=device,
                    advance=lambda task=task: bar.advance(task),  # type: ignore[misc]
                )
            )
            folder, prefix = (out, f"{run.path.name}-") if out else (run.path, "")
            folder.mkdir(parents=True, exist_ok=True)
            landscapes[-1].write_csv(folder / f"{prefix}landscape.csv")
            places.append((folder, prefix))
    levels = levels_of(landscapes)
    for run, surfaces, (folder, prefix) in zip(selected, landscapes, places, strict=True):
        draw(surfaces, levels, folder, prefix)
        console.print(_heights(run.path.name, surfaces))
        say_where("landscape", folder / f"{prefix}landscape.png")


def _heights(run: str, landscape: Landscape) -> Table:
    """Return a table of the model's loss and the mean increase in the loss around it."""
    table = Table(title=f"Loss around the model of {escape(run)}", title_justify="left")
    for column in ("domain", "examples", "loss", "mean rise"):
        table.add_column(column, justify="left" if column == "domain" else "right")
    for surface in landscape.surfaces:
        rise = surface.loss.mean() - surface.center
        numbers = (f"{surface.num_images} {surface.split}", f"{surface.center:.4f}", f"{rise:.4f}")
        table.add_row(escape(surface.domain), *numbers)
    return table
