"""The command line, in process where it can be, as a user's shell where it must be."""

import errno
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Callback

from helpers.command_line import QUICKSTART, ROOT, SHORT, run_folder
from lightning_sparsefl.federated.distributed import heartbeat
from lightning_sparsefl.federated.local.node import Node

TORCHRUN = str(ROOT / "configs" / "cluster" / "torchrun.sh")


def test_fit_leaves_a_whole_run_folder(sparsefl, tmp_path):
    code, out, _ = sparsefl("fit", "--config", QUICKSTART, *SHORT)
    assert code == 0
    folder = run_folder(tmp_path)
    names = {path.name for path in folder.iterdir()}
    assert {"config.yaml", "metrics.csv", "clients.csv", "summary.json", "checkpoints"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    summary = json.loads((folder / "summary.json").read_text())
    for key in ("global/test_acc", "personal/test_acc", "personal/test_acc_std", "personal/test_acc_worst10"):
        assert 0 <= summary[key] <= 1
    assert summary["comm/uplink_bytes_total"] > 0
    assert summary["flops/train_total"] > 0
    assert len((folder / "metrics.csv").read_text().splitlines()) == 3
    assert "Run folder: runs/FedSpa/version_0" in out
    assert "tensorboard --logdir runs/FedSpa/version_0" in out
    assert "personal test_acc" in out
    assert "Bytes and FLOPs are sums over clients and rounds" in out
    weights = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert weights["net.fc.weight"].shape[0] == 10


def test_the_saved_configuration_repeats_the_run_and_tests_it(sparsefl, tmp_path):
    assert sparsefl("fit", "--config", QUICKSTART, *SHORT)[0] == 0
    config = run_folder(tmp_path) / "config.yaml"
    assert sparsefl("fit", "--config", config)[0] == 0
    first, second = (
        torch.load(run_folder(tmp_path, version=v) / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
        for v in (0, 1)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    code, out, _ = sparsefl("test", "--config", config, "--ckpt_path", "last")
    assert code == 0
    summary = json.loads((run_folder(tmp_path, version=1) / "summary.json").read_text())
    assert f"{summary['personal/test_acc']:.4f}" in out
    assert sparsefl("profile", "--config", config)[0] == 0


def test_export_writes_a_checked_model_of_one_client(sparsefl, tmp_path):
    assert sparsefl("fit", "--config", QUICKSTART, *SHORT)[0] == 0
    config = run_folder(tmp_path) / "config.yaml"
    code, out, _ = sparsefl("export", "--config", config, "--client=7", "--check", "--out=mine")
    assert code == 0
    assert "FedSpa after 2 rounds: client 7, test set" in out
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {"model.ckpt", "model.safetensors"}
    code, _, err = sparsefl("export", "--config", config, "--client=20")
    assert code == 2
    assert "`client` is 20; expected a number from 0 to 19" in err


def test_print_config_leaves_out_defaults_that_are_tuples(sparsefl):
    given = ["--algorithm=FedDIP", "--model=MLP", "--model.hidden=[3]", "--data=FederatedDigits"]
    code, out, _ = sparsefl("fit", *given, "--print_config=skip_default")
    assert code == 0
    printed = yaml.safe_load(out)
    assert printed["algorithm"] == {"class_path": "lightning_sparsefl.FedDIP"}
    assert printed["model"] == {"class_path": "lightning_sparsefl.models.MLP", "init_args": {"hidden": [3]}}


def test_print_config_stacks_files_options_and_environment(sparsefl, tmp_path, monkeypatch):
    more = tmp_path / "more.yaml"
    more.write_text("trainer:\n  max_rounds: 7\n")
    monkeypatch.setenv("SPARSEFL_FIT__TRAINER__MAX_EPOCHS", "9")
    stacked = ["--config", more, "--algorithm.density=0.25", "--print_config"]
    code, out, _ = sparsefl("fit", "--config", QUICKSTART, *stacked)
    assert code == 0
    assert "max_rounds: 7" in out
    assert "density: 0.25" in out
    code, out, _ = sparsefl("fit", "--algorithm=FedAvg", "--model=MLP", "--data=FederatedDigits", "--print_config")
    assert code == 0
    assert "max_epochs: 9" in out


def test_an_optimizer_of_the_command_line_is_fresh_for_each_client(sparsefl, tmp_path):
    args = ["--optimizer=SGD", "--optimizer.lr=0.05", "--optimizer.momentum=0.9", "--federation.clients_per_round=2"]
    assert sparsefl("fit", "--config", QUICKSTART, *SHORT, *args)[0] == 0
    assert sparsefl("fit", "--config", QUICKSTART, *SHORT, *args, "--federation.local_engine=trainer")[0] == 0
    first, second = (
        torch.load(run_folder(tmp_path, version=v) / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
        for v in (0, 1)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    saved = torch.load(run_folder(tmp_path) / "checkpoints/last.ckpt", weights_only=True)["sparsefl"]["identity"]
    assert saved["reported"]["optimizer.init_args.lr"] == 0.05


@pytest.mark.parametrize("option", ["--config", "-c", "--config="])
def test_a_configuration_in_a_pipe_is_read_once(option, sparsefl, tmp_path):
    """For all that parse the arguments, among them the processes of other ranks."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=["trainer: {max_rounds: 7}"])
    writer.start()
    given = [f"{option}{pipe}"] if option.endswith("=") else [option, pipe]
    code, out, err = sparsefl("fit", "--config", QUICKSTART, *given, "--print_config")
    writer.join()
    assert code == 0, err
    assert yaml.safe_load(out)["trainer"]["max_rounds"] == 7
    assert str(pipe) not in " ".join(sys.argv)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "`--config` is '-', which is empty; expected options by name"),
        (b"trainer: [", "`--config` is '-', which is not YAML, as line 1, column 11 shows"),
        (b"\xff", "`--config` is '-', which is not YAML; repair it."),
    ],
)
def test_a_pipe_without_options(content, words, sparsefl, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    code, _, err = sparsefl("fit", "--config", "-")
    assert code == 2
    assert words in err


def test_a_callback_whose_default_is_a_member_of_an_enum(sparsefl, tmp_path):
    args = ["--config", QUICKSTART, *SHORT, "--trainer.callbacks=Timer", "--trainer.callbacks.duration=01:00:00:00"]
    code, out, err = sparsefl("fit", *args, "--print_config")
    assert code == 0, err
    assert yaml.safe_load(out)["trainer"]["callbacks"][0]["init_args"]["interval"] == "step"
    assert sparsefl("fit", *args)[0] == 0
    saved = run_folder(tmp_path) / "config.yaml"
    assert yaml.safe_load(saved.read_text())["trainer"]["callbacks"][0]["init_args"]["interval"] == "step"


@pytest.mark.slow_after_first
@pytest.mark.parametrize("engine", ["auto", "stacked"])
def test_an_optimizer_of_the_command_line_trains_stacks(engine, sparsefl, tmp_path):
    """Also those of a module without one of its own; a run that goes on with another one says so."""
    (tmp_path / "bare.py").write_text(
        "from lightning import LightningModule\n"
        "from lightning_sparsefl.models import MLP\n\n\n"
        "class Bare(MLP):\n"
        "    configure_optimizers = LightningModule.configure_optimizers\n"
    )
    args = ["--algorithm=FedAvg", "--model=bare.Bare", "--model.hidden=[8]", "--data=FederatedDigits"]
    args += ["--data.num_clients=4", "--data.eval_split=test", "--federation.clients_per_round=3", "--optimizer=SGD"]
    weights = []
    for version, (own, lr) in enumerate([("fast", 0.05), (engine, 0.05), (engine, 0.001)]):
        rounds = ["--trainer.max_rounds=2", f"--federation.local_engine={own}", f"--optimizer.lr={lr}"]
        code, _, err = sparsefl("fit", *args, *rounds)
        assert code == 0, err
        last = run_folder(tmp_path, "FedAvg", version) / "checkpoints" / "last.ckpt"
        weights.append(torch.load(last, weights_only=True)["state_dict"])
    fast, ours, slower = weights
    for name, weight in ours.items():
        torch.testing.assert_close(weight, fast[name])
        assert not torch.allclose(weight, slower[name])
    further = ["--trainer.max_rounds=3", f"--federation.local_engine={engine}", "--optimizer.lr=0.05"]
    with pytest.warns(UserWarning, match=r"was written with `optimizer.init_args.lr` = 0.001"):
        assert sparsefl("fit", *args, *further, "--ckpt_path", str(last))[0] == 0


def test_a_users_own_module_from_the_working_folder(sparsefl, tmp_path):
    (tmp_path / "my_models.py").write_text(
        "from lightning_sparsefl.models import MLP\n\n\nclass Mine(MLP):\n    pass\n"
    )
    code, _, err = sparsefl(
        "fit", "--config", QUICKSTART, *SHORT, "--model=my_models.Mine", "--trainer.fast_dev_run=true"
    )
    assert code == 0, err
    assert (tmp_path / "runs" / "fast_dev_run" / "version_0" / "summary.json").exists()


BAD = {
    "seed": (["--seed_everything=-1"], "`seed_everything`: "),
    "unknown class": (
        ["--algorithm=NoSuchKind"],
        "`algorithm` is 'NoSuchKind', which is not a known class; expected an import path or one of APFL, ",
    ),
    "unknown data": (["--data=NoSuchKind"], "expected an import path or one of ClientDataModules, "),
    "unknown option": (
        ["--federation.on_client_errr=skip"],
        "`--federation.on_client_errr` is not an option; did you mean `--federation.on_client_error`?",
    ),
    "wrong choice": (["--federation.on_client_error=skp"], "is 'skp'; expected one of 'raise', 'skip'."),
    "density": (["--algorithm.density=1.5"], "`algorithm.density` is 1.5; expected a number in (0, 1]."),
    "too many clients": (["--federation.clients_per_round=50"], "`federation.clients_per_round` is 50"),
    "unknown reducer": (
        ["--federation.reducer=Median"],
        "expected an import path or one of CoverageMean, CoverageMedian",
    ),
    "fraction": (
        ["--federation.reducer=TrimmedMean", "--federation.reducer.fraction=0.7"],
        "`federation.reducer.fraction` is 0.7; expected a number in [0, 0.5).",
    ),
    "privacy without a norm": (
        ["--federation.privacy.noise_multiplier=1", "--federation.privacy.delta=1e-3"],
        "`federation.clip_update` is not",
    ),
    "empty client": (["--data.partition.min_examples=80"], "found no partition of 1442 examples over 20 clients"),
    "another algorithm's option": (
        ["--algorithm=FedProx", "--algorithm.density=0.3"],
        "`algorithm.density` is not an option of FedProx; expected one of mu.",
    ),
    "no module": (["--model=torch.nn.Linear"], "LightningModule"),
    "no such config": (["--config=missing.yaml"], "missing.yaml"),
    "no such checkpoint": (["--ckpt_path=missing.ckpt"], "missing.ckpt"),
    "no last run": (["--ckpt_path=last"], "`ckpt_path` is 'last', but"),
    "rounds": (["--trainer.max_rounds=0"], "`trainer.max_rounds` is 0"),
    "precision": (["--trainer.precision=17"], "17"),
    "strategy": (["--trainer.strategy=ddp"], "`trainer.strategy` is 'ddp'"),
    "diverging": (["--model.lr=1e8"], " failed in round 0 on rank 0: its train_loss is nan"),
    "no validation set": (["--data.eval_split=val"], "`data.val_fraction`"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_exit_code_2(case, sparsefl):
    args, part = BAD[case]
    code, _, err = sparsefl("fit", "--config", QUICKSTART, *SHORT, *args)
    assert code == 2
    said = [line for line in err.splitlines() if line.startswith("sparsefl: error: ")]
    assert len(said) == 1
    assert part in said[0]
    assert "Traceback" not in err


def test_a_usage_error_ends_with_a_tip(sparsefl):
    code, _, err = sparsefl("fit", "--config", QUICKSTART, "--trainer.max_roundz=1")
    assert code == 2
    assert err.splitlines()[-1] == "tip: `sparsefl fit --help` lists the options."
    assert sparsefl("foo")[2].splitlines()[-1] == "tip: `sparsefl --help` lists the subcommands."
    code, _, err = sparsefl("--seeds", "fit", "--config", QUICKSTART)
    assert code == 2
    assert err.splitlines() == [
        "sparsefl: error: `--seeds` is not an option before the subcommand; expected options of a subcommand after its "
        "name.",
        "tip: `sparsefl fit --help` lists the options.",
    ]


def test_a_diverging_client_names_the_option_that_decides(sparsefl):
    _, _, err = sparsefl("fit", "--config", QUICKSTART, *SHORT, "--model.lr=1e8")
    assert "`federation.on_client_error: skip`" in err


def test_a_checkpoint_of_another_run_is_refused(sparsefl, tmp_path):
    assert sparsefl("fit", "--config", QUICKSTART, *SHORT)[0] == 0
    path = run_folder(tmp_path) / "checkpoints" / "last.ckpt"
    for args, part in (
        (["--algorithm=FedAvg"], "`algorithm` was FedSpa, and is FedAvg now"),
        (["--algorithm.density=0.4"], "`algorithm.density` was 0.5, and is 0.4 now"),
        (["--data.num_clients=15"], "`data.num_clients` was 20, and is 15 now"),
        (["--seed_everything=1"], "`seed_everything` was 42, and is 1 now"),
    ):
        code, _, err = sparsefl("fit", "--config", QUICKSTART, *SHORT, "--ckpt_path", path, *args)
        assert code == 2
        assert part in err


def test_a_torn_checkpoint_is_refused_by_name(sparsefl, tmp_path):
    assert sparsefl("fit", "--config", QUICKSTART, *SHORT)[0] == 0
    path = run_folder(tmp_path) / "checkpoints" / "last.ckpt"
    path.write_bytes(path.read_bytes()[:1000])
    code, _, err = sparsefl("test", "--config", QUICKSTART, "--ckpt_path", path)
    assert code == 2
    assert "last.ckpt is damaged or not a checkpoint" in err


def in_shell(command, folder, **environment):
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


SCRIPT = [sys.executable, "-m", "lightning_sparsefl.cli"]


class Die(Callback):
    """The second rank is killed, or stopped, when the second round begins, unless torchrun has started it again."""

    number = signal.SIGKILL

    def on_train_epoch_start(self, trainer, pl_module):
        second = os.environ.get("RANK", os.environ.get("LOCAL_RANK")) == "1" and trainer.current_epoch == 1
        if second and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            os.kill(os.getpid(), self.number)


class Stop(Die):
    """Its machine vanishes, as far as the others can see; they notice it within seconds."""

    number = signal.SIGSTOP

    def __init__(self):
        heartbeat.SECONDS = 5.0  # in the processes of the run, which make this callback before they begin


DYING = ["--config", QUICKSTART, *SHORT, "--trainer.callbacks+=test_cli.Die", "--trainer.timeout=60"]


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others_and_one_goes_on_alone(sparsefl, tmp_path):
    """By popen and by the script for torchrun; ranks that live: contract/test_ranks.py."""
    launches = {
        "popen": ([*SCRIPT, "fit", *DYING, "--trainer.devices=2"], {}),
        "torchrun": ([TORCHRUN, *DYING], {"RANKS": "2", "HEAD": "localhost:29512"}),
    }
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(Path(__file__).parent)}

    def left(name):
        state = torch.load(run_folder(tmp_path / name) / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
        return {name: weight.numpy().tobytes() for name, weight in state.items()}

    assert sparsefl("fit", "--config", QUICKSTART, *SHORT)[0] == 0
    for name, (command, environment) in launches.items():
        (tmp_path / name).mkdir()
        done = in_shell(command, tmp_path / name, **path, **environment)
        assert done.returncode != 0
        assert "2 rank(s)" in done.stderr
        assert "sparsefl: error: Rank 0 lost the connection to another rank" in done.stderr
        assert "resume from the last committed round with `ckpt_path: last`" in done.stderr
        there = ["--trainer.default_root_dir", tmp_path / name / "runs"]
        assert sparsefl("fit", "--config", QUICKSTART, *SHORT, *there, "--ckpt_path", "last")[0] == 0
        assert left(name) == left(".")


@pytest.mark.slow
@pytest.mark.parametrize("event", ["Die", "Stop"])
def test_torchrun_starts_a_lost_rank_again_and_the_run_goes_on(event, sparsefl, tmp_path):
    """More kills, of whole machines: tests/stress/elastic.py."""
    dying = ["--config", QUICKSTART, *SHORT, f"--trainer.callbacks+=test_cli.{event}"]
    environment = {"RANKS": "2", "HEAD": f"localhost:{29513 + (event == 'Stop')}", "RESTARTS": "1", "JOB": event}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = in_shell([TORCHRUN, *dying], tmp_path, **environment, PYTHONPATH=str(Path(__file__).parent))
    assert done.returncode == 0, done.stderr
    said = {"Die": "Rank 0 lost the connection to another rank", "Stop": "no heartbeat from rank 1 for 5 seconds"}
    assert said[event] in done.stderr
    assert sparsefl("fit", "--config", QUICKSTART, *SHORT)[0] == 0
    (ours,) = (tmp_path / "runs" / event).glob("FedSpa/version_*")
    weights = [
        torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
        for run in (ours, run_folder(tmp_path))
    ]
    assert all(torch.equal(weights[0][name], value) for name, value in weights[1].items())


@pytest.mark.slow
def test_a_launcher_with_another_world_size_is_refused(tmp_path):
    launched = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "GROUP_RANK": "0"}
    done = in_shell(
        [*SCRIPT, "fit", "--config", QUICKSTART, *SHORT, "--trainer.devices=1"], tmp_path, **launched, **address
    )
    assert done.returncode == 2
    assert "The launcher started 2 processes" in done.stderr


def test_a_full_disk_is_one_sentence(sparsefl, tmp_path, monkeypatch):
    fsync, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) > 4:  # the second round
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", full)
    code, _, err = sparsefl("fit", "--config", QUICKSTART, *SHORT)
    assert code == 2
    assert f"sparsefl: error: The disk of {run_folder(Path('.'))} is full" in err.replace(f"{tmp_path}/", "")
    assert "Traceback" not in err


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_leaves_with_the_usual_code(number, expected, sparsefl, tmp_path, monkeypatch):
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("handlers of signals are set in the main thread, and the tests run in another one")
    train, calls = Node._train, []

    def signalled(self, *args):
        calls.append(self)
        if len(calls) == 5:  # in the second round
            os.kill(os.getpid(), number)
        return train(self, *args)

    monkeypatch.setattr(Node, "_train", signalled)
    former = signal.signal(
        number, signal.default_int_handler
    )  # a shell's background jobs ignore SIGINT, and so would we
    try:
        code, _, _ = sparsefl("fit", "--config", QUICKSTART, *SHORT, "--federation.local_engine=fast")
    finally:
        signal.signal(number, former)
    assert (code, len(calls)) == (expected, 5)
    assert torch.load(run_folder(tmp_path) / "checkpoints/last.ckpt", weights_only=True)["epoch"] == 1


@pytest.mark.slow
def test_a_run_killed_inside_a_client_resumes_to_the_same_bytes(tmp_path):
    killer = """
import os
import signal

import lightning as L


class Killer(L.Callback):
    fits = 0

    def on_fit_start(self, trainer, pl_module):
        Killer.fits += 1

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if os.path.exists("armed") and Killer.fits == 8 and batch_idx == 1:  # the third round's second client
            os.kill(os.getpid(), signal.SIGKILL)
"""
    options = [*SHORT, "--trainer.max_rounds=4", "--trainer.client_callbacks+=killer.Killer"]
    fit = [*SCRIPT, "fit", "--config", QUICKSTART, *options, "--federation.local_engine=fast"]
    content = {}
    for name in ("straight", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "killer.py").write_text(killer)
        if name == "killed":
            (folder / "armed").touch()
            assert in_shell(fit, folder).returncode == -9
            (folder / "armed").unlink()
        resume = ["--ckpt_path=last"] if name == "killed" else []
        done = in_shell([*fit, *resume], folder)
        assert done.returncode == 0, done.stderr
        files = [run_folder(folder) / "checkpoints/last.ckpt", run_folder(folder) / "clients.csv"]
        weights = torch.load(files[0], weights_only=True)["state_dict"]
        content[name] = [{k: v.numpy().tobytes() for k, v in weights.items()}, files[1].read_text()]
    assert content["straight"] == content["killed"]


def test_a_failure_prints_the_command_that_runs_the_fit_again(sparsefl, tmp_path):
    (tmp_path / "fragile.py").write_text(
        "from pathlib import Path\n\n"
        "from lightning_sparsefl.models import MLP\n\n\n"
        "class Fragile(MLP):\n"
        "    def on_train_end(self):\n"
        "        fits = Path('fits')\n"
        "        fits.write_text(fits.read_text() + '.')\n"
        "        if len(fits.read_text()) == 5:\n"  # the second round's second client
        "            raise ZeroDivisionError('mine')\n"
    )
    (tmp_path / "fits").write_text("")
    options = ["--model=fragile.Fragile", "--federation.checkpoint_every_n_rounds=2", "--federation.local_engine=fast"]
    code, _, err = sparsefl("fit", "--config", QUICKSTART, *SHORT, *options)
    assert code == 2
    sentence, command = err.splitlines()[-2:]
    assert " failed in round 1 on rank 0: ZeroDivisionError: mine" in sentence
    program, *words = shlex.split(command.removeprefix("To run that local fit again: "))
    assert program == "sparsefl"
    files = {path: path.read_bytes() for path in run_folder(tmp_path).rglob("*") if path.is_file()}
    code, out, err = sparsefl(*words)
    assert code == 0, err
    assert " in round 1, again" in out
    assert "norm of the update" in out
    (tmp_path / "fits").write_text("....")
    assert sparsefl(*words)[0] == 2
    assert files == {path: path.read_bytes() for path in run_folder(tmp_path).rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_other_in_a_sentence(tmp_path):
    (tmp_path / "killer.py").write_text(
        "import os\nimport signal\nfrom pathlib import Path\n\nimport lightning as L\n\n\n"
        "class Killer(L.Callback):\n"
        "    def on_fit_start(self, trainer, pl_module):\n"
        "        if os.environ.get('LOCAL_RANK') == '1' and list(Path('runs').rglob('last.ckpt')):\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    options = [*SHORT, "--trainer.max_rounds=3", "--trainer.client_callbacks+=killer.Killer", "--trainer.devices=2"]
    done = in_shell(
        [*SCRIPT, "fit", "--config", QUICKSTART, *options, "--trainer.timeout=200", "--trainer.logger=false"], tmp_path
    )
    assert done.returncode == 2
    said = [line for line in done.stderr.splitlines() if line.startswith("sparsefl: error: ")]
    assert len(said) == 1
    assert "Rank 0 lost the connection to another rank (" in said[0]
    assert "Traceback" not in done.stderr
    checkpoint = torch.load(run_folder(tmp_path) / "checkpoints" / "last.ckpt", weights_only=True)
    assert 1 <= checkpoint["sparsefl"]["state"]["round"] < 3
