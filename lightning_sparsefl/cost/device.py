"""Simulated devices of clients: their capacity and the time of a client-round."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_sparsefl.errors import check_types, require
from lightning_sparsefl.seeds import generator
from lightning_sparsefl.types import ClientView


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Devices of the clients: the share of the full model that each can train, its speed and its uplink.

    The defaults are those of FedLPS (Xue et al., arXiv:2412.07216): five levels of capacity, 727 GFLOP/s for a capacity
    of 1, and an uplink of 14.9 MiB/s.

    Raises:
        InvalidOption: If an option is out of its range.

    Example:
        >>> devices = Devices()
        >>> round(devices.seconds(capacity=0.5, flops=727e9, bytes_up=0), 6)
        2.0
    """

    dynamic: bool = False
    """Whether a client's capacity is drawn from `levels` in every round; else it is that of `federation.capacities`."""
    levels: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125, 0.0625)
    """Capacities to draw from with `dynamic`, each in (0, 1]."""
    flops_per_second: float = 727e9
    """Operations per second of a device of capacity 1; other devices have the fraction that is their capacity."""
    bytes_per_second: float = 14.9 * 2**20
    """Uplink bandwidth of every device."""
    alpha: float = 1.0
    """Weight of the upload in the time of a round, >= 0."""

    def __post_init__(self) -> None:
        check_types(self, "Devices.")
        fits = bool(self.levels) and all(0 < level <= 1 for level in self.levels)
        require(fits, "Devices.levels", self.levels, "one or more capacities in (0, 1]")
        for name in ("flops_per_second", "bytes_per_second"):
            require(getattr(self, name) > 0, f"Devices.{name}", getattr(self, name), "a number above 0")
        require(self.alpha >= 0, "Devices.alpha", self.alpha, "a number >= 0")

    def capacity(self, view: ClientView) -> float:
        """Return a client's capacity in a round, in (0, 1].

        Args:
            view: Facts that the server knows of the client.
        """
        if not self.dynamic:
            return view.capacity
        rng = generator(view.seed, view.round, view.id, "device")
        return self.levels[int(torch.randint(len(self.levels), (1,), generator=rng))]

    def seconds(self, capacity: float, flops: float, bytes_up: float) -> float:
        """Return the seconds of a client-round: ``flops / F + alpha bytes / B``, F being capacity times speed.

        Args:
            capacity: Capacity of the device, in (0, 1].
            flops: Operations of the local training.
            bytes_up: Bytes of the encoded upload.
        """
        return flops / (capacity * self.flops_per_second) + self.alpha * bytes_up / self.bytes_per_second
