"""The clients: an ordinary ClientApp."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from one_strategy.task import Net, accuracy, load_data, train

app = ClientApp()


@app.train()
def fit(message: Message, context: Context) -> Message:
    """Train the received model on the client's data."""
    net, (batches, _, _) = received(message), load_data(*partition(context))
    loss = train(net, batches, float(context.run_config["lr"]))
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(batches.dataset)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


@app.evaluate()
def test(message: Message, context: Context) -> Message:
    """Test the received model on the client's data."""
    _, x, y = load_data(*partition(context))
    correct = accuracy(received(message), x, y)
    metrics = MetricRecord({"accuracy": correct, "num-examples": len(y)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def received(message: Message) -> Net:
    """Return the network with the arrays of a message."""
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    return net


def partition(context: Context) -> tuple[int, int]:
    """Return the client's number, and the number of clients."""
    node = context.node_config
    return int(node["partition-id"]), int(node["num-partitions"])
