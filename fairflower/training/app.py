"""A client's part in a round, behind Flower's message API and for others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fairflower.arrays import arrays_of, record_of
from fairflower.training.client_state import load_state, save_state
from fairflower.training.measurements import train_and_measure
from fairflower.training.modes import flushed_denormals
from fairflower.training.trainer import Arrays, Trainer, server_round

if TYPE_CHECKING:
    from flwr.clientapp.typing import Mod


def train_round(
    trainer: Trainer, context: Context, config: Mapping[str, Any]
) -> tuple[dict[str, float], dict[str, Arrays]]:
    """Take up what the client kept, train and measure, and keep what it wants to.

    The metrics are ``client-id``, ``train_loss``, what was measured and, of a client that keeps
    something, ``state-round``: the round from which it had it. The arrays go back beside the
    model: measured ones, and the trainer's ``returns``.
    """
    found = load_state(trainer, context, config, before=server_round(config))
    with flushed_denormals():
        numbers, measured = train_and_measure(trainer, config)
    save_state(trainer, context, config)
    metrics = {"client-id": trainer.client_id, **numbers}
    if trainer.state:
        metrics["state-round"] = found
    return metrics, measured | trainer.returns


def evaluate_round(
    trainer: Trainer, context: Context, config: Mapping[str, Any]
) -> dict[str, float]:
    """Test the received model, with what the client kept up to this round.

    Returns ``client-id``, ``eval_loss``, ``accuracy``, and what the method adds.
    """
    before = server_round(config) + 1 if "server-round" in config else math.inf
    load_state(trainer, context, config, before)
    with flushed_denormals():
        return {"client-id": trainer.client_id, **trainer.test()}


def make_client_app(
    trainer_fn: Callable[[Context, ConfigRecord], Trainer], *, mods: Sequence[Mod] = ()
) -> ClientApp:
    """Answer Flower's train and evaluate messages with trainers.

    Parameters
    ----------
    trainer_fn
        Called for every message with the node's context and the message's config;
        gives the node's trainer.
    mods
        Flower's modifiers of training, such as ``flwr.clientapp.mod.fixedclipping_mod``.

    Returns
    -------
    ClientApp
        It expects an ArrayRecord ``arrays`` (the global model, by name) and, to
        train, a ConfigRecord ``config`` with ``server-round``. It replies with a
        MetricRecord ``metrics`` (``num-examples``, ``client-id``, and ``train_loss``
        or ``eval_loss`` and ``accuracy``) and, after training, with ``arrays``. What
        the config asks for under ``measure`` comes along, numbers in ``metrics`` and
        arrays in an ArrayRecord of their own; see `fairflower.training.measurements`. Any
        other ArrayRecord of the message is the trainer's ``shared``, and its
        ``returns`` go back the same way. What it keeps lives in ``Context.state`` and on
        the disk (`fairflower.training.client_state`); a client that keeps something also reports
        ``state-round``, the round from which it had it.
    """
    app = ClientApp()

    @app.train(mods=list(mods))
    def train(message: Message, context: Context) -> Message:
        trainer, config = _prepare(trainer_fn, message, context)
        metrics, arrays = train_round(trainer, context, config)
        reply = RecordDict({"arrays": record_of(trainer.send())})
        reply["metrics"] = MetricRecord({"num-examples": len(trainer.data.train.y), **metrics})
        for name, named in arrays.items():
            reply[name] = record_of(named)
        return Message(reply, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        trainer, config = _prepare(trainer_fn, message, context)
        metrics = evaluate_round(trainer, context, config)
        record = MetricRecord({"num-examples": len(trainer.data.test.y), **metrics})
        return Message(RecordDict({"metrics": record}), reply_to=message)

    return app


def _prepare(
    trainer_fn: Callable[[Context, ConfigRecord], Trainer], message: Message, context: Context
) -> tuple[Trainer, ConfigRecord]:
    """Make the node's trainer, and give it what the message carries."""
    content = message.content
    arrays = {name: arrays_of(record) for name, record in content.array_records.items()}
    if "arrays" not in arrays:
        raise ValueError(
            f"The {message.metadata.message_type} message has no ArrayRecord 'arrays', only "
            f"{', '.join(content) or 'nothing'}. Leave the strategy's arrayrecord_key as it is."
        )
    config = content.config_records.get("config", ConfigRecord())
    trainer = trainer_fn(context, config)
    trainer.receive(arrays.pop("arrays"))
    trainer.shared = arrays
    return trainer, config
