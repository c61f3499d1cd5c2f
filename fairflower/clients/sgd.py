"""Plain local training."""

from fairflower.training.trainer import Trainer


class SGD(Trainer):
    """Plain local training, the ClientUpdate of FedAvg (McMahan et al. 2017, Algorithm 1).

    Starting from the received model, the client takes mini-batch gradient steps
    ``w <- w - lr * grad`` for ``train.local-epochs`` epochs, with momentum and weight decay. The
    momentum buffer is zero at the start of every round; weight decay adds ``weight_decay * w`` to
    the gradient. FedHEAL's experiments (Chen et al. 2024, section 4.1) use lr 0.001, momentum 0.9,
    weight decay 1e-5, 10 epochs, and batches of 64 on Digits and 16 on Office-Caltech.

    Other optimizers, sharpness-aware steps and logit adjustment are settings of every trainer
    (``train.*``).

    See Also
    --------
    FedProx : SGD that stays near the global model.
    make_client_app : Use a trainer in the ClientApp of a Flower app.

    Examples
    --------
    >>> from fairflower.clients import SGD
    >>> from fairflower.testing.federations import SETTINGS, data, tiny_model
    >>> client = SGD(tiny_model(), data(), SETTINGS, client_id=0, seed=0)
    >>> client.receive(client.send())  # the global model, as named arrays
    >>> round(client.train(server_round=1)["train_loss"], 2)
    1.66
    >>> client.steps
    2
    """

    paper = "McMahan et al., AISTATS 2017"
