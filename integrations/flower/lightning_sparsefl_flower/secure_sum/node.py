"""A node whose clients' updates leave it in sums only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.aggregation.reducers import Reducer
from lightning_sparsefl.federated.exchange.flat import Layout
from lightning_sparsefl.federated.exchange.orders import Answer, Order
from lightning_sparsefl.federated.local.node import Node
from lightning_sparsefl.types import Update
from lightning_sparsefl.wire import Codec

from lightning_sparsefl_flower.secure_sum.client_sum import ClientSum, Given
from lightning_sparsefl_flower.secure_sum.errors import SecureSumRefused
from lightning_sparsefl_flower.secure_sum.party import Party
from lightning_sparsefl_flower.secure_sum.policy import Policy
from lightning_sparsefl_flower.secure_sum.signing import UNSIGNED, Signing


class SecureNode:
    """Keeps the updates of a node's clients, and takes part in sums of them.

    An update is given to one sum, and forgotten as soon as the client has revealed its shares. The sums of one round
    are one or two: where votes differ, the first one counts them.

    Args:
        layout: Layout of the model.
        codec: Codec of the run's model.
        reducer: Reducer of the run.
        policy: What the node demands of a sum.
        signing: With which keys the node signs and checks.
    """

    def __init__(
        self,
        layout: Layout,
        codec: Codec,
        reducer: Reducer,
        policy: Policy,
        signing: Signing = UNSIGNED,
    ) -> None:
        self.layout, self.codec, self.reducer, self.policy, self.signing = layout, codec, reducer, policy, signing
        self._given: dict[int, Given] = {}
        self._counted: set[int] = set()
        """Clients whose votes are counted, and whose update is not yet summed."""
        self._sums: dict[int, ClientSum] = {}
        self._steps: dict[str, Callable[[int, bytes], bytes]] = {
            "advertise": self._advertise,
            "share": lambda client, payload: self._sum_of(client).share(payload),
            "mask": lambda client, payload: self._sum_of(client).mask(payload),
            "confirm": lambda client, payload: self._sum_of(client).party.confirm(payload),
            "reveal": self._reveal,
        }

    def keep(self, order: Order, answer: Answer) -> Answer:
        """Keep the update of an answer, and return the answer without it.

        Args:
            order: Order of the task `train`.
            answer: Answer of the node.

        Raises:
            InvalidOption: If the update has parts that would reach the server by themselves.
        """
        if order.task != "train" or answer.update is None:
            return answer
        if answer.update.shared is not None:
            raise InvalidOption(
                f"The update of client {order.client} has `shared`, which a secure sum does not hide; expected a "
                "method whose server keeps nothing of a client's upload, or no `secure_sum`."
            )
        bare = Update(weights={}, metrics=answer.update.metrics)
        self._sums.pop(order.client, None)
        self._counted.discard(order.client)
        self._given[order.client] = Given(order, answer.update)
        return replace(answer, update=bare, up=self.codec.update_size(bare, order.message))

    def step(self, name: str, client: int, payload: bytes) -> bytes:
        """Take a client's next step in a sum.

        Args:
            name: Name of the step: advertise, share, mask, confirm or reveal.
            client: Number of the client.
            payload: What the server sends with it.

        Raises:
            SecureSumRefused: If the step is not the client's next one, or what the server sends is wrong.
            TooFewClients: If too few clients are left.
        """
        if name not in self._steps:
            raise SecureSumRefused(f"A secure sum has no step {name[:20]!r}; expected one of {list(self._steps)}.")
        return self._steps[name](client, payload)

    def _advertise(self, client: int, payload: bytes) -> bytes:
        if client not in self._given or client in self._sums:
            raise SecureSumRefused(f"Client {client} has no update that is not in a sum yet.")
        given, again = self._given[client], client in self._counted
        least = self.policy.min_coverage
        self._sums[client] = ClientSum(given, self.layout, self.reducer, self._party, least, payload, again)
        return self._sums[client].advertise()

    def _party(self, client: int, context: bytes) -> Party:
        return Party(client, context, self.policy, self.signing.signer, self.signing.verifier)

    def _sum_of(self, client: int) -> ClientSum:
        if client not in self._sums:
            raise SecureSumRefused(f"Client {client} takes part in no secure sum.")
        return self._sums[client]

    def _reveal(self, client: int, payload: bytes) -> bytes:
        done = self._sum_of(client)
        shares = done.party.reveal(payload)
        del self._sums[client]
        if done.form is not None and done.form.mode == "coverage":
            self._counted.add(client)
        else:
            self._counted.discard(client)
            del self._given[client]
        return shares


class KeepingNode:
    """A node whose answers hold no updates, as `answer_bytes` needs it.

    Args:
        node: Node that does the work.
        secure: Keeps the updates.
    """

    def __init__(self, node: Node, secure: SecureNode) -> None:
        self.node, self.secure = node, secure
        self.codec, self.device, self.record = node.codec, node.device, node.record

    def answer(self, orders: Sequence[Order]) -> Iterator[Answer]:
        """Carry out orders; see :meth:`Node.answer`.

        Args:
            orders: Orders of different clients.

        Yields:
            One answer for each order, without the update.
        """
        for order, answer in zip(orders, self.node.answer(orders), strict=True):
            yield self.secure.keep(order, answer)
