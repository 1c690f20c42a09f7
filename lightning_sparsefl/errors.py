"""The errors a caller can act on.

::

    SparseFLError
    |-- InvalidOption        (also ValueError)         an option, or a combination of options, that cannot work
    |-- IncompatibleMasks    (also ValueError)         masks or weights that do not fit each other
    |-- InvalidUpdate        (also ValueError)         a method's update that does not answer its message
    |-- MalformedPayload     (also ValueError)         bytes that are no message of ours
    |-- DataNotFound         (also FileNotFoundError)  a data set that is not on disk
    |-- CheckpointMismatch   (also ValueError)         a checkpoint that is torn, foreign, or of another run
    |-- ExportMismatch       (also RuntimeError)       an exported file that does not score as the model that it is of
    |-- DiskFull             (also OSError)            a run that could not be written on; what it committed is intact
    |-- WorldSizeMismatch    (also RuntimeError)       the launcher and the configuration disagree
    |-- MissingAttribute     (also AttributeError)     a callback asks for what a round-level trainer does not have
    |-- RankFailed           (also RuntimeError)       another process failed
    |-- RanksDisagree        (also RuntimeError)       the processes hold different servers; has `parts`, `round`
    `-- ClientFailed         (also RuntimeError)       one client's local work failed; has `client`, `round`, `rank`

Every message is one sentence with the value, what was expected, and the option to change. The command line
prints that sentence and exits with code 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any


class SparseFLError(Exception):
    """Base of every error this package raises on purpose."""


class InvalidOption(SparseFLError, ValueError):
    """An option, or a combination of options, that cannot work."""


def require(condition: bool, option: str, value: Any, expected: str) -> None:
    """Raise :class:`InvalidOption` unless an option satisfies a condition.

    Args:
        condition: Whether the value is valid.
        option: Dotted name of the option: as on the command line (``federation.min_clients``), or with the name of the
            class where the option has no fixed place in a config (``StaticMask.density``).
        value: Value of the option; the message shows its ``repr``.
        expected: Description of the valid values, without a final full stop; a hint about what else to change may
            follow after a semicolon.

    Raises:
        InvalidOption: If `condition` is false.

    Example:
        >>> density = 2.0
        >>> require(0 < density <= 1, "algorithm.density", density, "a number in (0, 1]")
        Traceback (most recent call last):
        lightning_sparsefl.errors.InvalidOption: `algorithm.density` is 2.0; expected a number in (0, 1].
    """
    if not condition:
        raise InvalidOption(f"`{option}` is {value!r}; expected {expected}.")


class IncompatibleMasks(SparseFLError, ValueError):
    """Masks or weights that do not fit each other."""


class InvalidUpdate(SparseFLError, ValueError):
    """An update that does not answer its message: a mistake of the method, whatever the client's data."""


class MalformedPayload(SparseFLError, ValueError):
    """Bytes that are not a message of this package, or one cut short."""


class DataNotFound(SparseFLError, FileNotFoundError):
    """A data set that is not on disk."""


class CheckpointMismatch(SparseFLError, ValueError):
    """A checkpoint that is torn, foreign, or of another run."""


class ExportMismatch(SparseFLError, RuntimeError):
    """An exported file that does not score as the model that it is of."""


class DiskFull(SparseFLError, OSError):
    """There is no space to write a run on; what it committed is intact."""


class WorldSizeMismatch(SparseFLError, RuntimeError):
    """The launcher started another number of processes than the configuration asks for."""


class MissingAttribute(SparseFLError, AttributeError):
    """A callback asks for what a round-level trainer does not have."""


class RankFailed(SparseFLError, RuntimeError):
    """Another process failed, where this one would have waited for it."""


class RanksDisagree(SparseFLError, RuntimeError):
    """After a round, two processes hold different servers, so the round is not committed.

    Args:
        parts: Of the server's state that differ: weights, masks, extra, or what it keeps about clients.
        round: Number of the round, from 0.
        rank: The first process that differs from process 0.
    """

    def __init__(self, parts: Sequence[str], *, round: int, rank: int) -> None:
        super().__init__(
            f"After round {round} the server's {', '.join(parts)} on rank {rank} are not those on rank 0; expected "
            "`aggregate` and `observe` to give the same on every rank, so draw their randomness from the seed and the "
            "round, run the same software on all nodes, and go on with `--ckpt_path last`."
        )
        self.parts, self.round, self.rank = tuple(parts), round, rank

    def __reduce__(self) -> tuple[Any, ...]:
        """Travels between processes with all it says."""
        return partial(type(self), self.parts, round=self.round, rank=self.rank), ()


class ClientFailed(SparseFLError, RuntimeError):
    """One client's local work failed.

    Args:
        reason: What happened, as a clause.
        client: Number of the client.
        round: Number of the round, from 0.
        rank: The process that trained the client.
        left: With `federation.on_client_error: skip`, the clients that are left and `federation.min_clients`.
        replay: How to run that local fit again.
    """

    def __init__(
        self,
        reason: str,
        *,
        client: int,
        round: int,
        rank: int,
        left: tuple[int, int] | None = None,
        replay: str | None = None,
    ) -> None:
        super().__init__(reason)
        self.reason, self.client, self.round, self.rank = reason, client, round, rank
        self.left, self.replay = left, replay

    def __str__(self) -> str:
        """The sentence, and below it how to run the fit again, if that is known."""
        advice = "set `federation.on_client_error: skip` to merge the round without it"
        if self.left is not None:
            advice = f"it leaves {self.left[0]} clients, where `federation.min_clients` = {self.left[1]}; lower that"
        sentence = f"Client {self.client} failed in round {self.round} on rank {self.rank}: {self.reason}; {advice}."
        return sentence if self.replay is None else f"{sentence}\nTo run that local fit again: {self.replay}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Travels between processes with all it says."""
        facts = {name: getattr(self, name) for name in ("client", "round", "rank", "left", "replay")}
        return partial(type(self), self.reason, **facts), ()
