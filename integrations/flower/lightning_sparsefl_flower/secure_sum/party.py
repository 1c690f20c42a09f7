"""A client's side of one sum."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from lightning_sparsefl_flower.secure_sum.errors import SecureSumRefused, TooFewClients
from lightning_sparsefl_flower.secure_sum.masks import KEY_BYTES, agreed_key, derived_key, mask, public_bytes
from lightning_sparsefl_flower.secure_sum.messages import (
    Advert,
    decode_adverts,
    decode_boxes,
    decode_clients,
    decode_shares,
    decode_signatures,
    digest,
    encode_boxes,
    encode_clients,
    encode_shares,
    roster_digest,
    survivors_signed,
)
from lightning_sparsefl_flower.secure_sum.policy import Policy
from lightning_sparsefl_flower.secure_sum.shamir import split
from lightning_sparsefl_flower.secure_sum.signing import Signer, Verifier

_STEPS = ("advertise", "share", "mask", "confirm", "reveal")
_BOX_NONCE = bytes(12)
"""Nonce of ChaCha20-Poly1305; each key encrypts one box."""


class Party:
    """Client of one sum, which takes each of its five steps once, with new keys that nobody else has.

    The server never gets both the shares of a client's own mask and those of its pairs' masks from this client: it
    reveals for each client one of the two, once, by the list of survivors that it confirmed.

    Args:
        client: Number of the client.
        context: Bytes that no other sum of the client has, such as a digest of run and round.
        policy: What the client demands of a sum.
        signer: Signs with the long-term key of the client's node; None = nothing is signed.
        verifier: Knows the long-term keys of the others; None = the server is trusted to pass keys on unchanged.
    """

    def __init__(
        self,
        client: int,
        context: bytes,
        policy: Policy,
        signer: Signer | None = None,
        verifier: Verifier | None = None,
    ) -> None:
        self.client, self.context, self.policy, self.signer, self.verifier = client, context, policy, signer, verifier
        self._box_key, self._mask_key = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self._seed = secrets.token_bytes(KEY_BYTES)
        self._done = 0
        self._adverts: dict[int, Advert] = {}
        self._roster = b""
        self._needed = 0
        self._held: dict[int, tuple[int, int]] = {}
        """For each dealer, this client's shares of the seed of its own mask and of its mask key."""
        self._survivors: list[int] = []

    @property
    def clients(self) -> int:
        """Number of clients that advertised keys; 0 before their roster is here."""
        return len(self._adverts)

    def advertise(self, facts: bytes = b"") -> bytes:
        """Return this client's advert.

        Args:
            facts: What else the server needs to know before the sum.
        """
        self._turn("advertise")
        keys = public_bytes(self._box_key), public_bytes(self._mask_key), digest(self._seed)
        self._advert = Advert(self.client, *keys, facts)
        signature = b"" if self.signer is None else self.signer.sign(self._advert.signed(self.context))
        self._advert = Advert(self.client, *keys, facts, signature)
        return self._advert.encode()

    def share(self, roster: bytes) -> bytes:
        """Return shares of this client's secrets, encrypted for each other client.

        Args:
            roster: Adverts of all clients of the sum.

        Raises:
            SecureSumRefused: If the roster is not what an honest server sends.
            TooFewClients: If the clients could not reach the threshold.
        """
        self._turn("share")
        self._accept(decode_adverts(roster))
        seeds = self._split(int.from_bytes(self._seed, "little"))
        keys = self._split(int.from_bytes(self._mask_key.private_bytes_raw(), "little"))
        self._held[self.client] = seeds[self.client], keys[self.client]
        return encode_boxes((other, self._sealed(other, seeds[other], keys[other])) for other in self._others)

    def mask(self, vector: Any, inbox: bytes) -> Any:
        """Return a vector under the client's own mask and those of its pairs.

        Args:
            vector: Array of uint64, the client's part of the sum.
            inbox: Shares from the other clients that are still there.

        Raises:
            SecureSumRefused: If a box was not sealed by its sender for this client in this sum.
            TooFewClients: If too few clients are left.
        """
        self._turn("mask")
        for other, box in decode_boxes(inbox).items():
            self._held[other] = self._opened(other, box)
        self._require(len(self._held))
        masked = vector + mask(derived_key(self._seed, b"own" + self._roster), len(vector))
        for other in self._held.keys() - {self.client}:
            masked = masked + sign(self.client, other) * mask(self._pair_key(other), len(vector))
        return masked

    def confirm(self, survivors: bytes) -> bytes:
        """Accept the list of clients whose vectors are in the sum, and return a signature of it.

        Args:
            survivors: Numbers of the clients.

        Raises:
            SecureSumRefused: If this client is not among them, or one is unknown.
            TooFewClients: If too few clients are left.
        """
        self._turn("confirm")
        named = decode_clients(survivors)
        if self.client not in named or not self._held.keys() >= set(named):
            raise SecureSumRefused(
                f"The survivors {named} are not what client {self.client} can confirm; expected itself and some of "
                f"{sorted(self._held)}."
            )
        self._require(len(named))
        self._survivors = named
        return b"" if self.signer is None else self.signer.sign(self._confirmed)

    def reveal(self, signatures: bytes) -> bytes:
        """Return the shares that take the masks off the sum, by the number of their client.

        These are shares of the own mask of each survivor, and of the mask key of each client that dropped out.

        Args:
            signatures: Signatures of the survivors by those that confirmed them.

        Raises:
            SecureSumRefused: If fewer than the threshold have signed the same list.
        """
        self._turn("reveal")
        if self.verifier is not None:
            signed = decode_signatures(signatures).items()
            valid = [c for c, each in signed if c in self._survivors and self._verifies(c, self._confirmed, each)]
            if len(valid) < self._needed:
                raise SecureSumRefused(
                    f"{len(valid)} of {len(self._survivors)} clients have signed the survivors that client "
                    f"{self.client} confirmed; expected {self._needed}."
                )
        shares = encode_shares(self._held[c][c not in self._survivors] for c in sorted(self._held))
        self._held.clear()
        return shares

    # ---- parts of the steps

    @property
    def _others(self) -> list[int]:
        return [client for client in self._adverts if client != self.client]

    @property
    def _confirmed(self) -> bytes:
        return survivors_signed(self._roster, sorted(self._held), self._survivors)

    def _turn(self, step: str) -> None:
        """Raise unless a step is the next one; a step that fails is not repeated."""
        if self._done == len(_STEPS) or step != _STEPS[self._done]:
            raise SecureSumRefused(f"Client {self.client} was asked to {step} after {self._done} steps of {_STEPS}.")
        self._done += 1

    def _accept(self, adverts: list[Advert]) -> None:
        found = {advert.client: advert for advert in adverts}
        numbers = [advert.client for advert in adverts]
        keys = {key for advert in adverts for key in (advert.box_key, advert.mask_key)}
        if found.get(self.client) != self._advert or numbers != sorted(found) or len(keys) < 2 * len(adverts):
            raise SecureSumRefused(
                f"The roster of {numbers} is wrong; expected different keys of ascending clients, with those that "
                f"client {self.client} advertised."
            )
        for advert in adverts:
            if not self._verifies(advert.client, advert.signed(self.context), advert.signature):
                raise SecureSumRefused(f"The keys of client {advert.client} are not signed by its node.")
        self._adverts, self._needed = found, self.policy.needed(len(found))
        self._require(len(found))
        self._roster = roster_digest(self.context, adverts)

    def _verifies(self, client: int, content: bytes, signature: bytes) -> bool:
        return self.verifier is None or self.verifier.verifies(client, content, signature)

    def _require(self, clients: int) -> None:
        if clients < self._needed:
            raise TooFewClients(
                f"{clients} clients are left in the secure sum of client {self.client}; expected at least "
                f"{self._needed} of {len(self._adverts)} (`secure_sum.threshold`, `secure_sum.min_clients`)."
            )

    def _split(self, secret: int) -> dict[int, int]:
        shares = split(secret, self._needed, [point(client) for client in self._adverts])
        return {client: shares[point(client)] for client in self._adverts}

    def _sealed(self, other: int, seed: int, key: int) -> bytes:
        box = ChaCha20Poly1305(self._box_key_for(self.client, other, other))
        return box.encrypt(_BOX_NONCE, encode_shares([seed, key]), None)

    def _opened(self, other: int, box: bytes) -> tuple[int, int]:
        if other not in self._adverts or other == self.client:
            raise SecureSumRefused(f"A box is from client {other}; expected one of {self._others}.")
        try:
            content = ChaCha20Poly1305(self._box_key_for(other, self.client, other)).decrypt(_BOX_NONCE, box, None)
        except InvalidTag:
            raise SecureSumRefused(f"The box from client {other} was not sealed for client {self.client}.") from None
        seed, key = decode_shares(content, 2)
        return seed, key

    def _box_key_for(self, sender: int, receiver: int, other: int) -> bytes:
        """Return the key of the box from a sender to a receiver; the roster in its label stands for the sum."""
        label = b"box" + self._roster + encode_clients([sender, receiver])
        return agreed_key(self._box_key, self._adverts[other].box_key, label)

    def _pair_key(self, other: int) -> bytes:
        return agreed_key(self._mask_key, self._adverts[other].mask_key, pair_label(self._roster, self.client, other))


def pair_label(roster: bytes, one: int, other: int) -> bytes:
    """Return the label of the key of a pair's mask.

    Args:
        roster: Digest of the sum and all keys in it.
        one: Number of one client.
        other: Number of the other client.
    """
    return b"pair" + roster + encode_clients(sorted((one, other)))


def sign(client: int, other: int) -> Any:
    """Return the factor of a pair's mask in one client's vector: 1, or -1 modulo 2**64.

    Args:
        client: Number of the client.
        other: Number of the other client of the pair.
    """
    return np.uint64(1) if client < other else np.uint64(2**64 - 1)


def point(client: int) -> int:
    """Return the point at which a client's shares are evaluated.

    Args:
        client: Number of the client, from 0.
    """
    return client + 1
