"""Print SHA-256 fingerprints of final models, to check that a change of code moves no result.

    python benchmarks/bits.py > before.txt        # with the old code
    python benchmarks/bits.py | diff before.txt - # with the new code, on the same machine

Every strategy and every client runs at least once. The runs cover partial participation, BatchNorm,
exchanges, observers, bounds, evaluation by clients, and interruption with resumption. They use
embedded data and the inline engine, and take about three minutes on one core.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

from fairflower.cli import app
from fairflower.registry import STRATEGIES

SMALL = ("data.clients-per-domain=2", "data.examples-per-client=24", "data.test-examples=20")
PART = ("fraction-train=0.5", *SMALL)
TINY = ("data.clients-per-domain=1", "data.examples-per-client=12", "data.test-examples=8")
BATCH_NORM = ("model.name=resnet10", "train.local-epochs=1", *TINY)
PROMPTS = ("model.name=prompt-vit-tiny", "train.local-epochs=1", *TINY)

#: Strategy, client and settings of each run; every strategy and client that `fairflower list`
#: shows is included.
RUNS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("fedavg", "sgd", PART),
    ("uniform", "fedavg", (*SMALL, "train.optimizer=adam", "train.lr=0.001")),
    ("fedheal", "scaffold", PART),
    ("fedheal:variant=released", "moon", BATCH_NORM),
    ("fedequilibria", "fedprox", SMALL),
    ("fedequilibria:space=gradient:scale=none", "sam", BATCH_NORM),
    ("fedmgda+", "feddyn", PART),
    ("fedfv:tau=3", "fedproc", PART),
    ("fedgcr:num-clusters=2", "fedgc:num-clusters=2", PROMPTS),
    ("fedgcr:variant=paper:num-clusters=2", "fedgc:variant=paper:num-clusters=2", PROMPTS),
    ("fedgcr", "fedsam", SMALL),
    ("fedism", "gsam", (*SMALL, "train.logit-adjustment=true", "data.corrupted-clients=1")),
    ("afl", "fedproto", PART),
    ("qffl", "fedlsa", SMALL),
    ("qffl", "sgd", BATCH_NORM),
    ("fedheal:variant=algorithm1", "ditto:share=personal", SMALL),
    ("term", "fedmix", SMALL),
    ("fairfed", "ditto", (*SMALL, "evaluate.by=both")),
    ("fedce", "harmofl", (*SMALL, "bound.max-client-weight=0.4", "bound.clip-update-median=2")),
    ("fedga", "sgd", (*SMALL, "observe.window=2", "data.dirichlet-alpha=1.0")),
    ("pa3fed", "sgd", (*PART, "data.imbalance-factor=2")),
    ("superquantile", "propfair", SMALL),
    ("propfair", "sgd", SMALL),
    ("fednova", "sgd", (*PART, "data.imbalance-factor=2")),
    ("aaggff", "sgd", PART),
    ("aaggff:form=device", "sgd", PART),
    ("fedeba+:theta=90", "sgd", BATCH_NORM),
    ("adafed", "sgd", BATCH_NORM),
    ("fedmdfg", "scaffold", PART),
    ("fedlf", "sgd", PART),
    ("fedlf:variant=released", "sgd", BATCH_NORM),
    ("eagle", "scaffold", PART),
    ("fedpw", "fedbn", BATCH_NORM),
    ("fairrfl", "silobn", BATCH_NORM),
    ("fedism+", "fedper", SMALL),
    ("daa", "fedrep", SMALL),
    ("dq-ffl", "lg-fedavg", SMALL),
    ("fedomg", "fpl", PART),
    ("fedawa", "fedplvm", SMALL),
    ("fedaware", "fedrdn", (*SMALL, "evaluate.by=both")),
)
#: A plain run of each strategy that has none above.
RUNS += tuple((s, "sgd", SMALL) for s in {*STRATEGIES} - {s.partition(":")[0] for s, *_ in RUNS})
#: Strategies whose runs are repeated with an interruption after round `STOP`, and resumed.
RESUMED = ("fedheal", "fedmgda+", "fedga", "aaggff", "fedlf", "eagle")
ROUNDS, STOP = 4, 2


def main() -> None:
    """Execute the runs and print a fingerprint of each."""
    with tempfile.TemporaryDirectory() as folder:
        for index, (strategy, client, settings) in enumerate(RUNS):
            options = ["run", "--strategy", strategy, "--client", client, "--engine", "inline"]
            options += ["--rounds", str(ROUNDS), *(f"--set={setting}" for setting in settings)]
            complete, resumed = (Path(folder) / f"{index}-{suffix}" for suffix in ("once", "twice"))
            call([*options, "--output-dir", str(complete)])
            print(f"{digest(complete)}  {strategy} with {client}", flush=True)
            if strategy in RESUMED:
                interrupt_after(STOP, resumed)
                call([*options, "--output-dir", str(resumed)], expected_code=130)
                (run,) = resumed.iterdir()
                call(["run", "--resume", str(run)])
                print(f"{digest(resumed)}  {strategy} with {client}, resumed", flush=True)


def call(command: list[str], expected_code: int = 0) -> None:
    """Run a ``fairflower`` command in this process and check its exit code."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = app(command, standalone_mode=False) or 0
    if code != expected_code:
        raise SystemExit(f"fairflower {' '.join(command)} exited with {code}:\n{output.getvalue()}")


def digest(folder: Path) -> str:
    """Return the SHA-256 of the final model of the only run in a folder."""
    (run,) = folder.iterdir()
    return hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest()


def interrupt_after(server_round: int, folder: Path) -> None:
    """Send SIGINT to this process once a run in a folder has written the checkpoint of a round."""

    def watch() -> None:
        while not list(folder.glob(f"*/checkpoints/*{server_round}*")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main()
