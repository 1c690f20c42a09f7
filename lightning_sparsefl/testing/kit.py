"""Entry points: all checks of an object of the user's, as one call or as cases of a parametrized test."""

from __future__ import annotations

import io
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor

from lightning_sparsefl.data import Partition
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated import CohortSampler, FederatedAlgorithm, Reducer
from lightning_sparsefl.report import silenced
from lightning_sparsefl.testing import (
    algorithm_checks,
    callback_checks,
    partition_checks,
    reducer_checks,
    sampler_checks,
)
from lightning_sparsefl.testing.small_federation import SmallFederation
from lightning_sparsefl.testing.small_fit import Net, SmallFit

Module = Callable[..., LightningModule]
Subject = FederatedAlgorithm | Callback | CohortSampler | Partition | Reducer

_FORKS = hasattr(os, "fork")

_ALGORITHM = (
    algorithm_checks.is_a_frozen_value,
    algorithm_checks.is_reproducible,
    algorithm_checks.learns,
    algorithm_checks.leaves_messages_unchanged,
    algorithm_checks.leaves_the_servers_state_unchanged,
    algorithm_checks.is_the_same_in_both_engines,
    algorithm_checks.is_the_same_in_stacks,
    algorithm_checks.is_the_same_when_encoded,
    algorithm_checks.is_the_same_after_a_resume,
    algorithm_checks.leaves_failed_clients_out,
    algorithm_checks.exports_what_it_scored,
    algorithm_checks.scores_what_clients_trained,
    algorithm_checks.profiles_its_costs,
    algorithm_checks.trains_with_its_masks_and_callbacks,
)
_ALGORITHM_WITH_FORKS = (
    algorithm_checks.is_the_same_on_several_ranks,
    algorithm_checks.is_the_same_through_a_pipe,
)
"""Checks that fork processes, which Windows cannot."""
_CALLBACK = (
    callback_checks.trains_in_a_client_as_in_a_trainer,
    callback_checks.is_the_same_after_a_resume,
    callback_checks.saves_an_ordinary_checkpoint,
    callback_checks.fits_several_times,
)
_CALLBACK_WITH_MASKS = (
    callback_checks.holds_its_masks,
    callback_checks.keeps_masks_in_every_verb,
    callback_checks.holds_masks_under_averaging,
    callback_checks.exports_without_zeros,
)
_SAMPLER = (
    sampler_checks.is_a_frozen_value,
    sampler_checks.draws_from_its_generator,
    sampler_checks.leaves_its_state_unchanged,
    sampler_checks.is_the_same_after_a_resume,
)
_SAMPLER_WITH_FORKS = (sampler_checks.is_the_same_on_several_ranks,)
_REDUCER = (
    reducer_checks.is_a_frozen_value,
    reducer_checks.learns,
    reducer_checks.is_the_same_after_a_resume,
    reducer_checks.is_the_same_when_encoded,
)
_REDUCER_WITH_FORKS = (reducer_checks.is_the_same_on_several_ranks,)
_PARTITION = (
    partition_checks.is_a_frozen_value,
    partition_checks.gives_examples_to_one_client,
    partition_checks.depends_on_the_seed_alone,
    partition_checks.leaves_the_global_generators_alone,
    partition_checks.leaves_labels_unchanged,
    partition_checks.needs_labels_only_if_it_says_so,
)


def check_algorithm(algorithm: FederatedAlgorithm, module: Module | None = None) -> tuple[str, ...]:
    """Check that a method keeps the promises that the methods of this package keep.

    It takes about ten seconds of one core. Where processes cannot be forked, as on Windows, two checks are left
    out.

    Args:
        algorithm: Method to check, with options that let it learn in five rounds.
        module: Function that makes the module that the method trains, for inputs of ``(batch, 1, 1, 8)`` in 4 classes;
            it logs ``train_acc`` and ``val_acc``. Default: a multilayer perceptron with one hidden layer.

    Returns:
        Names of the promises.

    Raises:
        BrokenPromise: If a promise is broken.
        InvalidOption: If `algorithm` is not a method.
    """
    return _run(_algorithm_checks(algorithm, module))


def check_callback(callback: Callback, module: Module | None = None) -> tuple[str, ...]:
    """Check that a callback keeps the promises that the callbacks of this package keep.

    A callback has masks if it has an attribute `masks`: bool tensors by the names of parameters, during a fit. It takes
    about three seconds of one core.

    Args:
        callback: Callback to check, which is copied for each fit.
        module: Function of the keyword `seed` that makes the module that is trained, for batches of inputs
            ``(batch, 5)`` and 3 classes. Default: a multilayer perceptron, :class:`small_fit.Net`.

    Returns:
        Names of the promises.

    Raises:
        BrokenPromise: If a promise is broken.
        InvalidOption: If `callback` is not a callback.
    """
    return _run(_callback_checks(callback, module))


def check_sampler(sampler: CohortSampler, federation: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """Check that a sampler keeps the promises that the samplers of this package keep.

    It takes about ten seconds of one core. Where processes cannot be forked, as on Windows, one check is left out.

    Args:
        sampler: Sampler to check, which draws four of six clients.
        federation: Further options of :class:`~lightning_sparsefl.federated.Federation` that it needs, such as
            `devices`. Clients log ``train_acc`` and ``train_loss``.

    Returns:
        Names of the promises.

    Raises:
        BrokenPromise: If a promise is broken.
        InvalidOption: If `sampler` is not a sampler.
    """
    return _run(_sampler_checks(sampler, federation))


def check_reducer(reducer: Reducer) -> tuple[str, ...]:
    """Check that a reducer keeps the promises that the reducers of this package keep.

    It takes about ten seconds of one core. Where processes cannot be forked, as on Windows, one check is left out.

    Args:
        reducer: Reducer to check.

    Returns:
        Names of the promises.

    Raises:
        BrokenPromise: If a promise is broken.
        InvalidOption: If `reducer` is not a reducer.
    """
    return _run(_reducer_checks(reducer))


def check_partition(partition: Partition, labels: Tensor | None = None, num_clients: int = 10) -> tuple[str, ...]:
    """Check that a partition keeps the promises that the partitions of this package keep.

    Args:
        partition: Partition to check.
        labels: Class of each example, int64 of shape (examples,). Default: 600 examples of 10 classes.
        num_clients: Number of clients.

    Returns:
        Names of the promises.

    Raises:
        BrokenPromise: If a promise is broken.
        InvalidOption: If `partition` is not a partition.
    """
    return _run(_partition_checks(partition, labels, num_clients))


def checks(subject: Subject, *args: Any, **options: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name of each promise, and a function without arguments that raises if it is broken.

    Args:
        subject: Method, callback, sampler, reducer or partition to check.
        args: Further arguments of :func:`check_algorithm`, :func:`check_callback`, :func:`check_sampler` or
            :func:`check_partition`.
        options: The same by name.

    Raises:
        InvalidOption: If `subject` is something else.

    Example::

        @pytest.mark.parametrize(("name", "check"), checks(MyMethod()))
        def test_my_method(name, check):
            check()
    """
    kinds: dict[type, Callable[..., Iterator[tuple[str, Any]]]] = {
        Callback: _callback_checks,
        CohortSampler: _sampler_checks,
        Reducer: _reducer_checks,
        Partition: _partition_checks,
    }
    found = next((find for kind, find in kinds.items() if isinstance(subject, kind)), _algorithm_checks)
    return found(subject, *args, **options)


def _run(found: Iterator[tuple[str, Callable[[], None]]]) -> tuple[str, ...]:
    names = []
    for name, check in found:
        check()
        names.append(name)
    return tuple(names)


def _algorithm_checks(algorithm: Any, module: Module | None = None) -> Iterator[tuple[str, Callable[[], None]]]:
    _require_kind(algorithm, FederatedAlgorithm, "MyMethod()")
    module_for = None if module is None else (lambda algorithm: module())
    found = (*_ALGORITHM, *(_ALGORITHM_WITH_FORKS if _FORKS else ()))
    return _named_checks(found, algorithm, partial(SmallFederation, module_for=module_for))


def _callback_checks(callback: Any, module: Module | None = None) -> Iterator[tuple[str, Callable[[], None]]]:
    _require_kind(callback, Callback, "MyCallback()")
    found = (*_CALLBACK, *(_CALLBACK_WITH_MASKS if hasattr(callback, "masks") else ()))
    return _named_checks(found, callback, partial(SmallFit, module=module or partial(Net, width=60)))


def _sampler_checks(
    sampler: Any, federation: Mapping[str, Any] | None = None
) -> Iterator[tuple[str, Callable[[], None]]]:
    _require_kind(sampler, CohortSampler, "MySampler()")
    found = (*_SAMPLER, *(_SAMPLER_WITH_FORKS if _FORKS else ()))
    options = {**(federation or {}), "sampler": sampler}
    return _named_checks(found, sampler, partial(SmallFederation, federation=options))


def _reducer_checks(reducer: Any) -> Iterator[tuple[str, Callable[[], None]]]:
    _require_kind(reducer, Reducer, "MyReducer()")
    found = (*_REDUCER, *(_REDUCER_WITH_FORKS if _FORKS else ()))
    options = {"reducer": reducer, "capacities": [0.5, 1.0]}
    return _named_checks(found, reducer, partial(SmallFederation, federation=options))


def _partition_checks(
    partition: Any, labels: Tensor | None = None, num_clients: int = 10
) -> Iterator[tuple[str, Callable[[], None]]]:
    _require_kind(partition, Partition, "MyPartition()")
    data = partition_checks.Labels(torch.arange(600) * 7 % 10 if labels is None else labels, num_clients)
    return _named_checks(_PARTITION, partition, lambda folder: data)


def _require_kind(subject: Any, kind: type, example: str) -> None:
    if not isinstance(subject, kind):
        name = f"class {subject.__name__}" if isinstance(subject, type) else type(subject).__name__
        raise InvalidOption(f"`{name}` is checked; expected a `{kind.__name__}`, such as `{example}`.")


def _named_checks(found: Any, subject: Any, bench: Callable[[Path], Any]) -> Iterator[tuple[str, Callable[[], None]]]:
    return ((check.__name__, partial(_apart, check, subject, bench)) for check in found)


def _apart(check: Callable[[Any, Any], None], subject: Any, bench: Callable[[Path], Any]) -> None:
    """Run a check in a temporary folder, silently, with one thread, and leave the random state as it was."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]), _silent():
            check(subject, bench(Path(folder)))
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _silent() -> Iterator[None]:
    """Show no progress, no warnings, and no tracebacks of clients that fail on purpose."""
    with silenced(), warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
