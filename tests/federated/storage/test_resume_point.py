"""Which checkpoint and which folder a run starts from, by the files that are there."""

from __future__ import annotations

import os
import re

import pytest

from lightning_sparsefl.errors import CheckpointMismatch, InvalidOption
from lightning_sparsefl.federated.storage.resume import ResumePoint, find_resume_point, lock_resume_point

LAST = "checkpoints/last.ckpt"


@pytest.fixture
def root(tmp_path):
    """A folder of runs, and a function that adds one with the files that are named."""

    def add(run, *files):
        folder = tmp_path / run
        folder.mkdir(parents=True, exist_ok=True)
        for name in files:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).touch()
        return folder

    tmp_path.joinpath("FedAvg").mkdir()
    return tmp_path, add


def where(root, ckpt_path="last", training=True, **options):
    return find_resume_point(ckpt_path, root, "FedAvg", training, **options)


def test_the_newest_run_is_that_of_the_highest_number(root):
    root, add = root
    add("FedAvg/version_2", LAST)
    run = add("FedAvg/version_10", LAST)
    add("FedAvg/version_ten", LAST)
    add("FedProx/version_11", LAST)
    assert where(root) == where(root, "auto") == ResumePoint(run / LAST, run, newest=True)


def test_a_run_with_the_previous_checkpoint_alone_counts(root):
    root, add = root
    run = add("FedAvg/version_0", "checkpoints/previous.ckpt")
    assert where(root) == where(root, str(run)) == ResumePoint(run / LAST, run, newest=True)


def test_a_newest_run_without_a_commit_starts_over_if_it_trains(root):
    root, add = root
    run, begun = add("FedAvg/version_0", LAST), add("FedAvg/version_1", ".lock")
    found = where(root)
    assert (found.checkpoint, found.folder, found.newest) == (None, begun, False)
    assert found.notice == (
        f"{begun} is the newest run and has committed no round: it starts over; for the run before it, set "
        f"`ckpt_path` to {run / LAST}."
    )
    assert where(root, training=False) == ResumePoint(run / LAST, run, newest=True)


def test_an_only_run_without_a_commit_starts_over(root):
    root, add = root
    begun = add("FedAvg/version_0")
    notice = f"{begun} is the newest run and has committed no round: it starts over."
    assert where(root, "auto") == ResumePoint(folder=begun, notice=notice)


def test_runs_of_a_logger_count_where_the_algorithm_has_none(root):
    root, add = root
    older, newer = (add(f"lightning_logs/version_{number}", LAST) for number in (3, 2))
    for run, time in ((older, 100), (newer, 200)):
        os.utime(run / LAST, (time, time))
    assert where(root) == ResumePoint(newer / LAST, newer, newest=True)
    # a new run of the algorithm, which has committed nothing, does not hide that of the logger
    add("FedAvg/version_5")
    assert where(root) == ResumePoint(newer / LAST, newer, newest=True)


def test_the_runs_of_the_users_logger_come_first(root):
    root, add = root
    add("FedAvg/version_0", LAST)
    runs = [add(f"logs/run_{number}", LAST) for number in (0, 1)]
    found = where(root, logged=lambda: runs)
    assert found == ResumePoint(runs[-1] / LAST, runs[-1], newest=True)


def test_without_a_run_auto_starts_one_and_last_is_refused(root):
    root, _ = root
    assert where(root, "auto") == ResumePoint(notice=f"{root / 'FedAvg'} contains no run: a new one starts.")
    for ckpt_path, training in (("last", True), ("last", False), ("auto", False)):
        message = rf"`ckpt_path` is '{ckpt_path}', but .*FedAvg contains no run with a checkpoint; give a path"
        with pytest.raises(CheckpointMismatch, match=message):
            where(root, ckpt_path, training)
    assert where(root, None) == ResumePoint()


def test_a_checkpoint_of_a_run_goes_on_in_its_folder_and_a_copy_in_a_new_one(root):
    root, add = root
    run = add("elsewhere/run", LAST, "last.ckpt", "checkpoints/round=3.ckpt")
    assert where(root, str(run / LAST)) == ResumePoint(run / LAST, run)
    for copy in ("last.ckpt", "checkpoints/round=3.ckpt"):
        assert where(root, str(run / copy)) == ResumePoint(run / copy)


def test_a_folder_without_a_checkpoint_is_refused_unless_a_run_has_begun_there(root):
    root, add = root
    empty = add("elsewhere/empty")
    message = rf"`ckpt_path` is the folder {re.escape(str(empty))}, which contains no checkpoints/last\.ckpt"
    with pytest.raises(CheckpointMismatch, match=message):
        where(root, str(empty))
    add("elsewhere/empty", ".lock")
    assert where(root, str(empty)).notice == f"{empty} has committed no round: it starts over."
    with pytest.raises(CheckpointMismatch, match=message):
        where(root, str(empty), training=False)


@pytest.mark.parametrize("ckpt_path", [None, "last", "auto"])
def test_a_named_folder_goes_on_if_a_run_has_begun_there(ckpt_path, root):
    root, add = root
    add("FedAvg/version_0", LAST)
    own = add("own")
    assert where(root, ckpt_path, run_dir=own) == ResumePoint(folder=own)
    with pytest.raises(CheckpointMismatch, match=r"^`trainer\.run_dir` is .* which contains no checkpoints/last\.ckpt"):
        where(root, ckpt_path, training=False, run_dir=own)
    add("own", ".lock")
    assert where(root, ckpt_path, run_dir=own).notice == f"{own} has committed no round: it starts over."
    add("own", LAST)
    assert where(root, ckpt_path, run_dir=own) == ResumePoint(own / LAST, own, newest=True)


def test_another_checkpoint_starts_a_named_folder_that_is_new(root):
    root, add = root
    run, own = add("FedAvg/version_0", LAST), root / "own"
    for ckpt_path in (run, run / LAST):
        assert where(root, str(ckpt_path), run_dir=own) == ResumePoint(run / LAST)
    assert where(root, str(run), run_dir=run) == ResumePoint(run / LAST, run, newest=True)
    assert where(root, str(run), training=False, run_dir=own) == ResumePoint(run / LAST, run, newest=True)
    add("own", LAST)
    expected = rf"`trainer\.run_dir` is {re.escape(str(own))}, where a run has begun, and `ckpt_path` is .*last\.ckpt;"
    with pytest.raises(InvalidOption, match=expected):
        where(root, str(run), run_dir=own)


def test_the_checkpoint_before_the_last_is_another_start(root):
    root, add = root
    run = add("FedAvg/version_0", LAST)
    found = where(root)
    assert found.rewound() is None
    add("FedAvg/version_0", "checkpoints/previous.ckpt")
    previous = run / "checkpoints" / "previous.ckpt"
    assert found.rewound() == ResumePoint(previous, run)
    assert found.rewound().rewound() is None
    found.using_previous = True
    assert found.rewound() is None
    assert ResumePoint().rewound() is None


def test_the_lock_is_that_of_the_folder_that_is_found_again(root):
    root, add = root
    first, second = add("FedAvg/version_0", LAST), add("FedAvg/version_1", LAST)
    answers = [ResumePoint(first / LAST, first), *(ResumePoint(second / LAST, second) for _ in range(2))]
    found, lock = lock_resume_point(lambda: answers.pop(0))
    assert (found.folder, lock.path.parent, answers) == (second, second, [])
    other, free = lock_resume_point(lambda: ResumePoint(first / LAST, first))  # released on the way
    assert other.folder == first
    lock.release()
    free.release()


def test_the_lock_is_released_if_the_second_search_fails(root):
    root, add = root
    run = add("FedAvg/version_0", LAST)
    answers = [ResumePoint(run / LAST, run)]
    with pytest.raises(IndexError):
        lock_resume_point(lambda: answers.pop(0))
    _, lock = lock_resume_point(lambda: ResumePoint(run / LAST, run))
    assert lock is not None
    lock.release()
    assert lock_resume_point(ResumePoint) == (ResumePoint(), None)
