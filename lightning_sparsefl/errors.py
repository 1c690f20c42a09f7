"""Exceptions of the package.

::

    SparseFLError
    |-- InvalidOption        (also ValueError)         an invalid value of an option, or combination of options
    |-- IncompatibleMasks    (also ValueError)         masks or weights that do not match each other
    |-- InvalidUpdate        (also ValueError)         an update of a method that does not match its message
    |-- MalformedPayload     (also ValueError)         bytes that are not a valid message
    |-- DataNotFound         (also FileNotFoundError)  a data set that is not on disk
    |-- CheckpointMismatch   (also ValueError)         a checkpoint that is truncated, foreign or of another run
    |-- ExportMismatch       (also RuntimeError)       an exported file that does not score as its model does
    |-- DiskFull             (also OSError)            no space left; committed rounds are intact
    |-- WorldSizeMismatch    (also RuntimeError)       the launcher started another number of processes
    |-- MissingAttribute     (also AttributeError)     an attribute that a round-level trainer does not have
    |-- RankFailed           (also RuntimeError)       another process failed
    |-- RanksDisagree        (also RuntimeError)       the server states of the ranks differ; has `parts`, `round`
    `-- ClientFailed         (also RuntimeError)       the local work of a client failed; has `client`, `round`, `rank`

Every message states the value, what was expected and the option to change. The command line prints the message
without a traceback and exits with code 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any


class SparseFLError(Exception):
    """Base class of the exceptions of this package."""


class InvalidOption(SparseFLError, ValueError):
    """Invalid value of an option, or invalid combination of options."""


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


def is_whole(value: Any, least: int) -> bool:
    """Return whether a value is a whole number that is not too small; a bool is not a number.

    Args:
        value: Value of an option.
        least: Smallest valid number.

    Example:
        >>> is_whole(3, 1), is_whole(0, 1), is_whole(True, 1), is_whole(2.0, 1)
        (True, False, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


class IncompatibleMasks(SparseFLError, ValueError):
    """Masks or weights whose names, shapes or types do not match."""


class InvalidUpdate(SparseFLError, ValueError):
    """Update that does not match its message, which is an error of the method and not of a client."""


class MalformedPayload(SparseFLError, ValueError):
    """Bytes that are not a valid message of this package, for example a truncated one."""


class DataNotFound(SparseFLError, FileNotFoundError):
    """Data set that is not on disk."""


class CheckpointMismatch(SparseFLError, ValueError):
    """Checkpoint that is truncated, not of this package, or of another run."""


class ExportMismatch(SparseFLError, RuntimeError):
    """Exported file whose scores differ from those of its model."""


class DiskFull(SparseFLError, OSError):
    """Disk without space for the next commit of a run; the committed rounds are intact."""


class WorldSizeMismatch(SparseFLError, RuntimeError):
    """Number of processes of the launcher that differs from the configuration."""


class MissingAttribute(SparseFLError, AttributeError):
    """Attribute that a callback reads and a round-level trainer does not have."""


class RankFailed(SparseFLError, RuntimeError):
    """Failure of another process that this process would otherwise wait for."""


class RanksDisagree(SparseFLError, RuntimeError):
    """Difference between the server states of two ranks after a round; the round is not committed.

    Args:
        parts: Names of the parts of the server state that differ: weights, masks, extra, or client records.
        round: Number of the round, from 0.
        rank: First rank whose state differs from that of rank 0.
    """

    def __init__(self, parts: Sequence[str], *, round: int, rank: int) -> None:
        super().__init__(
            f"After round {round} the server's {', '.join(parts)} on rank {rank} differ from those on rank 0; expected "
            "`aggregate` and `observe` to return equal results on every rank: derive their randomness from the seed "
            "and the round, run the same software on all nodes, and resume with `--ckpt_path last`."
        )
        self.parts, self.round, self.rank = tuple(parts), round, rank

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle all attributes, so that the exception can be sent between processes."""
        return partial(type(self), self.parts, round=self.round, rank=self.rank), ()


class ClientFailed(SparseFLError, RuntimeError):
    """Failure of the local training or evaluation of a client.

    Args:
        reason: Reason for the failure, a clause that the message contains.
        client: Number of the client.
        round: Number of the round, from 0.
        rank: Rank on which the client failed.
        left: Number of remaining clients and `federation.min_clients`, with `federation.on_client_error: skip`.
        replay: Command or call that repeats the local fit.
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
        """Return the message, followed by how to repeat the fit if that is known."""
        advice = "set `federation.on_client_error: skip` to merge the round without it"
        if self.left is not None:
            advice = f"this leaves {self.left[0]} clients, but `federation.min_clients` is {self.left[1]}; lower it"
        message = f"Client {self.client} failed in round {self.round} on rank {self.rank}: {self.reason}; {advice}."
        return message if self.replay is None else f"{message}\nTo run that local fit again: {self.replay}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle all attributes, so that the exception can be sent between processes."""
        facts = {name: getattr(self, name) for name in ("client", "round", "rank", "left", "replay")}
        return partial(type(self), self.reason, **facts), ()
