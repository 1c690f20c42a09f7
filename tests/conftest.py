"""What every test gets, and the real data sets for those that ask."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from helpers.command_line import sparsefl  # noqa: F401  (a fixture)
from helpers.federation import federation, last  # noqa: F401  (fixtures)
from helpers.slow import TimeLimit, keep_named_tests, mark_slow_cases
from lightning_sparsefl.federated.local.stacked.recording.recorder import PassRecorder
from lightning_sparsefl.report import pictures
from lightning_sparsefl.testing import contents

os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"  # Lightning's CLI still calls what jsonargparse renames

# Lightning separates its logger from the root where logging is not configured at its import, as in a process of xdist.
logging.getLogger("lightning.pytorch").propagate = True


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the time limit of slow tests, for CI on machines of unknown speed."""
    parser.addoption("--slow-seconds", type=float, help="seconds after which no slow test is started (default: none)")


def pytest_configure(config: pytest.Config) -> None:
    """Run a test that is named by its id, slow or not, and no slow test after the time limit."""
    keep_named_tests(config)
    if config.option.slow_seconds is not None:
        config.pluginmanager.register(TimeLimit(config.option.slow_seconds))


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Take the marker `slow_after_first` for what it stands for."""
    mark_slow_cases(items)


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Without the seed that ``seed_everything`` leaves in the environment for whatever runs next."""
    with mock.patch.dict(os.environ):
        os.environ.pop("PL_GLOBAL_SEED", None)
        os.environ.pop("PL_SEED_WORKERS", None)
        yield


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def early_recordings() -> Iterator[None]:
    """Stacks repeat recorded steps from their fourth step on, so that short runs do as well."""
    with mock.patch.object(PassRecorder, "after", 1):
        yield


@pytest.fixture(autouse=True)
def blank_pictures(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave the pictures of runs blank, whose rendering takes most of a short run, but where a test looks at them."""
    if request.node.get_closest_marker("pictures"):
        yield
        return
    with mock.patch.object(pictures, "pixels", return_value=torch.zeros(3, 8, 8, dtype=torch.uint8)):
        yield


@pytest.fixture(scope="session")
def stored_records():
    """Reads what a run keeps about its clients: by store, client and version, as plain values."""

    return contents.stored_records


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder with the real data sets, for tests marked ``data``."""
    root = os.environ.get("SPARSEFL_DATA")
    if not root:
        pytest.skip("set SPARSEFL_DATA to a folder with the data sets in torchvision's layout")
    return Path(root)
