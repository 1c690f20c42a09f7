"""Arguments of a module's ``forward``."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter, signature
from typing import Any

from torch import nn

POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
"""Kinds of parameters that can be passed by position."""


def split_arguments(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return inputs as positional and as keyword arguments of a module's ``forward``.

    Args:
        module: Module with a ``forward``.
        inputs: Arguments by position. A single mapping is passed by keywords if ``forward`` takes nothing else, as in
            ``forward(self, **batch)``; of keywords with names, these only.

    Example:
        >>> class ByKeyword(nn.Module):
        ...     def forward(self, *, tokens, mask=None):
        ...         return tokens
        >>> split_arguments(ByKeyword(), ({"tokens": 1, "labels": 2},)), split_arguments(nn.ReLU(), (1,))
        (((), {'tokens': 1}), ((1,), {}))
    """
    if len(inputs) != 1 or not isinstance(inputs[0], Mapping):
        return inputs, {}
    parameters = signature(module.forward).parameters.values()
    kinds = {parameter.kind for parameter in parameters}
    if kinds.intersection(POSITIONAL) or not kinds.intersection((Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD)):
        return inputs, {}
    named = {parameter.name for parameter in parameters if parameter.kind is Parameter.KEYWORD_ONLY}
    takes_all = Parameter.VAR_KEYWORD in kinds
    return (), {name: value for name, value in inputs[0].items() if takes_all or name in named}
