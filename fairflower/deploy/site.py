"""A site that runs only what it has installed: ``fairflower deploy site``.

Flower's SuperNode receives messages and, with ``--isolation process``, waits until somebody answers
them. Here this is no process of Flower's, which would install and import the run's bundle of code,
but this site: it checks each message against the site's policy, hands it to a worker, writes the
audit log and sends the reply. The worker runs the installed `fairflower.client_app` and keeps
PyTorch and the data in memory for the next message. The bundle is neither unpacked nor installed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from flwr.app import Context, Message

from fairflower.config.site import WITHDRAWN, SiteConfig
from fairflower.config.text import read_tables, toml_value
from fairflower.deploy.audit import AuditLog
from fairflower.deploy.credentials import check_dates, make_secret
from fairflower.deploy.local import HOST, free_port, script, unproxied
from fairflower.deploy.policy import Policy
from fairflower.errors import ConfigError, WriteError, error_text, failure_text, logger
from fairflower.flower_compat import Task, TaskQueue, set_task_identity
from fairflower.secure.consortium import Consortium

#: Seconds between two questions whether there is a message, and between two signs of life during
#: an answer, which the SuperNode expects once a minute.
POLL, KEEP = 0.5, 10.0


class WorkerEnded(RuntimeError):
    """The worker ended before it had answered."""


class Withdrawn(Exception):
    """The site's people have taken part back."""


class Worker:
    """A process with PyTorch and the site's data that answers one message after another.

    It is started by the first message, and again by the next one after it has ended. Its only
    connection is a pair of sockets without a name, to this process.
    """

    def __init__(self) -> None:
        self._running: tuple[BaseProcess, Connection] | None = None
        self.used = time.monotonic()

    def answer(
        self, message: Message, context: Context, keep: Callable[[], None]
    ) -> tuple[Message | str, Context]:
        """Return the reply, or the reason for an error, and the node's context after it.

        ``keep`` is called every `KEEP` seconds. Raises `WorkerEnded` if the process is killed.
        """
        if not (self._running and self._running[0].is_alive()):
            self._running = self._start()
        process, pipe = self._running
        answered = False
        try:
            pipe.send((message, context))
            while not pipe.poll(KEEP):
                keep()
            answer: tuple[Message | str, Context] = pipe.recv()
            answered = True
        except (EOFError, BrokenPipeError, ConnectionResetError):
            process.join(KEEP)
            raise WorkerEnded(
                f"the site's process ended while it answered (exit code {process.exitcode}); the "
                "next message starts it again"
            ) from None
        finally:
            self.used = time.monotonic()
            if not answered:  # else its answer would be taken for that to the next message
                self.end()
        return answer

    def _start(self) -> tuple[BaseProcess, Connection]:
        self.end()
        spawn = multiprocessing.get_context("spawn")
        pipe, other = spawn.Pipe()
        process = spawn.Process(target=_work, args=(other,), daemon=True)
        process.start()
        other.close()
        return process, pipe

    def end(self) -> None:
        """End the process if there is one."""
        if self._running:
            process, pipe = self._running
            pipe.close()
            process.kill()  # it holds nothing that is not on disk
            process.join()
            self._running = None


def _work(pipe: Connection) -> None:
    """Answer messages until the site closes the connection or is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the site
    from fairflower.client_app import app, forget_code

    run = 0
    while True:
        try:
            message, context = pipe.recv()
        except (EOFError, OSError):
            return
        set_task_identity(context.run_id, context.node_id)
        if run != context.run_id:  # since the last run, the site may have replaced images
            forget_code()
            run = context.run_id
        try:
            answer: Message | str = app(message=message, context=context)
        except Exception as error:
            answer = _reason(error)
        pipe.send((answer, context))


def _reason(error: Exception) -> str:
    """Return the text of an error reply, in the form of Flower's own but for a withdrawal."""
    return WITHDRAWN if isinstance(error, Withdrawn) else f"{type(error)}:<'{error}'>"


class Site:
    """The site's part between SuperNode and worker: policy, withdrawal and audit log.

    ``file`` has the settings in ``config``; whether the site has withdrawn is read there again for
    each message.
    """

    def __init__(self, config: SiteConfig, file: Path | None = None) -> None:
        self.config, self.file = config, file
        self.policy = Policy.read(Path(config.policy)) if config.policy else None
        self.node = self.policy.node_config(config) if self.policy else config.node
        Consortium.of(self.node)  # an error now, and not in the first round
        if config.root_certificates:
            check_dates(Path(config.root_certificates))
        self._audit = AuditLog(Path(config.audit_log))
        self._worker = Worker()

    def run(self) -> int:
        """Start the SuperNode and answer its messages until it ends; return its exit code."""
        os.environ.update(unproxied())  # for the connection to the SuperNode
        with tempfile.TemporaryDirectory(prefix="fairflower-site-") as folder:
            allowed = f"what {self.config.policy} allows" if self.policy else "any run: no policy"
            logger.info("This site answers %s. Audit log: %s", allowed, self.config.audit_log)
            secret, port = make_secret(Path(folder) / "secret"), free_port()
            supernode = subprocess.Popen(self.command(port, secret))
            queue = TaskQueue(f"{HOST}:{port}", secret.read_bytes())
            try:
                while (code := supernode.poll()) is None:
                    if not self._serve(queue):
                        time.sleep(POLL)
                return code
            finally:
                supernode.terminate()
                self._worker.end()
                self._audit.close()
                try:
                    supernode.wait(KEEP)
                except subprocess.TimeoutExpired:
                    supernode.kill()

    def command(self, port: int, secret: Path) -> list[str]:
        """Return the command of the SuperNode, which runs no code of a bundle itself."""
        site = self.config
        # All users of the machine see the command of a process.
        shown = {key: value for key, value in self.node.items() if key != "row-digests"}
        node = " ".join(f"{key}={toml_value(value)}" for key, value in shown.items())
        options = {
            "--superlink": site.superlink,
            "--root-certificates": site.root_certificates,
            "--auth-supernode-private-key": site.private_key,
            "--node-config": node,
        }
        given = [part for name, value in options.items() if value for part in (name, value)]
        own = ["--host", HOST, "--port", str(port), "--isolation", "process"]
        own += ["--superexec-auth-secret-file", str(secret)]
        return [script("flower-supernode"), *given, *own]

    def _serve(self, queue: TaskQueue) -> bool:
        """Answer the next message if there is one; end a worker that has been idle for long."""
        if time.monotonic() - self._worker.used > 60 * self.config.idle_minutes:
            self._worker.end()
        try:
            if task := queue.next():
                self.answer(task)
        except Exception as error:  # Flower then answers for the site, after a minute
            logger.error("The site cannot read or answer a message: %s", failure_text(error))
            return False
        return task is not None

    def _check(self, task: Task) -> None:
        """Raise an exception unless the site answers a message."""
        try:
            withdraw = read_tables(self.file).get("withdraw") if self.file else False
        except ConfigError as error:
            logger.error("%s", error)
            raise ConfigError("the site cannot read its settings; nothing was sent") from error
        if withdraw:
            raise Withdrawn(WITHDRAWN)
        if not task.is_client_app:
            raise ConfigError("This site runs fairflower's ClientApp, and no AgentApp.")
        if self.policy:
            self.policy.check(task.message)

    def answer(self, task: Task) -> None:
        """Answer a message, or refuse it, and say so in the audit log before anything is sent."""
        context, refused = task.context, True
        reply: Message | str
        try:
            self._check(task)
            refused = False
            context.node_config.update(self.node)  # its secret, too
            reply, context = self._worker.answer(task.message, context, task.keep)
        except Exception as error:
            reply = _reason(error)
            logger.warning("A message of type %s: %s", task.message.metadata.message_type, error)
        try:
            self._audit.write(task.message, reply, refused)
        except Exception as error:
            logger.error("The audit log %s: %s", self.config.audit_log, error_text(error))
            reply = _reason(WriteError("the site cannot write its audit log; nothing was sent"))
        task.answer(reply, context)
