"""Every masking callback in projects of several styles: exact zeros before every forward pass, at the density asked."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, BatchSizeFinder, EMAWeightAveraging, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsefl.callbacks import GroupPenalty
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.masks import kept, same


class ListConfig(Sequence):
    """A list as hydra passes it, which is no `list`."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __getitem__(self, at: Any) -> Any:
        return self._items[at]

    def __len__(self) -> int:
        return len(self._items)


def instantiate(config: dict[str, Any]) -> Any:
    """Build an object as hydra does."""
    path, _, name = config.pop("_target_").rpartition(".")
    lists = {key: ListConfig(value) if isinstance(value, list) else value for key, value in config.items()}
    return getattr(importlib.import_module(path), name)(**lists)


def test_callbacks_of_a_configuration_file(kind, project):
    cls, options = project.KINDS[kind]
    layers = ["net.*"] if kind != "NMPruning" else ["type:Linear"]
    callback = instantiate({"_target_": f"lightning_sparsefl.callbacks.{cls.__name__}", "layers": layers, **options})
    watch = project.fit(callback, project.Net())
    watch.trainer.save_checkpoint(project.folder / "run.ckpt")
    again = cls(layers=layers, **options)  # in Python, with a plain list
    project.trainer([again]).fit(
        project.Net(seed=1), project.loader(), ckpt_path=project.folder / "run.ckpt", weights_only=True
    )
    assert same(callback.masks, again.masks)


class Gan(L.LightningModule):
    """Two optimizers, stepped by hand, in `max_steps`."""

    def __init__(self, critic_steps: int = 1) -> None:
        super().__init__()
        self.automatic_optimization, self.critic_steps = False, critic_steps
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, z: Any) -> Any:
        return self.generator(z)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        for _ in range(self.critic_steps):
            fake = self(torch.randn(len(batch[0]), 4)).detach()
            self.update(second, F.softplus(self.critic(fake)).mean() + F.softplus(-self.critic(batch[0])).mean())
        self.update(first, F.softplus(-self.critic(self(torch.randn(len(batch[0]), 4)))).mean())

    def update(self, optimizer: Any, loss: Any) -> None:
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[0][:, :4])

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), 1e-3) for part in (self.generator, self.critic)], []


@pytest.mark.parametrize("critic_steps", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_a_gan_reaches_its_density_in_max_steps(kind, critic_steps, project):
    options = {"max_epochs": -1, "max_steps": 24 * (critic_steps + 1)}
    if kind == "LearnedImportance":
        with pytest.raises(InvalidOption, match="does not support `Gan`, which optimizes manually"):
            project.fit(kind, Gan(), **options)
        return
    watch = project.fit(kind, Gan(critic_steps), **options)
    assert watch.trainer.global_step == 24 * (critic_steps + 1)


class Language(L.LightningModule):
    """A transformer with a table of positions, whose decoder is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(16, 8), nn.Parameter(torch.randn(1, 6, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.decoder = nn.Linear(8, 16, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, x: Any) -> Any:
        return self.decoder(self.layer(self.embedding(x) + self.positions))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]).flatten(0, 1), batch[0].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def test_a_transformer_with_tied_embeddings(kind, project):
    module, data = Language(), DataLoader(TensorDataset(torch.arange(16 * 6).view(16, 6) % 16), batch_size=4)
    watch = project.fit(kind, module, data)
    assert "positions" not in watch.callback.masks
    assert module.decoder.weight is module.embedding.weight


class Adapted(nn.Module):
    """A quantized, frozen layer with a low-rank adapter."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        codes = torch.randint(-127, 127, (outputs, inputs), dtype=torch.int8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(torch.full((outputs, 1), 0.01), requires_grad=False)
        self.down, self.up = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)

    def forward(self, x: Any) -> Any:
        return x @ (self.codes.float() * self.scale).T + self.up(self.down(x))


def test_adapters_of_quantized_layers(kind, project):
    module = project.Net(net=nn.Sequential(Adapted(8, 16), nn.ReLU(), Adapted(16, 4)))
    frozen = {name: value.clone() for name, value in module.named_parameters() if not value.requires_grad}
    if kind == "LearnedImportance":  # its units are those between `down` and `up`
        project.fit(kind, module, arguments={"density": 0.25})
    else:
        watch = project.fit(kind, module)
        assert all(name.endswith(("down.weight", "up.weight")) for name in watch.callback.masks)
    assert all(torch.equal(module.get_parameter(name), value) for name, value in frozen.items())


FINDERS = {
    "learning rate": lambda: LearningRateFinder(num_training_steps=4, update_attr=False),
    "batch size": lambda: BatchSizeFinder(max_trials=1, init_val=2, steps_per_trial=1),
}


@pytest.mark.filterwarnings("ignore:.*batch_size.*")
@pytest.mark.parametrize("finder", ["learning rate", pytest.param("batch size", marks=pytest.mark.slow)])
def test_masks_survive_a_finder_in_a_first_and_a_second_fit(kind, finder, project):
    class Data(L.LightningDataModule):
        batch_size = 4

        def train_dataloader(self) -> Any:
            return project.loader(self.batch_size)

        val_dataloader = train_dataloader

    callback, module, data = project.make(kind), project.Net(), Data()
    watch = project.Watch(callback)
    project.trainer([callback, FINDERS[finder](), watch]).fit(module, datamodule=data)
    watch.assert_held()
    plain = project.make(kind)
    data.batch_size = 4
    project.trainer([plain]).fit(project.Net(), datamodule=data)
    if finder == "learning rate":  # which restores everything: the fit is as without it
        assert same(callback.masks, plain.masks)
    left = kept(callback.masks)
    project.trainer([callback, FINDERS[finder]()]).fit(module, datamodule=data)
    if kind == "GlobalMagnitudePruning":  # which compounds
        assert kept(callback.masks) < left
    else:
        assert kept(callback.masks) <= left


def test_a_penalty_climbs_anew_after_a_finder_in_a_second_fit(project):
    penalty, module = GroupPenalty(0.1, stairs=2), project.Net()
    for _ in range(2):
        project.trainer([penalty, FINDERS["learning rate"]()], max_epochs=2).fit(module, project.loader())
        assert (penalty._clock.step, penalty._clock.total) == (12, 12)


def test_masks_survive_a_search_of_the_tuner(kind, project):
    callback, module = project.make(kind), project.Net()
    watch = project.Watch(callback)
    trainer = project.trainer([callback, watch])
    Tuner(trainer).lr_find(module, project.loader(), num_training=4, update_attr=False)
    trainer.fit(module, project.loader())
    watch.assert_held()


def test_averaged_weights(kind, project):
    project.fit(kind, project.Net(), beside=[EMAWeightAveraging(decay=0.8)])


class Late(L.LightningModule):
    """Layers that `setup` makes."""

    def setup(self, stage: str) -> None:
        if not hasattr(self, "net"):
            self.net = nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.LazyLinear(4))
            self.net(torch.zeros(2, 8))

    def forward(self, x: Any) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-2)


@pytest.mark.parametrize("norm", [True, False])
def test_a_module_is_cut_after_the_fit(norm, project):
    norms = [nn.BatchNorm1d(16)] if norm else []
    module = project.Net(net=nn.Sequential(nn.Linear(8, 16), *norms, nn.ReLU(), nn.Linear(16, 4)))
    callback, example = project.make("LearnedImportance", density=0.25), torch.randn(3, 8)
    project.fit(callback, module)
    names = {"module": module, "callback": callback, "example": example}
    exec(project.documented("narrow = cut"), names)
    narrow = names["narrow"]
    assert narrow.net[0].weight.shape == (4, 8)
    assert narrow.net[-1].weight.shape == (4, 4)
    torch.testing.assert_close(narrow.eval()(example), module.eval()(example))


def test_layers_that_setup_makes(kind, project):
    watch = project.fit(kind, Late(), arguments={"layers": "net.*"})
    assert watch.callback.masks["net.0.weight"].shape == (16, 8)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of torch.compile
@pytest.mark.filterwarnings("ignore:Guards may run slower:RuntimeWarning")  # torch on Python 3.13.0
def test_a_network_that_setup_compiles(kind, project):
    class Compiled(project.Net):
        def setup(self, stage: str) -> None:
            self.net = torch.compile(self.net, backend="eager")

    module = Compiled(net=nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    if kind == "LearnedImportance":
        with pytest.raises(InvalidOption, match="`net` is compiled, so its units cannot be found; expected a module"):
            project.fit(kind, module)
        return
    watch = project.fit(kind, module, max_epochs=2, arguments={"layers": "net.*"})
    assert "net._orig_mod.0.weight" in watch.callback.masks


class Backbone(L.LightningModule):
    """A backbone that is unfrozen in the course of the fit."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 4)

    def forward(self, x: Any) -> Any:
        return self.head(self.backbone(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam([p for p in self.parameters() if p.requires_grad], 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


@pytest.mark.filterwarnings("ignore:.*will be instantiated in an empty parameter group.*")
@pytest.mark.parametrize("order", ["first", pytest.param("last", marks=pytest.mark.slow)])
def test_a_backbone_that_thaws(kind, order, project):
    beside = {"before" if order == "first" else "beside": [BackboneFinetuning(1, verbose=False)]}
    project.fit(kind, Backbone(), **beside)
