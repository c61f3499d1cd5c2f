"""Methods of local training: one file per paper."""

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
