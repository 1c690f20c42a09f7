"""Every recipe in a LightningCLI project that knows nothing of us, and in `sparsefl fit`."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_sparsefl import callbacks

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "callbacks").glob("*.yaml"))
PROJECT = """
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel


class Model(BoringModel):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


cli = LightningCLI(Model, BoringDataModule)
print("CALLBACKS", [type(callback).__name__ for callback in cli.trainer.callbacks])
print("KEPT", int((cli.model.layer.weight != 0).sum()), "OF", cli.model.layer.weight.numel())
"""


def names(path):
    entries = yaml.safe_load(path.read_text())["trainer"]["callbacks+"]
    return [entry["class_path"].rsplit(".", 1)[1] for entry in entries]


def in_shell(command, folder):
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)


def run_plain(folder, recipes):
    (folder / "train.py").write_text(PROJECT)
    stacked = [part for recipe in recipes for part in ("--config", str(recipe))]
    quiet = ["--trainer.logger=false", "--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"]
    options = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=3", "--trainer.enable_checkpointing=false"]
    return in_shell([sys.executable, "train.py", "fit", *quiet, *options, *stacked], folder)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_in_a_plain_project(recipe, tmp_path):
    done = run_plain(tmp_path, [recipe])
    assert done.returncode == 0, done.stderr
    listed = done.stdout.split("CALLBACKS")[1].splitlines()[0]
    assert all(name in listed for name in names(recipe))


def test_recipes_stack_and_act(tmp_path):
    done = run_plain(tmp_path, RECIPES)
    assert done.returncode == 0, done.stderr
    listed = done.stdout.split("CALLBACKS")[1].splitlines()[0]
    assert all(name in listed for recipe in RECIPES for name in names(recipe))
    kept, total = (int(word) for word in done.stdout.split("KEPT")[1].split() if word.isdigit())
    assert kept == int(0.2 * total)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_in_a_federation(recipe, tmp_path):
    config = ["--config", str(ROOT / "configs" / "quickstart.yaml"), "--config", str(recipe)]
    command = [sys.executable, "-m", "lightning_sparsefl.cli", "fit", *config, "--trainer.fast_dev_run=true"]
    done = in_shell(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{', '.join(names(recipe))} in `trainer.callbacks` works on clients" in done.stderr


def test_every_callback_that_yaml_can_say_has_a_recipe():
    recipes = {name for recipe in RECIPES for name in names(recipe)}
    kinds = {name: getattr(callbacks, name) for name in callbacks.__all__}
    required = {
        name
        for name, kind in kinds.items()
        if all(p.default is not p.empty for p in inspect.signature(kind).parameters.values())
    }
    assert required <= recipes


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_each_says_what_it_does_and_the_same_in_python(recipe):
    first, second = recipe.read_text().splitlines()[:2]
    assert first.startswith("# ")
    assert second.startswith("# The same in Python: Trainer(callbacks=[")
    table = (recipe.parent / "README.md").read_text()
    assert f"`{recipe.name}`" in table
