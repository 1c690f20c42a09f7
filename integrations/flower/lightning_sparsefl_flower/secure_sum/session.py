"""The server's side of one sum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from lightning_sparsefl_flower.secure_sum.errors import SecureSumRefused, TooFewClients
from lightning_sparsefl_flower.secure_sum.masks import KEY_BYTES, agreed_key, derived_key, mask, public_bytes
from lightning_sparsefl_flower.secure_sum.messages import (
    Advert,
    decode_adverts,
    decode_boxes,
    decode_shares,
    digest,
    encode_boxes,
    encode_clients,
    encode_signatures,
    roster_digest,
)
from lightning_sparsefl_flower.secure_sum.party import pair_label, point, sign
from lightning_sparsefl_flower.secure_sum.policy import Policy
from lightning_sparsefl_flower.secure_sum.shamir import PRIME, factors


class Session:
    """Server of one sum: passes on what the parties send, and takes the masks off.

    Args:
        context: Bytes that no other sum has.
        policy: What the parties demand of the sum.
    """

    def __init__(self, context: bytes, policy: Policy) -> None:
        self.context, self.policy = context, policy
        self.adverts: dict[int, Advert] = {}
        self._dealers: list[int] = []
        self._survivors: list[int] = []
        self._total: Any = None

    def roster(self, adverts: Mapping[int, bytes]) -> bytes:
        """Return the adverts of all clients, for each of them.

        Args:
            adverts: Advert of each client.

        Raises:
            SecureSumRefused: If a client sent something else.
            TooFewClients: If there are fewer than the threshold.
        """
        for client in sorted(adverts):
            found = decode_adverts(adverts[client])
            if [advert.client for advert in found] != [client]:
                raise SecureSumRefused(f"Client {client} sent {len(found)} adverts; expected its own.")
            self.adverts[client] = found[0]
        self.needed = self.policy.needed(len(self.adverts))
        self._require(len(self.adverts), "advertise keys")
        return b"".join(advert.encode() for advert in self.adverts.values())

    def inboxes(self, boxes: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return what each client that sent shares gets from the others.

        Args:
            boxes: Encrypted shares from each client.

        Raises:
            SecureSumRefused: If a client's shares are not one for each other client.
            TooFewClients: If too few clients are left.
        """
        self._dealers = sorted(boxes)
        self._require(len(boxes), "share their secrets")
        opened = {client: decode_boxes(boxes[client]) for client in self._dealers}
        for client, found in opened.items():
            if found.keys() != self.adverts.keys() - {client}:
                raise SecureSumRefused(f"Client {client} sent shares for {sorted(found)}; expected all other clients.")
        return {
            client: encode_boxes((other, opened[other][client]) for other in self._dealers if other != client)
            for client in self._dealers
        }

    def survivors(self, vectors: Iterable[tuple[int, Any]]) -> bytes:
        """Add the masked vectors, and return the numbers of their clients.

        Args:
            vectors: Client and array of uint64, each of the same length.

        Raises:
            TooFewClients: If too few clients are left.
        """
        for client, vector in vectors:
            self._total = vector if self._total is None else self._total + vector
            self._survivors.append(client)
        self._survivors.sort()
        self._require(len(self._survivors), "send their masked update")
        return encode_clients(self._survivors)

    def signatures(self, confirmed: Mapping[int, bytes]) -> bytes:
        """Return the clients' signatures of the survivors, for each of them.

        Args:
            confirmed: Signature from each client, empty without long-term keys.

        Raises:
            TooFewClients: If too few clients are left.
        """
        self._require(len(confirmed), "confirm who is left")
        return encode_signatures(sorted(confirmed.items()))

    def unmask(self, revealed: Mapping[int, bytes]) -> Any:
        """Return the sum of the survivors' vectors.

        Args:
            revealed: Shares from each client.

        Returns:
            Array of uint64, the sum modulo 2**64.

        Raises:
            SecureSumRefused: If shares do not restore a client's secret.
            TooFewClients: If too few clients are left.
        """
        self._require(len(revealed), "reveal their shares")
        chosen = sorted(revealed)[: self.needed]
        shares = {client: decode_shares(revealed[client], len(self._dealers)) for client in chosen}
        weights = factors([point(client) for client in chosen])
        total = self._total.copy()
        roster = roster_digest(self.context, list(self.adverts.values()))
        for place, client in enumerate(self._dealers):
            secret = sum(weights[point(c)] * shares[c][place] for c in chosen) % PRIME
            advert = self.adverts[client]
            if client in self._survivors:
                total -= mask(derived_key(_seed(secret, advert), b"own" + roster), len(total))
                continue
            key = _key(secret, advert)
            for other in self._survivors:
                pair = agreed_key(key, self.adverts[other].mask_key, pair_label(roster, client, other))
                total -= sign(other, client) * mask(pair, len(total))
        return total

    def _require(self, clients: int, deed: str) -> None:
        if clients < self.needed:
            raise TooFewClients(
                f"{clients} of {len(self.adverts)} clients are left to {deed} in a secure sum; expected at least "
                f"{self.needed} (`secure_sum.threshold`, `secure_sum.min_clients`)."
            )


def _seed(secret: int, advert: Advert) -> bytes:
    """Return the seed of a client's own mask, which must be the one that it committed to."""
    seed = _bytes(secret)
    if digest(seed) != advert.commitment:
        raise SecureSumRefused(f"The shares of client {advert.client}'s own mask do not restore what it committed to.")
    return seed


def _key(secret: int, advert: Advert) -> X25519PrivateKey:
    """Return the mask key of a client that dropped out, which must be the one that it advertised."""
    key = X25519PrivateKey.from_private_bytes(_bytes(secret))
    if public_bytes(key) != advert.mask_key:
        raise SecureSumRefused(f"The shares of client {advert.client}'s mask key do not restore what it advertised.")
    return key


def _bytes(secret: int) -> bytes:
    value: bytes = (secret % 2 ** (8 * KEY_BYTES)).to_bytes(KEY_BYTES, "little")
    return value
