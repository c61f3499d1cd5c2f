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
from fairflower.config.text import toml_tables
from fairflower.deploy.policy import TEMPLATE
from fairflower.errors import ConfigError
from fairflower.registry import CLIENTS, REFERENCES, TASKS
from fairflower.registry.measurements import MEASUREMENTS
from fairflower.strategies import STRATEGIES, FairStrategy

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
    """Return the table of strategies under secure aggregation, with reasons against it."""
    rows = []
    for name, strategy in STRATEGIES.items():
        instance = strategy(alpha=0) if name == "fedeba+" else strategy()
        if instance.sums_suffice:
            numbers = ", ".join(f"`{need}`" for need in instance.measurements) or "nothing more"
            works = "with `strategy.alpha = 0`" if name == "fedeba+" else "yes"
            rows.append((f"`{name}`", works, numbers))
        else:
            reason, nearest = strategy.single_updates
            rows.append((f"`{name}`", f"no: it {reason}", f"use `{nearest}`"))
    return _table(("strategy", "works", "numbers in the clear, or the nearest that works"), rows)


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


def clients() -> str:
    """Return the table of arrays that clients exchange with the server besides the model."""
    rows = []
    kept = [(f"{name}:keep=server", m) for name, m in CLIENTS.items() if "keep" in m.arguments()]
    for name, method in (*CLIENTS.items(), *kept):
        arguments = ClientConfig.read(name).args
        kinds = [type(exchange) for exchange in method.make_exchanges(arguments)]
        to = ", ".join(f"`{kind.name}`" for kind in kinds)
        names = [kind.name for kind in kinds if kind.returned]
        names += [need for kind in kinds for need in kind().measurements]
        back = ", ".join(f"`{name}`" for name in names)
        if kinds:
            rows.append((f"`{name}`", f"`{kinds[0].__name__}`", to, back or "nothing"))
    return _table(("client", "exchange", "may come from the server", "leaves the client"), rows)


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


def policy() -> str:
    """Return the template of a site's policy."""
    return f"```toml\n{TEMPLATE.read_text(encoding='utf-8')}```"


TABLES = {
    table.__name__: table
    for table in (
        *(all_strategies, all_clients, strategies, secure, measurements, cohort),
        *(clients, settings, all_tasks, tasks, first, policy),
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
