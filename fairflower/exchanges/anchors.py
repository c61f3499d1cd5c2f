"""FedLSA's semantic anchors, learned on the server (Fu et al., AAAI 2025)."""

from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.cohort import Arrays, Cohort
from fairflower.aggregation.exchange import Exchange
from fairflower.arguments import Range, Search
from fairflower.errors import ConfigError

Array = NDArray[np.float64]


class SemanticAnchors(Exchange):
    """Unit vectors a_c, one for each class, which the global classifier separates.

    The anchors are A = nor(Theta(R)), where Theta is a two-layer perceptron, R are learned vectors,
    and nor scales rows to unit norm. Each round continues the training of Theta and R for the
    merged head W, b, which is frozen (the paper's Eqs. 3 to 5)::

        L_ACE = mean_c -log softmax(W a_c + b)_c
        L_SEP = mean_c log( 1/(C-1) sum_{j != c} exp(<a_c, a_j> / tau) )
        L_LSA = L_ACE + alpha L_SEP

    Anchors are sent from round 2 on, once the head has been trained. They are learned with NumPy,
    so the server does not need torch.

    Some details are inferred. Anchors have norm 1 during training, because Eq. 6 needs unit
    vectors; the paper's algorithm does not say when they are scaled. The temperature is inside the
    exponential, because in Eq. 4 as printed it would only add a constant. The paper does not give
    the hidden width or the learning rate.

    Raises ``ValueError`` if epochs, lr or hidden are out of range.

    Parameters
    ----------
    alpha : float
        Weight of the separation loss. Default 0.02 (FedEquilibria, Table 5; FedLSA: 0.02 or 0.4).
    tau : float
        Temperature. Default 0.1 (FedEquilibria, Table 5; FedLSA: 0.1 or 0.2).
    epochs : int
        Gradient steps per round. Default 500 (FedLSA).
    lr : float
        Learning rate of gradient descent. Default 1 (this project's choice).
    hidden : int
        Width of Theta's hidden layer. Default 64 (this project's choice).
    head : str
        Name of the model's last linear layer. Default "head".
    """

    name = "anchors"
    returned = False
    STATE = ("anchors", "parameters")

    def __init__(
        self,
        *,
        alpha: Annotated[float, Range(0), Search(0.002, 0.2, log=True)] = 0.02,
        tau: Annotated[float, Range(1e-6), Search(0.02, 1, log=True)] = 0.1,
        epochs: int = 500,
        lr: float = 1.0,
        hidden: int = 64,
        head: str = "head",
    ) -> None:
        if not (epochs >= 0 and hidden >= 1 and 0 < lr < np.inf):
            raise ValueError(
                f"epochs = {epochs}, hidden = {hidden}, lr = {lr}: expected epochs >= 0, hidden >= "
                "1 and a positive, finite lr."
            )
        self.alpha, self.tau = alpha, tau
        self.epochs, self.lr = epochs, lr
        self.hidden, self.head = hidden, head
        self.anchors: NDArray[np.float32] | None = None
        self.parameters: dict[str, Array] = {}

    def broadcast(self, server_round: int) -> Arrays:
        return {} if self.anchors is None else {"anchors": self.anchors}

    def correct(self, cohort: Cohort, merged: Arrays) -> Arrays:
        name = f"{self.head}.weight"
        weight = merged.get(name, np.empty(0)).astype(np.float64)
        if weight.ndim != 2:
            found = f"has shape {weight.shape}" if name in merged else "is no array of the model"
            raise ConfigError(
                f"{name!r} {found}, but anchors need the last linear layer, [classes, d]. Pass its "
                "name as SemanticAnchors(head=...)."
            )
        bias = np.asarray(merged.get(f"{self.head}.bias", np.zeros(len(weight))), np.float64)
        learned = self.parameters or initial(weight.shape, self.hidden, self.seed)
        for _ in range(self.epochs):
            _, gradients = anchor_loss(learned, weight, bias, self.alpha, self.tau)
            learned = {name: p - self.lr * gradients[name] for name, p in learned.items()}
        self.anchors = _forward(learned)["A"].astype(np.float32)
        self.parameters = learned
        return merged


def initial(shape: tuple[int, ...], hidden: int, seed: int) -> dict[str, Array]:
    """Return initial values of R [C, d] and of Theta's layers, [d, h] and [h, d]."""
    classes, d = shape
    random = np.random.default_rng([seed, classes, d])
    return {
        "R": random.normal(size=(classes, d)) / np.sqrt(d),
        "W1": random.normal(size=(d, hidden)) * np.sqrt(2 / hidden),
        "b1": np.zeros(hidden),
        "W2": random.normal(size=(hidden, d)) / np.sqrt(d),
        "b2": np.zeros(d),
    }


def anchor_loss(
    parameters: dict[str, Array], weight: Array, bias: Array, alpha: float, tau: float
) -> tuple[float, dict[str, Array]]:
    """Return L_LSA and its gradient with respect to each of ``parameters``."""
    middle = _forward(parameters)
    A = middle["A"]
    classes = len(A)
    logits = A @ weight.T + bias
    logits -= logits.max(1, keepdims=True)
    p = np.exp(logits)
    log_p = logits - np.log(p.sum(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    apart = A @ A.T / tau
    np.fill_diagonal(apart, -np.inf)
    highest = apart.max(1, keepdims=True)
    spread = np.exp(apart - highest)
    total = spread.sum(1, keepdims=True)
    ace = -np.trace(log_p) / classes
    sep = np.mean(highest + np.log(total / (classes - 1)))

    pull = (p - np.eye(classes)) @ weight / classes
    share = spread / total / classes
    dA = pull + alpha * (share + share.T) @ A / tau
    dout = (dA - A * np.sum(A * dA, 1, keepdims=True)) / middle["norm"]
    dhid = (dout @ parameters["W2"].T) * (middle["hid"] > 0)
    gradients = {
        "R": dhid @ parameters["W1"].T,
        "W1": parameters["R"].T @ dhid,
        "b1": dhid.sum(0),
        "W2": middle["hid"].T @ dout,
        "b2": dout.sum(0),
    }
    return float(ace + alpha * sep), gradients


def _forward(parameters: dict[str, Array]) -> dict[str, Array]:
    """Return the anchors A = nor(Theta(R)), [C, d], and what their gradient needs."""
    hid = np.maximum(parameters["R"] @ parameters["W1"] + parameters["b1"], 0)
    out = hid @ parameters["W2"] + parameters["b2"]
    norm = np.maximum(np.linalg.norm(out, axis=1, keepdims=True), 1e-12)
    return {"hid": hid, "norm": norm, "A": out / norm}
