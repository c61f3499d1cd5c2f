"""Deployments of real processes with TLS and authenticated sites; certificates and keys."""

from __future__ import annotations

import os
import ssl
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import tiny_data_sets
from click.testing import Result
from command import call, invoke
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError
from processes import ROOT, TIMEOUT, belonging_to, wait_for
from rich.console import Console

from fairflower.client_app import app
from fairflower.config import DataConfig, RunConfig
from fairflower.config.settings import EvaluateConfig
from fairflower.config.text import Scalar, toml_value
from fairflower.deploy.credentials import make_certificates, make_key_pair
from fairflower.deploy.local import (
    HOST,
    SUPERLINK_NAME,
    LocalDeployment,
    Process,
    environment,
    free_port,
    nodes_of,
)
from fairflower.engines.inline import InlineGrid
from fairflower.errors import ConfigError, TrialError
from fairflower.report import Run, read_run, terminal_table
from fairflower.server.contents import read_facts
from fairflower.server.folder import LOCK
from fairflower.server.session import Session

#: In the order in which the sites are started, which is not the order of client ids.
DOMAINS = ("plain", "inverted", "rotated", "printed")
DROPPED = "rotated"  # the site that is killed
NUMBER = sorted(DOMAINS).index(DROPPED)


def config(strategy: str, rounds: int, data: str = "npz", client: str = "sgd") -> RunConfig:
    return RunConfig.from_flat(
        {
            "strategy.name": strategy,
            "client.name": client,
            "num-server-rounds": rounds,
            "data.name": data,
            "evaluate.by": "clients",
            "sites": len(DOMAINS),
            "train.local-epochs": 1,
            "evaluate.every": rounds,
            "round-timeout": TIMEOUT,
        }
    )


def test_a_certificate_is_valid_only_for_its_hosts_and_its_authority(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path / "a", ["fl.example.org", "10.1.2.3"], days=30)
    other = make_certificates(tmp_path / "b", ["fl.example.org"])
    certificate = x509.load_pem_x509_certificate(certificates.certificate.read_bytes())

    def verify(authority: Path, host: str) -> None:
        store = Store([x509.load_pem_x509_certificate(authority.read_bytes())])
        builder = PolicyBuilder().store(store).time(datetime.now(UTC))
        builder.build_server_verifier(x509.DNSName(host)).verify(certificate, [])

    verify(certificates.authority, "fl.example.org")
    for authority, host in (
        (other.authority, "fl.example.org"),
        (certificates.authority, "example.org"),
    ):
        with pytest.raises(VerificationError):
            verify(authority, host)
    assert 29 <= (certificate.not_valid_after_utc - datetime.now(UTC)).days <= 30
    assert stat.S_IMODE(certificates.key.stat().st_mode) == 0o600


def test_a_certificate_supports_host_names_longer_than_a_common_name(tmp_path: Path) -> None:
    host = ".".join(["a-load-balancer-of-a-cloud"] * 3)
    certificates = make_certificates(tmp_path, [host])
    certificate, authority = map(
        x509.load_pem_x509_certificate,
        (certificates.certificate.read_bytes(), certificates.authority.read_bytes()),
    )
    builder = PolicyBuilder().store(Store([authority])).time(datetime.now(UTC))
    builder.build_server_verifier(x509.DNSName(host)).verify(certificate, [])


def test_a_key_pair_has_the_format_that_flower_reads(tmp_path: Path) -> None:
    public = make_key_pair(tmp_path / "keys" / "site")
    private = tmp_path / "keys" / "site"
    key = load_ssh_private_key(private.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.curve.name == "secp384r1"
    known = load_ssh_public_key(public.read_bytes())
    assert isinstance(known, ec.EllipticCurvePublicKey)
    assert key.public_key().public_numbers() == known.public_numbers()
    assert stat.S_IMODE(private.stat().st_mode) == 0o600


def test_existing_certificates_and_keys_are_not_overwritten(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["localhost"])
    public = make_key_pair(tmp_path / "site").read_bytes()
    authority = (tmp_path / "ca.crt").read_bytes()
    with pytest.raises(FileExistsError):
        make_certificates(tmp_path, ["localhost"])
    with pytest.raises(FileExistsError):
        make_key_pair(tmp_path / "site")
    assert (tmp_path / "ca.crt").read_bytes() == authority
    assert (tmp_path / "site.pub").read_bytes() == public


def test_the_error_of_a_process_that_ended_early_shows_its_output(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('no such key'); sys.exit(3)"]
    process = Process("The SuperLink", command, tmp_path / "home", tmp_path / "log")
    process.start()
    wait_for(lambda: process.exit_code is not None, "the process to end")
    with pytest.raises(TrialError, match=r"The SuperLink ended with exit code 3:\nno such key"):
        process.check()
    process.end()


def test_killing_a_process_ends_its_children(tmp_path: Path) -> None:
    parent = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    child = f"import time; time.sleep({3 * TIMEOUT})"
    process = Process("parent", [sys.executable, "-c", parent, child], tmp_path, tmp_path / "log")
    process.start()
    wait_for(lambda: len(belonging_to(tmp_path)) == 2, "the child")
    process.kill()
    wait_for(lambda: not belonging_to(tmp_path), "both to end")


def test_a_timeout_of_a_flwr_command_names_the_command(tmp_path: Path, monkeypatch) -> None:
    def late(*_: object, timeout: float, **__: object) -> None:
        raise subprocess.TimeoutExpired("flwr", timeout)

    monkeypatch.setattr("subprocess.run", late)
    trial = SimpleNamespace(superlink=SimpleNamespace(home=tmp_path))
    with pytest.raises(TrialError, match=r"flwr list prod: no answer after \d+ seconds"):
        LocalDeployment.flwr(cast(LocalDeployment, trial), "list", "prod")


def test_free_port_returns_distinct_ports() -> None:
    ports = [free_port() for _ in range(500)]
    assert len(set(ports)) == 500


def test_a_trial_refuses_a_folder_that_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "superlink.log").touch()
    result = invoke("deploy", "trial", f"--output-dir={tmp_path}", env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "is not empty, but a trial needs an empty folder" in " ".join(result.output.split())


def test_superlink_and_superexec_share_a_secret_with_private_permissions(tmp_path: Path) -> None:
    trial = LocalDeployment(tmp_path, [])
    option = "--superexec-auth-secret-file"
    commands = trial.superlink.command, trial._executor.command
    one, other = (Path(command[command.index(option) + 1]) for command in commands)
    assert one == other
    assert len(one.read_bytes()) == 32
    assert stat.S_IMODE(one.stat().st_mode) == 0o600


def test_a_superlink_that_ended_is_reported(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("fairflower.deploy.local.TIMEOUT", 0.1)
    trial = LocalDeployment(tmp_path / "trial", [])
    monkeypatch.setattr(trial, "_say_log", lambda run_id: None)
    command = [sys.executable, "-c", "print('out of memory'); exit(3)"]
    trial.superlink = Process("The SuperLink", command, tmp_path, tmp_path / "superlink.log")
    trial.superlink.start()
    trial.superlink._process.wait()
    with pytest.raises(TrialError, match=r"The SuperLink ended with exit code 3:\nout of memory"):
        trial._follow("1")


def test_a_superexec_that_ended_before_the_run_started_is_reported(
    tmp_path: Path, monkeypatch
) -> None:
    endless = tmp_path / "flwr"
    endless.write_text(f"#!{sys.executable}\nimport time\nprint('waiting')\ntime.sleep(600)\n")
    endless.chmod(0o755)
    messages: list[str] = []
    trial = LocalDeployment(tmp_path / "trial", [], messages.append)
    monkeypatch.setattr("fairflower.deploy.local.script", lambda name: str(endless))
    monkeypatch.setattr(trial, "_answers", lambda: True)
    pending = {"runs": [{"status": "pending"}]}
    monkeypatch.setattr(trial, "flwr_json", lambda *arguments: pending)
    command = [sys.executable, "-c", "print('no secret'); exit(3)"]
    trial._executor = Process("The SuperExec", command, tmp_path, tmp_path / "superexec.log")
    trial._executor.start()
    with pytest.raises(TrialError, match=r"The SuperExec ended with exit code 3:\nno secret"):
        trial._follow("1")
    assert messages == ["waiting"]


ANSWERED = "INFO : Receiving: query message (ID: 7)\nINFO : Sent successfully\n"
ASKED = f"{ANSWERED}INFO : Receiving: train message (ID: 8)\nINFO : Received successfully\n"


def test_a_trial_says_for_which_sites_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = "import time, pathlib\nprint('log', flush=True)\n"
    log += f"p = pathlib.Path({str(tmp_path / 'ended')!r})\nwhile not p.exists(): time.sleep(0.1)"
    endless = tmp_path / "flwr"
    endless.write_text(f"#!{sys.executable}\n{log}")
    endless.chmod(0o755)
    messages: list[str] = []

    def say(line: str) -> None:
        messages.append(line)
        if line.startswith("Waiting for"):
            (tmp_path / "ended").touch()  # the run

    trial = LocalDeployment(tmp_path / "trial", [{}, {}, {}], say)
    for site, text in zip(trial.sites, (ASKED, ASKED, ANSWERED), strict=True):
        site.log.parent.mkdir(exist_ok=True)
        site.log.write_text(text)
    monkeypatch.setattr("fairflower.deploy.local.script", lambda name: str(endless))
    monkeypatch.setattr("fairflower.deploy.local.SAY_EVERY", 0.1)
    monkeypatch.setattr(trial, "_answers", lambda: True)
    done = {"runs": [{"status": "finished:completed"}]}
    monkeypatch.setattr(trial, "flwr_json", lambda *arguments: done)
    assert trial._follow("1") == done["runs"][0]
    assert set(messages) == {"log", "Waiting for site-0 (train), site-1 (train)"}


def test_a_trial_that_is_interrupted_says_that_it_stops(tmp_path: Path, monkeypatch) -> None:
    messages: list[str] = []
    trial = LocalDeployment(tmp_path / "trial", [], messages.append)

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trial.superlink, "start", interrupted)
    with pytest.raises(KeyboardInterrupt), trial:
        pass
    assert messages[-1] == "Stopping the SuperLink and the sites, which takes some seconds"


def test_a_number_of_sites_that_is_not_a_multiple_of_the_domains_is_refused(tmp_path: Path) -> None:
    arguments = ["deploy", "trial", "--sites=6", f"--output-dir={tmp_path / 'trial'}"]
    result = invoke(*arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "each of the 4 domains of uci-digits gets the same number of sites" in result.output
    assert "Choose 4, 8" in result.output
    assert not (tmp_path / "trial").exists()


def test_sites_are_divided_by_domain_also_with_corrupted_clients() -> None:
    data = DataConfig(examples_per_client=10, test_examples=10, corrupted_clients=1)
    divided, nodes = nodes_of(data, None, sites=8)
    assert (divided.clients_per_domain, len(nodes)) == (2, 8)
    assert len(nodes_of(replace(data, held_out="plain"), None, sites=6)[1]) == 6
    with pytest.raises(ConfigError, match=r"--sites 8: data\.imbalance-factor = 5 determines"):
        nodes_of(DataConfig(imbalance_factor=5), None, sites=8)


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


def test_connections_to_this_machine_bypass_proxies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # no one listens there
    certificates = make_certificates(tmp_path, [HOST])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates.certificate, certificates.key)
    with HTTPServer((HOST, 0), Healthy) as server:
        server.timeout = 10
        server.socket = context.wrap_socket(server.socket, server_side=True)
        trial = SimpleNamespace(certificates=certificates, port=server.server_port)
        with ThreadPoolExecutor() as pool:
            pool.submit(server.handle_request)
            assert LocalDeployment._answers(cast(LocalDeployment, trial))
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("no_grpc_proxy", "b.org")
    for given, expected in (("", HOST), ("a.org", f"a.org,{HOST}"), ("*", "*")):
        monkeypatch.setenv("NO_PROXY", given)
        variables = environment(tmp_path)
        assert variables["no_proxy"] == variables["NO_PROXY"] == expected
        others = {"*": ""}.get(expected, f"{expected},")
        assert variables["no_grpc_proxy"] == f"b.org,{others}{HOST}"


def test_the_command_line_creates_certificates_and_keys(tmp_path: Path) -> None:
    out, key = tmp_path / "certificates", tmp_path / "keys" / "site"
    call("deploy", "certificates", "localhost", f"--out={out}")
    call("deploy", "key", key)
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert names == {"ca.crt", "server.pem", "server.key", "site", "site.pub"}
    assert "File exists" in call("deploy", "key", key, expect=1)


# --- trials on one machine ------------------------------------------------------------------


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect nodes and configs of trials, without starting a process."""
    calls: list[Any] = []

    class NoTrial:
        def __init__(self, folder: Path, nodes: Any, say: Any) -> None:
            self.nodes = nodes

        def __enter__(self) -> NoTrial:
            return self

        def __exit__(self, *_: object) -> None: ...

        def run(self, config: RunConfig) -> Path:
            calls.append((self.nodes, config))
            raise TrialError("There is none.")

    monkeypatch.setattr("fairflower.deploy.local.LocalDeployment", NoTrial)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    return calls


def try_sites(place: Path, *arguments: str) -> Result:
    command = ["deploy", "trial", *arguments, f"--output-dir={place / 'trial'}"]
    return invoke(*command, env={"COLUMNS": "200"})


def small(folder: Path, side: int = 8) -> Path:
    """A folder of a few images."""
    folder.mkdir(parents=True)
    pictures, labels = np.zeros((4, side, side), np.uint8), np.arange(4) % 2
    np.savez(folder / "x.npz", x_train=pictures, y_train=labels, x_test=pictures, y_test=labels)
    return folder


def test_a_trial_gives_every_site_its_own_folder(tmp_path: Path, trials: list[Any]) -> None:
    one, two = small(tmp_path / "one"), small(tmp_path / "two")
    sites = [f"--site=svhn={one}", f"--site=usps={two}", f"--site=usps={one}"]
    assert "There is none" in try_sites(tmp_path, *sites).output
    ((nodes, config),) = trials
    every = {"smallest-group": 5, "share-own-model": True, "test-others-models": True}
    assert nodes == [
        {"domain": "svhn", "data-dir": str(one), **every},
        {"domain": "usps", "data-dir": str(two), **every},
        {"domain": "usps", "data-dir": str(one), **every},
    ]
    assert (config.data.name, config.sites) == ("npz", 3)


@pytest.mark.parametrize(
    ("given", "label"),
    [
        ([], "moon:mu=2.0+fedequilibria:t=0.8"),
        (["--client=sgd"], "fedequilibria:t=0.8"),
        (
            ["--strategies=fedequilibria:scale=none", "--client=moon:tau=0.1"],
            "moon:mu=2.0:tau=0.1+fedequilibria:t=0.8:scale=none",
        ),
        (["--strategies=uniform"], "moon:mu=2.0+uniform"),
        (["--strategies=term,fedavg", "--set=strategy.t=0.5"], "moon:mu=2.0+term:t=0.5"),
    ],
)
def test_a_trial_takes_arguments_from_the_config_if_the_name_is_the_same(
    given: list[str], label: str, tmp_path: Path, trials: list[Any]
) -> None:
    tables = {"strategy": 'name = "fedequilibria"\nt = 0.8', "client": 'name = "moon"\nmu = 2.0'}
    text = "\n".join(f"[{table}]\n{lines}" for table, lines in tables.items())
    (tmp_path / "own.toml").write_text(text)
    assert (
        "There is none" in try_sites(tmp_path, f"--config={tmp_path / 'own.toml'}", *given).output
    )
    ((_, config),) = trials
    assert config.label == label


def test_a_trial_takes_settings_and_file_paths_from_a_config(
    tmp_path: Path, trials: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trace.csv").write_text("round,client\n1,0\n")
    Path("own.toml").write_text(
        'num-server-rounds = 7\ndata.clients-per-domain = 2\nmodel.name = "resnet18"\n'
        'model.weights = "w.pth"\nparticipation.availability = "trace.csv"\n'
    )
    assert "There is none" in try_sites(tmp_path, "--config=own.toml").output
    assert "There is none" in try_sites(tmp_path).output
    (nodes, config), (_, plain) = trials
    assert (config.num_server_rounds, config.evaluate.by, len(nodes)) == (7, "clients", 8)
    assert (plain.num_server_rounds, plain.data.clients_per_domain) == (3, 1)
    # The ServerApp has another working directory.
    assert config.model.weights == str(tmp_path / "w.pth")
    assert config.participation.availability == str(tmp_path / "trace.csv")


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ("data.held-out=plain", "no client has this domain"),
        ("resume=runs/1", "resume: a trial does not accept this setting: it starts new runs"),
        ("participation.availability=gone.csv", "gone.csv"),
        ("output-dir=foo", "setting: use --output-dir"),
        ("engine=ray", "setting: every site trains in processes of its own"),
        ("workers=7", "setting: every site trains in processes of its own"),
        ("evaluate.by=server", "'server': in a trial with these settings it is 'clients'"),
    ],
)
def test_invalid_settings_are_refused_before_a_trial_starts(
    setting: str, error: str, tmp_path: Path, trials: list[Any]
) -> None:
    result = try_sites(tmp_path, f"--set={setting}")
    assert result.exit_code == 2
    assert error in result.output
    assert not trials


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["svhn={a}"], "needs at least two sites"),
        (["svhn={a}", "{b}"], "expected <domain>=<folder>, for example svhn=/data/svhn"),
        (["svhn={a}", "={b}"], "expected <domain>=<folder>"),
        (["svhn={a}", "usps={b}/gone"], "--site usps={b}/gone: there is no folder {b}/gone"),
        (["svhn={a}", "usps={b}/x.npz"], "there is no folder {b}/x.npz"),
        (["svhn={a}", "usps={empty}"], "--site usps={empty}: {empty} has no .npz file"),
        (["svhn={a}", "usps={b}", "svhn = {a}"], "--site svhn = {a} is given twice"),
        (["svhn={a}", "SVHN={b}"], "spelled 'svhn'. Use the same spelling"),
        (["svhn={a}", 'us"ps={b}'], "which Flower's node configs do not allow"),
        (["svhn={a}", "usps={large}"], "Set data.image-size to resize them"),
    ],
)
def test_invalid_site_options_are_refused_before_a_trial_starts(
    arguments: list[str], error: str, tmp_path: Path, trials: list[Any]
) -> None:
    places = {name: small(tmp_path / name) for name in "ab"}
    places["large"] = small(tmp_path / "large", side=16)
    places["empty"] = tmp_path / "empty"
    places["empty"].mkdir()
    sites = ["--site=" + argument.format(**places) for argument in arguments]
    result = try_sites(tmp_path, *sites)
    assert result.exit_code in (1, 2)
    assert error.format(**places) in result.output
    assert not trials


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ("--sites=2", "the --site options determine the number of sites"),
        ("--data-dir=/data", "cannot be combined with --site, which sets the folder of each site"),
        ("--data=uci-digits", "uci-digits is not read from a folder"),
        ("--data=digits", "Unknown domain 'a'"),
    ],
)
def test_options_that_conflict_with_the_site_option_are_refused(
    option: str, error: str, tmp_path: Path, trials: list[Any]
) -> None:
    sites = [f"--site={name}={small(tmp_path / name)}" for name in "ab"]
    result = try_sites(tmp_path, *sites, option)
    assert result.exit_code in (1, 2)
    assert error in result.output
    assert not trials


# --- a whole deployment ---------------------------------------------------------------------


def intruders(trial: LocalDeployment, folder: Path) -> dict[str, Process]:
    """Return SuperNodes that must be refused, by the message that they get."""
    node = {"domain": "plain", "data-dir": str(folder / "site plain")}
    unregistered = trial.make_site("unregistered", node)
    anonymous = trial.make_site("anonymous", node)
    replace_line(anonymous, "private-key", "")
    fooled = trial.make_site("fooled", node)
    other = make_certificates(folder / "other", ["127.0.0.1"]).authority
    replace_line(fooled, "root-certificates", f"root-certificates = {toml_value(str(other))}")
    return {
        "Failed to activate SuperNode": unregistered,
        "SuperNode authentication is enabled": anonymous,
        "certificate verify failed": fooled,
    }


def replace_line(site: Process, key: str, line: str) -> None:
    """Replace a key's line in a site's settings."""
    file = site.home / "site.toml"
    lines = file.read_text().splitlines()
    file.write_text("\n".join(line if old.startswith(key) else old for old in lines))


def trainings(site: Process) -> int:
    """Return how often a site was asked to train."""
    return site.log.read_text().count("Receiving: train message")


def outage(trial: LocalDeployment, messages: list[str]) -> None:
    """Kill a site while it trains, start it again, and stop the run when the site is back."""
    site = trial.sites[DOMAINS.index(DROPPED)]

    def is_asked_again() -> bool:
        if site.exit_code is not None:  # right after a crash its key is refused
            site.kill()  # also ends its children
            site.start()
        return trainings(site) > after

    try:
        before = trainings(site)
        wait_for(lambda: trainings(site) > before, "the site to be asked to train")
        site.kill()
        wait_for(
            lambda: any(f"continues without {DROPPED}" in line for line in messages),
            "the server to notice",
        )
        after = trainings(site)
        site.start()
        wait_for(is_asked_again, "the site to be asked again")
    finally:
        for run in trial.flwr_json("list", SUPERLINK_NAME)["runs"]:
            if not run["status"].startswith("finished"):
                trial.flwr("stop", run["run-id"], SUPERLINK_NAME)


def restart(trial: LocalDeployment) -> None:
    """Kill the SuperLink while all sites train, and start it again."""
    before = {site.name: len(site.log.read_text()) for site in trial.sites}

    def trains(site: Process) -> bool:
        new = site.log.read_text()[before[site.name] :]
        _, asked, later = new.partition("Receiving: train message")
        return bool(asked) and "Received successfully" in later

    wait_for(lambda: all(map(trains, trial.sites)), "all sites to train")
    trial.superlink.kill()
    trial.superlink.start()


def resumed(trial: LocalDeployment, folder: Path, rounds: int) -> Path:
    """Resume a run, twice if Flower loses a message the first time; return the run folder."""
    own = DataConfig(name="npz")  # its number of clients per domain is the run's
    config = RunConfig(num_server_rounds=rounds, resume=str(folder), data=own)
    try:
        return trial.run(config)
    except TrialError as error:
        if "push session may have expired" not in str(error):
            raise
        return trial.run(config)


def simulated(sites: Sequence[Mapping[str, Scalar]], folder: Path, run_config: RunConfig) -> Run:
    """The same run in this process."""
    grid = InlineGrid(app, len(sites))
    for context, site in zip(grid.contexts.values(), sites, strict=True):
        context.node_config = dict(site)
    run_config = replace(run_config, output_dir=str(folder / "simulated"))
    return read_run(Session(grid, run_config, Console(quiet=True)).run())


@pytest.mark.slow
@pytest.mark.nightly
def test_a_deployment_survives_crashes_and_a_stop_and_refuses_unknown_supernodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    folders = tiny_data_sets.digits_folders(tmp_path, DOMAINS)
    for number, domain in enumerate(DOMAINS):
        tiny_data_sets.write_site_table(folders[domain], number)
    # Where the server and the sites find the data sets of `vectors`.
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"), prepend=os.pathsep)
    nodes = [{"domain": domain, "data-dir": str(folders[domain])} for domain in DOMAINS]
    trial = LocalDeployment(tmp_path / "trial", nodes, messages.append)
    # Without a database, a SuperLink that restarts has lost all messages.
    database = ("--database", str(tmp_path / "trial" / "superlink.db"))
    trial.superlink.command = [*trial.superlink.command, *database]
    with ThreadPoolExecutor() as pool, trial:
        refused = intruders(trial, tmp_path)
        for supernode in refused.values():
            supernode.start()
        equilibria = trial.run(config("fedequilibria", rounds=1))
        for reason, supernode in refused.items():
            wait_for(lambda s=supernode: s.exit_code is not None, f"{supernode.name} to give up")
            assert supernode.exit_code != 0
            assert reason in supernode.log.read_text()
            supernode.kill()  # ends its children, which would ask for work a while longer
        # Control variates at the sites and at the server: lost state would change the model.
        of_tables = config("fedheal", 2, "tiny_data_sets:SiteTable", "scaffold")
        tables = trial.run(of_tables)
        # Heads that only the sites have.
        of_heads = config("fedpw", 2, client="fedper")
        heads = trial.run(of_heads)
        # Normalization layers of the sites that the server stores.
        of_norms = config("fedpw", 2, client="fedbn:keep=server")
        norms = trial.run(of_norms)

        # More rounds than will be done: the run is stopped as soon as the site is back, and then
        # resumed.
        endless = config("fedheal", rounds=100)
        happening = pool.submit(outage, trial, messages)
        with pytest.raises(TrialError, match="The run is finished:stopped"):
            trial.run(endless)
        happening.result()
        (heal,) = (trial.folder / "runs" / "5").iterdir()
        wait_for(lambda: read_facts(heal)["status"] == "stopped", "the ServerApp to end")
        assert "Traceback" not in "\n".join(messages)
        assert not {p.name for p in heal.glob(".*")} - {LOCK}, "a temporary file is left"
        done = int(read_facts(heal)["rounds"])
        happening = pool.submit(restart, trial)
        assert resumed(trial, heal, done + 1) == heal
        happening.result()
    wait_for(lambda: not belonging_to(tmp_path), "all processes to end")

    # Models and accuracies equal those of a simulation.
    runs = [read_run(equilibria), read_run(heal)]
    of_images = config("fedequilibria", rounds=1)
    for run, run_config in (
        (runs[0], of_images),
        (read_run(tables), of_tables),
        (read_run(heads), of_heads),
        (read_run(norms), of_norms),
    ):
        same = simulated(nodes, tmp_path, run_config)
        model, expected = (run.path / "model.safetensors" for run in (run, same))
        assert model.read_bytes() == expected.read_bytes(), run_config.data.name
        np.testing.assert_array_equal(run.values, same.values)
        np.testing.assert_array_equal(run.personal.values, same.personal.values)
    for run in runs:  # one site per domain, in the same order
        np.testing.assert_array_equal(run.values[-1], run.by_client.values[-1])

    rounds = runs[1].diagnostics
    others = [client for client in range(len(DOMAINS)) if client != NUMBER]
    assert rounds[0]["client_ids"] == others
    assert list(rounds[0]["dropped"]) == [str(NUMBER)]
    assert rounds[-1]["client_ids"] == sorted([*others, NUMBER]), (
        "the site is not the same client as before"
    )
    assert [r["round"] for r in rounds] == list(range(1, done + 2))

    table = StringIO()
    Console(file=table, width=200).print(terminal_table(runs))
    words = ("fedequilibria", "fedheal", *DOMAINS, "STD", "MIN")
    assert all(word in table.getvalue() for word in words)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_named_site_joins_a_real_run_and_an_error_of_settings_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    folders = tiny_data_sets.digits_folders(tmp_path, DOMAINS[:3])
    nodes = [{"domain": domain, "data-dir": str(folders[domain])} for domain in folders]
    first, second, third = folders
    listed = {"sites": f"{first},{second}", "late_sites": third}
    with (
        ThreadPoolExecutor() as pool,
        LocalDeployment(tmp_path / "trial", nodes[:2], messages.append) as trial,
    ):
        late = trial.make_site(third, nodes[2])

        def join() -> None:
            wait_for(lambda: any("round   1/" in line for line in messages), "round 1")
            trial._admit(late)

        try:
            happening = pool.submit(join)
            tested = replace(config("fedheal", rounds=5), evaluate=EvaluateConfig(by="clients"))
            run = trial.run(replace(tested, **listed))
            happening.result()
            absent = {"sites": f"{first},nobody", "round_timeout": 30.0}
            with pytest.raises(TrialError, match="finished:failed"):
                trial.run(replace(config("fedheal", rounds=1), **absent))
            home = environment(trial.superlink.home)
            monkeypatch.setenv("FLWR_HOME", home["FLWR_HOME"])
            monkeypatch.setenv("FAIRFLOWER_HOME", home["FAIRFLOWER_HOME"])
            monkeypatch.setenv("COLUMNS", "250")
            sites = call("deploy", "sites", SUPERLINK_NAME)
        finally:
            late.kill()
    text = "\n".join(messages)
    joined = read_facts(run)["joined"]
    assert list(joined) == ["2"]
    assert f"Round {joined['2']}: {third} joins: domain {third}" in text
    trained = [line["client_ids"] for line in read_run(run).diagnostics]
    assert trained == [[0, 1]] * (joined["2"] - 1) + [[0, 1, 2]] * (6 - joined["2"])
    assert all(name in sites for name in folders)
    assert "not connected after 30 s (round-timeout): nobody." in text
    assert "Traceback" not in text
    assert "unhandled exception" not in text
