"""Facts of a run that are compared when it resumes."""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule
from torch import Tensor

from lightning_sparsefl.errors import CheckpointMismatch
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.exchange.flat import Layout
from lightning_sparsefl.federated.fleet import names_of, sizes_fact
from lightning_sparsefl.federated.rounds.run_options import RunOptions
from lightning_sparsefl.federated.rounds.workload import Workload
from lightning_sparsefl.federated.sampling.samplers import Uniform
from lightning_sparsefl.federated.storage.checkpoint import report_changes
from lightning_sparsefl.federated.tracking.hyperparameters import (
    arguments_of,
    digest_of,
    hyperparameters,
    options_of,
    parts_of,
    plain,
    without_addresses,
)

STACK_SIZE = "stack size"
"""Fact by which clients are divided into stacks."""
SIZES = "client sizes"
"""Fact by which clients with other samples are recognised."""
_OF_SAMPLES = ("data.seed", "data.partition", "data.feature_shift", "data.client_names")
"""Facts, with those below them, that decide which samples a client has."""


def identity(algorithm: FederatedAlgorithm, num_clients: int, layout: Layout) -> dict[str, Any]:
    """Return what a checkpoint and every command that reads it must agree on, as plain values.

    Args:
        algorithm: The federated method.
        num_clients: Number of clients.
        layout: Layout of the model.
    """
    fields = {name: getattr(algorithm, name) for name in getattr(algorithm, "__dataclass_fields__", {})}
    options = fields | arguments_of(algorithm)  # which a class that is no dataclass may have besides
    return {
        "algorithm": type(algorithm).__name__,
        "algorithm options": {name: _plain(value) for name, value in options.items()},
        "data.num_clients": int(num_clients),
        "model": {name: list(shape) for name, shape in layout.shapes.items()},
    }


def training_facts(
    options: RunOptions, workload: Workload, data: Any, precision: str, stack_size: int
) -> dict[str, Any]:
    """Return the facts that the weights depend on, which a run that goes on must share.

    A fact that one option decides has the name of that option, which a user is told to change.

    Args:
        options: Options of the run.
        workload: Local work of the clients.
        data: The clients' data.
        precision: Precision of the module.
        stack_size: Largest number of clients in a stack.
    """
    federation, local = options.federation, options.local
    return {
        "seed_everything": options.seed,
        "trainer.gradient_clip_val": local.gradient_clip_val,
        "trainer.gradient_clip_algorithm": local.gradient_clip_algorithm or "norm",
        "trainer.accumulate_grad_batches": local.accumulate_grad_batches,
        "trainer.limit_train_batches": repr(local.limit_train_batches),  # 1 is a batch, and 1.0 is all of them
        "trainer.validate_locally": options.validate_locally,
        "trainer.precision": precision,
        "data.drop_last": workload.drop_last,
        SIZES: sizes_fact(data),
        "trainer.max_epochs": local.max_epochs,
        "federation.local_epochs": federation.local_epochs,
        "federation.redraw_local_epochs": federation.redraw_local_epochs or None,
        "data.batch_size": workload.batch_size,
        "batch sizes of the clients": {str(client): [*own] for client, own in workload.own.items()} or None,
        "federation.clients_per_round": federation.clients_per_round,
        "federation.sampler": None if federation.sampler == Uniform() else _option(federation.sampler),
        "federation.devices": _option(federation.devices),
        "federation.availability": _option(federation.availability),
        "federation.buffers": federation.buffers,
        "federation.reducer": _option(federation.reducer),
        "federation.server_optimizer": _option(federation.server_optimizer),
        "federation.clip_update": federation.clip_update,
        "federation.privacy": _option(federation.privacy),
        "federation.unseen_clients": federation.unseen_clients,
        "federation.monitor": federation.monitor,
        "federation.execution": federation.execution,
        "federation.capacities": federation.capacities,
        "federation.shuffle_capacities": federation.shuffle_capacities,
        "federation.redraw_capacities": federation.redraw_capacities or None,
        "federation.wire": federation.wire,
        STACK_SIZE: stack_size,
        **({"trainer.max_rounds": options.max_rounds} if options.algorithm.fixed_length else {}),
        "trainer.round_lr": _option(options.round_lr),
    }


def reported_facts(options: RunOptions, module: LightningModule, data: Any) -> dict[str, Any]:
    """Return the facts that the weights may depend on, and that a run may change when it resumes.

    Args:
        options: Options of the run.
        module: The user's module.
        data: The clients' data.
    """
    hparams, names = hyperparameters(options, data, module), names_of(data)
    spans = options.algorithm.follows_length or (options.round_lr is not None and options.round_lr.follows_length)
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    optimizer = getattr(module.configure_optimizers, "configuration", {})
    return {
        **{n.replace("/", "."): _lasting(v) for n, v in hparams.items() if n.partition("/")[0] in ("model", "data")},
        "model.frozen_parameters": plain(", ".join(frozen)) or None,
        "data.seed": data.seed_in_use() if hasattr(data, "seed_in_use") else getattr(data, "seed", None),
        "data.client_names": plain(names) if names else None,
        "federation.select": options.federation.select,
        "federation.eval_clients": options.federation.eval_clients,
        "federation.on_client_error": options.federation.on_client_error,
        "federation.min_clients": options.federation.min_clients,
        "trainer.check_val_every_n_round": options.check_val_every_n_round,
        **{name: _lasting(value) for name, value in optimizer.items() if value is not None},
        "trainer.client_callbacks": ", ".join(map(_described, options.client_callbacks)) or None,
        "trainer.max_rounds": options.max_rounds if spans else None,
        "trainer.num_threads": options.num_threads,
        "trainer.deterministic": options.deterministic or None,
        "trainer.limit_val_batches": repr(options.local.limit_val_batches),
        "trainer.limit_test_batches": repr(options.local.limit_test_batches),
    }


def report_other_samples(path: Path | None, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Warn about facts by which clients may have other samples than in the run, where both are known.

    Args:
        path: The checkpoint.
        theirs: Facts of the checkpoint from :func:`reported_facts`.
        ours: Facts of this run.
    """
    names = [name for name in theirs.keys() & ours.keys() if ".".join(name.split(".")[:2]) in _OF_SAMPLES]
    known = [name for name in names if theirs[name] is not None and ours[name] is not None]
    before, now = ({name: facts[name] for name in known} for facts in (theirs, ours))
    report_changes(path, before, now, "clients may have other samples than their models were trained on")


def require_equal_stacks(path: Path, theirs: Any, ours: int) -> None:
    """Check that a checkpoint is of a run with stacks of the same size.

    Args:
        path: The checkpoint.
        theirs: Stack size of the checkpoint's run; 1 = its clients have trained one after another.
        ours: Stack size of this run.

    Raises:
        CheckpointMismatch: If the sizes differ.
    """
    if theirs != ours:
        stacked = f"`local_engine: stacked` and `stack_size: {theirs}` of `federation`, and no `client_timeout`"
        raise CheckpointMismatch(
            f"{path} is of a run with another `federation.local_engine`: {_at_once(theirs)}, and in this run "
            f"{_at_once(ours)}; set {'`federation.local_engine: fast`' if theirs == 1 else stacked}."
        )


def _at_once(stack_size: Any) -> str:
    """Return how clients are trained, as a clause."""
    return "clients train one after another" if stack_size == 1 else f"up to {stack_size} clients train at once"


def _described(callback: Callback) -> str:
    """Return the name of a callback and its arguments that differ from their defaults."""
    options = ", ".join(f"{name}={value!r}" for name, value in options_of(callback).items())
    return f"{type(callback).__name__}({options})"


def _option(value: Any) -> str | None:
    """Return the text of an option that may be an object of the user's own class; None for None."""
    return None if value is None else _text(value)


def _lasting(value: Any) -> Any:
    """Return a number, or a text without addresses in memory, which differ in every process."""
    return value if isinstance(value, bool | int | float) else without_addresses(str(value))


def _plain(value: Any) -> Any:
    """Return a number, a string or None, or the text of another value."""
    return value if isinstance(value, bool | int | float | str | None) else _text(value)


def _text(value: Any) -> str:
    """Return the text of a value, the same in every process; arrays and tensors have a digest in it."""
    if isinstance(value, Tensor | np.ndarray):  # whose text leaves values out
        return digest_of(value)
    parts = parts_of(value)
    if parts is not None:
        return f"{type(value).__name__}({', '.join(f'{name}={_text(each)}' for name, each in parts.items())})"
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_text(key)}: {_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    return without_addresses(repr(value))
