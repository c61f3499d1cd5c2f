"""``fairflower list`` and ``fairflower data show``: what there is, and what a data set contains."""

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fairflower.arguments import ArgumentSpec, argument_specs
from fairflower.cli.options import ConfigOverrides, output, with_settings
from fairflower.cli.terminal import console, friendly_errors, say_where, text_table
from fairflower.config import RunConfig
from fairflower.config.methods import PARTS, MethodSpec, Spec, TaskSpec
from fairflower.config.run import default_values, key_help
from fairflower.config.text import argument_to_key, shown, unknown
from fairflower.errors import ConfigError, require
from fairflower.paths import check_output_file
from fairflower.registry.named import distribution_of

#: Titles of lists that say more than the list's name.
_TITLES = {
    "data": "Data sets",
    "policies": "Participation policies",
    "trackers": "Experiment trackers",
}


@friendly_errors(extra="")
def list_(
    what: Annotated[
        str, typer.Argument(help=f"What to list: {', '.join(PARTS)}, settings or all.")
    ] = "all",
) -> None:
    """List methods, data sets, models, settings and more, with their papers and arguments.

    Arguments are shown with their defaults and, in parentheses, the range of accepted numbers (or
    "tuned over" and the range that `fairflower tune` searches, beyond which numbers are accepted,
    too) and other accepted words. `all` does not include the settings.
    """
    if what not in (words := {*PARTS, "settings", "all"}):
        raise ConfigError(unknown("list", what, words))
    if what in ("clients", "settings", "all"):
        require("train", f"`fairflower list {what}`")
    for name, kind in PARTS.items():
        if what in (name, "all"):
            console.print(_table(_TITLES.get(name, name.capitalize()), kind))
    if what == "settings":
        texts = key_help()
        rows = (
            (key, repr(default) if isinstance(default, str) else str(default).lower(), texts[key])
            for key, default in default_values().items()
        )
        columns = ("key", "default", "meaning")
        console.print(text_table("Settings (run config keys)", columns, rows))


def _table(title: str, kind: type[Spec]) -> Table:
    columns: tuple[str, ...] = ("name", "description")
    rows: list[tuple[str, ...]] = [*kind.REGISTRY.lines.items()]
    if issubclass(kind, MethodSpec):
        columns += ("paper", f"arguments ({kind.TABLE}.*)")
        rows = [(n, _summary(m), m.paper, _arguments(m)) for n, m in kind.REGISTRY.items()]
    elif kind is TaskSpec:
        columns = ("name", "what is learnt", "scores", "arguments")
        tasks = ((t, ", ".join(s.phrase for s in t.scores), n) for n, t in kind.REGISTRY.items())
        rows = [(name, _summary(task), scores, _arguments(task)) for task, scores, name in tasks]
    for name, offer in kind.REGISTRY.offers().items():
        package = distribution_of(offer)
        try:
            part = kind(name).factory
            line, arguments = _summary(part), _arguments(part)
        except ConfigError as error:
            line, arguments = str(error), ""
        about = f"{line} (from {package}; arguments: {arguments})"
        rows.append((name, line, package, arguments) if len(columns) == 4 else (name, about))
    return text_table(f"{title} ({kind.KEY})", columns, rows)


def _summary(thing: Any) -> str:
    return (thing.__doc__ or "").strip().partition("\n")[0]


def _arguments(factory: Any) -> str:
    described = []
    for name, spec in argument_specs(factory).items():
        words = ", ".join(word for word in spec.words if word != spec.default)
        more = [_range(spec)] * bool(spec.search) + [f"or {words}"] * bool(words)
        text = argument_to_key(name)
        if spec.default is not inspect.Parameter.empty:
            text += "=none" if spec.default is None else f"={shown(spec.default)}"
        described.append(text + f" ({', '.join(more)})" * bool(more))
    return ", ".join(described) or "none"


def _range(spec: ArgumentSpec) -> str:
    """Return the range that `fairflower tune` searches, marked if other numbers are accepted."""
    ends = [(r.low, r.high) for r in (spec.range, spec.search) if r]
    return f"{'' if ends[:1] == ends[1:] else 'tuned over '}{spec.search}"


@with_settings("data_dir")
def show(
    *,
    name: Annotated[str, typer.Argument(help="Data set: a name from `fairflower list data`.")],
    overrides: ConfigOverrides,
    out: Annotated[
        Path | None,
        output("Output file (.png). Default: <data set>.png in the working directory."),
    ] = None,
) -> None:
    """Print the domains, clients and class counts of a data set, and save a sheet of sample images.

    For features and token ids, the command prints statistics of the training examples instead of
    saving images.
    """
    if (other := overrides.assigned.get("data.name", name)) != name:
        raise ConfigError(f"--set data.name={other}: the command names {name}. Remove one of them.")
    settings = overrides.file | {"data.name": name} | overrides.options | overrides.assigned
    config = RunConfig.from_flat(settings)
    path = out or Path(f"{name}.png")
    check_output_file(path, ".png")
    from fairflower.data import prepare
    from fairflower.data.cache import make_data_set
    from fairflower.data.show import clients_table, contact_sheet, examples_table

    federation = prepare(config.data)
    if federation.kind != "images":
        if out:
            raise ConfigError(
                f"--out {out}: {federation.kind} cannot be drawn as images. Remove --out."
            )
        if federation.encoding:
            from fairflower.tables.encoding import Encoding

            names = tuple(Encoding.from_json(federation.encoding).features)
        else:
            names = getattr(make_data_set(config.data), "feature_names", ())
        console.print(clients_table(federation), examples_table(federation, names))
        return
    console.print(clients_table(federation))
    contact_sheet(federation, path)
    say_where("contact sheet", path)
