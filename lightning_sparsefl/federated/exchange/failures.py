"""What can go wrong with one client: how long it may take, what is said when it fails, and what is freed then."""

from __future__ import annotations

import gc
import re
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule

from lightning_sparsefl.errors import ClientFailed

_SAYS_OUT_OF_MEMORY = re.compile(r"out of memory|not enough memory|can't allocate memory")
"""Of a RuntimeError: on the CPU, and on devices other than CUDA, torch has no type for it."""
_SAYS_ONE_SAMPLE = "more than 1 value per channel"
"""Of torch's ValueError, which a client meets whose last batch is one sample."""


class Deadline:
    """When a client's round must be over, by the clock on the wall.

    It is looked at between batches and when the client's work is done, so a step that takes forever is not interrupted.

    Args:
        seconds: From now on.
        fail: Makes the error of a reason.
    """

    def __init__(self, seconds: float, fail: Callable[[str], ClientFailed]) -> None:
        self._seconds, self._fail, self._started = seconds, fail, time.monotonic()

    def check(self) -> None:
        """Raise :class:`ClientFailed` if it is over."""
        taken = time.monotonic() - self._started
        if taken > self._seconds:
            raise self._fail(
                f"it took {taken:.1f} seconds and is not done, where `federation.client_timeout` is {self._seconds:g}"
            )


class KeepDeadline(Callback):
    """Looks at a client's deadline before every batch.

    Args:
        deadline: Of the client's round.
    """

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Before a training batch, which the loader has yielded by now."""
        self._deadline.check()

    def on_validation_batch_start(
        self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before a batch of the validation inside the fit."""
        self._deadline.check()


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the host or the device has no memory left.

    Example:
        >>> out_of_memory(MemoryError()), out_of_memory(RuntimeError("MPS backend out of memory"))
        (True, True)
    """
    if isinstance(error, MemoryError | torch.cuda.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _SAYS_OUT_OF_MEMORY.search(str(error)) is not None


def reason(error: Exception) -> str:
    """Why a client failed, as a clause.

    Args:
        error: Of its local work.

    Example:
        >>> reason(ZeroDivisionError("division by zero"))
        'ZeroDivisionError: division by zero'
    """
    if isinstance(error, ClientFailed):
        return error.reason
    said = f"{type(error).__name__}: {error}"
    if out_of_memory(error):
        return f"it ran out of memory ({said.splitlines()[0].rstrip('. :')}); lower `data.batch_size`"
    if isinstance(error, ValueError) and _SAYS_ONE_SAMPLE in said:
        return f"a batch norm got a batch of one sample ({said}); set `data.drop_last: true` or another batch size"
    return said


def release(error: BaseException, module: LightningModule) -> None:
    """Free what a client that ran out of memory has left behind, so that the next one finds what it found.

    Args:
        error: Its frames hold activations and batches; it cannot be debugged afterwards.
        module: Its gradients are dropped.
    """
    chain: BaseException | None = error
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__
    module.zero_grad(set_to_none=True)
    gc.collect()  # a loop's parts know each other
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
