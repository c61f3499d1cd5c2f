"""Federations of sites whose targets are no classes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fairflower.config import DataConfig
from fairflower.data import DataError, Federation
from fairflower.data.sites import as_in, merge_sites, open_site

CONFIG = DataConfig(name="made_up:MadeUp", task="regression:unit=mm")


@pytest.fixture
def sites() -> list[Federation]:
    return [open_site(CONFIG, domain) for domain in ("a", "b")]


def test_sites_keep_their_targets_and_tell_no_counts_of_classes(sites: list[Federation]) -> None:
    merged = merge_sites(sites)
    merged.check()
    assert (merged.task, merged.num_classes) == ("regression:unit=mm", 3)
    assert [(c.num_examples, c.class_counts) for c in merged.clients] == [(24, ()), (24, ())]
    own = sites[1].train(0)
    np.testing.assert_array_equal(as_in(merged, sites[1], own).y, own.y)
    again = Federation.from_json(merged.to_json(), Path("somewhere"))
    assert again.learns is merged.learns


def test_sites_with_other_tasks_or_targets_do_not_fit_together(sites: list[Federation]) -> None:
    first, second = sites
    with pytest.raises(DataError, match=r"tasks differ \(regression:unit=mm at a, multilabel at b"):
        merge_sites([first, replace(second, task="multilabel")])
    with pytest.raises(DataError, match=r"targets differ \(a 3; b 2\)"):
        merge_sites([first, replace(second, num_classes=2)])
    with pytest.raises(DataError, match=r"targets differ \(a x, y, z; b 3\)"):
        merge_sites([replace(first, classes=("x", "y", "z")), second])
