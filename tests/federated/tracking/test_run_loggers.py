"""Weights & Biases (offline) and MLflow (a local store) at round level, with the real libraries where they are."""

import csv
import json
import struct
import warnings

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger

from helpers.networks import Classifier
from lightning_sparsefl import FederatedTrainer, Federation, FedSpa
from lightning_sparsefl.data import Dirichlet, FederatedBlobs
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.tracking.run_loggers import FILE, close_loggers, continue_loggers, runs_of_loggers

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:MLFlow only allows:RuntimeWarning",
    "ignore::UserWarning:(mlflow|wandb|pydantic).*",
)


class Odd(Classifier):
    """A user's module with hyper-parameters of types that a store of texts and numbers does not know."""

    def __init__(self, widths, norm, device, none=None):
        super().__init__()
        self.save_hyperparameters()

    def test_step(self, batch, batch_idx):
        super().test_step(batch, batch_idx)
        self.log("test_f1@5", torch.tensor(float("nan")))


def fit(root, logger, rounds=2, ckpt_path=None, seed=0, callbacks=()):
    trainer = FederatedTrainer(
        algorithm=FedSpa(density=0.5),
        federation=Federation(clients_per_round=2, pictures_every_n_rounds=0),
        accelerator="cpu",
        max_rounds=rounds,
        default_root_dir=str(root),
        logger=logger,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        seed=seed,
    )
    partition = Dirichlet(alpha=1.0)
    data = FederatedBlobs(
        num_clients=3, num_classes=4, dim=8, num_train=90, batch_size=8, eval_split="test", partition=partition
    )
    torch.manual_seed(0)
    trainer.fit(Odd((8, 4), torch.nn.BatchNorm1d, torch.device("cpu")), data, ckpt_path)
    return trainer.run_folder


class Stop(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            raise KeyboardInterrupt


def rounds_of(path):
    with path.open() as file:
        return [row.get("round") for row in csv.DictReader(file)]


def test_a_csv_logger_writes_to_a_folder_of_its_own(tmp_path):
    logger = CSVLogger(str(tmp_path), name="FedSpa")
    folder = fit(tmp_path, [logger])
    assert folder == tmp_path / "FedSpa" / "version_0"
    assert logger.log_dir == str(tmp_path / "FedSpa" / "version_1")
    assert rounds_of(folder / "metrics.csv") == ["0", "1"]
    assert len(rounds_of(tmp_path / "FedSpa" / "version_1" / "metrics.csv")) >= 2


def test_a_csv_logger_in_the_run_folder_is_refused(tmp_path):
    both = [kind(str(tmp_path), name="a", version="b") for kind in (TensorBoardLogger, CSVLogger)]
    with pytest.raises(
        InvalidOption, match=r"a CSVLogger that writes to .*a/b, where the run has a metrics.csv of its"
    ):
        fit(tmp_path, both)


def test_a_logger_whose_folder_has_a_run_is_refused_to_a_new_one(tmp_path):
    def logger():
        return TensorBoardLogger(str(tmp_path), name="a", version="b")

    folder = fit(tmp_path, logger())
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(
        InvalidOption, match=r"`trainer.logger` writes to .*a/b, which has a run already; give the logger"
    ):
        fit(tmp_path, logger())
    assert {path: path.read_bytes() for path in before} == before
    assert fit(tmp_path, logger(), rounds=3, ckpt_path=str(folder)) == folder
    assert rounds_of(folder / "metrics.csv") == ["0", "1", "2"]


@pytest.mark.parametrize("ckpt_path", ["last", "auto"])
def test_the_newest_run_in_the_folder_of_a_logger_goes_on_there(ckpt_path, tmp_path):
    def logger():
        return TensorBoardLogger(str(tmp_path / "logs"), name="a")

    first, second = fit(tmp_path / "runs", logger()), fit(tmp_path / "runs", logger())
    assert [first.name, second.name] == ["version_0", "version_1"]
    assert fit(tmp_path / "runs", logger(), rounds=3, ckpt_path=ckpt_path) == second
    assert rounds_of(second / "metrics.csv") == ["0", "1", "2"]
    assert len(list(second.glob("events.out.tfevents.*"))) == 2
    assert sorted(path.name for path in (tmp_path / "logs" / "a").iterdir()) == ["version_0", "version_1"]
    assert not (tmp_path / "runs").exists()


def test_a_run_of_another_method_or_version_is_not_gone_on_with(tmp_path):
    fit(tmp_path / "runs", TensorBoardLogger(str(tmp_path), name="a", version="b"))
    other = TensorBoardLogger(str(tmp_path), name="a", version="c")
    assert fit(tmp_path / "runs", other, ckpt_path="auto") == tmp_path / "a" / "c"
    params = tmp_path / "a" / "c" / "hparams.yaml"
    params.write_text(params.read_text().replace("algorithm: FedSpa", "algorithm: FedAvg"))
    assert runs_of_loggers([TensorBoardLogger(str(tmp_path), name="a")], "FedSpa") == [tmp_path / "a" / "b"]
    params.write_text("{")
    assert runs_of_loggers([TensorBoardLogger(str(tmp_path), name="a")], "FedAvg") == []
    assert runs_of_loggers([CSVLogger(str(tmp_path), name="a")], "FedSpa") == []


@pytest.fixture
def mlflow(tmp_path):
    pytest.importorskip("mlflow")
    return lambda **options: MLFlowLogger(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db", **options)


def points(logger, name):
    history = logger.experiment.get_metric_history(logger.run_id, name)
    return [(point.step, point.value) for point in history]


@pytest.mark.slow
def test_mlflow_has_a_point_for_each_round_and_goes_on_in_the_same_run(mlflow, tmp_path):
    first = mlflow()
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "runs", first, callbacks=[Stop()])
    assert first.experiment.get_run(first.run_id).info.status == "FAILED"
    second = mlflow()
    folder = fit(tmp_path / "runs", second, rounds=3, ckpt_path="last")
    assert second.run_id == first.run_id == json.loads((folder / FILE).read_text())["MLFlowLogger-0"]
    run = second.experiment.get_run(second.run_id)
    assert run.info.status == "FINISHED"
    assert [step for step, _ in points(second, "comm/uplink_bytes_total")] == [0, 1, 1, 2], "round 1 was not committed"
    final = json.loads((folder / "summary.json").read_text())
    assert points(second, "global/test_acc")[-1] == (2, pytest.approx(final["global/test_acc"]))
    params = run.data.params
    assert params["algorithm/density"] == "0.5"
    assert params["model/widths"] == "(8, 4)"
    assert params["model/norm"] == "BatchNorm1d"
    assert params["model/device"] == "cpu"
    assert params["trainer/max_rounds"] == "2", "MLflow keeps the first value"


@pytest.mark.slow
def test_each_seed_has_a_run_of_its_own(mlflow, tmp_path):
    runs = {}
    for seed in (0, 1):
        logger = mlflow()
        fit(tmp_path / "runs", logger, rounds=1, seed=seed)
        runs[logger.run_id] = logger.experiment.get_run(logger.run_id).data.params["trainer/seed"]
    assert sorted(runs.values()) == ["0", "1"]


@pytest.mark.slow
def test_a_run_that_left_the_store_starts_anew(mlflow, tmp_path):
    (tmp_path / FILE).write_text(json.dumps({"MLFlowLogger-0": "0" * 32}))
    logger = mlflow()
    with pytest.warns(UserWarning, match="MLflow starts a new one"):
        continue_loggers([logger], tmp_path)
    assert logger.run_id != "0" * 32


@pytest.mark.parametrize("content", ["{", '{"WandbLogger-0": "../x"}', '{"WandbLogger-0": 3}', "[]x"])
def test_a_damaged_file_of_identifiers_is_ignored(content, tmp_path):
    (tmp_path / FILE).write_text(content)
    with pytest.warns(UserWarning, match="is damaged; its loggers start new runs"):
        continue_loggers([], tmp_path)


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    library = pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield lambda **options: WandbLogger(project="tests", save_dir=str(tmp_path), offline=True, **options)
    library.teardown()


def records(content):
    """The records of LevelDB's log format, in blocks of 32 KiB after a header of 7 bytes."""
    place, parts = 7, []
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        parts.append(content[place + 7 : place + 7 + length])
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield b"".join(parts)
            parts = []


def recorded(run):
    """The rows of the history and the configuration in the file of an offline run."""
    from wandb.proto import wandb_internal_pb2

    rows, config = [], {}
    for data in records(next(run.glob("*.wandb")).read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.HasField("history"):
            rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item})
        for update in (record.config, record.run.config):
            config.update({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in update.update})
    return rows, config


@pytest.mark.slow
def test_wandb_has_a_row_for_each_round_and_goes_on_in_the_same_run(wandb, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = wandb()
        folder = fit(tmp_path / "runs", first)
        close_loggers([first])
        second = wandb()
        assert fit(tmp_path / "runs", second, rounds=3, ckpt_path="last") == folder
        close_loggers([second])
    assert second.version == first.version
    runs = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len(runs) == 2
    (before, config), (after, _) = map(recorded, runs)
    steps = [[row["trainer/global_step"] for row in rows if "global/test_acc" in row] for rows in (before, after)]
    assert steps == [[0, 1], [2]]
    final = json.loads((folder / "summary.json").read_text())
    assert after[-1]["global/test_acc"] == pytest.approx(final["global/test_acc"])
    assert config["algorithm/density"] == 0.5
    assert config["model/norm"] == "BatchNorm1d"
