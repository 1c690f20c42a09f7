"""Every notebook runs from top to bottom, and was committed as it ran."""

import json
import re
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
SHORTER = {
    "max_epochs=15": "max_epochs=3",  # 01
    "max_rounds=15": "max_rounds=3",  # 02: with its last round, and three more
    '["round"] == "14"': '["round"] == "2"',
    "max_rounds=18": "max_rounds=4",
    '"max_rounds": 10': '"max_rounds": 3',  # 03
    "max_rounds=20": "max_rounds=4",
    "max_epochs=8": "max_epochs=1",  # 04
}
"""What makes the numbers of a notebook worth a look, and what is enough to see that it runs."""
A_PATH = re.compile(r"(/(tmp|home|root|work|Users|opt|usr)/|[A-Z]:\\)")
"""Of the machine that a notebook ran on."""


def code(path):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.fixture
def headless(monkeypatch, tmp_path):
    """No window and no file outside of a temporary folder; figures are closed after."""
    monkeypatch.chdir(tmp_path)
    backend = plt.get_backend()
    plt.switch_backend("agg")
    yield
    plt.close("all")
    plt.switch_backend(backend)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # a reader sees them, or has turned them off as the notebook shows
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.usefixtures("headless")
def test_it_runs_from_top_to_bottom(path):
    names = {"__name__": "__main__"}
    for number, cell in enumerate(code(path), 1):
        exec(compile(shorter("".join(cell["source"])), f"{path.name}, code cell {number}", "exec"), names)


def shorter(source):
    for long, short in SHORTER.items():
        source = source.replace(long, short)
    return source


def test_every_notebook_is_run_for_a_shorter_time():
    sources = ["".join(line for cell in code(path) for line in cell["source"]) for path in NOTEBOOKS]
    assert all(shorter(source) != source for source in sources)
    assert all(any(long in source for source in sources) for long in SHORTER)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_was_committed_as_it_ran(path):
    cells = code(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert any(output["output_type"] == "display_data" for output in outputs)
    assert not any(output["output_type"] == "error" for output in outputs)
    assert not A_PATH.search(json.dumps([cell["source"] for cell in cells]))
    text = [part for out in outputs for part in (out.get("text"), out.get("data", {}).get("text/plain")) if part]
    assert not A_PATH.search(json.dumps(text))


def test_each_is_listed():
    listed = (NOTEBOOKS[0].parent / "README.md").read_text()
    assert all(f"]({path.name})" in listed for path in NOTEBOOKS)
