"""Encoding of mappings of masks and weights, each tensor in its smallest encoding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from lightning_sparsefl.errors import IncompatibleMasks, MalformedPayload
from lightning_sparsefl.sparse.masks import counts
from lightning_sparsefl.types import Masks, Weights
from lightning_sparsefl.wire import bitmask, dense, indices
from lightning_sparsefl.wire.frame import OBJECT, Reader, Writer, varint_size
from lightning_sparsefl.wire.schema import Schema, dtype_number

_SAME, _NONE, _ALL, _BITS, _GRID, _KEPT, _DROPPED, _FLIPPED = range(8)
"""Encodings of a mask: equal to the reference, all False, all True, one bit per position, one bit per index of each
dimension (for a mask that keeps whole rows and columns), or positions: of True, of False, or of differences from the
reference."""
_LISTED, _IMPLIED = range(2)
"""Encodings of a mapping: with names, or without since names, shapes and types are those the receiver expects."""


def write_mask(writer: Writer, mask: Tensor, reference: Tensor | None, *, bounded: bool, kept: int, flips: int) -> None:
    """Write one mask.

    Args:
        writer: Writer of the payload.
        mask: Mask, bool of any shape.
        reference: Mask of the same shape that the receiver holds; None stands for all True.
        bounded: Whether the receiver knows the shape from the schema. Otherwise only encodings of n / 8 bytes for n
            positions are used, so that a short payload cannot make the receiver allocate a long mask.
        kept: Number of positions that are True.
        flips: Number of positions that differ from the reference.
    """
    positions = mask.numel()
    writer.claim(positions)
    code, count, length = _plan(positions, kept, flips, bounded=bounded, referenced=reference is not None)
    lines = _lines(mask, kept) if bounded and bitmask.size(sum(mask.shape)) < length else None
    if lines is not None:
        writer.write(bytes((_GRID,)))
        writer.bulk(bitmask.size(len(lines)), lambda: bitmask.encode(lines), masks=True)
        return
    writer.write(bytes((code,)))
    if code >= _KEPT:
        writer.varint(count)
        writer.bulk(length, lambda: indices.encode(_marked(code, mask, reference)), masks=True)
    elif code == _BITS:
        writer.bulk(length, lambda: bitmask.encode(mask), masks=True)


def read_mask(reader: Reader, shape: torch.Size, reference: Tensor | None, *, bounded: bool) -> Tensor:
    """Read a mask that :func:`write_mask` wrote; a mask equal to the reference is returned as the same object."""
    positions = shape.numel()
    code = reader.byte(8)
    if not bounded and code != _BITS and not (code == _SAME and reference is not None):
        raise MalformedPayload(f"A mask that is not in the schema has encoding {code}; expected one bit per position.")
    if code == _BITS:
        data = reader.take(bitmask.size(positions))
        reader.claim(positions)
        return bitmask.decode(data, positions).reshape(shape)
    reader.claim(positions)
    if code < _BITS:
        return _uniform(code, shape, reference)
    if code == _GRID:
        lines = bitmask.decode(reader.take(bitmask.size(sum(shape))), sum(shape))
        return _grid(lines, shape)
    count = reader.varint(positions)
    marked = indices.decode(reader.take(indices.size(positions, count)), positions, count).reshape(shape)
    if code == _FLIPPED and reference is not None:
        return marked ^ reference.cpu()
    return marked if code == _KEPT else ~marked


def write_masks(writer: Writer, schema: Schema, masks: Masks, reference: Masks, kept: Mapping[str, int]) -> None:
    """Write masks; they take one byte together if all are equal to the reference.

    Args:
        writer: Writer of the payload.
        schema: Facts about the model that both ends know.
        masks: Masks by tensor name.
        reference: Masks that the receiver holds, by tensor name; a missing name stands for all True.
        kept: Number of positions that are True in each mask.

    Raises:
        IncompatibleMasks: If a mask is not bool.
    """
    for name, mask in masks.items():
        if mask.dtype != torch.bool:
            raise IncompatibleMasks(f"The mask of `{name}` is {mask.dtype}; expected torch.bool.")
    near = {name: _alike(reference.get(name), mask.shape) for name, mask in masks.items()}
    flips = flipped(masks, near, kept)
    if list(masks) == list(reference) and None not in near.values() and not any(flips.values()):
        writer.write(bytes((_IMPLIED,)))
        return
    writer.write(bytes((_LISTED,)))
    writer.varint(len(masks))
    for name, mask in masks.items():
        bounded = schema.shape(name) == mask.shape
        writer.varint(schema.index[name] + 1 if bounded else 0)
        if not bounded:
            writer.claim(OBJECT)
            writer.text(name)
            _write_shape(writer, mask.shape)
        write_mask(writer, mask, near[name], bounded=bounded, kept=kept[name], flips=flips[name])


def flipped(masks: Masks, references: Mapping[str, Tensor | None], kept: Mapping[str, int]) -> dict[str, int]:
    """Count the positions of each mask that differ from its reference.

    Args:
        masks: Masks by tensor name.
        references: References of the same names and shapes; None stands for all True.
        kept: Number of positions that are True in each mask.
    """
    flips = {name: mask.numel() - kept[name] for name, mask in masks.items()}
    differ = {}
    for name, reference in references.items():
        if reference is masks[name]:
            flips[name] = 0
        elif reference is not None:
            differ[name] = masks[name] ^ reference.to(masks[name].device)
    return flips | counts(differ)


def read_masks(reader: Reader, schema: Schema, reference: Masks) -> dict[str, Tensor]:
    """Read masks that :func:`write_masks` wrote."""
    if reader.byte(2) == _IMPLIED:
        return dict(reference)
    masks: dict[str, Tensor] = {}
    for index in _entries(reader, schema):
        name = schema.names[index - 1] if index else reader.text()
        shape = schema.shapes[index - 1] if index else read_shape(reader)
        near = _alike(reference.get(name), shape)
        _require_new(name, masks)
        masks[name] = read_mask(reader, shape, near, bounded=bool(index))
    return masks


def write_weights(writer: Writer, schema: Schema, weights: Weights, masks: Masks, kept: Mapping[str, int]) -> None:
    """Write the values that the masks keep; the receiver knows the masks.

    Args:
        writer: Writer of the payload.
        schema: Facts about the model that both ends know.
        weights: Tensors by name.
        masks: Masks by tensor name; a tensor without a mask is written as a whole.
        kept: Number of positions that are True in each mask.

    Raises:
        IncompatibleMasks: If the shape of a mask differs from that of its tensor.
        InvalidOption: If a tensor has a type that cannot be encoded.
    """
    fitting = {name: schema.fits(name, value) for name, value in weights.items()}
    implied = tuple(weights) == schema.names and all(fitting.values())
    writer.write(bytes((_IMPLIED if implied else _LISTED,)))
    if not implied:
        writer.varint(len(weights))
    for name, value in weights.items():
        if not implied:
            writer.varint(schema.index[name] + 1 if fitting[name] else 0)
            if not fitting[name]:
                writer.claim(OBJECT)
                writer.text(name)
                write_type(writer, value, name)
        writer.claim(value.numel() * value.element_size())
        _write_kept(writer, name, value, masks.get(name), kept.get(name, 0))


def read_weights(reader: Reader, schema: Schema, masks: Masks) -> dict[str, Tensor]:
    """Read weights that :func:`write_weights` wrote; they are zero where a mask is False."""
    masks = {name: mask.cpu() for name, mask in masks.items()}  # some were read, others are those of the message
    kept = counts(masks)
    if reader.byte(2) == _IMPLIED:
        return {
            name: _read_kept(reader, shape, dtype, name, masks, kept)
            for name, shape, dtype in zip(schema.names, schema.shapes, schema.dtypes, strict=True)
        }
    weights: dict[str, Tensor] = {}
    for index in _entries(reader, schema):
        name = schema.names[index - 1] if index else reader.text()
        dtype, shape = (schema.dtypes[index - 1], schema.shapes[index - 1]) if index else read_type(reader)
        _require_new(name, weights)
        weights[name] = _read_kept(reader, shape, dtype, name, masks, kept)
    return weights


def write_type(writer: Writer, value: Tensor, name: str) -> None:
    """Write the type and the shape of a tensor that is not in the schema."""
    writer.write(bytes((dtype_number(value.dtype, name),)))
    _write_shape(writer, value.shape)


def read_type(reader: Reader) -> tuple[torch.dtype, torch.Size]:
    """Read a type and a shape that :func:`write_type` wrote."""
    return dense.DTYPES[reader.byte(len(dense.DTYPES))], read_shape(reader)


def _write_shape(writer: Writer, shape: torch.Size) -> None:
    writer.varint(len(shape))
    for length in shape:
        writer.varint(length)


def read_shape(reader: Reader) -> torch.Size:
    """Read a shape, bounded to 64 dimensions and 2**48 elements."""
    shape = [reader.varint(2**48) for _ in range(reader.varint(64))]
    volume = 1
    for length in shape:
        volume *= max(1, length)
        if volume > 2**48:
            raise MalformedPayload(
                f"A tensor of the payload has shape {tuple(shape)}; expected at most 2**48 elements."
            )
    return torch.Size(shape)


def _write_kept(writer: Writer, name: str, value: Tensor, mask: Tensor | None, kept: int) -> None:
    if mask is None:
        writer.bulk(dense.size(value.numel(), value.dtype), lambda: dense.encode(value))
        return
    if mask.shape != value.shape:
        shapes = f"{tuple(mask.shape)}; expected {tuple(value.shape)}"
        raise IncompatibleMasks(f"The mask of `{name}` has shape {shapes}.")
    writer.bulk(dense.size(kept, value.dtype), lambda: dense.encode(value.detach()[mask.to(value.device)]))


def _read_kept(
    reader: Reader, shape: torch.Size, dtype: torch.dtype, name: str, masks: Masks, kept: Mapping[str, int]
) -> Tensor:
    mask, positions = masks.get(name), shape.numel()
    if mask is not None and mask.shape != shape:
        raise MalformedPayload(
            f"`{name}` has shape {tuple(shape)}; expected {tuple(mask.shape)}, the shape of its mask."
        )
    data = reader.take(dense.size(positions if mask is None else kept[name], dtype))
    reader.claim(positions * dtype.itemsize)
    values = dense.decode(data, dtype)
    if mask is None:
        return values.reshape(shape)
    return torch.zeros(shape, dtype=dtype).masked_scatter_(mask, values)


def _entries(reader: Reader, schema: Schema) -> Iterator[int]:
    """Yield the index of each entry in the schema, from 1; 0 stands for an entry that is not in the schema."""
    for _ in range(reader.varint(reader.left)):
        index = reader.varint(len(schema.names))
        if not index:
            reader.claim(OBJECT)
        yield index


def _require_new(name: str, tree: Mapping[str, object]) -> None:
    if name in tree:
        raise MalformedPayload(f"`{name}` occurs twice in the payload; expected each name once.")


def _alike(reference: Tensor | None, shape: torch.Size) -> Tensor | None:
    """Return the reference if it has the shape, else None."""
    return reference if reference is not None and reference.shape == shape else None


def _plan(positions: int, kept: int, flips: int, *, bounded: bool, referenced: bool) -> tuple[int, int, int]:
    """Choose the smallest encoding of a mask.

    Returns:
        The code of the encoding, the number of positions that it lists, and its size in bytes.
    """
    if not flips and (bounded or referenced):
        return _SAME, 0, 0
    best, price = (_BITS, 0, bitmask.size(positions)), bitmask.size(positions)
    if not bounded:
        return best
    if kept in (0, positions):
        return (_ALL if kept else _NONE), 0, 0
    for code, count in ((_KEPT, kept), (_DROPPED, positions - kept), (_FLIPPED, flips)):
        length = indices.size(positions, count)
        if length + varint_size(count) < price:
            best, price = (code, count, length), length + varint_size(count)
    return best


def _lines(mask: Tensor, kept: int) -> Tensor | None:
    """Return the indices that a mask keeps in each dimension, if it is the product of them.

    Returns:
        One bool per index, dimension after dimension; None if the mask does not keep whole rows and columns.
    """
    # The mask is the product of its lines if it keeps as many positions as the product of their counts.
    lines, left = [], kept
    for dim in range(mask.dim() if mask.dim() > 1 else 0):
        line = mask.amax([other for other in range(mask.dim()) if other != dim])
        left, rest = divmod(left, int(line.sum()))
        if rest:  # for most masks the first dimension decides
            return None
        lines.append(line)
    return torch.cat(lines) if lines and left == 1 else None


def _grid(lines: Tensor, shape: torch.Size) -> Tensor:
    """Compute the mask whose lines :func:`_lines` returned."""
    mask = torch.ones(shape, dtype=torch.bool)
    for dim, line in enumerate(lines.split(list(shape))):
        mask &= line.view([-1 if other == dim else 1 for other in range(len(shape))])
    return mask


def _marked(code: int, mask: Tensor, reference: Tensor | None) -> Tensor:
    if code == _FLIPPED and reference is not None:
        return mask ^ reference.to(mask.device)
    return mask if code == _KEPT else ~mask


def _uniform(code: int, shape: torch.Size, reference: Tensor | None) -> Tensor:
    if code == _SAME and reference is not None:
        return reference
    return torch.full(shape, code != _NONE, dtype=torch.bool)
