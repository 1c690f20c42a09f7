"""The worker that trains one client after another."""

from __future__ import annotations

import warnings

from lightning_sparsefl.federated.local.worker import ClientWorker


def test_warnings_are_shown_once_and_in_the_order_of_their_appearance():
    worker = object.__new__(ClientWorker)
    worker._warned = set()
    texts = [f"warning {number}" for number in range(40)]
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        for _ in range(2):
            with worker._warning_once():
                for text in texts:
                    warnings.warn(text, UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in shown] == texts
