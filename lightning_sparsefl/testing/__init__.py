"""Checks of users' own classes: the contract tests of this package, as functions.

Methods, callbacks, samplers, reducers and partitions are checked. Each check is a function in
:mod:`~lightning_sparsefl.testing.algorithm_checks`, :mod:`~lightning_sparsefl.testing.callback_checks`,
:mod:`~lightning_sparsefl.testing.sampler_checks`, :mod:`~lightning_sparsefl.testing.reducer_checks` or
:mod:`~lightning_sparsefl.testing.partition_checks`, and its docstring states a promise. They need no pytest.
"""

from lightning_sparsefl.testing.kit import (
    check_algorithm,
    check_callback,
    check_partition,
    check_reducer,
    check_sampler,
    checks,
)
from lightning_sparsefl.testing.promises import BrokenPromise

__all__ = [
    "BrokenPromise",
    "check_algorithm",
    "check_callback",
    "check_partition",
    "check_reducer",
    "check_sampler",
    "checks",
]
