"""Reading and writing run configs as text: TOML and ``key=value``."""

import difflib
import json
import keyword
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import date, time
from pathlib import Path
from typing import Any, TypeVar

from fairflower.errors import ConfigError, quoted
from fairflower.paths import path_of, read_text

#: Tables of strategies and clients.
METHOD_TABLES = ("client.", "strategy.")

Scalar = bool | int | float | str

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def argument_to_key(name: str) -> str:
    """Return the run config key of an argument; a keyword like ``lambda_`` becomes ``lambda``.

    >>> argument_to_key("clients_per_domain"), argument_to_key("lambda_")
    ('clients-per-domain', 'lambda')
    """
    word = name.removesuffix("_")
    return word if keyword.iskeyword(word) else name.replace("_", "-")


def key_to_argument(key: str) -> str:
    """Return the argument of a run config key; the inverse of `argument_to_key`."""
    return f"{key}_" if keyword.iskeyword(key) else key.replace("-", "_")


def names_in(text: str) -> list[str]:
    """Return the names in a comma-separated text.

    >>> names_in("mnist, usps,"), names_in("")
    (['mnist', 'usps'], [])
    """
    return [name for name in map(str.strip, text.split(",")) if name]


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file as flat run config keys, without checking names and values."""
    return flatten_tables(read_tables(path))


def read_tables(path: str | Path) -> dict[str, Any]:
    """Read the tables of a TOML file; raise ``ConfigError`` if it cannot be read."""
    path = path_of("config file", path).expanduser()
    try:
        tables = tomllib.loads(read_text(path, "utf-8-sig"), parse_float=parse_float)
        flatten_tables(tables)  # fails where Python's recursion limit is below their depth
        return tables
    except OSError as error:
        raise ConfigError(f"Cannot read the config file {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text (byte {error.start}). Save it as UTF-8; some editors and "
            "shells write UTF-16."
        ) from error
    except (ValueError, RecursionError) as error:  # ValueError: also a number of 5,000 digits
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error


def parse_float(text: str) -> float:
    """Convert text to a float; raise ``ValueError`` if a nonzero number would become 0.

    >>> parse_float("1e-3"), parse_float("0e5")
    (0.001, 0.0)
    """
    value = float(text)
    if value == 0 and any(digit in "123456789" for digit in text.lower().partition("e")[0]):
        raise ValueError(f"{text} is too small and would be rounded to 0")
    return value


def flatten_tables(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables into dotted keys.

    >>> flatten_tables({"seed": 1, "train": {"lr": 0.1}})
    {'seed': 1, 'train.lr': 0.1}
    """
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            flat.update(flatten_tables(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def split_spec(text: str) -> list[str]:
    r"""Split a component's name and arguments at colons, except after a Windows drive letter.

    >>> split_spec("fedheal:tau=0.4"), split_spec(r"hf:C:\bert:a=1"), split_spec("hf:/bert")
    (['fedheal', 'tau=0.4'], ['hf', 'C:\\bert', 'a=1'], ['hf', '/bert'])
    """
    return re.split(r":(?![\\/])|(?<![:=][A-Za-z]):", text)


def parse_assignments(texts: Iterable[str], where: str = "") -> dict[str, Any]:
    """Parse texts ``key=value``; raise ``ConfigError`` if a key is repeated.

    A value is a TOML scalar, but no date, if possible, else a string. ``where`` names the place of
    the texts in errors.

    >>> parse_assignments(["train.lr=0.1", "model.name=cnn"])
    {'train.lr': 0.1, 'model.name': 'cnn'}
    """
    assigned: dict[str, Any] = {}
    for text in texts:
        key, sign, value = map(str.strip, text.partition("="))
        if not sign or not key:
            given = f"{where}: expected" if where else "Expected"
            raise ConfigError(f"{given} key=value, got {quoted(text)}.")
        scalar: Any = value
        with suppress(ValueError, RecursionError):
            parsed = tomllib.loads(f"value = {value}", parse_float=parse_float)
            # A value with a line break could set other keys. A run may be named after a date.
            if len(parsed) == 1 and not isinstance(parsed["value"], date | time):
                scalar = parsed["value"]
        if key in assigned:
            values = f"{quoted(assigned[key])} and {quoted(scalar)}"
            raise ConfigError(f"{key} is given twice, as {values}. Give a single value.")
        assigned[key] = scalar
    return assigned


def toml_value(value: Scalar) -> str:
    """Format a value as TOML, as Flower's ``--run-config`` and ``--node-config`` expect."""
    # A JSON literal is valid TOML, except NaN, infinity and DEL.
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_tables(flat: Mapping[str, Scalar], parent: str = "") -> str:
    r"""Return flat run config keys as TOML tables, in a table ``parent`` if it has a name.

    >>> toml_tables({"seed": 1, "train.lr": 0.1})
    'seed = 1\n\n[train]\nlr = 0.1\n'
    """
    tables: dict[str, list[str]] = {"": []}
    for key, value in flat.items():
        table, _, leaf = key.rpartition(".")
        tables.setdefault(table, []).append(f"{leaf} = {toml_value(value)}")
    parts = []
    for table, lines in tables.items():
        name = ".".join(filter(None, (parent, table)))
        parts.append("\n".join([f"[{name}]", *lines] if name else lines))
    return "\n\n".join(parts) + "\n"


def unknown(
    kind: str, name: str, valid: Iterable[str], meanings: Mapping[str, str] | None = None
) -> str:
    """Return an error message for an unknown name, with the most similar name or all names.

    ``kind`` is the kind of the name, for example ``"strategy"``. ``meanings`` are help texts of
    names. They are searched, too: ``learning-rate`` matches ``train.lr``.

    Examples
    --------
    >>> unknown("strategy", "fedhael", ["fedavg", "fedheal"])
    "Unknown strategy 'fedhael'. Did you mean 'fedheal'? Valid: fedavg, fedheal."
    >>> unknown("key", "train.foo", ["train.lr", "train.rho", "seed"])
    "Unknown key 'train.foo'. Valid: train.lr, train.rho."
    """
    valid = sorted(valid)
    table, _, leaf = name.rpartition(".")
    if within := [key for key in valid if key.startswith(f"{name}.")]:
        component = f"{name}.name"  # strategy = "fedheal" means strategy.name
        named = component in within
        remedy = f"Did you mean {component!r}?" if named else f"Valid: {', '.join(within)}."
        return f"Unknown {kind} {quoted(name)}, which is a table. {remedy}"
    if beside := [key for key in valid if table and key.rpartition(".")[0] == table]:
        # The common table would count as matching letters.
        valid, written = beside, {key.rpartition(".")[2]: key for key in beside}
    else:
        leaf, written = name, {key.lower(): key for key in valid}

    def similar(cutoff: float) -> list[str]:
        return [written[w] for w in difflib.get_close_matches(leaf.lower(), written, 1, cutoff)]

    words = re.escape(name.rpartition(".")[2].replace("-", " ").replace("_", " ").lower())
    spoken = re.compile(rf"(?<![\w.-]){words}(?![\w-])")
    same_leaf = [key for key in reversed(valid) if key.endswith(f".{name}")]
    near = [key for key in same_leaf if not key.startswith(METHOD_TABLES)] + similar(0.8)
    near += [
        k for k, text in (meanings or {}).items() if k in valid and spoken.search(text.lower())
    ]
    near += same_leaf + similar(0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    listing = f" Valid: {', '.join(valid)}." if len(valid) <= 30 else ""
    if not listing and not near:
        listing = " `fairflower list settings` lists all settings."
    return f"Unknown {kind} {quoted(name)}.{hint}{listing}"


def is_argument(key: str) -> bool:
    """Return whether a run config key is an argument of a strategy or client, by its table."""
    table, _, argument = key.partition(".")
    return f"{table}." in METHOD_TABLES and argument not in ("", "name") and "." not in argument


def shown(value: Any) -> str:
    """Format a config value for tables and figures.

    >>> shown(True), shown(0.5), shown("cnn"), shown("")
    ('true', '0.5', 'cnn', '""')
    """
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if value != "" else '""'


def counted(number: int, noun: str, *verbs: str) -> str:
    """Return a number with its noun, which gets an s unless the number is 1, and its verb.

    >>> counted(1, "run"), counted(2, "run"), counted(2, "run", "is", "are")
    ('1 run', '2 runs', '2 runs are')
    """
    return " ".join([f"{number} {noun}{'s' * (number != 1)}", *verbs[number != 1 :][:1]])


def join_words(parts: Sequence[str]) -> str:
    """Join words with commas and "and".

    >>> join_words(["a"]), join_words(["a", "b"]), join_words(["a", "b", "c"])
    ('a', 'a and b', 'a, b and c')
    """
    return " and ".join(part for part in (", ".join(parts[:-1]), *parts[-1:]) if part)


def grouped(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    """Return the values of each key, all in the order in which they come.

    >>> grouped([("a", 1), ("b", 2), ("a", 3)])
    {'a': [1, 3], 'b': [2]}
    """
    groups: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups
