"""Selection of the checkpoint and the folder that a run starts from."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning.fabric.utilities.rank_zero import rank_zero_info

from lightning_sparsefl.errors import CheckpointMismatch, InvalidOption
from lightning_sparsefl.federated.storage.checkpoint import LAST, PREVIOUS, REFUSED, Checkpoint
from lightning_sparsefl.federated.storage.folder_lock import LOCK, FolderLock
from lightning_sparsefl.federated.storage.run_folder import checkpoints_of, last_run, newest_version

NEWEST = ("last", "auto")
"""Values of `ckpt_path` that stand for the newest run of an algorithm."""


@dataclass
class ResumePoint:
    """The checkpoint and the folder that a run starts from."""

    checkpoint: Path | None = None
    """Checkpoint to start from; None = start at round 0."""
    folder: Path | None = None
    """Run folder to continue in; None = a new one. A copied checkpoint gets a new folder, so that no other run is
    changed."""
    newest: bool = False
    """Whether `ckpt_path` is ``last``, ``auto`` or a run folder: then the previous checkpoint may be used instead."""
    using_previous: bool = False
    """Whether the previous checkpoint was read."""
    notice: str = ""
    """What to tell the user about the choice of the folder."""

    def read(self, restore: Callable[[Path], Checkpoint]) -> Checkpoint:
        """Read the checkpoint; if it is damaged and `newest` is set, read the previous one.

        Args:
            restore: Function that reads a checkpoint, and changes nothing if it raises.

        Raises:
            CheckpointMismatch: If no checkpoint can be read; the message is that of the newest.
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
                    f"{refused} The previous checkpoint is {previous}; `ckpt_path: last` uses it if it can be read."
                ) from refused
            try:
                checkpoint = restore(previous)
            except CheckpointMismatch:
                raise refused from None
            self.using_previous = True
            rounds = checkpoint.state.server.round
            rank_zero_info(f"{refused} Resuming from the previous checkpoint, {previous}, after round {rounds}.")
            return checkpoint

    def rewound(self) -> ResumePoint | None:
        """Return the previous checkpoint of the same run, or None if it does not exist."""
        if self.checkpoint is None or self.using_previous or self.checkpoint.name != LAST:
            return None
        previous = self.checkpoint.with_name(PREVIOUS)
        return replace(self, checkpoint=previous, newest=False) if previous.is_file() else None

    def promote_previous(self) -> None:
        """Make the previous checkpoint the run's last one if it was used, and rename the damaged file."""
        if self.using_previous and self.checkpoint is not None:
            if self.checkpoint.exists():
                self.checkpoint.replace(self.checkpoint.with_name(REFUSED))
            self.checkpoint.with_name(PREVIOUS).replace(self.checkpoint)
            self.using_previous = False


def lock_resume_point(find: Callable[[], ResumePoint]) -> tuple[ResumePoint, FolderLock | None]:
    """Find the resume point and lock its folder, so that no other process commits after the search.

    Args:
        find: Function that searches; it is called again after the folder is locked, since a process that has trained
            there may have ended in between.

    Returns:
        The resume point, and the lock of its folder if that exists.

    Raises:
        InvalidOption: If another process trains in the folder.
    """
    found = find()
    while found.folder is not None and found.folder.is_dir():
        lock = FolderLock(found.folder)
        lock.acquire()
        try:
            again = find()
        except BaseException:
            lock.release()
            raise
        if again.folder == found.folder:
            return again, lock
        lock.release()
        found = again
    return found, None


def find_resume_point(
    ckpt_path: str | None,
    root: Path,
    name: str,
    training: bool,
    run_dir: Path | None = None,
    logged: Callable[[], Sequence[Path]] = tuple,
) -> ResumePoint:
    """Find the checkpoint and the folder that a run starts from.

    Args:
        ckpt_path: Path of a checkpoint or of a run folder, ``last``, ``auto``, or None for a new run.
        root: Folder of all run folders.
        name: Name of the algorithm's folder.
        training: Whether the run trains; a run without a committed round can be restarted, but not evaluated, and
            ``auto`` starts a new run where ``last`` finds none.
        run_dir: Folder of the run, in which it goes on if it has begun; None = a new one in `root`.
        logged: Function that returns the runs with checkpoints to which the user's logger has given a folder, of which
            the last one is the newest.

    Raises:
        CheckpointMismatch: If ``last`` or a folder is given, and there is no run with a checkpoint.
        InvalidOption: If a run has begun in `run_dir`, and the checkpoint is another one.
    """
    if run_dir is not None and ckpt_path in (None, *NEWEST):
        begun = checkpoints_of(run_dir) or not training or (run_dir / LOCK).is_file()
        return _in_folder(run_dir, training, "trainer.run_dir") if begun else ResumePoint(folder=run_dir)
    if ckpt_path is None:
        return ResumePoint()
    if ckpt_path not in NEWEST:
        found = _resume_point_at(Path(os.path.expanduser(ckpt_path)), training)
        return found if run_dir is None or not training else _moved(found, run_dir)
    for last in logged()[-1:]:
        return ResumePoint(last / "checkpoints" / LAST, last, newest=True)
    run, newest = last_run(root, name), newest_version(root / name)
    if training and newest is not None and newest != run and (run is None or run.parent == newest.parent):
        other = "" if run is None else f"; for the run before it, set `ckpt_path` to {run / 'checkpoints' / LAST}"
        notice = f"{newest} is the newest run and has committed no round: it starts over{other}."
        return ResumePoint(folder=newest, notice=notice)
    if run is None and training and ckpt_path == "auto":
        return ResumePoint(notice=f"{root / name} contains no run: a new one starts.")
    if run is None:
        raise CheckpointMismatch(
            f"`ckpt_path` is {ckpt_path!r}, but {root / name} contains no run with a checkpoint; "
            "give a path, or set `trainer.default_root_dir`."
        )
    return ResumePoint(run / "checkpoints" / LAST, run, newest=True)


def _resume_point_at(path: Path, training: bool) -> ResumePoint:
    """Return the resume point of the path of a checkpoint or of a run folder."""
    if path.is_dir():
        return _in_folder(path, training)
    own = path.name == LAST and path.parent.name == "checkpoints"
    return ResumePoint(path, path.parent.parent if own else None)


def _moved(found: ResumePoint, run_dir: Path) -> ResumePoint:
    """Return the resume point of a run that starts in its own folder from a checkpoint of another run."""
    if found.folder is not None and found.folder.resolve() == run_dir.resolve():
        return found
    if checkpoints_of(run_dir):
        raise InvalidOption(
            f"`trainer.run_dir` is {run_dir}, where a run has begun, and `ckpt_path` is {found.checkpoint}; expected "
            "`ckpt_path: auto` to go on with the run, or a new folder to start from that checkpoint."
        )
    return replace(found, folder=None, newest=False)


def _in_folder(folder: Path, training: bool, option: str = "ckpt_path") -> ResumePoint:
    """Return the last commit of a run folder, or its start if the run trains and has committed no round."""
    if not checkpoints_of(folder):
        if training and (folder / LOCK).is_file():
            return ResumePoint(folder=folder, notice=f"{folder} has committed no round: it starts over.")
        raise CheckpointMismatch(
            f"`{option}` is the folder {folder}, which contains no checkpoints/{LAST}; "
            "expected a checkpoint, or the folder of a run with one."
        )
    return ResumePoint(folder / "checkpoints" / LAST, folder, newest=True)
