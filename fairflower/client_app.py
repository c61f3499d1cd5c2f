"""The ClientApp, which handles train, evaluate and query messages.

Every message contains the whole run config, so a federation can serve several runs one after
another. The node config defines the client's data:

- ``partition-id=3 num-partitions=20``: the fourth of 20 parts of the run's data set; every node
  divides the data set in the same way. ``data-dir="/data/digits"`` is the folder of the data set.
- ``domain="svhn" data-dir="/data/svhn"``: a site with its own data. The server numbers the sites.

Unknown keys are refused. What leaves a SuperNode passes `guarded`.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict

from fairflower import __version__
from fairflower.arrays import record_of
from fairflower.clients.local_arrays import LocalArraysTrainer
from fairflower.config import DataConfig, RunConfig
from fairflower.config.run import is_setting
from fairflower.config.site import FEWEST_EXAMPLES, TESTS_OTHERS, check_node_config
from fairflower.data import Federation, Split, prepare
from fairflower.data.federation import ClientInfo, check_known
from fairflower.data.folders import forget_stamps
from fairflower.data.sites import as_in, groups_in, open_site
from fairflower.errors import ConfigError, logger, public_text
from fairflower.flower_compat import is_supernode
from fairflower.models import Model, frozen_digest
from fairflower.registry.measurements import MEASUREMENTS
from fairflower.registry.user_metrics import FAILED_METRICS
from fairflower.secure.client import limit_tests, must_mask, secure_mod
from fairflower.secure.sums import SUMS, vector_of
from fairflower.secure.vectors import MaskingInstructions
from fairflower.tables.encoding import undeclared
from fairflower.tables.integers import BITS, integers_of_table
from fairflower.tables.sites import SiteTable, check_own
from fairflower.training.app import make_client_app
from fairflower.training.batches import ClientData
from fairflower.training.build import build_model, build_trainer
from fairflower.training.client_state import OWN
from fairflower.training.device import choose_device, limit_threads
from fairflower.training.measurements import requested
from fairflower.training.trainer import Trainer


def guarded(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Refuse a wrong node config, and keep a SuperNode's data out of what it sends of failures.

    An error's text may quote cells, columns and paths. The server gets its `public_text`, and the
    SuperNode's own log the rest; likewise for a metric that failed. Clients of a simulation send
    the whole text, because the server has their data.
    """
    node = context.node_config
    try:
        check_node_config(node)
        if node.get("tests-only") and message.metadata.message_type.startswith(MessageType.TRAIN):
            raise ConfigError("this site only tests: its node config has tests-only = true.")
        reply: Message = call_next(message, context)
        reasons = reply.has_content() and reply.content.config_records.get(FAILED_METRICS)
        if reasons and is_supernode(context):
            logger.error("These metrics failed: %s", dict(reasons))
            reasons.update(dict.fromkeys(reasons, "it failed; the site's own log says why"))
        return reply
    except Exception as error:
        if not is_supernode(context):
            raise
        logger.error("A %s message failed.", message.metadata.message_type, exc_info=error)
        site = f"site {node['domain']!r}: " if "domain" in node else ""
        text = f"{site}{public_text(error)} (the site's own log says more)"
        raise RuntimeError(text) from None


def trainer_of(context: Context, config: Mapping[str, Any]) -> Trainer:
    """Return the node's trainer for a message with this config.

    Raises ``ValueError`` if the node config does not identify the client, and ``ConfigError`` if
    the node has other frozen weights than the server, or does not test other clients' models.
    """
    if config.get(OWN) == "test" and not context.node_config.get(TESTS_OTHERS):
        raise ConfigError(f"this site tests no other site's model: {TESTS_OTHERS} is not true.")
    run = _settings(config)
    limit_threads(run.client_cpus)
    client_id, federation, data = _place(context, config, run)
    split = config.get("split")
    if split == "validation" or split == "train":
        data = data.tested_on(split)
    fewest = int(context.node_config.get(FEWEST_EXAMPLES, 0))
    if len(data.train.y) < fewest:
        raise ConfigError(
            f"this run uses {len(data.train.y)} of the site's training examples, fewer than the "
            f"{FEWEST_EXAMPLES} = {fewest} of the site's policy."
        )
    if "domain" in context.node_config:
        _check_means(run, data, config, _data_config(context, run).smallest_group)
    keeps = issubclass(run.client.factory, LocalArraysTrainer)
    # The server sends all arrays except those that stay on the client: no pretrained weights.
    model, frozen = _model(
        run.model if keeps else run.model.to_receive(),
        run.client,
        federation,
        run.seed if keeps else 0,
    )
    if config.get("frozen", frozen) != frozen:
        raise ConfigError(
            f"The frozen weights of {run.model.name!r} differ from the server's. Use the same "
            "file, folder or Hub revision on both (for random ones: the same processor and "
            "PyTorch), and in a network of your own the same weights for every seed."
        )
    trainer = build_trainer(
        run.client,
        model,
        data,
        run.train,
        client_id=client_id,
        seed=run.seed,
        device=choose_device(run.train.device),
    )
    trainer.eval_batch_size = run.evaluate.batch_size
    trainer.user_metrics = run.evaluate.metrics
    trainer.measure_memory_mb = run.measure.memory_mb
    trainer.measure_rho = run.measure.rho
    trainer.num_rounds = run.num_server_rounds
    return trainer


def sum_table(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Answer a request for the sums of a site's table, which `secure_mod` masks; a mod after it."""
    config = message.content.config_records.get("config", ConfigRecord())
    if SUMS not in config:
        return call_next(message, context)
    if message.metadata.message_type != MessageType.TRAIN or not must_mask(message, context):
        raise ValueError("the server asked for sums of a table without masks. Nothing was sent")
    data = _data_config(context, _settings(config))
    site = open_site(data, str(context.node_config["domain"]))
    table = SiteTable.from_json(site.encoding).to_send(data.smallest_group)
    base = MaskingInstructions.from_config(config).range
    vector = vector_of(integers_of_table(table), BITS, base)
    return Message(RecordDict({"arrays": record_of({"sums": vector})}), reply_to=message)


app = make_client_app(trainer_of, mods=[secure_mod, sum_table], around=[guarded, limit_tests])


@app.query()
def query(message: Message, context: Context) -> Message:
    """Reply with the node's client id; describe its data if the message has a run config."""
    config = message.content.config_records.get("config", ConfigRecord())
    node = context.node_config
    answer = ConfigRecord({"version": __version__})
    if node.get("tests-only"):
        answer["tests-only"] = True
    if config and "domain" in node:
        run = _settings(config)
        answer["site"] = _described_site(message, context, run).to_json()
        if run.statistics and "row-digests" in node:
            from fairflower.tables.digests import row_digests

            place = _data_config(context, run), str(node["domain"])
            about, answer["rows"] = row_digests(*place, str(node["row-digests"]))
            answer["rows-of"] = about
    elif config:
        text, answer["digest"] = _described(_shared_data(context, _settings(config)))
        if _partition_id(context) == 0:  # the others' would be the same, and as long as all clients
            answer["federation"] = text
    if "site" not in answer:
        answer["partition-id"] = _partition_id(context)
    for key in ("partition-id", "num-partitions"):
        if key in node:
            answer[key] = int(node[key])
    return Message(RecordDict({"node": answer}), reply_to=message)


def _place(
    context: Context, config: Mapping[str, Any], run: RunConfig
) -> tuple[int, Federation, ClientData]:
    """Return the node's client id, its federation, and the client's data."""
    if "domain" not in context.node_config:
        client_id = _partition_id(context)
        federation = _shared_data(context, run)
        data = _data(federation, client_id)
        if config.get("reference") == "pooled":
            data = dataclasses.replace(data, train=_pooled(federation))
        return client_id, federation, data
    if "federation" not in config or "client-id" not in config:
        raise ValueError(
            f"Node {context.node_id} is a site with its own data (its node config has a domain), "
            'but the server did not query the sites\' data. Set evaluate.by = "clients".'
        )
    place = _data_config(context, run), str(context.node_config["domain"])
    site = open_site(*place)
    client_id = int(config["client-id"])
    federation = _federation(str(config["federation"]), site.task)
    if site.encoding:
        check_own(federation.encoding, site)
        site = open_site(*place, federation.encoding)
    return client_id, federation, _data(federation, client_id, site)


def _described_site(message: Message, context: Context, run: RunConfig) -> Federation:
    """Return a site's description of its data, without what it may not send of a table."""
    if run.privacy.on:
        raise ConfigError("privacy.noise-multiplier: a site's description would have no noise.")
    config, node = _data_config(context, run), context.node_config
    site = open_site(config, str(node["domain"]))
    if not site.encoding:
        return site
    table = SiteTable.from_json(site.encoding)
    for text in undeclared({site.domains[0]: table.sums}, refuse=not run.statistics):
        logger.warning(text)
    table = table.to_send(config.smallest_group)
    if must_mask(message, context):
        table = table.masked()
    return dataclasses.replace(site, encoding=table.to_json())


def _check_means(run: RunConfig, data: ClientData, config: Mapping[str, Any], least: int) -> None:
    """Raise ``ConfigError`` if a site would send a mean of fewer than ``least`` examples."""
    trainer = run.client.factory
    counts = np.bincount(data.train.y) if data.task.classes else np.empty(0, np.int64)
    means = {trainer.mean_of, *(exchange.mean_of for exchange in trainer.exchanges)}
    if any(MEASUREMENTS[name].class_means for name in requested(config)):
        means.add("class")
    sizes = {"batch": run.train.batch_size, "client": len(data.train.y)}
    sizes["class"] = counts[counts > 0].min(initial=least)
    sizes["cluster"] = min(2, sizes["class"])  # FINCH joins every example to another one
    if any(sizes.get(mean, least) < least for mean in means):
        raise ConfigError(
            f"this site would send a mean of fewer than {least} examples (data.smallest-group, and "
            "smallest-group in the node config) of a class or batch, or in total. Raise "
            "train.batch-size, use another client or strategy, or lower both numbers."
        )


def _settings(config: Mapping[str, Any]) -> RunConfig:
    return _run_config(tuple((key, value) for key, value in config.items() if is_setting(key)))


def _data_config(context: Context, run: RunConfig) -> DataConfig:
    """Return the run's data settings, with the node's ``data-dir`` and ``smallest-group``.

    A run names no folder of a site, and cannot lower a SuperNode's ``smallest-group``, only raise
    it. Data of a simulation have no such limit.
    """
    node, data = context.node_config, run.data
    own = int(node.get("smallest-group", DataConfig.smallest_group))
    least = max(data.smallest_group, own) if is_supernode(context) else 1
    folder = str(node.get("data-dir", "" if "domain" in node else data.dir))
    return dataclasses.replace(data, dir=folder, smallest_group=least)


def _shared_data(context: Context, run: RunConfig) -> Federation:
    """Return the data set of which the node has a share; without paths if it is a SuperNode."""
    config = _data_config(context, run)
    federation = prepare(config, least=config.smallest_group)
    if not is_supernode(context):
        return federation
    return dataclasses.replace(federation, sources=("the nodes' own",) * len(federation.domains))


def _partition_id(context: Context) -> int:
    if "partition-id" not in context.node_config:
        raise ValueError(
            f"Node {context.node_id} has no partition-id. Start its SuperNode with "
            '--node-config "partition-id=<client> num-partitions=<clients>". A site with its own '
            'data (domain="...") needs a run with evaluate.by = "clients".'
        )
    return int(context.node_config["partition-id"])


# A worker serves many clients, one after another. They share the run config and the model. Sharing
# the model is safe, because a trainer overwrites all arrays that are sent and never trains the
# others.
@lru_cache(maxsize=4)
def _run_config(items: tuple[tuple[str, Any], ...]) -> RunConfig:
    return RunConfig.from_message(dict(items))


@lru_cache(maxsize=2)
def _model(*settings: Any) -> tuple[Model, str]:
    """Build a network; return it with a digest of its frozen weights, which are not sent."""
    model = build_model(*settings)
    return model, frozen_digest(model)


def forget_code() -> None:
    """Forget networks and images, which may have been changed in a notebook."""
    _model.cache_clear()
    forget_stamps()


@lru_cache(maxsize=2)
def _described(federation: Federation) -> tuple[str, str]:
    """Describe a data set, with a digest that does not depend on paths; once for all clients."""
    anywhere = dataclasses.replace(federation, sources=()).to_json()
    return federation.to_json(), hashlib.sha256(anywhere.encode()).hexdigest()


@lru_cache(maxsize=2)
def _federation(text: str, own: str) -> Federation:
    """Return a message's federation, which has no clients, if it fits a site with the task ``own``.

    A text as number of classes would be the argument of a function that the message names.
    """
    federation = Federation.from_json(text, Path("at-the-sites"))
    check_known(federation.task, own)
    counts = (1,) + (0,) * (federation.num_classes - 1) if federation.learns.classes else ()
    whole = ClientInfo(0, "a site", 1, counts)
    dataclasses.replace(
        federation, domains=("a site",), sources=("",), test_sizes=(1,), clients=(whole,)
    ).check(own)
    return federation


#: Largest number of bytes of examples that a worker caches, and of clients.
_MOST_BYTES, _MOST_CLIENTS = 2**30, 4096
_cached: dict[tuple[Federation, int, Federation | None], ClientData] = {}
_sizes: dict[tuple[Federation, int, Federation | None], int] = {}


def _data(federation: Federation, client_id: int, site: Federation | None = None) -> ClientData:
    """Return a client's part of the federation's data, or its site's; cache the latest clients'."""
    if _cached:
        last = next(reversed(_cached))
        _sizes[last] = _bytes(_cached[last])  # it may have got outputs of a frozen first stage
    key = federation, client_id, site
    data = _cached.pop(key, None)
    _cached[key] = data = _read(*key) if data is None else data
    _sizes[key] = _bytes(data)
    while len(_cached) > 1 and (len(_cached) > _MOST_CLIENTS or sum(_sizes.values()) > _MOST_BYTES):
        oldest = next(iter(_cached))
        del _cached[oldest], _sizes[oldest]
    return data


def _read(federation: Federation, client_id: int, site: Federation | None) -> ClientData:
    source, number = (federation, client_id) if site is None else (site, 0)
    names = ("train", "test", "validation") if source.validation_sizes else ("train", "test")
    splits: dict[str, Any] = dict(zip(names, source.splits(number, *names), strict=True))
    groups = {name: source.groups_of(number, name) for name in names if source.groups}
    if site is not None:
        splits = {name: as_in(federation, site, split) for name, split in splits.items()}
        groups = {name: groups_in(federation, site, values) for name, values in groups.items()}
    return ClientData(
        train=splits["train"],
        test=splits["test"],
        validation=splits.get("validation"),
        mean=federation.mean,
        std=federation.std,
        augment=federation.augment,
        num_classes=federation.num_classes,
        task=federation.learns,
        groups=groups,
        num_groups=len(federation.group_names),
    )


@lru_cache(maxsize=1)
def _pooled(federation: Federation) -> Split:
    """Return the training examples of all clients; cached, because every round reads them."""
    return federation.train_of_all()


def largest_data() -> int:
    """Return the bytes of the largest client's examples that this process has in memory."""
    return max(map(_bytes, _cached.values()), default=0)


def _bytes(data: ClientData) -> int:
    arrays: list[Any] = [*data.train, *data.test, *(data.validation or ()), *data.groups.values()]
    arrays += [outputs for _, outputs in data.first_stages.values()]
    return sum(int(array.nbytes) for array in arrays)
