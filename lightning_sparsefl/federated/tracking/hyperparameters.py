"""The hyper-parameters that identify a run in a logger."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_sparsefl.federated.exchange.hashing import fingerprint
from lightning_sparsefl.federated.rounds.run_options import RunOptions
from lightning_sparsefl.report.reading.options import WITHOUT_EFFECT

_DERIVED = ("max_steps", "log_every_n_steps")
"""Fields of the local options that are no options of a run."""
_DATA = ("num_clients", "partition", "batch_size", "feature_shift")
"""Options of the data that are included."""
_EXAMPLES = ("modules", "test", "train")
"""Arguments of data modules that are the data itself."""
_LONGEST = 80
"""Number of characters of a text that is not cut."""


def hyperparameters(options: RunOptions, data: Any, module: Any) -> dict[str, Any]:
    """Return the hyper-parameters of a run in a flat dict of plain values.

    They include all options of the method and the module. Options of the federation and the trainer are included if
    they can change results and differ from their defaults.

    Args:
        options: Options of the run.
        data: Data module of the clients.
        module: Module of the user.
    """
    local, federation = options.local, options.federation
    hparams = {name: value for name, value in module.hparams.items() if not name.startswith("_")}
    parts: dict[str, Mapping[str, Any]] = {
        "federation": {
            "clients_per_round": federation.clients_per_round,
            **_changed(federation, WITHOUT_EFFECT["federation"]),
        },
        "trainer": {
            "max_rounds": options.max_rounds,
            "max_epochs": local.max_epochs,
            "seed": options.seed,
            "round_lr": options.round_lr,
            "client_callbacks": ", ".join(type(callback).__name__ for callback in options.client_callbacks) or None,
            **_options_of_all(options.client_callbacks),
            **_changed(local, (*WITHOUT_EFFECT["trainer"], *_DERIVED)),
        },
        "data": {**_options_of_data(data), **{name: getattr(data, name, None) for name in _DATA}},
        "model": hparams,
    }
    flat = _flat("algorithm", options.algorithm) | {"data": type(data).__name__, "model": type(module).__name__}
    for group, values in parts.items():
        for name, value in values.items():
            flat |= _flat(f"{group}/{name}", value)
    return flat


def _options_of_data(data: Any) -> dict[str, Any]:
    """Return the options of a data module that differ from their defaults; of this package's, those with an effect."""
    silent = WITHOUT_EFFECT["data"] if type(data).__module__.startswith("lightning_sparsefl.") else ()
    return options_of(data, (*_EXAMPLES, *silent))


def _changed(options: Any, silent: Sequence[str]) -> dict[str, Any]:
    """Return the fields whose values differ from their defaults."""
    fields = [field for field in dataclasses.fields(options) if field.name not in silent]
    return {f.name: getattr(options, f.name) for f in fields if getattr(options, f.name) != f.default}


def options_of(callback: Any, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the arguments of a callback that differ from their defaults, where they are attributes of the same name.

    Args:
        callback: Callback, or another object with options, that has not been used yet.
        without: Names of arguments to leave out.
    """
    parameters = _parameters(callback)
    values = {n: (value, parameters[n].default) for n, value in arguments_of(callback).items() if n not in without}
    return {name: plain(value) for name, (value, default) in values.items() if not _equal(value, default)}


def arguments_of(value: Any) -> dict[str, Any]:
    """Return the arguments that an object was made with, where they are attributes of the same name.

    Args:
        value: Object of any class.
    """
    return {name: getattr(value, name) for name in _parameters(value) if hasattr(value, name)}


def _parameters(value: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the constructor of an object, and of those that get its further keyword arguments.

    A class in C without a signature has no parameters.
    """
    found: dict[str, inspect.Parameter] = {}
    for kind in (kind for kind in type(value).__mro__ if kind is type(value) or "__init__" in vars(kind)):
        try:
            parameters = inspect.signature(kind).parameters
        except ValueError:
            break
        found = {**parameters, **found}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return found


def parts_of(value: Any) -> dict[str, Any] | None:
    """Return the fields of a dataclass, or the arguments of an object whose own text is that of its class alone.

    Fields that do not take part in comparisons, such as the path of a key, are left out.

    Args:
        value: Value of any type.

    Returns:
        Values by name; None for a value that its text describes.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.compare}
    own: Any = type(value).__repr__
    return arguments_of(value) if own is object.__repr__ else None


def _options_of_all(callbacks: Sequence[Callback]) -> dict[str, Any]:
    """Return the options of all callbacks by name; a second one of a class is named by its place, too."""
    options: dict[str, Any] = {}
    for place, callback in enumerate(callbacks):
        kind = type(callback)
        name = kind.__name__ if kind not in map(type, callbacks[:place]) else f"{kind.__name__}.{place}"
        options |= {f"client_callbacks/{name}/{option}": value for option, value in options_of(callback).items()}
    return options


def _equal(value: Any, default: Any) -> bool:
    """Return whether a value is the default, by its text, since a comparison of tensors has no single result."""
    return value is default or (type(value) is type(default) and plain(value) == plain(default))


def _flat(name: str, value: Any) -> dict[str, Any]:
    """Flatten an object into its name and its options, one key each; return an empty dict for None."""
    parts = parts_of(value)
    if parts is None:
        return {} if value is None else {name: plain(value)}
    flat: dict[str, Any] = {name: type(value).__name__}
    for option, chosen in parts.items():
        flat |= _flat(f"{name}/{option}", chosen)
    return flat


def without_addresses(text: str) -> str:
    """Return a text without addresses in memory, which differ in every process.

    Args:
        text: Text of an object.

    Example:
        >>> without_addresses("[<Net object at 0x7fb1>]")
        '[<Net object>]'
    """
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def digest_of(value: Tensor | np.ndarray) -> str:
    """Return the type, the shape and the digest of an array or a tensor.

    Args:
        value: Array or tensor of any type.

    Example:
        >>> digest_of(np.ones(2))[:13]
        'ndarray(2,) 0'
    """
    content = value if isinstance(value, Tensor) else value.tolist()
    return f"{type(value).__name__}{tuple(value.shape)} {fingerprint(content)[:16]}"


class _Digest:
    """Stands for an array in the text of a container."""

    def __init__(self, value: Tensor | np.ndarray) -> None:
        self._text = digest_of(value)

    def __repr__(self) -> str:
        return self._text


def _digested(value: Any) -> Any:
    return _Digest(value) if isinstance(value, Tensor | np.ndarray) else value


def plain(value: Any) -> bool | int | float | str:
    """Return a value that every logger accepts: a short text, or the name if the text would be a memory address.

    A long text ends with its digest, so that texts which differ behind the cut stay different. Arrays and tensors,
    whose texts leave values out, have digests in their places.

    Args:
        value: Value of an option.
    """
    if isinstance(value, bool | int | float | str):
        return value
    scalars = isinstance(value, list | tuple) and set(map(type, value)) <= {bool, int, float, str}  # maybe a million
    text = without_addresses(str(value if scalars else tree_map(_digested, value)))
    if text.startswith("<"):
        return getattr(value, "__name__", type(value).__name__)
    if len(text) <= _LONGEST:
        return text
    digest = f"... ({sha256(text.encode()).hexdigest()[:8]})"
    return text[: _LONGEST - len(digest)] + digest
