"""Privacy loss of a run, computed by Flower's accountant (docs/differential-privacy.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairflower.config.privacy import PrivacyConfig
from fairflower.errors import ConfigError, NotInstalled, require
from fairflower.server.contents import read_history

if TYPE_CHECKING:
    from fairflower.config import RunConfig


@cache
def epsilon(privacy: PrivacyConfig, numbers: int, rounds: int) -> float:
    """Return epsilon at ``privacy.delta`` if a client takes part in this many rounds.

    Each round releases ``numbers`` noisy numbers from each client, and a noisy sum of updates.
    """
    if not rounds:
        return 0.0
    require("dp", "Differential privacy")
    from flwr import serverapp as flower  # imported late, because it is slow

    if not hasattr(flower, "RdpAccountant"):
        raise NotInstalled(
            "Differential privacy needs the accountant in flwr 1.36 or newer. Run: pip install "
            '"flwr[dp]>=1.36"'
        )
    bounds = flower.PrivacyConfig(
        target_delta=privacy.delta,
        population_size=1,  # without amplification by sampling it does not matter
        neighboring_relation=flower.NeighboringRelation.ADD_OR_REMOVE_ONE,
        sampling_method=flower.SamplingMethod.NO_AMPLIFICATION,
    )
    accountant = flower.RdpAccountant(bounds)
    accountant.compose(flower.GaussianPrivacyEvent(privacy.noise_multiplier, 1, 1), rounds)
    if numbers:
        event = flower.GaussianPrivacyEvent(privacy.number_noise_multiplier, 1, 1)
        accountant.compose(event, rounds * numbers)
    return float(accountant.get_epsilon(privacy.delta))


def numbers_of(config: RunConfig) -> int:
    """Return how many numbers of each client the strategy asks for in a round."""
    return len(config.strategy.make()._measurements)


def planned(config: RunConfig) -> tuple[float, float]:
    """Return the largest epsilon that a planned run can have, and its delta."""
    privacy = config.privacy
    whole = epsilon(privacy, numbers_of(config), config.num_server_rounds)
    return min(whole, privacy.max_epsilon or whole), privacy.delta


def together(losses: Iterable[tuple[float, float]]) -> str:
    """State what runs reveal together, given the epsilon and delta of each; empty for one run."""
    losses = list(losses)
    if len(losses) < 2:
        return ""
    total, delta = map(sum, zip(*losses, strict=True))
    return (
        f"Epsilon holds for a single run: these {len(losses)} together have at most epsilon "
        f"{total:.3g} at delta {delta:.3g}, the sums, if a client's data are in all of them."
    )


def check_reachable(privacy: PrivacyConfig, numbers: int, clients: int, rounds: int) -> None:
    """Raise ``ConfigError`` if ``max_epsilon`` allows no round, or delta is too large."""
    if privacy.delta * clients >= 1:
        raise ConfigError(
            f"privacy.delta = {privacy.delta}: with {clients} clients it must be below "
            f"1/{clients}. A larger delta would allow publishing the data of one client."
        )
    limit = privacy.max_epsilon
    if rounds and limit and epsilon(privacy, numbers, 1) > limit:
        raise ConfigError(
            f"privacy.max-epsilon = {privacy.max_epsilon} cannot be met: the first round alone "
            f"has epsilon {epsilon(privacy, numbers, 1):.3g} at delta = {privacy.delta:g}. "
            "Multiply privacy.noise-multiplier"
            + (" and privacy.number-noise-multiplier" if numbers else "")
            + f" by {_factor(privacy, numbers, 1):.3g} for one round or by "
            f"{_factor(privacy, numbers, rounds):.3g} for all {rounds}, or raise max-epsilon."
        )


def _factor(privacy: PrivacyConfig, numbers: int, rounds: int) -> float:
    """Return the factor, rounded up, by which the noise must grow so that max_epsilon suffices."""

    def fits(factor: float) -> bool:
        names = "noise_multiplier", "number_noise_multiplier"
        louder = replace(privacy, **{name: factor * getattr(privacy, name) for name in names})
        return epsilon(louder, numbers, rounds) <= privacy.max_epsilon

    high = 1.0
    while not fits(high) and high < 1e9:
        high *= 2
    low = high / 2
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high * 1.01  # the message rounds it


def check_counted(config: RunConfig, run: Path, facts: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` if the history of a run to resume has more epsilon than its ``facts``.

    ``run.json`` counts a round before its messages are sent, so it never has less.
    """
    history = read_history(run / "history.csv") if (run / "history.csv").exists() else []
    spent = max([0.0, *(line.value for line in history if line.metric == "epsilon")])
    counted = facts.get("privacy", {}).get("rounds", 0)
    if spent * (1 - 1e-9) > epsilon(config.privacy, numbers_of(config), counted):
        raise ConfigError(
            f"{run} cannot be resumed: epsilon is {spent:.6g} in its history.csv, but its run.json "
            f"counts only {counted} rounds. Restore run.json, or start a new run."
        )


class PrivacyLedger:
    """Counts started rounds for ``run.json``, and reports when the privacy budget is used up.

    A round counts as soon as its messages are sent, even if it is repeated after the run was
    killed. Without differential privacy this class does nothing.
    """

    def __init__(self, privacy: PrivacyConfig, numbers: int, rounds: int = 0) -> None:
        self.privacy, self.numbers, self.rounds = privacy, numbers, rounds

    @property
    def epsilon(self) -> float:
        """Epsilon after the rounds so far."""
        return epsilon(self.privacy, self.numbers, self.rounds)

    def metrics(self) -> dict[str, float]:
        """Return epsilon as a metric of the current round."""
        return {"epsilon": self.epsilon} if self.privacy.on else {}

    def facts(self) -> dict[str, Any]:
        """Return the entry of ``run.json``."""
        privacy = self.privacy
        return {
            "epsilon": self.epsilon,
            "delta": privacy.delta,
            "rounds": self.rounds,
            "numbers": self.numbers,
            "noise_multiplier": privacy.noise_multiplier,
            "number_noise_multiplier": privacy.number_noise_multiplier,
            "clip": privacy.clip,
            "noise": "seeded, for experiments" if privacy.noise_seed else "secret",
        }

    def budget_reason(self) -> str:
        """Return why no further round is allowed; empty if a further round is allowed."""
        limit = self.privacy.max_epsilon
        if not limit:
            return ""
        following = epsilon(self.privacy, self.numbers, self.rounds + 1)
        if following <= limit:
            return ""
        return (
            f"epsilon is {self.epsilon:.3g}, and another round would make it {following:.3g}, "
            f"above privacy.max-epsilon = {limit:g}"
        )
