"""Registration of clients at the beginning of a run, and messages without replies."""

from __future__ import annotations

import threading
import time

import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from fairflower.client_app import app as client_app
from fairflower.engines.inline import InlineGrid, send_and_receive
from fairflower.errors import ConfigError
from fairflower.server.discovery import NodeDiscovery
from fairflower.server.registration import register_clients


class LateGrid(InlineGrid):
    """Shows one more node at every query."""

    simulated = False

    def get_node_ids(self):
        self.shown = min(getattr(self, "shown", 0) + 1, len(self.contexts))
        return list(self.contexts)[: self.shown]


def test_registration_waits_for_all_clients():
    grid = LateGrid(client_app, 5)
    registry = register_clients(NodeDiscovery(grid, 30, threading.Event()), 5)
    assert list(registry.nodes) == [0, 1, 2, 3, 4]
    assert grid.shown == 5


def test_a_node_without_partition_id_is_named():
    grid = InlineGrid(client_app, 2)
    node = list(grid.contexts)[1]
    grid.contexts[node].node_config = {}
    with pytest.raises(
        ConfigError, match=rf"missing: \[1\](?s:.*)node {node}: Node .*partition-id"
    ):
        register_clients(NodeDiscovery(grid, 0.2, threading.Event()), 2)


def test_waiting_for_replies_ends_with_the_timeout():
    class Silent(InlineGrid):
        def pull_messages(self, message_ids):
            return []

    grid = Silent(client_app, 1)
    (node,) = grid.get_node_ids()
    message = Message(RecordDict({"config": ConfigRecord()}), node, "query")
    assert send_and_receive(grid, [message], timeout=0.1, stop=threading.Event()) == []


@pytest.mark.parametrize("sizes", [(4, 5), (5, 4)])
def test_nodes_that_disagree_on_the_number_of_clients_are_named(sizes):
    grid = InlineGrid(client_app, 2)
    for node, size in zip(grid.contexts, sizes, strict=True):
        grid.contexts[node].node_config["num-partitions"] = size
    with pytest.raises(ConfigError, match=r"num-partitions is 4 at node \d+ and 5 at node \d+"):
        register_clients(NodeDiscovery(grid, 0.2, threading.Event()), 4)


def test_the_timeout_is_not_extended_by_replies_and_does_not_apply_to_inline_clients():
    class Slow(InlineGrid):
        def pull_messages(self, message_ids):
            time.sleep(0.02)
            return list(super().pull_messages(message_ids))[:1]

    class Elsewhere(Slow):
        computes_replies = False

    def answered(grid):
        asked = [
            Message(RecordDict({"config": ConfigRecord()}), node, "query")
            for node in grid.get_node_ids()
        ]
        return len(send_and_receive(grid, asked, timeout=0.05, stop=threading.Event()))

    assert answered(Slow(client_app, 20)) == 20
    assert answered(Elsewhere(client_app, 20)) < 20
