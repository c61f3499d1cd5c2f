"""``fairflower sharpness``: measure how sharp the loss is at a run's final model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from fairflower.cli.options import NUMBER, DataDir, Device, RunFolders
from fairflower.cli.terminal import console, friendly_errors, say_where
from fairflower.paths import check_output, run_folders

if TYPE_CHECKING:
    from fairflower.final_model.landscape import ClientSharpness


@friendly_errors()
def sharpness(
    runs: RunFolders,
    rho: Annotated[
        float | None,
        typer.Option(help="Perturbation radius. Default: measure.rho of each run.", **NUMBER),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Output file (.csv) with the sharpness of every client."),
    ] = None,
    data_dir: DataDir = None,
    device: Device = "auto",
) -> None:
    """Measure the sharpness of each client's loss at the final model (FedISM's Table 7)."""
    from fairflower.final_model.landscape import client_sharpness, write_csv
    from fairflower.report import read_run
    from fairflower.report.methods import method_names
    from fairflower.server.progress import counting_bar

    if out:
        check_output(out)
    selected = [read_run(folder) for folder in run_folders(*runs)]
    measured = []
    with counting_bar(console, "points", transient=True) as bar:
        task = bar.add_task("clients", total=sum(len(run.clients) for run in selected))
        for run, name in zip(selected, method_names(selected), strict=True):
            sharpness = client_sharpness(
                run,
                rho=rho,
                data_dir=data_dir or "",
                device=device,
                advance=lambda: bar.advance(task),
            )
            measured.append(replace(sharpness, label=name))
    console.print(by_method(measured))
    if out:
        write_csv(measured, out)
        say_where("sharpness", out)


def by_method(measured: list[ClientSharpness]) -> Table:
    """Return a table with a row for each method: mean and standard deviation over clients."""
    import numpy as np

    table = Table(
        title="Sharpness of the final model over clients",
        caption="Mean over the clients of each domain; mean (all) and standard deviation (std, "
        "ddof 0) over all clients. All values are averaged over a method's runs.",
        title_justify="left",
        caption_justify="left",
    )
    methods: dict[tuple[str, tuple[str, ...]], list[ClientSharpness]] = {}
    for sharpness in measured:
        methods.setdefault((sharpness.label, tuple(sharpness.values)), []).append(sharpness)
    domains = list(dict.fromkeys(domain for _, groups in methods for domain in groups))
    table.add_column("method", overflow="fold")
    for column in (*domains, "all", "std"):
        table.add_column(escape(column), justify="right")
    for (label, groups), runs in methods.items():
        shown = [
            f"{np.mean([sharpness.values[d].mean() for sharpness in runs]):.4f}"
            if d in groups
            else ""
            for d in domains
        ]
        overall = np.mean([sharpness.over_clients for sharpness in runs], axis=0)
        count = f" ({len(runs)} runs)" if len(runs) > 1 else ""
        table.add_row(escape(label) + count, *shown, *(f"{value:.4f}" for value in overall))
    return table
