"""A client's part of a round, as functions and as a ClientApp of Flower's message API."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fairflower.arrays import arrays_of, record_of
from fairflower.config.privacy import PrivacyConfig, number_range
from fairflower.config.secure import TRAINED, WEIGHT_KEY
from fairflower.config.site import SHARES, TESTS_OTHERS
from fairflower.errors import STOPS, UserError, failure_text, logger
from fairflower.files import Arrays
from fairflower.models import initial_local_arrays, local_tensors, trainable
from fairflower.numerics.group_fairness import GROUP_COUNTS, counts_by_group
from fairflower.numerics.noise import gaussian, noise_source
from fairflower.registry.user_metrics import FAILED_METRICS, compute_metrics
from fairflower.training.client_state import OWN, load_state, save_state
from fairflower.training.device import float64_on
from fairflower.training.measurements import measure_received, requested, train_and_measure
from fairflower.training.modes import flushed_denormals
from fairflower.training.trainer import Trainer, round_of

if TYPE_CHECKING:
    from flwr.clientapp.typing import Mod


def train_round(
    trainer: Trainer, context: Context, config: Mapping[str, Any]
) -> tuple[dict[str, float], dict[str, Arrays]]:
    """Run a training round and take its measurements, with the client's state from its last round.

    Returns metrics and arrays. The metrics are ``client-id``, ``train_loss``, the measured numbers
    and, for a client with state, ``state-round``: the round in which the loaded state was written,
    or 0. The arrays to send with the model are those measured and the trainer's ``returns``.
    """
    with _restored(trainer, context, config, before=round_of(config)) as state_round:
        if OWN in trainer.state and not _keeps_model(config):
            raise ValueError("the client keeps its own model in this run, and sends none")
        numbers, measured = train_and_measure(trainer, config)
    if _keeps_model(config):
        trainer.state[OWN] = trainer.send()
    save_state(trainer, context, config)
    metrics = {"client-id": trainer.client_id, **numbers}
    if trainer.state:
        metrics["state-round"] = state_round
    return metrics, measured | trainer.returns


def private_round(
    trainer: Trainer,
    context: Context,
    config: Mapping[str, Any],
    privacy: PrivacyConfig,
    received: Arrays,
) -> tuple[dict[str, float], Arrays]:
    """Run `train_round`; return the metrics and the model that may leave the client.

    The derivation is in docs/differential-privacy.md.
    The update is clipped, and the numbers are clipped and noised. If training diverges, the client
    returns the received model, and its numbers are the largest of their ranges before noise is
    added, so that the failure reveals nothing about its examples.
    """
    metrics: dict[str, float] = {}
    try:
        metrics, _ = train_round(trainer, context, config)
        sent = clipped_update(trainer.send(), received, privacy.clip)
    except FloatingPointError:
        sent = dict(received)
    # Without `state-round`, which would reveal in which rounds its training diverged.
    numbers = noised_numbers(metrics, config, privacy, trainer.client_id)
    return {"client-id": trainer.client_id, **numbers}, sent


def evaluate_round(
    trainer: Trainer, context: Context, config: Mapping[str, Any]
) -> dict[str, float]:
    """Test the received model, with the client's state up to this round.

    Returns ``client-id``, ``eval_loss``, the task's scores, such as ``accuracy``, and metrics of
    the client's method. Undefined scores are left out. Another client's own model
    (``own-model = "test"``) is tested without this client's state.
    """
    before = round_of(config) + 1 if "server-round" in config else math.inf
    before = 0 if config.get(OWN) == "test" else before
    with _restored(trainer, context, config, before):
        tested = {name: value for name, value in trainer.test().items() if not math.isnan(value)}
        score = trainer.task.primary.name
        if OWN in trainer.state and score in tested:  # the tested model is the client's own
            tested.setdefault(f"personal_{score}", tested[score])
        return {"client-id": trainer.client_id, **tested}


def _keeps_model(config: Mapping[str, Any]) -> bool:
    return config.get("reference") == "alone"


@contextmanager
def _restored(
    trainer: Trainer, context: Context, config: Mapping[str, Any], before: float
) -> Iterator[int]:
    """Load the client's state, its own model and arrays; in the block, denormal numbers count as 0.

    Yields the round in which the state was written; ``before`` is an argument of `load_state`.
    """
    state_round = load_state(trainer, context, config, before)
    if OWN in trainer.state:
        trainer.receive(trainer.state[OWN])
    trainer.load_local_arrays()
    with flushed_denormals():
        yield state_round


def user_test_metrics(trainer: Trainer) -> tuple[dict[str, float], dict[str, str], list[int]]:
    """Return the user's metrics of the received model, reasons for failed metrics, and counts.

    The counts of people by group (`fairflower.numerics.group_fairness`) are empty if the data have
    no groups. Arrays that stay with the client are set to their initial values, as for
    ``accuracy``.
    """
    groups = trainer.data.groups.get("test")
    if not trainer.user_metrics and groups is None:
        return {}, {}, []
    trainer.model.eval()
    initial = initial_local_arrays(trainer.model)
    wide = float64_on(trainer.device)
    with torch.inference_mode():
        for name, tensor in local_tensors(trainer.model).items():
            tensor.copy_(initial[name])
        examples = trainer.test_examples.eval_batches(trainer.eval_batch_size)
        batches = [(trainer.model(x).to(wide).cpu(), y.cpu()) for x, y in examples]
    logits, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    y, counts = labels.numpy(), list[int]()
    if groups is not None:
        table = counts_by_group(
            y, trainer.task.predict(logits).numpy(), groups, trainer.data.num_groups
        )
        counts = table.ravel().tolist()
    answers = trainer.task.for_users(logits).numpy()
    return *compute_metrics(trainer.user_metrics, answers, y), counts


def make_client_app(
    trainer_fn: Callable[[Context, ConfigRecord], Trainer],
    *,
    mods: Sequence["Mod"] = (),
    around: Sequence["Mod"] = (),
) -> ClientApp:
    """Make a ClientApp that answers Flower's train and evaluate messages with trainers.

    The app expects an ArrayRecord named ``arrays`` (the global model, by name) and, for training, a
    ConfigRecord named ``config`` with ``server-round``. It replies with a MetricRecord named
    ``metrics`` (``num-examples``, ``client-id``, and ``train_loss`` or ``eval_loss`` and
    ``accuracy``) and, after training, with ``arrays``. Measurements that the config requests under
    ``measure`` are added, numbers to ``metrics`` and arrays as separate ArrayRecords; see
    `fairflower.training.measurements`. Other ArrayRecords of the message become the trainer's
    ``shared``, and the trainer's ``returns`` are sent back as ArrayRecords. The trainer's state is
    stored in ``Context.state`` and on disk (`fairflower.training.client_state`); a client with
    state also reports ``state-round``, the round in which the state was written. The reply to a
    message of type ``train.measure`` has the numbers that ``measure`` requests, for the received
    model.

    Parameters
    ----------
    trainer_fn
        Called for every message with the node's context and the message's config; returns the
        node's trainer.
    mods
        Flower's mods for train messages, for example ``flwr.clientapp.mod.fixedclipping_mod``.
    around
        Mods for all messages, before those for training.
    """
    app = ClientApp(mods=list(around))

    def answer_with(reply: Callable[..., Message]) -> Callable[[Message, Context], Message]:
        def answer(message: Message, context: Context) -> Message:
            try:
                return reply(*_prepare(trainer_fn, message, context), message, context)
            except (UserError, ValueError, FloatingPointError, OSError, *STOPS):
                raise  # the text of these errors is enough
            except BaseException as error:  # a KeyError's text alone says little
                raise RuntimeError(failure_text(error)) from error

        return answer

    app.train(mods=list(mods))(answer_with(_train_reply))
    app.train("measure", mods=list(mods))(answer_with(_measure_reply))
    app.evaluate()(answer_with(_evaluate_reply))
    return app


def _train_reply(
    trainer: Trainer, config: ConfigRecord, message: Message, context: Context
) -> Message:
    if (privacy := PrivacyConfig.from_flat(config)).on:
        received = arrays_of(message.content.array_records["arrays"])
        arrays: dict[str, Arrays] = {}
        metrics, sent = private_round(trainer, context, config, privacy, received)
    else:
        metrics, arrays = train_round(trainer, context, config)
        keeps = _keeps_model(config)
        sent = arrays_of(message.content.array_records["arrays"]) if keeps else trainer.send()
    reply = RecordDict({"arrays": record_of(sent)})
    reply["metrics"] = MetricRecord({"num-examples": len(trainer.data.train.y), **metrics})
    for name, named in arrays.items():
        reply[name] = record_of(named)
    if WEIGHT_KEY in config:  # for masks, which do not let these names leave the client
        reply[TRAINED] = ConfigRecord({"names": list(trainable(trainer.model))})
    return Message(reply, reply_to=message)


def _measure_reply(
    trainer: Trainer, config: ConfigRecord, message: Message, context: Context
) -> Message:
    """Measure the received model for a round of secure aggregation; nothing is stored."""
    with _restored(trainer, context, config, before=round_of(config)):
        numbers = measure_received(trainer, config)
    size = len(trainer.data.train.y)
    record = MetricRecord({"num-examples": size, "client-id": trainer.client_id, **numbers})
    return Message(RecordDict({"metrics": record}), reply_to=message)


def _evaluate_reply(
    trainer: Trainer, config: ConfigRecord, message: Message, context: Context
) -> Message:
    """Test the received model, and return the reply to a message of type ``evaluate``.

    A candidate for training (``split = "train"``) tests on its training examples, which
    fairflower's app makes its test examples. Unlike in `evaluate_round`, it tests the model from
    which it would start, so arrays that stay with the client have its own values.

    A reply to ``own-model = "send"`` says whether the node tests other clients' models, and has the
    client's own model if the node config agrees.
    """
    metrics: dict[str, Any] = {"num-examples": len(trainer.data.test.y)}
    if config.get("split") == "train":
        with _restored(trainer, context, config, before=round_of(config)):
            values = trainer.evaluate(trainer.test_examples)
        metrics |= {"client-id": trainer.client_id, "eval_loss": values["loss"]}
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)
    metrics |= evaluate_round(trainer, context, config)
    with flushed_denormals():
        tested, failed, counts = user_test_metrics(trainer)
    reply = RecordDict({"metrics": MetricRecord(metrics | tested)})
    if failed:
        reply[FAILED_METRICS] = ConfigRecord(dict(failed))
    if counts:
        reply[GROUP_COUNTS] = MetricRecord({"counts": counts})
    if config.get(OWN) == "send":
        reply["node"] = ConfigRecord({TESTS_OTHERS: bool(context.node_config.get(TESTS_OTHERS))})
        if context.node_config.get(SHARES) and OWN in trainer.state:
            logger.info("This site sends its own model, for tests at others (%s).", SHARES)
            reply[OWN] = record_of(trainer.state[OWN])
    return Message(reply, reply_to=message)


def _prepare(
    trainer_fn: Callable[[Context, ConfigRecord], Trainer], message: Message, context: Context
) -> tuple[Trainer, ConfigRecord]:
    content = message.content
    arrays = {name: arrays_of(record) for name, record in content.array_records.items()}
    if "arrays" not in arrays:
        raise ValueError(
            f"The {message.metadata.message_type} message has no ArrayRecord 'arrays', only "
            f"{', '.join(content) or 'nothing'}. Do not change the strategy's arrayrecord_key."
        )
    config = content.config_records.get("config", ConfigRecord())
    trainer = trainer_fn(context, config)
    trainer.receive(arrays.pop("arrays"))
    trainer.shared = arrays
    return trainer, config


def clipped_update(sent: Arrays, received: Arrays, clip: float) -> Arrays:
    """Return the model with its update clipped to norm ``clip``.

    If the update is not finite, the received model is returned. Integer arrays are returned as
    received.
    """
    names = [name for name, array in received.items() if array.dtype.kind == "f"]
    updates = {name: sent[name].astype(np.float64) - received[name] for name in names}
    norm = math.sqrt(sum(float(np.square(update).sum()) for update in updates.values()))
    if not math.isfinite(norm):
        return dict(received)
    factor = min(1.0, clip / norm) if norm else 1.0
    return dict(received) | {
        name: (received[name] + factor * update).astype(received[name].dtype)
        for name, update in updates.items()
    }


def noised_numbers(
    numbers: Mapping[str, float], config: Mapping[str, Any], privacy: PrivacyConfig, client_id: int
) -> dict[str, float]:
    """Return the numbers that the server requests, clipped to their ranges, with noise.

    A number that is missing or not finite counts as the upper end of its range. Noised numbers are
    clipped again, so that the server accepts them.
    """
    noised = {}
    for name in requested(config):
        low, high = number_range(name, privacy.loss_range)
        value = float(numbers.get(name, math.nan))
        value = min(max(value, low), high) if math.isfinite(value) else high
        purpose = (int(config.get("seed", 0)), client_id, round_of(config), name)
        draw = float(gaussian(1, noise_source(privacy.noise_seed, *purpose))[0])
        value += privacy.number_noise_multiplier * (high - low) * draw
        noised[name] = min(max(value, low), high)
    return noised
