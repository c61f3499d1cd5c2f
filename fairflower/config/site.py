"""A site's own settings: its node config, and the file of ``fairflower deploy site``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from fairflower.arguments import Range
from fairflower.config.secure import CONSORTIUM, KEY, SIGNING_KEY
from fairflower.config.settings import checked, setting_specs
from fairflower.config.text import Scalar, key_to_argument, read_tables, unknown
from fairflower.errors import ConfigError, quoted
from fairflower.paths import home

#: The whole of a site's answer, and of the reason for it, once the site has withdrawn.
WITHDRAWN = "the site has withdrawn"

#: Whether a site's own model (of ``alone``) may leave it, to be tested at others, and whether the
#: site tests theirs.
SHARES, TESTS_OTHERS = "share-own-model", "test-others-models"

#: Whether the site does not train, and fewest training examples that it lets a run use.
TESTS_ONLY, FEWEST_EXAMPLES = "tests-only", "fewest-examples"

_FLAGS = (KEY, TESTS_ONLY, SHARES, TESTS_OTHERS)
_COUNTS = ("smallest-group", FEWEST_EXAMPLES)
#: Keys of a node config.
NODE_KEYS = {"domain", "data-dir", "partition-id", "num-partitions", *_COUNTS, *_FLAGS}
NODE_KEYS |= {CONSORTIUM, SIGNING_KEY, "row-digests"}

#: Fewest characters of the key of ``row-digests``, which nobody may guess.
KEY_LENGTH = 16

_NODE_PATHS = ("data-dir", CONSORTIUM, SIGNING_KEY)
_PATHS = ("root_certificates", "private_key", "policy", "audit_log")


def check_node_config(node: Mapping[str, Any], where: str = "--node-config") -> None:
    """Raise ``ConfigError`` for an unknown key, such as a mistyped one, or an invalid value."""
    wrong = ""
    if strange := node.keys() - NODE_KEYS:
        wrong = unknown("key", min(strange), NODE_KEYS)
    elif flags := [key for key in _FLAGS if type(node.get(key, True)) is not bool]:
        wrong = f"{flags[0]}: expected true or false."
    elif (CONSORTIUM in node) != (SIGNING_KEY in node):
        wrong = f"{CONSORTIUM} and {SIGNING_KEY} must be set together."
    elif few := [k for k in _COUNTS if type(n := node.get(k, 1)) is not int or n < 1]:
        wrong = f"{few[0]}: expected a whole number above 0."
    elif len(str(node.get("row-digests", "x" * KEY_LENGTH))) < KEY_LENGTH:
        wrong = f"row-digests: expected {KEY_LENGTH} characters or more."
    if wrong:
        raise ConfigError(f"{where}: {wrong}", public=True)


@dataclass(frozen=True)
class SiteConfig:
    """Settings of ``fairflower deploy site``. Relative paths begin at the file's folder."""

    superlink: Annotated[str, "Address of the SuperLink, as host:port."] = ""
    root_certificates: Annotated[
        str, "File of the server's certificate authority. Empty means those of the system."
    ] = ""
    private_key: Annotated[
        str, "File of the site's private key. Empty means none, which few SuperLinks accept."
    ] = ""
    policy: Annotated[str, "File of the site's policy. Empty means that all is allowed."] = ""
    audit_log: Annotated[
        str, "File of the audit log. Empty means $FAIRFLOWER_HOME/audit/audit.jsonl."
    ] = ""
    idle_minutes: Annotated[
        float,
        Range(above=0),
        "Minutes without a message after which the process with PyTorch and the data ends. The "
        "next message starts another one.",
    ] = 30.0
    withdraw: Annotated[
        bool,
        "true: the site answers every message with its withdrawal, from the next message on. The "
        "server then asks it no more in this run.",
    ] = False
    node: Mapping[str, Scalar] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> SiteConfig:
        """Read a TOML file with these settings, and the node config in its table ``[node]``.

        Raises ``ConfigError`` if a key is unknown, a value is not allowed, ``superlink`` is
        missing, or a file does not exist.
        """
        tables = read_tables(path)
        node, specs = tables.pop("node", {}), setting_specs(cls)
        if not isinstance(node, dict):
            raise ConfigError(f"{path}: node = {quoted(node)}: expected a table, [node].")
        check_node_config(node, f"{path}, [node]")
        for key, value in tables.items():
            if key not in specs:
                raise ConfigError(f"{path}: {unknown('key', key, [*specs, 'node'])}")
            checked(f"{path}: {key}", value, specs[key])
        site = cls(**{key_to_argument(key): value for key, value in tables.items()}, node=node)
        if not site.superlink:
            raise ConfigError(f"{path}: superlink is missing: the SuperLink's address, host:port.")
        folder, given = path.parent.absolute(), {name: getattr(site, name) for name in _PATHS}
        paths: dict[str, Any] = {n: str(folder / text) for n, text in given.items() if text}
        for name in {*paths} - {"audit_log"}:
            if not Path(paths[name]).is_file():
                key = name.replace("_", "-")
                raise ConfigError(f"{path}: {key} = {quoted(getattr(site, name))}: no such file.")
        own = {key: str(folder / str(node[key])) for key in _NODE_PATHS if node.get(key)}
        paths["node"] = {**node, **own}
        log = paths.get("audit_log") or str(home() / "audit" / "audit.jsonl")
        return dataclasses.replace(site, **{**paths, "audit_log": log})
