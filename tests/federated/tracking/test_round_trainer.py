"""What round-level callbacks see and save, and those that need what rounds do not have."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint

from helpers.networks import Classifier
from lightning_sparsefl import FedAvg, FederatedTrainer, Federation
from lightning_sparsefl.data import FederatedBlobs
from lightning_sparsefl.errors import CheckpointMismatch, InvalidOption, MissingAttribute
from lightning_sparsefl.federated.storage.checkpoint import load_checkpoint
from lightning_sparsefl.federated.storage.safe_load import load_plain
from lightning_sparsefl.federated.tracking.round_trainer import RoundTrainer
from lightning_sparsefl.testing.contents import rows


def fit(tmp_path, *callbacks, module=None, rounds=2, every=1, ckpt_path=None):
    trainer = FederatedTrainer(
        algorithm=FedAvg(),
        federation=Federation(clients_per_round=2, pictures_every_n_rounds=0),
        accelerator="cpu",
        max_rounds=rounds,
        check_val_every_n_round=every,
        default_root_dir=str(tmp_path),
        callbacks=list(callbacks),
        enable_progress_bar=False,
        seed=1,
    )
    data = FederatedBlobs(num_clients=2, num_classes=4, dim=8, num_train=60, batch_size=8, eval_split="test")
    torch.manual_seed(0)
    trainer.fit(module or Classifier(), data, ckpt_path)
    return trainer.run_folder


@pytest.mark.parametrize(
    ("kind", "given"),
    [(EarlyStopping, "global/test_ac"), (ModelCheckpoint, "Global/Test_Acc"), (EarlyStopping, "GLOBAL/TEST_ACC")],
)
def test_a_metric_that_no_round_has_is_answered_by_the_nearest_one(kind, given, tmp_path):
    expected = f"^`{kind.__name__}.monitor` is '{given}'; expected a metric of the round, such as "
    with pytest.raises(InvalidOption, match=f"{expected}'global/test_acc'\\.$"):
        fit(tmp_path, kind(monitor=given))


def test_a_metric_that_is_like_no_other_is_answered_by_the_scores(tmp_path):
    with pytest.raises(InvalidOption) as error:
        fit(tmp_path, EarlyStopping(monitor="zebra"))
    start, _, rest = str(error.value).partition("; expected one of ")
    assert start == "`EarlyStopping.monitor` is 'zebra'"
    *shown, last = rest.split(", ")
    assert shown[:2] == ["global/test_acc", "personal/test_acc"]
    assert len(shown) == 10
    path = Path(last.removeprefix("or another column of ").removesuffix("."))
    assert "time/round" in path.read_text().splitlines()[0].split(",")


def test_a_callback_that_needs_batches_is_told_where_they_are(tmp_path):
    class Finder(Callback):
        """Reads what Lightning's `LearningRateFinder` reads."""

        def on_fit_start(self, trainer, module):
            assert not hasattr(trainer.strategy, "schedulers")
            trainer.strategy.optimizers.clear()

    with pytest.raises(MissingAttribute, match=r"no attribute 'strategy\.optimizers'; pass .*client_callbacks`"):
        fit(tmp_path, Finder())


def test_other_errors_of_a_callback_stay_as_they_are(tmp_path):
    class Broken(Callback):
        monitor = "zebra"

        def on_train_epoch_end(self, trainer, module):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match=r"^broken$"):
        fit(tmp_path, Broken())


@pytest.mark.parametrize("name", ["initial", "previous"])
def test_a_checkpoint_in_the_place_of_a_file_of_the_run_is_refused(name, tmp_path):
    with pytest.raises(InvalidOption, match=rf"`ModelCheckpoint.filename` is '{name}' in .*checkpoints, where the run"):
        fit(tmp_path, ModelCheckpoint(filename=name))
    fit(tmp_path, ModelCheckpoint(tmp_path / "elsewhere", filename=name))
    assert (tmp_path / "elsewhere" / f"{name}.ckpt").exists()


def test_files_by_steps_are_those_by_rounds(tmp_path):
    rounds = ModelCheckpoint(tmp_path / "rounds", filename="{step}", every_n_epochs=1, save_top_k=-1)
    steps = ModelCheckpoint(tmp_path / "steps", filename="{step}", every_n_train_steps=2, save_top_k=-1)
    fit(tmp_path, rounds, steps, rounds=4)
    files = sorted(path.name for path in (tmp_path / "steps").iterdir())
    assert files == ["step=2.ckpt", "step=4.ckpt"]
    for name in files:
        one, other = (load_checkpoint(tmp_path / kind / name) for kind in ("steps", "rounds"))
        assert one["epoch"] == other["epoch"] == int(name[5])
        assert all(one["state_dict"][key].equal(value) for key, value in other["state_dict"].items())


class Stops(Callback):
    def on_train_epoch_end(self, trainer, module):
        trainer.should_stop = trainer.current_epoch == 1


class Sees(Callback):
    def __init__(self):
        self.seen = []

    def on_validation_end(self, trainer, module):
        self.seen.append((trainer.current_epoch, float(trainer.callback_metrics["global/test_acc"])))


@pytest.mark.parametrize("every", [1, 5])
def test_callbacks_see_the_scores_of_the_last_round_of_a_stopped_run(every, tmp_path):
    best, sees = ModelCheckpoint(tmp_path / "best", monitor="global/test_acc", mode="max"), Sees()
    folder = fit(tmp_path, Stops(), best, sees, rounds=9, every=every)
    scores = [row["global/test_acc"] for row in rows(folder / "metrics.csv")]
    assert sees.seen[-1] == (1, pytest.approx(float(scores[1]), abs=1e-6))
    assert Path(best.best_model_path).exists()
    assert float(best.best_model_score) == pytest.approx(max(float(score) for score in scores if score), abs=1e-6)


class Keeps(Classifier):
    """Has what it needs besides its weights in its checkpoints, and leaves a part of these out."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["vocabulary"] = {"a": 1, "sizes": [2, 3]}
        checkpoint["rounds"] = self.trainer.max_epochs
        checkpoint["unsafe"] = object()
        checkpoint["epoch"] = -1
        checkpoint["state_dict"].clear()

    def on_load_checkpoint(self, checkpoint):
        self.vocabulary = checkpoint["vocabulary"]


class Adds(Callback):
    def on_save_checkpoint(self, trainer, module, checkpoint):
        checkpoint["of a callback"] = trainer.current_epoch


@pytest.mark.filterwarnings("ignore:`on_save_checkpoint` adds 'unsafe', which could not be loaded safely")
def test_what_hooks_add_is_in_all_checkpoints_and_a_run_goes_on_from_them(tmp_path):
    best = ModelCheckpoint(tmp_path / "best", monitor="global/test_acc", mode="max")
    weights = ModelCheckpoint(tmp_path / "weights", monitor="personal/test_acc", mode="max", save_weights_only=True)
    folder = fit(tmp_path, best, weights, Adds(), module=Keeps())
    last = folder / "checkpoints" / "last.ckpt"
    for path in (best.best_model_path, weights.best_model_path, last):
        content = load_plain(Path(path))
        assert ("unsafe" in content, type(content["of a callback"]), content["epoch"] > 0) == (False, int, True)
        loaded = Keeps.load_from_checkpoint(path, weights_only=True)
        assert (loaded.vocabulary, content["rounds"]) == ({"a": 1, "sizes": [2, 3]}, 2)
        assert all(loaded.state_dict()[name].equal(value) for name, value in content["state_dict"].items())
    fit(tmp_path, Adds(), module=Keeps(), rounds=3, ckpt_path=str(last))
    assert load_checkpoint(last)["epoch"] == 3
    with pytest.raises(CheckpointMismatch, match=r"can be read by `load_from_checkpoint` of their module; expected a"):
        fit(tmp_path, module=Keeps(), rounds=4, ckpt_path=weights.best_model_path)


class Fails(Keeps):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["tokens"] = self.trainer.datamodule.tokens


def test_a_hook_that_fails_ends_no_run(tmp_path):
    with pytest.warns(
        match=r"`on_save_checkpoint` failed \(AttributeError: .*tokens'\), so that the run's checkpoints"
    ):
        folder = fit(tmp_path, module=Fails())
    assert load_checkpoint(folder / "checkpoints" / "last.ckpt")["epoch"] == 2


class Stop(Callback):
    """Asks for no more rounds."""

    state_key = "Stop"

    def on_train_epoch_end(self, trainer, module):
        trainer.should_stop = True


class StopToo(Stop):
    state_key = "StopToo"


def test_the_first_callback_that_asks_for_no_more_rounds_is_named():
    seen = RoundTrainer(None, Classifier(), [Callback(), Stop(), StopToo()], [], "", 3, 2, 1, dict)
    assert seen.stopped_by == ""
    seen.call("on_train_epoch_end")
    assert seen.stopped_by == "Stop"
    seen.should_stop = False  # as a callback may that goes on after all
    assert seen.stopped_by == ""


def test_a_resumed_run_starts_at_the_number_of_finished_rounds(tmp_path):
    starts = []

    class Noting(Callback):
        def on_train_start(self, trainer, module):
            starts.append((trainer.current_epoch, trainer.global_step))

    fit(tmp_path, Noting())
    fit(tmp_path, Noting(), rounds=3, ckpt_path="last")
    assert starts == [(0, 0), (2, 2)]
