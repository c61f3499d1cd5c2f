"""A held-out domain: no client has it, and its test examples are those of a domain of clients."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fairflower.config import DataConfig, RunConfig
from fairflower.data import DataError, Federation, prepare
from fairflower.errors import ConfigError

pytestmark = pytest.mark.usefixtures("own_home")

SMALL = DataConfig(
    "uci-digits", clients_per_domain=2, examples_per_client=10, test_examples=15, seed=3
)


def names(config: DataConfig) -> list[str]:
    return list(prepare(config).domains)


def test_holding_out_a_domain_does_not_change_the_other_clients():
    whole = prepare(SMALL)
    held_out, *rest = whole.domains
    federation = prepare(dataclasses.replace(SMALL, held_out=held_out))
    alone = prepare(dataclasses.replace(SMALL, domains=",".join(rest)))
    assert federation.domains == tuple(rest) == alone.domains
    assert federation.clients == alone.clients
    for client in range(len(alone.clients)):
        for a, b in zip(
            federation.splits(client, "train", "test"),
            alone.splits(client, "train", "test"),
            strict=True,
        ):
            np.testing.assert_array_equal(a.x, b.x)
            np.testing.assert_array_equal(a.y, b.y)


def test_a_held_out_domain_has_the_same_test_examples_as_a_domain_of_clients():
    whole = prepare(SMALL)
    held_out = whole.domains[-1]
    federation = prepare(dataclasses.replace(SMALL, held_out=held_out))
    here, there = federation.test(held_out), whole.test(held_out)
    np.testing.assert_array_equal(here.x, there.x)
    np.testing.assert_array_equal(here.y, there.y)
    assert federation.held_out_size == len(here.y) == 15
    with pytest.raises(DataError, match="has no domain"):
        federation.test(held_out, "validation")


def test_the_held_out_domain_need_not_be_among_the_chosen_domains():
    first, second, *_ = names(SMALL)
    chosen = dataclasses.replace(SMALL, domains=first, held_out=second)
    assert names(chosen) == [first]
    both = dataclasses.replace(SMALL, domains=f"{first},{second}", held_out=second)
    assert prepare(both).digest == prepare(chosen).digest


def test_only_a_federation_with_a_held_out_domain_has_its_examples(tmp_path):
    federation = prepare(SMALL)
    held_out = prepare(dataclasses.replace(SMALL, held_out=federation.domains[0]))
    for prepared in (federation, held_out):
        of_clients = sum(len(prepared.client_test(c.client_id).y) for c in prepared.clients)
        rows = len(np.load(prepared.folder / "x_test.npy"))
        assert rows == of_clients + prepared.held_out_size
    assert held_out.held_out_size > 0
    assert Federation.from_json(held_out.to_json(), held_out.folder) == held_out
    assert held_out.digest != federation.digest


def test_an_unknown_domain_or_the_only_domain_cannot_be_held_out():
    first = names(SMALL)[0]
    with pytest.raises(DataError, match=r"data.held-out = 'sketch': .*domain 'sketch'"):
        prepare(dataclasses.replace(SMALL, held_out="sketch"))
    with pytest.raises(DataError, match="leaves no domain to train on"):
        prepare(dataclasses.replace(SMALL, domains=first, held_out=first))


def test_clients_cannot_test_a_held_out_domain():
    with pytest.raises(ConfigError, match="no client has this domain"):
        RunConfig.from_flat({"data.held-out": "svhn", "evaluate.by": "clients"})
    RunConfig.from_flat({"data.held-out": "svhn", "evaluate.by": "both"})
