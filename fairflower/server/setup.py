"""Setup of a run before the first round: clients, initial model and strategy."""

import json
import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord
from flwr.serverapp import Grid

from fairflower.aggregation.consistency import SignConsistency
from fairflower.aggregation.hooks import Options
from fairflower.aggregation.noise import NoisySum
from fairflower.config import RunConfig
from fairflower.config.methods import ModelSpec, ParticipationSpec
from fairflower.config.run import tested_split
from fairflower.config.secure import check_secure_cohort
from fairflower.data import Federation, prepare
from fairflower.data.cache import make_data_set
from fairflower.data.data_set import check_comparable
from fairflower.data.federation import by_field
from fairflower.data.rows import check_clients_can_test
from fairflower.data.texts import BUILT_IN, TokenizedSet
from fairflower.errors import ConfigError, Diverged, RoundFailed, UserError, failure_text
from fairflower.exchanges import ServerOptimizer
from fairflower.flower_compat import is_deployed
from fairflower.models import Model, frozen_digest, initial_local_arrays, to_numpy, trainable
from fairflower.numerics.group_fairness import METRICS
from fairflower.numerics.scores import Score
from fairflower.participation.availability import Trace, read_availability
from fairflower.registry import RANDOM_WEIGHTS
from fairflower.registry.measurements import MEASUREMENTS
from fairflower.registry.user_metrics import direction, load_metrics, metric_names
from fairflower.secure.protocol import SMALLEST_SUM
from fairflower.secure.rounds import described
from fairflower.server import registration
from fairflower.server.checkpoint import earlier_facts, part_digests
from fairflower.server.discovery import NodeDiscovery
from fairflower.server.evaluation import CentralizedEvaluator
from fairflower.server.history import ADAPTED
from fairflower.server.privacy import check_reachable
from fairflower.server.trained import TrainedModel
from fairflower.strategies import FairStrategy
from fairflower.strategies.references import reference_options
from fairflower.tables.sites import said_of, tables_of
from fairflower.tasks import CLASSIFICATION
from fairflower.testing.models import check_unsent, made_up, rehearse, unsent_buffers
from fairflower.training.build import build_model, build_trainer


@dataclass(frozen=True)
class RunSetup:
    """Clients, initial model and strategy of a run, ready for the first round."""

    config: RunConfig
    registry: registration.ClientRegistry
    evaluator: CentralizedEvaluator
    strategy: FairStrategy
    #: The federation with its examples; None if only the clients have them.
    examples: Federation | None
    #: The model that is tested without training; None if one is trained.
    trained: TrainedModel | None = None

    @property
    def federation(self) -> Federation:
        """The clients; if only they test, as they describe them: then the server has no data."""
        return self.registry.federation

    @cached_property
    def frozen(self) -> str:
        """A digest of the network's frozen weights; empty if there are none."""
        return frozen_digest(self.evaluator.model)

    def enroll(self) -> None:
        """Pass each client's node and number of training examples to the strategy."""
        sizes = {client.client_id: client.num_examples for client in self.federation.clients}
        if self.config.reference == "pooled":  # the first client trains on all examples
            sizes[0] = sum(sizes.values())
        registry = self.registry
        nodes = {k: node for k, node in registry.nodes.items() if k not in registry.withdrawn}
        names, testers = registry.names, registry.tests_only()
        self.strategy.enroll(nodes, self.config.seed, sizes, names, testers)

    def check_left(self) -> None:
        """Raise ``RoundFailed`` if sites have withdrawn and too few others train."""
        if not self.registry.withdrawn:
            return
        try:
            check_training(self.config, self.strategy, self.registry)
        except ConfigError as error:
            names = map(self.registry.name_of, sorted(self.registry.withdrawn))
            raise RoundFailed(f"{', '.join(names)}: withdrawn. {error}") from error

    def redraw(self) -> dict[str, float]:
        """Return `Federation.redraw`; its tests are the examples on which this run is judged."""
        federation, facts = self.federation, dict(self.federation.redraw)
        split = tested_split(self.config.to_flat())
        if self.config.data.redraw and (split != "test" or not facts):  # sites know only sizes
            trained = sum(client.num_examples for client in federation.clients)
            facts["tests per training example"] = sum(federation.sizes(split)) / trained
        return facts

    def labels(self) -> list[dict[str, Any]]:
        """Return names, scores and numbers of test examples of labels or classes, for reports."""
        federation, task, by = self.federation, self.federation.learns, self.config.evaluate.by
        here = federation.domains if task.label_scores and by != "clients" else ()
        targets = {d: federation.targets(d, tested_split(self.config.to_flat())) for d in here}
        return [
            {
                "name": federation.class_names[k],
                "scores": _described(scores),
                "counts": {domain: task.count_label(y, k) for domain, y in targets.items()},
            }
            for k, scores in task.scores_by_label(federation.num_classes).items()
        ]

    def max_test_sizes(self, split: str) -> dict[int, int]:
        """Return an upper bound on each client's number of test examples: its domain's number."""
        federation = self.federation
        of_domain = dict(zip(federation.domains, federation.sizes(split), strict=True))
        return {client.client_id: of_domain[client.domain] for client in federation.clients}

    @cached_property
    def remarks(self) -> list[tuple[str, str]]:
        """Levels and texts of what was said of the data, here or of the sites' descriptions."""
        sites = [info.site for info in self.registry.infos.values() if info.site]
        if tables := [site for site in sites if site.encoding]:
            return [("WARNING", text) for text in said_of(tables_of(tables))]
        return (self.examples or self.federation).remarks

    def settings(self) -> dict[str, Any]:
        """Return the config of every message: the run config and, for sites, the federation."""
        flat: dict[str, Any] = self.config.to_flat()
        flat |= {"frozen": self.frozen} if self.frozen else {}
        if self.registry.sites:
            # Other sites must not see what a site has; they need the common classes and channels.
            private: Any = dict.fromkeys(
                ("clients", "domains", "test_sizes", "validation_sizes"), ()
            )
            flat["federation"] = replace(self.federation, **private).to_json()
        return flat

    def facts(self) -> dict[str, Any]:
        """Return the entries of ``run.json`` about the federation and the model."""
        federation, model, config = self.federation, self.evaluator.model, self.config
        names = "num_classes", "classes", "shape", "domains", "sources", "test_sizes"
        facts = {
            "num_parameters": sum(p.numel() for p in trainable(model).values()),
            "model_bytes": sum(a.nbytes for a in self.evaluator.arrays().values()),
            **{name: getattr(federation, name) for name in names},
            "clients": [*map(by_field, federation.clients)],
            "nodes": self.registry.known_by_node(),
        }
        if local := initial_local_arrays(model):
            facts["local_arrays"] = list(local)
            facts["local_part"] = getattr(config.client.factory, "local_part", "")
        available, clients = self.strategy._availability, len(federation.clients)
        groups, masked, task = federation.groups, config.secure_aggregation, federation.learns
        optional = {
            "secure_aggregation": described(num_selected(config, clients)) if masked else {},
            "task": "" if federation.task == CLASSIFICATION else federation.task,
            "scores": () if federation.task == CLASSIFICATION else _described(task.scores),
            "labels": self.labels(),
            "frozen": self.frozen,
            "availability": available.digest if isinstance(available, Trace) else "",
            "parts": part_digests(config),
            "validation_sizes": federation.validation_sizes,
            "metrics": {
                n: direction(n, f) for n, f in load_metrics(config.evaluate.metrics).items()
            },
            "label": self.trained.label if self.trained else "",
            "held_out": federation.held_out,
            "held_out_size": federation.held_out_size,
            "division": federation.division,
            "redraw": self.redraw(),
            "groups": {groups: federation.group_names} if groups else {},
            "data_warnings": [text for level, text in self.remarks if level == "WARNING"],
        }
        facts |= {name: value for name, value in optional.items() if value}
        images = {"images": federation.fingerprint}
        facts |= {"digest": federation.digest} if self.examples else images
        if self.registry.sites:  # to resume while some sites are away
            known = json.loads(federation.to_json())
            facts["sites"] = {"federation": known, "numbered": self.registry.numbered}
            if keys := self.registry.keys:
                facts["sites"]["keys"] = {
                    str(client): key._asdict() for client, key in keys.items()
                }
        elif federation.encoding:  # to predict new rows without the data
            facts["table"] = {"federation": json.loads(federation.to_json())}
        return facts


def _described(scores: Iterable[Score]) -> list[dict[str, Any]]:
    infinite = (math.inf, -math.inf)
    return [{k: v for k, v in vars(s).items() if v not in infinite} for s in scores]


def set_up(grid: Grid, config: RunConfig, resume: Path | None, stop: threading.Event) -> RunSetup:
    """Wait for the clients of a run, and create its initial model and strategy.

    ``resume`` is the folder of a run to resume, or None. Raises ``ConfigError`` or ``DataError`` if
    the run cannot start.
    """
    trained = TrainedModel.open(config.evaluate.model) if config.evaluate.model else None
    encoding = trained.encoding if trained else ""
    registry = _register(grid, config, resume, stop, encoding)
    federation = registry.federation
    groups = federation.groups, federation.group_names
    check_comparable("the federation", *groups, federation.num_classes, federation.learns)
    _check_metric_names(config, federation)
    _check_reference(grid, config, registry.sites)
    num_clients = len(federation.clients)
    registration.check_num_supernodes(len(registry.nodes), num_clients)
    registry.nodes = {k: registry.nodes[k] for k in range(num_clients)}
    check_client_settings(config, federation)
    if trained:
        federation = registry.known = trained.fitted(federation, config, registry.sites)
    evaluator = CentralizedEvaluator(config, federation)
    if trained:
        trained.load(evaluator)
    if config.evaluate.by != "clients":  # otherwise the server may lack the tokenizer
        _check_padding(config, evaluator.model)
    strategy = _make_strategy(config, evaluator)
    check_training(config, strategy, registry)
    _check_task(config, strategy, federation)
    if not trained:
        _check_network(config, evaluator, strategy)
    if config.privacy.on:
        if buffers := sorted(strategy.buffers_of(evaluator.arrays())):
            raise ConfigError(
                f"privacy.noise-multiplier above 0: {config.model.name} has {buffers[0]!r}, which "
                "is not trained: it may contain statistics of a client's examples. Choose a model "
                "without BatchNorm and without frozen parameters, for example cnn."
            )
        if federation.encoding and json.loads(federation.encoding)["learnt"]:
            raise ConfigError(
                "privacy.noise-multiplier above 0: means and levels of the table would be learnt "
                "without noise. Declare ranges and levels in the schema, with sums = false."
            )
        numbers = len(strategy._measurements)
        check_reachable(config.privacy, numbers, num_clients, config.num_server_rounds)
    _check_available(config, strategy, num_clients)
    examples: Federation | None = federation
    if config.evaluate.by == "clients":
        apart = is_deployed(grid) or config.ray_address or registry.sites
        examples = None if apart else prepare(config.data)
    setup = RunSetup(config, registry, evaluator, strategy, examples, trained)
    setup.enroll()
    return setup


def _check_reference(grid: Grid, config: RunConfig, sites: bool) -> None:
    """Raise ``ConfigError`` if the nodes cannot give a reference the data or models it needs."""
    if config.reference == "pooled" and sites:
        raise ConfigError(
            "strategy.name = 'pooled': it needs all training examples in one place, but the sites "
            "of this run keep theirs. Choose 'alone', or run 'pooled' on data that may be shared."
        )
    elsewhere = is_deployed(grid) or config.ray_address
    if config.reference == "alone" and elsewhere and config.evaluate.by != "clients":
        raise ConfigError(
            f"evaluate.by = {config.evaluate.by!r}: with strategy.name = 'alone' models stay with "
            "the clients, on other machines, where the server cannot test them. Set evaluate.by = "
            "'clients'."
        )


def _check_task(config: RunConfig, strategy: FairStrategy, federation: Federation) -> None:
    """Raise ``ConfigError`` if the strategy or a setting needs another task."""
    task = federation.learns
    if config.evaluate.auc and not task.classes:
        raise ConfigError(
            f"evaluate.auc is the one-vs-one AUC of classes, but the task is {federation.task}. "
            "Remove it."
        )
    lacking = {
        "classes": "has no classes",
        "share": f"is scored by {task.primary.name}, not 0 to 1",
    }
    for name in strategy._measurements:
        if (needs := MEASUREMENTS.assumed(name).needs) and not getattr(task, needs):
            free = hasattr(strategy, "metric") and not strategy.ranges  # it takes any number
            other = ", or strategy.metric = received_loss" * free
            raise ConfigError(
                f"strategy.name = {config.strategy.name!r} needs {name}, but the task "
                f"{federation.task} {lacking[needs]}. Choose another strategy.name{other}."
            )


def _check_network(
    config: RunConfig, evaluator: CentralizedEvaluator, strategy: FairStrategy
) -> None:
    """Raise ``ConfigError`` if a user's network fails in training on made-up examples."""
    chosen, client = ModelSpec.read(config.model.name), config.client
    federation = evaluator.federation
    if chosen.known:
        return
    model = build_model(config.model, client, federation, config.seed)
    data = made_up(federation.shape, federation.num_classes, federation.learns)
    settings = replace(config.train, local_epochs=1, batch_size=min(config.train.batch_size, 4))
    options: dict[str, Any] = {"seed": config.seed, "device": evaluator.device}
    # Groups of people are not made up; they ask nothing else of a network.
    needs = [name for name in strategy.measurements if name != "received_group_counts"]
    theirs = unsent_buffers(build_model(config.model.to_receive(), client, federation, 0))
    try:
        if not initial_local_arrays(model):  # clients that keep arrays build it from the run's seed
            check_unsent(theirs, model, "depends on the seed")
        rehearse(
            lambda k: build_trainer(client, model, data, settings, client_id=k, **options),
            client.factory.make_exchanges(client.args),
            needs,
        )
    except (FloatingPointError, Diverged):
        pass  # the learning rate may be too large for made-up examples
    except Exception as error:
        reason = error if isinstance(error, UserError) else failure_text(error.__cause__ or error)
        raise ConfigError(
            f"model.name = {config.model.name!r} failed on made-up examples with client.name = "
            f"{client.name!r} and strategy.name = {config.strategy.name!r}: {reason} Correct the "
            "network, or choose another client or strategy."
        ) from error


def _check_metric_names(config: RunConfig, federation: Federation) -> None:
    """Raise ``ConfigError`` if a user-defined metric has the name of a metric of this run."""
    task = federation.learns
    ours = {metric.name for metric in METRICS} if federation.groups else set()
    of_labels = chain.from_iterable(task.scores_by_label(federation.num_classes).values())
    ours |= {score.name for score in (*task.scores, *of_labels)}
    ours |= {f"personal_{task.primary.name}"}
    ours |= {ADAPTED + task.primary.name} if config.evaluate.adabn else set()
    if both := sorted(ours & metric_names(config.evaluate.metrics).keys()):
        raise ConfigError(
            f"evaluate.metrics: {both[0]} is also the name of a metric of this run (of its task, "
            "data.groups or evaluate.adabn). Rename the function."
        )


def _check_available(config: RunConfig, strategy: FairStrategy, num_clients: int) -> None:
    """Raise ``ConfigError`` if a round will have no client; warn of a trace's unknown clients."""
    text, rounds = config.participation.availability, config.num_server_rounds
    available = strategy._availability
    if isinstance(available, Trace):
        available.warn_about_unknown_clients(num_clients)
    # With more clients a round without any is unlikely, and the draws would take seconds.
    if text == "always" or rounds * num_clients > 100_000 or available is None:
        return
    for server_round in range(1, rounds + 1):
        if not available(server_round, range(num_clients)):
            raise ConfigError(
                f"participation.availability = {text!r}: no client is available in round "
                f"{server_round}. Change it so that each of the {rounds} rounds has a client."
            )


def _check_padding(config: RunConfig, model: Model) -> None:
    """Raise ``ConfigError`` if a pretrained network pads with another id than the tokenizer."""
    pad = getattr(model, "pad", None)
    if pad is None or config.model.weights == RANDOM_WEIGHTS:
        return
    data_set = make_data_set(config.data)
    if not isinstance(data_set, TokenizedSet) or data_set.tokenizer in BUILT_IN:
        return
    if data_set.padding != pad:
        raise ConfigError(
            f"model.name = {config.model.name!r}: it pads with token {pad}, but the tokenizer "
            f"{data_set.tokenizer!r} pads with token {data_set.padding}, so the network would take "
            "these tokens for others. Copy the network to a folder, and set pad_token_id in its "
            f"config.json to {data_set.padding}."
        )


def _register(
    grid: Grid, config: RunConfig, resume: Path | None, stop: threading.Event, encoding: str
) -> registration.ClientRegistry:
    """Return the clients, with tables in a tested model's ``encoding``, if any."""
    timeout = config.round_timeout
    if config.evaluate.by != "clients":
        by_server = config.evaluate.by == "server"  # clients encode rows as they were trained
        federation = prepare(config.data, encoding=encoding if by_server else "")
        discovery = NodeDiscovery(grid, timeout, stop)
        registry = registration.register_clients(discovery, len(federation.clients))
        registry.known = federation
        return registry
    settings = ConfigRecord(dict(config.to_flat()))
    if resume and "sites" in (facts := earlier_facts(resume)):
        discovery = NodeDiscovery(grid, timeout, stop, settings, config.listed_sites)
        earlier = registration.recorded(resume, facts)
        registry = registration.register_resumed_clients(discovery, earlier)
    else:
        discovery = NodeDiscovery(grid, timeout, stop, settings, config.site_names)
        sites = config.sites if isinstance(config.sites, int) else 0
        registry = registration.register_clients(discovery, None, sites, config.fewest_sites)
    data = config.data
    divided = data.dirichlet_alpha or data.corrupted_clients or data.imbalance_factor > 1
    if registry.sites and divided:
        raise ConfigError(
            "data.dirichlet-alpha, data.corrupted-clients and data.imbalance-factor apply to a "
            "data set that is divided among clients, not to sites with their own data (domain "
            "in the node config). Remove these settings."
        )
    if data.validated and not registry.federation.validation_sizes:
        raise ConfigError(
            "data.validation-fraction or data.validation-examples is set, but some clients "
            "have no validation examples. Start their SuperNodes with this version of fairflower."
        )
    return registry


def num_selected(config: RunConfig, num_clients: int) -> int:
    """Return the number of clients selected in a round."""
    return max(1, int(num_clients * config.fraction_train + 1e-9))


def check_client_settings(config: RunConfig, federation: Federation) -> None:
    """Raise ``ConfigError`` or ``DataError`` if clients do not fit the task, or have few tests."""
    with config.client.naming_failures():
        config.client.factory.check_task(federation.learns, federation.kind, config.train)
    for split in ("test", "validation"):
        if config.evaluates(split) and config.evaluate.by != "server":
            check_clients_can_test(config.data, federation, split)


def check_training(
    config: RunConfig, strategy: FairStrategy, registry: registration.ClientRegistry
) -> None:
    """Raise ``ConfigError`` if too few clients train."""
    check_num_clients(config, strategy, registry.training)
    if registry.sites and registry.training < config.fewest_sites and not config.evaluate.model:
        raise ConfigError(
            f"{registry.training} of {len(registry.nodes)} sites train; the others have withdrawn, "
            "or have tests-only = true in their node configs. A site trains alone only with "
            "min-clients = 1."
        )


def check_num_clients(config: RunConfig, strategy: FairStrategy, num_clients: int) -> None:
    """Raise ``ConfigError`` if settings or strategy need more clients in a round than train."""
    asked, (fewest, why) = num_selected(config, num_clients), strategy.fewest_clients
    if config.min_clients > asked:
        raise ConfigError(
            f"min-clients = {config.min_clients}: only {asked} clients are selected per round. "
            "Decrease min-clients, or increase fraction-train or data.clients-per-domain."
        )
    if config.bound.max_client_weight * asked < 1:
        raise ConfigError(
            f"bound.max-client-weight = {config.bound.max_client_weight}: the weights of the "
            f"{asked} clients of a round cannot sum to 1. Set it to at least 1/{asked}."
        )
    if config.secure_aggregation:
        check_secure_cohort(asked, SMALLEST_SUM)
    if asked < fewest:
        raise ConfigError(
            f"strategy.name = {config.strategy.name!r} needs {fewest} clients in a round ({why}), "
            f"but {asked} are selected. Increase fraction-train or the number of clients."
        )


def _make_strategy(config: RunConfig, evaluator: CentralizedEvaluator) -> FairStrategy:
    bound, privacy = config.bound, config.privacy
    exchanges = config.client.factory.make_exchanges(config.client.args)
    local = initial_local_arrays(evaluator.model)
    for exchange in exchanges:
        exchange.prepare({name: to_numpy(array) for name, array in local.items()})
    if privacy.on:
        noisy_sum = NoisySum(
            privacy.noise_multiplier, privacy.clip, bound.max_client_weight, privacy.noise_seed
        )
        exchanges = [*exchanges, noisy_sum]
    if (server := config.server).optimizer != "none":  # last: post-processing of the noise
        exchanges = [*exchanges, ServerOptimizer(**vars(server))]
    minimums = dict.fromkeys(("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"), 1)
    options: Options = {
        "fraction_train": config.fraction_train,
        "min_clients": config.min_clients or None,
        "buffers": evaluator.buffers,
        "exchanges": exchanges,
        "observers": [SignConsistency(window)] if (window := config.observe.window) else [],
        "max_client_weight": bound.max_client_weight,
        "clip_update_norm": privacy.clip if privacy.on else bound.clip_update_norm or None,
        "clip_update_median": bound.clip_update_median or None,
        "participation": ParticipationSpec.read(config.participation.policy).make(),
        "availability": read_availability(config.participation.availability, config.seed),
    }
    if config.reference:
        options |= reference_options(config.reference)
    made_for = config.strategy.for_task(evaluator.federation.learns)
    strategy: FairStrategy = made_for.make(**minimums, **options)
    strategy._trained = evaluator.arrays().keys() - evaluator.buffers
    if any(getattr(strategy, option) != value for option, value in minimums.items()):
        raise ConfigError(
            f"strategy.name = {config.strategy.name!r}: the constructor of "
            f"{type(strategy).__name__} does not pass on the run's settings. Accept **options, and "
            "call super().__init__(**options)."
        )
    return strategy
