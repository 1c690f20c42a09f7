"""Whole reports: the files, the page, and the table on the terminal."""

import html
import re
from html.parser import HTMLParser

import pytest

from helpers.run_folders import write_run
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.report import Report, load_runs
from lightning_sparsefl.report.plots.drawing import draw_files

PLOTS = {
    *("score_rounds", "score_bytes_up", "score_bytes_down", "score_flops", "score_seconds", "target", "clients"),
    *("density", "mask_similarity", "mask_similarity_rounds", "participation", "durations"),
}


@pytest.fixture(scope="module")
def written(report, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    report.write(folder)
    return folder


class References(HTMLParser):
    """Collects the tags of a page, and whatever an attribute refers to."""

    def __init__(self):
        super().__init__()
        self.tags, self.targets = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.targets += [value for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]


def page_of(folder):
    text = (folder / "index.html").read_text(encoding="utf-8")
    found = References()
    found.feed(text)
    return text, found


def test_every_figure_has_its_files(written):
    names = {path.name for path in (written / "figures").iterdir()}
    assert names == {f"{plot}.{kind}" for plot in PLOTS for kind in ("png", "pdf", "svg", "csv")}
    starts = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml", "csv": b""}
    for path in (written / "figures").iterdir():
        assert path.read_bytes().startswith(starts[path.suffix[1:]])
        assert path.stat().st_size > 60


def test_every_table_has_its_files(written):
    parts = ("scores", "costs", "target_global", "target_personal")
    expected = {"groups.csv", "runs.csv", "groups.md", *(f"{part}.tex" for part in parts)}
    assert {path.name for path in (written / "tables").iterdir()} == expected


def test_the_page_refers_to_nothing_outside_itself(written):
    text, found = page_of(written)
    assert found.targets
    assert all(target.startswith("data:image/svg+xml;base64,") for target in found.targets)
    assert len(found.targets) == len(PLOTS)
    assert not {"script", "link", "iframe", "object", "form"} & set(found.tags)
    without_images = re.sub(r'src="data:[^"]*"', "", text)
    assert not re.search(r"https?:|//[a-z]|url\(|@import", without_images)
    assert "prefers-color-scheme: dark" in text


def test_the_page_has_the_numbers_of_the_tables(written, report):
    text, _ = page_of(written)
    markdown = (written / "tables" / "groups.md").read_text(encoding="utf-8")
    cells = [
        cell.strip(" *") for line in markdown.splitlines() if line.startswith("| FedSpa") for cell in line.split("|")
    ]
    assert len([cell for cell in cells if cell]) > 20
    assert all(f">{html.escape(cell)}<" in text for cell in cells if cell)


def test_equal_figures_make_equal_files(written, report):
    places = {group.name: place for place, group in enumerate(report.groups)}
    plot = next(plot for plot in report.plots if plot.name == "target")
    for kind, content in draw_files(plot, places).items():
        assert content == (written / "figures" / f"target.{kind}").read_bytes()


def test_text_from_a_run_cannot_become_a_tag(tmp_path):
    evil = "<script>alert(1)</script>"
    write_run(tmp_path / "runs" / "a&b", rounds=0, finished=False, options={"name": evil})
    write_run(tmp_path / "runs" / "c", rounds=0, finished=False, options={"name": "b"})
    Report(load_runs([tmp_path / "runs"])).write(tmp_path / "report")
    text, found = page_of(tmp_path / "report")
    assert "script" not in found.tags
    assert html.escape(evil) in text
    assert "a&amp;b" in text
    assert "<script" not in (tmp_path / "report" / "tables" / "groups.md").read_text(encoding="utf-8")


def test_an_option_keeps_its_asterisk(tmp_path):
    run = write_run(tmp_path / "run", rounds=0, finished=False, options={"name": "*.bias"})
    Report(load_runs([run])).write(tmp_path / "report")
    assert "<td>*.bias</td>" in page_of(tmp_path / "report")[0]


def test_files_that_became_unknown_are_deleted(tmp_path):
    run = write_run(tmp_path / "run", rounds=0, finished=False)
    (tmp_path / "report" / "figures").mkdir(parents=True)
    (tmp_path / "report" / "tables").mkdir()
    (tmp_path / "report" / "figures" / "density.png").write_text("old")
    for name in ("target_global", "budget_personal"):
        (tmp_path / "report" / "tables" / f"{name}.tex").write_text("old")
    Report(load_runs([run])).write(tmp_path / "report")
    assert list((tmp_path / "report" / "figures").iterdir()) == []
    assert list((tmp_path / "report" / "tables").glob("*_*.tex")) == []
    text, _ = page_of(tmp_path / "report")
    assert text.count("Not available: ") == len(PLOTS)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 20])
def test_reports_of_one_and_of_many_runs(count, tmp_path):
    for number in range(count):
        write_run(tmp_path / "runs" / str(number), options={"density": number / 20}, quality=0.5 + number / 50)
    report = Report(load_runs([tmp_path / "runs"]))
    report.write(tmp_path / "report")
    assert len(report.groups) == count
    text, found = page_of(tmp_path / "report")
    assert len(found.targets) == len(PLOTS)
    assert text.count("finished</td>") == count


def test_what_a_reader_should_know_is_told(tmp_path, capsys):
    for number, finished in enumerate((True, True, False)):
        write_run(tmp_path / f"run_{number}", seed=min(number, 1) if number < 2 else 1, finished=finished)
    report = Report(load_runs([tmp_path]))
    report.print()
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].endswith("run_2 has not finished: 6 rounds so far.")
    assert lines[-1] == "FedSpa has 2 runs of seed 1, which count as different ones."


def test_different_rounds_and_engines_are_noted(tmp_path):
    write_run(tmp_path / "run_0", "FedAvg", rounds=4)
    write_run(tmp_path / "run_1", "FedSpa", rounds=6)
    for number, engine in enumerate(("fast", "stacked")):
        path = tmp_path / f"run_{number}" / "config.yaml"
        path.write_text(path.read_text().replace("capacities:", f"local_engine: {engine}\n  capacities:"))
    runs = load_runs([tmp_path])
    assert Report(runs).notes() == [
        "The runs have from 4 to 6 rounds; their last scores are of different rounds, and their costs are not of equal "
        "work.",
        "The runs differ in `federation.local_engine` (fast, stacked): compare no durations; results differ by "
        "rounding.",
    ]
    assert Report(runs[:1]).notes() == []


def test_a_target_that_no_run_reaches_is_told(folders, capsys):
    Report(load_runs([folders]), target=2).print()
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"Costs to {model} val_acc \u2265 2 are not known, since no score in the run folders reaches it (`--target`)."
        for model in ("global", "personal")
    ]


def test_the_terminal_shows_one_row_for_each_group(report, capsys):
    report.print()
    out = capsys.readouterr().out
    assert [line.split()[:2] for line in out.splitlines() if line.startswith("Fed")] == [
        ["FedAvg", "2"],
        ["FedSpa", "3"],
    ] * 4
    value = report.summary.groups["FedSpa"]["personal_val_acc"]
    assert f"{value.mean:.4f} \u00b1 {value.std:.4f}" in out


def test_an_empty_name_of_a_folder_is_refused(report, tmp_path, monkeypatch):
    """As of a variable of the shell that is not set."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidOption, match=r"`out` is ''; expected a folder, which is created if needed\."):
        report.write("")
    assert not list(tmp_path.iterdir())
