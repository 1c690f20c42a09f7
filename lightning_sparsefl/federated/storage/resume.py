"""Which checkpoint and which folder a run starts from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightning.fabric.utilities.rank_zero import rank_zero_info

from lightning_sparsefl.errors import CheckpointMismatch
from lightning_sparsefl.federated.storage.checkpoint import LAST, PREVIOUS, REFUSED, Resumed
from lightning_sparsefl.federated.storage.run_folder import last_run, newest_version


@dataclass
class ResumePoint:
    """Where a run starts."""

    checkpoint: Path | None = None
    """None = at round 0."""
    folder: Path | None = None
    """That the run goes on in; None = one of its own. A checkpoint that is a copy gets a new folder, so that it spoils
    no other run."""
    newest: bool = False
    """Whether it was asked for as ``last``, so that the checkpoint before may stand in for it."""
    using_previous: bool = False
    """Whether the checkpoint before was taken."""

    def read(self, restore: Callable[[Path], Resumed]) -> Resumed:
        """Read the checkpoint; where ``last`` was asked for and it is no good, the one before.

        Args:
            restore: Reads one, and fills nothing if it raises.

        Raises:
            CheckpointMismatch: If none is good; it names the newest.
        """
        assert self.checkpoint is not None
        previous = self.checkpoint.with_name(PREVIOUS)
        try:
            return restore(self.checkpoint)
        except CheckpointMismatch as refused:
            if not previous.is_file():
                raise
            if not self.newest:
                raise CheckpointMismatch(
                    f"{refused} The one before it is {previous}; `ckpt_path: last` takes it if it is good."
                ) from refused
            try:
                resumed = restore(previous)
            except CheckpointMismatch:
                raise refused from None
            self.using_previous = True
            rank_zero_info(
                f"{refused} Going on from the one before it, {previous}, after round {resumed.server.round}."
            )
            return resumed

    def promote_previous(self) -> None:
        """Make the checkpoint that stands in the run's last one; the refused file stays beside it."""
        if self.using_previous and self.checkpoint is not None:
            if self.checkpoint.exists():
                self.checkpoint.replace(self.checkpoint.with_name(REFUSED))
            self.checkpoint.with_name(PREVIOUS).replace(self.checkpoint)
            self.using_previous = False


def find_resume_point(ckpt_path: str | None, root: Path, name: str, training: bool) -> ResumePoint:
    """Where a run starts from.

    Args:
        ckpt_path: A path, ``last``, or None for a new run.
        root: Where run folders are made.
        name: Of the algorithm's folder.
        training: Whether it trains on; a run that has committed nothing can be started over, and not scored.

    Raises:
        CheckpointMismatch: If ``last`` finds no run.
    """
    if ckpt_path is None:
        return ResumePoint()
    if ckpt_path != "last":
        path = Path(ckpt_path)
        own = path.name == LAST and path.parent.name == "checkpoints"
        return ResumePoint(path, path.parent.parent if own else None)
    run, newest = last_run(root, name), newest_version(root / name)
    if training and newest is not None and newest != run and (run is None or run.parent == newest.parent):
        other = "" if run is None else f"; for the run before it, set `ckpt_path` to {run / 'checkpoints' / LAST}"
        rank_zero_info(f"{newest} is the newest run and has committed no round: it starts over{other}.")
        return ResumePoint(folder=newest)
    if run is None:
        raise CheckpointMismatch(
            f"`ckpt_path` is 'last', but {root / name} holds no run with a checkpoint; "
            "give a path, or set `trainer.default_root_dir`."
        )
    return ResumePoint(run / "checkpoints" / LAST, run, newest=True)
