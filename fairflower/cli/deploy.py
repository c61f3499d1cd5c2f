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
from fairflower.cli.terminal import console, friendly_errors, say, text_table
from fairflower.config import ClientConfig, RunConfig, StrategyConfig
from fairflower.config.run import check_tuned
from fairflower.config.text import unknown
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
    for node in nodes:  # all sites of a trial are on this machine, so they share their models
        node["smallest-group"] = data.smallest_group
        node["share-own-model"] = node["test-others-models"] = True
    # A signal that ends this process must also end the SuperLink and the SuperNodes.
    for number in (signal.SIGTERM, *HANGUP):
        signal.signal(number, signal.default_int_handler)
    show = partial(console.print, soft_wrap=True)
    with local.LocalDeployment(folder, nodes, lambda x: show(Text.from_ansi(x))) as deployment:
        runs = [deployment.run(replace(config, data=data)) for config in configs]
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


_SuperLink = typer.Argument(help="Name of the SuperLink in ~/.flwr/config.toml. Default: Flower's.")


@friendly_errors(extra="")
def sites(superlink: Annotated[str | None, _SuperLink] = None) -> None:
    """List the registered sites: name, whether it is online and since when, key, and data.

    Data and version are what a site said in the latest run whose server has this $FAIRFLOWER_HOME.
    """
    from fairflower.flower_compat import SiteKey, nodes_at
    from fairflower.server.known_sites import known_sites

    said, rows = known_sites(), []
    for node in nodes_at(superlink):
        if node.status == "unregistered":
            continue
        key = SiteKey.of(node)
        since = node.last_activated_at if node.status == "online" else node.last_deactivated_at
        about = said.get(key.fingerprint, {}) if key else {}
        last = f"{about['about']} ({about['at'][:16]})" if about else "no run yet"
        name = key.name if key else f"node {node.node_id}, without a name"
        rows.append([name, node.status, since[:16], key.fingerprint if key else "", last])
    console.print(
        text_table("", ("site", "status", "since (UTC)", "key", "said of itself"), sorted(rows))
    )


@friendly_errors(extra="")
def check(
    config: Annotated[Path, typer.Argument(help="TOML file for flwr run's --run-config.")],
    superlink: Annotated[str | None, _SuperLink] = None,
) -> None:
    """Check a run's settings before it is submitted, and that its sites are registered.

    Without the name of a SuperLink, no connection is opened.
    """
    from fairflower.flower_compat import SiteKey, nodes_at
    from fairflower.server.setup import check_fewest_clients, check_num_clients

    run = RunConfig.from_flat(ConfigOverrides(config, {}, {}).settings)
    check_tuned([run])
    count = len(run.site_names) or int(run.sites)
    if count and run.evaluate.by == "clients":
        check_num_clients(run, count)
        check_fewest_clients(run, run.strategy.make(), count)
    online: dict[str, str] = {}
    if superlink is not None:
        keys = ((SiteKey.of(node), node) for node in nodes_at(superlink))
        online = {key.name: n.status for key, n in keys if key and n.status != "unregistered"}
    for name in run.listed_sites if superlink is not None else ():
        if name not in online:
            raise ConfigError(f"{config}: sites: {unknown('registered name', name, online)}")
    states = [f"{n} ({online[n]})" if n in online else n for n in run.listed_sites]
    say(f"{config}: {run.label}, {run.num_server_rounds} rounds. {', '.join(states)}".rstrip())
