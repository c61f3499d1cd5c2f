"""The tuning protocol, which is the same for all methods."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairflower.config import DataConfig, RunConfig
from fairflower.config.methods import DataSpec
from fairflower.errors import USER_ERRORS, ConfigError

#: Key of the number of validation examples per domain, which replaces the fraction.
EXAMPLES = "data.validation-examples"

#: Trials in a study. The folder `trials` in ~/.fairflower has trial deployments, which have other
#: names.
_TRIALS = "trials/*-trial*"


def is_study(folder: Path) -> bool:
    """Return whether a folder contains a study."""
    return any(folder.glob(_TRIALS))


def check_no_studies(*folders: Path) -> None:
    """Raise ``ConfigError`` if a folder is a study or contains one: trials are no test runs."""
    for folder in folders:
        studies = sorted({trial.parents[1] for trial in folder.rglob(_TRIALS)})
        if studies:
            found = f"{folder} {'is a study' if folder in studies else 'contains studies'}"
            runs = shlex.join(str(study / "runs") for study in studies)
            raise ConfigError(
                f"{found}. For a report that includes the trials, repeat the study's "
                "`fairflower tune` command with the same --output-dir; completed runs are kept. "
                "For the test runs only, including those of earlier choices, name instead: "
                f"{runs}"
            )


def redrawable(flat: Mapping[str, Any]) -> bool:
    """Return whether several federations of a user's data draw the test examples anew by default.

    With one client per domain they would otherwise be the same division.
    """
    if not DataSpec.read(str(flat.get("data.name", DataConfig.name))).own:
        return False
    from fairflower.data.cache import make_data_set  # slow to import

    with suppress(*USER_ERRORS):  # raised again where the data are prepared
        return make_data_set(RunConfig.from_message(flat).data).redrawable
    return False


@dataclass(frozen=True)
class TuningProtocol:
    """Settings of a study.

    Attributes
    ----------
    budget : int
        Number of trials per method.
    seeds : sequence of int
        Random seeds for the tests.
    select : str
        Criterion for choosing a trial, a key of `fairflower.report.tuning.CRITERIA`.
    metric : str
        Metric of the criterion, a key of `fairflower.report.tuning.METRICS`.
    training : bool
        Whether the learning rate and the local epochs are also tuned.
    defaults : bool
        Whether the paper's values are also tested.
    federations : bool
        Whether each seed for the tests is also the federation's seed (``data.seed`` = ``seed``).
    """

    budget: int
    seeds: Sequence[int]
    select: str
    metric: str = "accuracy"
    training: bool = False
    defaults: bool = False
    federations: bool = False
