"""A user's module in a plain Lightning `Trainer`, and the same training written out by hand."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import NamedTuple

import lightning as L
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.utils.data import DataLoader, TensorDataset


class Recipe(NamedTuple):
    optimizer: object
    clip: float | None = None
    accumulate: int = 1


RECIPES = {
    "sgd": Recipe(lambda p: SGD(p, 0.3)),
    "momentum, decay": Recipe(lambda p: SGD(p, 0.2, momentum=0.9, weight_decay=0.1)),
    "nesterov, decay, clipped": Recipe(lambda p: SGD(p, 0.2, momentum=0.9, nesterov=True, weight_decay=0.1), clip=0.1),
    "adam, decay, accumulated": Recipe(lambda p: Adam(p, 0.05, weight_decay=0.1), accumulate=2),
    "adamw, clipped, accumulated": Recipe(lambda p: AdamW(p, 0.05, weight_decay=0.5), clip=0.1, accumulate=2),
}


class Net(L.LightningModule):
    """A user's module."""

    def __init__(self, optimizer, seed=0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.net = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 6), nn.ReLU(), nn.Linear(6, 3))
        self.optimizer = optimizer

    def loss(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch):
        return self.loss(batch)

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


def batches_of():
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=4)


@pytest.fixture
def loader():
    """Makes the loader that `fit` trains on."""
    return batches_of


@pytest.fixture(params=RECIPES.values(), ids=RECIPES)
def recipe(request):
    return request.param


@pytest.fixture
def net():
    """Makes the module of a recipe, always with the same weights."""
    return lambda recipe=RECIPES["sgd"], seed=0: Net(recipe.optimizer, seed)


@pytest.fixture
def recipes():
    return RECIPES


@pytest.fixture
def fit(tmp_path):
    """Trains a module with callbacks in a plain Trainer, and returns the trainer."""

    def run(module, callbacks, recipe=RECIPES["sgd"], epochs=3, ckpt_path=None, batches=None, **options):
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=epochs,
            callbacks=callbacks,
            gradient_clip_val=recipe.clip,
            accumulate_grad_batches=recipe.accumulate,
            limit_train_batches=batches,
            logger=options.pop("logger", False),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            **options,
        )
        trainer.fit(module, batches_of(), ckpt_path=ckpt_path)
        return trainer

    return run


@pytest.fixture(scope="session")
def slow():
    """The slow twins of `sparse`."""
    path = Path(__file__).parents[1] / "reference" / "sparse_reference.py"
    spec = importlib.util.spec_from_file_location("sparse_reference", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _nothing(*_):
    """Leaves everything as it is."""


@pytest.fixture
def by_hand():
    """The same training as a loop in plain torch: `penalty` joins the loss, `edit_*` stand where the callback acts."""

    def run(
        module, recipe, *, epochs=3, penalty=None, before_step=_nothing, edit_gradients=_nothing, edit_weights=_nothing
    ):
        module = copy.deepcopy(module)
        parameters = dict(module.named_parameters())
        optimizer = recipe.optimizer(module.parameters())
        with torch.no_grad():
            edit_weights(parameters)
        for _ in range(epochs):
            batches = list(batches_of())
            for index, batch in enumerate(batches):
                (module.loss(batch) / recipe.accumulate).backward()
                if (index + 1) % recipe.accumulate and index + 1 < len(batches):
                    continue
                if penalty is not None:
                    penalty(parameters).backward()
                with torch.no_grad():
                    before_step(parameters, optimizer)
                edit_gradients(parameters)
                if recipe.clip is not None:
                    nn.utils.clip_grad_norm_(module.parameters(), recipe.clip)
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    edit_weights(parameters)
        return {name: parameter.detach() for name, parameter in parameters.items()}

    return run


def pytest_collection_modifyitems(items):
    """Lightning's own complaints about a tiny run."""
    for item in items:
        if "tests/callbacks" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore:.*does not have many workers.*"))
