"""Measure how sharp each client's loss is at the final model of runs (FedISM's Table 7).

python -m experiments.sharpness RUN ...
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.markup import escape
from rich.table import Table

from fairflower.api.final_model import load_run_model
from fairflower.cli.options import NUMBER, DataDir, Device, RunFolders
from fairflower.cli.terminal import console, friendly_errors, say_where
from fairflower.clients import sharpness
from fairflower.errors import ConfigError
from fairflower.files import cell_of
from fairflower.numerics import Vector
from fairflower.paths import check_output_file, run_folders
from fairflower.report import Run, read_run
from fairflower.report.methods import group_runs
from fairflower.server.progress import counting_bar
from fairflower.training.batches import examples_of


@dataclass(frozen=True)
class ClientSharpness:
    """Sharpness of a run's final model for each client."""

    label: str
    seed: int
    values: Mapping[str, Vector]  # domain -> sharpness for each of its clients, shape [k]

    @property
    def over_clients(self) -> tuple[float, float]:
        """Mean and standard deviation (ddof 0) over all clients."""
        every = np.concatenate(list(self.values.values()))
        return float(every.mean()), float(every.std())


def client_sharpness(
    run: Run,
    *,
    rho: float | None = None,
    data_dir: str = "",
    device: str = "auto",
    advance: Callable[[], object] = lambda: None,
) -> ClientSharpness:
    """Measure the final model's sharpness on each client's training images, without augmentation.

    ``data_dir``, ``device`` and errors are as in `load_run_model`. ``rho`` is the perturbation
    radius (`fairflower.clients.sharpness`); the default is the run's ``measure.rho``. ``advance``
    is called after every client.
    """
    if rho is not None and not 0 <= rho < float("inf"):
        raise ConfigError(f"--rho {rho}: expected a finite number >= 0.")
    config, federation, model, chosen = load_run_model(run, data_dir, device)
    radius = config.measure.rho if rho is None else rho
    values: dict[str, list[float]] = {domain: [] for domain in federation.domains}
    for client in federation.clients:
        split = federation.train(client.client_id)
        images = examples_of(split, federation.mean, federation.std, device=chosen)
        values[client.domain].append(sharpness(model, images, rho=radius))
        advance()
    by_domain = {domain: np.array(list_) for domain, list_ in values.items()}
    return ClientSharpness(run.label, int(run.seed), by_domain)


def write_csv(measured: Iterable[ClientSharpness], path: Path) -> None:
    """Write a CSV file: method, seed, domain, place (client's index in its domain), sharpness."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["method", "seed", "domain", "place", "sharpness"])
        for of_run in measured:
            for domain, values in of_run.values.items():
                for place, value in enumerate(values.tolist()):
                    cells = of_run.label, of_run.seed, domain, place, value
                    writer.writerow(map(cell_of, cells))


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@friendly_errors()
def measure(
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
    if out:
        check_output_file(out, ".csv")
    selected = [read_run(folder) for folder in run_folders(*runs)]
    names = {id(run): method.name for of in group_runs(selected) for method, run in of.runs}
    measured = []
    with counting_bar(console, "clients", transient=True) as bar:
        task = bar.add_task("clients", total=sum(len(run.clients) for run in selected))
        for run in selected:
            found = client_sharpness(
                run,
                rho=rho,
                data_dir=data_dir or "",
                device=device,
                advance=lambda: bar.advance(task),
            )
            measured.append(replace(found, label=names[id(run)]))
    console.print(by_method(measured))
    if out:
        write_csv(measured, out)
        say_where("sharpness", out)


def by_method(measured: list[ClientSharpness]) -> Table:
    """Return a table of each method's mean sharpness per domain and over all clients."""
    table = Table(
        title="Sharpness of the final model over clients",
        caption="Mean over the clients of each domain; mean and standard deviation (ddof 0) over "
        "all clients. All values are averaged over a method's runs.",
        title_justify="left",
        caption_justify="left",
    )
    methods: dict[tuple[str, tuple[str, ...]], list[ClientSharpness]] = {}
    for of_run in measured:
        methods.setdefault((of_run.label, tuple(of_run.values)), []).append(of_run)
    # Domains are rows, because a column that does not fit would be cropped.
    for heading in ("method", "domain"):
        table.add_column(heading, overflow="fold")
    table.add_column("sharpness", justify="right", no_wrap=True)
    for (label, domains), runs in methods.items():
        count = f" ({len(runs)} runs)" if len(runs) > 1 else ""
        mean, std = np.mean([of_run.over_clients for of_run in runs], axis=0)
        table.add_section()
        table.add_row(escape(label) + count, "all clients", f"{mean:.4f} ±{std:.4f}")
        for domain in domains:
            mean = np.mean([of_run.values[domain].mean() for of_run in runs])
            table.add_row("", escape(domain), f"{mean:.4f}")
    return table


if __name__ == "__main__":
    app()
