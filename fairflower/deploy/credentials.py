"""Certificates and keys in the formats that Flower's SuperLink and SuperNodes use.

The files have the same formats as those of ``openssl`` and ``ssh-keygen``, but these programs are
not needed. The guide ``docs/deployment.md`` shows both ways.
"""

import errno
import os
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fairflower.errors import ConfigError, logger

MAX_DAYS = 36_500  # longest validity of a certificate: a hundred years
SOON = timedelta(days=30)  # time before the end of a certificate in which a site warns


class Certificates(NamedTuple):
    """PEM files of a SuperLink. Sites get only ``authority``."""

    authority: Path
    certificate: Path
    key: Path


def make_certificates(folder: Path, hosts: Sequence[str], days: int = 365) -> Certificates:
    """Write the certificate of a new certificate authority and a server certificate signed by it.

    The authority's key signs only this certificate and is discarded. The files are ``ca.crt``,
    ``server.pem`` and ``server.key``, which only its owner can read.

    ``hosts`` are DNS names and IP addresses of the server, at least one. The certificates are valid
    for ``days`` days. Raises ``ConfigError`` if a host is neither, and ``FileExistsError`` if one
    of the files exists; nothing is overwritten.
    """
    if not hosts:
        raise ValueError("hosts is empty: a certificate needs at least one host.")
    alternatives = [_alternative(host) for host in hosts]
    files = Certificates(folder / "ca.crt", folder / "server.pem", folder / "server.key")
    authority_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority = _name("fairflower authority")
    root = (
        _certificate(authority, authority, authority_key, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    server = (
        _certificate(_name("fairflower server"), authority, server_key, days)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(issuer, critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = server_key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = {files.authority: root.public_bytes(pem), files.certificate: server.public_bytes(pem)}
    _write_new(public, {files.key: private})
    return files


def check_dates(path: Path) -> None:
    """Raise ``ConfigError`` if no certificate in a PEM file is valid now; warn if it soon ends."""
    now, new = datetime.now(UTC), "get a new one from the server (fairflower deploy certificates)"
    try:
        dates = [
            (certificate.not_valid_before_utc, certificate.not_valid_after_utc)
            for certificate in x509.load_pem_x509_certificates(path.read_bytes())
        ]
    except ValueError as error:
        raise ConfigError(f"{path}: no certificate in PEM format ({error}).") from error
    begins, ends = max(dates, key=lambda pair: (pair[0] <= now, pair[1]))
    said = f"{path}: valid from {begins:%Y-%m-%d} to {ends:%Y-%m-%d}"
    if not begins <= now <= ends:
        raise ConfigError(f"{said}, but the clock says {now:%Y-%m-%d}. Set the clock, or {new}.")
    if ends - now < SOON:
        logger.warning("%s. Then this site cannot reach the server: %s.", said, new)


def make_key_pair(path: Path) -> Path:
    """Write a SuperNode's private key to ``path`` and its public key to ``<path>.pub``.

    Both keys are in OpenSSH's format and use the curve P-384, as Flower requires. Returns the path
    of the public key, which the server's operator registers. Raises ``FileExistsError`` if one of
    the files exists; nothing is overwritten.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    openssh = serialization.PrivateFormat.OpenSSH
    public = path.with_name(f"{path.name}.pub")
    shown = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    secret = key.private_bytes(serialization.Encoding.PEM, openssh, serialization.NoEncryption())
    _write_new({public: shown}, {path: secret})
    return public


def make_secret(path: Path) -> Path:
    """Write a random secret, with which a SuperLink recognizes its SuperExec; return its path.

    Raises ``FileExistsError`` if the file exists.
    """
    _write_new({}, {path: os.urandom(32)})
    return path


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    # Valid from yesterday, because the clocks of sites may be slow.
    now = datetime.now(UTC)
    if not 1 <= days <= MAX_DAYS:
        raise ConfigError(f"--days {days}: expected a number from 1 to {MAX_DAYS}.")
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    never = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    return x509.KeyUsage(
        **dict.fromkeys((*never, "encipher_only", "decipher_only"), False),
        **dict.fromkeys(("key_cert_sign", "crl_sign"), signs_certificates),
        digital_signature=not signs_certificates,
    )


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        # The last part of a host name is never a number: 192.168.1.256 is a mistyped address.
        if not re.fullmatch(r"(\*\.)?([\w-]+\.)*(?!\d+$)[\w-]+", host, re.ASCII):
            raise ConfigError(
                f"{host!r} is neither a host name nor an IP address. Give, for example, "
                "fl.example.org or 192.0.2.1, without https:// and without a port."
            ) from None
        return x509.DNSName(host)


def _write_new(public: Mapping[Path, bytes], secret: Mapping[Path, bytes]) -> None:
    """Write all files, or none if one exists; only their owner can read ``secret`` files."""
    contents = {**public, **secret}
    for path in contents:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    for path, content in contents.items():
        opener = partial(os.open, mode=0o600 if path in secret else 0o644)
        with open(path, "xb", opener=opener) as file:
            file.write(content)
