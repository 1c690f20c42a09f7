"""The hyper-parameters that identify a run in a logger."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import Any

from lightning_sparsefl.federated.rounds.run_options import RunOptions

_SILENT = {
    "federation": (
        *("local_engine", "placement", "wire", "checkpoint_every_n_rounds", "pictures_every_n_rounds", "record_steps"),
        "workers_per_device",
    ),
    "trainer": ("max_steps", "log_every_n_steps", "default_root_dir"),
}
"""Options that do not change results, or are derived from others."""
_DATA = ("num_clients", "partition", "batch_size", "feature_shift")
"""Options of the data that are included."""


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
            **_changed(federation, _SILENT["federation"]),
        },
        "trainer": {
            "max_rounds": options.max_rounds,
            "max_epochs": local.max_epochs,
            "seed": options.seed,
            "round_lr": options.round_lr,
            "client_callbacks": ", ".join(type(callback).__name__ for callback in options.client_callbacks) or None,
            **_changed(local, _SILENT["trainer"]),
        },
        "data": {name: getattr(data, name, None) for name in _DATA},
        "model": hparams,
    }
    flat = _flat("algorithm", options.algorithm) | {"data": type(data).__name__, "model": type(module).__name__}
    for group, values in parts.items():
        for name, value in values.items():
            flat |= _flat(f"{group}/{name}", value)
    return flat


def _changed(options: Any, silent: Sequence[str]) -> dict[str, Any]:
    """Return the fields whose values differ from their defaults."""
    fields = [field for field in dataclasses.fields(options) if field.name not in silent]
    return {f.name: getattr(options, f.name) for f in fields if getattr(options, f.name) != f.default}


def _flat(name: str, value: Any) -> dict[str, Any]:
    """Flatten a dataclass into its name and its fields, one key each; return an empty dict for None."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return {} if value is None else {name: _plain(value)}
    flat: dict[str, Any] = {name: type(value).__name__}
    for field in dataclasses.fields(value):
        flat |= _flat(f"{name}/{field.name}", getattr(value, field.name))
    return flat


def _plain(value: Any) -> bool | int | float | str:
    """Return a value that every logger accepts: a short text, or the name if the text would be a memory address."""
    if isinstance(value, bool | int | float | str):
        return value
    text = str(value)
    return getattr(value, "__name__", type(value).__name__) if text.startswith("<") else shorten(text, 80)
