"""Options of the command line that do not depend on a run."""

import subprocess
import sys

import pytest

from helpers.command_line import QUICKSTART, SHORT, run_folder
from lightning_sparsefl import __version__


def test_the_version_is_printed(sparsefl):
    assert sparsefl("--version") == (0, f"sparsefl {__version__}\n", "")


def test_the_package_can_be_run_as_a_module():
    command = [sys.executable, "-m", "lightning_sparsefl", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"sparsefl {__version__}\n"


@pytest.mark.parametrize(
    "option", ["--trainer.max_round=5", "--conf=missing.yaml", "--algo.density=0.3", "--algorithm.dens=0.3", "--ckpt=x"]
)
def test_options_cannot_be_abbreviated(option, sparsefl):
    code, _, err = sparsefl("fit", "--config", QUICKSTART, option, "--print_config")
    assert code == 2
    assert " is not an option" in err


def test_a_configuration_names_the_versions_that_made_it(sparsefl):
    code, out, _ = sparsefl("fit", "--config", QUICKSTART, "--print_config")
    assert code == 0
    assert out.startswith(f"# lightning-sparsefl=={__version__}\n# lightning==")


def test_without_a_seed_the_seed_is_0(sparsefl, tmp_path):
    config = tmp_path / "unseeded.yaml"
    config.write_text("algorithm: FedAvg\nmodel: MLP\ndata: FederatedDigits\n")
    code, out, err = sparsefl("fit", "--config", config, "--print_config")
    assert (code, err) == (0, "")
    assert "seed_everything: 0\n" in out


def test_a_quiet_run_prints_nothing_and_its_configuration_is_not_quiet(sparsefl, tmp_path):
    assert sparsefl("fit", "--quiet", "--config", QUICKSTART, *SHORT) == (0, "", "")
    assert "quiet: false" in (run_folder(tmp_path) / "config.yaml").read_text()
    code, out, _ = sparsefl("test", "--ckpt_path", run_folder(tmp_path))
    assert code == 0
    assert "personal test_acc" in out
    assert sparsefl("test", "--ckpt_path", run_folder(tmp_path), "--trainer.quiet=true")[1] == ""
    code, out, err = sparsefl("fit", "--quiet", "--config", QUICKSTART, "--trainer.max_rounds=0")
    assert (code, out) == (2, "")
    assert "`trainer.max_rounds` is 0" in err


def test_quiet_may_stand_before_the_subcommand(sparsefl):
    assert sparsefl("--quiet", "profile", "--config", QUICKSTART) == (0, "", "")


@pytest.mark.slow_after_first
@pytest.mark.parametrize("option", ["--quiet", "--trainer.quiet=true"])
def test_a_quiet_program_does_not_print_its_seed(option, tmp_path):
    """In a process of its own, in which Lightning is imported, and sets up its loggers, by the command."""
    command = [sys.executable, "-m", "lightning_sparsefl", "profile", "--config", QUICKSTART, option]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert "Seed set to" not in done.stderr


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("num_classes", "7", "7, but the data has 10"),
        ("sample_shape", "[1, 28, 28]", "(1, 28, 28), but the data has (1, 8, 8)"),
    ],
)
def test_an_option_that_the_data_determines_is_refused_with_another_value(name, value, said, sparsefl, tmp_path):
    code, _, err = sparsefl("fit", "--config", QUICKSTART, *SHORT, f"--model.{name}={value}")
    assert code == 2
    assert f"sparsefl: error: `model.{name}` is {said}; leave the option out" in err
    assert "Traceback" not in err


def test_an_option_that_the_data_determines_may_have_its_value(sparsefl, tmp_path):
    given = ["--model.num_classes=10", "--model.sample_shape=[1, 8, 8]"]
    code, out, _ = sparsefl("fit", "--config", QUICKSTART, *SHORT, *given, "--print_config")
    assert code == 0
    (tmp_path / "again.yaml").write_text(out)
    assert sparsefl("fit", "--config", "again.yaml", *given)[0] == 0
