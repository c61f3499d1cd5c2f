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
from fairflower.paths import check_output_file, run_folders

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
        check_output_file(out, ".csv")
    selected = [read_run(folder) for folder in run_folders(*runs)]
    measured = []
    with counting_bar(console, "clients", transient=True) as bar:
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
    """Return a table of each method's mean sharpness per domain and over all clients."""
    import numpy as np

    table = Table(
        title="Sharpness of the final model over clients",
        caption="Mean over the clients of each domain; mean and standard deviation (ddof 0) over "
        "all clients. All values are averaged over a method's runs.",
        title_justify="left",
        caption_justify="left",
    )
    methods: dict[tuple[str, tuple[str, ...]], list[ClientSharpness]] = {}
    for sharpness in measured:
        methods.setdefault((sharpness.label, tuple(sharpness.values)), []).append(sharpness)
    # Domains are rows, because a column that does not fit would be cropped.
    for heading in ("method", "domain"):
        table.add_column(heading, overflow="fold")
    table.add_column("sharpness", justify="right", no_wrap=True)
    for (label, domains), runs in methods.items():
        count = f" ({len(runs)} runs)" if len(runs) > 1 else ""
        mean, std = np.mean([sharpness.over_clients for sharpness in runs], axis=0)
        table.add_section()
        table.add_row(escape(label) + count, "all clients", f"{mean:.4f} ±{std:.4f}")
        for domain in domains:
            mean = np.mean([sharpness.values[domain].mean() for sharpness in runs])
            table.add_row("", escape(domain), f"{mean:.4f}")
    return table
