"""Tuning studies with synthetic run folders instead of training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fairflower.config import RunConfig, StrategyConfig
from fairflower.data import prepare
from fairflower.errors import RoundFailed
from fairflower.participation.availability import trace_digest
from fairflower.plans.plan import Plan
from fairflower.plans.tuning import TuningProtocol, TuningStudies
from fairflower.report.tuning import Tuned

SMALL = {
    "num-server-rounds": 4,
    "data.clients-per-domain": 1,
    "data.examples-per-client": 30,
    "data.test-examples": 10,
    "data.validation-fraction": 0.5,
    "data.domains": "plain,rotated",
}
#: A function from a run's config to the accuracies of the two domains.
Quality = Callable[[RunConfig], tuple[float, float]]


def by_tau(config: RunConfig) -> tuple[float, float]:
    """Return accuracies that are best at tau = 0.5."""
    tau = config.strategy.args.get("tau", 0.3)
    return 0.9 - abs(float(tau or 0) - 0.5), 0.8


def tuning(
    folder: Path, names: str = "fedheal,fedavg", settings: Any = None, **protocol: Any
) -> TuningStudies:
    folder.mkdir(exist_ok=True)
    flat = SMALL | (settings or {})
    plan = Plan.grid(flat, StrategyConfig.parse(names), [0])
    return TuningStudies(
        folder,
        plan.runs,
        TuningProtocol(**{"budget": 5, "select": "worst", "seeds": [1, 2], **protocol}),
    )


def tuned_of(studies: TuningStudies, method: str) -> Tuned:
    return next(one for one in studies.tuned() if one.method == method)


def run_study(
    studies: TuningStudies, quality: Quality = by_tau, *, most: int = 999
) -> list[RunConfig]:
    """Write the runs of a study, in the order of `execute_parallel`, without training."""
    todo, done = list(studies.plan.runs), []
    while todo and len(done) < most:
        config = todo.pop(0)
        error: Exception | None = None
        try:
            write_run(config, quality(config))
        except (RoundFailed, OSError) as problem:
            error = problem
            write_run(config, (0.1, 0.1), problem)
        done.append(config)
        todo += studies.ended(config, error)
    return done


def write_run(
    config: RunConfig, quality: tuple[float, float], error: Exception | None = None
) -> None:
    """Write a run folder as plain text, with these accuracies from the second round on."""
    federation = prepare(config.data)
    folder = Path(config.output_dir) / config.run_name
    if (folder / "run.json").exists() and not config.resume:
        folder = folder.with_name(f"{folder.name}-2")
    folder.mkdir(parents=True, exist_ok=True)
    status, reason = (
        ("failed", f"{type(error).__name__}: {error}") if error else ("completed", None)
    )
    level = "domain" if config.evaluate.test else "validation"
    lines = ["round,level,name,metric,value"]
    for r in range(1, config.num_server_rounds + 1):
        values = dict(zip(federation.domains, quality if r > 1 else (0.1, 0.1), strict=True))
        lines += [
            f"{r},{level},{domain},{metric},{of}"
            for domain, value in values.items()
            for metric, of in (("accuracy", value), ("balanced_accuracy", 1 - value))
        ]
        lines.append(f"{r},run,,seconds,1.0")
    facts = {
        **{"label": config.label, "status": status, "error": reason, "rounds": 4},
        "domains": list(federation.domains),
        "clients": [vars(client) for client in federation.clients],
        "digest": federation.digest,
        "availability": trace_digest(config.participation.availability),
    }
    (folder / "run.json").write_text(json.dumps(facts))
    (folder / "history.csv").write_text("\n".join(lines) + "\n")
    (folder / "config.toml").write_text(config.to_toml())
