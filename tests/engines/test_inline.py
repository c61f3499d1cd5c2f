"""The inline engine: separate messages, exceptions of clients, and reloaded modules."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from parametrize import at_night

import fairflower as ff
from fairflower.engines.inline import InlineGrid
from fairflower.flower_compat import set_ids


def test_changes_of_a_message_by_a_client_do_not_reach_the_next_client():
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


def test_raise_errors_raises_the_exception_of_the_client():
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        raise MemoryError

    grid = InlineGrid(app, 1, raise_errors=True)
    (node,) = grid.get_node_ids()
    with pytest.raises(MemoryError):
        grid.send_and_receive([Message(RecordDict(), node, "train")])


@pytest.mark.parametrize("engine", ["inline", at_night("ray")])
def test_reloaded_models_and_metrics_are_used_and_the_number_of_threads_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
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
                engine=engine,
                output_dir=tmp_path / "runs",
                settings={"evaluate.metrics": "notebook_net:width", "evaluate.by": "server"},
            )
            assert set(run.history.query("metric == 'width'")["value"]) == {width}
            assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)


def test_a_reply_that_names_no_message_answers_the_one_that_was_sent():
    """Error replies of Flower's LocalDpMod name none."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        reply = Message(RecordDict(), reply_to=message)
        set_ids(reply, reply_to_message_id="")
        return reply

    grid = InlineGrid(app, 2)
    messages = [Message(RecordDict(), node, "query") for node in grid.get_node_ids()]
    replies = list(grid.send_and_receive(messages))
    ids = [message.metadata.message_id for message in messages]
    assert [reply.metadata.reply_to_message_id for reply in replies] == ids
