"""A federation of real processes, with TLS and authenticated sites; certificates and keys."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError
from processes import TIMEOUT, belonging_to
from rich.console import Console
from typer.testing import CliRunner

from fairflower.cli import app as cli
from fairflower.client_app import app
from fairflower.config import RunConfig
from fairflower.deploy.credentials import make_certificates, make_key_pair
from fairflower.deploy.process import Process, TrialError
from fairflower.deploy.trial import Trial
from fairflower.inline import InlineGrid
from fairflower.report import read_run, terminal_table
from fairflower.session import Session

#: Each starts many processes and waits for them; on a machine that is busy otherwise the wait
#: has been in vain, so they are run by hand: FAIRFLOWER_TRIAL=1 pytest --slow.
UNVERIFIED = pytest.mark.skipif(
    "FAIRFLOWER_TRIAL" not in os.environ, reason="run by hand, with FAIRFLOWER_TRIAL=1"
)

SITES = 4
DROPPED = 3  # the site that is killed


def config(strategy: str, rounds: int) -> RunConfig:
    return RunConfig.from_flat(
        {
            "strategy.name": strategy,
            "num-server-rounds": rounds,
            "data.clients-per-domain": 1,
            "train.local-epochs": 1,
            "evaluate.every": rounds,
            "round-timeout": TIMEOUT,
        }
    )


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.1)


def test_a_certificate_is_good_for_its_hosts_under_its_authority_alone(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "a", ["fl.example.org", "10.1.2.3"], days=30)
    other = make_certificates(tmp_path / "b", ["fl.example.org"])
    certificate = x509.load_pem_x509_certificate(made.certificate.read_bytes())

    def verify(authority: Path, host: str) -> None:
        store = Store([x509.load_pem_x509_certificate(authority.read_bytes())])
        builder = PolicyBuilder().store(store).time(datetime.now(UTC))
        builder.build_server_verifier(x509.DNSName(host)).verify(certificate, [])

    verify(made.authority, "fl.example.org")
    for authority, host in ((other.authority, "fl.example.org"), (made.authority, "example.org")):
        with pytest.raises(VerificationError):
            verify(authority, host)
    assert 29 <= (certificate.not_valid_after_utc - datetime.now(UTC)).days <= 30
    assert stat.S_IMODE(made.key.stat().st_mode) == 0o600


def test_a_key_pair_is_what_flower_reads(tmp_path: Path) -> None:
    public = make_key_pair(tmp_path / "keys" / "site")
    private = tmp_path / "keys" / "site"
    key = load_ssh_private_key(private.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.curve.name == "secp384r1"
    known = load_ssh_public_key(public.read_bytes())
    assert isinstance(known, ec.EllipticCurvePublicKey)
    assert key.public_key().public_numbers() == known.public_numbers()
    assert stat.S_IMODE(private.stat().st_mode) == 0o600


def test_no_secret_is_overwritten(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["localhost"])
    public = make_key_pair(tmp_path / "site").read_bytes()
    authority = (tmp_path / "ca.crt").read_bytes()
    with pytest.raises(FileExistsError):
        make_certificates(tmp_path, ["localhost"])
    with pytest.raises(FileExistsError):
        make_key_pair(tmp_path / "site")
    assert (tmp_path / "ca.crt").read_bytes() == authority
    assert (tmp_path / "site.pub").read_bytes() == public


def test_a_process_that_ends_too_early_shows_what_it_said(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('no such key'); sys.exit(3)"]
    process = Process("The SuperLink", command, tmp_path / "home", tmp_path / "log")
    process.start()
    wait_for(lambda: process.exit_code is not None, "the process to end")
    with pytest.raises(TrialError, match=r"The SuperLink ended with 3:\nno such key"):
        process.check()
    process.end()


@UNVERIFIED
def test_a_killed_process_takes_its_own_with_it(tmp_path: Path) -> None:
    sleeper = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'], stdin=-1)"
    process = Process("parent", [sys.executable, "-c", sleeper], tmp_path, tmp_path / "log")
    process.start()
    wait_for(lambda: len(belonging_to(tmp_path)) == 2, "the child")
    process.kill()
    wait_for(lambda: not belonging_to(tmp_path), "both to end")


def test_sites_that_the_domains_cannot_share_are_refused(tmp_path: Path) -> None:
    arguments = ["deploy", "trial", "--sites=6", f"--output-dir={tmp_path / 'trial'}"]
    result = CliRunner().invoke(cli, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "the 4 domains of uci-digits share the sites equally" in result.output
    assert "Choose 4, 8" in result.output
    assert not (tmp_path / "trial").exists()


def test_certificates_and_keys_are_made_from_the_command_line(tmp_path: Path) -> None:
    out, key = tmp_path / "certificates", tmp_path / "keys" / "site"
    made = CliRunner().invoke(cli, ["deploy", "certificates", "localhost", f"--out={out}"])
    assert made.exit_code == 0
    assert CliRunner().invoke(cli, ["deploy", "key", str(key)]).exit_code == 0
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert names == {"ca.crt", "server.pem", "server.key", "site", "site.pub"}
    again = CliRunner().invoke(cli, ["deploy", "key", str(key)])
    assert again.exit_code == 1
    assert "File exists" in again.output


# --- the whole ------------------------------------------------------------------------------


def intruders(trial: Trial, folder: Path) -> dict[str, Process]:
    """SuperNodes that must not get in, by what they are told."""
    node = {"partition-id": 0, "num-partitions": SITES}
    unregistered = trial.make_site("unregistered", node)
    anonymous = trial.make_site("anonymous", node)
    place = anonymous.command.index("--auth-supernode-private-key")
    del anonymous.command[place : place + 2]
    fooled = trial.make_site("fooled", node)
    other = make_certificates(folder / "other", ["127.0.0.1"]).authority
    place = fooled.command.index("--root-certificates")
    fooled.command[place + 1] = str(other)
    return {
        "Failed to activate SuperNode": unregistered,
        "SuperNode authentication is enabled": anonymous,
        "certificate verify failed": fooled,
    }


def outage_of(site: Process, said: list[str]) -> None:
    """Kill a site while it trains, and start it again when the server went on without it."""

    def trainings() -> int:
        return site.log.read_text().count("Receiving: train message")

    before = trainings()
    wait_for(lambda: trainings() > before, "the site to be asked to train")
    site.kill()
    wait_for(
        lambda: any(f"goes on without client {DROPPED}" in line for line in said),
        "the server to notice",
    )
    site.start()


def simulated(folder: Path, strategy: str, rounds: int) -> bytes:
    """The same run in this process."""
    made = replace(config(strategy, rounds), output_dir=str(folder / "simulated"))
    path = Session(InlineGrid(app, SITES), made, Console(quiet=True)).run()
    return (path / "model.safetensors").read_bytes()


@UNVERIFIED
@pytest.mark.slow
def test_a_deployment_survives_a_dead_site_and_lets_no_stranger_in(tmp_path: Path) -> None:
    said: list[str] = []
    nodes = [{"partition-id": k, "num-partitions": SITES} for k in range(SITES)]
    with ThreadPoolExecutor() as pool, Trial(tmp_path / "trial", nodes, said.append) as trial:
        strangers = intruders(trial, tmp_path)
        for stranger in strangers.values():
            stranger.start()
        equilibria = trial.run(config("fedequilibria", rounds=2))
        for reason, stranger in strangers.items():
            wait_for(lambda s=stranger: s.exit_code is not None, f"{stranger.name} to give up")
            assert stranger.exit_code != 0
            assert reason in stranger.log.read_text()

        outage = pool.submit(outage_of, trial.sites[DROPPED], said)
        heal = trial.run(config("fedheal", rounds=4))
        outage.result()
    wait_for(lambda: not belonging_to(tmp_path), "all processes to end")

    # Real processes compute what a simulation computes.
    model = (equilibria / "model.safetensors").read_bytes()
    assert model == simulated(tmp_path, "fedequilibria", rounds=2)

    rounds = read_run(heal).diagnostics
    others = [client for client in range(SITES) if client != DROPPED]
    assert rounds[0]["client_ids"] == others
    assert list(rounds[0]["dropped"]) == [str(DROPPED)]
    assert rounds[-1]["client_ids"] == [*others, DROPPED], "the site came back as another"

    table = StringIO()
    Console(file=table, width=200).print(terminal_table([read_run(equilibria), read_run(heal)]))
    assert all(
        word in table.getvalue() for word in ("fedequilibria", "fedheal", "printed", "STD", "MIN")
    )
