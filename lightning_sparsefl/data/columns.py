"""Labels and groups of the examples of any data set: where they are found, and how they become numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from lightning_sparsefl.errors import InvalidOption

Values: TypeAlias = str | Sequence[Any] | Tensor | np.ndarray | Callable[[Any], Any]
"""One value per example: the name of a column, the values themselves, or a function of an item."""


class _SeveralLengths(Exception):
    """Values that are no array, such as lists of several lengths."""


def read_values(dataset: Any, source: Values, option: str) -> np.ndarray:
    """Read one value of each example of a data set.

    A name is that of a column (Hugging Face), of an attribute with one value per example (torchvision's `targets`), or
    of a key of items that are mappings. In the last case, and for a function, all items are read once.

    Args:
        dataset: Data set with a length and items; also a ``Subset`` or a ``ConcatDataset``.
        source: Name of a column, values, or function of an item.
        option: Dotted name of the option, for the error message.

    Returns:
        Values, shape (examples,).

    Raises:
        InvalidOption: If there is no such column, or not one value per example.

    Example:
        >>> read_values([{"x": 0.5, "site": "b"}, {"x": 0.1, "site": "a"}], "site", "data.labels").tolist()
        ['b', 'a']
    """
    try:
        if isinstance(source, str):
            values = _column(dataset, source, option)
        elif callable(source):
            values = _as_array(source(dataset[index]) for index in range(len(dataset)))
        else:
            values = _as_array(source)
    except _SeveralLengths as error:
        raise InvalidOption(f"`{option}` has values of several lengths; expected a number or a name each.") from error
    if values.shape != (len(dataset),):
        found = f"{len(values)} values" if values.ndim == 1 else f"values of shape {values.shape}"
        raise InvalidOption(f"`{option}` has {found}; expected one for each of the {len(dataset)} examples.")
    return values


def find_labels(dataset: Any) -> np.ndarray | None:
    """Return the labels that a data set has where most data sets have them, or None.

    These places are the attributes `targets` and `labels`, the columns ``label`` and ``labels``, and the second of two
    tensors of a ``TensorDataset``. Values that are no classes, such as targets of a regression, are not labels.

    Args:
        dataset: Data set with a length and items; also a ``Subset`` or a ``ConcatDataset``.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> find_labels(Subset(TensorDataset(torch.zeros(3, 2), torch.tensor([4, 5, 6])), [2, 0])).tolist()
        [6, 4]
    """
    if isinstance(dataset, Subset):
        whole = find_labels(dataset.dataset)
        return None if whole is None else whole[_as_array(dataset.indices)]
    if isinstance(dataset, ConcatDataset):
        parts = [find_labels(part) for part in dataset.datasets]
        known = [part for part in parts if part is not None]
        return np.concatenate(known) if len(known) == len(parts) else None
    columns = [name for name in ("label", "labels") if name in _column_names(dataset)]
    tensors: Any = getattr(dataset, "tensors", ())
    found: list[Any] = [getattr(dataset, name, None) for name in ("targets", "labels")]
    found += [_unformatted(dataset)[name] for name in columns] + ([tensors[1]] if len(tensors) == 2 else [])
    fitting = [_as_array(values) for values in found if _has_one_each(values, len(dataset))]
    return next((values for values in fitting if _are_classes(values)), None)


def class_numbers(parts: Sequence[np.ndarray], option: str) -> list[Tensor]:
    """Return labels as int64: whole numbers >= 0 as they are, other values numbered in sorted order.

    Args:
        parts: Labels of the parts of a data set, which share their classes.
        option: Dotted name of the option, for the error message.

    Raises:
        InvalidOption: If values are fractions, missing, or cannot be sorted.

    Example:
        >>> class_numbers([np.array(["dog", "cat"]), np.array(["dog"])], "data.labels")
        [tensor([1, 0]), tensor([1])]
    """
    joined = np.concatenate(parts)
    if not _are_classes(joined):
        first, *_ = joined[~_are_whole(joined)].tolist()
        raise InvalidOption(f"`{option}` has the value {first!r}; expected classes: whole numbers, or names.")
    plain = np.issubdtype(joined.dtype, np.number) and (joined >= 0).all()
    return _split(joined.astype(np.int64), parts) if plain else group_numbers(parts, option)


def group_numbers(parts: Sequence[np.ndarray], option: str) -> list[Tensor]:
    """Return values numbered from 0 in sorted order, int64; see :func:`groups_of`.

    Example:
        >>> group_numbers([np.array([70, 30]), np.array([30])], "data.partition.by")
        [tensor([1, 0]), tensor([0])]
    """
    return groups_of(parts, option)[0]


def groups_of(parts: Sequence[np.ndarray], option: str) -> tuple[list[Tensor], list[Any]]:
    """Return values numbered from 0 in sorted order, int64, and the value of each number.

    Args:
        parts: Values of the parts of a data set, which share their groups.
        option: Dotted name of the option, for the error message.

    Raises:
        InvalidOption: If values are missing or cannot be sorted.

    Example:
        >>> groups_of([np.array([70, 30]), np.array([30])], "data.partition.by")
        ([tensor([1, 0]), tensor([0])], [30, 70])
    """
    joined = np.concatenate(parts)
    try:
        if np.any((joined == None) | (joined != joined)):  # noqa: E711 - None or NaN, value by value
            raise TypeError
        values, numbers = np.unique(joined, return_inverse=True)
        return _split(numbers, parts), values.tolist()
    except TypeError as error:
        text = f"`{option}` has values that are missing or of several kinds; expected one per example."
        raise InvalidOption(text) from error


def _column(dataset: Any, name: str, option: str) -> np.ndarray:
    if isinstance(dataset, Subset):
        chosen: np.ndarray = _column(dataset.dataset, name, option)[_as_array(dataset.indices)]
        return chosen
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([_column(part, name, option) for part in dataset.datasets])
    if name in _column_names(dataset):
        return _as_array(_unformatted(dataset)[name])
    attribute: Any = getattr(dataset, name, None)
    if hasattr(attribute, "__len__"):
        return _as_array(attribute)
    first = dataset[0] if len(dataset) else None
    keys = list(first) if isinstance(first, Mapping) else _column_names(dataset)
    if name not in keys:
        known = f"one of {', '.join(map(str, keys))}" if keys else "an attribute with one value per example"
        raise InvalidOption(
            f"`{option}` is {name!r}, but {type(dataset).__name__} has no such column; expected {known}."
        )
    return _as_array(dataset[index][name] for index in range(len(dataset)))


def _has_one_each(values: Any, count: int) -> bool:
    """Return whether there are `count` numbers or names, and not sequences of them."""
    if not hasattr(values, "__len__") or isinstance(values, str) or len(values) != count:
        return False
    return count > 0 and np.ndim(next(iter(values))) == 0


def _unformatted(dataset: Any) -> Any:
    """Return a data set of Hugging Face without its format, which may hide columns."""
    return dataset.with_format(None) if hasattr(dataset, "with_format") else dataset


def _column_names(dataset: Any) -> list[str]:
    names = getattr(dataset, "column_names", None)  # of Hugging Face; a dict of lists for several splits
    return list(names) if isinstance(names, list | tuple) else []


def _as_array(values: Iterable[Any]) -> np.ndarray:
    if isinstance(values, Tensor):
        return values.detach().cpu().numpy()
    if isinstance(values, np.ndarray):
        return values
    plain = [value.tolist() if isinstance(value, Tensor | np.generic) else value for value in values]
    named = any(isinstance(value, str) for value in plain)  # among which NumPy would write a missing value as a name
    try:
        return np.asarray(plain, dtype=object if named else None)
    except ValueError as error:
        raise _SeveralLengths from error


def _are_classes(values: np.ndarray) -> bool:
    return bool(_are_whole(values).all())


def _are_whole(values: np.ndarray) -> np.ndarray:
    return values == np.round(values) if values.dtype.kind == "f" else np.ones(values.shape, dtype=bool)


def _split(numbers: np.ndarray, parts: Sequence[np.ndarray]) -> list[Tensor]:
    return list(torch.from_numpy(numbers.astype(np.int64)).split([len(part) for part in parts]))
