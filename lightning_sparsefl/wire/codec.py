"""Encoding of messages and updates as bytes; the ledger charges the length of the encoding.

Both ends know the model (the schema) and the masks that were sent before. A tensor is therefore identified by its
index in the schema, weights are sent as the values that the masks keep, without positions, and a mask of an update as
its difference from that of the message; one of a message that the client already holds takes a byte. Any other tensor
is encoded in the smallest of three forms: all values (`dense`), non-zero values with one bit per position (`bitmask`),
or non-zero values with their positions (`indices`). The format uses no pickle, and the decoder checks every length
before it allocates memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from lightning_sparsefl.errors import InvalidOption, MalformedPayload, SparseFLError, require
from lightning_sparsefl.sparse.masks import counts, intersect
from lightning_sparsefl.types import Masks, Message, Update, Weights
from lightning_sparsefl.wire.frame import OBJECT, Reader, Size, Writer
from lightning_sparsefl.wire.schema import Schema
from lightning_sparsefl.wire.trees import read_masks, read_weights, write_masks, write_weights
from lightning_sparsefl.wire.values import read_metrics, read_value, write_metrics, write_value

_MAGIC = b"SFL\x01"
"""First bytes of every payload; the last of them is the version of the format."""
_MESSAGE, _UPDATE = b"M", b"U"
_KINDS = ("weights", "difference")


class Codec:
    """Encoder and decoder of the messages between server and client, and of their sizes.

    Args:
        schema: Weights of the model, known to both ends; only names, shapes and types are used.
        may_vote: Function that returns where the answer to a message may vote, which both ends can compute. Votes equal
            to it take one byte. Default: where the message's masks keep and make trainable.

    Raises:
        InvalidOption: If a tensor has a type that cannot be encoded.

    Example:
        >>> import torch
        >>> codec = Codec({"w": torch.zeros(100)})
        >>> message = Message(weights={"w": torch.ones(100)}, masks={"w": torch.arange(100) < 20})
        >>> payload = codec.encode_message(message)
        >>> codec.message_size(message) == Size(total=len(payload), masks=11)
        True
        >>> int(codec.decode_message(payload).weights["w"].sum())
        20
    """

    def __init__(self, schema: Weights, may_vote: Callable[[Message], Masks] | None = None) -> None:
        self._schema, self._may_vote = Schema(schema), may_vote or _default_votes

    def encode_message(self, message: Message, known: Masks | None = None) -> bytes:
        """Encode a message.

        Args:
            message: Message to encode; its weights are sent only where its masks are True.
            known: Masks that the client already holds.

        Raises:
            InvalidOption: If the message contains a value that cannot be encoded.
            IncompatibleMasks: If the shape of a mask differs from that of its tensor.
        """
        return self._finish(self._write_message(message, known or {}, keep=True), _held(known or {}))

    def message_size(self, message: Message, known: Masks | None = None) -> Size:
        """Compute the size of :meth:`encode_message`'s result without encoding tensors."""
        return self._write_message(message, known or {}, keep=False).size()

    def decode_message(self, payload: bytes, known: Masks | None = None) -> Message:
        """Decode a message; weights are zero where the masks are False.

        Args:
            payload: Result of :meth:`encode_message`.
            known: Masks that were passed to :meth:`encode_message`. An unchanged mask is returned as the same tensor
                object.

        Raises:
            MalformedPayload: If the payload is not a valid message. The memory that decoding allocates is bounded by
                a multiple of the sizes of the model and of the payload, whatever the payload contains.
        """
        reader = self._open(payload, _MESSAGE, _held(known or {}))
        masks = read_masks(reader, self._schema, known or {})
        weights = read_weights(reader, self._schema, masks)
        trainable = read_masks(reader, self._schema, masks)
        extra = read_value(reader, self._schema, masks, "extra")
        _require_trees(extra, MalformedPayload)
        reader.finish()
        return Message(weights=weights, masks=masks, trainable=trainable, extra=extra)

    def encode_update(self, update: Update, message: Message) -> bytes:
        """Encode an update without its `memory`, which stays with the client.

        Args:
            update: Update to encode; its weights are sent only where its votes are True.
            message: Message that the update answers.

        Raises:
            InvalidOption: If the update contains a value that cannot be encoded.
            IncompatibleMasks: If the shape of a mask differs from that of its tensor.
        """
        return self._finish(self._write_update(update, message, keep=True), _held_by(message))

    def update_size(self, update: Update, message: Message) -> Size:
        """Compute the size of :meth:`encode_update`'s result without encoding tensors."""
        return self._write_update(update, message, keep=False).size()

    def decode_update(self, payload: bytes, message: Message) -> Update:
        """Decode an update; weights are zero where its votes are False, and it has no `memory`.

        Args:
            payload: Result of :meth:`encode_update`.
            message: Message that the update answers. A mask equal to the message's is returned as the same tensor
                object.

        Raises:
            MalformedPayload: If the payload is not a valid update.
        """
        reader = self._open(payload, _UPDATE, _held_by(message))
        kind = _KINDS[reader.byte(2)]
        weight = reader.varint(2**63 - 1)
        if not weight:
            raise MalformedPayload("The update has weight 0; expected at least 1.")
        votes = read_masks(reader, self._schema, self._may_vote(message)) if reader.byte(2) else None
        weights = read_weights(reader, self._schema, _default_votes(message) if votes is None else votes)
        metrics = read_metrics(reader)
        extra = read_value(reader, self._schema, message.masks, "extra")
        _require_trees(extra, MalformedPayload)
        shared = read_value(reader, self._schema, message.masks)
        _require_tree(shared, MalformedPayload)
        reader.finish()
        return Update(
            weights=weights,
            kind="difference" if kind == "difference" else "weights",
            weight=weight,
            votes=votes,
            extra=extra,
            shared=shared,
            metrics=metrics,
        )

    def _write_message(self, message: Message, known: Masks, *, keep: bool) -> Writer:
        _require_trees(message.extra, InvalidOption)
        writer = self._start(_MESSAGE, keep=keep)
        kept = counts(message.masks)
        write_masks(writer, self._schema, message.masks, known, kept)
        write_weights(writer, self._schema, message.weights, message.masks, kept)
        write_masks(writer, self._schema, message.trainable, message.masks, counts(message.trainable))
        write_value(writer, self._schema, message.extra, message.masks, "extra")
        return writer

    def _write_update(self, update: Update, message: Message, *, keep: bool) -> Writer:
        require(update.kind in _KINDS, "Update.kind", update.kind, f"one of {_KINDS}")
        fits = isinstance(update.weight, int) and 0 < update.weight < 2**63
        require(fits, "Update.weight", update.weight, "a whole number from 1 to 2**63 - 1")
        _require_trees(update.extra, InvalidOption)
        _require_tree(update.shared, InvalidOption)
        writer = self._start(_UPDATE, keep=keep)
        writer.write(bytes((_KINDS.index(update.kind),)))
        writer.varint(update.weight)
        votes = _default_votes(message) if update.votes is None else update.votes
        kept = counts(votes)
        writer.write(bytes((update.votes is not None,)))
        if update.votes is not None:
            write_masks(writer, self._schema, votes, self._may_vote(message), kept)
        write_weights(writer, self._schema, update.weights, votes, kept)
        write_metrics(writer, update.metrics)
        write_value(writer, self._schema, update.extra, message.masks, "extra")
        write_value(writer, self._schema, update.shared, message.masks)
        return writer

    def _start(self, what: bytes, *, keep: bool) -> Writer:
        writer = Writer(keep=keep)
        writer.write(_MAGIC + what + self._schema.fingerprint)
        return writer

    def _finish(self, writer: Writer, held: int) -> bytes:
        if writer.decoded > self._room(writer.total, held):
            raise InvalidOption(
                f"The payload of {writer.total} bytes would decode to {writer.decoded} bytes, more than a receiver "
                "allocates; expected fewer tensors in `extra` or `shared` that are tiny or almost all zeros."
            )
        return writer.payload()

    def _open(self, payload: bytes, what: bytes, held: int) -> Reader:
        reader = Reader(payload, room=self._room(len(payload), held))
        head, kind, fingerprint = bytes(reader.take(4)), bytes(reader.take(1)), bytes(reader.take(4))
        if head != _MAGIC or kind != what:
            expected = _MAGIC + what
            raise MalformedPayload(f"The payload starts with {head + kind!r}; expected {expected!r}.")
        if fingerprint != self._schema.fingerprint:
            raise MalformedPayload(
                f"The payload was encoded for a model with fingerprint {fingerprint.hex()}; expected "
                f"{self._schema.fingerprint.hex()}."
            )
        return reader

    def _room(self, length: int, held: int) -> int:
        """Return how many bytes the decoded tensors of a payload may take.

        One byte of a bit mask decodes to 8 bools and, with values of 8 bytes, to 64 more bytes: 72 at most. The model
        counts with its tensor objects, since those of an extra tree take more than their values if these are few.
        """
        return 16 * (self._schema.nbytes + OBJECT * len(self._schema.names) + held) + 72 * length


def _default_votes(message: Message) -> Masks:
    """Return where an update without `votes` votes."""
    return intersect(message.trainable, message.masks)


def _held(masks: Masks) -> int:
    """Return the bytes of float64 tensors with the shapes of these masks."""
    return sum(8 * mask.numel() for mask in masks.values())


def _held_by(message: Message) -> int:
    return _held(message.masks) + _held(message.trainable) + _held(message.weights)


def _require_trees(extra: object, error: type[SparseFLError]) -> None:
    if not isinstance(extra, Mapping):
        raise error(f"`extra` is a {type(extra).__name__}; expected a mapping from names to mappings of tensors.")
    for name, tree in extra.items():
        if not (isinstance(tree, Mapping) and all(isinstance(leaf, Tensor) for leaf in tree.values())):
            raise error(f"`extra[{name!r}]` is not a mapping of tensors; expected a mapping from names to tensors.")


def _require_tree(shared: object, error: type[SparseFLError]) -> None:
    if not (shared is None or isinstance(shared, Mapping)):
        raise error(f"`shared` is a {type(shared).__name__}; expected a mapping with string keys, or None.")
