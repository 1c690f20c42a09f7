"""Functions of torchmetrics that depend on values, in a form for several clients.

Classification metrics check their labels, and look at their predictions to find out whether they are logits. Metric
objects and the functions in ``torchmetrics.functional`` do so by the same functions, which are replaced here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from operator import itemgetter
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from lightning_sparsefl.federated.local.stacked import functorch
from lightning_sparsefl.federated.local.stacked.rules import LayerRules, Rule, failing_alone, rule_for
from lightning_sparsefl.federated.local.stacked.states.leaves import map_tensors

_PACKAGE = "torchmetrics.functional.classification."
_NORMALIZATION = "normalize_logits_if_needed"
_VALIDATION = "_tensor_validation"
"""End of the names of functions that raise where labels or shapes are wrong."""


@contextmanager
def functions_for_clients() -> Iterator[None]:
    """Let functions of torchmetrics accept tensors of several clients within the context."""
    tables = _tables()
    for each in tables:
        each.of_module.update(each.replaced)
    try:
        yield
    finally:
        for each in tables:
            each.of_module.update(each.own)


class _Table(NamedTuple):
    """Functions of one module that are replaced."""

    of_module: dict[str, Any]
    """Attributes of the module."""
    own: dict[str, Any]
    """Functions by name."""
    replaced: dict[str, Any]
    """Functions that accept tensors of several clients, by name."""


@cache
def _tables() -> list[_Table]:
    found = []
    for of_module in [vars(module) for name, module in sys.modules.items() if name.startswith(_PACKAGE)]:
        names = [name for name in of_module if name == _NORMALIZATION or name.endswith(_VALIDATION)]
        own = {name: of_module[name] for name in names}
        found.append(_Table(of_module, own, {name: _for_clients(function) for name, function in own.items()}))
    return [each for each in found if each.own]


@cache
def _for_clients(function: FunctionType) -> Callable[..., Any]:
    """Return a function that sends tensors of several clients to a rule, and others to the function."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if any(map(functorch.is_batched, (*args, *kwargs.values()))):
            return handle_torch_function(called, args, *args, **kwargs)
        return function(*args, **kwargs)

    each = _for_each(function)
    rule_for(called)(partial(_normalized, each) if function.__name__ == _NORMALIZATION else each)
    return called


def _normalized(each: Rule, rules: LayerRules, tensor: Any, normalization: str | None) -> Any:
    """Return probabilities for each client: logits are normalized, which are recognized by numbers beyond 0 and 1."""
    if normalization is None:  # which has had several meanings
        return each(rules, tensor, normalization)
    given = rules.every(tensor)
    assert given is not None
    numbers = given.flatten(1)
    if given.device.type == "cpu":  # as torchmetrics, which differs between devices where a number is NaN
        are_logits = ~((numbers >= 0) & (numbers <= 1)).all(1)
    else:
        are_logits = ((numbers < 0) | (numbers > 1)).any(1)
    normalized = given.sigmoid() if normalization == "sigmoid" else given.softmax(2)
    return rules.close(torch.where(are_logits.view(-1, *[1] * (given.dim() - 1)), normalized, given))


def _for_each(function: Callable[..., Any]) -> Rule:
    """Return a rule that calls a function, which returns a tensor or nothing, for each client."""

    def rule(rules: LayerRules, *args: Any, **kwargs: Any) -> Any:
        given, found = map_tensors((args, kwargs), rules.every), []
        for place in range(rules.size):
            own, named = map_tensors(given, itemgetter(place))
            with failing_alone(function.__name__):
                found.append(function(*own, **named))
        return rules.close(torch.stack(found)) if isinstance(found[0], Tensor) else None

    return rule
