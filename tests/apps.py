"""ClientApps that replace some handlers of fairflower's app."""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fairflower.client_app import app as client_app

Handler = Callable[[Message, Context], Message]


def app_with_handlers(
    *, train: Handler = client_app, evaluate: Handler = client_app, query: Handler = client_app
) -> ClientApp:
    """Return a ClientApp with the given handlers, and those of ``client_app`` for the others."""
    app = ClientApp()
    app.train()(train)
    app.evaluate()(evaluate)
    app.query()(query)
    return app
