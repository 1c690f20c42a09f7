from __future__ import annotations

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, IterableDataset

from lightning_sparsefl.callbacks import DynamicMask, DynamicPruningWithFeedback, GradualPruning
from lightning_sparsefl.callbacks.clock import StepClock
from lightning_sparsefl.errors import InvalidOption


class Ticking(Callback):
    """A clock, and what it said after each batch."""

    def __init__(self):
        self.clock, self.seen, self.totals, self.resumed = StepClock(), [], [], False

    def on_train_start(self, trainer, pl_module):
        self.clock.start(trainer, "Ticking", self.resumed)
        self.totals.append(self.clock.total)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append((self.clock.tick(trainer), self.clock.step))

    def state_dict(self):
        return self.clock.state_dict()

    def load_state_dict(self, state_dict):
        self.clock.load_state_dict(state_dict)
        self.resumed = True


def test_every_step_counts_once(net, fit):
    ticking = Ticking()
    fit(net(), [ticking], epochs=2)
    assert ticking.totals == [10]
    assert ticking.seen == [(True, step) for step in range(1, 11)]


def test_only_accumulated_steps_count(net, fit, recipes):
    ticking = Ticking()
    fit(net(), [ticking], recipes["adam, decay, accumulated"], epochs=2)
    assert ticking.totals == [6]
    assert [stepped for stepped, _ in ticking.seen] == [False, True, False, True, True] * 2
    assert ticking.seen[-1] == (True, 6)


def test_a_resumed_fit_goes_on_and_a_new_one_begins_anew(net, fit, tmp_path):
    first, second = Ticking(), Ticking()
    fit(net(), [first], epochs=1).save_checkpoint(tmp_path / "one.ckpt")
    fit(net(), [second], epochs=3, ckpt_path=tmp_path / "one.ckpt")
    assert (second.totals, second.clock.step) == ([15], 15)
    assert second.seen[0] == (True, 6)
    second.resumed = False
    fit(net(), [second], epochs=1)
    assert (second.totals, second.clock.step) == ([15, 5], 5)


def test_one_trainer_that_fits_twice_begins_twice(net, fit):
    ticking, module = Ticking(), net()
    trainer = fit(module, [ticking], epochs=2)
    trainer.fit_loop.max_epochs = 5
    trainer.fit(module, loader())
    assert ticking.totals == [10, 15]
    assert ticking.clock.step == 15
    assert trainer.global_step == 25


class Manual(L.LightningModule):
    """Optimizes by itself, two optimizers a batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)

    def training_step(self, batch):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(torch.nn.functional.cross_entropy(self.b(self.a(batch[0])), batch[1]))
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(layer.parameters(), 0.1) for layer in (self.a, self.b)]


def loader():
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(torch.utils.data.TensorDataset(x, x[:, :3].argmax(1)), batch_size=4)


def test_several_optimizers_make_one_step(fit):
    ticking = Ticking()
    trainer = fit(Manual(), [ticking], epochs=2)
    assert trainer.global_step == 20
    assert (ticking.totals, ticking.clock.step) == ([10], 10)


class Endless(IterableDataset):
    def __iter__(self):
        return iter((x, y) for x, y in loader().dataset)


@pytest.mark.parametrize("kind", [DynamicMask, GradualPruning, DynamicPruningWithFeedback])
@pytest.mark.filterwarnings("ignore:.*not set a `max_epochs`.*")
def test_a_training_of_unknown_length_is_refused(kind, net, tmp_path):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    quiet |= {"enable_model_summary": False, "default_root_dir": tmp_path}
    data = DataLoader(Endless(), batch_size=4)
    with pytest.raises(
        InvalidOption, match=f"`{kind.__name__}` plans in shares of the training, .*`trainer.max_steps`"
    ):
        L.Trainer(max_epochs=1, callbacks=[kind()], **quiet).fit(net(), data)
    with pytest.raises(InvalidOption, match="plans in shares"):
        L.Trainer(max_epochs=-1, callbacks=[kind()], **quiet).fit(net(), loader())
    trainer = L.Trainer(max_epochs=-1, max_steps=7, callbacks=[kind(every_n_steps=2)], **quiet)
    trainer.fit(net(), loader())
    assert trainer.global_step == 7
