"""Values that cannot be: each is refused in one sentence with the value and the option."""

import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import MISSING, dataclass, fields, is_dataclass
from inspect import isabstract, signature
from pathlib import Path
from typing import Literal, get_origin, get_type_hints

import pytest
import torch
from torch.utils.data import TensorDataset

from lightning_sparsefl import (
    FederatedTrainer,
    Federation,
    FedProx,
    FedSpa,
    HeteroFL,
    algorithms,
    callbacks,
    cost,
    data,
    federated,
)
from lightning_sparsefl.algorithms import FedDIP, FedLPS, FedMP, PruneFL
from lightning_sparsefl.cli import main
from lightning_sparsefl.data import IID, Dirichlet, FederatedBlobs, FederatedDataset
from lightning_sparsefl.errors import InvalidOption, check_types, type_check
from lightning_sparsefl.federated import Oort, Privacy, TrimmedMean, Uniform
from lightning_sparsefl.federated.distributed.fabric import build_fabric
from lightning_sparsefl.federated.local.round_lr import ExponentialRoundLR
from lightning_sparsefl.federated.storage.resume import find_resume_point
from lightning_sparsefl.models import MLP

CLUSTER = Path(__file__).parents[1] / "configs" / "cluster"
NAN, INF = math.nan, math.inf
NOTHING = object()


def trainer(**options):
    return FederatedTrainer(algorithm=FedSpa(), accelerator="cpu", **{"devices": 1, **options})


def blobs(**options):
    return FederatedBlobs(**{"num_clients": 2, **options})


def tensors(**options):
    data = TensorDataset(torch.ones(10, 2), torch.zeros(10, dtype=torch.int64))
    return FederatedDataset(data, num_clients=2, **options)


@pytest.mark.parametrize(
    ("make", "option", "values"),
    [
        (trainer, "trainer.timeout", [NAN, INF, 1e300, 0, "1", True, None]),
        (trainer, "trainer.max_rounds", [2.0, True, "2", 0]),
        (trainer, "trainer.num_nodes", [2.0, True, "2", 0]),
        (trainer, "trainer.accumulate_grad_batches", [2.0, True, "2", 0]),
        (trainer, "trainer.limit_train_batches", [NAN, "2", True, None, 1.5]),
        (trainer, "trainer.gradient_clip_val", [NAN, "2", True, -1]),
        (Federation, "federation.clients_per_round", [2.0, True, "2", NAN]),
        (Federation, "federation.workers_per_device", [1e30, True]),
        (Federation, "federation.min_clients", [NAN, 0.5]),
        (Federation, "federation.eval_clients", [0.5, True, "x"]),
        (Federation, "federation.client_timeout", [NAN, INF, "1", True]),
        (Federation, "federation.clip_update", [NAN, "1", True]),
        (Federation, "federation.capacities", [["1"], [True], [NAN], 1.0, "1"]),
        (Federation, "federation.local_epochs", [1, "1", [0], [1.5], [[2, 1]], {1: 2}]),
        (Federation, "federation.sampler", ["uniform", 1, Uniform]),
        (Federation, "federation.devices", [1e9, {}]),
        (Federation, "federation.availability", [[[0, 1]], {}]),
        (Uniform, "federation.sampler.over_select", ["1", NAN, INF, True]),
        (Oort, "federation.sampler.pacer_step", [2.5, True, "2"]),
        (FedSpa, "algorithm.density", ["0.5", True, None, [1]]),
        (FedDIP, "algorithm.stairs", ["2", 2.5]),
        (FedProx, "algorithm.mu", ["2", NAN]),
        (FedLPS, "algorithm.levels", [1.0, ["1"]]),
        (HeteroFL, "algorithm.rates", [0.5, ["1"]]),
        (FedLPS, "algorithm.levels", [(level for level in (0.5, 1.0))]),
        (TrimmedMean, "federation.reducer.fraction", ["0.1", None]),
        (ExponentialRoundLR, "trainer.round_lr.gamma", ["0.1"]),
        (Dirichlet, "data.partition.alpha", ["0.1"]),
        (lambda **o: Privacy(**{"delta": 1e-5, **o}), "federation.privacy.noise_multiplier", ["1", True, None, NAN]),
        (lambda **o: Privacy(noise_multiplier=1, **o), "federation.privacy.delta", ["1", None]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_value_that_is_no_such_number_is_refused_by_name(make, option, values):
    for value in values:
        with pytest.raises(InvalidOption, match=rf"^`{option}` is {re.escape(repr(value))}; expected "):
            make(**{option.rpartition(".")[2]: value})


@pytest.mark.parametrize(
    ("make", "option", "values", "expected"),
    [
        (
            trainer,
            "trainer.round_lr",
            ["cosine", len],
            "an instance of `RoundLR`, such as `ExponentialRoundLR`, or null",
        ),
        (trainer, "trainer.validate_locally", ["yes", 1, None], "True or False"),
        (trainer, "trainer.fast_dev_run", [2], "True or False"),
        (trainer, "trainer.logger", ["tensorboard", 1], "loggers of Lightning"),
        (trainer, "trainer.callbacks", ["x", 1], "callbacks of Lightning"),
        (trainer, "trainer.default_root_dir", [3, None], "a string or an instance of `PathLike`"),
        (trainer, "trainer.run_dir", [3], "a string or an instance of `PathLike` or null"),
        (trainer, "federation", [{"clients_per_round": 3}, 0, Federation], "an instance of `Federation` or null"),
        (Federation, "federation.server_optimizer", ["adam"], "an instance of `ServerOptimizer` or null"),
        (Federation, "federation.reducer", ["median"], "an instance of `Reducer`, such as `CoverageMean`, or null"),
        (Federation, "federation.privacy", [1.0], "an instance of `Privacy` or null"),
        (Federation, "federation.record_steps", ["no", 1], "True or False"),
        (Federation, "federation.monitor", [3, None], "a string"),
        (blobs, "data.partition", ["dirichlet", 0.3, IID], "an instance of `Partition`, such as `IID`"),
        (blobs, "data.num_clients", ["4", 2.0], "a number from 1 to 1000, the number of training examples"),
        (blobs, "data.batch_size", ["8", 2.5, None], "a whole number >= 1"),
        (blobs, "data.num_workers", ["2", -1], "a whole number >= 0"),
        (blobs, "data.val_fraction", ["0.1", NAN, None], r"a number in \[0, 1\)"),
        (blobs, "data.seed", ["x", -1, 1.5], "a whole number >= 0, or null"),
        (blobs, "data.drop_last", ["yes"], "True or False"),
        (tensors, "data.partition", ["dirichlet", 0.3], "an instance of `Partition`, such as `IID`"),
        (tensors, "data.test_fraction", ["0.1", NAN], r"a number in \[0, 1\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_value_of_another_class_is_refused_by_name(make, option, values, expected):
    for value in values:
        with pytest.raises(InvalidOption, match=rf"^`{option}` is {re.escape(repr(value))}; expected {expected}\.$"):
            make(**{option.rpartition(".")[2]: value})


def options_of_one_class():
    """Return the options that are bool, text or an object of a class, with the dataclasses that have them."""
    for module in (algorithms, cost, data, federated):
        for kind in (value for value in vars(module).values() if is_dataclass(value) and isinstance(value, type)):
            for name, hint in get_type_hints(kind).items():
                is_required = {each.name: each.default is MISSING for each in fields(kind)}.get(name, True)
                if isinstance(hint, type) and not get_origin(hint) and hint not in (int, float) and not is_required:
                    yield pytest.param(kind, name, id=f"{kind.__name__}.{name}")


def lists_of_names():
    """Return the options of methods that are lists of names, with the methods."""
    for kind in (value for value in vars(algorithms).values() if isinstance(value, type) and is_dataclass(value)):
        for name, hint in get_type_hints(kind).items():
            if hint == tuple[str, ...]:
                yield pytest.param(kind, name, id=f"{kind.__name__}.{name}")


@pytest.mark.parametrize(("kind", "name"), list(lists_of_names()))
def test_a_list_of_names_is_neither_a_name_nor_of_numbers(kind, name):
    for value in ("net.fc", 3, [0.5], None):
        with pytest.raises(
            InvalidOption, match=rf"algorithm\.{name}` is {re.escape(repr(value))}; expected a list of s"
        ):
            kind(**{name: value})


def options_that_are_numbers():
    """Return the options that are numbers, perhaps None, with the dataclasses that have and check them."""
    for module in (algorithms, cost, data, federated):
        for kind in (value for value in vars(module).values() if is_dataclass(value) and isinstance(value, type)):
            if isabstract(kind) or not hasattr(kind, "__post_init__"):
                continue
            required = {each.name for each in fields(kind) if each.default is MISSING}
            for name, hint in get_type_hints(kind).items():
                if hint in (int, float, int | None, float | None) and name not in required:
                    yield pytest.param(kind, name, id=f"{kind.__name__}.{name}")


@pytest.mark.parametrize(("kind", "name"), list(options_that_are_numbers()))
def test_nan_is_not_a_number(kind, name):
    required = {each.name: 0.5 for each in fields(kind) if each.default is MISSING and each.init}
    with pytest.raises(InvalidOption, match=rf"{name}. is nan; expected "):
        kind(**required | {name: NAN})


@pytest.mark.parametrize(("kind", "name"), list(options_of_one_class()))
def test_an_option_is_of_its_class(kind, name):
    with pytest.raises(InvalidOption, match=rf"{name}. is 2; expected "):
        kind(**{name: 2})


def arguments_of_callbacks():
    """Return the constructors of all exported callbacks, with each argument whose type is checked."""
    for kind in (getattr(callbacks, name) for name in callbacks.__all__):
        for name, hint in get_type_hints(kind.__init__).items():
            if name != "return" and not type_check(hint)[0](NOTHING):
                yield pytest.param(kind, name, id=f"{kind.__name__}.{name}")


@pytest.mark.parametrize(("kind", "name"), list(arguments_of_callbacks()))
def test_an_argument_of_a_callback_is_of_its_type(kind, name):
    hints, parameters = get_type_hints(kind.__init__), signature(kind).parameters.values()
    required = [each.name for each in parameters if each.default is each.empty and each.name in hints]
    others = {each: {} if type_check(hints[each])[0]({}) else 0.5 for each in required}
    with pytest.raises(InvalidOption, match=rf"^`{kind.__name__}\({name}=<object object at \w+>\)`: expected "):
        kind(**{**others, name: NOTHING})


def test_choices_are_listed_in_the_order_of_their_option():
    """Annotations of `Literal` are equal in any order of their values."""

    @dataclass
    class Options:
        one: Literal["a", "b"] = "a"

    @dataclass
    class Others:
        one: Literal["b", "a"] = "a"

    for kind, listed in ((Options, "'a', 'b'"), (Others, "'b', 'a'")):
        with pytest.raises(InvalidOption, match=f"expected one of {listed}"):
            check_types(kind("c"), "")


def test_paths_may_be_paths(tmp_path):
    options = trainer(default_root_dir=tmp_path, run_dir=tmp_path / "run").options
    assert (options.default_root_dir, options.run_dir) == (str(tmp_path), tmp_path / "run")


def test_the_home_folder_may_be_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    options = trainer(default_root_dir="~/runs", run_dir="~/run").options
    assert (options.default_root_dir, options.run_dir) == (str(tmp_path / "runs"), tmp_path / "run")
    assert options.local.default_root_dir == options.default_root_dir
    assert data.FederatedMNIST(root="~/data").root == str(tmp_path / "data")
    assert blobs(memory_map="~/maps").memory_map == str(tmp_path / "maps")
    assert find_resume_point("~/run/last.ckpt", tmp_path, "FedAvg", True).checkpoint == tmp_path / "run/last.ckpt"


def test_a_checkpoint_that_is_no_path_is_refused():
    with pytest.raises(InvalidOption, match=r"^`ckpt_path` is 3; expected a string or .* or null\.$"):
        trainer().fit(MLP(num_classes=2, sample_shape=(1, 1, 8)), blobs(), ckpt_path=3)


@pytest.mark.parametrize(
    ("method", "without"),
    [
        (FedLPS(), FedLPS(ratio="fixed")),
        (FedMP(), FedMP(ratio=0.5)),
        (PruneFL(), PruneFL(first_accuracy=0)),
    ],
    ids=lambda method: type(method).__name__,
)
def test_a_method_that_learns_from_training_needs_a_batch(method, without):
    with pytest.raises(InvalidOption, match=f"limit_train_batches` is 0, but {type(method).__name__} learns from"):
        FederatedTrainer(algorithm=method, accelerator="cpu", devices=1, limit_train_batches=0)
    FederatedTrainer(algorithm=without, accelerator="cpu", devices=1, limit_train_batches=0)


@pytest.mark.parametrize("seed", [NAN, "x", 1.5, True, -1])
def test_a_seed_that_is_no_whole_number_is_refused(seed):
    with pytest.raises(InvalidOption, match=r"`seed_everything` is .*; expected a whole number >= 0"):
        trainer(seed=seed)


@pytest.mark.parametrize("text", ["x", "1.5", "", "-1"])
def test_a_seed_in_the_environment_that_is_no_number_is_refused(text, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", text)
    for reads in (trainer, lambda: FederatedBlobs(num_clients=2).setup("fit")):
        with pytest.raises(InvalidOption, match=f"PL_GLOBAL_SEED is {text!r}; expected a whole number"):
            reads()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"SLURM_NTASKS": "abc"}, "SLURM_NTASKS is 'abc'; expected a whole number >= 0: start with `srun`"),
        ({"SLURM_NTASKS": "2", "SLURM_NNODES": "x"}, "SLURM_NNODES is 'x'"),
        ({"TORCHELASTIC_RUN_ID": "1"}, "WORLD_SIZE is not set; expected .*start with `torchrun`, or unset TORCH"),
        ({"TORCHELASTIC_RUN_ID": "1", "LOCAL_WORLD_SIZE": "two"}, "LOCAL_WORLD_SIZE is 'two'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_launcher_that_left_no_number_is_named(variables, said, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    fixed = {"accelerator": "cpu", "num_nodes": 1, "strategy": "auto", "precision": "32-true", "timeout": 1.0}
    with pytest.raises(InvalidOption, match=said):
        build_fabric(devices="auto", **fixed)


def test_the_command_line_says_it_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("SLURM_NTASKS", "abc")
    monkeypatch.setattr(sys, "argv", ["sparsefl"])
    options = ["--algorithm", "FedAvg", "--model", "MLP", "--data", "FederatedBlobs", "--data.num_clients", "2"]
    assert main(["profile", "--seed_everything", "0", *options]) == 2
    assert "sparsefl: error: The environment variable SLURM_NTASKS is 'abc'" in capsys.readouterr().err


def test_a_file_in_the_current_folder_replaces_no_package(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["sparsefl"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert sys.path[-1] == str(tmp_path)
    assert str(tmp_path) not in sys.path[:-1]


@pytest.mark.skipif(shutil.which("bash") is None, reason="the script needs bash")
@pytest.mark.parametrize("runs", ["runs", "r*n[s]?"])
def test_the_slurm_script_goes_on_in_the_folder_of_its_job(runs, tmp_path):
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    environment = {
        "PATH": f"{srun.parent}:{os.environ['PATH']}",
        "RUNS": str(tmp_path / runs),
        "SLURM_JOB_ID": "7",
        "SLURM_NNODES": "1",
    }
    done = subprocess.run([CLUSTER / "slurm.sh"], env=environment, capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    assert words[words.index("--ckpt_path") + 1] == "auto"
    assert words[words.index("--trainer.default_root_dir") + 1] == str(tmp_path / runs / "job-7")
