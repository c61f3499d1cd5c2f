"""FedRDN (Yan et al., CVPR 2025)."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fairflower.exchanges.stored import ImageStatistics
from fairflower.training.trainer import Trainer


class FedRDN(Trainer):
    """Local training on images that are normalized with the statistics of random clients.

    mu_k and sigma_k are the mean and the standard deviation of each channel, averaged over client
    k's training images (in [0, 1]). In each step, each image becomes ``(x - mu_j) / sigma_j`` for a
    random client j, of all whose statistics the server has; in round 1 for the client itself. A
    client tests with its own statistics, and the server with the mean and std of the data set.

    sigma has ddof 0 and is at least 1/255. In the released code it has ddof 1, clients send the
    statistics before round 1, and mu and sigma are drawn independently for a whole batch.

    **Privacy: each client's statistics are sent to all clients.**

    See Also
    --------
    FedMix : Shares averages of images.

    Examples
    --------
    >>> from fairflower.clients.fedrdn import FedRDN
    >>> from fairflower.testing.federations import SETTINGS, data, tiny_model
    >>> client = FedRDN(tiny_model(), data(), SETTINGS, client_id=0, seed=0)
    >>> _ = client.train(server_round=1)
    >>> client.returns["statistics"]["statistics"].shape
    (2, 1)
    """

    paper = "Yan et al., CVPR 2025"
    kinds = ("images",)
    exchanges = (ImageStatistics,)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        x = self.data.train.x
        parts = (x[i : i + 500] / np.float32(255) for i in range(0, len(x), 500))
        pairs = [(part.mean((2, 3)), part.std((2, 3))) for part in parts]
        mean, std = np.concatenate(pairs, axis=1).mean(axis=1)
        self.own = np.array([mean, np.maximum(std, 1 / 255)], np.float32)  # [2, channels]
        self.data = replace(self.data, mean=(*mean.tolist(),), std=(*self.own[1].tolist(),))

    @classmethod
    def run_warning(cls, model: nn.Module, by: str) -> str:
        """Return a warning if only the server tests; else ""."""
        text = 'FedRDN: the server tests without clients\' statistics. Set evaluate.by = "both".'
        return text if by == "server" else ""

    def begin(self, server_round: int) -> None:
        self.statistics = self.to_device(self.shared.get("statistics", {})).get("statistics")
        self.draws = torch.Generator().manual_seed(self.derive_seed(server_round, "statistics"))

    def step(self, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        """Take a step on a batch whose images are normalized anew."""
        if self.statistics is not None:
            drawn = torch.randint(len(self.statistics), (len(x),), generator=self.draws)
            mean, std = self.statistics[drawn.to(x.device), :, :, None, None].unbind(1)
            own, scale = torch.tensor(self.own, device=x.device)[..., None, None]
            x = (x * scale + own - mean) / std
        return super().step(optimizer, x, y)

    def end(self, server_round: int) -> None:
        self.returns["statistics"] = {"statistics": self.own}
