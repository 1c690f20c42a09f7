"""Updates that cannot be averaged with those of the other clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_sparsefl.types import Update


def misfits(updates: Mapping[int, Update]) -> dict[int, str]:
    """Return which updates differ in form from most of the others.

    The form is the `kind` of the weights and the shape of each tensor of `extra`. The server knows neither before the
    updates arrive. That of the majority counts, so that one client among several cannot have the others left out.

    Args:
        updates: Updates of a round by client.

    Returns:
        The reason, as a clause, for each client whose update does not fit.

    Example:
        >>> import torch
        >>> one, other = Update(weights={}, extra={"c": {"n": torch.zeros(2)}}), Update(weights={})
        >>> misfits({0: Update(weights={}, extra={"c": {"n": torch.zeros(3)}}), 1: one, 2: one, 3: other})
        {0: "its shape of `extra['c']['n']` is (3,), and that of most others (2,)"}
    """
    found: dict[int, str] = {}
    forms = {client: dict(_form(update)) for client, update in updates.items()}
    for part in dict.fromkeys(part for form in forms.values() for part in form):
        (usual, _), *_ = Counter(form[part] for form in forms.values() if part in form).most_common(1)
        for client, form in forms.items():
            if form.get(part, usual) != usual:
                found.setdefault(client, f"its {part} is {form[part]!r}, and that of most others {usual!r}")
    return found


def _form(update: Update) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an update's form with their values."""
    if update.weights:
        yield "`kind`", update.kind
    for key, tree in update.extra.items():
        for name, tensor in tree.items():
            yield f"shape of `extra[{key!r}][{name!r}]`", tuple(tensor.shape)
