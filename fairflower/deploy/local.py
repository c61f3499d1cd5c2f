"""Trial deployments on this machine, with real processes, TLS and authenticated sites.

A trial starts a SuperLink, and a SuperNode for each site, on free ports of the loopback interface.
Each SuperNode has its own home folder, key and log file. All processes end with the trial.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import sysconfig
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fairflower.config import DataConfig, RunConfig
from fairflower.config.text import Scalar, toml_value
from fairflower.data import Federation, prepare, with_absolute_dir
from fairflower.data.cache import make_data_set
from fairflower.data.sites import open_site
from fairflower.deploy.credentials import make_certificates, make_key_pair, make_secret
from fairflower.errors import ConfigError, DataError, TrialError
from fairflower.numerics.threads import cpus
from fairflower.participation.availability import check_availabilities
from fairflower.server.checkpoint import with_absolute_paths
from fairflower.server.contents import STATISTICS
from fairflower.tables.sites import merge_sites

HOST = "127.0.0.1"

#: Seconds to wait until a process starts or answers, which takes a long time on a busy machine.
TIMEOUT = 180.0

SAY_EVERY = 60.0  # seconds between two messages about sites that have not answered

#: Content of a SuperNode's ``--node-config``.
NodeConfig = dict[str, Scalar]

#: Process options that keep Ctrl-C in the terminal from reaching a process.
NEW_PROCESS_GROUP: dict[str, Any] = {"start_new_session": True}
if sys.platform == "win32":
    NEW_PROCESS_GROUP = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}


@dataclass(eq=False)
class Process:
    """A command that runs in its own process group until it is stopped.

    Its files are in ``home``, and its output goes to the file ``log``.
    """

    name: str
    command: Sequence[str]
    home: Path
    log: Path
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> None:
        """Start or restart the command, and append its output to the log."""
        self.home.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self.command,
                env=environment(self.home),
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                **NEW_PROCESS_GROUP,
            )

    @property
    def exit_code(self) -> int | None:
        """Exit code, or None while the command is running."""
        return self._process.poll() if self._process else None

    def kill(self) -> None:
        """Kill the command and its child processes immediately, as a power failure would."""
        if self._process:
            if sys.platform == "win32":  # there are no process groups
                tree = ["taskkill", "/F", "/T", "/PID", str(self._process.pid)]
                subprocess.run(tree, capture_output=True, check=False)
            else:
                # macOS raises PermissionError for zombies.
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def terminate(self) -> None:
        """Send SIGTERM to the command."""
        if self._process and self.exit_code is None:
            self._process.terminate()

    def end(self) -> None:
        """Wait for the command to end, and kill it after 15 seconds."""
        if self._process:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(15)
            self.kill()

    def check(self) -> None:
        """Raise ``TrialError`` if the command has ended."""
        if self.exit_code is not None:
            raise self.error(f"ended with exit code {self.exit_code}")

    def output(self) -> str:
        """Return what the command has written."""
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def error(self, what: str) -> TrialError:
        """Return an error about the command, with the last lines of its output."""
        return TrialError("\n".join([f"{self.name} {what}:", *self.output().splitlines()[-20:]]))


def wait_until(condition: Callable[[], bool], processes: Sequence[Process], event: str) -> None:
    """Wait for a condition; raise ``TrialError`` after a timeout or if a process ends."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        for process in processes:
            process.check()
        if time.monotonic() > deadline:
            raise TrialError(f"Timeout after {TIMEOUT:.0f} seconds, before {event}.")
        time.sleep(0.2)


def environment(home: Path) -> dict[str, str]:
    """Return environment variables for a process with its files in ``home`` and Flower on PATH."""
    return {
        **os.environ,
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]),
        "FAIRFLOWER_HOME": str(home),
        "FLWR_HOME": str(home / "flwr"),
        "PYTHONUNBUFFERED": "1",
        "PYTHONUTF8": "1",
        **unproxied(),
    }


def unproxied() -> dict[str, str]:
    """Return environment variables with which connections to this machine bypass proxies."""
    direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    if direct != "*":  # it means all hosts only as the single entry
        direct = ",".join(filter(None, (direct, HOST)))
    # For gRPC, "*" has no meaning.
    grpc = os.environ.get("no_grpc_proxy", "")  # noqa: SIM112
    return {
        "no_proxy": direct,
        "NO_PROXY": direct,
        "no_grpc_proxy": ",".join(filter(None, (grpc, direct.strip("*"), HOST))),
    }


def _flwr_options(home: Path) -> dict[str, Any]:
    text = {"stdin": subprocess.DEVNULL, "text": True, "encoding": "utf-8"}
    return {"env": environment(home), **text, **NEW_PROCESS_GROUP}


def script(name: str) -> str:
    """Return the path of a command installed with this Python."""
    return str(Path(sysconfig.get_path("scripts"), name + (sysconfig.get_config_var("EXE") or "")))


def unanswered(logs: Mapping[str, str]) -> dict[str, str]:
    """Return the type of each SuperNode's unanswered message.

    >>> answered = "Receiving: query message ... Sent successfully"
    >>> unanswered({"a": answered, "b": f"{answered} ... Receiving: train message ..."})
    {'b': 'train'}
    """
    since = {name: log.rpartition("Receiving: ")[1:] for name, log in logs.items()}
    return {
        name: text.partition(" ")[0]
        for name, (asked, text) in since.items()
        if asked and "Sent successfully" not in text
    }


#: Ports that `free_port` has returned; their processes may still be starting.
_used_ports: set[int] = set()


def free_port() -> int:
    """Return a free port, a different one on every call."""
    while True:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            port = int(probe.getsockname()[1])
        if port not in _used_ports:
            _used_ports.add(port)
            return port


SUPERLINK_NAME = "trial"  # name of the SuperLink in the configuration of the ``flwr`` command

APP = """\
[project]
name = "fairflower-trial"
version = "1"
dependencies = []

[tool.flwr.app]
publisher = "fairflower"

[tool.flwr.app.components]
serverapp = "fairflower.server_app:app"
clientapp = "fairflower.client_app:app"

"""


def deployable(config: RunConfig) -> RunConfig:
    """Return the config for a ServerApp, with absolute paths; clients test the global model.

    In runs with differential privacy the server tests it. Raises ``ConfigError`` if the settings
    do not allow this, or if the file of ``participation.availability`` cannot be read.
    """
    check_availabilities([config])
    by = "server" if config.privacy.on else "clients"
    return RunConfig.from_flat(with_absolute_paths(config.to_flat()) | {"evaluate.by": by})


class LocalDeployment:
    """A federation of processes on this machine, as a context manager.

    ``folder`` gets all files: certificates, keys, logs, state of the sites, and run folders. There
    is a site for each of ``node_configs``; ``sites`` lists their SuperNodes in the same order.
    ``say`` is called with each line of progress and of the ServerApp's log.

    Raises ``ConfigError`` if Flower is too old or the folder is not empty, and ``TrialError`` if a
    process does not start when the context is entered.
    """

    def __init__(
        self,
        folder: Path,
        node_configs: Sequence[Mapping[str, Scalar]],
        say: Callable[[str], Any] = print,
    ) -> None:
        if tuple(map(int, version("flwr").split(".")[:2])) < (1, 40):
            raise ConfigError(
                f"flwr {version('flwr')} is installed: a trial deployment needs Flower 1.40 or "
                'newer. Run: pip install --upgrade "flwr>=1.40"'
            )
        self.folder = folder.absolute()
        if self.folder.exists() and any(self.folder.iterdir()):
            raise ConfigError(
                f"{self.folder} is not empty, but a trial needs an empty folder. Remove the "
                "folder, or choose another --output-dir."
            )
        self.say = say
        self.port = free_port()
        self.certificates = make_certificates(self.folder / "certificates", [HOST, "localhost"])
        authority, certificate, key = map(str, self.certificates)
        home = self.folder / "server"
        # Without it, every user of this machine could fetch the runs to start.
        secret = ("--superexec-auth-secret-file", str(make_secret(home / "secret")))
        superlink = [
            script("flower-superlink"),
            *("--ssl-ca-certfile", authority, "--ssl-certfile", certificate, "--ssl-keyfile", key),
            *("--enable-supernode-auth", "--host", HOST, "--port", str(self.port)),
            # Otherwise its ServerApps would continue for half a minute after it ends.
            *("--isolation", "process", *secret),
        ]
        executor = [
            script("flower-superexec"),
            *("--root-certificates", authority),
            *("--runtime-api-address", f"{HOST}:{self.port}", *secret),
        ]
        self.superlink = Process("The SuperLink", superlink, home, self.folder / "superlink.log")
        self._executor = Process("The SuperExec", executor, home, self.folder / "superexec.log")
        self.sites = [
            self.make_site(*named)
            for named in zip(site_names(node_configs), node_configs, strict=True)
        ]
        self._num_runs = 0

    def make_site(self, name: str, node_config: Mapping[str, Scalar]) -> Process:
        """Create a SuperNode with a new key, without registering the key or starting the node."""
        home = self.folder / name
        make_key_pair(home / "key")
        settings = {"superlink": f"{HOST}:{self.port}", "private-key": "key"}
        settings["root-certificates"] = str(self.certificates.authority)
        lines = [f"{key} = {toml_value(value)}" for key, value in settings.items()]
        lines += ["[node]", *(f"{key} = {toml_value(value)}" for key, value in node_config.items())]
        (home / "site.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
        command = [script("fairflower"), "deploy", "site", str(home / "site.toml")]
        return Process(name, command, home, self.folder / f"{name}.log")

    def __enter__(self) -> LocalDeployment:
        with ExitStack() as undo:
            undo.push(self.__exit__)
            self.say(f"Logs, keys and run folders: {self.folder}")
            self.say(f"Starting a SuperLink at {HOST}:{self.port}, with TLS")
            self.superlink.start()
            wait_until(self._answers, [self.superlink], "the SuperLink answered")
            self._executor.start()
            config = self.superlink.home / "flwr" / "config.toml"
            config.parent.mkdir(parents=True, exist_ok=True)
            config.write_text(
                f'[superlink]\ndefault = "{SUPERLINK_NAME}"\n\n[superlink.{SUPERLINK_NAME}]\n'
                f'address = "{HOST}:{self.port}"\n'
                f"root-certificates = {toml_value(str(self.certificates.authority))}\n",
                encoding="utf-8",
            )
            self.say(f"Registering {len(self.sites)} keys and starting their SuperNodes")
            with ThreadPoolExecutor(cpus()) as pool:
                list(pool.map(self._admit, self.sites))
            self.say("Waiting until all SuperNodes are online")
            # Logs cost nothing; a flwr command that asks the SuperLink takes a second of CPU.
            wait_until(self._activated, self._processes(), "all SuperNodes were activated")
            wait_until(self.complete, self._processes(), "all sites were online")
            self.say(f"{len(self.sites)} SuperNodes are online, each with a separate key")
            undo.pop_all()
        return self

    def _admit(self, site: Process) -> None:
        key, named = str(site.home / "key.pub"), ("--name", site.name)
        self.flwr("supernode", "register", key, SUPERLINK_NAME, *named)
        site.start()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is KeyboardInterrupt:
            self.say("Stopping the SuperLink and the sites, which takes some seconds")
        self.close()

    def close(self) -> None:
        """End all processes; Ctrl-C does not interrupt this."""
        in_main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main else None
        try:
            for process in self._processes():
                process.terminate()
            for process in self._processes():
                process.end()
        finally:
            if in_main:
                signal.signal(signal.SIGINT, before)

    def _processes(self) -> list[Process]:
        return [*self.sites, self._executor, self.superlink]

    def _activated(self) -> bool:
        return all("SuperNode ID:" in site.output() for site in self.sites)

    def complete(self) -> bool:
        """Return whether all sites are connected to the SuperLink."""
        nodes = self.flwr_json("supernode", "list", SUPERLINK_NAME)["nodes"]
        return len([node for node in nodes if node["status"] == "online"]) >= len(self.sites)

    def run(self, config: RunConfig) -> Path:
        """Start a run, or resume ``config.resume``; wait until it ends and return its run folder.

        The settings are those of `deployable`, whatever ``evaluate.by`` says. Raises ``TrialError``
        if the run does not complete.
        """
        config = deployable(config)
        self._num_runs += 1
        place = self.folder / "runs" / str(self._num_runs)
        if config.resume:
            place = Path(config.resume).parent
        place.mkdir(parents=True, exist_ok=True)
        config = replace(config, output_dir=str(place))
        app = self.folder / "apps" / str(self._num_runs)
        app.mkdir(parents=True, exist_ok=True)
        text = APP + config.to_toml("tool.flwr.app.config")
        (app / "pyproject.toml").write_text(text, encoding="utf-8")
        self.say(f"Submitting run {self._num_runs}: {config.label}")
        run_id = self.flwr_json("run", str(app), SUPERLINK_NAME)["run-id"]
        row = self._follow(run_id)
        if row["status"] != "finished:completed":
            raise TrialError(f"The run is {row['status']}. {row.get('status-details', '')}")
        if config.resume:
            return Path(config.resume)
        (facts,) = place.glob(f"*/{STATISTICS if config.statistics else 'run.json'}")
        return facts.parent

    def _follow(self, run_id: str) -> dict[str, Any]:
        """Forward the ServerApp's log until the run ends; return the run's ``flwr list`` entry."""
        while True:
            self._say_log(run_id)
            # The log also ends if the SuperLink is restarted; in this case the run continues.
            try:
                wait_until(self._answers, [], "the SuperLink answered again")
            except TrialError:
                self.superlink.check()
                raise
            runs = self.flwr_json("list", "--run-id", run_id, SUPERLINK_NAME)["runs"]
            row: dict[str, Any] = runs[0]
            if row["status"].startswith("finished"):
                return row
            self._executor.check()

    def _say_log(self, run_id: str) -> None:
        """Forward the ServerApp's log until it ends, or the SuperExec has ended."""
        command = [script("flwr"), "log", run_id, SUPERLINK_NAME, "--stream"]
        both: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, **both, **_flwr_options(self.superlink.home)) as log:
            ended = threading.Event()
            threading.Thread(target=self._watch, args=(log, ended), daemon=True).start()
            try:
                for line in log.stdout or ():
                    self.say(line.rstrip("\n"))
            finally:
                ended.set()
                log.kill()

    def _watch(self, log: subprocess.Popen[str], ended: threading.Event) -> None:
        """End a log that nothing else ends; say every minute which sites have not answered."""
        begun = time.monotonic()
        while not ended.wait(1):
            if self._executor.exit_code is not None:
                log.kill()
                return
            if time.monotonic() - begun > SAY_EVERY:
                begun = time.monotonic()
                logs = {site.name: site.output() for site in self.sites}
                asked = [f"{name} ({kind})" for name, kind in unanswered(logs).items()]
                self.say(f"Waiting for {', '.join(asked) or 'the server'}")

    def flwr(self, *arguments: str) -> str:
        """Run a ``flwr`` command and return its output; raise ``TrialError`` if it fails."""
        command, options = f"flwr {' '.join(arguments)}", _flwr_options(self.superlink.home)
        options |= {"capture_output": True, "timeout": TIMEOUT}
        try:
            done = subprocess.run([script("flwr"), *arguments], check=False, **options)
        except subprocess.TimeoutExpired as error:
            raise TrialError(f"{command}: no answer after {TIMEOUT:.0f} seconds.") from error
        if done.returncode:
            raise TrialError(f"{command}:\n{done.stdout}{done.stderr}")
        return str(done.stdout)

    def flwr_json(self, *arguments: str) -> dict[str, Any]:
        """Run a ``flwr`` command with ``--format json`` and return the parsed output."""
        return json.loads(self.flwr(*arguments, "--format", "json"))  # type: ignore[no-any-return]

    def _answers(self) -> bool:
        trusted = ssl.create_default_context(cafile=str(self.certificates.authority))
        # A proxy, which the environment may name, cannot reach this machine's loopback interface.
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trusted)
        )
        try:
            with opener.open(f"https://{HOST}:{self.port}/health", timeout=5):
                return True
        except OSError:
            return False


# --- node configs --------------------------------------------------------------------------------


def site_names(nodes: Sequence[Mapping[str, Scalar]]) -> list[str]:
    """Return the sites' names: their domains, if these differ and can name a folder.

    >>> site_names([{"domain": "north"}, {"domain": "south"}]), site_names([{}, {}])
    (['north', 'south'], ['site-0', 'site-1'])
    """
    names = [str(node.get("domain", "")) for node in nodes]
    distinct = len({name.casefold() for name in names}) == len(names)
    free = {"apps", "certificates", "runs", "server"}.isdisjoint(map(str.casefold, names))
    if distinct and free and all(re.fullmatch(r"[\w-]+", name, re.ASCII) for name in names):
        return names
    return [f"site-{k}" for k in range(len(nodes))]


def nodes_of(
    data: DataConfig, folders: Sequence[str] | None, sites: int | None
) -> tuple[DataConfig, list[NodeConfig]]:
    """Return the data config and the config of each node, with the run's smallest group.

    ``folders``, such as ``["svhn=/data/svhn", "usps=/data/usps"]``, have a domain and a folder per
    site, and ``data`` describes their files. They are opened in the same way as at the sites, so
    that errors appear before any process starts. Several sites may have the same domain or the same
    folder. Without ``folders``, a data set is divided among nodes, all of which have access to it,
    and the data config gets absolute paths; ``sites`` is their number, by default that of the
    clients in ``data``.

    Raises ``ConfigError`` if there are fewer than two folders, or one is not ``domain=folder`` or
    does not exist; if the sites cannot be divided equally among the domains, or
    ``data.imbalance-factor`` determines their number. Raises ``DataError`` if the data in a folder
    cannot be used or do not match the data of the other sites.
    """
    nodes: list[NodeConfig]
    if folders:
        nodes = _with_folders(folders, data)
    else:
        data = with_absolute_dir(_divided(data, sites) if sites is not None else data)
        number = len(prepare(data).clients)
        nodes = [{"partition-id": k, "num-partitions": number} for k in range(number)]
    return data, [{**node, "smallest-group": data.smallest_group} for node in nodes]


def _divided(data: DataConfig, sites: int) -> DataConfig:
    if data.imbalance_factor > 1:
        raise ConfigError(
            f"--sites {sites}: data.imbalance-factor = {data.imbalance_factor} determines the "
            "number of sites. Remove --sites or data.imbalance-factor."
        )
    domains = len(make_data_set(data).client_domains)
    if sites % domains:
        raise ConfigError(
            f"--sites {sites}: each of the {domains} domains of {data.name} gets the same "
            f"number of sites. Choose {domains}, {2 * domains}, ..., or select fewer domains "
            "with data.domains."
        )
    return replace(data, clients_per_domain=sites // domains)


def _with_folders(given: Sequence[str], data: DataConfig) -> list[NodeConfig]:
    if data.dir:
        raise ConfigError(
            f"--data-dir {data.dir}: cannot be combined with --site, which sets the folder of "
            "each site. Remove --data-dir."
        )
    if len(given) == 1:
        raise ConfigError(f"--site {given[0]}: a federation needs at least two sites.")
    places = [_place(text) for text in given]
    spelled: dict[str, str] = {}
    for k, (text, place) in enumerate(zip(given, places, strict=True)):
        if place in places[:k]:
            raise ConfigError(f"--site {text} is given twice.")
        if (other := spelled.setdefault(place[0].casefold(), place[0])) != place[0]:
            raise ConfigError(
                f"--site {text}: another site's domain is spelled {other!r}. Use the same "
                "spelling for all sites of a domain."
            )
    merge_sites([_opened(data, domain, folder) for domain, folder in places])
    return [{"domain": domain, "data-dir": str(folder)} for domain, folder in places]


def _place(text: str) -> tuple[str, Path]:
    domain, _, name = (part.strip() for part in text.partition("="))
    if not (domain and name):
        raise ConfigError(
            f"--site {text}: expected <domain>=<folder>, for example svhn=/data/svhn."
        )
    if '"' in text:
        raise ConfigError(
            f"--site {text}: it contains a double quote, which Flower's node configs do not allow. "
            "Rename the domain or the folder."
        )
    folder = Path(name).expanduser().absolute()
    if not folder.is_dir():
        raise ConfigError(f"--site {text}: there is no folder {folder}.")
    return domain, folder


def _opened(data: DataConfig, domain: str, folder: Path) -> Federation:
    data = replace(data, dir=str(folder))
    try:
        if make_data_set(replace(data, domains="")).folder is None:
            raise DataError(
                f"{data.name} is not read from a folder. Choose --data npz, --data images, or "
                "another data set that is read from a folder."
            )
        return open_site(data, domain)
    except DataError as error:
        raise DataError(f"--site {domain}={folder}: {error}") from error
