"""Facts that server and nodes must share, so that a deployment computes what a simulation does."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from lightning_sparsefl import __version__
from lightning_sparsefl.federated.commands.node_side import NodeSide
from lightning_sparsefl.federated.exchange.hashing import checksum, fingerprint
from lightning_sparsefl.federated.tracking.hyperparameters import hyperparameters

from lightning_sparsefl_flower.secure_sum.policy import Policy

_EXAMPLES = (
    *("num_train", "num_test", "num_pooled", "fewest", "most", "noise", "users", "seed"),
    *("examples_per_client", "test_per_client", "val_fraction"),
)
"""Options of the package's data modules that decide which examples a node has."""
_MAY_DIFFER = frozenset(
    {
        *("trainer/max_rounds", "trainer/default_root_dir", "trainer/log_every_n_steps"),
        *(f"data/{name}" for name in _EXAMPLES),
    }
)
"""Options that a node does not use, or has of its own; the number of rounds comes with each order."""
_FORMAT = ("num_clients", "num_classes", "sample_shape", "batch_size", "drop_last", "eval_split")


def facts_of(side: NodeSide, data: Any, secure: Policy | None = None) -> dict[str, str]:
    """Return the facts of one side by name, as texts.

    Args:
        side: Module and options, set up.
        data: Data module of the configuration, whose data need not be here.
        secure: What this side demands of secure sums; None = updates are sent one by one.
    """
    layout = side.layout
    schema = {name: [list(shape), str(layout.dtypes[name])] for name, shape in layout.shapes.items()}
    local = {f"trainer/{name}": value for name, value in dataclasses.asdict(side.options.local).items()}
    options = {**hyperparameters(side.options, data, side.module), **local}
    return {
        "version of lightning-sparsefl": __version__,
        "version of torch": torch.__version__,
        "model schema": fingerprint(schema),
        "first weights": str(checksum(dict(side.worker.initial))),
        "data format": repr({name: getattr(data, name, None) for name in _FORMAT}),
        "precision": str(side.ranks.fabric.strategy.precision.precision),
        "local engine": side.federation.local_engine,
        "secure sum": str(secure),
        **{f"option {name}": str(value) for name, value in sorted(options.items()) if name not in _MAY_DIFFER},
    }
