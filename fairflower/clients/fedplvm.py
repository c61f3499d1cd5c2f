"""FedPLVM (Wang, Bian, Zhang, Chen, Xu, NeurIPS 2024)."""

from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fairflower.arguments import Range, Search
from fairflower.errors import require
from fairflower.exchanges.stored import ClusterPrototypes
from fairflower.numerics.clustering import first_neighbor_means
from fairflower.training.features import ClusterTrainer
from fairflower.training.modes import eval_mode


class FedPLVM(ClusterTrainer):
    """Local training with prototypes that are clustered twice, and a sparse similarity.

    Each client clusters the features of its images of a class, and the server the means of all
    clients' clusters (`ClusterPrototypes`; both by FINCH). Let P be the server's means, P_y those
    of class y, and u_y the mean of P_y. The loss of an image of class y with features z is::

        L = CE + lambda (L_alpha + L_corr)
        L_alpha = -log( sum_{p in P_y} e^s_p / sum_{p in P} e^s_p ),  s_p = cos(z, p)^alpha / tau
        L_corr = 2 (1 - cos(z, u_y))^2

    An image whose class has no prototype, as all in round 1, adds nothing to the last two terms.
    The equations and defaults are those of the released code, where negative cosines have no power;
    here cosines below 0.0001 count as 0.0001.

    A client clusters all features of a class at once, in time quadratic in their number.

    Parameters
    ----------
    lambda_
        Weight of the prototype loss. Default 100, with ``train.lr = 0.01`` and ``train.momentum =
        0.5`` in the released code: larger steps may not converge.
    alpha
        Exponent of the similarity: small values spread small similarities. Default 0.25.
    tau
        Temperature. Default 0.07.

    See Also
    --------
    FPL : One prototype for each class of a client.

    Examples
    --------
    >>> from fairflower.clients.fedplvm import FedPLVM
    >>> from fairflower.testing.federations import SETTINGS, data, tiny_model
    >>> client = FedPLVM(tiny_model(), data(), SETTINGS, client_id=0, seed=0)
    >>> _ = client.train(server_round=1)
    >>> client.returns["clusters"]["label"].tolist()
    [0, 0, 1, 2, 3]
    """

    paper = "Wang et al., NeurIPS 2024"
    exchanges = (ClusterPrototypes,)
    mean_of = "cluster"

    def __init__(
        self,
        *args: Any,
        lambda_: Annotated[float, Range(0), Search(1, 1000, log=True)] = 100.0,
        alpha: Annotated[float, Range(above=0, high=1), Search(0.05, 1)] = 0.25,
        tau: Annotated[float, Range(1e-6), Search(0.01, 1, log=True)] = 0.07,
        **options: Any,
    ) -> None:
        require("solvers", "Clustering")
        super().__init__(*args, **options)
        self.lambda_, self.alpha, self.tau = lambda_, alpha, tau

    def terms(self, z: Tensor, y: Tensor, prototypes: Tensor) -> tuple[Tensor]:
        cosine = F.normalize(z) @ F.normalize(prototypes).T
        contrast = self.contrast(cosine.clamp(min=1e-4) ** self.alpha / self.tau, y)
        away = (1 - F.cosine_similarity(z, self.unbiased[y])).square()
        return (self.lambda_ * (contrast + 2 * (away * self.known[y]).mean()),)

    def end(self, server_round: int) -> None:
        """Write ``mean`` [P, d], ``count`` [P] and ``label`` [P] of the client's clusters."""
        with torch.no_grad(), eval_mode(self.model):
            batches = self.train_examples.eval_batches(self.eval_batch_size)
            pairs = [(self.model.features(x).cpu().double(), y) for x, y in batches]
        z, y = (torch.cat(parts).cpu().numpy() for parts in zip(*pairs, strict=True))
        clusters = [(first_neighbor_means(z[y == c]), c) for c in np.unique(y).tolist()]
        self.returns[ClusterPrototypes.name] = {
            "mean": np.concatenate([means for (means, _), _ in clusters]).astype(np.float32),
            "count": np.concatenate([sizes for (_, sizes), _ in clusters]),
            "label": np.array([c for (_, sizes), c in clusters for _ in sizes]),
        }
