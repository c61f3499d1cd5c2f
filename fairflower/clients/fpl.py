"""FPL (Huang, Ye, Shi, Li, Du, CVPR 2023)."""

from typing import Annotated, Any, Literal

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from fairflower.arguments import Range, Search
from fairflower.exchanges.stored import ClusterPrototypes
from fairflower.training.features import ClusterTrainer


class FPL(ClusterTrainer):
    """Local training that pulls features towards clusters of their class's prototypes.

    The server clusters the clients' mean features of each class (`ClusterPrototypes`). Let P be the
    clusters' means, P_y those of class y, and u_y [d] the mean of P_y. The loss of an image of
    class y with features z [d] is::

        L = CE + L_CPCL + L_UPCR
        L_CPCL = -log( sum_{p in P_y} e^(cos(z,p)/tau) / sum_{p in P} e^(cos(z,p)/tau) )
        L_UPCR = ||z - u_y||^2 / d                             (paper: without 1/d)

    An image whose class has no prototype, as all in round 1, adds nothing to the last two terms.
    (The prototypes of the released code are features of the last epoch's steps.)

    Parameters
    ----------
    tau
        Temperature. Default 0.02 (released code).
    variant
        ``"released"`` (default; the code behind the tables) or ``"paper"``.

    See Also
    --------
    FedPLVM : Clusters of each client's features.
    FedProto : A quadratic loss with one prototype per class.

    Examples
    --------
    >>> from fairflower.clients.fpl import FPL
    >>> from fairflower.testing.federations import SETTINGS, data, tiny_model
    >>> client = FPL(tiny_model(), data(), SETTINGS, client_id=0, seed=0)
    >>> _ = client.train(server_round=1)
    >>> {name: array.shape for name, array in client.returns["clusters"].items()}
    {'mean': (4, 6), 'count': (4,), 'label': (4,)}
    """

    paper = "Huang et al., CVPR 2023"
    exchanges = (ClusterPrototypes,)

    def __init__(
        self,
        *args: Any,
        tau: Annotated[float, Range(1e-6), Search(0.01, 1, log=True)] = 0.02,
        variant: Literal["released", "paper"] = "released",
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.tau, self.variant = tau, variant

    def terms(self, z: Tensor, y: Tensor, prototypes: Tensor) -> tuple[Tensor, Tensor]:
        similarity = F.normalize(z) @ F.normalize(prototypes).T / self.tau
        scale = z.shape[1] if self.variant == "released" else 1
        distance = (z - self.unbiased[y]).square().sum(1) / scale
        return self.contrast(similarity, y), (distance * self.known[y]).mean()

    def end(self, server_round: int) -> None:
        """Write ``mean`` [P, d], ``count`` [P] and ``label`` [P] of the client's P classes."""
        super().end(server_round)
        label = np.flatnonzero(self.returns["clusters"]["count"])
        rows = {name: array[label] for name, array in self.returns["clusters"].items()}
        self.returns["clusters"] = rows | {"label": label}
