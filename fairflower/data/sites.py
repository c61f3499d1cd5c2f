"""Federations of sites that have data of their own, and none of each other's.

`prepare` divides a benchmark; whoever calls it has all of the data. A site of a real
federation has its own, and the server has none. So each site describes what it has
(`open_site`), the server puts the descriptions together (`merge_sites`) and sends every site
what it cannot know alone, which is how the classes are numbered and how many channels
images have (`as_in`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fairflower.config import DataConfig, unknown
from fairflower.data.cache import make_data_set, prepare
from fairflower.data.federation import ClientInfo, Federation, Ints, Split
from fairflower.errors import DataError


def open_site(config: DataConfig, domain: str) -> Federation:
    """A site's data as a federation of one client, who has all of it.

    ``config`` is the run's, with the site's own ``dir``. Unless it sets ``fraction`` or
    ``examples_per_client``, the site trains on all its training images, whatever the data set's
    default is; what divides a benchmark among clients is not used (``clients_per_domain``,
    ``dirichlet_alpha``, ``corrupted_clients``, ``imbalance_factor``). ``domain`` is what the site
    calls its images: if the folder has several domains, one of them. ``DataError`` if the data
    cannot be used, or the run is not for this domain.
    """
    if config.domains and domain not in [name.strip() for name in config.domains.split(",")]:
        raise DataError(f"The run is for data.domains = {config.domains!r}, not for {domain!r}.")
    config = replace(
        config,
        domains="",
        clients_per_domain=1,
        dirichlet_alpha=0.0,
        corrupted_clients=0,
        imbalance_factor=1,
    )
    found = make_data_set(config).all_domains()
    if domain not in found and len(found) > 1:
        raise DataError(unknown("domain", domain, found))
    config = replace(config, domains=domain if domain in found else found[0])
    data_set = make_data_set(config)
    if data_set.partitioner() is not None:
        raise DataError(
            f"data.name = {config.name!r} is divided by a partitioner, and a site has data of its "
            "own. Choose another data set, such as images or npz."
        )
    limited = data_set.fraction is not None or data_set.domain_size is not None
    if limited and not config.examples_per_client:
        available = len(data_set.labels(data_set.domains[0], "train"))
        whole = int((config.fraction or 1.0) * available + 1e-9)
        config = replace(config, fraction=0.0, examples_per_client=whole)
    site = prepare(config, site=True)
    (client,) = site.clients
    return replace(
        site,
        domains=(domain,),
        # Where a site keeps its files is nobody else's business.
        sources=("a site's own",),
        clients=(replace(client, domain=domain),),
    )


def merge_sites(sites: Sequence[Federation]) -> Federation:
    """The federation of these sites: client k is the k-th.

    Classes with names are numbered in the names' order; the others are as many as the
    largest number says. Grey images count as colour if any site has colour. ``DataError`` if the
    sites' examples differ in size, or only some sites name their classes.
    """
    sizes = {_size(site): site.domains[0] for site in sites}
    if len(sizes) > 1:
        listing = ", ".join(
            f"{domain} {'x'.join(map(str, size[1:]))}" for size, domain in sizes.items()
        )
        kind = sites[0].kind
        remedy = "Set data.image-size to resize them" if kind == "images" else "Give all the same"
        raise DataError(f"The sites' {kind} differ in size ({listing}). {remedy}.")
    if len({bool(site.classes) for site in sites}) > 1:
        raise DataError("Some sites name their classes and some number them.")
    whole = max(sites, key=lambda site: site.shape[0])
    classes = whole.classes
    if any(site.classes != classes for site in sites):
        classes = tuple(sorted({name for site in sites for name in site.classes}))
    whole = replace(
        whole,
        num_classes=len(classes) or max(site.num_classes for site in sites),
        classes=classes,
        fingerprint="",
    )
    domains = tuple(dict.fromkeys(site.domains[0] for site in sites))

    def summed(sizes: str) -> tuple[int, ...]:
        """By domain; none if some site has none."""
        own = [(site.domains[0], *getattr(site, sizes)) for site in sites]
        if any(len(one) < 2 for one in own):
            return ()
        return tuple(sum(one[1] for one in own if one[0] == domain) for domain in domains)

    return replace(
        whole,
        domains=domains,
        sources=("the sites' own",) * len(domains),
        test_sizes=summed("test_sizes"),
        clients=tuple(site_client_info(k, site, whole) for k, site in enumerate(sites)),
        validation_sizes=summed("validation_sizes"),
    )


def as_in(whole: Federation, site: Federation, split: Split) -> Split:
    """A site's images and labels with the channels and classes of the whole federation."""
    x, y = split
    grey = whole.kind == "images" and x.shape[1] < whole.shape[0]
    numbers = _numbers(site, whole)[y]
    return Split(np.asarray(np.repeat(x, whole.shape[0], axis=1)) if grey else x, numbers)


def site_client_info(client_id: int, site: Federation, whole: Federation) -> ClientInfo:
    """A site as a client of the whole federation, with its numbers of the classes."""
    (client,) = site.clients
    counts = np.zeros(whole.num_classes, np.int64)
    counts[_numbers(site, whole)] = client.class_counts
    return replace(client, client_id=client_id, class_counts=tuple(counts.tolist()))


def fits(site: Federation, whole: Federation) -> bool:
    """Whether a site's examples can be trained on with the whole federation's model."""
    return _size(site) == _size(whole) and site.shape[0] <= whole.shape[0]


def _size(site: Federation) -> tuple[str | int, ...]:
    """What all sites have to have in common of their examples: not the channels of images."""
    return site.kind, *(site.shape[1:] if site.kind == "images" else site.shape)


def _numbers(site: Federation, whole: Federation) -> Ints:
    """The whole federation's number of each of the site's classes."""
    if not site.classes:
        return np.arange(site.num_classes)
    return np.array([whole.classes.index(name) for name in site.classes], np.int64)
