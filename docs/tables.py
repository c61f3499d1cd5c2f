"""Generate tables in documents, settings in ``pyproject.toml`` and imports of strategies.

``python docs/tables.py`` updates every table between ``<!-- table: name -->`` and ``<!-- end -->``
in ``docs``, the settings in ``pyproject.toml``, and the names in ``fairflower/strategies``.
"""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from types import FunctionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from fairflower.aggregation.cohort import Cohort
from fairflower.config import ClientConfig, RunConfig
from fairflower.config.run import default_values, key_help
from fairflower.config.site import TESTS_OTHERS
from fairflower.config.text import toml_tables
from fairflower.deploy.leaves import TABLE, WHEN, Rehearsal, Sent
from fairflower.errors import ConfigError
from fairflower.flower_compat import RECORD_KEY_CONFIGS, Stage
from fairflower.numerics.group_fairness import GROUP_COUNTS
from fairflower.registry import CLIENTS, REFERENCES, TASKS
from fairflower.registry.measurements import MEASUREMENTS
from fairflower.registry.user_metrics import FAILED_METRICS
from fairflower.secure.client import MEASURE
from fairflower.secure.protocol import SIGN_LIST, SIGNED
from fairflower.secure.sums import SUMS
from fairflower.strategies import STRATEGIES, FairStrategy
from fairflower.training.client_state import OWN

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(ROOT.glob("docs/*.md"))
#: The strategies without the references `alone` and `pooled`.
MERGING = {name: cls for name, cls in STRATEGIES.items() if name not in REFERENCES}


def all_strategies() -> str:
    """Return the table of strategies, with the first line of each docstring."""
    rows = [(f"`{name}`", _summary(cls), cls.paper) for name, cls in MERGING.items()]
    return _table(("strategy", "what it does", "from"), rows)


def all_clients() -> str:
    """Return the table of clients, with the first line of each docstring."""
    names: dict[type, list[str]] = {}
    for name, method in CLIENTS.items():
        names.setdefault(method, []).append(f"`{name}`")
    rows = [
        (", ".join(same), _summary(method).removeprefix("Local training "), method.paper)
        for method, same in names.items()
    ]
    return _table(("client", "local training", "from"), rows)


def all_tasks() -> str:
    """Return the table of tasks, with the first line of each docstring and their scores."""
    rows = []
    for name, kind in TASKS.items():
        first, *others = [score.phrase for score in kind.scores]
        rows.append((f"`{name}`", _summary(kind).partition(":")[0], first, ", ".join(others)))
    return _table(("task", "what is learnt", "primary score", "other scores"), rows)


def tasks() -> str:
    """Return the table of methods that are not defined for every task."""
    words = {
        "classes": "classes",
        "head": "a vector of outputs",
        "share": "a primary score from 0 to 1",
    }
    methods: dict[str, list[str]] = {}
    for name, strategy in STRATEGIES.items():
        needs = {MEASUREMENTS[need].needs for need in strategy().measurements} - {""}
        for need in needs:
            methods.setdefault(words[need], []).append(f"`{name}`")
    for name, kind in CLIENTS.items():
        if kind.needed:
            methods.setdefault(words[kind.needed], []).append(f"`{name}` (client)")
    return _table(("needs", "methods"), [(need, ", ".join(of)) for need, of in methods.items()])


def strategies() -> str:
    """Return the table of strategies' needs besides models and numbers of examples."""
    alike: dict[tuple[str, str], list[str]] = {}
    for strategy in MERGING.values():
        instance = strategy()
        reported = (f"metric `{metric}`" for metric in instance.reported_metrics)
        needs = ", ".join([*(_need(strategy, need) for need in instance.measurements), *reported])
        server_needs = [
            f"`{argument}`, or `{'` and `'.join(keys)}` in its config"
            for argument, keys in strategy.config_keys.items()
        ]
        if strategy.client_config is not FairStrategy.client_config:
            server_needs = ["a config for each client (`client_config`)"]
        if strategy.extra:
            server_needs.append(f"`fairflower[{strategy.extra}]`")
        server = ", ".join(server_needs)
        alike.setdefault((needs or "nothing more", server), []).append(f"`{strategy.__name__}`")
    rows = [(", ".join(classes), *both) for both, classes in alike.items()]
    return _table(("strategies", "a client also sends", "the server also needs"), rows)


def secure() -> str:
    """Return the table of strategies under secure aggregation, or the most similar that works."""
    rows: dict[str, list[str]] = {}
    for name, strategy in STRATEGIES.items():
        instance = strategy(alpha=0) if name == "fedeba+" else strategy()
        label = f"`{name}`" + " with `strategy.alpha = 0`" * (name == "fedeba+")
        if instance.sums_suffice:
            numbers = ", ".join(f"`{need}`" for need in instance.measurements) or "no number"
            rows.setdefault(f"yes, with {numbers} in the clear", []).append(label)
        else:
            _, nearest = strategy.single_updates
            rows.setdefault(f"no: use `{nearest}`", []).append(label)
    ordered = sorted(rows.items(), key=lambda row: row[0].startswith("no"))
    return _table(("works", "strategies"), ((works, ", ".join(by)) for works, by in ordered))


def measurements() -> str:
    """Return the table of measurements."""
    rows = [
        (
            f"`{name}`",
            f"{_kind(name)}, {measurement.model}",
            measurement.description.removeprefix("a single array named ``h``: "),
        )
        for name, measurement in MEASUREMENTS.items()
    ]
    return _table(("name", "sent as, of the model", "what it is"), rows)


def cohort() -> str:
    """Return the table of fields and methods of `Cohort`, from comments and docstrings."""
    notes = re.findall(r"((?:    #: .*\n)+)    (\w+):", inspect.getsource(Cohort))
    rows = [(f"`{name}`", _cell(re.sub(r"\s*#: ", " ", note))) for note, name in notes]
    for name, member in vars(Cohort).items():
        if name.startswith("_") or not isinstance(member, property | FunctionType):
            continue
        if name in ("blocks", "each", "cap", "check_weights", "clipped"):  # for fairflower's own
            continue
        signature = ""
        if isinstance(member, FunctionType):
            _, *parameters = inspect.signature(member).parameters.values()
            signature = f"({', '.join(p.name for p in parameters if p.default is p.empty)})"
        summary, *_ = (member.__doc__ or "").split("\n\n")
        rows.append((f"`{name}{signature}`", _cell(summary)))
    return _table(("`cohort.`", "what it is"), rows)


def leaves() -> str:
    """Return the table of what leaves a site, in the words of ``fairflower deploy leaves``."""
    data: dict[tuple[str, ...], list[str]] = {}
    for what, *cells in (*(_leaving(*row) for row in SENT), *_leaving_by_method()):
        data.setdefault(tuple(cells), []).append(what)
    rows = [("<br>".join(parts), *cells) for cells, parts in data.items()]
    order = [when.partition(";")[0] for when in WHEN.values()]
    header = ("datum", "when", "who gets it", "kept at the server", "what changes it")
    return _table(header, sorted(rows, key=lambda row: order.index(row[1])))


_DESCRIBED = "`data.groups`, `smallest-group`; no sums: `sums = false`, `secure-aggregation`"
_MASKED, _CONSORTIUM = "`secure-aggregation`", "`consortium`"
_SUMS = "only tables with `secure-aggregation`; `sums = false` in a schema"
_SHARED = "only without `domain` in the node config"
_STRATEGY = "`strategy.name` ([which](use-one-strategy.md#what-each-strategy-needs))"
_MEASURED = "only with `secure-aggregation`; `strategy.name`"
_OWN = "`share-own-model`, `test-others-models` in the node config"
MEASURED = "the strategy's numbers, named below"
_NUMBERS = [name for name, kind in MEASUREMENTS.items() if kind.shape == "number"]
#: What leaves a site whatever methods a run has: the setting that changes it, the kind or stage of
#: the message, the record, and its values.
SENT = (
    (_DESCRIBED, "query", "node", "site"),
    ("`tests-only` in the node config", "query", "node", "version", "tests-only"),
    (_SHARED, "query", "node", "federation", "digest", "partition-id", "num-partitions"),
    ("only with `statistics` and `row-digests`", "query", "node", "rows", "rows-of"),
    ("`secure-aggregation` masks it; `privacy.clip`; `client.name`", "train", "arrays"),
    ("`privacy.clip`: no loss", "train", "metrics", "num-examples", "client-id", "train_loss"),
    ("`client.name`", "train", "metrics", "state-round"),
    *((_MASKED, stage, RECORD_KEY_CONFIGS) for stage in Stage.all()),
    (_MEASURED, MEASURE, "metrics", "num-examples", "client-id"),
    (_MASKED, Stage.COLLECT_MASKED_VECTORS, "metrics", "num-examples", "client-id", "train_loss"),
    (_MASKED, Stage.COLLECT_MASKED_VECTORS, "fitres.num_examples"),
    (_MASKED, Stage.COLLECT_MASKED_VECTORS, "fitres.status"),
    *((_SUMS, SUMS, name) for name in (RECORD_KEY_CONFIGS, "fitres.num_examples", "fitres.status")),
    *((_CONSORTIUM, kind, SIGNED) for kind in (Stage.SETUP, SUMS)),
    (_CONSORTIUM, SIGN_LIST, RECORD_KEY_CONFIGS),
    ("`evaluate.by`", "evaluate", "metrics", "num-examples", "client-id", "eval_loss"),
    ("`evaluate.metrics`", "evaluate", "metrics", "accuracy", "personal_accuracy"),
    ("`evaluate.metrics`", "evaluate", FAILED_METRICS),
    ("`data.groups`, `smallest-group`", "evaluate", GROUP_COUNTS),
    (_OWN, "evaluate", OWN),
    (_OWN, "evaluate", "node", TESTS_OTHERS),
)


def _leaving(setting: str, kind: str, record: str, *keys: str, **flat: str) -> tuple[str, ...]:
    """Return a row of what leaves a site, as a rehearsal with settings of a run would say it."""
    config = RunConfig.from_flat({"strategy.name": "uniform", **flat})
    sent = Sent(kind, 1, 0, record, 0, keys)
    (row,) = Rehearsal(config, replies=[sent], table=TABLE).leaving()
    what = row.what if keys or record == RECORD_KEY_CONFIGS else f"{record}: {row.what}"
    what = re.sub(r"(^|; )([\w.-]+): ", r"\1`\2`: ", what).replace("a single array named h: ", "")
    kept = re.sub(r" \(.*?\)|, until [\w ]+", "", row.kept)  # the page says until when
    return what, row.when.partition(";")[0], row.recipient, kept, setting


def _leaving_by_method() -> Iterable[tuple[str, ...]]:
    """Yield rows of what strategies and clients ask for; numbers are described elsewhere."""
    names = ", ".join(f"`{name}`" for name in _NUMBERS)
    for kind, setting, what in ((MEASURE, _MEASURED, MEASURED), ("train", _STRATEGY, names)):
        _, *cells = _leaving(setting, kind, "metrics", *_NUMBERS)
        yield what, *cells
    by = {"received_group_counts": ["fairfed"], "representation": ["fedgcr"]}  # by an argument
    for name in [name for name in MEASUREMENTS if name not in _NUMBERS]:
        asked = [n for n, strategy in STRATEGIES.items() if name in strategy().measurements]
        names = by.setdefault(name, asked)
        what, *cells = _leaving(_STRATEGY, "train", name, **{"strategy.name": names[0]})
        yield f"{what} (`{'`, `'.join(names)}`)", *cells
    by = {}
    kept = [f"{name}:keep=server" for name, m in CLIENTS.items() if "keep" in m.arguments()]
    for name in (*CLIENTS, *kept):
        chosen = ClientConfig.read(name)
        for exchange in chosen.factory.make_exchanges(chosen.args):
            if exchange.returned:
                by.setdefault(exchange.name, []).append(name)
    for name, names in by.items():
        what, *cells = _leaving("`client.name`", "train", name, **{"client.name": names[0]})
        yield f"{what} (`{'`, `'.join(names)}`)", *cells


#: Settings of a private run, by which the registry says which methods allow it.
PRIVATE = (
    {"secure-aggregation": True},
    {f"privacy.{key}": 1.0 for key in ("noise-multiplier", "number-noise-multiplier", "clip")},
)


def first() -> str:
    """Return the table of the leaderboard's methods: their needs, and what was found.

    The design has the methods, and ``experiments/federations.md`` says what was found.
    """
    folder = ROOT / "experiments"
    protocol = tomllib.loads((folder / "leaderboard.toml").read_text("utf-8"))["protocol"]
    found = re.findall(
        r"^- (\S+): \d+ methods were compared .*?: (.*);",
        (folder / "federations.md").read_text("utf-8"),
        re.MULTILINE,
    )
    rows = []
    for method in protocol["confirmed"].split(","):
        client, _, strategy = method.rpartition("+")
        flat = {"strategy.name": strategy, "client.name": client or "sgd"}
        chosen = RunConfig.from_flat(flat).strategy
        trainer = CLIENTS[flat["client.name"]]
        arrays = [exchange.name for exchange in trainer.make_exchanges({})]
        sent = [*chosen.factory(**chosen.args).measurements, *arrays]
        private = all(_accepted(flat | settings) for settings in PRIVATE)
        outcomes = [
            [name for name, text in found if _listed(method, text, outcome)]
            for outcome in ("better", "worse")
        ]
        cells = [", ".join(names) or "none" for names in outcomes]
        needs = ", ".join(f"`{need}`" for need in sent) or "nothing more"
        does = _summary(trainer if client else chosen.factory)
        rows.append((f"`{method}`", does, needs, "yes" if private else "no", *cells))
    rows = [row for row in rows if row[0] != f"`{protocol['reference']}`"]
    header = ("method", "what it does", "clients also send", "private", "better on", "worse on")
    return _table(header, rows)


def _listed(method: str, text: str, outcome: str) -> bool:
    """Return whether a sentence has the method in brackets behind the outcome."""
    listed = re.search(rf"\d+ {outcome} \((.*?)\)", text)
    return listed is not None and method in re.split(", | and ", listed[1])


def _accepted(flat: dict[str, Any]) -> bool:
    try:
        RunConfig.from_flat(flat)
    except ConfigError:
        return False
    return True


def settings() -> str:
    """Return the table of run config keys, except arguments of methods, with their defaults."""
    texts = key_help()
    rows = [
        (f"`{key}`", f"`{json.dumps(value)}`", texts[key])
        for key, value in default_values().items()
        if value != "default"
    ]
    return _table(("key", "default", "what it is"), rows)


TABLES = {
    table.__name__: table
    for table in (
        *(all_strategies, all_clients, strategies, secure, measurements, cohort),
        *(leaves, settings, all_tasks, tasks, first),
    )
}


def filled(text: str) -> str:
    """Fill in every table of a document between ``<!-- table: name -->`` and ``<!-- end -->``."""

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}\n{TABLES[match[2]]()}\n{match[3]}"

    return re.sub(r"(<!-- table: (\w+) -->)\n.*?(<!-- end -->)", fill, text, flags=re.DOTALL)


def with_settings(project: str) -> str:
    """Insert all run config keys with defaults into ``pyproject.toml``; Flower rejects others."""
    settings = toml_tables(dict(default_values()), "tool.flwr.app.config")
    pattern = r"\[tool\.flwr\.app\.config\]\n.*?(?=\n\[tool\.(?!flwr))"
    return re.sub(pattern, lambda _: settings, project, flags=re.DOTALL)


def _summary(method: type) -> str:
    """Return the first line of a class's docstring, without the period and a citation."""
    first = (method.__doc__ or "").strip().splitlines()[0].removesuffix(".")
    return re.sub(r" \([^()]*\d{4}[^()]*\)$", "", first)


def _cell(text: str) -> str:
    """Format a comment or a docstring as a table cell."""
    return " ".join(text.split()).removesuffix(".").replace("``", "`").replace("|", "\\|")


def _need(strategy: type[FairStrategy], need: str) -> str:
    text = f"{_kind(need)} `{need}`"
    for argument, default in strategy.arguments().items():
        if default == need:
            others = [f"`{choice}`" for choice in _choices(strategy, argument) if choice != need]
            text += f" (`{argument}`; or {', '.join(others) or 'another'})"
    return text


def _kind(name: str) -> str:
    return "metric" if MEASUREMENTS.assumed(name).shape == "number" else "ArrayRecord"


def _choices(strategy: type[FairStrategy], argument: str) -> tuple[Any, ...]:
    hint = get_type_hints(strategy.__init__)[argument]
    return get_args(hint) if get_origin(hint) is Literal else ()


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def with_strategies(text: str) -> str:
    """Return the source of ``fairflower.strategies`` with all strategies of the registry."""
    prefix = "from fairflower.strategies."
    classes = sorted({(c.__module__, c.__name__) for c in STRATEGIES.values()})
    new = [f"from {module} import {name} as {name}\n" for module, name in classes]
    others = [line for line in text.splitlines(keepends=True) if not line.startswith(prefix)]
    return "".join((*others, *new))


def main() -> None:
    """Update the documents, ``pyproject.toml`` and ``fairflower/strategies/__init__.py``."""
    for path in DOCUMENTS:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
    project = ROOT / "pyproject.toml"
    project.write_text(with_settings(project.read_text(encoding="utf-8")), encoding="utf-8")
    package = ROOT / "fairflower" / "strategies" / "__init__.py"
    package.write_text(with_strategies(package.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
