"""Profiles of the papers' cells, from the command that a reader would type; what cells share is done once."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from filelock import FileLock

from lightning_sparsefl.cli import SparseFLCLI, main

PAPERS = Path(__file__).parents[2] / "configs" / "paper"
FREE = ("penalty", "mu", "finetune_epochs")
"""Options of an algorithm that cost nothing that a profile counts."""

SIZES = {
    "FederatedReddit": ["--data.examples_per_client", "20"],
    "FederatedDomainNet": ["--data.examples_per_client", "100"],
}
"""Options that set the number of samples of data sets whose clients' sizes are unknown until they are read."""


@pytest.fixture(scope="session")
def profile(tmp_path_factory, worker_id) -> Callable[[str, str], Any]:
    """What ``sparsefl profile --json`` prints for a paper's cell; run once for cells that differ in what is free.

    Processes of pytest-xdist share the profiles through a folder.
    """
    folder, parser = tmp_path_factory.mktemp("empty"), {}
    base = tmp_path_factory.getbasetemp()
    known = (base if worker_id == "master" else base.parent) / "profiles"
    known.mkdir(exist_ok=True)

    def profile(paper: str, cell: str) -> Any:
        path = PAPERS / paper / f"{cell}.yaml"
        content = yaml.safe_load(path.read_text())
        for option in ("partition", "test_per_client", "normalization", "augment"):
            content["data"]["init_args"].pop(option, None)  # without data all clients have the nominal size
        for option in FREE:
            content["algorithm"].get("init_args", {}).pop(option, None)
        key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        with FileLock(known / f"{key}.lock"):
            found = known / f"{key}.json"
            if not found.exists():
                found.write_text(printed(path, content["data"]["class_path"]))
            return json.loads(found.read_text())

    def printed(path: Path, data: str) -> str:
        shown = io.StringIO()
        with elsewhere(folder), one_parser(parser), contextlib.redirect_stdout(shown):
            assert main(["profile", "--config", str(path), "--json", *SIZES.get(data, [])]) == 0
        return shown.getvalue()

    return profile


@contextlib.contextmanager
def elsewhere(folder: Path) -> Iterator[None]:
    """An empty folder that stays empty, and what the command changes in this process put back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", sys.argv[:1])
        patch.setattr(sys, "path", list(sys.path))
        yield
        assert not list(folder.iterdir())


@contextlib.contextmanager
def one_parser(built: dict[str, Any]) -> Iterator[None]:
    """The command takes the parser that it has built before: to build one takes longer than to use it."""
    build = SparseFLCLI.setup_parser

    def setup_parser(cli: SparseFLCLI, *arguments: Any) -> None:
        if not built:
            before = set(vars(cli))
            build(cli, *arguments)
            built.update({name: value for name, value in vars(cli).items() if name not in before})
        vars(cli).update(built)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SparseFLCLI, "setup_parser", setup_parser)
        yield
