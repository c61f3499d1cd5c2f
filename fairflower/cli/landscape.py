"""``fairflower landscape``."""

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
    grid: Annotated[int, typer.Option(help="Points along a side of the grid; an odd number.")] = 21,
    span: Annotated[
        float,
        typer.Option(
            help="Largest step along a direction; 1 moves a filter by the filter's norm.", **NUMBER
        ),
    ] = 1.0,
    images: Annotated[
        int, typer.Option(help="Images of each domain for training and for test loss. 0 uses all.")
    ] = 500,
    seed: Annotated[int, typer.Option(help="Seed of the directions and of the images.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder of the figures. Default: each run folder."),
    ] = None,
    data_dir: DataDir = None,
    device: Device = "auto",
) -> None:
    """Draw the loss around the final model, on training and test images of every domain.

    Writes landscape.png, .svg and .csv. Several runs share the contour levels.
    """
    from fairflower.final_model.contours import draw, levels_of
    from fairflower.final_model.landscape import landscape as explore
    from fairflower.report import read_run
    from fairflower.server.progress import counting_bar

    selected = [read_run(folder) for path in runs for folder in run_folders(path)]
    if out and len({run.path.name for run in selected}) < len(selected):
        raise ConfigError(f"--out {out}: several runs have the same folder name. Remove --out.")
    landscapes, places = [], []
    with counting_bar(console, "points", transient=True) as bar:
        tasks = [bar.add_task(run.label, total=grid**2) for run in selected]
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
    for surfaces, (folder, prefix) in zip(landscapes, places, strict=True):
        draw(surfaces, levels, folder, prefix)
        console.print(_heights(surfaces))
        say_where("landscape", folder / f"{prefix}landscape.png")


def _heights(landscape: Landscape) -> Table:
    """Return a table of the model's loss and of the mean rise of the loss around it."""
    table = Table(title=f"Loss around the model of {escape(landscape.label)}", title_justify="left")
    for column in ("domain", "images", "loss", "mean rise"):
        table.add_column(column, justify="left" if column == "domain" else "right")
    for surface in landscape.surfaces:
        rise = surface.loss.mean() - surface.center
        numbers = (f"{surface.num_images} {surface.split}", f"{surface.center:.4f}", f"{rise:.4f}")
        table.add_row(escape(surface.domain), *numbers)
    return table
