"""Execution of the remaining runs of a design, several in parallel, with a row for each run."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from experiments.leaderboard.design import Margins
from experiments.leaderboard.ledger import Row
from experiments.leaderboard.stages import CONFIRMATION, REFERENCE, STAGES, SWEEP, Planned, Stages
from fairflower.config import RunConfig
from fairflower.data import prepare
from fairflower.errors import Diverged, error_text
from fairflower.plans.plan import Plan
from fairflower.report import Run, read_run
from fairflower.server.contents import read_facts


class LeaderboardRuns:
    """The remaining runs of a design, as a `fairflower.plans.parallel.Study`.

    At most ``jobs`` runs are started at a time, so that runs that depend on results keep the order
    of the design. Run folders are in ``folder`` and are removed when their rows are written. A
    killed run starts again from the beginning.
    """

    def __init__(self, stages: Stages, folder: Path, jobs: int) -> None:
        self.stages, self.folder, self.jobs = stages, folder, jobs
        self.given: dict[str, Planned] = {}
        self.out = 0
        self.total = sum(line.left for line in progress(stages))
        self.plan = Plan(self._more())

    def title(self, config: RunConfig) -> str:
        """Return a run's name in messages: stage, benchmark, method and its settings."""
        planned = self.given[config.run_name]
        settings = f" {planned.settings}" if planned.settings else ""
        return f"{planned.stage}, {planned.benchmark}: {planned.method}{settings}"

    def ended(self, config: RunConfig, error: Exception | None) -> list[RunConfig]:
        """Record how a run ended; return the runs to start."""
        self.out -= 1
        path = self.folder / config.run_name
        if error is None or isinstance(error, Diverged):
            planned, run = self.given[config.run_name], read_run(path) if error is None else None
            info = run.info if run else read_facts(path)
            row = _row(planned, run, info, error, self.stages.design.margins)
            self.stages.ledger.add(row, (other.key for other in self.stages.planned()))
            shutil.rmtree(path, ignore_errors=True)
        return self._more()

    def died(self, config: RunConfig) -> list[RunConfig]:
        """Return the run of a process that died, to start it again from its beginning."""
        return [self._placed(self.given[config.run_name])]

    def _more(self) -> list[RunConfig]:
        configs: list[RunConfig] = []
        for planned in self.stages.left():
            if self.out >= self.jobs:
                break
            if planned.key not in self.given:
                self.given[planned.key] = planned
                self.out += 1
                configs.append(self._placed(planned))
        return configs

    def _placed(self, planned: Planned) -> RunConfig:
        """Remove the files of an earlier attempt, and return the run's config with its folder."""
        shutil.rmtree(self.folder / planned.key, ignore_errors=True)
        config = planned.config
        return dataclasses.replace(
            config,
            output_dir=str(self.folder),
            run_name=planned.key,
            checkpoint=dataclasses.replace(config.checkpoint, every=0),
        )


def _row(
    planned: Planned,
    run: Run | None,
    info: Mapping[str, Any],
    error: Exception | None,
    margins: Margins,
) -> Row:
    federation = prepare(planned.config.data)
    accuracies, reason = "", error_text(error) if error else ""
    if run and run.fully_tested():
        accuracies = " ".join(f"{value:.6g}" for value in run.final().tolist())
    elif run:
        reason = "at least one domain was not tested in every round"
    on_test = planned.config.evaluate.test
    if accuracies and info.get("diverged") is not None:
        reason = f"its largest loss on a domain was {info['diverged']:.3g} at the end"
    return Row(
        planned.stage,
        planned.benchmark,
        planned.method,
        planned.federation,
        planned.settings,
        shlex.join(federation.domains),
        "" if on_test else accuracies,
        accuracies if on_test else "",
        "completed" if accuracies else "lost",
        " ".join(reason.split()),
        str(info.get("machine", {}).get("processor", "")),
        round(float(info.get("seconds") or 0.0), 1),
        federation.digest,
        planned.key,
        str(margins) if planned.stage in (CONFIRMATION, REFERENCE, SWEEP) else "",
    )


class Progress(NamedTuple):
    """Progress of one stage of a benchmark."""

    stage: str
    benchmark: str
    runs: int
    left: int
    hours: float | None  # core-hours left, from the finished runs' times; None if there are none


def progress(stages: Stages) -> list[Progress]:
    """Return the remaining runs in each stage of each benchmark, and the hours they will take."""
    rows = stages.ledger.rows.values()
    finished = Counter((p.stage, p.benchmark) for p in stages.planned() if stages.row(p))
    progress = []
    counts = sorted(stages.counts().items(), key=lambda item: STAGES.index(item[0][0]))
    for (stage, benchmark), runs in counts:
        seconds = [row.seconds for row in rows if row.benchmark == benchmark and row.seconds]
        left = runs - finished[stage, benchmark]
        hours = left * median(seconds) / 3600 if seconds else None
        progress.append(Progress(stage, benchmark, runs, left, hours))
    return progress
