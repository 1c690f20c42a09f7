"""Writes beside other work: when they begin, whose errors are whose, and that a commit is one."""

import errno
import os
import threading

import pytest
from lightning.pytorch import Callback

from lightning_sparsefl import FedSpa
from lightning_sparsefl.errors import ClientFailed, DiskFull, RankFailed
from lightning_sparsefl.federated.storage import checkpoint
from lightning_sparsefl.federated.storage.background_write import BackgroundWrite

PATIENCE = 60
"""Seconds to wait for what must happen."""


def fails():
    raise OSError("mine")


def test_what_is_written_is_prepared_at_once():
    write, values, begins = BackgroundWrite(), [1], threading.Event()

    def prepare():
        copy = list(values)
        return lambda: begins.wait(PATIENCE) and values.extend(copy)

    write.start(prepare)
    values.append(2)
    begins.set()
    write.finish()
    assert values == [1, 2, 1]
    write.finish()
    write.close()


@pytest.mark.parametrize("prepare", [fails, lambda: fails], ids=["preparing", "writing"])
def test_an_error_is_raised_once_and_the_next_write_is_done(prepare):
    write, written = BackgroundWrite(), []
    write.start(prepare)
    with pytest.raises(OSError, match="mine"):
        write.finish()
    write.start(lambda: lambda: written.append(1))
    write.finish()
    write.close()
    assert written == [1]


def test_a_thread_is_ended():
    BackgroundWrite().close()
    write = BackgroundWrite()
    write.start(lambda: lambda: None)
    (thread,) = write._thread._threads
    write.close()
    assert not thread.is_alive()


@pytest.fixture
def held(monkeypatch):
    """An event that checkpoints wait for before they are written, and whether each has seen it."""
    event, save, waited = threading.Event(), checkpoint.save, []

    def waiting(path, data, again):
        waited.append(event.wait(PATIENCE))
        save(path, data, again)

    monkeypatch.setattr(checkpoint, "save", waiting)
    return event, waited


def last(root):
    (path,) = root.rglob("last.ckpt")
    return checkpoint.load_checkpoint(path)


class Note(Callback):
    """Calls a function when the second round begins."""

    def __init__(self, function):
        self.function = function

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            self.function()


def test_a_commit_is_written_while_the_next_round_trains(held, federation, tmp_path):
    trains, waited = held
    federation(FedSpa(density=0.5), callbacks=[Note(trains.set)])
    assert waited == [True] * 3
    assert last(tmp_path)["epoch"] == 3


@pytest.mark.parametrize("devices", [1, 2])
def test_a_commit_that_fails_ends_the_run_before_the_next_one(devices, federation, tmp_path, monkeypatch):
    save = checkpoint.save

    def full(path, data, again):
        if path.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(path, data, again)

    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises((DiskFull, RankFailed), match="No space left"):  # whichever rank is heard first
        federation(FedSpa(density=0.5), devices=devices)
    assert last(tmp_path)["epoch"] == 1


@pytest.mark.parametrize("error", [ValueError("of a callback"), KeyboardInterrupt()], ids=lambda error: type(error))
def test_an_error_of_the_next_round_leaves_a_whole_commit(error, held, federation, tmp_path):
    trains, _ = held

    def stop():
        trains.set()
        raise error

    with pytest.raises(type(error)):
        federation(FedSpa(density=0.5), callbacks=[Note(stop)])
    assert last(tmp_path)["epoch"] == 1


def test_the_state_that_a_failed_client_started_from_is_on_the_disk(held, federation, tmp_path):
    """A command to repeat the client's fit, which the error offers, can be given at once."""
    trains, _ = held

    class Fails(Callback):
        def on_train_start(self, trainer, module):
            if trains.is_set():
                raise ValueError

    with pytest.raises(ClientFailed) as failed:
        federation(FedSpa(density=0.5), callbacks=[Note(trains.set)], client_callbacks=[Fails()])
    assert "last.ckpt" in failed.value.replay
    assert last(tmp_path)["epoch"] == 1
