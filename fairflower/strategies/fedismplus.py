"""FedISM+: sharpness-aware fairness with a growing radius (Wu et al., arXiv 2503.09587)."""

from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Literal, Unpack

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from fairflower.strategies.base import Cohort, Options, Range, Search, Vector
from fairflower.strategies.fedism import FedISM


class FedISMPlus(FedISM):
    """Weight clients by sharpness, as FedISM does, but with a radius that grows over the rounds.

    In round t of R, counted from 1::

        rho_t = rho (t / R)^p
        S_k   = L_k(theta + rho_t g / ||g||) - L_k(theta),     g = grad L_k(theta)

    S_k determines the weights as in `FedISM`. The server sends rho_t to every client, because a
    client does not know R. rho_t replaces ``measure.rho`` in the measurement, and the radius of
    every sharpness-aware step (clients ``sam``, ``fedsam``, ``gsam`` and ``harmofl``, and
    ``train.sharpness``). Every client reports ``sharpness``, or ``perturbed_loss``. The number of
    examples is not used. BatchNorm statistics are averaged with w.

    Parameters
    ----------
    rho : float > 0
        Radius in the last round. Default 0.05 (released code).
    p : float >= 0
        Power of the schedule; 0 gives the same radius in every round, which is FedISM. Default 0.5
        (released code).
    state : {"sharpness", "perturbed_loss"}
        Definition of S_k. ``"sharpness"``, the default, is the increase in the loss, as above
        (released code); ``"perturbed_loss"`` is L_k(theta + rho_t g / ||g||) itself.
    rounds : int, optional
        R, the planned number of rounds; after these rounds the radius stays at rho. Default:
        ``num-server-rounds`` in the config sent to the clients. fairflower's app and ``start`` set
        it. Flower's wrappers and its classic API do not: without it, a round raises
        ``ConfigError`` there.
    q, beta, variant
        As in `FedISM`. The authors' command line sets q = 2; the default in their code is 1.

    See Also
    --------
    FedISM : The same radius in every round.
    QFFL : Weights by a power of the loss.

    Notes
    -----
    Only the paper's abstract and code were available. The abstract mentions the perturbed loss, but
    the code has only the sharpness, so the formula of ``state="perturbed_loss"`` is inferred.

    Where the loss is nearly linear, S_k is about rho_t ||g||, and rho_t cancels in the weights. The
    schedule matters where the curvature is large.

    Examples
    --------
    >>> from fairflower.strategies import FedISMPlus
    >>> from fairflower.testing import make_cohort
    >>> strategy = FedISMPlus(rounds=4)
    >>> [round(strategy.radius(t), 4) for t in (1, 2, 3, 4)]
    [0.025, 0.0354, 0.0433, 0.05]
    >>> strategy.weigh(make_cohort([[1.0], [5.0]], sharpness=[0.1, 0.2])).round(3).tolist()
    [0.2, 0.8]
    """

    paper: ClassVar[str] = "Wu et al., arXiv 2503.09587"
    config_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {"rounds": ("num-server-rounds",)}

    def __init__(
        self,
        *,
        rho: Annotated[float, Range(above=0), Search(0.01, 0.5, log=True)] = 0.05,
        p: Annotated[float, Range(0), Search(0.1, 2, log=True)] = 0.5,
        state: Literal["sharpness", "perturbed_loss"] = "sharpness",
        rounds: Annotated[int | None, Range(1)] = None,
        q: Annotated[float, Range(0), Search(0.1, 10, log=True)] = 2.0,
        beta: Annotated[float, Range(0, 1)] = 0.5,
        variant: Literal["paper", "released"] = "paper",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(q=q, beta=beta, variant=variant, **options)
        self.rho, self.p, self.state = rho, p, state
        self.rounds = rounds if p > 0 else 1  # the radius does not change
        self.measurements = (state,)

    def radius(self, server_round: int) -> float:
        """Return the radius rho_t in round ``server_round``."""
        done = min(server_round / self.rounds, 1.0) if self.rounds else 1.0
        return float(self.rho * done**self.p)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return train messages whose config has the round's radius under ``rho``."""
        self.read_config(config)
        config["rho"] = self.radius(server_round)
        return super().configure_train(server_round, arrays, config, grid)

    def weigh(self, cohort: Cohort) -> Vector:
        self.diagnostics["rho"] = self.radius(cohort.server_round)
        return super().weigh(cohort)
