"""Options of the command line that do not depend on a run."""

import subprocess
import sys

import pytest

from helpers.command_line import QUICKSTART
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
