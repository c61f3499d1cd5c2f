"""The ClientApp: a node's data and trainer, answering train, evaluate and query.

A client keeps no run config of its own. Every message carries the whole of it,
so one federation can serve run after run. A node's config says what its client has:

- ``partition-id=3 num-partitions=20``: the fourth share of the run's data set, which the
  node divides like everybody else; ``data-dir="/data/digits"`` says where it is.
- ``domain="svhn" data-dir="/data/svhn"``: data of its own, which nobody else has. The
  server numbers such clients.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict

from fairflower.config import DataConfig, RunConfig, is_setting
from fairflower.data import Federation, prepare
from fairflower.data.sites import as_in, open_site
from fairflower.errors import DataError, UserError
from fairflower.training.app import make_client_app
from fairflower.training.batches import ClientData
from fairflower.training.build import build_model, build_trainer
from fairflower.training.device import choose_device, limit_threads
from fairflower.training.trainer import Trainer


def trainer_of(context: Context, config: Mapping[str, Any]) -> Trainer:
    """Build the node's trainer for a message that carries ``config``.

    ``ValueError`` if the node's config does not say which client it is.
    """
    run = _settings(config)
    limit_threads(run.client_cpus)
    client_id, federation, data = _place(context, config, run)
    if config.get("split") == "validation":
        data = data.to_validate()
    trainer = build_trainer(
        run.client,
        _model(run.model.to_receive(), run.client, federation, 0),
        data,
        run.train,
        client_id=client_id,
        seed=run.seed,
        device=choose_device(run.train.device),
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
    config = message.content.config_records.get("config", ConfigRecord())
    node = context.node_config
    answer = ConfigRecord()
    if config and "domain" in node:
        name = str(node["domain"])
        try:
            answer["site"] = open_site(_data_config(context, _settings(config)), name).to_json()
        except UserError as error:
            raise DataError(f"site {name!r}: {error}") from error
    elif config:
        answer["federation"] = prepare(_data_config(context, _settings(config))).to_json()
    if "site" not in answer:
        answer["partition-id"] = _partition_id(context)
    for key in ("partition-id", "num-partitions"):
        if key in node:
            answer[key] = int(node[key])
    return Message(RecordDict({"node": answer}), reply_to=message)


def _place(
    context: Context, config: Mapping[str, Any], run: RunConfig
) -> tuple[int, Federation, ClientData]:
    """The node's client id, the federation as it is to see it, and the client's data."""
    if "domain" not in context.node_config:
        client_id = _partition_id(context)
        federation = prepare(_data_config(context, run))
        return client_id, federation, _data(federation, client_id)
    if "federation" not in config or "client-id" not in config:
        raise ValueError(
            f"Node {context.node_id} is a site with data of its own (its node config names a "
            "domain), but the server did not ask the sites what they have. Set "
            'evaluate.by = "clients".'
        )
    site = open_site(_data_config(context, run), str(context.node_config["domain"]))
    client_id, whole = int(config["client-id"]), _federation(str(config["federation"]))
    return client_id, whole, _data(whole, client_id, site)


def _settings(config: Mapping[str, Any]) -> RunConfig:
    return _run_config(tuple((key, value) for key, value in config.items() if is_setting(key)))


def _data_config(context: Context, run: RunConfig) -> DataConfig:
    """The run's data, at the place that the node names."""
    if "data-dir" in context.node_config:
        return dataclasses.replace(run.data, dir=str(context.node_config["data-dir"]))
    return run.data


def _partition_id(context: Context) -> int:
    if "partition-id" not in context.node_config:
        raise ValueError(
            f"Node {context.node_id} has no partition-id. Start its SuperNode with "
            '--node-config "partition-id=<client> num-partitions=<clients>". A site with data '
            'of its own (domain="...") needs a run with evaluate.by = "clients".'
        )
    return int(context.node_config["partition-id"])


# A worker serves many clients in turn: what they share is made once. A trainer
# overwrites every array of the model that travels with the received ones, and no array
# that does not is ever trained, so sharing it is safe.
@lru_cache(maxsize=4)
def _run_config(items: tuple[tuple[str, Any], ...]) -> RunConfig:
    return RunConfig.from_message(dict(items))


_model = lru_cache(maxsize=2)(build_model)


@lru_cache(maxsize=2)
def _federation(text: str) -> Federation:
    return Federation.from_json(text, Path("at-the-sites"))


def _data(federation: Federation, client_id: int, site: Federation | None = None) -> ClientData:
    """A client's share of the federation's data, or those of its own site, as it is to see them."""
    return _reader(site or federation)(federation, client_id, site)


@lru_cache(maxsize=4)
def _reader(own: Federation) -> Callable[[Federation, int, Federation | None], ClientData]:
    """What reads a client's data, and keeps those of more clients where all are small."""
    largest = max(client.num_examples for client in own.clients)
    return _read_small if largest * math.prod(own.shape) <= _SMALL else _read


@lru_cache(maxsize=64)
def _read(federation: Federation, client_id: int, site: Federation | None) -> ClientData:
    own, number = (federation, client_id) if site is None else (site, 0)
    names = ("train", "test", "validation") if own.validation_sizes else ("train", "test")
    splits = own.splits(number, *names)
    if site is not None:
        splits = [as_in(federation, site, split) for split in splits]
    train, test, *validation = splits
    return ClientData(
        train=train,
        test=test,
        validation=next(iter(validation), None),
        mean=federation.mean,
        std=federation.std,
        augment=federation.augment,
        num_classes=federation.num_classes,
    )


#: Values in the examples of clients of which a worker keeps as many as there may be.
_SMALL = 32 * 1024
_read_small = lru_cache(maxsize=4096)(_read.__wrapped__)
