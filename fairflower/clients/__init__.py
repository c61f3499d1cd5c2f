"""Trainers: how a client trains in a round. Each file implements one paper.

Examples
--------
A trainer in the ClientApp of a Flower app:

>>> from fairflower.clients import SGD, make_client_app
>>> from fairflower.config import TrainConfig
>>> def trainer_fn(context, config):
...     client = int(context.node_config["partition-id"])
...     settings = TrainConfig(lr=config["train.lr"])
...     return SGD(make_net(), load_data(client), settings, client_id=client, seed=0)
>>> app = make_client_app(trainer_fn)
"""

from fairflower.clients.sgd import SGD
from fairflower.training.app import make_client_app
from fairflower.training.batches import ClientData, Images
from fairflower.training.device import choose_device, limit_threads
from fairflower.training.features import mean_representation
from fairflower.training.fisher import fisher_diagonal
from fairflower.training.gradients import mean_gradient, mean_loss, sharpness
from fairflower.training.trainer import Trainer

__all__ = [
    "SGD",
    "ClientData",
    "Images",
    "Trainer",
    "choose_device",
    "fisher_diagonal",
    "limit_threads",
    "make_client_app",
    "mean_gradient",
    "mean_loss",
    "mean_representation",
    "sharpness",
]
