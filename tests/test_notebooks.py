"""Every notebook runs from top to bottom, and was committed as it ran."""

import json
import re
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
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


@pytest.mark.filterwarnings("ignore")  # a reader sees them, or has turned them off as the notebook shows
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.usefixtures("headless")
def test_it_runs_from_top_to_bottom(path):
    names = {"__name__": "__main__"}
    for number, cell in enumerate(code(path), 1):
        exec(compile("".join(cell["source"]), f"{path.name}, code cell {number}", "exec"), names)


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
