"""Flower's records around the bytes of orders and answers."""

from __future__ import annotations

from collections.abc import Sequence

from flwr.app import Array, ArrayRecord, RecordDict

_NAME = "parts"
_STYPE = "lightning-sparsefl/1"
"""Name of the format; :meth:`flwr.app.Array.numpy` refuses arrays of other formats than its own."""
_MOST_PARTS = 2**16


def to_records(parts: Sequence[bytes]) -> RecordDict:
    """Pack byte strings, as arrays: these are all that Flower cuts into pieces and stores by content.

    Args:
        parts: Byte strings, at most 65,536.
    """
    arrays = {f"{place:05d}": Array("uint8", (len(part),), _STYPE, part) for place, part in enumerate(parts)}
    return RecordDict({_NAME: ArrayRecord(arrays)})


def from_records(records: RecordDict) -> list[bytes]:
    """Unpack byte strings.

    Args:
        records: Records that :func:`to_records` made.

    Raises:
        ValueError: If the records are others.
    """
    arrays = records.array_records.get(_NAME)
    if arrays is None or len(arrays) > _MOST_PARTS or list(arrays) != [f"{i:05d}" for i in range(len(arrays))]:
        raise ValueError(f"The message has the records {sorted(records)[:5]}; expected numbered arrays in {_NAME!r}.")
    if any(array.stype != _STYPE for array in arrays.values()):
        raise ValueError(f"The message has arrays of another format than {_STYPE!r}; update the older side.")
    return [array.data for array in arrays.values()]
