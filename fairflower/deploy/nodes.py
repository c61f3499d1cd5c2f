"""The configs of a trial's SuperNodes: shares of one data set, or folders of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fairflower.config import DataConfig, Scalar
from fairflower.data import Federation, prepare, resolve
from fairflower.data.cache import make_data_set
from fairflower.data.sites import open_site, unite
from fairflower.errors import ConfigError, DataError

#: What a SuperNode gets as ``--node-config``.
NodeConfig = dict[str, Scalar]


def nodes_with_shares(
    data: DataConfig, sites: int | None = None
) -> tuple[DataConfig, list[NodeConfig]]:
    """Divide one data set, which all nodes have, among ``sites`` of them.

    By default they are as many as ``data`` says. What comes back describes the same data to
    processes elsewhere, and each client's node; ``ConfigError`` if the domains cannot share
    the sites equally.
    """
    if sites is not None:
        domains = len(prepare(data).domains)
        if sites % domains:
            raise ConfigError(
                f"--sites {sites}: the {domains} domains of {data.name} share the sites equally. "
                f"Choose {domains}, {2 * domains}, ..., or fewer domains with data.domains."
            )
        data = replace(data, clients_per_domain=sites // domains)
    data = resolve(data)
    number = len(prepare(data).clients)
    return data, [{"partition-id": k, "num-partitions": number} for k in range(number)]


def nodes_with_folders(given: Sequence[str], data: DataConfig) -> list[NodeConfig]:
    """Read ``["svhn=/data/svhn", "usps=/data/usps"]``: sites with data of their own.

    The folders are opened as the sites will open them, so that what is wrong with one is
    said before any process starts: ``ConfigError`` if one is not of that form or not there, or
    if there are fewer than two, and ``DataError`` if its data cannot be used, or do not go with
    the others'. Sites may share a domain, or a folder; ``data`` says what is in the folders.
    """
    if data.dir:
        raise ConfigError(
            f"--data-dir {data.dir}: with --site, every site has a folder of its own."
        )
    if len(given) == 1:
        raise ConfigError(f"--site {given[0]}: a federation needs at least two sites.")
    places = [_place(text) for text in given]
    for k, (domain, folder) in enumerate(places):
        for other, elsewhere in places[:k]:
            if domain == other and folder == elsewhere:
                raise ConfigError(f"--site {given[k]} is given twice.")
            if domain != other and domain.casefold() == other.casefold():
                raise ConfigError(
                    f"--site {given[k]}: another site's domain is written {other!r}. Sites of "
                    "one domain have to spell it alike."
                )
    unite([_opened(data, domain, folder) for domain, folder in places])
    return [{"domain": domain, "data-dir": str(folder)} for domain, folder in places]


def _place(text: str) -> tuple[str, Path]:
    domain, _, name = (part.strip() for part in text.partition("="))
    if not (domain and name):
        raise ConfigError(f"--site {text}: expected <domain>=<folder>, like svhn=/data/svhn.")
    if '"' in text:
        raise ConfigError(f"--site {text}: Flower cannot read a node config with quotes in it.")
    folder = Path(name).expanduser().absolute()
    if not folder.is_dir():
        raise ConfigError(f"--site {text}: there is no folder {folder}.")
    return domain, folder


def _opened(data: DataConfig, domain: str, folder: Path) -> Federation:
    data = replace(data, dir=str(folder))
    try:
        if make_data_set(replace(data, domains="")).folder is None:
            raise DataError(
                f"{data.name} is read from no folder. Choose --data npz, images or a benchmark "
                "with files."
            )
        return open_site(data, domain)
    except DataError as error:
        raise DataError(f"--site {domain}={folder}: {error}") from error
