"""What the examples of a data set are split by, and what the test examples of a client are matched by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_sparsefl.data.by_group import ByGroup
from lightning_sparsefl.data.columns import Values, class_numbers, find_labels, groups_of, read_values
from lightning_sparsefl.data.partition import Partition
from lightning_sparsefl.errors import InvalidOption


@dataclass(frozen=True)
class Keys:
    """Labels and groups of the examples, int64."""

    labels: Tensor | None
    """Class of each training example, shape (examples,); None for unknown."""
    split: Tensor
    """What the training examples are split by, shape (examples,): groups, labels, or zeros without either."""
    train: Tensor
    """What a client's test examples must share with its training examples: values of the latter, shape (examples,)."""
    test: Tensor
    """The same of the test examples, shape (test examples,)."""
    names: Sequence[str] = ()
    """Value of each group as text, by its number; empty if the examples are not split by groups."""


def read_keys(train: Any, test: Any, labels: Values | None, test_labels: Values | None, partition: Partition) -> Keys:
    """Read labels and groups.

    Args:
        train: Training data.
        test: Test data; an empty sequence for no test data.
        labels: Option `labels` of the data module.
        test_labels: Option `test_labels` of the data module.
        partition: Partition of the training examples.

    Raises:
        InvalidOption: If labels or groups are missing that the partition needs, or do not fit the data.
    """
    known = _read_labels(train, test, labels, test_labels, partition.needs_labels)
    nothing = torch.zeros(len(train), dtype=torch.int64), torch.zeros(len(test), dtype=torch.int64)
    if partition.needs_labels and len(known) == 0:
        raise InvalidOption(
            f"`data.labels` is not set, but `data.partition` is {partition}, which splits by label; expected the name "
            "of a column, one value per example, or a function of an item."
        )
    if partition.needs_labels and len(known) == 1:
        raise InvalidOption(
            "`data.test_labels` is not set, but the test examples of a client are chosen by label; expected one value "
            "per test example, or `data.test_fraction` instead of `data.test`."
        )
    own, matched = known[0] if known else None, (known[0], known[1]) if len(known) == 2 else nothing
    if not isinstance(partition, ByGroup):
        return Keys(own, nothing[0] if own is None else own, *matched)
    groups, values = _read_groups(train, test, partition.by)
    return Keys(own, groups[0], *((groups[0], groups[1]) if len(groups) == 2 else matched), list(map(str, values)))


def _read_labels(
    train: Any, test: Any, labels: Values | None, test_labels: Values | None, are_needed: bool
) -> list[Tensor]:
    """Return the labels of the training and the test examples, as far as they are known."""
    found = find_labels(train)
    if found is not None and found.dtype.kind == "f" and not are_needed:
        found = None  # targets of a regression may be whole numbers too
    own = found if labels is None else read_values(train, labels, "data.labels")
    if own is None:
        return []
    if test_labels is None and labels is not None and (isinstance(labels, str) or callable(labels)):
        test_labels = labels
    if test_labels is not None:
        others: np.ndarray | None = read_values(test, test_labels, "data.test_labels") if len(test) else own[:0]
    else:  # labels that are found in one of the two sets and given for the other may have different meanings
        others = find_labels(test) if found is not None and np.array_equal(own, found) else None
    if not len(test):
        others = own[:0]
    return class_numbers([own] if others is None else [own, others], "data.labels")


def _read_groups(train: Any, test: Any, by: Values) -> tuple[list[Tensor], list[Any]]:
    """Return the groups of the training examples, and those of the test examples unless only values are known."""
    named = isinstance(by, str) or callable(by)
    parts = [train, test] if named and len(test) else [train]
    return groups_of([read_values(part, by, "data.partition.by") for part in parts], "data.partition.by")
