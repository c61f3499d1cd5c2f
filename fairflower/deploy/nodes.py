"""A trial's SuperNodes: node configs, and what their logs say of unanswered messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fairflower.config import DataConfig
from fairflower.config.text import Scalar
from fairflower.data import Federation, prepare, with_absolute_dir
from fairflower.data.cache import make_data_set
from fairflower.data.sites import merge_sites, open_site
from fairflower.errors import ConfigError, DataError

#: Content of a SuperNode's ``--node-config``.
NodeConfig = dict[str, Scalar]

#: Largest number of processes that a site may start for one message: three restarts.
MOST_STARTS = 4


def unanswered(logs: Mapping[str, str]) -> dict[str, tuple[str, int]]:
    """Return the type of each SuperNode's unanswered message, and its number of processes for it.

    >>> start = "Start `flwr-clientapp` process"
    >>> answered = f"Receiving: query message ... {start} ... Sent successfully"
    >>> unanswered({"a": answered, "b": f"{answered} ... Receiving: train message ... {start}"})
    {'b': ('train', 1)}
    """
    since = {name: log.rpartition("Receiving: ")[1:] for name, log in logs.items()}
    return {
        name: (text.partition(" ")[0], text.count("Start `flwr-clientapp` process"))
        for name, (asked, text) in since.items()
        if asked and "Sent successfully" not in text
    }


def too_many_starts(log: str) -> str:
    """Return a text about a SuperNode that starts process after process for a message, or "".

    Flower gives such a process 60 seconds to start and to report, and then starts another one. On a
    busy machine this would never end.
    """
    kind, starts = unanswered({"": log}).get("", ("", 0))
    if starts <= MOST_STARTS:
        return ""
    return (
        f"has not answered a {kind} message with {MOST_STARTS} processes. Flower replaces each "
        "that does not report within 60 seconds. Try again when this machine is less busy, or with "
        "fewer --sites. Its last messages"
    )


def nodes_with_shares(
    data: DataConfig, sites: int | None = None
) -> tuple[DataConfig, list[NodeConfig]]:
    """Divide a data set among ``sites`` nodes, all of which have access to it.

    Parameters
    ----------
    data
        The data set.
    sites
        Number of nodes. Default: the number of clients in ``data``.

    Returns
    -------
    DataConfig, list of NodeConfig
        The data config with absolute paths, and the config of each node.

    Raises
    ------
    ConfigError
        If the sites cannot be divided equally among the domains, or ``data.imbalance-factor``
        determines their number.
    """
    if sites is not None:
        if data.imbalance_factor > 1:
            raise ConfigError(
                f"--sites {sites}: data.imbalance-factor = {data.imbalance_factor} determines the "
                "number of sites. Remove --sites or data.imbalance-factor."
            )
        domains = len(make_data_set(data).client_domains)
        if sites % domains:
            raise ConfigError(
                f"--sites {sites}: each of the {domains} domains of {data.name} gets the same "
                f"number of sites. Choose {domains}, {2 * domains}, ..., or select fewer domains "
                "with data.domains."
            )
        data = replace(data, clients_per_domain=sites // domains)
    data = with_absolute_dir(data)
    number = len(prepare(data).clients)
    return data, [{"partition-id": k, "num-partitions": number} for k in range(number)]


def nodes_with_folders(given: Sequence[str], data: DataConfig) -> list[NodeConfig]:
    """Parse ``["svhn=/data/svhn", "usps=/data/usps"]``: a domain and a folder per site.

    The folders are opened in the same way as at the sites, so that errors appear before any process
    starts. Several sites may have the same domain or the same folder.

    Parameters
    ----------
    given
        Values of ``--site``.
    data
        Data config, which describes the files in the folders.

    Raises
    ------
    ConfigError
        If a value is not ``domain=folder``, a folder does not exist, or there are fewer than two
        sites.
    DataError
        If the data in a folder cannot be used or do not match the data of the other sites.
    """
    if data.dir:
        raise ConfigError(
            f"--data-dir {data.dir}: cannot be combined with --site, which sets the folder of "
            "each site. Remove --data-dir."
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
                    f"--site {given[k]}: another site's domain is spelled {other!r}. Use the same "
                    "spelling for all sites of a domain."
                )
    merge_sites([_opened(data, domain, folder) for domain, folder in places])
    return [{"domain": domain, "data-dir": str(folder)} for domain, folder in places]


def _place(text: str) -> tuple[str, Path]:
    domain, _, name = (part.strip() for part in text.partition("="))
    if not (domain and name):
        raise ConfigError(
            f"--site {text}: expected <domain>=<folder>, for example svhn=/data/svhn."
        )
    if '"' in text:
        raise ConfigError(
            f"--site {text}: it contains a double quote, which Flower's node configs do not allow. "
            "Rename the domain or the folder."
        )
    folder = Path(name).expanduser().absolute()
    if not folder.is_dir():
        raise ConfigError(f"--site {text}: there is no folder {folder}.")
    return domain, folder


def _opened(data: DataConfig, domain: str, folder: Path) -> Federation:
    data = replace(data, dir=str(folder))
    try:
        if make_data_set(replace(data, domains="")).folder is None:
            raise DataError(
                f"{data.name} is not read from a folder. Choose --data npz, --data images, or "
                "another data set that is read from a folder."
            )
        return open_site(data, domain)
    except DataError as error:
        raise DataError(f"--site {domain}={folder}: {error}") from error
