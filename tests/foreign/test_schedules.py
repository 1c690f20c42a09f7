"""Schedules reach the density that was asked for in every way to end a fit, or say that they have not."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from torch import nn
from torch.nn import functional as F

from lightning_sparsefl.callbacks import (
    DynamicPruningWithFeedback,
    GlobalMagnitudePruning,
    GradualPruning,
    LearnedImportance,
    LotteryRewind,
    NMPruning,
    StaticMask,
)
from lightning_sparsefl.callbacks.mask_owner import warning_cache
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.masks import density

SCHEDULED = {
    "GradualPruning": lambda **options: GradualPruning(0.2, every_n_steps=3, **options),
    "DynamicPruningWithFeedback": lambda **options: DynamicPruningWithFeedback(0.2, every_n_steps=3, **options),
    "LotteryRewind": lambda **options: LotteryRewind(0.2, cycles=3),
    "NMPruning": lambda **options: NMPruning(1, 4, start=0.5),
}


@pytest.fixture(autouse=True)
def forget_warnings():
    """Warnings are given once a process."""
    warning_cache.clear()


@pytest.mark.parametrize("name", SCHEDULED)
def test_gradients_that_the_module_accumulates(name, project):
    class Manual(project.Net):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]) / 3)
            if batch_idx % 3 == 2:
                self.optimizers().step()
                self.optimizers().zero_grad()

    callback = SCHEDULED[name](end=0.9)
    project.fit(callback, Manual(), max_epochs=12)
    assert density(callback.masks) <= 0.25


@pytest.mark.parametrize("name", SCHEDULED)
def test_accumulation_that_changes_between_epochs(name, project):
    callback = SCHEDULED[name](end=0.9)
    project.fit(callback, project.Net(), before=[GradientAccumulationScheduler({0: 1, 1: 3})], max_epochs=6)
    assert density(callback.masks) <= 0.25
    if name != "NMPruning":
        assert (callback._clock.step, callback._clock.total) == (6 + 5 * 2, 6 + 5 * 2)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_a_rate_of_steps_that_changes(steps, project):
    """A module that steps several times in every third batch only, in `max_steps`."""

    class Manual(project.Net):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for _ in range(steps if batch_idx % 3 == 0 else 0):
                self.optimizers().zero_grad()
                self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
                self.optimizers().step()

    callback = GradualPruning(0.2, end=0.8, every_n_steps=2)
    project.fit(callback, Manual(), max_epochs=-1, max_steps=42)
    assert density(callback.masks) <= 0.2


ENDING = {
    "GradualPruning": (
        lambda: GradualPruning(0.1, end=0.9, every_n_steps=2),
        "at step 12 of 300 with density 0.88",
    ),
    "DynamicPruningWithFeedback": (lambda: DynamicPruningWithFeedback(0.1, end=0.9), "at step"),
    "LotteryRewind": (lambda: LotteryRewind(0.1), "at step 12 of 300 with density 1, above the 0.0"),
    "GlobalMagnitudePruning": (
        lambda: GlobalMagnitudePruning(0.5, epochs=[0, 9]),
        "at density 0.5, before epochs [9] pruned",
    ),
    "NMPruning": (lambda: NMPruning(1, 4, start=0.5), "at step 12 of 300, before it pruned at `start=0.5`"),
}


@pytest.mark.parametrize("name", ENDING)
def test_a_fit_that_stops_early_says_so_once(name, project):
    make, message = ENDING[name]
    stop = EarlyStopping("val_loss", patience=0, min_delta=10.0)
    trainer = project.trainer([make(), stop], max_epochs=50, num_sanity_val_steps=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(project.Net(), project.loader(), project.loader(batches=1))
    said = [str(each.message) for each in caught if name in str(each.message)]
    assert trainer.current_epoch < 3
    assert len(said) == 1
    assert said[0].startswith(f"`{name}`: the fit ended {message}")


def test_a_fit_that_reaches_its_density_says_nothing(project):
    for make in SCHEDULED.values():
        project.fit(make(), project.Net(), max_epochs=6)  # warnings are errors here


class Scored:
    """Logs a loss that is best in the first epoch."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", float(self.current_epoch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[0])


EARLY = {
    "GradualPruning": "at step 6 of 36 with density 0.427, above the 0.193",
    "DynamicPruningWithFeedback": "at step 6 of 36 with density 0.432",
    "LotteryRewind": "at step 6 of 36 with density 1,",
    "NMPruning": "at step 6 of 36, before it pruned at `start=0.5`",
    "GlobalMagnitudePruning": "at density 0.5, before epochs [1] pruned",
}


@pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided")
@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("name", EARLY)
def test_scoring_a_checkpoint_above_the_density_says_so(name, fresh, project):
    class Net(Scored, project.Net):
        pass

    def make() -> Any:
        given = {**SCHEDULED, "GlobalMagnitudePruning": lambda: GlobalMagnitudePruning(0.5, epochs=[0, 1])}
        return given[name]()

    callback, module = make(), Net()
    best = ModelCheckpoint(project.folder, monitor="val_loss")
    trainer = project.trainer([callback, best], max_epochs=6)
    trainer.fit(module, project.loader(), project.loader(batches=1))
    trainer.save_checkpoint(project.folder / "last.ckpt")
    trainer.test(module, project.loader(), ckpt_path=project.folder / "last.ckpt", verbose=False)  # warnings are errors
    if fresh:
        module = Net()
        trainer = project.trainer([make()])
    message = f"`{name}`: the checkpoint that was scored was saved {EARLY[name]}"
    with pytest.warns(UserWarning, match=re.escape(message)):
        trainer.test(module, project.loader(), ckpt_path=best.best_model_path, verbose=False)


def test_the_best_checkpoint_that_has_the_density(project):

    class Net(Scored, project.Net):
        pass

    for make in SCHEDULED.values():
        pruning, module = make(), Net()
        names = {"ModelCheckpoint": ModelCheckpoint, "pruning": pruning}
        exec(project.documented("OncePruned"), names)
        best = names["OncePruned"](project.folder, monitor="val_loss")
        trainer = project.trainer([pruning, best], max_epochs=6)
        trainer.fit(module, project.loader(), project.loader(batches=1))
        assert best.best_model_path
        assert 1 <= best.best_model_score < 5
        trainer.test(module, project.loader(), ckpt_path="best", verbose=False)  # warnings are errors here
        assert density(pruning.masks) <= 0.25


def test_a_fit_without_masks_says_so(project):
    class Lost(StaticMask):
        """Loses its masks."""

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.masks, self._weights = {}, {}

    with pytest.warns(UserWarning, match="`Lost`: the fit ends without masks, so that all weights are dense"):
        project.trainer([Lost()], max_epochs=1).fit(project.Net(), project.loader())


def test_units_that_cannot_be_found_are_explained(project):
    with pytest.raises(InvalidOption, match="`LearnedImportance` finds no units in `Net`; expected linear"):
        project.fit(LearnedImportance(), project.Net(net=nn.Linear(8, 4)))
