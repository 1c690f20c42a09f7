"""Every recipe in a LightningCLI project that knows nothing of us, and in `sparsefl fit`."""

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_sparsefl import callbacks
from lightning_sparsefl.callbacks.masking import MaskingCallback

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "callbacks").glob("*.yaml"))
RUN_EACH = """
def run_each(run):
    for name, arguments in json.loads(sys.argv.pop()).items():
        for stream in (sys.stdout, sys.stderr):
            print(f"\\n=== {name}", file=stream, flush=True)
        try:
            run(arguments)
        except Exception:
            traceback.print_exc()
"""
"""Several runs in one process, since to start one takes longer than to run it; each is told apart by its name."""
PROJECT = f"""
import json, sys, traceback
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel


class Model(BoringModel):
    def __init__(self, hidden: bool = False):
        super().__init__()
        self.hidden = hidden
        if hidden:
            self.layer, self.head = torch.nn.Linear(32, 10), torch.nn.Linear(10, 2)

    def forward(self, x):
        return self.head(self.layer(x).relu()) if self.hidden else self.layer(x)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

{RUN_EACH}
def run(arguments):
    cli = LightningCLI(Model, BoringDataModule, args=arguments)
    print("CALLBACKS", [type(callback).__name__ for callback in cli.trainer.callbacks])
    print("KEPT", int((cli.model.layer.weight != 0).sum()), "OF", cli.model.layer.weight.numel())
    print("LOGGED", sorted(cli.trainer.callback_metrics))


run_each(run)
"""
FEDERATION = f"""
import json, sys, traceback
from lightning_sparsefl.cli import main

{RUN_EACH}
run_each(lambda arguments: print("CODE", main(arguments)))
"""


def entries(path):
    return yaml.safe_load(path.read_text())["trainer"]["callbacks+"]


def names(path):
    return [entry["class_path"].rsplit(".", 1)[1] for entry in entries(path)]


def masks(path):
    return any(issubclass(getattr(callbacks, name), MaskingCallback) for name in names(path))


def recipe(name):
    return ROOT / "callbacks" / f"{name}.yaml"


def run_all(source, jobs, folder):
    """What each job printed, and what it said on the way."""
    (folder / "train.py").write_text(source)
    command = [sys.executable, "train.py", json.dumps(jobs)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    parts = [re.split(r"^=== (.*)$", text, flags=re.MULTILINE)[1:] for text in (done.stdout, done.stderr)]
    outputs, errors = (dict(zip(part[::2], part[1::2], strict=True)) for part in parts)
    assert outputs.keys() == errors.keys() == jobs.keys()
    return {name: (outputs[name], errors[name]) for name in jobs}


def needs_units(path):
    """Whether a recipe needs a layer that another one reads."""
    return not {"LearnedImportance", "OrderedDropout"}.isdisjoint(names(path))


STACK = [recipe("static_mask_erk"), *(path for path in RECIPES if not masks(path) and not needs_units(path))]
CONFLICT = [recipe("static_mask_erk"), recipe("dpf")]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Each recipe in a project of its own making, then recipes stacked."""
    quiet = ["--trainer.logger=false", "--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"]
    options = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=3", "--trainer.enable_checkpointing=false"]
    stacks = {path.stem: [path] for path in RECIPES} | {"stack": STACK, "conflict": CONFLICT}
    jobs = {
        name: [
            *("fit", *quiet, *options, f"--trainer.default_root_dir={name}"),  # where the saved config.yaml lies
            *(part for path in paths for part in ("--config", str(path))),
            *(["--model.hidden=true"] if needs_units(paths[0]) else []),
        ]
        for name, paths in stacks.items()
    }
    for name, layers in {"by pattern": "type:Lin*", "unmatched": "[type:Linear, '!head*']"}.items():
        jobs[name] = [
            *("fit", *quiet, *options, f"--trainer.default_root_dir={name}"),
            "--trainer.callbacks+=lightning_sparsefl.callbacks.StaticMask",
            *("--trainer.callbacks.layer_density={'lay*': 0.25}", f"--trainer.callbacks.layers={layers}"),
        ]
    return run_all(PROJECT, jobs, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def federated(tmp_path_factory):
    """Each recipe in the quickstart, whose FedSpa brings masks of its own; FedAvg takes its place beside a mask."""
    quickstart = ["fit", "--config", str(ROOT / "configs" / "quickstart.yaml"), "--trainer.fast_dev_run=true"]
    jobs = {
        path.stem: [*quickstart, *(["--algorithm=FedAvg"] if masks(path) else []), "--config", str(path)]
        for path in RECIPES
    }
    jobs["conflict"] = [*quickstart, "--config", str(recipe("static_mask_erk"))]
    return run_all(FEDERATION, jobs, tmp_path_factory.mktemp("federated"))


def kept_by(path, total):
    """Weights that a recipe leaves of `total` in one layer, after 3 steps."""
    options = entries(path)[0]["init_args"]
    if "ActivationPruning" in names(path):  # whose density is that of inputs
        return total
    pattern = options["n"] / options["m"] if "n" in options else 1.0
    return int(options.get("density", pattern) * (1 - options.get("fraction", 0.0) * ("epochs" in options)) * total)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_in_a_plain_project(path, plain):
    output, errors = plain[path.stem]
    assert "CALLBACKS" in output, errors
    listed = output.split("CALLBACKS")[1].splitlines()[0]
    assert all(name in listed for name in names(path))
    kept, total = (int(word) for word in output.split("KEPT")[1].split() if word.isdigit())
    assert kept == kept_by(path, total)
    assert ("density/all" in output) == (names(path) == ["SparsityMonitor"])
    assert all(entry["class_path"].startswith("lightning_sparsefl.callbacks.") for entry in entries(path))


def test_recipes_stack_and_act(plain):
    output, errors = plain["stack"]
    assert "CALLBACKS" in output, errors
    listed = output.split("CALLBACKS")[1].splitlines()[0]
    assert len(STACK) > 2
    assert all(name in listed for path in STACK for name in names(path))
    kept, total = (int(word) for word in output.split("KEPT")[1].split() if word.isdigit())
    assert kept == int(0.2 * total)


def test_densities_by_name_and_layers_by_type_can_be_said_without_python(plain):
    output, errors = plain["by pattern"]
    assert "KEPT 16 OF 64" in output, errors
    output, errors = plain["unmatched"]
    assert errors.rstrip().endswith(
        "the pattern '!head*' in `layers` matches no layer; expected one for `layer.weight`."
    )


def test_recipes_that_mask_the_same_weights_do_not_stack(plain):
    output, errors = plain["conflict"]
    assert "CALLBACKS" not in output
    assert errors.rstrip().endswith(
        "InvalidOption: `StaticMask` and `DynamicPruningWithFeedback` both claim `layer.weight`; "
        "keep one of them, or give them `layers` that do not overlap."
    )


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_in_a_federation(path, federated):
    output, errors = federated[path.stem]
    assert "CODE 0" in output, errors
    assert f"{', '.join(names(path))} in `trainer.callbacks` applies to clients" in errors


@pytest.mark.slow
def test_an_algorithm_with_masks_of_its_own_takes_no_second_one(federated):
    output, errors = federated["conflict"]
    assert "CODE 2" in output
    assert "Two `StaticMask` claim `net.conv1.weight`; keep one of them (a federated algorithm with masks" in errors


def test_every_callback_that_yaml_can_say_has_a_recipe():
    recipes = {name for path in RECIPES for name in names(path)}
    kinds = {name: getattr(callbacks, name) for name in callbacks.__all__}
    required = {
        name
        for name, kind in kinds.items()
        if all(p.default is not p.empty for p in inspect.signature(kind).parameters.values())
    }
    assert required - {"GradientSum"} <= recipes  # whose sums are read in Python


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_each_says_what_it_does_and_the_same_in_python(path):
    first, second = path.read_text().splitlines()[:2]
    assert first.startswith("# ")
    assert second.startswith("# The same in Python: Trainer(callbacks=[")
    table = (path.parent / "README.md").read_text()
    assert f"`{path.name}`" in table
