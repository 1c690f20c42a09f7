"""Loop of a fit for several clients, which notes whether anybody asks for what follows from a client's own batches."""

from __future__ import annotations

from lightning_sparsefl.federated.local.fast.loops import FitLoop


class AskedLoop(FitLoop):
    """Loop that notes questions for the number of batches, for the last batch and for the batch's place in the fit.

    Clients of a stack have one loop, so that its answers are right for clients with equal numbers of batches only.

    Attributes:
        asked: Whether any of them has been asked for.
        for_all: Whether what runs is done once for all clients, so that it must not ask for the number of steps either.
    """

    asked = for_all = False

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps that the clients of the batch have taken."""
        self.asked = self.asked or self.for_all
        return self._steps

    @optimizer_steps.setter
    def optimizer_steps(self, value: int) -> None:
        """Set the number."""
        self._steps = value

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
