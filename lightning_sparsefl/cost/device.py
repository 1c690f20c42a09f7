"""How long a client-round would take on the client's own device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.seeds import generator
from lightning_sparsefl.types import ClientView


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The clients' devices: which share of the full model each can train, how fast, and over which link.

    The defaults are those of FedLPS (Xue et al., arXiv:2412.07216): five classes of devices, the strongest with
    727 GFLOP/s, and an uplink of 14.9 MiB/s.

    Example:
        >>> devices = Devices()
        >>> round(devices.seconds(capacity=0.5, flops=727e9, bytes_up=0), 6)
        2.0
    """

    dynamic: bool = False
    """Whether every client draws another device in every round; else it has that of `federation.capacities`."""
    levels: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125, 0.0625)
    """With `dynamic`: the capacities to draw from."""
    flops_per_second: float = 727e9
    """Operations of a device of capacity 1; the others have their share of it."""
    bytes_per_second: float = 14.9 * 2**20
    """Uplink of every device."""
    alpha: float = 1.0
    """Weight of the upload beside the computing."""

    def __post_init__(self) -> None:
        if not self.levels or any(not 0 < level <= 1 for level in self.levels):
            raise InvalidOption(f"`Devices(levels={self.levels})`: expected capacities in (0, 1].")
        for name in ("flops_per_second", "bytes_per_second"):
            if not getattr(self, name) > 0:
                raise InvalidOption(f"`Devices({name}={getattr(self, name)})`: expected a number above 0.")
        if self.alpha < 0:
            raise InvalidOption(f"`Devices(alpha={self.alpha})`: expected a number >= 0.")

    def capacity(self, view: ClientView) -> float:
        """A client's capacity in a round, in (0, 1].

        Args:
            view: Of the client.
        """
        if not self.dynamic:
            return view.capacity
        rng = generator(view.seed, view.round, view.id, "device")
        return self.levels[int(torch.randint(len(self.levels), (1,), generator=rng))]

    def seconds(self, capacity: float, flops: float, bytes_up: float) -> float:
        """``flops / F + alpha bytes / B``, with F the capacity's share of the operations per second.

        Args:
            capacity: Of the device, in (0, 1].
            flops: Operations of the local training.
            bytes_up: Encoded upload.
        """
        return flops / (capacity * self.flops_per_second) + self.alpha * bytes_up / self.bytes_per_second
