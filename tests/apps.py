"""Fairflower's ClientApp with some of its answers replaced."""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fairflower.client_app import app as client_app

Handler = Callable[[Message, Context], Message]


def replacing(
    *, train: Handler = client_app, evaluate: Handler = client_app, query: Handler = client_app
) -> ClientApp:
    """The app that answers as ``client_app``, but for the kinds of message given here."""
    app = ClientApp()
    app.train()(train)
    app.evaluate()(evaluate)
    app.query()(query)
    return app
