"""The ClientApp: a node's data and trainer, answering train, evaluate and query.

A client keeps no run config of its own. Every message carries the whole of it,
so one federation can serve run after run, and a site only says where its data
are (``--node-config 'data-dir="/data/digits"'``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict

from fairflower import models
from fairflower.clients import (
    ClientData,
    Trainer,
    build_model,
    build_trainer,
    choose_device,
    limit_threads,
    make_client_app,
)
from fairflower.config import ClientConfig, DataConfig, ModelConfig, RunConfig, keys
from fairflower.data import Federation, prepare


def trainer_of(context: Context, config: Mapping[str, Any]) -> Trainer:
    """Build the node's trainer for a message that carries ``config``.

    Raises
    ------
    ValueError
        If the node was started without a ``partition-id``.
    """
    run = _settings(config)
    limit_threads(run.client_cpus)
    client_id = _client_id(context)
    federation = prepare(_data_config(context, run))
    trainer = build_trainer(
        run.client.name,
        _model(run.model, run.client.name, tuple(run.client.args.items()), federation),
        _client_data(federation, client_id),
        run.train,
        client_id=client_id,
        seed=run.seed,
        device=choose_device(run.train.device),
        arguments=run.client.args,
    )
    trainer.eval_batch_size = run.evaluate.batch_size
    trainer.measure_memory_mb = run.measure.memory_mb
    trainer.measure_rho = run.measure.rho
    trainer.num_rounds = run.num_server_rounds
    return trainer


app = make_client_app(trainer_of)


@app.query()
def query(message: Message, context: Context) -> Message:
    """Say which client this node is and, if the message carries a run config, what it has."""
    client_id = _client_id(context)
    answer = ConfigRecord({"partition-id": client_id})
    if "num-partitions" in context.node_config:
        answer["num-partitions"] = int(context.node_config["num-partitions"])
    config = message.content.config_records.get("config", ConfigRecord())
    if config:
        federation = prepare(_data_config(context, _settings(config)))
        answer["federation"] = federation.to_json()
    return Message(RecordDict({"node": answer}), reply_to=message)


def _settings(config: Mapping[str, Any]) -> RunConfig:
    return _run_config(tuple((key, config[key]) for key in keys() if key in config))


def _data_config(context: Context, run: RunConfig) -> DataConfig:
    """The run's data, at the place that the node names."""
    if "data-dir" in context.node_config:
        return dataclasses.replace(run.data, dir=str(context.node_config["data-dir"]))
    return run.data


def _client_id(context: Context) -> int:
    if "partition-id" not in context.node_config:
        raise ValueError(
            f"Node {context.node_id} has no partition-id. Start its SuperNode with "
            '--node-config "partition-id=<client> num-partitions=<clients>".'
        )
    return int(context.node_config["partition-id"])


# A worker serves many clients in turn: what they share is made once. A trainer
# overwrites every array of the model that travels with the received ones, and no array
# that does not is ever trained, so sharing it is safe.
@lru_cache(maxsize=4)
def _run_config(items: tuple[tuple[str, Any], ...]) -> RunConfig:
    return RunConfig.from_flat(dict(items))


@lru_cache(maxsize=2)
def _model(
    config: ModelConfig, client: str, args: tuple[tuple[str, Any], ...], federation: Federation
) -> models.Classifier:
    return build_model(config, ClientConfig(client, dict(args)), federation, seed=0)


@lru_cache(maxsize=64)
def _client_data(federation: Federation, client_id: int) -> ClientData:
    return ClientData(
        train=federation.train(client_id),
        test=federation.client_test(client_id),
        mean=federation.mean,
        std=federation.std,
        augment=federation.augment,
        num_classes=federation.num_classes,
    )
