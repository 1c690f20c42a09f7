"""Callbacks that monitor a metric that no round has, or that need a trainer with batches."""

from pathlib import Path

import pytest
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint

from helpers.networks import Classifier
from lightning_sparsefl import FedAvg, FederatedTrainer, Federation
from lightning_sparsefl.data import FederatedBlobs
from lightning_sparsefl.errors import InvalidOption, MissingAttribute


def fit(tmp_path, callback):
    trainer = FederatedTrainer(
        algorithm=FedAvg(),
        federation=Federation(clients_per_round=2),
        accelerator="cpu",
        max_rounds=2,
        default_root_dir=str(tmp_path),
        callbacks=[callback],
        enable_progress_bar=False,
    )
    data = FederatedBlobs(num_clients=2, num_classes=4, dim=8, num_train=60, batch_size=8, eval_split="test")
    trainer.fit(Classifier(), data)


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
