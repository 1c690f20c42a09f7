import pytest

from helpers.run_folders import write_run
from lightning_sparsefl.report import Report, load_runs


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Three runs of a sparse method and two of a dense one, which is faster and whose time and FLOPs are unknown."""
    root = tmp_path_factory.mktemp("runs")
    dense = {"sparse": False, "timed": False, "flops": False, "quality": 0.7}
    for seed in range(2):
        write_run(root / "FedAvg" / f"version_{seed}", "FedAvg", seed, **dense)
    for seed in range(3):
        write_run(root / "FedSpa" / f"version_{seed}", "FedSpa", seed, options={"density": 0.5})
    return root


@pytest.fixture(scope="session")
def report(folders):
    return Report(load_runs([folders]), target=0.6)
