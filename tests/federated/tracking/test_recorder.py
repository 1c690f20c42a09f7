"""A small federation, and what its folder and its event file say of it."""

import csv
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2
from torch import nn

from lightning_sparsefl.algorithms import FedAvg, FedSpa
from lightning_sparsefl.callbacks import DynamicMask, ProximalTerm
from lightning_sparsefl.cost import Devices
from lightning_sparsefl.data import Dirichlet, FederatedBlobs
from lightning_sparsefl.federated import ExponentialRoundLR, FederatedTrainer, Federation
from lightning_sparsefl.federated.evaluation.scores import Scores
from lightning_sparsefl.federated.exchange.plain_values import unpack_plain
from lightning_sparsefl.federated.rounds.outcome import Outcome
from lightning_sparsefl.federated.storage.memory_store import read_stored
from lightning_sparsefl.federated.storage.record_store import StoredRecords
from lightning_sparsefl.federated.storage.run_folder import RunFolder
from lightning_sparsefl.federated.storage.safe_load import load_plain
from lightning_sparsefl.federated.tracking.hyperparameters import hyperparameters
from lightning_sparsefl.federated.tracking.recorder import Recorder
from lightning_sparsefl.federated.tracking.run_loggers import log_hyperparameters
from lightning_sparsefl.federated.tracking.tensorboard import Boards, kept_by_clients
from lightning_sparsefl.models import MLP
from lightning_sparsefl.report import Report, load_runs, pictures
from lightning_sparsefl.sparse.masks import overlap, pack

CLIENTS, ROUNDS = 6, 2
MASKED = ("net.fc1.weight", "net.fc2.weight")
METRICS = ("test_acc", "test_loss")
PERSONAL = ("personal/test_acc", "personal/test_acc_worst10")
COSTS = (
    "comm/uplink_bytes",
    "comm/downlink_bytes",
    "comm/mask_bytes",
    "comm/paper_bytes",
    "flops/train",
    "flops/paper",
)


def trainer(folder, algorithm=None, rounds=ROUNDS, federation=None, **options):
    return FederatedTrainer(
        accelerator="cpu",
        devices=1,
        max_rounds=rounds,
        default_root_dir=str(folder),
        enable_progress_bar=False,
        algorithm=algorithm or FedSpa(density=0.5),
        federation=Federation(clients_per_round=3, **(federation or {})),
        seed=1,
        **options,
    )


def module():
    torch.manual_seed(1)
    return MLP(sample_shape=(1, 1, 8), num_classes=4, hidden=(12,))


def blobs():
    return FederatedBlobs(
        num_clients=CLIENTS, dim=8, num_train=240, test_per_client=10, eval_split="test", seed=1, batch_size=16
    )


def fit(*args, ckpt_path=None, **options):
    run = trainer(*args, **options)
    run.fit(module(), blobs(), ckpt_path)
    return run.run_folder


def events(folder):
    guidance = dict.fromkeys(("scalars", "images", "histograms", "tensors"), 0)
    return EventAccumulator(str(folder), size_guidance=guidance).Reload()


def rows(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield fit(tmp_path_factory.mktemp("runs"))
    torch.set_num_threads(threads)


class Board:
    """The events of a run, with scalars by their logged keys."""

    def __init__(self, folder):
        self.events = events(folder)
        tags = {tag: re.sub(r"^(\d_\w+/)+", "", tag) for tag in self.events.Tags()["scalars"]}
        assert len(set(tags.values())) == len(tags)
        self.tags = {name: tag for tag, name in tags.items()}

    def __getattr__(self, name):
        return getattr(self.events, name)

    def Tags(self):
        return {**self.events.Tags(), "scalars": list(self.tags)}

    def Scalars(self, name):
        return self.events.Scalars(self.tags[name])


@pytest.fixture(scope="module")
def board(folder):
    return Board(folder)


def test_the_first_screen_says_how_good_how_costly_and_how_sparse(board):
    first = sorted(tag for tag in board.events.Tags()["scalars"] if tag[0].isdigit())
    assert first == [
        *("1_overview/1_score/global/test_acc", "1_overview/1_score/personal/test_acc"),
        *("1_overview/2_bytes/comm/uplink_bytes_total", "1_overview/3_density/density/all"),
        "2_scores/personal/test_acc_worst10",
        *("3_costs/comm/downlink_bytes_total", "3_costs/flops/train_total"),
        *("4_sparsity/mask/changed", "4_sparsity/mask/coverage_min"),
    ]


def test_scores_are_drawn_against_kilobytes_as_well(folder, board):
    by_bytes = events(folder / "by_kilobytes")
    assert len(by_bytes.Tags()["scalars"]) == 3
    table = rows(folder / "metrics.csv")
    sent = [int(row["comm/uplink_bytes_total"]) + int(row["comm/downlink_bytes_total"]) for row in table]
    points = by_bytes.Scalars("5_scores_by_kB/global/test_acc")
    assert [point.step for point in points] == [total // 1000 for total in sent]
    assert [point.value for point in points] == [point.value for point in board.Scalars("global/test_acc")]


def test_every_key_has_a_point_for_every_round(board):
    scores = [f"global/{m}" for m in METRICS]
    scores += [f"personal/{m}{end}" for m in METRICS for end in ("", "_std", "_worst10")]
    masks = ["density/all", *(f"density/layer/{n}" for n in MASKED), "mask/changed", "mask/coverage_min"]
    others = [
        "comm/scoring_bytes",
        "clients/trained",
        "clients/failed",
        "local/train_loss",
        "local/train_acc",
        "time/round",
        "time/aggregate",
        "time/idle",
    ]
    costs = [*COSTS, *(f"{name}_total" for name in COSTS)]
    assert sorted(board.Tags()["scalars"]) == sorted([*scores, *masks, *others, *costs])
    for name in board.Tags()["scalars"]:
        assert [point.step for point in board.Scalars(name)] == list(range(ROUNDS)), name


def test_totals_add_up_and_values_are_sane(board):
    for name in COSTS:
        per_round = [point.value for point in board.Scalars(name)]
        total = [point.value for point in board.Scalars(f"{name}_total")]
        assert total == pytest.approx([per_round[0], sum(per_round)], rel=1e-6)
    assert board.Scalars("density/all")[0].value == pytest.approx(0.5, abs=0.01)
    assert board.Scalars("mask/changed")[0].value > 0


def test_metrics_csv_agrees_with_the_events(folder, board):
    table = rows(folder / "metrics.csv")
    assert [row["round"] for row in table] == ["0", "1"]
    assert set(table[0]) - {"round"} == set(board.Tags()["scalars"])
    for name in board.Tags()["scalars"]:
        values = [point.value for point in board.Scalars(name)]
        assert [float(row[name]) for row in table] == pytest.approx(values, rel=1e-6), name


def test_clients_csv_agrees_with_the_events(folder, board):
    table = rows(folder / "clients.csv")
    for number in range(ROUNDS):
        mine = [row for row in table if row["round"] == str(number)]
        assert [row["client"] for row in mine] == [str(k) for k in range(CLIENTS)]
        accuracies = [float(row["personal/test_acc"]) for row in mine]
        assert sum(accuracies) / CLIENTS == pytest.approx(board.Scalars("personal/test_acc")[number].value)
        assert min(accuracies) == pytest.approx(board.Scalars("personal/test_acc_worst10")[number].value)
        trained = [row for row in mine if row["trained"] == "1"]
        assert len(trained) == board.Scalars("clients/trained")[number].value == 3
        up = sum(int(row["uplink_bytes"]) for row in trained)
        assert up == board.Scalars("comm/uplink_bytes")[number].value
        examples = [int(row["num_examples"]) for row in trained]
        losses = [float(row["local/train_loss"]) for row in trained]
        mean = sum(n * loss for n, loss in zip(examples, losses, strict=True)) / sum(examples)
        assert mean == pytest.approx(board.Scalars("local/train_loss")[number].value, rel=1e-6)


def test_overlaps_of_masks_are_written_for_every_pair_and_pictured_round(folder):
    masks = uploaded_masks(folder)
    assert len(masks) > 1
    pairs = {(a, b): overlap(masks[a], masks[b]) for a in masks for b in masks if a < b}
    found = [row for row in rows(folder / "overlap.csv") if row["round"] == str(ROUNDS - 1)]
    assert {(int(row["client"]), int(row["other"])): float(row["overlap"]) for row in found} == pytest.approx(pairs)


def uploaded_masks(folder):
    content = load_plain(folder / "checkpoints" / "last.ckpt")["sparsefl"]
    stored = StoredRecords(**content["server records"])
    records = read_stored(stored, folder / "checkpoints" / "clients", "server", content["run"])
    newest = {client: versions[max(versions)] for client, versions in records.items()}
    return {client: unpack_plain(packed["shared"]["masks"], torch.device("cpu")) for client, packed in newest.items()}


def test_times_of_clients_are_written_where_they_are_simulated(folder, tmp_path):
    assert "simulated_seconds" not in rows(folder / "clients.csv")[0]
    timed = fit(tmp_path, FedAvg(), federation={"devices": Devices()}, logger=False)
    table, metrics = rows(timed / "clients.csv"), rows(timed / "metrics.csv")
    for number in range(ROUNDS):
        seconds = [float(r["simulated_seconds"]) for r in table if r["round"] == str(number) and r["trained"] == "1"]
        assert len(seconds) == 3
        assert max(seconds) == float(metrics[number]["time/simulated"])
    assert not (timed / "overlap.csv").exists()
    assert yaml.safe_load((timed / "hparams.yaml").read_text())["algorithm"] == "FedAvg"


def test_a_run_can_be_reported(folder):
    (run,) = load_runs([folder])
    report = Report([run])
    assert (run.method, run.seed, run.rounds, run.is_finished) == ("FedSpa", "1", ROUNDS, True)
    assert {plot.name for plot in report.plots if plot.missing} == {"score_seconds", "durations"}
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    values = report.summary.runs["FedSpa"][0]
    assert values["global_test_acc"] == summary["global/test_acc"]
    assert values["personal_worst10_test_acc"] == summary["personal/test_acc_worst10"]
    assert values["bytes_up"] == summary["comm/uplink_bytes_total"]
    assert values["flops"] == summary["flops/train_total"]


def test_the_summary_holds_the_last_scores_and_the_totals(folder, board):
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert (summary["algorithm"], summary["rounds"], summary["clients"], summary["seed"]) == ("FedSpa", 2, CLIENTS, 1)
    for name in ("global/test_acc", "personal/test_loss_worst10", "flops/paper_total", "density/all"):
        assert summary[name] == pytest.approx(board.Scalars(name)[-1].value)


def test_histograms_hold_every_client_at_every_evaluation(folder, board):
    assert board.Tags()["histograms"] == [f"clients/{name}" for name in METRICS]
    table = rows(folder / "clients.csv")
    for name in METRICS:
        for point in board.Histograms(f"clients/{name}"):
            mine = [float(row[f"personal/{name}"]) for row in table if row["round"] == str(point.step)]
            assert sum(point.histogram_value.bucket) == point.histogram_value.num == CLIENTS
            assert (point.histogram_value.min, point.histogram_value.max) == (min(mine), max(mine))
        assert [point.step for point in board.Histograms(f"clients/{name}")] == [0, 1]


def test_the_last_round_has_pictures(board):
    assert board.Tags()["images"] == ["mask/overlap", "density/per_layer", "clients/test_acc_sorted", "mask/layers"]
    for name in board.Tags()["images"]:
        assert [image.step for image in board.Images(name)] == [ROUNDS - 1]
        assert board.Images(name)[0].width == 880


def test_pictures_come_every_n_rounds_or_never(tmp_path):
    often = events(fit(tmp_path, rounds=3, federation={"pictures_every_n_rounds": 2}, check_val_every_n_round=3))
    assert [image.step for image in often.Images("density/per_layer")] == [1, 2]
    assert [image.step for image in often.Images("clients/test_acc_sorted")] == [2]
    never = events(fit(tmp_path, rounds=1, federation={"pictures_every_n_rounds": 0}))
    assert never.Tags()["images"] == []
    assert never.Tags()["histograms"] == [f"clients/{name}" for name in METRICS]


def test_without_masks_there_are_no_pictures_of_masks(tmp_path):
    assert events(fit(tmp_path, FedAvg(), rounds=1)).Tags()["images"] == ["clients/test_acc_sorted"]


def plugin(board, tag):
    content = board.SummaryMetadata(f"_hparams_/{tag}").plugin_data.content
    return plugin_data_pb2.HParamsPluginData.FromString(content)


def test_hyperparameters_stand_beside_the_metrics(board):
    experiment = plugin(board, "experiment").experiment
    declared = [info.name.tag for info in experiment.metric_infos]
    assert declared[:3] == [board.tags[name] for name in ("global/test_acc", *PERSONAL)]
    assert set(declared) <= set(board.events.Tags()["scalars"])
    assert {board.tags[n] for n in ("comm/uplink_bytes_total", "flops/train_total", "density/all")} <= set(declared)
    params = plugin(board, "session_start_info").session_start_info.hparams
    assert params["algorithm"].string_value == "FedSpa"
    assert params["algorithm/density"].number_value == 0.5
    assert params["model/lr"].number_value == pytest.approx(0.1)


def test_each_custom_chart_has_one_tag_so_that_its_lines_are_runs(folder, board):
    content = board.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    layout = layout_pb2.Layout.FromString(content)
    assert [c.title for c in layout.category] == ["scores", "scores by kilobytes sent, both ways", "costs and density"]
    assert [chart.title for chart in layout.category[1].chart] == ["global/test_acc", *PERSONAL]
    tags = [*board.events.Tags()["scalars"], *events(folder / "by_kilobytes").Tags()["scalars"]]
    for pattern in (tag for category in layout.category for chart in category.chart for tag in chart.multiline.tag):
        assert len([name for name in tags if re.match(pattern, name)]) == 1, pattern


def declarations(folder):
    """How often the hyper-parameters are written in a folder's event files."""
    tags = [value.tag for path in folder.glob("events*") for event in read(path) for value in event.summary.value]
    return tags.count("_hparams_/experiment")


def read(path):
    return EventFileLoader(str(path)).Load()


def test_a_resumed_run_does_not_declare_again(tmp_path):
    folder = fit(tmp_path, rounds=1)
    assert fit(tmp_path, rounds=2, ckpt_path="last") == folder
    assert len(list(folder.glob("events*"))) == 2
    assert declarations(folder) == 1
    board = Board(folder)
    # sorted: files are read by name, which is a second and a count, and two of one process may share their second
    assert sorted(point.step for point in board.Scalars("global/test_acc")) == [0, 1]
    assert len(events(folder / "by_kilobytes").Scalars("5_scores_by_kB/global/test_acc")) == 2
    assert sorted(image.step for image in board.Images("mask/overlap")) == [0, 1]


def test_a_run_resumed_before_its_first_evaluation_declares(tmp_path):
    class Stop(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, rounds=3, check_val_every_n_round=3, callbacks=[Stop()])
    folder = fit(tmp_path, rounds=3, check_val_every_n_round=3, ckpt_path="last")
    assert declarations(folder) == 1
    assert [point.step for point in Board(folder).Scalars("global/test_acc")] == [2]


class Holder:
    def __init__(self, **names):
        self.__dict__.update(names)


def test_hyperparameters_are_few_plain_and_free_of_defaults(tmp_path):
    run = trainer(tmp_path, FedAvg(), round_lr=ExponentialRoundLR(gamma=0.5), gradient_clip_val=2.0)
    data = Holder(num_clients=4, partition=Dirichlet(alpha=0.5))
    model = Holder(hparams={"_class_path": "x", "lr": 0.5, "net": nn.ReLU(), "no": None})
    params = hyperparameters(run.options, data, model)
    assert params == {
        "algorithm": "FedAvg",
        "data": "Holder",
        "model": "Holder",
        **{f"algorithm/{name}": value for name, value in vars(FedAvg()).items()},
        "federation/clients_per_round": 3,
        "trainer/max_rounds": 2,
        "trainer/max_epochs": 1,
        "trainer/seed": 1,
        "trainer/round_lr": "ExponentialRoundLR",
        "trainer/round_lr/gamma": 0.5,
        "trainer/gradient_clip_val": 2.0,
        "data/num_clients": 4,
        "data/partition": "Dirichlet",
        "data/partition/alpha": 0.5,
        "data/partition/min_examples": 1,
        "model/lr": 0.5,
        "model/net": "ReLU()",
    }


def test_options_without_effect_on_results_are_no_hyperparameters(tmp_path):
    plain = hyperparameters(trainer(tmp_path, FedAvg()).options, Holder(), Holder(hparams={}))
    options = {"store": "disk", "stack_size": 4, "placement": "dynamic", "wire": "encode"}
    run = trainer(tmp_path, FedAvg(), federation=options)
    assert hyperparameters(run.options, Holder(), Holder(hparams={})) == plain


def test_arguments_of_client_callbacks_are_hyperparameters(tmp_path):
    masks = [DynamicMask(density=0.9), ProximalTerm(strength=0.1), DynamicMask(density=0.3, every_n_steps=5)]
    run = trainer(tmp_path, FedAvg(), client_callbacks=masks)
    params = hyperparameters(run.options, Holder(), Holder(hparams={}))
    assert {k.removeprefix("trainer/"): v for k, v in params.items() if "callbacks" in k} == {
        "client_callbacks": "DynamicMask, ProximalTerm, DynamicMask",
        "client_callbacks/DynamicMask/density": 0.9,
        "client_callbacks/ProximalTerm/strength": 0.1,
        "client_callbacks/DynamicMask.2/density": 0.3,
        "client_callbacks/DynamicMask.2/every_n_steps": 5,
    }


def test_long_hyperparameters_stay_different(tmp_path):
    texts = set()
    for last in (0.25, 1.0):
        model = Holder(hparams={"widths": [0.25] * 30 + [last]})
        texts.add(hyperparameters(trainer(tmp_path, FedAvg()).options, Holder(), model)["model/widths"])
    assert len(texts) == 2
    assert {len(text) for text in texts} == {80}


@pytest.mark.parametrize(
    ("value", "text"), [((1, 8, 8), "(1, 8, 8)"), (object(), "object"), (nn.ReLU, "ReLU"), (blobs, "blobs")]
)
def test_hyperparameters_name_no_address(tmp_path, value, text):
    model = Holder(hparams={"x": value})
    assert hyperparameters(trainer(tmp_path).options, Holder(num_clients=4), model)["model/x"] == text


def test_long_hyperparameters_are_shortened(tmp_path):
    capacities = {"capacities": [0.5] * 100}
    params = hyperparameters(trainer(tmp_path, federation=capacities).options, blobs(), module())
    assert len(params["federation/capacities"]) < 81


def test_loggers_get_hyperparameters_and_no_made_up_metric(tmp_path):
    loggers = [TensorBoardLogger(tmp_path, "a", "b"), CSVLogger(tmp_path, "c", "d")]
    log_hyperparameters(loggers, {"x": 1})
    for logger in loggers:
        logger.log_metrics({"y": 1.0}, 0)
        logger.save()
        assert "x: 1" in (Path(logger.log_dir) / "hparams.yaml").read_text(encoding="utf-8")
    assert events(loggers[0].log_dir).Tags()["scalars"] == ["y"]


def test_a_client_that_diverged_is_left_out_of_the_histogram(tmp_path):
    logger = TensorBoardLogger(tmp_path, "a", "b")
    bad = {"loss": math.nan, "only_bad": math.inf}
    Boards([logger], {}, declared=True).histograms(4, {0: {"loss": 1.0}, 1: {"loss": 3.0}, 2: bad})
    logger.save()
    board = events(logger.log_dir)
    assert board.Tags()["histograms"] == ["clients/loss"]
    value = board.Histograms("clients/loss")[0].histogram_value
    assert (value.num, value.min, value.max) == (2, 1.0, 3.0)


class StopAfterThree(Callback):
    """Stops a run between two evaluations."""

    def on_train_epoch_end(self, trainer, module):
        trainer.should_stop = trainer.current_epoch == 2


def test_a_run_that_stops_between_evaluations_has_its_last_scores_in_the_tables(tmp_path):
    """The tables are those of a run of as many rounds, and TensorBoard knows the compared metrics."""
    stopped = fit(tmp_path / "a", FedAvg(), rounds=5, callbacks=[StopAfterThree()], check_val_every_n_round=4)
    straight = fit(tmp_path / "b", FedAvg(), rounds=3, check_val_every_n_round=4)
    for name in ("metrics.csv", "clients.csv"):
        found, expected = ([untimed(row) for row in rows(folder / name)] for folder in (stopped, straight))
        assert found == expected
    scores = json.loads((stopped / "summary.json").read_text())
    assert float(rows(stopped / "metrics.csv")[-1]["global/test_acc"]) == scores["global/test_acc"]
    assert events(stopped).Tags()["tensors"] == events(straight).Tags()["tensors"] != []


@pytest.mark.parametrize("every", [1, 2])
def test_a_run_that_stops_early_has_the_overlaps_and_the_pictures_of_its_last_round(every, tmp_path):
    """Whether the last round was evaluated or not."""
    stopped = fit(tmp_path, rounds=9, callbacks=[StopAfterThree()], check_val_every_n_round=every)
    masks = uploaded_masks(stopped)
    pairs = {(2, a, b): overlap(masks[a], masks[b]) for a in masks for b in masks if a < b}
    found = rows(stopped / "overlap.csv")
    keys = ("round", "client", "other")
    assert {tuple(int(row[key]) for key in keys): float(row["overlap"]) for row in found} == pytest.approx(pairs)
    images = events(stopped)
    assert len(images.Tags()["images"]) == 4
    assert {image.step for name in images.Tags()["images"] for image in images.Images(name)} == {2}


def untimed(row):
    return {name: value for name, value in row.items() if not name.startswith("time/")}


def recorder(folder, logged, **options):
    """A recorder without loggers, and the metrics that callbacks see."""
    totals = {"comm/uplink_bytes_total": 1500.0, "comm/downlink_bytes_total": 6000.0}
    ledger = SimpleNamespace(totals=totals, round_totals=lambda number: {}, counts_flops=True)
    seen = SimpleNamespace(callback_metrics=logged, report=logged.update)
    run = SimpleNamespace(federation=Federation(pictures_every_n_rounds=0))
    return Recorder(RunFolder(folder), run, True, ledger, None, seen, (), {}, CLIENTS, **options)


def test_the_state_of_a_recorder_comes_back_without_times(tmp_path):
    state = {
        "scores": {"global/val_acc": 0.5},
        "scored": 3,
        "pictured": 2,
        "clients_scored": 4,
        "personal": {},
        "metrics": {"density/all": 0.25},
        "callback_metrics": {"global/val_acc": 0.5},
    }
    again = recorder(tmp_path, logged := {})
    again.load_state_dict(state)
    logged["time/round"] = 1.5
    assert again.state_dict() == state
    assert not again.is_complete(3)  # overlaps and pictures are those of the round before


def test_a_client_without_a_score_does_not_count_as_scored(tmp_path):
    kept = recorder(tmp_path, {})
    kept.keep(Scores(pooled={"val_acc": 0.5}, personal={0: {"val_acc": 0.5}, 1: {}, 2: {"val_acc": 0.25}}), 1)
    assert kept.state_dict()["clients_scored"] == 2


def test_the_table_of_clients_says_whose_updates_were_merged(tmp_path):
    outcomes = [Outcome(0), Outcome(1, "failed", failure="it has no samples"), Outcome(2, "late")]
    recorder(tmp_path, {}).record(0, SimpleNamespace(metrics={}, outcomes=outcomes), None, last=False)
    assert [row["trained"] for row in rows(tmp_path / "clients.csv")] == ["1", "0", "0"]


def test_a_client_without_a_mask_of_a_layer_keeps_all_of_it():
    masks = {0: {"a": pack(torch.tensor([True, False]))}, 1: {"b": pack(torch.tensor([False, False]))}}
    kept = kept_by_clients(masks, {name: torch.zeros(2) for name in ("a", "b", "c")})
    assert {name: share.tolist() for name, share in kept.items()} == {"a": [1.0, 0.5], "b": [0.5, 0.5]}


def test_the_picture_of_clients_has_the_round_of_its_scores(monkeypatch):
    drawn = []
    monkeypatch.setattr(pictures, "clients_figure", lambda values, name, number: drawn.append((values, name, number)))
    monkeypatch.setattr(pictures, "pixels", lambda figure: figure)
    Boards([], {}, declared=True).pictures(5, {}, None, CLIENTS, {2: {"test_acc": 0.5}}, scored=4)
    assert drawn == [({2: 0.5}, "test_acc", 3)]


@pytest.mark.parametrize(("recorded", "sent"), [(True, 7), (False, 6)])
def test_scores_of_a_round_that_is_not_recorded_are_dropped(recorded, sent, tmp_path, monkeypatch):
    found = {}
    monkeypatch.setattr(
        "lightning_sparsefl.federated.tracking.recorder.Boards", lambda *_, **given: found.update(given)
    )
    recorder(tmp_path, {}, recorded=recorded)
    assert found["sent"] == sent
