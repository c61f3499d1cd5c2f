"""Federations of sites, whose data neither the server nor another site can read.

Each site describes its data (`open_site`). The server merges the descriptions (`merge_sites`) and
sends the result to all sites, so that they can use the common class numbers and image channels
(`as_in`).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from reprlib import repr as shortened

import numpy as np

from fairflower.config import DataConfig
from fairflower.config.text import names_in, unknown
from fairflower.data.cache import make_data_set, prepare
from fairflower.data.data_set import check_classes
from fairflower.data.federation import ClientInfo, Federation, Ints, Split
from fairflower.data.files import places
from fairflower.errors import DataError


def open_site(config: DataConfig, domain: str, encoding: str = "") -> Federation:
    """Open a site's data as a federation with a single client that has all the data.

    ``config`` is the run's ``data`` table, with the site's ``dir``. The site trains on all its
    training examples unless ``fraction`` or ``examples_per_client`` is set, whatever the data set's
    default is. Settings that divide a data set among clients are ignored. ``domain`` is a name for
    the site's data; if the folder has several domains, the name of one of these. Rows of tables are
    encoded by ``encoding``; without it, the federation's has the site's sums.

    Raises ``DataError`` if the data cannot be used, if fewer than ``smallest_group`` examples share
    the name of a class or group, or if the run excludes this domain.
    """
    if config.domains and domain not in names_in(config.domains):
        raise DataError(
            f"The run's data.domains = {config.domains!r} does not include {domain!r}. Add it to "
            "data.domains, or change the domain in --node-config.",
            public=True,
        )
    config = replace(config, domains="", held_out="", clients_per_domain=1, imbalance_factor=1)
    config = replace(config, dirichlet_alpha=0.0, corrupted_clients=0)
    data_set = make_data_set(config)
    domains = data_set.domains
    if domain not in domains and len(domains) > 1:
        found = f"{len(domains)} domains, and none has the name of the site's domain"
        raise DataError(unknown("domain", domain, domains), public=f"data-dir has {found}")
    own = domain if domain in domains else domains[0]
    config = replace(config, domains=own)
    if data_set.partitioner() is not None:
        raise DataError(
            f"data.name = {config.name!r} is divided by a partitioner, but the data of a site are "
            "not divided. Choose another data set, for example images or npz."
        )
    limited = data_set.fraction is not None or data_set.domain_size is not None
    if limited and not config.examples_per_client:
        available = len(data_set.labels(own, "train"))
        count = int((config.fraction or 1.0) * available + 1e-9)
        if not count:
            raise DataError(
                f"data.fraction = {config.fraction:g} of the site's {available} training examples "
                "is less than one. Raise it, or leave it at 0 to train on all of them."
            )
        config = replace(config, fraction=0.0, examples_per_client=count)
    site = prepare(config, site=True, least=config.smallest_group, encoding=encoding)
    (client,) = site.clients
    return replace(
        site,
        domains=(domain,),
        # The server does not learn the path of a site's files.
        sources=("a site's own",),
        clients=(replace(client, domain=domain),),
    )


def merge_sites(sites: Sequence[Federation]) -> Federation:
    """Return the federation of these sites, in which site k is client k.

    Classes are numbered in the order of their sorted names; without names, the number of classes is
    the largest at any site. Images have three channels if any site has color images. Raises
    ``DataError`` if the sites' examples differ in size, or if only some sites name their classes.
    """
    merged = max(sites, key=lambda site: site.shape[0])
    _check_compatible(sites, merged)
    classes = _merged(site.classes for site in sites)
    merged = replace(
        merged,
        domains=(),
        num_classes=len(classes) or max(site.num_classes for site in sites),
        classes=classes,
        group_names=_merged(site.group_names for site in sites),
        fingerprint="",
        test_sizes=(),
        validation_sizes=(),
        held_out="",  # a site has only its own domain
        held_out_size=0,
        clients=(),
    )
    if merged.learns.classes:
        check_classes(merged.name, merged.num_classes)
    return _grown(merged, sites, all(site.validation_sizes for site in sites))


def joined(merged: Federation, site: Federation) -> Federation:
    """Return the federation with a site that joins during a run, as its last client.

    Raises ``DataError`` if the model does not fit the site's examples: it has the classes and the
    channels of the sites with which the run began.
    """
    _check_compatible((merged, site), merged)
    if site.shape[0] > merged.shape[0]:
        raise DataError("it has color images, and the sites with which the run began have none.")
    beyond = [name for name in site.classes if name not in merged.classes]
    beyond += [str(k) for k in range(merged.num_classes, site.num_classes)]
    beyond += [name for name in site.group_names if name not in merged.group_names]
    if beyond:
        raise DataError(f"it has classes or groups that the run lacks: {', '.join(beyond)}.")
    return _grown(merged, (site,), bool(merged.validation_sizes))


def _grown(merged: Federation, sites: Sequence[Federation], validated: bool) -> Federation:
    """Return the federation with these sites as its last clients."""
    sizes: dict[str, Counter[str]] = {"test": Counter(), "validation": Counter()}
    for split, part in product(sizes, (merged, *sites)):
        sizes[split].update(dict(zip(part.domains, part.sizes(split), strict=False)))
    domains = tuple(dict.fromkeys(name for part in (merged, *sites) for name in part.domains))
    clients = (
        site_client_info(k, site, merged) for k, site in enumerate(sites, len(merged.clients))
    )
    return replace(
        merged,
        domains=domains,
        sources=("the sites' own",) * len(domains),
        test_sizes=tuple(sizes["test"][name] for name in domains),
        validation_sizes=tuple(sizes["validation"][name] for name in domains if validated),
        clients=(*merged.clients, *clients),
    )


def _check_compatible(sites: Sequence[Federation], most: Federation) -> None:
    """Raise ``DataError`` if the sites' examples cannot be used together.

    ``most`` is a site with the largest number of channels.
    """
    if len(tasks := {site.task: site.domains[0] for site in sites}) > 1:
        texts = (f"{task} at {domain}" for task, domain in tasks.items())
        raise DataError(f"The sites' tasks differ ({', '.join(texts)}). Set data.task.")
    if not most.learns.classes and len({(s.num_classes, s.classes) for s in sites}) > 1:
        texts = (f"{s.domains[0]} {', '.join(s.classes) or s.num_classes}" for s in sites)
        raise DataError(
            f"The sites' targets differ ({'; '.join(texts)}). All need the same, in the same "
            "order; for masks, set data.name = 'masks:classes=NUMBER'."
        )
    sizes = {_size(site): site.domains[0] for site in sites}
    if len(sizes) > 1:
        texts = (f"{domain} {'x'.join(map(str, size[1:]))}" for size, domain in sizes.items())
        kind, images = sites[0].kind, "Set data.image-size to resize them"
        remedy = images if kind == "images" else "Give all examples the same size"
        raise DataError(f"The sites' {kind} differ in size ({', '.join(texts)}). {remedy}.")
    for site in sites:  # grayscale images have the first of three channels' constants
        for name in ("mean", "std", "augment"):
            own, common = getattr(site, name), getattr(most, name)
            if own != (common if name == "augment" else common[: len(own)]):
                raise DataError(
                    f"Sites {most.domains[0]} and {site.domains[0]} declare different constants: "
                    f"{name} = {shortened(common)} and {shortened(own)}. Use the same data class "
                    "and version of fairflower at all sites."
                )
    if len({bool(site.classes) for site in sites}) > 1:
        raise DataError(
            "Some sites name their classes, and others only number them. Use class names at all "
            "sites."
        )
    if len({site.groups for site in sites}) > 1:
        lacking = ", ".join(site.domains[0] for site in sites if not site.groups)
        raise DataError(
            f"These sites do not report groups of people: {lacking}. Start their SuperNodes with "
            "this version of fairflower, or remove data.groups."
        )


def as_in(merged: Federation, site: Federation, split: Split) -> Split:
    """Convert a site's split to the channels and class numbers of the merged federation."""
    x, y = split
    gray = merged.kind == "images" and x.shape[1] < merged.shape[0]
    y = _numbers(site, merged)[y] if merged.learns.classes else y
    return Split(np.asarray(np.repeat(x, merged.shape[0], axis=1)) if gray else x, y)


def _merged(names: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return all sites' names of classes or groups of people, sorted if the sites' names differ."""
    known = set(names)
    return known.pop() if len(known) == 1 else tuple(sorted({n for own in known for n in own}))


def groups_in(merged: Federation, site: Federation, groups: Ints) -> Ints:
    """Convert group numbers of a site to the group numbers of the merged federation."""
    return places(site.group_names, merged.group_names)[groups]


def site_client_info(client_id: int, site: Federation, merged: Federation) -> ClientInfo:
    """Return a site as a client of the merged federation, with its class numbers."""
    (client,) = site.clients
    if not merged.learns.classes:
        return replace(client, client_id=client_id)
    counts = np.zeros(merged.num_classes, np.int64)
    counts[_numbers(site, merged)] = client.class_counts
    return replace(client, client_id=client_id, class_counts=tuple(counts.tolist()))


def fits(site: Federation, merged: Federation) -> bool:
    """Return whether a site can train the model of the merged federation on its examples."""
    channels = site.shape[0] if site.kind == "images" else 0
    return _size(site) == _size(merged) and channels <= merged.shape[0]


def _size(site: Federation) -> tuple[str | int, ...]:
    """Return what must be the same at all sites; channels and columns of tables may differ."""
    differs = site.kind == "images" or site.encoding
    return site.kind, *(site.shape[1:] if differs else site.shape)


def _numbers(site: Federation, merged: Federation) -> Ints:
    """Return, for each class of a site, its number in the merged federation."""
    if not site.classes:
        return np.arange(site.num_classes)
    return places(site.classes, merged.classes)
