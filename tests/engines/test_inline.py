"""The inline engine: what clients get from it, and what a debugger gets."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

import fairflower as ff
from fairflower.engines.inline import InlineGrid


def test_a_clients_mutation_of_a_message_does_not_reach_the_next_client():
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        seen = message.content["config"].get("seen", 0)
        message.content["config"]["seen"] = 1
        return Message(RecordDict({"a": ConfigRecord({"seen": seen})}), reply_to=message)

    grid = InlineGrid(app, 3)
    content = RecordDict({"config": ConfigRecord()})
    messages = [Message(content, node, "query") for node in grid.get_node_ids()]
    assert [r.content["a"]["seen"] for r in grid.send_and_receive(messages)] == [0, 0, 0]


def test_a_debugger_gets_the_clients_own_exception():
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        raise MemoryError

    grid = InlineGrid(app, 1, raise_errors=True)
    (node,) = grid.get_node_ids()
    with pytest.raises(MemoryError):
        grid.send_and_receive([Message(RecordDict(), node, "train")])


def test_a_reloaded_network_and_metric_are_used_and_threads_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook: the same name, whose code has changed."""

    def write(width: int) -> None:
        (tmp_path / "notebook_net.py").write_text(
            "from torch import nn\n"
            "from fairflower.models import Classifier\n"
            "class Net(Classifier):\n"
            "    def __init__(self, num_classes, shape):\n"
            "        super().__init__()\n"
            f"        self.body = nn.Linear(shape[0] * shape[1] * shape[2], {width})\n"
            f"        self.head = nn.Linear({width}, num_classes)\n"
            "    def features(self, x):\n"
            "        return self.body(x.flatten(1))\n"
            f"def width(logits, labels): return {width}\n"
        )

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        for width in (3, 5):
            write(width)
            importlib.invalidate_caches()
            module = importlib.import_module("notebook_net")
            module = importlib.reload(module)
            run = ff.run(
                strategy="fedavg",
                rounds=1,
                model="notebook_net:Net",
                engine="inline",
                output_dir=tmp_path / "runs",
                settings={"evaluate.metrics": "notebook_net:width", "evaluate.by": "clients"},
            )
            assert set(run.history.query("metric == 'width'")["value"]) == {width}
            assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
