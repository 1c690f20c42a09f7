"""Options of a fit that are parsed without running it."""

import pytest
import yaml
from docstring_parser.attrdoc import AttributeDocstrings

from lightning_sparsefl import FedSpa
from lightning_sparsefl.cli.program import parse
from lightning_sparsefl.errors import InvalidOption

CONFIG = {
    "trainer": {"accelerator": "cpu", "devices": 1, "max_rounds": 7},
    "algorithm": {"class_path": "FedSpa", "init_args": {"density": 0.25}},
    "model": {"class_path": "MLP"},
    "data": {"class_path": "FederatedBlobs", "init_args": {"num_clients": 3}},
    "ckpt_path": "last",
}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return str(path)


def test_the_objects_are_those_of_a_fit_and_nothing_runs(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parsed = parse(["--config", config, "--trainer.max_rounds", "2"])
    assert (parsed.trainer.max_rounds, parsed.trainer.algorithm.density) == (2, 0.25)
    assert parsed.datamodule.num_clients == 3
    assert type(parsed.model).__name__ == "MLP"
    assert parsed.config["fit"]["ckpt_path"] == "last"
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_sources_are_read_for_help_alone(config, monkeypatch, capsys):
    """They hold the texts of dataclass fields, and take longer to read than all options."""
    read, get = [], AttributeDocstrings.get_attr_docs
    monkeypatch.setattr(AttributeDocstrings, "get_attr_docs", lambda self, kind: read.append(kind) or get(self, kind))
    parse(["--config", config])
    assert not read
    with pytest.raises(SystemExit):
        parse(["--algorithm.help", "FedSpa"])
    assert FedSpa in read
    assert " ".join(FedSpa.__doc__.split()[:4]) in " ".join(capsys.readouterr().out.split())


def test_wrong_options_are_named(config, capsys):
    with pytest.raises(InvalidOption, match="max_rounds` is 0"):
        parse(["--config", config, "--trainer.max_rounds", "0"])
    with pytest.raises(SystemExit, match="2"):
        parse(["--config", config, "--trainer.rounds", "1"])
    assert "trainer.rounds" in capsys.readouterr().err


def test_a_group_of_seeds_is_no_run(config):
    with pytest.raises(InvalidOption, match="`seeds` asks for 2 runs; expected one run"):
        parse(["--config", config, "--seeds", "0,1", "--ckpt_path", "null"])
