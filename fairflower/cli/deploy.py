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
    Domains,
    NumSites,
    OutputDir,
    Set,
    methods_named,
    output,
    with_settings,
)
from fairflower.cli.report import print_report
from fairflower.cli.terminal import console, friendly_errors, say, say_where, text_table
from fairflower.config import ClientConfig, RunConfig, StrategyConfig
from fairflower.config.run import check_tuned, refuse_keys
from fairflower.config.text import parse_assignments, unknown
from fairflower.errors import ConfigError, quoted
from fairflower.machine import HANGUP
from fairflower.paths import check_output_file, new_folder, read_text
from fairflower.plans.plan import grid_configs

_SITES_TRAIN = "every site trains in processes of its own"

#: Keys of other runs that have no effect in a trial -> why, or what to do instead.
_OTHERWISE = {
    "output-dir": "use --output-dir",
    "resume": "it starts new runs",
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
    sites: NumSites = None,
    site: Domains = None,
    client: Client = None,
    overrides: ConfigOverrides,
    output_dir: OutputDir = None,
) -> None:
    """Try out a deployment on this machine: a SuperLink and SuperNodes with TLS and keys.

    Either all sites share a data set, or each site has its own folder: --site svhn=/data/svhn
    --site usps=/data/usps. Folders contain .npz files unless --data names another data set.

    The sites are those of `fairflower deploy site`, without a policy. Unless options or --config
    set them, there are 3 rounds and one client per domain. All processes end with the command, even
    after Ctrl-C.
    """
    from fairflower.deploy import local

    settings: dict[str, Any] = {"num-server-rounds": 3, "data.clients-per-domain": 1}
    settings |= {"data.name": "npz"} if site else {}
    settings |= overrides.settings
    settings |= {"output-dir": "", "resume": ""}
    refuse_keys(overrides.assigned, _OTHERWISE, "a trial")
    strategy_configs = methods_named(overrides, StrategyConfig, "--strategies", strategies)
    client_configs = methods_named(overrides, ClientConfig, "--client", client)
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
    data, nodes = local.nodes_of(data, site, sites)
    if site:
        configs = [replace(config, sites=len(nodes)) for config in configs]
    for node in nodes:  # all sites of a trial are on this machine, so they share their models
        node["share-own-model"] = node["test-others-models"] = True
    _end_children_on_signals()
    show = partial(console.print, soft_wrap=True)
    with local.LocalDeployment(folder, nodes, lambda x: show(Text.from_ansi(x))) as deployment:
        runs = [deployment.run(replace(config, data=data)) for config in configs]
    if configs[0].statistics:
        from fairflower.report.data_statistics import read_statistics, statistics_text

        console.print(*(statistics_text(read_statistics(run)) for run in runs))
        return
    print_report(runs, folder / "report")


@friendly_errors()
def site(
    config: Annotated[
        Path, typer.Argument(help="TOML file with the site's settings; docs/deployment.md.")
    ],
) -> None:
    """Start a site: a SuperNode, and a process that keeps PyTorch and the data in memory.

    The site runs the fairflower that is installed here, and never code that comes with a run. With
    a policy it refuses what the policy does not allow; the audit log has a line for each message.
    """
    from fairflower.config.site import SiteConfig
    from fairflower.deploy.site import Site

    _end_children_on_signals()
    code = Site(SiteConfig.read(config), config).run()
    raise typer.Exit(code)


@friendly_errors(extra="")
def policy() -> None:
    """Print a site's policy with every key, its meaning and its default, to be edited."""
    from fairflower.deploy.policy import TEMPLATE

    say(read_text(TEMPLATE).rstrip())


@friendly_errors(extra="")
def wheelhouse(
    folder: Annotated[Path, typer.Argument(help="New folder for the wheels.")],
    source: Annotated[Path, typer.Option(help="Clone or wheel of fairflower.")] = Path(),
    extras: Annotated[str, typer.Option(help="Comma-separated extras.")] = "train",
    platform: Annotated[
        str, typer.Option(help="Platform tag, such as manylinux_2_28_x86_64. Default: this one.")
    ] = "",
    python: Annotated[str, typer.Option(help="Version of Python. Default: this one.")] = "",
) -> None:
    """Download all wheels that a site without network needs, with their hashes.

    pip's own settings count: PIP_INDEX_URL, for example, for a PyTorch without CUDA.
    """
    from fairflower.deploy.installation import REQUIREMENTS, make_wheelhouse

    with console.status("Downloading"):
        wheels = make_wheelhouse(folder, source, extras, platform, python)
    size = sum(wheel.stat().st_size for wheel in wheels) / 1e6
    say(f"{len(wheels)} wheels, {size:,.1f} MB. Copy the folder to the site, and run there:")
    say(
        f"pip install --no-index --find-links {folder.name} --require-hashes "
        f"-r {folder.name}/{REQUIREMENTS}"
    )


@friendly_errors(extra="")
def unit(
    command: Annotated[
        list[str], typer.Argument(help="The service's command, after -- if it has options.")
    ],
    user: Annotated[str, typer.Option(help="User who runs the command.")] = "fairflower",
    memory: Annotated[str, typer.Option(help="Most memory: a size or a share.")] = "80%",
    writable: Annotated[
        list[Path] | None, typer.Option(help="Folder to which it writes. Repeat the option.")
    ] = None,
) -> None:
    """Print a systemd unit that keeps a site or a SuperLink running, as a user of its own.

    fairflower deploy unit fairflower deploy site site.toml > fairflower-site.service
    """
    from fairflower.deploy.installation import service

    say(service(command, user, memory, writable or ()))


def _end_children_on_signals() -> None:
    """Let a signal that ends this process raise an exception, so that it ends its children."""
    for number in (signal.SIGTERM, *HANGUP):
        signal.signal(number, signal.default_int_handler)


@friendly_errors()
def leaves(
    config: Annotated[Path, typer.Argument(help="TOML file with a run config.")],
    site: Domains = None,
    sites: NumSites = None,
    set_: Set = None,
    policy: Annotated[
        Path | None, typer.Option(help="The site's policy: whether it trains, and signs.")
    ] = None,
    out: Annotated[Path | None, output("Markdown file for the same table.")] = None,
) -> None:
    """List what leaves a site before, in and after a run: what, how large, to whom, kept where.

    The command rehearses two rounds of one epoch in this process, with the config's other settings,
    and lists what the sites' app sends. Sizes are those of the data set of the config, or of the
    folders in --site: a site that has only its own folder gives it twice, or three times with
    secure aggregation, as different domains.
    """
    from fairflower.config.site import TESTS_ONLY
    from fairflower.deploy import leaves as listing
    from fairflower.deploy import local
    from fairflower.deploy.policy import Policy
    from fairflower.engines.inline import FIRST_NODE
    from fairflower.secure.protocol import SMALLEST_SUM

    if out is not None:
        check_output_file(out, ".md")
    overrides = ConfigOverrides(config, {}, parse_assignments(set_ or [], "--set"))
    settings: dict[str, Any] = {"data.clients-per-domain": 1}
    settings |= {"data.name": "npz"} if site else {}
    run = local.deployable(RunConfig.from_flat(settings | overrides.settings))
    held = Policy.read(policy) if policy else Policy()
    if policy:
        held.check_run(run)
    if site and run.secure_aggregation and len(site) < SMALLEST_SUM:
        raise ConfigError(
            f"--site is given {len(site)} times, but secure-aggregation = true takes "
            f"{SMALLEST_SUM} sites. Repeat the folder under other domains."
        )
    data, nodes = local.nodes_of(run.data, site, sites)
    if not held.trains:  # beside sites that do
        nodes.insert(0, {**nodes[0], TESTS_ONLY: True})
    run = replace(run, data=data, sites=len(nodes))
    with console.status("Rehearsing two rounds"):
        rehearsal = listing.rehearse(run, nodes, bool(held.consortium))
    rehearsal = rehearsal if held.trains else rehearsal.of_site(FIRST_NODE)
    rows = [row.cells() for row in rehearsal.leaving()]
    console.print(text_table("What leaves a site", listing.COLUMNS, rows))
    say(rehearsal.sizes())
    if out is not None:
        out.write_text(rehearsal.markdown(), encoding="utf-8")
        say_where("Table", out)


@friendly_errors(extra="")
def certificates(
    hosts: Annotated[list[str], typer.Argument(help="Host names and IP addresses of the server.")],
    out: Annotated[Path, output("Output folder.")] = Path("certificates"),
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
    policy: Annotated[
        Path | None, typer.Option(help="A site's policy, which has to allow the run.")
    ] = None,
) -> None:
    """Check a run's settings before it is submitted, and that its sites are registered.

    Without the name of a SuperLink, no connection is opened.
    """
    from fairflower.deploy.policy import Policy
    from fairflower.flower_compat import SiteKey, nodes_at
    from fairflower.server.setup import check_num_clients

    run = RunConfig.from_flat(ConfigOverrides(config, {}, {}).settings)
    check_tuned([run])
    if policy is not None:
        Policy.read(policy).check_run(run)
    count = len(run.site_names) or int(run.sites)
    if count and run.evaluate.by == "clients":
        check_num_clients(run, run.strategy.make(), count)
    states = run.listed_sites
    if superlink is not None:
        keys = ((SiteKey.of(node), node) for node in nodes_at(superlink))
        online = {key.name: n.status for key, n in keys if key and n.status != "unregistered"}
        for name in states:
            if name not in online:
                raise ConfigError(f"{config}: sites: {unknown('registered name', name, online)}")
        states = [f"{name} ({online[name]})" for name in states]
    say(f"{config}: {run.label}, {run.num_server_rounds} rounds. {', '.join(states)}".rstrip())


@friendly_errors(extra="")
def fingerprints(
    file: Annotated[
        Path,
        typer.Argument(help="File with the consortium's sites: a line <name> <public key> each."),
    ],
    own: Annotated[
        Path | None,
        typer.Option("--key", help="This site's private key; marks the site's own line."),
    ] = None,
) -> None:
    """Check a consortium's file, and show each site's name and the fingerprint of its key.

    Each site compares the fingerprints with the other sites, by telephone and not through the
    server. `ssh-keygen -lf` shows the same for a site's .pub file.
    """
    from fairflower.config.secure import CONSORTIUM, SIGNING_KEY
    from fairflower.flower_compat import fingerprint
    from fairflower.secure.consortium import Consortium, read_sites

    mine = Consortium.of({CONSORTIUM: file, SIGNING_KEY: own}) if own else None
    for name, public in read_sites(file).items():
        mark = "  (this site)" if mine and name == mine.name else ""
        say(f"{fingerprint(public)}  {name}{mark}")
