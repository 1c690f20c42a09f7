"""Every benchmark runs, and writes what its README promises; no time is asserted."""

import csv
import json
import runpy
from importlib import metadata
from pathlib import Path

import pytest
import torch

from lightning_sparsefl.data import FederatedCIFAR10, FederatedFashionMNIST, FederatedMNIST
from lightning_sparsefl.federated import algorithm
from lightning_sparsefl.federated.local import engines

FOLDER = Path(__file__).parents[1] / "benchmarks"
TINY = {
    "frozen_backward": ["--batch", "4", "--cycles", "1"],
    "local_trainer": ["--steps", "2", "--cycles", "1"],
    "cut_step": ["--batch", "2", "--size", "8", "--cycles", "1"],
    "masked_step": ["--width", "8", "--batch", "4", "--steps", "4", "2", "--cycles", "1", "1"],
    "attacks": ["--cases", "iid, large 6", "--rounds", "1"],
    "engines": [
        *("--models", "MLP", "--cohorts", "3", "--samples", "30", "--rounds", "1", "--cycles", "1"),
        *("--runs", "sequential 1", "stacked 1", "--items"),
    ],
    "evaluation": ["--methods", "FedAvg", "--clients", "4", "--rounds", "1", "--cycles", "1"],
    "federated_round": ["--clients", "2", "--samples", "30", "--rounds", "2"],
    "peers": [
        *("--models", "MLP", "--cohort", "2", "--samples", "40", "--rounds", "1", "--cycles", "1"),
        *("--sides", "stacked 1", "pfl 1", "fedjax"),
    ],
}


def run(name, arguments, monkeypatch):
    script = FOLDER / f"{name}.py"
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr("sys.argv", [str(script), *arguments])
    runpy.run_path(str(script), run_name="__main__")


def numbers(tree):
    for value in tree.values():
        if isinstance(value, dict):
            yield from numbers(value)
        elif isinstance(value, float):
            yield value


def test_each_script_is_tested_described_and_measured():
    scripts = {path.stem for path in FOLDER.glob("[!_]*.py")}
    assert scripts == {*TINY, "sparse_training", "moving_masks", "first_weights", "methods", "gpu"}
    described = (FOLDER / "README.md").read_text()
    for name in scripts:
        assert f"`{name}.py`" in described
        assert list((FOLDER / "results").glob(f"{name}.*"))


@pytest.mark.slow_after_first
@pytest.mark.parametrize("name", TINY)
def test_a_tiny_run_writes_the_keys_of_the_kept_result(name, tmp_path, monkeypatch, capsys):
    run(name, [*TINY[name], "--out", str(tmp_path / "result.json")], monkeypatch)
    result = json.loads((tmp_path / "result.json").read_text())
    assert json.loads(capsys.readouterr().out) == result
    assert all(number >= 0 for number in numbers(result))
    assert keys(result) == keys(json.loads((FOLDER / "results" / f"{name}.json").read_text()))


@pytest.mark.slow
def test_the_ways_of_training_on_one_device_are_compared(tmp_path, monkeypatch, capsys):
    modes = ["bare", "sequential", "stacked, no graphs", "stacked", "stacked, 2 workers"]
    size = ["--models", "mlp", "--clients", "4", "--samples", "20", "--rounds", "1", "--modes", *modes]
    run("gpu", ["--accelerator", "cpu", *size, "--out", str(tmp_path / "result.json")], monkeypatch)
    result = json.loads((tmp_path / "result.json").read_text())
    assert json.loads(capsys.readouterr().out) == result
    assert result["float64_difference"]["mlp"] < 1e-9
    assert list(result["seconds"]["mlp"]["4"]) == modes
    assert all(seconds > 0 for seconds in result["seconds"]["mlp"]["4"].values())


def test_cases_after_the_limit_are_null(tmp_path, monkeypatch, capsys):
    options = ["--accelerator", "cpu", "--minutes", "0", "--clients", "4", "--modes", "bare", "stacked, 2 workers"]
    run("gpu", [*options, "--models", "mlp", "--out", str(tmp_path / "result.json")], monkeypatch)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["float64_difference"] == {"mlp": None}
    assert result["seconds"] == {"mlp": {"4": {"bare": None, "stacked, 2 workers": None}}}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_the_comparison_on_a_gpu_says_that_there_is_none(monkeypatch):
    with pytest.raises(SystemExit, match="No CUDA device was found; expected one, or `--accelerator cpu`"):
        run("gpu", [], monkeypatch)


@pytest.mark.slow
def test_peers_that_are_not_installed_are_left_out(tmp_path, monkeypatch, capsys):
    installed = metadata.version

    def version(name):
        if name in ("pfl", "optax"):
            raise metadata.PackageNotFoundError(name)
        return "0" if name in ("fedjax", "jax", "dm-haiku") else installed(name)

    monkeypatch.setattr(metadata, "version", version)
    run("peers", [*TINY["peers"], "--out", str(tmp_path / "result.json")], monkeypatch)
    result = json.loads((tmp_path / "result.json").read_text())
    printed = capsys.readouterr()
    assert json.loads(printed.out) == result
    assert printed.err.splitlines() == [
        "`pfl` is left out, since these are not installed: pfl.",
        "`fedjax` is left out, since these are not installed: optax.",
    ]
    assert result["left_out"] == ["pfl", "fedjax"]
    [row] = result["cells"]
    assert row["steps"] == 2
    assert row["differences"] == {}
    assert list(row["seconds"]) == list(row["ratios"]) == ["bare", "stacked 1"]
    assert row["ratios"]["bare"] == 1
    assert all(times[0] > 0 for times in row["seconds"].values())


def keys(tree):
    return {name: keys(value) if isinstance(value, dict) else None for name, value in tree.items()}


def test_a_round_stops_where_the_two_sides_end_with_different_weights(monkeypatch):
    adopt = algorithm._adopt
    monkeypatch.setattr(algorithm, "_adopt", lambda *arguments: adopt(*arguments) + 1e-3)
    with pytest.raises(SystemExit, match=r"weights of the two sides differ by .* after one round; expected at most"):
        run("federated_round", [*TINY["federated_round"], "--cases", "mlp"], monkeypatch)
    monkeypatch.setattr(engines.FastEngine, "fit", lambda *arguments: None)
    with pytest.raises(SystemExit, match="weights of the two sides differ; expected equal weights"):
        run("local_trainer", TINY["local_trainer"], monkeypatch)


@pytest.fixture
def sparse_training(monkeypatch):
    """Runs the script on images of noise, 64 steps a training, and returns what it defines."""
    rng = torch.Generator().manual_seed(0)

    def load(self):
        images = torch.randint(256, (64, *self.sample_shape), dtype=torch.uint8, generator=rng)
        labels = torch.randint(10, (64,), generator=rng)
        return images, labels, images, labels

    def start(*arguments):
        tiny = ["--seeds", "1", "--densities", "0.2", "1.0", "--epochs", "64"]
        monkeypatch.setattr("sys.argv", ["sparse_training.py", *tiny, *map(str, arguments)])
        return runpy.run_path(str(FOLDER / "sparse_training.py"), run_name="__main__")

    for kind in (FederatedFashionMNIST, FederatedCIFAR10):
        monkeypatch.setattr(kind, "load", load)
    return start


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*bottleneck.*", "ignore:.*does not have many workers.*")
def test_sparse_training_reaches_each_density_and_skips_what_is_done(sparse_training, tmp_path, capsys):
    out, chosen = tmp_path / "rows.csv", ["--datasets", "fashion-mnist", "--methods", "dense", "rigl"]
    sparse_training("--out", out, *chosen)
    first = out.read_text()
    names = sparse_training("--out", out, "--datasets", "fashion-mnist")
    assert out.read_text().startswith(first)
    found = names["rows"](out)
    assert {row["method"] for row in found[:2]} == {"rigl", "dense"}
    assert sorted(row["method"] for row in found) == sorted(names["METHODS"])
    for row in found:
        assert tuple(row) == names["COLUMNS"]
        assert float(row["density_reached"]) == pytest.approx(1.0 if row["method"] == "dense" else 0.2, abs=2e-4)
        assert int(row["steps"]) == (166 if row["method"] == "lth_long" else 64)
    flops = {row["method"]: float(row["train_flops"]) for row in found}
    assert flops["static_erk"] == flops["set"] < flops["rigl"] < flops["gradual"] < flops["dpf"] < flops["dense"]
    page = tmp_path / "page.md"
    page.write_text("before\n{}\nold\n{}\nafter".format(*names["MARKS"]))
    sparse_training("--out", out, "--page", page)
    text = page.read_text()
    assert text.startswith("before")
    assert text.endswith("after")
    assert "old" not in text
    dense = next(row for row in found if row["method"] == "dense")
    assert f"| dense | {100 * float(dense['test_accuracy']):.2f} |" in text


def test_the_page_of_sparse_training_has_the_tables_of_the_kept_rows(tmp_path, sparse_training):
    page = FOLDER.parent / "docs" / "sparse_training.md"
    copied = tmp_path / "page.md"
    copied.write_text(page.read_text())
    sparse_training("--page", copied)
    assert copied.read_text() == page.read_text()


def test_the_kept_rows_of_sparse_training_reach_their_densities():
    rows = list(csv.DictReader((FOLDER / "results" / "sparse_training.csv").read_text().splitlines()))
    runs = [(row["dataset"], row["method"], row["density"], row["seed"]) for row in rows]
    assert len(runs) == len(set(runs)) > 0
    for row in rows:
        assert float(row["density_reached"]) == pytest.approx(float(row["density"]), abs=2e-4)
        assert 0.1 <= float(row["test_accuracy"]) <= 1


@pytest.fixture
def moving_masks(monkeypatch):
    """What the script defines."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return runpy.run_path(str(FOLDER / "moving_masks.py"))


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*bottleneck.*", "ignore:.*does not have many workers.*")
@pytest.mark.filterwarnings("ignore:.*never moves its mask.*")
def test_moving_masks_counts_what_is_tried_and_kept(moving_masks):
    rng = torch.Generator().manual_seed(0)
    images, labels = torch.randn(512, 1, 28, 28, generator=rng), torch.randint(10, (512,), generator=rng)
    tried = {}
    for every in (2, 1000):
        row = moving_masks["measure"](moving_masks["Run"]("fashion-mnist", "set", 1, every, 0), (images, labels) * 2)
        assert tuple(row) == moving_masks["COLUMNS"]
        tried[every] = float(row["tried"])
        assert row["moves"] == (4 if every == 2 else 0)  # 12 steps, until 75 % of them
        assert row["kept"] == "" if every == 1000 else 0 <= float(row["kept"]) <= 1
    assert tried[1000] == pytest.approx(moving_masks["DENSITY"], abs=2e-3)
    assert tried[1000] < tried[2]


def test_the_page_has_the_table_of_the_kept_moving_masks(tmp_path, moving_masks):
    page = FOLDER.parent / "docs" / "sparse_training.md"
    copied = tmp_path / "page.md"
    copied.write_text(page.read_text())
    moving_masks["write_page"](copied, moving_masks["rows"](FOLDER / "results" / "moving_masks.csv"))
    assert copied.read_text() == page.read_text()


@pytest.mark.slow
def test_the_benchmark_of_methods_skips_finished_rows_and_prints_its_table(tmp_path, monkeypatch, capsys):
    def load(self):
        images, labels = torch.randint(256, (400, 1, 28, 28), dtype=torch.uint8), torch.arange(400) % 10
        return images, labels, images, labels

    monkeypatch.setattr(FederatedMNIST, "load", load)
    monkeypatch.syspath_prepend(str(FOLDER))
    out = tmp_path / "rows.csv"
    arguments = ["--rounds", "1", "--samples", "16", "--out", str(out)]
    for pattern in ("FedAvg", "Fed[AB]*"):
        run("methods", [*arguments, "--only", pattern], monkeypatch)
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [row["method"] for row in rows] == ["FedAvg", "FedBABU", "FedBN"]
    capsys.readouterr()
    run("methods", ["--out", str(out), "--table"], monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(rows)
    assert lines[2].startswith("| `FedAvg` |  | MNISTNet |")
