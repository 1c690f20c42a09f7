"""Communication between the ranks of a run, each of which trains its own clients."""

from __future__ import annotations

import io
import pickle
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.utilities.distributed import _distributed_is_initialized
from torch import Tensor

from lightning_sparsefl.errors import RankFailed
from lightning_sparsefl.federated.distributed.signals import Interrupted
from lightning_sparsefl.federated.exchange.plain_values import encoded
from lightning_sparsefl.wire import dense

T = TypeVar("T")
_HEADER = 8
"""Number of bytes before a gathered value, which hold its length."""
_MOST_ROOM = 2**16
"""Largest number of bytes that are sent whatever the length of a gathered value."""


class Ranks:
    """The collectives that the engine uses.

    Args:
        fabric: Fabric that is already launched.
    """

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.rank, self.size = fabric.global_rank, fabric.world_size
        self._tickets: dict[str, int] = {}
        self._token = ""  # of this run, since torchrun may use one store for all its restarts
        self._room = 4096
        """Number of bytes that a gathered value may have to be sent at once; the same on all ranks."""
        self.waited = 0.0
        """Time that this rank waited for the others in the last :meth:`share`, in seconds."""
        self._common_error: BaseException | None = None

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes files and messages."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks in place, and return it."""
        if self.size > 1:
            with self._report_lost_rank():
                dist.all_reduce(tensor)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, on every rank.

        It takes one collective, where `torch.distributed.all_gather_object` takes one for the lengths before it. Only
        a value that is longer than those before it, or than 64 KiB, takes a second one.
        """
        if self.size == 1:
            return [value]
        payload = pickle.dumps(value)
        with self._report_lost_rank():
            return [pickle.loads(part) for part in self._gather_bytes(payload)]

    def _gather_bytes(self, payload: bytes, room: int | None = None) -> list[bytes]:
        room = self._room if room is None else room
        content = (len(payload).to_bytes(_HEADER, "little") + payload[:room]).ljust(_HEADER + room, b"\0")
        sent = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self._device())
        received = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(received, sent)
        parts = [part.cpu().numpy().tobytes() for part in received]
        lengths = [int.from_bytes(part[:_HEADER], "little") for part in parts]
        if max(lengths) > room:
            self._room = min(2 * max(lengths), _MOST_ROOM)
            return self._gather_bytes(payload, max(lengths))
        return [part[_HEADER : _HEADER + length] for part, length in zip(parts, lengths, strict=True)]

    def exchange(self, parts: Sequence[Any]) -> list[Any]:
        """Send each rank its part, and return the parts that the ranks sent to this one.

        Args:
            parts: Parts of plain values, one for each rank; empty parts are not transferred.

        Returns:
            One part from each rank; this rank's own part is the same object.
        """
        if self.size == 1:
            return list(parts)
        own = parts[self.rank]
        payloads = [encoded(part) if part and rank != self.rank else b"" for rank, part in enumerate(parts)]
        lengths = self.gather([len(payload) for payload in payloads])
        device = self._device()
        incoming = {
            rank: torch.empty(sent[self.rank], dtype=torch.uint8, device=device)
            for rank, sent in enumerate(lengths)
            if sent[self.rank]
        }
        with self._report_lost_rank():
            outgoing = {
                rank: torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)
                for rank, payload in enumerate(payloads)
                if payload
            }
            # as one batch: two ranks that wait for each other before they send would block each other with NCCL
            work = [dist.P2POp(dist.irecv, buffer, rank) for rank, buffer in incoming.items()]
            work += [dist.P2POp(dist.isend, buffer, rank) for rank, buffer in outgoing.items()]
            for request in dist.batch_isend_irecv(work) if work else ():
                request.wait()
        received: list[Any] = [{} for _ in parts]
        received[self.rank] = own
        for rank, buffer in incoming.items():
            received[rank] = torch.load(io.BytesIO(buffer.cpu().numpy().tobytes()), weights_only=True)
        return received

    def _device(self) -> torch.device:
        """Return the device whose tensors the backend of the process group can send."""
        return self.fabric.device if dist.get_backend() == "nccl" else torch.device("cpu")

    def share(self, work: Callable[[], T]) -> list[T]:
        """Call a function and return the results of all ranks; a failure on one rank is raised on all of them.

        Args:
            work: Function of this rank; its result is sent to the other processes.

        Raises:
            RankFailed: If the function failed on another rank; the failing rank raises the original error.
            Interrupted: If a signal requests any of the ranks to stop; raised on all ranks.
        """
        if self.size == 1:
            return [work()]
        mine: tuple[T | None, BaseException | None]
        try:
            mine = (work(), None)
        except (Exception, Interrupted) as error:
            mine = (None, error)
        done = time.perf_counter()
        shared = self.gather((mine[0], _failure_summary(mine[1])))
        self.waited = time.perf_counter() - done
        self._common_error = _common_error(mine[1], [failure for _, failure in shared])
        if self._common_error is not None:
            raise self._common_error
        return [value for value, _ in shared]

    def all_raise(self, error: BaseException) -> bool:
        """Return whether every rank has raised an error, so that collectives may follow it.

        Args:
            error: Error that this rank has caught.
        """
        return self.size == 1 or error is self._common_error

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite a tensor with that of rank 0."""
        if self.size > 1:  # as bytes, since not every backend supports every dtype
            flat = dense.flat(tensor.detach()).view(torch.uint8)
            with self._report_lost_rank():
                dist.broadcast(flat, 0)
            tensor.data.copy_(flat.view(tensor.dtype).view(tensor.shape))

    def store(self) -> dist.Store:
        """Return the part of the process group's key-value store that belongs to this run; all ranks must call it."""
        self._token = self._token or self.gather(uuid.uuid4().hex)[0]
        return dist.PrefixStore(f"sparsefl/{self._token}", dist.distributed_c10d._get_default_store())

    def next_ticket(self, name: str) -> int:
        """Return the next number of a queue, counted from 0 over all ranks."""
        if self.size > 1 and _distributed_is_initialized():
            with self._report_lost_rank():
                return int(self.store().add(f"queue/{name}", 1)) - 1
        self._tickets[name] = self._tickets.get(name, -1) + 1
        return self._tickets[name]

    def barrier(self) -> None:
        """Wait for all ranks."""
        with self._report_lost_rank():
            self.fabric.barrier()

    @contextmanager
    def _report_lost_rank(self) -> Iterator[None]:
        """Convert torch's various errors for a lost process to `RankFailed`."""
        try:
            yield
        except RuntimeError as error:
            # the first sentence of torch's message, without its prefix "[file:line] "
            reason = re.split(r"\n|\. ", re.sub(r"^\[.*?\] ", "", str(error).strip()))[0].rstrip(".")
            limit = getattr(self.fabric.strategy, "_timeout", None) or timedelta()
            raise RankFailed(
                f"Rank {self.rank} lost the connection to another rank ({reason}), which died or took longer than "
                f"`trainer.timeout` = {limit.total_seconds():g} seconds; resume from the last committed round with "
                "`ckpt_path: last`."
            ) from error


def _failure_summary(error: BaseException | None) -> str | int | None:
    """Return what the other ranks need of a failure: its text, the number of a signal, or None without one."""
    if error is None:
        return None
    return error.number if isinstance(error, Interrupted) else f"{type(error).__name__}: {error}"


def _common_error(mine: BaseException | None, failures: Sequence[str | int | None]) -> BaseException | None:
    """Return the error to raise on this rank, given its own and all ranks' summaries; None if no rank has failed."""
    if isinstance(mine, Exception):
        return mine
    for rank, failure in enumerate(failures):
        if isinstance(failure, str):
            return RankFailed(f"Rank {rank} failed: {failure}")
    signals = [signal for signal in failures if isinstance(signal, int)]
    return Interrupted(signals[0]) if signals else None
