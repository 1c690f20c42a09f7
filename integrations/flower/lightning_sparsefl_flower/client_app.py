"""The ClientApp: hands messages to the node's daemon, and its replies back.

Flower starts a process for each message. This one imports neither torch nor lightning-sparsefl, so that it starts fast,
and it holds neither data nor records, so that code that the server sends sees no more than the messages.
"""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from lightning_sparsefl_flower.frames import ask
from lightning_sparsefl_flower.records import from_records, to_records

app = ClientApp()


@app.query()
@app.train()
@app.evaluate()
def hand_on(message: Message, context: Context) -> Message:
    """Return the daemon's reply.

    Args:
        message: Message of the server.
        context: Context with the node's configuration, whose `socket` is the path of the daemon's socket.
    """
    path = Path(str(context.node_config["socket"]))
    return Message(to_records(ask(path, from_records(message.content))), reply_to=message)
