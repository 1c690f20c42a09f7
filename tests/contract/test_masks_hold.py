"""What masks withstand: averages of weights, loss scaling, optimizers and ranks, a kill within an epoch, more fits."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsefl import callbacks
from lightning_sparsefl.callbacks.mask_owner import unpacked
from lightning_sparsefl.callbacks.masking import MaskingCallback
from lightning_sparsefl.sparse.masks import digest, kept, same

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory.*"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*before.*optimizer.step"),
]

BATCHES, EPOCHS = 7, 3
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "StaticMask": (callbacks.StaticMask, {"density": 0.4}),
    "DynamicMask, RigL": (callbacks.DynamicMask, {"density": 0.4, "every_n_steps": 2, "stop": 1.0}),
    "DynamicMask, SET": (callbacks.DynamicMask, {"density": 0.4, "growth": "random", "every_n_steps": 3}),
    "GradualPruning": (callbacks.GradualPruning, {"density": 0.3, "end": 0.9, "every_n_steps": 2}),
    "GradualPruning, global": (callbacks.GradualPruning, {"density": 0.3, "every_n_steps": 4, "scope": "global"}),
    "GlobalMagnitudePruning": (callbacks.GlobalMagnitudePruning, {"fraction": 0.1, "epochs": [0, 1, 2]}),
    "DynamicPruningWithFeedback": (callbacks.DynamicPruningWithFeedback, {"end": 0.9, "every_n_steps": 2}),
    "NMPruning": (callbacks.NMPruning, {"n": 1, "m": 2, "start": 0.4}),
    "LotteryRewind": (callbacks.LotteryRewind, {"density": 0.3, "cycles": 3}),
    "LearnedImportance": (callbacks.LearnedImportance, {"density": 0.5, "lr": 1.0}),
}
SETTLED = {name: case for name, case in CASES.items() if case[0] is not callbacks.LearnedImportance}
"""Those whose masks are there before the first batch."""


class Net(L.LightningModule):
    """A user's module; `watch` sees it in the middle of each validation."""

    def __init__(self, optimizer: Any = SGD, seed: int = 1) -> None:
        super().__init__()
        self.optimizer, self.watch = optimizer, None
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6), nn.Linear(6, 4))

    def training_step(self, batch: Any) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any) -> None:
        if self.watch is not None:
            self.watch(self)
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        if self.optimizer is Adam:
            return Adam(self.parameters(), 0.02, weight_decay=0.01)
        return SGD(self.parameters(), 0.1, momentum=0.9, weight_decay=0.01)


def samples() -> Any:
    x = torch.randn(4 * BATCHES, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.argmax(1))


def loader() -> Any:
    return DataLoader(samples(), batch_size=4)


def trainer_of(folder: Any, attached: list[Any], **options: Any) -> L.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    saves = any(isinstance(callback, ModelCheckpoint) for callback in attached)
    given = {"max_epochs": EPOCHS, "enable_checkpointing": saves, "default_root_dir": folder, **quiet, **options}
    return L.Trainer(callbacks=attached, **given)


def assert_masked(weights: Any, masks: Any) -> None:
    assert masks
    for name, mask in masks.items():
        assert not weights[name][~mask].any(), name


class Watch(Callback):
    """After every batch: what is not held is zero."""

    def __init__(self, callback: MaskingCallback) -> None:
        self.callback, self.densities = callback, []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert_masked(dict(pl_module.named_parameters()), self.callback.masks)
        self.densities.append(kept(self.callback.masks))


def test_every_masking_callback_takes_part():
    exported = {getattr(callbacks, name) for name in callbacks.__all__}
    masking = {kind for kind in exported if inspect.isclass(kind) and issubclass(kind, MaskingCallback)}
    assert masking == {kind for kind, _ in CASES.values()}


AVERAGES = {
    "EMA": lambda: EMAWeightAveraging(decay=0.8),
    "late EMA": lambda: EMAWeightAveraging(decay=0.8, update_starting_at_step=9),
    "mean": lambda: WeightAveraging(),
    "SWA": lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1),
}


@pytest.mark.slow_after_first("average", "first")
@pytest.mark.parametrize("first", ["mask first", "average first"])
@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("case", SETTLED)
def test_averaged_weights_are_masked_wherever_they_are_seen(case, average, first, tmp_path):
    kind, options = CASES[case]
    module, callback, seen = Net(), kind(**options), []

    def watch(net: Any) -> None:
        assert_masked(dict(net.named_parameters()), callback.masks)
        seen.append(1)

    module.watch = watch
    pair = [callback, AVERAGES[average]()]
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_on_train_epoch_end=True, save_top_k=-1)
    trainer = trainer_of(tmp_path, [*(pair if first == "mask first" else pair[::-1]), saver], num_sanity_val_steps=1)
    trainer.fit(module, loader(), loader())
    assert len(seen) >= EPOCHS * BATCHES + 1
    assert_masked(dict(module.named_parameters()), callback.masks)
    for path in tmp_path.glob("*.ckpt"):
        content = torch.load(path, weights_only=True)
        masks = unpacked(content["callbacks"][callback.state_key]["masks"])
        for state in ("state_dict", "current_model_state"):
            assert_masked(content.get(state, content["state_dict"]), masks)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    assert_masked(torch.load(tmp_path / "end.ckpt", weights_only=True)["state_dict"], callback.masks)


@pytest.mark.parametrize("first", ["mask first", "average first"])
def test_a_schedule_ends_in_time_although_averaging_adds_an_epoch_without_steps(first, tmp_path):
    module, callback = Net(), callbacks.GradualPruning(density=0.25, end=1.0, every_n_steps=3)
    pair = [callback, AVERAGES["SWA"]()]
    trainer = trainer_of(tmp_path, pair if first == "mask first" else pair[::-1])
    trainer.fit(module, loader())
    assert trainer.max_epochs == EPOCHS  # again
    assert [kept({name: mask}) for name, mask in callback.masks.items()] == [8, 12, 6]


@pytest.mark.slow_after_first("first")
@pytest.mark.parametrize("first", ["mask first", "average first"])
@pytest.mark.parametrize("case", SETTLED)
def test_an_average_is_that_of_the_weights_under_the_masks_and_disturbs_no_training(case, first, tmp_path):
    kind, options = CASES[case]

    class Slow(Callback):
        """The average, written out."""

        def __init__(self, callback: MaskingCallback) -> None:
            self.callback, self.mean = callback, {}

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            for name, weight in pl_module.named_parameters():
                mask = self.callback.masks.get(name, torch.ones_like(weight))
                value = weight.detach().clone()
                self.mean[name] = (0.8 * self.mean.get(name, value) + 0.2 * value) * mask

        def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            for name, mask in self.callback.masks.items():  # which may have moved since
                if name in self.mean:
                    self.mean[name] = self.mean[name] * mask

    plain, callback = Net(), kind(**options)
    slow = Slow(callback)
    pair = [callback, slow]
    trainer_of(tmp_path, pair if first == "mask first" else pair[::-1]).fit(plain, loader(), loader())
    slow.on_train_batch_start(None, plain)
    averaged, again = Net(), kind(**options)
    pair = [again, EMAWeightAveraging(decay=0.8)]
    last = {}

    class Last(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            last.update({name: weight.detach().clone() for name, weight in pl_module.named_parameters()})

    trainer_of(tmp_path, [*(pair if first == "mask first" else pair[::-1]), Last()]).fit(averaged, loader(), loader())
    for name, weight in averaged.named_parameters():
        assert torch.equal(last[name], plain.get_parameter(name))
        torch.testing.assert_close(weight.detach(), slow.mean[name], rtol=0, atol=1e-6)
    assert same(callback.masks, again.masks)


@pytest.mark.slow_after_first("first")
@pytest.mark.parametrize("first", ["mask first", "average first"])
@pytest.mark.parametrize("case", CASES)
def test_a_step_that_loss_scaling_skips_leaves_nothing_unmasked(case, first, tmp_path):
    kind, options = CASES[case]
    module, callback = Net(), kind(**options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**21, growth_interval=2)  # skips some, at first and later
    watch, average = Watch(callback), EMAWeightAveraging(decay=0.8)
    pair = [callback, average] if first == "mask first" else [average, callback]

    class Averaged(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            assert_masked(dict(average._average_model.module.named_parameters()), callback.masks)

    skipped = []
    step = torch.optim.SGD.step

    class Counted(SGD):
        def step(self, *arguments: Any, **named: Any) -> Any:
            skipped.append(1)
            return step(self, *arguments, **named)

    module.configure_optimizers = lambda: Counted(module.parameters(), 0.05, momentum=0.9, weight_decay=0.01)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    trainer_of(tmp_path, [*pair, watch, Averaged()], plugins=[plugin], gradient_clip_val=1.0).fit(module, loader())
    assert 0 < len(skipped) < EPOCHS * BATCHES
    assert all(weight.isfinite().all() for weight in module.parameters())
    assert len(watch.densities) == EPOCHS * BATCHES


class Pair(Net):
    """Two networks, each with its own optimizer, which take turns."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__(seed=seed)
        self.automatic_optimization = False
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.critic = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch: Any) -> None:
        for optimizer, sign in zip(self.optimizers(), (1, -1), strict=True):
            self.toggle_optimizer(optimizer)
            loss = sign * self.critic(self.net(batch[0])).mean() + self.critic(batch[0]).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return (
            SGD(self.net.parameters(), 0.05, momentum=0.9, weight_decay=0.01),
            Adam(self.critic.parameters(), 0.01, weight_decay=0.01),
        )


@pytest.mark.parametrize("case", SETTLED)
def test_two_optimizers_that_take_turns(case, tmp_path):
    kind, options = CASES[case]
    module, callback = Pair(), kind(**options)
    watch = Watch(callback)
    trainer_of(tmp_path, [callback, watch]).fit(module, loader())
    assert {name.partition(".")[0] for name in callback.masks} == {"net", "critic"}
    assert len(watch.densities) == EPOCHS * BATCHES
    expected = 2 * BATCHES if kind is callbacks.GlobalMagnitudePruning else EPOCHS * BATCHES - 1
    assert watch.densities[-1] == watch.densities[expected]  # where schedules end
    assert (kind in (callbacks.StaticMask, callbacks.DynamicMask)) == (len(set(watch.densities)) == 1)


class Feed:
    """A loader that says where it stands, and goes on from there."""

    def __init__(self) -> None:
        self.batches, self.at = list(loader()), 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        self.at %= len(self.batches)
        while self.at < len(self.batches):
            self.at += 1
            yield self.batches[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Kill(Callback):
    """Ends a run in the middle of an epoch, after the checkpoint of its tenth step."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 12:
            raise RuntimeError("killed")


@pytest.mark.slow_after_first("optimizer", "extra")
@pytest.mark.parametrize("extra", ["", "EMA"])
@pytest.mark.parametrize("optimizer", [SGD, Adam])
@pytest.mark.parametrize("case", CASES)
def test_killed_within_an_epoch_and_resumed_is_as_if_nothing_had_happened(case, optimizer, extra, tmp_path):
    kind, options = CASES[case]

    def run(folder: str, seed: int = 1, also: Any = (), **more: Any) -> tuple[Net, Any, L.Trainer]:
        module, callback = Net(optimizer, seed=seed), kind(**options)
        saver = ModelCheckpoint(tmp_path / folder, filename="{step}", every_n_train_steps=5, save_top_k=-1)
        averages = [AVERAGES[extra]()] if extra else []
        trainer = trainer_of(tmp_path, [callback, *averages, callbacks.SparsityMonitor(), *also, saver])
        trainer.fit(module, Feed(), **more)
        return module, callback, trainer

    straight, callback, trainer = run("straight")
    with pytest.raises(RuntimeError, match="killed"):
        run("killed", also=[Kill()])
    path = tmp_path / "killed" / "step=10.ckpt"
    assert torch.load(path, weights_only=True)["loops"]["fit_loop"]["state_dict"]["combined_loader"] == [{"at": 3}]
    resumed, other, again = run("killed", seed=9, ckpt_path=path, weights_only=True)
    for name, value in straight.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name])
    assert same(callback.masks, other.masks)
    assert trainer.callback_metrics == again.callback_metrics
    assert trainer.global_step == again.global_step == EPOCHS * BATCHES


@pytest.mark.parametrize("case", CASES)
def test_three_fits_compound(case, tmp_path):
    kind, options = CASES[case]
    module, callback, left = Net(), kind(**options), []
    for _ in range(3):
        watch = Watch(callback)
        trainer_of(tmp_path, [callback, watch]).fit(module, loader())
        left.append(kept(callback.masks))
        if kind is not callbacks.GlobalMagnitudePruning and len(left) > 1:
            assert len(set(watch.densities)) == 1
    if kind is callbacks.GlobalMagnitudePruning:
        size = sum(mask.numel() for mask in callback.masks.values())
        for _ in itertools.product(range(3), options["epochs"]):
            size -= -(-size // 10)
        assert left[0] > left[1] > left[2] == size
    else:
        assert left[0] == left[1] == left[2]


class Branches(L.LightningModule):
    """One branch a case, so that one fit on two ranks serves all of them."""

    def __init__(self, branches: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(branches)
        )

    def training_step(self, batch: Any) -> Any:
        return sum(nn.functional.cross_entropy(branch(batch[0]), batch[1]) for branch in self.branches)

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), 0.1, momentum=0.9, weight_decay=0.01)


RANKED = {"all but one": [name for name in CASES if name != "LotteryRewind"], "LotteryRewind": ["LotteryRewind"]}
"""`LotteryRewind` takes the weights of all branches back."""


class Compare(Callback):
    """On each rank: all ranks hold the same masks and weights, under gradients of their own."""

    def __init__(self, folder: Any) -> None:
        self.folder, self.batches = folder, 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        mine = {type(c).__name__ + str(c.layers): c for c in trainer.callbacks if isinstance(c, MaskingCallback)}
        assert len(mine) == len(pl_module.branches)
        weights = dict(pl_module.named_parameters())
        for callback in mine.values():
            assert_masked(weights, callback.masks)
        said: list[Any] = [None] * trainer.world_size
        torch.distributed.all_gather_object(said, [digest(callback.masks) for callback in mine.values()])
        assert said[0] == said[1]
        values = torch.cat([weight.detach().flatten() for weight in weights.values()])
        both = [torch.empty_like(values) for _ in range(trainer.world_size)]
        torch.distributed.all_gather(both, values)
        assert torch.equal(*both)
        self.batches += 1

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        (self.folder / f"rank-{trainer.global_rank} {self.batches}").touch()


@pytest.mark.slow_after_first
@pytest.mark.parametrize("cases", RANKED.values(), ids=RANKED)
def test_two_ranks_hold_the_same_masks(cases, tmp_path, monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "NODE_RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    attached = [CASES[name][0](**CASES[name][1], layers=f"branches.{i}.*") for i, name in enumerate(cases)]
    trainer = trainer_of(tmp_path, [*attached, Compare(tmp_path)], devices=2, strategy="ddp_fork", max_epochs=4)
    trainer.fit(Branches(len(cases)), loader())
    assert sorted(path.name for path in tmp_path.glob("rank-*")) == ["rank-0 16", "rank-1 16"]
