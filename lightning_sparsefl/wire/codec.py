"""Messages and updates as bytes: what is charged is what was encoded.

Both ends know the model (the schema) and the masks that went before, so a tensor is named by its number, a
mask is sent only where it changed, and of the weights only what the masks keep, without positions. Everything
else is in the cheapest of three forms: values (`dense`), values and a bit a position (`bitmask`), values and
their positions (`indices`). There is no pickle, and no length is believed before it is checked.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lightning_sparsefl.errors import InvalidOption, MalformedPayload, SparseFLError, require
from lightning_sparsefl.sparse.masks import counts, intersect
from lightning_sparsefl.types import Masks, Message, Update, Weights
from lightning_sparsefl.wire.frame import Reader, Size, Writer
from lightning_sparsefl.wire.schema import Schema
from lightning_sparsefl.wire.trees import read_masks, read_weights, write_masks, write_weights
from lightning_sparsefl.wire.values import read_metrics, read_value, write_metrics, write_value

_MAGIC = b"SFL\x01"
"""The last byte is the version."""
_MESSAGE, _UPDATE = b"M", b"U"
_KINDS = ("weights", "difference")


class Codec:
    """Encodes what server and client send each other, and says what that weighs.

    Args:
        schema: The model's tree, which both ends know; the values do not matter.

    Raises:
        InvalidOption: If a tensor has a type that cannot be sent.

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

    def __init__(self, schema: Weights) -> None:
        self._schema = Schema(schema)

    def encode_message(self, message: Message, known: Masks | None = None) -> bytes:
        """A message as bytes.

        Args:
            message: Its weights are sent only where its masks are True.
            known: Masks that the client already holds.

        Raises:
            InvalidOption: If something in it cannot be sent.
            IncompatibleMasks: If a mask does not fit its weights.
        """
        return self._finish(self._write_message(message, known or {}, keep=True), _held(known or {}))

    def message_size(self, message: Message, known: Masks | None = None) -> Size:
        """What :meth:`encode_message` weighs, without encoding it."""
        return self._write_message(message, known or {}, keep=False).size()

    def decode_message(self, payload: bytes, known: Masks | None = None) -> Message:
        """The message, with zeros where its masks are False.

        Args:
            payload: What :meth:`encode_message` made.
            known: The same as there. Masks that did not change are these very tensors.

        Raises:
            MalformedPayload: If the payload is anything else. Whatever it says, decoding takes memory in
                proportion to the model and the payload only.
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
        """An update as bytes, without its memory, which stays with the client.

        Args:
            update: Its weights are sent only where they vote.
            message: What the client had received.

        Raises:
            InvalidOption: If something in it cannot be sent.
            IncompatibleMasks: If a mask does not fit its weights.
        """
        return self._finish(self._write_update(update, message, keep=True), _held_by(message))

    def update_size(self, update: Update, message: Message) -> Size:
        """What :meth:`encode_update` weighs, without encoding it."""
        return self._write_update(update, message, keep=False).size()

    def decode_update(self, payload: bytes, message: Message) -> Update:
        """The update, with zeros where it does not vote, and no memory.

        Args:
            payload: What :meth:`encode_update` made.
            message: The same as there. Masks that are as the message's are these very tensors.

        Raises:
            MalformedPayload: If the payload is anything else.
        """
        reader = self._open(payload, _UPDATE, _held_by(message))
        kind = _KINDS[reader.byte(2)]
        weight = reader.varint(2**63 - 1)
        if not weight:
            raise MalformedPayload("The update has weight 0, expected at least 1.")
        default = intersect(message.trainable, message.masks)
        votes = read_masks(reader, self._schema, default) if reader.byte(2) else None
        weights = read_weights(reader, self._schema, default if votes is None else votes)
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
        default = intersect(message.trainable, message.masks)
        votes = default if update.votes is None else update.votes
        kept = counts(votes)
        writer.write(bytes((update.votes is not None,)))
        if update.votes is not None:
            write_masks(writer, self._schema, votes, default, kept)
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
                f"{writer.total} bytes would decode to {writer.decoded}: too many tensors in `extra` or `shared` that "
                "are tiny, or nearly all the same value."
            )
        return writer.payload()

    def _open(self, payload: bytes, what: bytes, held: int) -> Reader:
        reader = Reader(payload, room=self._room(len(payload), held))
        head, kind, fingerprint = bytes(reader.take(4)), bytes(reader.take(1)), bytes(reader.take(4))
        if head != _MAGIC or kind != what:
            expected = _MAGIC + what
            raise MalformedPayload(f"The payload starts with {head + kind!r}, expected {expected!r}.")
        if fingerprint != self._schema.fingerprint:
            raise MalformedPayload(
                f"The payload is of model {fingerprint.hex()}, expected {self._schema.fingerprint.hex()}."
            )
        return reader

    def _room(self, length: int, held: int) -> int:
        """Bytes that the tensors of a payload may take; one byte of it can stand for 72 at most."""
        return 16 * (self._schema.nbytes + held) + 72 * length


def _held(masks: Masks) -> int:
    """Bytes of the widest tensors for which the receiver has these masks."""
    return sum(8 * mask.numel() for mask in masks.values())


def _held_by(message: Message) -> int:
    return _held(message.masks) + _held(message.trainable) + _held(message.weights)


def _require_trees(extra: object, error: type[SparseFLError]) -> None:
    if not isinstance(extra, Mapping):
        raise error(f"`extra` is a {type(extra).__name__}, expected trees of tensors by name.")
    for name, tree in extra.items():
        if not (isinstance(tree, Mapping) and all(isinstance(leaf, Tensor) for leaf in tree.values())):
            raise error(f"`extra[{name!r}]` is no tree of tensors.")


def _require_tree(shared: object, error: type[SparseFLError]) -> None:
    if not (shared is None or isinstance(shared, Mapping)):
        raise error(f"`shared` is a {type(shared).__name__}, expected a mapping from names, or None.")
