"""Encoding of nested values: numbers, strings, tensors, and lists and mappings of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_sparsefl.errors import InvalidOption, MalformedPayload
from lightning_sparsefl.sparse.apply import INTEGERS
from lightning_sparsefl.sparse.masks import counts
from lightning_sparsefl.types import Masks
from lightning_sparsefl.wire import bitmask, dense, indices
from lightning_sparsefl.wire.frame import OBJECT, Reader, Writer, varint_size
from lightning_sparsefl.wire.schema import Schema
from lightning_sparsefl.wire.trees import flipped, read_mask, read_type, write_mask, write_type

_NONE, _FALSE, _TRUE, _INT, _FLOAT, _TEXT, _LIST, _TUPLE, _TREE, _TENSOR, _KNOWN = range(11)
"""Kinds of values; `_KNOWN` is a tensor whose name and shape are in the schema."""
_DENSE, _BITMASK, _INDICES = range(3)
"""Encodings of a tensor: all values, or the non-zero values with one bit per position or with positions."""
_MAX_DEPTH = 32


def write_value(
    writer: Writer, schema: Schema, value: Any, reference: Masks, name: str = "shared", depth: int = 0
) -> None:
    """Write one value.

    Args:
        writer: Writer of the payload.
        schema: Facts about the model that both ends know.
        value: None, bool, int, float, str, a tensor, or a list, tuple or mapping with string keys of such values.
        reference: Masks that the receiver holds; a bool tensor of the same name is encoded as its difference from them.
        name: Key of the value, for error messages and to find its tensor in the schema.
        depth: Number of levels above the value.

    Raises:
        InvalidOption: If the value has another type, or is nested more than 32 levels deep.
    """
    if depth > _MAX_DEPTH:
        raise InvalidOption(f"`{name}` is nested more than {_MAX_DEPTH} levels deep; expected fewer levels.")
    if isinstance(value, Tensor):
        _write_tensor(writer, schema, value, reference, name)
    elif isinstance(value, Mapping):
        writer.write(bytes((_TREE,)))
        writer.varint(len(value))
        for key, item in value.items():
            _write_key(writer, schema, key, name)
            write_value(writer, schema, item, reference, key, depth + 1)
    elif isinstance(value, (list, tuple)):
        writer.write(bytes((_LIST if isinstance(value, list) else _TUPLE,)))
        writer.varint(len(value))
        for item in value:
            write_value(writer, schema, item, reference, name, depth + 1)
    else:
        _write_plain(writer, value, name)


def read_value(reader: Reader, schema: Schema, reference: Masks, name: str = "shared", depth: int = 0) -> Any:
    """Read a value that :func:`write_value` wrote."""
    if depth > _MAX_DEPTH:
        raise MalformedPayload(f"`{name}` is nested more than {_MAX_DEPTH} levels deep; expected fewer levels.")
    kind = reader.byte(11)
    if kind in (_TENSOR, _KNOWN):
        return _read_tensor(reader, schema, reference, name, known=kind == _KNOWN)
    if kind == _TREE:
        tree: dict[str, Any] = {}
        for _ in range(reader.varint(reader.left)):
            key = _read_key(reader, schema)
            if key in tree:
                raise MalformedPayload(f"`{key}` occurs twice in `{name}`; expected each key once.")
            tree[key] = read_value(reader, schema, reference, key, depth + 1)
        return tree
    if kind in (_LIST, _TUPLE):
        count = reader.varint(reader.left)
        items = [read_value(reader, schema, reference, name, depth + 1) for _ in range(count)]
        return items if kind == _LIST else tuple(items)
    return _read_plain(reader, kind)


def write_metrics(writer: Writer, metrics: Mapping[str, float]) -> None:
    """Write metrics: the name and eight bytes for each value."""
    writer.varint(len(metrics))
    for name, value in metrics.items():
        writer.text(name)
        writer.real(float(value))


def read_metrics(reader: Reader) -> dict[str, float]:
    """Read metrics that :func:`write_metrics` wrote."""
    metrics: dict[str, float] = {}
    for _ in range(reader.varint(reader.left)):
        name = reader.text()
        if name in metrics:
            raise MalformedPayload(f"The metric `{name}` occurs twice; expected each name once.")
        metrics[name] = reader.real()
    return metrics


def _write_plain(writer: Writer, value: Any, name: str) -> None:
    if value is None or isinstance(value, bool):
        writer.write(bytes((_NONE if value is None else _TRUE if value else _FALSE,)))
    elif isinstance(value, int):
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        writer.write(bytes((_INT,)))
        writer.varint(len(data))
        writer.write(data)
    elif isinstance(value, float):
        writer.write(bytes((_FLOAT,)))
        writer.real(value)
    elif isinstance(value, str):
        writer.write(bytes((_TEXT,)))
        writer.text(value)
    else:
        expected = "None, bool, int, float, str, tensors, and lists or mappings of them"
        raise InvalidOption(
            f"`{name}` contains a {type(value).__name__}, which cannot be encoded; expected {expected}."
        )


def _read_plain(reader: Reader, kind: int) -> bool | int | float | str | None:
    if kind == _INT:
        return int.from_bytes(reader.take(reader.varint(reader.left)), "little", signed=True)
    if kind == _FLOAT:
        return reader.real()
    if kind == _TEXT:
        return reader.text()
    return None if kind == _NONE else kind == _TRUE


def _write_key(writer: Writer, schema: Schema, key: Any, name: str) -> None:
    if not isinstance(key, str):
        raise InvalidOption(f"`{name}` has the key {key!r}; expected keys that are strings.")
    writer.varint(schema.index.get(key, -1) + 1)
    if key not in schema.index:
        writer.text(key)


def _read_key(reader: Reader, schema: Schema) -> str:
    index = reader.varint(len(schema.names))
    return schema.names[index - 1] if index else reader.text()


def _write_tensor(writer: Writer, schema: Schema, value: Tensor, reference: Masks, name: str) -> None:
    writer.claim(OBJECT)
    expected = schema.dtypes[schema.index[name]] if name in schema.index else None
    known = schema.shape(name) == value.shape and value.dtype in (torch.bool, expected)
    writer.write(bytes((_KNOWN if known else _TENSOR,)))
    if known:
        writer.write(bytes((value.dtype == torch.bool,)))
    else:
        write_type(writer, value, name)
    if value.dtype != torch.bool:
        _write_sparse(writer, value.detach(), bounded=known)
        return
    near = reference.get(name) if known else None
    near = near if near is not None and near.shape == value.shape else None
    kept = counts({name: value})
    flips = flipped({name: value}, {name: near}, kept)
    write_mask(writer, value, near, bounded=known, kept=kept[name], flips=flips[name])


def _read_tensor(reader: Reader, schema: Schema, reference: Masks, name: str, *, known: bool) -> Tensor:
    if known and name not in schema.index:
        raise MalformedPayload(
            f"`{name}` is encoded without a shape but is not in the schema; expected a tensor of the model."
        )
    reader.claim(OBJECT)
    if known:
        index = schema.index[name]
        shape, dtype = schema.shapes[index], torch.bool if reader.byte(2) else schema.dtypes[index]
    else:
        dtype, shape = read_type(reader)
    if dtype != torch.bool:
        return _read_sparse(reader, dtype, shape, bounded=known)
    near = reference.get(name) if known else None
    return read_mask(reader, shape, near if near is not None and near.shape == shape else None, bounded=known)


def _write_sparse(writer: Writer, value: Tensor, *, bounded: bool) -> None:
    """Write a tensor in its smallest encoding; the receiver does not know where it is zero."""
    positions, dtype = value.numel(), value.dtype
    writer.claim(dense.size(positions, dtype))
    count = int(torch.count_nonzero(_words(value)))
    values = dense.size(count, dtype)
    prices = {
        _DENSE: dense.size(positions, dtype),
        _BITMASK: bitmask.size(positions) + values,
        _INDICES: indices.size(positions, count) + varint_size(count) + values,
    }
    if not bounded:  # a few bytes of positions could stand for any length, see `write_mask`
        del prices[_INDICES]
    code = min(prices, key=lambda code: prices[code])
    writer.write(bytes((code,)))
    if code == _DENSE:
        writer.bulk(prices[_DENSE], lambda: dense.encode(value))
    elif code == _BITMASK:
        writer.bulk(bitmask.size(positions), lambda: bitmask.encode(_words(value) != 0), masks=True)
    else:
        writer.varint(count)
        writer.bulk(indices.size(positions, count), lambda: indices.encode(_words(value) != 0), masks=True)
    if code != _DENSE:
        writer.bulk(values, lambda: dense.encode(value.reshape(-1)[_words(value) != 0]))


def _read_sparse(reader: Reader, dtype: torch.dtype, shape: torch.Size, *, bounded: bool) -> Tensor:
    positions = shape.numel()
    code = reader.byte(3 if bounded else 2)
    if code == _DENSE:
        data = reader.take(dense.size(positions, dtype))
        reader.claim(len(data))
        return dense.decode(data, dtype).reshape(shape)
    count = reader.varint(positions) if code == _INDICES else 0
    data = reader.take(indices.size(positions, count) if code == _INDICES else bitmask.size(positions))
    reader.claim(dense.size(positions, dtype))
    mask = indices.decode(data, positions, count) if code == _INDICES else bitmask.decode(data, positions)
    values = dense.decode(reader.take(dense.size(int(torch.count_nonzero(mask)), dtype)), dtype)
    return torch.zeros(positions, dtype=dtype).masked_scatter_(mask, values).reshape(shape)


def _words(value: Tensor) -> Tensor:
    return dense.flat(value).view(INTEGERS[value.element_size()])
