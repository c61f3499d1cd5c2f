"""Sites that trust each other, but not the server: signed keys, and signed lists of present sites.

The protocol's public keys pass through the server. A site whose node config names a file with the
consortium's sites signs its keys of each set-up, and shares secrets only with sites whose keys are
signed by sites of this file. With its masked vector it signs what it has seen of the round: all
keys, the model and the settings. Before it helps to remove masks, it signs the list of the sites
that have sent a masked vector, if all of them have signed the same as the site itself. It helps
only if as many sites as the protocol's threshold have signed this list, itself included
(Bonawitz et al. 2017, section 6, has this check, doi 10.1145/3133956.3133982). Since the threshold
is more than half of the sites, and a site signs once in a set-up, the server cannot tell different
sites different things.
"""

from __future__ import annotations

import binascii
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ArrayRecord, ConfigRecord, Context

from fairflower.config.secure import CONSORTIUM, SIGNING_KEY, WEIGHT_KEY
from fairflower.config.text import read_tables
from fairflower.errors import ConfigError
from fairflower.paths import read_text
from fairflower.secure.protocol import SMALLEST_SUM

#: Keys of a train message that an honest server tells each site another value of, beside those of
#: its weight.
_OF_ONE_SITE = ("client-id", "merged-round")

#: Record of ``Context.state`` with what a site has seen and signed in this set-up.
_STATE = "fairflower.consortium"

#: First item of everything that is signed, so that no signature for another purpose fits.
_PURPOSE = "fairflower secure aggregation 1"

PublicKey = ec.EllipticCurvePublicKey


class NotSigned(ValueError):
    """A request that the consortium's sites have not signed; the server may read the text."""


def read_sites(path: Path) -> dict[str, PublicKey]:
    """Read the sites' public keys by name, from lines ``<name> ecdsa-sha2-nistp384 <key>``.

    Empty lines and lines that begin with ``#`` are skipped. A TOML file, the site's policy, has
    these pairs in its table ``[consortium]``. Raises ``ConfigError`` with the line's number or the
    name if a key is not of this form, or a name or key occurs twice; or if there are fewer than
    three sites.
    """
    sites: dict[str, PublicKey] = {}
    if path.suffix == ".toml":
        listed = read_tables(path).get(CONSORTIUM, {})
        pairs = [(name, name, str(text)) for name, text in listed.items()]
    else:
        lines = enumerate(map(str.strip, read_text(path).splitlines()), 1)
        split = [(n, *s.partition(" ")) for n, s in lines if s and s[0] != "#"]
        pairs = [(f"line {n}", name, text) for n, name, _, text in split]
    for place, name, text in pairs:
        key, where = read_key(text), f"{path}, {place}"
        if key is None:
            raise ConfigError(
                f"{where}: expected the site's name, a space, and the content of its .pub file, "
                "as `fairflower deploy key` writes it (ecdsa-sha2-nistp384)."
            )
        if same := [n for n, other in sites.items() if n == name or key == other]:
            raise ConfigError(f"{where}: {name!r} has the name or the key of {same[0]!r}.")
        sites[name] = key
    if len(sites) < SMALLEST_SUM:
        raise ConfigError(f"{path}: {len(sites)} sites, expected at least {SMALLEST_SUM}.")
    return sites


def read_key(text: str) -> PublicKey | None:
    """Read a public key in OpenSSH's format, on the curve P-384; None if it is no such key."""
    try:
        key = serialization.load_ssh_public_key(text.strip().encode())
    except (ValueError, binascii.Error):
        return None
    p384 = isinstance(key, PublicKey) and isinstance(key.curve, ec.SECP384R1)
    return key if p384 else None  # type: ignore[return-value]


@dataclass(frozen=True)
class Consortium:
    """The sites that a site trusts, and its own name and key."""

    sites: Mapping[str, PublicKey]
    name: str
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def of(cls, node: Mapping[str, Any]) -> Consortium | None:
        """Read the files that a node config names; None if it names no consortium.

        Raises ``ConfigError`` if one of them is missing or invalid, or the sites' file does not
        have the public key of the site's own.
        """
        if CONSORTIUM not in node:
            return None
        sites, path = read_sites(Path(node[CONSORTIUM])), Path(str(node.get(SIGNING_KEY, "")))
        try:
            key: Any = serialization.load_ssh_private_key(path.read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{SIGNING_KEY} = {str(path)!r}: no private key ({error})."
            ) from error
        own = [name for name, public in sites.items() if public == key.public_key()]
        if not own:
            raise ConfigError(
                f"{node[CONSORTIUM]} does not have the public key of {SIGNING_KEY} = {str(path)!r}."
            )
        return cls(sites, own[0], key)

    def sign_keys(self, place: list[Any], node: int, pair: list[bytes]) -> ConfigRecord:
        """Return the record that goes with the site's keys of a set-up.

        ``place`` is the Flower run's number and the round, and ``pair`` has the two keys.
        """
        return self._signed("keys", *place, node, self.name, *pair)

    def check_keys(
        self, place: list[Any], keys: Mapping[int, list[bytes]], signed: Any, context: Context
    ) -> None:
        """Raise `NotSigned` unless each node's keys are signed by another site of the consortium.

        ``signed`` is the request's record with the sites' signatures.
        """
        names, proofs = _by_node(signed, "names"), _by_node(signed, "signatures")
        for node, pair in keys.items():
            name = names.get(node, "")
            if name not in self.sites:
                text = f"of a site {name!r}" if name else "without a signature"
                raise NotSigned(
                    f"site {self.name!r} got keys {text}, which its consortium file does not have"
                )
            if not self._valid(name, proofs[node], "keys", *place, node, name, *pair):
                raise NotSigned(
                    f"site {self.name!r} got keys of site {name!r} that this site has not signed "
                    "for this round of this run"
                )
        if len({names[node] for node in keys}) < len(keys) or names[context.node_id] != self.name:
            raise NotSigned(f"site {self.name!r} got keys of a site that is named twice")
        directory = [[node, names[node], *keys[node]] for node in sorted(keys)]
        context.state[_STATE] = ConfigRecord(
            {
                "seen": _digest("directory", *place, *directory),
                "nodes": sorted(keys),
                "names": [names[node] for node in sorted(keys)],
            }
        )

    def note_request(
        self, arrays: Mapping[str, ArrayRecord], config: Mapping[str, Any], context: Context
    ) -> None:
        """Add the arrays and all values with which the site trains to what it has seen."""
        hashes = [
            [part, name, a.dtype, *a.shape, _hash(a.data)]
            for part, record in sorted(arrays.items())
            for name, a in record.items()
        ]
        own = (*_OF_ONE_SITE, f"{WEIGHT_KEY.partition('.')[0]}.")
        told = {key: value for key, value in config.items() if not key.startswith(own)}
        state: Any = context.state[_STATE]
        state["seen"] = _digest(state["seen"], *hashes, *sorted(told.items()))

    def sign_request(self, context: Context) -> ConfigRecord:
        """Return the record that goes with the masked vector: what the site has seen, signed."""
        state: Any = context.state[_STATE]
        return self._signed("request", state["seen"])

    def sign_list(
        self, present: list[int], threshold: int, signed: Any, context: Context
    ) -> ConfigRecord:
        """Sign which nodes are present, once in a set-up, if all have seen what this site has.

        Else one site alone, with a model or settings of its own, could be most of the sum.
        """
        state: Any = context.state[_STATE]
        known = len({*present}) == len(present) and {*present} <= {*state["nodes"]}
        if "present" in state or not known or context.node_id not in present:
            raise NotSigned(f"site {self.name!r} does not sign a second list, or unknown sites")
        if len(present) < threshold:
            raise NotSigned(
                f"site {self.name!r} does not sign a list of {len(present)} present sites; at "
                f"least {threshold} must be"
            )
        names, proofs = _by_node(state, "names"), _by_node(signed, "signatures")
        for node in present:
            if not self._valid(names[node], proofs.get(node, b""), "request", state["seen"]):
                raise NotSigned(
                    f"site {self.name!r} signs no list with site {names[node]!r}, which has not "
                    "signed the same keys, model and settings"
                )
        state["present"] = sorted(present)
        return ConfigRecord({"signature": self._sign("list", state["seen"], *sorted(present))})

    def check_list(self, present: list[int], threshold: int, signed: Any, context: Context) -> None:
        """Raise `NotSigned` unless ``threshold`` present sites have signed what this site has."""
        state: Any = context.state[_STATE]
        names, statement = _by_node(state, "names"), ("list", state["seen"], *sorted(present))
        signers = {
            names[node]
            for node, proof in _by_node(signed, "signatures").items()
            if node in present and self._valid(names[node], proof, *statement)
        }
        if sorted(present) != state.get("present") or len(signers) < threshold:
            raise NotSigned(
                f"site {self.name!r} keeps the masks: {len(signers)} sites have signed the keys, "
                f"the model, the settings and the list of present sites that it got, but "
                f"{threshold} must"
            )

    def _signed(self, *statement: Any) -> ConfigRecord:
        return ConfigRecord({"name": self.name, "signature": self._sign(*statement)})

    def _sign(self, *statement: Any) -> bytes:
        return self.key.sign(_encoded(*statement), ec.ECDSA(hashes.SHA384()))

    def _valid(self, name: str, signature: bytes, *statement: Any) -> bool:
        try:
            self.sites[name].verify(signature, _encoded(*statement), ec.ECDSA(hashes.SHA384()))
        except InvalidSignature:
            return False
        return True


def _by_node(record: Any, key: str) -> dict[int, Any]:
    """Return the values under a key of a record by the nodes under ``nodes``."""
    return dict(zip(record.get("nodes", ()), record.get(key, ()), strict=True))


def _encoded(*statement: Any) -> bytes:
    """Return an encoding that differs for different statements."""
    return json.dumps([_PURPOSE, *statement], default=bytes.hex).encode()


def _digest(*statement: Any) -> str:
    return _hash(_encoded(*statement))


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
