"""A site's policy: what a run may ask of the site, checked by the site's own code.

`Policy` is read from ``policy.toml``. It is checked against the settings in each message, because
these, and nothing else, decide what the site computes and sends.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from flwr.app import ConfigRecord, Message, MessageType

from fairflower.arguments import Range, conform
from fairflower.config import RunConfig
from fairflower.config.methods import DEFAULT, PARTS, TaskSpec
from fairflower.config.privacy import PrivacyConfig, is_proven
from fairflower.config.run import check_values, is_setting, schema
from fairflower.config.secure import CONSORTIUM, KEY, SIGNING_KEY
from fairflower.config.settings import Count
from fairflower.config.site import FEWEST_EXAMPLES, NODE_KEYS, TESTS_ONLY, SiteConfig
from fairflower.config.text import (
    Scalar,
    argument_to_key,
    flatten_tables,
    key_to_argument,
    names_in,
    read_tables,
    unknown,
)
from fairflower.errors import EXTRAS, ConfigError, installed, logger, quoted
from fairflower.flower_compat import RECORD_KEY_CONFIGS, Key, Stage
from fairflower.paths import read_text
from fairflower.registry import CLASSIFICATION, METRICS, RANDOM_WEIGHTS, STRATEGIES
from fairflower.registry.measurements import MEASUREMENTS
from fairflower.registry.user_metrics import metric_names
from fairflower.secure.consortium import read_sites
from fairflower.secure.protocol import MAX_SHARES

#: Allowed names. ``*`` stands for all built-in ones, except networks of other libraries, which are
#: ``timm:*`` and the like. A part that is not built in, ``my_package.module:Class``, is named.
Names = list[str]

#: Parts that a policy lists -> the run config key that names them, and how a name is read.
_PARTS = {
    key: PARTS[key] for key in ("strategies", "clients", "data", "tasks", "models", "adapters")
}
_REGISTRIES = {**{key: spec.REGISTRY for key, spec in _PARTS.items()}, "metrics": METRICS}

#: A policy with every key, its meaning and its default.
TEMPLATE = Path(__file__).with_name("policy.toml")
_REQUIRED = ("strategies", "clients", "models", "data")


@dataclass(frozen=True)
class Policy:
    """What a site allows; a key that is missing in the file has its default here.

    `TEMPLATE` says what each key means.
    """

    strategies: Names = dataclasses.field(default_factory=list)
    clients: Names = dataclasses.field(default_factory=list)
    models: Names = dataclasses.field(default_factory=list)
    data: Names = dataclasses.field(default_factory=list)
    tasks: Names = dataclasses.field(default_factory=lambda: ["*"])
    adapters: Names = dataclasses.field(default_factory=list)
    metrics: Names = dataclasses.field(default_factory=list)
    measurements: Names = dataclasses.field(default_factory=list)
    protection: Literal["none", "secure-aggregation", "differential-privacy", "either"] = "none"
    largest_epsilon: Annotated[float, Range(above=0)] = 10.0
    smallest_noise: Annotated[float, Range(above=0)] = 0.1
    smallest_others: Count = 0
    fewest_examples: Annotated[int, Range(1)] = 10
    most_rounds: Annotated[int, Range(1)] = 1000
    trains: bool = True
    weights_from_elsewhere: bool = False
    settings: dict[str, list[Scalar]] = dataclasses.field(default_factory=dict)
    consortium: dict[str, str] = dataclasses.field(default_factory=dict)

    #: The file and its content.
    path: Path = Path()
    text: str = dataclasses.field(default="", repr=False)

    @classmethod
    def read(cls, path: Path) -> Policy:
        """Read a policy; raise ``ConfigError`` for an unknown key, name or value."""
        tables, hints = read_tables(path), get_type_hints(cls, include_extras=True)
        policy = cls(path=path, text=read_text(path, "utf-8-sig"))
        keys = [argument_to_key(name) for name in hints if name not in ("path", "text")]
        if isinstance(tables.get("settings"), dict):
            tables["settings"] = flatten_tables(tables["settings"])
        for key, value in tables.items():
            if key not in keys:
                hint = f"{key} belongs to [node] in site.toml."
                hint = hint if key in NODE_KEYS else unknown("key", key, keys)
                raise ConfigError(f"{path}, {policy.place(key)}: {hint}")
            try:
                where = f"{path}, {policy.place(key)}: {key}"
                conform(value, hints[key_to_argument(key)], where)
            except ValueError as error:
                raise ConfigError(str(error)) from error
        for key in _REQUIRED:
            if not tables.get(key):
                wrong = "is empty, which allows no run" if key in tables else "is missing"
                raise ConfigError(f'{path}: {key} {wrong}: expected a list of names, or ["*"].')
        values = {key_to_argument(key): value for key, value in tables.items()}
        policy = dataclasses.replace(policy, **values)
        for key in (*_REGISTRIES, "measurements"):
            for name in getattr(policy, key):
                policy._check_name(key, name)
        policy._check_tables()
        if policy.protection != "none":
            policy._check_methods()
        return policy

    def _check_name(self, key: str, name: str) -> None:
        """Raise ``ConfigError`` for a name that does not exist, or is not installed here."""
        known: Any = _REGISTRIES.get(key, MEASUREMENTS)
        valid = known.names() if key in _REGISTRIES else list(known)
        pattern = "*" in name and key in _REGISTRIES
        if not (name in known or (pattern and any(fnmatchcase(v, name) for v in valid))):
            raise self._error(key, unknown("name", name, valid))
        if key in _REGISTRIES and ":" in name and name not in known.offers():
            family = known.family(name)
            package = name.partition(":")[0].partition(".")[0]
            library = EXTRAS[family.rpartition("-")[2]][0] if family else package
            if not installed(library):
                raise self._error(key, f"{library} is not installed here.")

    def _check_tables(self) -> None:
        """Raise ``ConfigError`` for unknown settings, or a list of sites that is wrong."""
        for key, values in self.settings.items():
            if not is_setting(key):
                raise self._error("settings", unknown("setting", key, schema()))
            for value in values:
                try:
                    check_values({key: value})
                except ConfigError as error:
                    raise self._error("settings", str(error)) from error
        if self.consortium:
            self._require_masks(CONSORTIUM)
            read_sites(self.path)

    def _check_methods(self) -> None:
        """Warn of named strategies that ``protection`` always refuses; raise if it refuses all."""
        built_in = {name: STRATEGIES[name] for name in self.strategies if name in STRATEGIES.data}
        never = [
            name
            for name, kind in built_in.items()
            if not self._protects(kind.sums_suffice, is_proven(kind))  # with some arguments
        ]
        if not never:
            return
        words = f'{", ".join(never)} can never run with protection = "{self.protection}"'
        if len(never) == len(self.strategies):
            raise self._error("strategies", f"{words}, which allows no run.")
        logger.warning("%s, %s: %s.", self.path, self.place("strategies"), words)

    def _protects(self, masks: bool, noise: bool) -> bool:
        """Return whether masks, noise on the model, or both are the protection."""
        alone = {"none": True, "secure-aggregation": masks, "differential-privacy": noise}
        return alone.get(self.protection, masks or noise)

    def _require_masks(self, key: str) -> None:
        if self.protection != KEY:
            raise self._error("protection", f'{key} needs protection = "{KEY}" here.')

    def node_config(self, site: SiteConfig) -> dict[str, Scalar]:
        """Return a site's node config with what this policy adds: the worker checks these keys.

        Raises ``ConfigError`` if the node config requires masks and the policy does not say so.
        """
        node = dict(site.node)
        if self.consortium and CONSORTIUM in node:
            raise self._error(CONSORTIUM, f"remove {CONSORTIUM} from [node]: the sites are here.")
        if self.consortium:
            own = str(node.get(SIGNING_KEY, site.private_key))
            node |= {CONSORTIUM: str(self.path), SIGNING_KEY: own}
        for key in (CONSORTIUM, KEY):
            if node.get(key):
                self._require_masks(key)
        if not self.trains:
            return {**node, TESTS_ONLY: True}
        return {**node, FEWEST_EXAMPLES: self.fewest_examples}

    def _error(self, key: str, words: str) -> ConfigError:
        return ConfigError(f"{self.path}, {self.line(key)}: {words}")

    def place(self, key: str) -> str:
        """Return the number of the line of a key or a table, or that it has its default."""
        lines = enumerate(self.text.splitlines(), 1)
        written = rf"\s*(\[\s*)?([\"']?){re.escape(key)}\2\s*[]=]"
        return next((f"line {n}" for n, line in lines if re.match(written, line)), "by default")

    def line(self, key: str, value: Any = None) -> str:
        """Return a key and its value as TOML, without a comment, and the number of its line."""
        value = getattr(self, key_to_argument(key)) if value is None else value
        return f"{self.place(key)}: {key} = {json.dumps(value)}"

    def check(self, message: Message) -> None:
        """Raise ``ConfigError`` with the policy's line unless it allows what a message asks for.

        Nothing that the message names is imported before its name is allowed.
        """
        records, kind = message.content.config_records, message.metadata.message_type
        config = records.get("config", ConfigRecord())
        trains = kind.startswith(MessageType.TRAIN) or config.get("split") == "train"
        self._require("trains", self.trains or not trains, f"{kind} on training examples")
        if RECORD_KEY_CONFIGS in records:
            self._check_stage(records[RECORD_KEY_CONFIGS])
        protocol = kind == MessageType.TRAIN and RECORD_KEY_CONFIGS in records
        if not config and (protocol or kind == MessageType.QUERY):
            return  # a step without training, or a question for the node's number
        self._check_names(config)
        run = RunConfig.from_message(config)
        self._check_names(run.concise())  # the defaults of names that the message leaves out
        self._check_settings(run, config, kind)

    def check_run(self, run: RunConfig) -> None:
        """Raise ``ConfigError`` with the policy's line unless it allows a run's settings."""
        measured = ",".join(run.strategy.make()._measurements)
        given = {**run.concise(), "measure": measured}
        self._check_names(given)
        self._check_settings(run, given, MessageType.TRAIN if self.trains else MessageType.QUERY)

    def _check_names(self, config: Mapping[str, Any]) -> None:
        for key, spec in _PARTS.items():
            text = config.get(spec.KEY)
            if text or (text is not None and key not in ("tasks", "adapters")):  # may be empty
                self._require_name(key, spec.KEY, spec.read(str(text)).name)
        for place in metric_names(str(config.get("evaluate.metrics", ""))).values():
            self._require_name("metrics", "evaluate.metrics", place)
        if text := config.get("federation"):
            task = TaskSpec.read(_task_of(str(text))).name
            self._require_name("tasks", "federation.task", task)
        for key, name in (("reference", config.get("reference")), ("own-model", "alone")):
            if config.get(key):
                self._require_name("strategies", key, str(name))

    def _require_name(self, key: str, setting: str, name: str) -> None:
        registry, allowed = _REGISTRIES[key], getattr(self, key)
        family = registry.family(name)
        patterns = [a for a in allowed if not family or a.startswith(f"{family}:")]
        built_in = bool(family) or name in registry.data
        fits = name in allowed or (built_in and any(fnmatchcase(name, p) for p in patterns))
        self._require(key, fits, f"{setting} = {quoted(name)}")

    def _check_settings(self, run: RunConfig, config: Mapping[str, Any], kind: str) -> None:
        rounds = max(run.num_server_rounds, int(config.get("server-round", 0)))
        self._require("most-rounds", rounds <= self.most_rounds, f"round {rounds}")
        others = f"min-clients = {run.min_clients} (expected {self.smallest_others + 1} or more)"
        enough = not self.smallest_others or run.min_clients > self.smallest_others
        self._require("smallest-others", enough, others)
        few = run.data.examples_per_client
        fits = not few or few >= self.fewest_examples
        self._require("fewest-examples", fits, f"data.examples-per-client = {few}")
        given = run.concise()
        for key, values in self.settings.items():
            value = given.get(key, DEFAULT)
            self._require(key, value in values, f"{key} = {quoted(value)}", values)
        weights = run.model.weights
        fits = self.weights_from_elsewhere or weights in ("", RANDOM_WEIGHTS)
        self._require("weights-from-elsewhere", fits, f"model.weights = {quoted(weights)}")
        asked = names_in(str(config.get("measure", "")))
        self._check_protection(run.secure_aggregation, run.privacy, kind, asked)
        if asked := [name for name in asked if name not in self.measurements]:
            own = run.strategy.make()._measurements
            for name in asked:
                self._require("measurements", name in own, f"{run.strategy.name} with {name}")

    def _check_protection(
        self, masked: bool, privacy: PrivacyConfig, kind: str, asked: list[str]
    ) -> None:
        key, wanted = "protection", self.protection
        lacking = "the run has neither" if wanted == "either" else f"no {wanted}"
        self._require(key, self._protects(masked, privacy.on), lacking)
        if not privacy.on:
            return
        epsilon = privacy.max_epsilon
        fits = 0 < epsilon <= self.largest_epsilon
        self._require("largest-epsilon", fits, f"privacy.max-epsilon = {epsilon:g}")
        if wanted == "differential-privacy" or (wanted == "either" and not masked):
            self._require(key, not privacy.noise_seed, "privacy.noise-seed, which undoes the noise")
            noises = {"noise-multiplier": privacy.noise_multiplier}
            noises |= {"number-noise-multiplier": privacy.number_noise_multiplier} if asked else {}
            for name, noise in noises.items():
                fits = noise >= self.smallest_noise
                self._require("smallest-noise", fits, f"privacy.{name} = {noise:g}")
            # Such runs test on the server, and these replies would have no noise.
            clear = kind in (MessageType.EVALUATE, "train.measure")
            self._require(key, not clear, f"a message {kind!r}, whose reply has no noise")

    def _check_stage(self, asked: Mapping[str, Any]) -> None:
        """Check the number of sites in a sum, which the first and the last step tell."""
        sizes = {Stage.SETUP: (asked.get(Key.SAMPLE_NUMBER, 0), self.smallest_others)}
        # The last step names only the sites with which this one has shared secrets.
        neighbors = min(self.smallest_others, MAX_SHARES - 1)
        sizes[Stage.UNMASK] = len(asked.get(Key.ACTIVE_NODE_ID_LIST, ())), neighbors
        if (stage := asked.get(Key.STAGE)) in sizes:
            size, others = sizes[stage]
            self._require("smallest-others", size > others, f"{size} sites in the sum")

    def _require(self, key: str, holds: bool, asked: str, value: Any = None) -> None:
        if not holds:
            raise ConfigError(f"Refused by the site's policy ({self.line(key, value)}): {asked}.")


def _task_of(federation: str) -> str:
    try:
        return str(json.loads(federation).get("task") or CLASSIFICATION)
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"the message's federation is invalid ({error})") from error
