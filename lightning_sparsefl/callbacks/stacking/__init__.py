"""Callbacks of several clients at once, for the stacked engine (`federation.local_engine: stacked`).

A stack trains clients whose weights are leaves with the clients in dimension 0. What a callback does to one client's
weights and gradients, its counterpart here does to those of all clients of a stack. A callback of another class whose
attribute `stackable` is True is called for each client with views of that client's module, optimizer and trainer: it
may read weights, and change weights, gradients and the optimizer's state in place, in the hooks around batches, epochs
and steps. All others train their clients one after another. Each counterpart is compared with its callback by
`tests/contract/test_stacked_parity.py`.
"""

from lightning_sparsefl.callbacks.stacking.base import StackedCallback, StackedPass
from lightning_sparsefl.callbacks.stacking.kinds import accumulates, stacked, stacking_key

__all__ = ["StackedCallback", "StackedPass", "accumulates", "stacked", "stacking_key"]
