"""Checks of users' own methods and callbacks: the contract tests of this package, as functions.

Each check is a function in :mod:`~lightning_sparsefl.testing.algorithm_checks` or
:mod:`~lightning_sparsefl.testing.callback_checks`, whose docstring states a promise. They need no pytest.
"""

from lightning_sparsefl.testing.kit import check_algorithm, check_callback, checks
from lightning_sparsefl.testing.promises import BrokenPromise

__all__ = ["BrokenPromise", "check_algorithm", "check_callback", "checks"]
