"""A module and a data set of one's own, from a configuration file: trained, profiled, resumed and replayed."""

from __future__ import annotations

import csv
import json

import pytest
import yaml

from helpers.command_line import run_folder

SOURCE = """
import lightning as L
import torch
from torch.utils.data import Dataset, TensorDataset


def blobs(count: int = 60) -> Dataset:
    inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


class Patients(Dataset):
    def __init__(self, count: int = 60):
        self.features, self.ill = blobs(count).tensors
        self.hospital = [f"hospital {index % 4}" for index in range(count)]

    def __len__(self):
        return len(self.ill)

    def __getitem__(self, index):
        return self.features[index], self.ill[index]


def collate(items):
    return torch.stack([features for features, _ in items]), torch.stack([ill for _, ill in items])


class Net(L.LightningModule):
    def __init__(self, num_classes: int = 5):
        super().__init__()
        self.net = torch.nn.Linear(8, num_classes)

    def forward(self, features):
        return self.net(features)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

    def test_step(self, batch, batch_idx):
        self.log("test_acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""
CONFIG = """
trainer: {accelerator: cpu, max_rounds: 2, enable_progress_bar: false, logger: false}
algorithm: FedAvg
federation: {clients_per_round: 4}
model: own_patients.Net
data:
  class_path: FederatedDataset
  init_args:
    train: {class_path: own_patients.Patients, init_args: {count: 80}}
    labels: ill
    collate_fn: own_patients.collate
    partition: {class_path: ByGroup, init_args: {by: hospital}}
    feature_shift: {class_path: NoiseShift, init_args: {std: 0.5}}
    test_fraction: 0.2
    batch_size: 8
"""


@pytest.fixture
def config(tmp_path):
    (tmp_path / "own_patients.py").write_text(SOURCE)
    path = tmp_path / "own.yaml"
    path.write_text(CONFIG)
    return path


def rounds(folder) -> list[int]:
    with (folder / "metrics.csv").open() as file:
        return [int(row["round"]) for row in csv.DictReader(file)]


@pytest.mark.slow
def test_trains_and_resumes_and_replays(sparsefl, config, tmp_path):
    code, _, err = sparsefl("fit", "--config", config, "--quiet")
    assert code == 0, err
    folder = run_folder(tmp_path, "FedAvg")
    assert rounds(folder) == [0, 1]
    names = list(csv.DictReader((folder / "names.csv").read_text().splitlines()))
    assert [row["client"] for row in names] == list(map(str, range(len(names))))
    assert len({row["name"] for row in names}) == len(names) > 1
    assert sum(int(row["examples"]) for row in names) <= 80
    assert sparsefl("fit", "--ckpt_path", folder, "--trainer.max_rounds=3", "--quiet")[0] == 0
    assert rounds(folder) == [0, 1, 2]
    code, out, err = sparsefl("replay", "--ckpt_path", folder, "--client=2")
    assert code == 0, err
    assert "Client 2 in round 2, again" in out


def test_a_client_is_called_by_the_name_of_its_group(sparsefl, config, tmp_path):
    code, _, err = sparsefl("fit", "--config", config, "--quiet")
    assert code == 0, err
    folder = run_folder(tmp_path, "FedAvg")
    code, out, err = sparsefl("export", "--ckpt_path", folder, "--client=hospital 2")
    assert code == 0, err
    assert "client 2 (hospital 2)" in out
    assert (folder / "export" / "client-2" / "model.ckpt").is_file()
    code, out, err = sparsefl("replay", "--ckpt_path", folder, "--client=hospital 1")
    assert code == 0, err
    assert "Client 1 in round 1, again" in out
    code, _, err = sparsefl("export", "--ckpt_path", folder, "--client=hospitl 2")
    assert code == 2
    assert "`client` is 'hospitl 2'; did you mean `hospital 2`?" in err


def test_an_option_of_the_model_that_the_data_lacks_is_in_the_configuration_of_the_run(sparsefl, config, tmp_path):
    model = ["--model=MLP", "--model.sample_shape=[1, 2, 4]"]
    code, out, err = sparsefl("fit", "--config", config, *model, "--print_config")
    assert code == 0, err
    assert yaml.safe_load(out)["model"]["init_args"]["sample_shape"] == [1, 2, 4]
    code, _, err = sparsefl("fit", "--config", config, *model, "--quiet")
    assert code == 0, err
    folder = run_folder(tmp_path, "FedAvg")
    options = yaml.safe_load((folder / "config.yaml").read_text())["model"]["init_args"]
    assert options["sample_shape"] == [1, 2, 4]
    assert "num_classes" not in options  # which the data has
    code, _, err = sparsefl("test", "--ckpt_path", folder, "--quiet")
    assert code == 0, err


def test_is_profiled_with_the_sizes_of_the_clients(sparsefl, config):
    code, out, err = sparsefl("profile", "--config", config, "--json")
    assert code == 0, err
    facts = json.loads(out[out.index("{") :])
    assert facts["rounds"] == 2
    # 4 clients of 16 training examples; forward and backward of 8 x 2 weights, whose classes are those of the data
    assert facts["parameters"] == 8 * 2 + 2


def test_a_function_may_return_the_data(sparsefl, config):
    options = ["--data.train=own_patients.blobs", "--data.num_clients=4", "--data.partition=IID", "--data.labels=null"]
    code, _, err = sparsefl("fit", "--config", config, *options, "--data.collate_fn=null", "--quiet")
    assert code == 0, err


@pytest.mark.slow_after_first
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--data.labels=sick", "`data.labels` is 'sick', but Patients has no such column; expected an attribute"),
        ("--data.partition.by=ward", "`data.partition.by` is 'ward', but Patients has no such column"),
        ("--data.num_clients=5", "`data.num_clients` is 5; expected a number from 1 to 4, the number of groups."),
        (
            "--data.collate_fn=own_patients.colate",
            "`data.collate_fn` is 'own_patients.colate', but own_patients has ",
        ),
        (
            "--data.collate_fn=nowhere.collate",
            "`data.collate_fn` is 'nowhere.collate', but there is no module ",
        ),
        ("--data.train=own_patients.collate", "is 'own_patients.collate', a function; expected one with the return "),
        ("--trainer.precision=bf17", "`trainer.precision` is 'bf17'; expected one of 'transformer-engine', "),
        ("--data.test_fraction=2", "`data.test_fraction` is 2.0; expected a number in [0, 1)."),
    ],
)
def test_bad_input_is_one_sentence(sparsefl, config, option, message):
    code, _, err = sparsefl("fit", "--config", config, option)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize("subcommand", ["fit", "profile"])
def test_missing_data_is_answered_by_the_options_that_say_where_it_is(subcommand, sparsefl, tmp_path):
    path = tmp_path / "missing.yaml"
    train = f"{{class_path: torchvision.datasets.MNIST, init_args: {{root: {tmp_path}}}}}"
    path.write_text(
        "{algorithm: FedAvg, model: MLP, data: {class_path: FederatedDataset, init_args: "
        f"{{train: {train}, test_fraction: 0.2}}}}}}"
    )
    code, _, err = sparsefl(subcommand, "--config", path)
    assert code == 2
    assert "error: `data` is FederatedDataset, which cannot be created (torchvision.datasets.mnist.MNIST: " in err
    assert "RuntimeError: Dataset not found." in err
    assert "; for missing data, set `data.train.root` or `data.train.download`." in err
    assert "Traceback" not in err


def test_a_file_that_a_data_module_of_ones_own_lacks_is_told_with_its_option(sparsefl, config, tmp_path):
    (tmp_path / "own_files.py").write_text(
        "from lightning_sparsefl.data import FederatedDataModule\n\n\nclass Files(FederatedDataModule):\n"
        "    num_classes, sample_shape, num_train = 2, (8,), 80\n\n"
        '    def load(self):\n        return open("nowhere.pt")\n'
    )
    path = tmp_path / "files.yaml"
    data = "{class_path: own_files.Files, init_args: {num_clients: 4}}"
    path.write_text(f"{{algorithm: FedAvg, model: own_patients.Net, data: {data}}}")
    code, _, err = sparsefl("fit", "--config", path, "--federation.clients_per_round=2")
    assert code == 2
    assert "error: `data` is Files, which finds no file or folder that it needs" in err
    assert "'nowhere.pt'); expected options of `data` that say where it is." in err
    assert "Traceback" not in err


@pytest.mark.filterwarnings("ignore:FLOPs are not counted")
def test_a_model_that_does_not_fit_is_told_with_the_line_of_the_user(sparsefl, config, tmp_path):
    (tmp_path / "own_wide.py").write_text(
        "import torch\nfrom own_patients import Net\n\n\nclass Wide(Net):\n"
        "    def __init__(self):\n        super().__init__()\n        self.net = torch.nn.Linear(9, 5)\n"
    )
    code, _, err = sparsefl("fit", "--config", config, "--model=own_wide.Wide")
    assert code == 2
    assert "(8x8 and 9x5); check that `model` fits the samples of `data`; if other clients do not fail," in err
    first = err.partition("Traceback (most recent call last):\n")[2].splitlines()[0]
    assert "own_patients.py" in first
    assert "in training_step" in first


@pytest.mark.slow
def test_a_metric_that_no_client_has_is_told_without_the_lines_of_the_engine(sparsefl, config, tmp_path):
    (tmp_path / "own_plateau.py").write_text(
        "import torch\nfrom own_patients import Net\n\n\nclass Plateau(Net):\n    def configure_optimizers(self):\n"
        "        optimizer = super().configure_optimizers()\n"
        "        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)\n"
        '        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}\n'
    )
    code, _, err = sparsefl("fit", "--config", config, "--model=own_plateau.Plateau")
    assert code == 2
    assert "set `trainer.validate_locally: true`, with `data.val_fraction` above 0, for a metric of validation" in err
    assert "Traceback" not in err


CLOSED = """
import lightning as L
from torch.utils.data import Dataset


class Closed(Dataset):
    def __init__(self, message: str = ""):
        raise LookupError(message) if message else LookupError


def closed() -> Dataset:
    raise KeyError("x")


class Shut(L.Callback):
    def __init__(self):
        raise KeyError("x")


def quiet() -> L.Callback:
    raise AssertionError


def three() -> L.Callback:
    return 3


def net() -> L.LightningModule:
    raise ValueError


def good_net(num_classes: int, bias: bool = False) -> L.LightningModule:
    from own_patients import Net

    assert num_classes == 2
    return Net()
"""


@pytest.mark.slow_after_first
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--data.train=own_closed.Closed", "--data.train.message=no key"],
            "`data` is FederatedDataset, which cannot be created (own_closed.Closed: LookupError: no key).",
        ),
        (
            ["--data.train=own_closed.Closed"],
            "`data` is FederatedDataset, which cannot be created (own_closed.Closed: LookupError).",
        ),
        (
            ["--data.train=own_closed.closed"],
            "`data` is FederatedDataset, which cannot be created (own_closed.closed: KeyError: 'x').",
        ),
        (["--trainer.callbacks+=own_closed.Shut"], "own_closed.Shut cannot be created (KeyError: 'x')."),
        (["--trainer.callbacks=own_closed.Shut"], "own_closed.Shut cannot be created (KeyError: 'x')."),
        (["--trainer.callbacks+=own_closed.quiet"], "own_closed.quiet cannot be created (AssertionError)."),
        (
            ["--trainer.callbacks=own_closed.three"],
            "own_closed.three cannot be created (TypeError: it returns 3, but is annotated with Callback).",
        ),
        (["--model=own_closed.net"], "`model` is own_closed.net, which cannot be created (ValueError)."),
    ],
    ids=[
        "class in a class",
        "error without a text",
        "function",
        "class in a list",
        "class in place of a list",
        "function in a list",
        "function that returns another class",
        "function in place of a module",
    ],
)
def test_an_error_of_a_class_of_ones_own_is_told_with_its_type(options, message, sparsefl, config, tmp_path):
    (tmp_path / "own_closed.py").write_text(CLOSED)  # a file of its own, since another test may have imported the first
    code, _, err = sparsefl("fit", "--config", config, *options)
    assert code == 2
    assert f"error: {message}\n" in err


def test_a_function_may_return_the_module_with_the_number_of_classes_of_the_data(sparsefl, config, tmp_path):
    (tmp_path / "own_closed.py").write_text(CLOSED)
    code, _, err = sparsefl("profile", "--config", config, "--model=own_closed.good_net", "--model.bias=true")
    assert code == 0, err
