"""``fairflower deploy``: certificates, keys and trial deployments."""

import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from fairflower.cli.options import (
    Client,
    ConfigOverrides,
    OutputDir,
    methods_named,
    refuse_keys,
    with_settings,
)
from fairflower.cli.report import print_report
from fairflower.cli.terminal import console, friendly_errors, say
from fairflower.config import ClientConfig, StrategyConfig
from fairflower.errors import ConfigError, quoted
from fairflower.machine import HANGUP
from fairflower.paths import new_folder
from fairflower.plans.plan import grid_configs

_SITES_TRAIN = "every site trains in processes of its own"

#: Keys of other runs that have no effect in a trial -> why, or what to do instead.
_OTHERWISE = {
    "output-dir": "use --output-dir",
    **dict.fromkeys(("engine", "workers", "ray-address", "client-gpus"), _SITES_TRAIN),
}


@with_settings("data", "data_dir", "model", "rounds", "epochs", "lr")
def trial(
    *,
    strategies: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated strategies; each is trained in a separate run. Default: the "
            "value of strategy.name."
        ),
    ] = None,
    sites: Annotated[
        int | None, typer.Option(min=1, help="Number of SuperNodes. Default: one per client.")
    ] = None,
    site: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DOMAIN=FOLDER",
            help="Domain and data folder of a site. Repeat the option for each site.",
        ),
    ] = None,
    client: Client = None,
    overrides: ConfigOverrides,
    output_dir: OutputDir = None,
) -> None:
    """Try out a deployment on this machine: a SuperLink and SuperNodes with TLS and keys.

    Either all sites share a data set, or each site has its own folder: --site svhn=/data/svhn
    --site usps=/data/usps. Folders contain .npz files unless --data names another data set.

    Each site starts a process for every message, so a round takes at least ten seconds. Unless
    options or --config set them, there are 3 rounds and one client per domain. All processes end
    with the command, even after Ctrl-C.
    """
    from fairflower.deploy import local

    settings: dict[str, Any] = {"num-server-rounds": 3, "data.clients-per-domain": 1}
    settings |= {"data.name": "npz"} if site else {}
    settings |= overrides.settings
    settings.pop("output-dir", None)
    refuse_keys(overrides, _OTHERWISE)
    strategy_configs = methods_named(overrides, StrategyConfig, "--strategies", strategies)
    client_configs = methods_named(overrides, ClientConfig, "--client", client)
    if settings.get("resume"):
        raise ConfigError(
            f"resume = {quoted(settings['resume'])}: a trial starts new runs. Remove this setting."
        )
    grid = grid_configs(settings, strategy_configs, overrides.shared, client_configs)
    configs = list(map(local.deployable, grid))
    by = configs[0].evaluate.by
    if (asked := overrides.assigned.get("evaluate.by", by)) != by:
        raise ConfigError(
            f"evaluate.by = {quoted(asked)}: in a trial with these settings it is {by!r}. Remove "
            "this setting."
        )
    folder, data = new_folder("trials", output_dir), configs[0].data
    if site and sites is not None:
        raise ConfigError(
            f"--sites {sites}: the --site options determine the number of sites. Remove --sites."
        )
    if site and configs[0].privacy.on:
        raise ConfigError(
            "privacy.noise-multiplier above 0: sites with their own folders test the model "
            "themselves, and no noise is added to their accuracies. Omit --site, so that the sites "
            "share a data set on which the server tests, or set privacy.noise-multiplier = 0."
        )
    if site:
        nodes = local.nodes_with_folders(site, data)
        configs = [replace(config, sites=len(nodes)) for config in configs]
    else:
        data, nodes = local.nodes_with_shares(data, sites)
    for node in nodes:  # all sites of a trial are on this machine
        node["smallest-group"] = data.smallest_group
    # A signal that ends this process must also end the SuperLink and the SuperNodes.
    for number in (signal.SIGTERM, *HANGUP):
        signal.signal(number, signal.default_int_handler)
    show = partial(console.print, soft_wrap=True)
    with local.LocalDeployment(folder, nodes, lambda x: show(Text.from_ansi(x))) as deployment:
        runs = [deployment.run(replace(config, data=data)) for config in configs]
    if configs[0].statistics:
        from fairflower.report.data_statistics import read_statistics, statistics_text

        console.print(*(statistics_text(read_statistics(run)) for run in runs))
        return
    print_report(runs, folder / "report")


@friendly_errors(extra="")
def certificates(
    hosts: Annotated[list[str], typer.Argument(help="Host names and IP addresses of the server.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Output folder.")] = Path("certificates"),
    days: Annotated[
        int, typer.Option(min=1, help="Number of days for which the certificates are valid.")
    ] = 365,
) -> None:
    """Write the files ca.crt for the sites, and server.pem and server.key for the SuperLink."""
    from fairflower.deploy.credentials import make_certificates

    for file in make_certificates(out, hosts, days):
        say(file)


@friendly_errors(extra="")
def key(
    path: Annotated[
        Path,
        typer.Argument(help="File for the private key. The public key is written to <path>.pub."),
    ],
) -> None:
    """Write a key pair for a SuperNode; the server's operator must register the public key."""
    from fairflower.deploy.credentials import make_key_pair

    if not path.name:
        raise ConfigError(
            f"{str(path)!r} is not the name of a file. Give a file name for the private key."
        )
    public = make_key_pair(path)
    say(f"{path}\n{public}")
