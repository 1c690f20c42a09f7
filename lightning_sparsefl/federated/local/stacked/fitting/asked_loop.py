"""Loop of a fit for several clients, which notes whether anybody asks for what follows from a client's own batches."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_sparsefl.federated.local.fast.loops import FitLoop
from lightning_sparsefl.federated.local.stacked.logs import NotStackable


class AskedLoop(FitLoop):
    """Loop that notes questions for the number of batches, for the last batch and for the batch's place in the fit.

    Clients of a stack have one loop, so that its answers are right for clients with equal numbers of batches only.

    Attributes:
        asked: Whether any of them has been asked for.
        counted: Whether the number of optimizer steps has been asked for; clients then step together only if theirs
            are equal.
        for_all: Whether what runs is done once for all clients, so that it must not ask for the number of steps either.
    """

    asked = counted = for_all = False

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps that the clients of the batch have taken.

        Raises:
            NotStackable: If their numbers differ.
        """
        self.asked, self.counted = self.asked or self.for_all, True
        if len(set(self._steps)) > 1:
            raise NotStackable("asks for the number of steps, of which each client has its own")
        return self._steps[0]

    @optimizer_steps.setter
    def optimizer_steps(self, value: int) -> None:
        """Set the number for all clients."""
        self._steps: Sequence[int] = [value]

    _batches_that_stepped = optimizer_steps
    """The same; it is the step of Lightning's own logs."""

    def set_steps(self, steps: Sequence[int]) -> None:
        """Set the numbers of optimizer steps that the clients of a batch have taken.

        Args:
            steps: One number for each client.
        """
        self._steps = steps

    @property
    def max_batches(self) -> int | float:
        """Number of batches of an epoch."""
        self.asked = True
        return self._most

    @max_batches.setter
    def max_batches(self, value: int | float) -> None:
        """Set the number."""
        self._most = value

    @property
    def is_last_batch(self) -> bool:
        """Whether this is the last batch of the epoch."""
        self.asked = True
        return self._last

    @is_last_batch.setter
    def is_last_batch(self, value: bool) -> None:
        """Set whether this is the last batch."""
        self._last = value

    @property
    def total_batch_idx(self) -> int:
        """Index of the batch within the fit, from 0."""
        self.asked = True
        return self._ready_before + self._ready - 1

    def setup_data(self) -> None:
        """Prepare no loader, since the clients' batches are read together."""
