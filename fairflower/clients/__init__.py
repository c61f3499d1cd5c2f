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

from fairflower.clients.sgd import SGD as SGD
from fairflower.training.app import make_client_app as make_client_app
from fairflower.training.batches import ClientData as ClientData
from fairflower.training.batches import Images as Images
from fairflower.training.device import choose_device as choose_device
from fairflower.training.device import limit_threads as limit_threads
from fairflower.training.features import mean_representation as mean_representation
from fairflower.training.fisher import fisher_diagonal as fisher_diagonal
from fairflower.training.gradients import mean_gradient as mean_gradient
from fairflower.training.gradients import mean_loss as mean_loss
from fairflower.training.gradients import sharpness as sharpness
from fairflower.training.trainer import Trainer as Trainer
