"""Recorded operations as a CUDA graph, which one call launches.

The kernels of a small network's step are done sooner than Python can launch them. A graph launches all of them at once;
it reads and writes the same memory each time, so that inputs are copied there, and results from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_sparsefl.federated.local.stacked.recording.operations import Operations

Results = tuple[Tensor, ...]
Capture = Callable[[Callable[[], Results]], tuple[Results, Callable[[], None]]]
"""Function that captures some work; returns its results, and a function that computes them anew in the same memory."""


class CudaGraphs:
    """Captures of work on a CUDA device as graphs, which share the memory of their intermediate results.

    Args:
        device: The device, which is the current one.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._most = torch.cuda.get_device_properties(device).total_memory // 2

    def __call__(self, work: Callable[[], Results]) -> tuple[Results, Callable[[], None]]:
        """Capture some work; see :data:`Capture`.

        Args:
            work: Function that reads and writes the same tensors each time.

        Raises:
            MemoryError: If half of the device's memory is in use, since a graph keeps memory as long as it lives.
        """
        if torch.cuda.memory_reserved() > self._most:
            raise MemoryError
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()  # so that libraries create their handles and workspaces before the capture
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, capture_error_mode="thread_local"):  # other threads may copy tensors
            results = work()
        return results, graph.replay


def graphs_of(device: torch.device) -> Capture | None:
    """Return the captures of a device; None for one without graphs.

    Args:
        device: Device of a module.
    """
    return CudaGraphs(device) if device.type == "cuda" else None


class CapturedOperations:
    """Recorded operations that one call launches, as :class:`.Operations`.

    Args:
        operations: The operations.
        inputs: Tensors of the types, shapes and layouts of all later inputs.
        capture: Function that captures the operations.

    Raises:
        ValueError: If an operation copies to another device. Until torch 2.13, a capture in which one fails leaves the
            device's random generator unusable.
    """

    def __init__(self, operations: Operations | CapturedOperations, inputs: Sequence[Tensor], capture: Capture) -> None:
        if operations.copies_across:
            raise ValueError("a graph cannot copy to another device")
        self._operations = operations  # which keeps the constants that a graph reads
        self.written: Sequence[int] = operations.written
        self.used: Sequence[int] = operations.used
        self.copies_across: bool = operations.copies_across
        self._rows = [_row(tensor) for tensor in inputs]
        self._inputs = [self._given(place, tensor).detach().clone() for place, tensor in enumerate(inputs)]
        whole = [own.expand(tensor.shape) for own, tensor in zip(self._inputs, inputs, strict=True)]
        self._results, self._repeat = capture(lambda: operations.run(*whole))
        read = {place: self._inputs[place] for place in operations.used}
        self._types = _places_by_type(read), _places_by_type(dict(enumerate(self._results)))

    @torch.no_grad()
    def run(self, *inputs: Tensor) -> Results:
        """Do the operations; see :attr:`.Operations.run`."""
        given, results = self._inputs, [torch.empty_like(own) for own in self._results]
        read, returned = self._types
        for places in read:
            torch._foreach_copy_(
                [given[place] for place in places], [self._given(place, inputs[place]) for place in places]
            )
        self._repeat()
        for place in self.written:
            inputs[place].copy_(given[place])
        for places in returned:
            torch._foreach_copy_([results[place] for place in places], [self._results[place] for place in places])
        return tuple(results)

    def _given(self, place: int, tensor: Tensor) -> Tensor:
        row = self._rows[place]
        return tensor if row is None else tensor[row]


def _row(tensor: Tensor) -> tuple[slice, ...] | None:
    """Return the index of one copy of the numbers of an expanded tensor, which repeats them; None for another one."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    row = tuple(slice(1) if length > 1 and not step else slice(None) for length, step in pairs)
    return row if slice(1) in row else None


def _places_by_type(tensors: Mapping[int, Tensor]) -> list[list[int]]:
    """Return the places of the tensors of each type, which one kernel copies."""
    places: dict[torch.dtype, list[int]] = {}
    for place, tensor in tensors.items():
        places.setdefault(tensor.dtype, []).append(place)
    return list(places.values())
