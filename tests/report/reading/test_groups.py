"""Runs that differ in nothing but the seed belong together."""

import pytest

from helpers.run_folders import write_run
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.report import Report, group_runs, load_runs
from lightning_sparsefl.report.documents.cells import part_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for seed in range(2):
        write_run(root / f"FedAvg_{seed}", "FedAvg", seed, options={"lr": 1})
        for density in (0.5, 0.2):
            write_run(root / f"FedSpa_{density}_{seed}", "FedSpa", seed, options={"density": density, "search": "dst"})
    return root


def test_options_of_a_method_that_differ_separate_its_runs(folder):
    groups = group_runs(load_runs([folder]))
    assert {group.name: [run.seed for run in group.runs] for group in groups} == {
        "FedAvg": ["0", "1"],
        "FedSpa (density=0.2)": ["0", "1"],
        "FedSpa (density=0.5)": ["0", "1"],
    }
    assert [dict(group.options) for group in groups] == [
        {"algorithm": "FedAvg"},
        {"algorithm": "FedSpa", "algorithm.density": 0.2},
        {"algorithm": "FedSpa", "algorithm.density": 0.5},
    ]


def test_groups_by_chosen_options(folder):
    runs = load_runs([folder])
    assert [group.name for group in group_runs(runs, by=["algorithm"])] == ["FedAvg", "FedSpa"]
    by_density = group_runs(runs, by=["algorithm.density"])
    assert [group.name for group in by_density] == ["density=null", "density=0.2", "density=0.5"]
    assert [group.name for group in group_runs(runs, by=["model"])] == ["all runs"]


def test_an_option_that_differs_between_methods_alone_is_not_in_the_name(tmp_path):
    for algorithm, epochs in (("FedAvg", 1), ("FedSpa", 2)):
        folder = write_run(tmp_path / algorithm, algorithm)
        text = (folder / "config.yaml").read_text().replace("max_rounds: 6", f"max_rounds: {epochs}")
        (folder / "config.yaml").write_text(text)
    groups = group_runs(load_runs([tmp_path]))
    assert [group.name for group in groups] == ["FedAvg", "FedSpa"]
    assert [group.options["trainer.max_rounds"] for group in groups] == [1, 2]


def test_scores_after_training_do_not_separate_runs(tmp_path):
    for seed, after in enumerate((False, True)):
        folder = write_run(tmp_path / str(seed), seed=seed)
        text = (folder / "config.yaml").read_text()
        added = f"eval_after_training: {str(after).lower()}\n  capacities:"
        (folder / "config.yaml").write_text(text.replace("capacities:", added))
    table = (folder / "metrics.csv").read_text().replace("personal/val_acc_worst10", "personal_after/val_acc")
    (folder / "metrics.csv").write_text(table)  # of the last of the two
    report = Report(load_runs([tmp_path]))
    assert [(group.name, len(group.runs)) for group in report.groups] == [("FedSpa", 2)]
    headers, rows = part_rows(report.summary, "scores")
    assert rows["FedSpa"][headers.index("after local training")].note == "(1/2)"
    assert rows["FedSpa"][headers.index("personal val_acc")].note == ""


def test_keys_of_private_runs_do_not_separate_them(tmp_path):
    for seed in range(2):
        folder = write_run(tmp_path / str(seed), seed=seed)
        text = (folder / "config.yaml").read_text()
        privacy = f"privacy: {{noise_multiplier: 1.0, key_file: key{seed}.txt}}\n  capacities:"
        (folder / "config.yaml").write_text(text.replace("capacities:", privacy))
    assert [(group.name, len(group.runs)) for group in group_runs(load_runs([tmp_path]))] == [("FedSpa", 2)]


def test_long_names_that_would_be_equal_are_numbered(tmp_path):
    for number in range(2):
        write_run(tmp_path / str(number), options={"text": "a " * 20 + str(number) + " a" * 20})
    names = [group.name for group in group_runs(load_runs([tmp_path]))]
    assert [name[-4:] for name in names] == [") #1", ") #2"]


def test_long_values_keep_both_of_their_ends(tmp_path):
    for depth in (18, 34):
        write_run(tmp_path / str(depth), options={"net": f"resnet{depth}_groupnorm_cifar10_v2"})
    names = [group.name for group in group_runs(load_runs([tmp_path]))]
    assert names == ["FedSpa (net=resnet18_...m_cifar10_v2)", "FedSpa (net=resnet34_...m_cifar10_v2)"]


def test_an_unknown_option_is_answered_with_known_ones(folder):
    runs = load_runs([folder])
    with pytest.raises(InvalidOption, match=r"`by` is 'zzz', which no run has .* such as \S+ or \S+\.$") as refused:
        group_runs(runs, by=["zzz"])
    named = str(refused.value).rstrip(".").partition("such as ")[2].split(" or ")
    assert set(named) <= {name for run in runs for name in run.options}


def test_the_options_of_a_class_that_differs_are_not_all_in_the_name(tmp_path):
    path = "lightning.pytorch.callbacks.ModelCheckpoint"
    for name, callbacks in (
        ("a", None),
        ("b", [{"class_path": path, "init_args": {"monitor": "x", "mode": "min"}}]),
        ("c", [{"class_path": path, "init_args": {"monitor": "y", "mode": "min"}}]),
    ):
        write_run(tmp_path / name, options={"callbacks": callbacks})
    assert [group.name for group in group_runs(load_runs([tmp_path]))] == [
        "FedSpa (callbacks.0=null)",
        "FedSpa (callbacks.0=ModelCheckpoint, monitor=x)",
        "FedSpa (callbacks.0=ModelCheckpoint, monitor=y)",
    ]


def test_runs_of_different_data_are_refused_by_the_option_that_differs(tmp_path):
    write_run(tmp_path / "a", data={"partition": "IID"})
    write_run(tmp_path / "b", data={"partition": "Dirichlet", "batch_size": 3})
    runs = load_runs([tmp_path])
    with pytest.raises(
        InvalidOption, match=r"`data\.partition` is IID in .*a, and Dirichlet in .*b; .*--different_data"
    ):
        group_runs(runs)
    names = [group.name for group in group_runs(runs, different_data=True)]
    assert names == ["FedSpa (partition=IID, batch_size=null)", "FedSpa (partition=Dirichlet, batch_size=3)"]


def test_the_batch_size_and_the_seed_of_the_data_are_not_its_content(tmp_path):
    write_run(tmp_path / "a", data={"batch_size": 3, "seed": 1})
    write_run(tmp_path / "b", data={"batch_size": 4, "seed": 2})
    assert [group.name for group in group_runs(load_runs([tmp_path]))] == [
        "FedSpa (batch_size=3)",
        "FedSpa (batch_size=4)",
    ]


def test_one_batch_is_not_all_batches(tmp_path):
    for name, value in (("a", 1), ("b", 1.0)):
        write_run(tmp_path / name, options={"limit": value})
    names = [group.name for group in group_runs(load_runs([tmp_path]))]
    assert names == ["FedSpa (limit=1)", "FedSpa (limit=1.0)"]


def test_an_unknown_group_or_option_is_refused(folder):
    runs = load_runs([folder])
    with pytest.raises(InvalidOption, match=r"`group` is 'FedSpa', .* expected some of FedAvg, FedSpa \(density=0.2\)"):
        group_runs(runs, only=["FedSpa"])
    for name in ("densty", "DENSITY"):
        with pytest.raises(InvalidOption, match=rf"`by` is '{name}', .* such as algorithm\.density"):
            group_runs(runs, by=[name])
    assert [group.name for group in group_runs(runs, only=["FedAvg"])] == ["FedAvg"]
