"""The errors a caller can act on.

::

    SparseFLError
    |-- InvalidOption        (also ValueError)         an option, or a combination of options, that cannot work
    |-- IncompatibleMasks    (also ValueError)         masks or weights that do not fit each other
    |-- MalformedPayload     (also ValueError)         bytes that are no message of ours
    |-- DataNotFound         (also FileNotFoundError)  a data set that is not on disk
    |-- CheckpointMismatch   (also ValueError)         a checkpoint that is torn, foreign, or of another run
    |-- DiskFull             (also OSError)            a run that could not be written on; what it committed is intact
    |-- WorldSizeMismatch    (also RuntimeError)       the launcher and the configuration disagree
    |-- MissingAttribute     (also AttributeError)     a callback asks for what a round-level trainer does not have
    |-- RankFailed           (also RuntimeError)       another process failed
    `-- ClientFailed         (also RuntimeError)       one client's local work failed; has `client`, `round`, `rank`

Every message is one sentence with the value, what was expected, and the option to change. The command line
prints that sentence and exits with code 2.
"""

from __future__ import annotations


class SparseFLError(Exception):
    """Base of every error this package raises on purpose."""


class InvalidOption(SparseFLError, ValueError):
    """An option, or a combination of options, that cannot work."""


class IncompatibleMasks(SparseFLError, ValueError):
    """Masks or weights that do not fit each other."""


class MalformedPayload(SparseFLError, ValueError):
    """Bytes that are not a message of this package, or one cut short."""


class DataNotFound(SparseFLError, FileNotFoundError):
    """A data set that is not on disk."""


class CheckpointMismatch(SparseFLError, ValueError):
    """A checkpoint that is torn, foreign, or of another run."""


class DiskFull(SparseFLError, OSError):
    """There is no space to write a run on; what it committed is intact."""


class WorldSizeMismatch(SparseFLError, RuntimeError):
    """The launcher started another number of processes than the configuration asks for."""


class MissingAttribute(SparseFLError, AttributeError):
    """A callback asks for what a round-level trainer does not have."""


class RankFailed(SparseFLError, RuntimeError):
    """Another process failed, where this one would have waited for it."""


class ClientFailed(SparseFLError, RuntimeError):
    """One client's local work failed.

    Args:
        reason: What happened, as a clause.
        client: Number of the client.
        round: Number of the round, from 0.
        rank: The process that trained the client.
    """

    def __init__(self, reason: str, *, client: int, round: int, rank: int) -> None:
        super().__init__(
            f"Client {client} failed in round {round} on rank {rank}: {reason}; set "
            "`federation.on_client_error: skip` to merge the round without it."
        )
        self.reason, self.client, self.round, self.rank = reason, client, round, rank
