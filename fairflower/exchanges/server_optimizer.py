"""Server optimizers: the server steps along the merged update (Reddi et al., ICLR 2021)."""

from typing import Annotated, Literal

import numpy as np

from fairflower.aggregation.cohort import Arrays, Cohort, Floats
from fairflower.aggregation.exchange import Exchange
from fairflower.arguments import Range
from fairflower.config.settings import SERVER_LR


class ServerOptimizer(Exchange):
    """Step along the merged model minus the received one, whatever strategy merged it::

        D = merged - theta, the pseudo-gradient;   m = v = 0 at first

        sgd       theta <- theta + lr D
        momentum  m <- beta m + D;    theta <- theta + lr m
        adagrad   v <- v + D^2;       theta <- theta + lr D / (sqrt(v) + tau)
        yogi      m <- beta m + (1 - beta) D;    v <- v - (1 - beta_2) D^2 sign(v - D^2)
                  theta <- theta + lr m / (sqrt(v) + tau)
        adam      m as for yogi;      v <- beta_2 v + (1 - beta_2) D^2
                  theta <- theta + lr c m / (sqrt(v) + tau),   in step t = 1, 2, ... with
                  c = sqrt(1 - beta_2^(t + 1)) / (1 - beta^(t + 1))

    These are Flower's ``FedAvgM`` (Hsu et al. 2019), ``FedAdagrad``, ``FedYogi`` and ``FedAdam``.
    (Algorithm 2 of Reddi et al. has no c, and v >= tau^2 at first.) A round that fails is no step.
    BatchNorm statistics and counters take the merged values. D includes what exchanges before this
    one correct, so list it last. With ``sgd``, lr is SCAFFOLD's global step size.

    Parameters
    ----------
    optimizer : {"sgd", "momentum", "adam", "yogi", "adagrad"}
    lr : float >= 0
        Server learning rate. 0, the default, means Flower's: 1 for sgd and momentum, 0.1 for adam
        and adagrad, 0.01 for yogi.
    momentum, beta_2 : float in [0, 0.9999]
        beta of momentum, adam and yogi, and beta_2 of the latter two. Default 0.9 and 0.99 (Reddi
        et al.).
    tau : float > 0
        Degree of adaptivity of adam, yogi and adagrad. Default 0.001 (Reddi et al.).

    Examples
    --------
    >>> from fairflower.strategies import FedHEAL
    >>> strategy = FedHEAL(exchanges=[ServerOptimizer(optimizer="adam", lr=0.03)])
    """

    name = "server"
    returned = False
    STATE = ("steps", "m", "v")

    def __init__(
        self,
        *,
        optimizer: Literal["sgd", "momentum", "adam", "yogi", "adagrad"],
        lr: Annotated[float, Range(0)] = 0.0,
        momentum: Annotated[float, Range(0, 0.9999)] = 0.9,
        tau: Annotated[float, Range(above=0)] = 1e-3,
        beta_2: Annotated[float, Range(0, 0.9999)] = 0.99,
    ) -> None:
        self.optimizer, self.lr = optimizer, lr or SERVER_LR[optimizer]
        self.momentum, self.tau, self.beta_2 = momentum, tau, beta_2
        self.steps = 0
        self.m: Arrays = {}
        self.v: Arrays = {}

    def correct(self, cohort: Cohort, merged: Arrays) -> Arrays:
        self.steps += 1
        stepped = dict(merged)
        for name in cohort.parameters:
            theta = cohort.received[name]
            D = np.subtract(merged[name], theta, dtype=np.promote_types(theta.dtype, np.float32))
            stepped[name] = np.asarray(theta + self._step(name, D), theta.dtype)
        return stepped

    def _step(self, name: str, D: Floats) -> Floats:
        """Return what is added to a parameter, and keep its m and v."""
        rate, beta, beta_2 = self.lr, self.momentum, self.beta_2
        m, v, square = self.m.get(name, 0.0), self.v.get(name, 0.0), D * D
        match self.optimizer:
            case "sgd":
                return rate * D
            case "momentum":
                self.m[name] = np.asarray(beta * m + D, D.dtype)
                return rate * self.m[name]
            case "adagrad":
                m, v = D, v + square
            case "yogi":
                m = beta * m + (1 - beta) * D
                v = v - (1 - beta_2) * square * np.sign(v - square)
            case "adam":
                m, v = beta * m + (1 - beta) * D, beta_2 * v + (1 - beta_2) * square
                t = self.steps + 1
                rate *= (1 - beta_2**t) ** 0.5 / (1 - beta**t)
        self.m[name], self.v[name] = np.asarray(m, D.dtype), np.asarray(v, D.dtype)
        return np.asarray(rate * self.m[name] / (np.sqrt(self.v[name]) + self.tau))
