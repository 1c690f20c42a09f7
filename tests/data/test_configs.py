"""configs/data and configs/model: every file builds what its name says, in a plain LightningCLI."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.cli import LightningCLI

from lightning_sparsefl import data as data_sets
from lightning_sparsefl import models

CONFIGS = Path(__file__).parents[2] / "configs"


# Lightning 2.6 calls names that jsonargparse 4.49 and later call deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class FactsLinked(LightningCLI):
    """The model is told the data's facts."""

    def add_arguments_to_parser(self, parser):
        for name in ("num_classes", "sample_shape"):
            parser.link_arguments(f"data.{name}", f"model.init_args.{name}", apply_on="instantiate")


def build(monkeypatch: pytest.MonkeyPatch, *args: str) -> LightningCLI:
    monkeypatch.setattr("sys.argv", ["train.py", *args, "--trainer.logger=false", "--trainer.accelerator=cpu"])
    return FactsLinked(
        models.Classifier,
        data_sets.FederatedDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        run=False,
        save_config_callback=None,
        seed_everything_default=False,
    )


@pytest.mark.parametrize("config", sorted((CONFIGS / "data").glob("*.yaml")), ids=lambda path: path.stem)
def test_data(config: Path, monkeypatch: pytest.MonkeyPatch):
    cli = build(monkeypatch, f"--config={config}", "--model=MLP")
    assert type(cli.datamodule).__name__.lower() == f"federated{config.stem.replace('_', '')}"
    if config.stem != "reddit":  # whose clients are its users
        assert isinstance(cli.datamodule.partition, data_sets.Dirichlet)
    assert cli.datamodule.eval_split == "test"
    assert cli.model.hparams.num_classes == cli.datamodule.num_classes
    assert tuple(cli.model.hparams.sample_shape) == cli.datamodule.sample_shape


@pytest.mark.parametrize("config", sorted((CONFIGS / "model").glob("*.yaml")), ids=lambda path: path.stem)
def test_model(config: Path, monkeypatch: pytest.MonkeyPatch):
    cli = build(monkeypatch, f"--config={config}", "--data=FederatedCIFAR10")
    assert config.stem.replace("_", "").startswith(type(cli.model).__name__.lower())  # a variant's name is longer
    assert cli.model.hparams.sample_shape == (3, 32, 32)


def test_every_data_set_and_network_has_a_file():
    stems = {path.stem.replace("_", "") for path in CONFIGS.glob("*/*.yaml")}
    sets = {name.removeprefix("Federated").lower() for name in data_sets.__all__ if name.startswith("Federated")}
    assert sets - {"datamodule", "dataset", "blobs", "blobsondemand"} <= stems
    # the last two have data of their own shape: whole photographs, and text
    others = {"mlp", "classifier", "alexnet256", "languagelstm"}
    with_exits = {name.lower() for name in models.__all__ if name.startswith("Exit")}  # for one method
    assert {name.lower() for name in models.__all__} - others - with_exits <= stems


def test_a_data_sets_own_defaults_reach_the_command_line(monkeypatch: pytest.MonkeyPatch):
    """jsonargparse before 4.41 let the base's default win, and before 4.44 could not print the partition's."""
    cli = build(monkeypatch, "--data=FederatedDigits", "--model=MLP")
    assert (cli.datamodule.num_clients, cli.datamodule.partition) == (20, data_sets.IID())
    assert "Unable to serialize" not in cli.parser.dump(cli.config)


def test_partition_options_can_be_set_on_the_command_line(monkeypatch: pytest.MonkeyPatch):
    cli = build(
        monkeypatch, "--data=FederatedDigits", "--data.partition=Dirichlet", "--data.partition.alpha=0.7", "--model=MLP"
    )
    assert cli.datamodule.partition == data_sets.Dirichlet(alpha=0.7)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore:.*does not have many workers")
def test_a_plain_lightning_cli_fits_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    cli = build(
        monkeypatch,
        f"--config={CONFIGS / 'data' / 'digits.yaml'}",
        f"--config={CONFIGS / 'model' / 'small_cnn.yaml'}",
        "--data.val_fraction=0.1",
        "--trainer.fast_dev_run=true",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
        f"--trainer.default_root_dir={tmp_path}",
    )
    assert isinstance(cli.trainer, L.Trainer)
    cli.trainer.fit(cli.model, cli.datamodule)
    assert {"train_acc", "val_acc"} <= set(cli.trainer.callback_metrics)
