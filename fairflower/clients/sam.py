"""Sharpness-aware local training: FedSAM, and the steps of FedISM's SALT."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from fairflower.arguments import Range, Search
from fairflower.training.trainer import Trainer


class SAM(Trainer):
    """Local training whose steps are SAM's (Foret et al., ICLR 2021).

    The radius is ``train.rho``; see `fairflower.training.optim.sharpen`. The same as
    ``train.sharpness = "sam"``, which goes with any other method, too. A step costs two
    plain ones.
    """

    paper = "Foret et al., ICLR 2021"
    sharpness = "sam"


class FedSAM(SAM):
    """FedSAM (Caldarola et al., ECCV 2022; Qu et al., ICML 2022): SAM on the clients.

    The server averages as ever, so this is ``sam`` with the method's own radius:
    ``train.rho`` is not used. (Caldarola's code lets batch norm count both passes, and
    takes the perturbation off by subtraction; see `fairflower.training.optim.sharpen`.)

    Parameters
    ----------
    rho
        Default 0.1 (Caldarola et al., CIFAR-10; FedGCR's table has 0.05).
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
    """Local training whose steps are GSAM's (Zhuang et al., ICLR 2022).

    FedISM's SALT (IJCAI 2024) is this with ``train.optimizer = "adam"``, lr 3e-4,
    weight decay 5e-4, ``train.rho = 0.05``, ``train.alpha = 0.1`` and
    ``train.logit-adjustment = true``, from its released code: Eq. 11 of the paper is
    plain SAM, its text says GSAM. The same as ``train.sharpness = "gsam"``.
    """

    paper = "Zhuang et al., ICLR 2022"
    sharpness = "gsam"
