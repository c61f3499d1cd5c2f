"""Sharpness-aware local training: FedSAM, and the clients of FedISM (SALT)."""

from dataclasses import replace
from typing import Annotated, Any

from fairflower.arguments import Range, Search
from fairflower.training.trainer import Trainer


class SAM(Trainer):
    """Local training with SAM's steps (Foret et al., ICLR 2021).

    The radius is ``train.rho``; see `fairflower.training.trainer.apply_sam_gradient`. This trainer
    is equivalent to ``sgd`` with ``train.sharpness = "sam"``, a setting of every trainer. A step
    costs as much as two plain steps.

    See Also
    --------
    FedSAM : SAM with the radius as an argument.
    GSAM : Steps that also reduce the surrogate gap.

    Examples
    --------
    >>> from fairflower.clients.sam import SAM
    >>> from fairflower.testing.federations import SETTINGS, data, tiny_model
    >>> client = SAM(tiny_model(), data(), SETTINGS, client_id=0, seed=0)
    >>> round(client.train(server_round=1)["train_loss"], 2)
    1.7
    """

    paper = "Foret et al., ICLR 2021"
    sharpness = "sam"


class FedSAM(SAM):
    """SAM on the clients (Caldarola et al., ECCV 2022; Qu et al., ICML 2022).

    This is ``sam`` with the radius as an argument; ``train.rho`` is not used.

    Parameters
    ----------
    rho
        Radius of the perturbation. Default 0.1 (Caldarola et al., CIFAR-10; FedGCR's code: 0.05).

    See Also
    --------
    SAM : Takes the radius from ``train.rho``.
    HarmoFL : SAM with amplitude normalization.

    Notes
    -----
    In the code of Caldarola et al., both passes update BatchNorm statistics, and the perturbation
    is removed by subtraction; `fairflower.training.trainer.apply_sam_gradient` avoids both.

    Examples
    --------
    >>> from fairflower.clients.sam import FedSAM
    >>> from fairflower.testing.federations import SETTINGS, data, tiny_model
    >>> client = FedSAM(tiny_model(), data(), SETTINGS, client_id=0, seed=0, rho=0.05)
    >>> round(client.train(server_round=1)["train_loss"], 2)
    1.7
    """

    paper = "Caldarola et al., ECCV 2022"

    def __init__(
        self,
        *args: Any,
        rho: Annotated[float, Range(0), Search(0.01, 0.5, log=True)] = 0.1,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.settings = replace(self.settings, rho=rho)


class GSAM(Trainer):
    """Local training with GSAM's steps (Zhuang et al., ICLR 2022).

    The same as ``sgd`` with ``train.sharpness = "gsam"``, a setting of every trainer.

    See Also
    --------
    SAM : Steps without the surrogate gap.
    fairflower.strategies.fedism.FedISM : The server's part of FedISM.

    Notes
    -----
    FedISM's SALT (IJCAI 2024) is this trainer with ``train.optimizer = "adam"``, lr 3e-4, weight
    decay 5e-4, ``train.rho = 0.05``, ``train.alpha = 0.1`` and ``train.logit-adjustment = true``,
    as in its released code. Eq. 11 of the paper is plain SAM, but its text says GSAM.

    Examples
    --------
    >>> from fairflower.clients.sam import GSAM
    >>> from fairflower.testing.federations import SETTINGS, data, tiny_model
    >>> client = GSAM(tiny_model(), data(), SETTINGS, client_id=0, seed=0)
    >>> round(client.train(server_round=1)["train_loss"], 2)
    1.7
    """

    paper = "Zhuang et al., ICLR 2022"
    sharpness = "gsam"
