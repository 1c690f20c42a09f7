"""A run folder as TensorBoard's own server shows it."""

import json
import logging
import time
import urllib.parse
import urllib.request
import warnings

import pytest
import torch

from helpers.networks import Classifier
from lightning_sparsefl import FederatedTrainer, Federation, FedSpa
from lightning_sparsefl.data import FederatedBlobs

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    torch.manual_seed(0)
    FederatedTrainer(
        algorithm=FedSpa(density=0.5),
        federation=Federation(clients_per_round=2),
        accelerator="cpu",
        max_rounds=2,
        default_root_dir=str(root),
        enable_progress_bar=False,
    ).fit(Classifier(), FederatedBlobs(num_clients=3, num_classes=4, dim=8, num_train=90, eval_split="test"))
    return root


@pytest.fixture(scope="module")
def get(runs):
    """The answers of the server's HTTP interface."""
    with warnings.catch_warnings():  # of libraries in the server
        warnings.simplefilter("ignore")
        from tensorboard import program

    levels = {name: logging.getLogger(name).level for name in ("tensorboard", "werkzeug")}
    for name in levels:
        logging.getLogger(name).setLevel(logging.ERROR)
    server = program.TensorBoard()
    server.configure(argv=["tensorboard", "--logdir", str(runs), "--port", "0", "--load_fast", "false"])
    address = server.launch()

    def answer(path, **query):
        url = f"{address}data/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=60) as response:
            return json.load(response)

    deadline = time.monotonic() + 60
    while len(answer("plugin/scalars/tags")) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    yield answer
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


RUN = "FedSpa/version_0"


def test_the_first_groups_of_scalars_are_scores_costs_and_sparsity(get):
    tags = get("plugin/scalars/tags")
    groups = list(dict.fromkeys(tag.split("/")[0] for run in tags.values() for tag in sorted(run)))
    assert sorted(groups)[:5] == ["1_overview", "2_scores", "3_costs", "4_sparsity", "5_scores_by_kB"]
    score, sent, density = "1_score/global/test_acc", "2_bytes/comm/uplink_bytes_total", "3_density/density/all"
    assert {f"1_overview/{tag}" for tag in (score, sent, density)} <= set(tags[RUN])
    points = get("plugin/scalars/scalars", run=RUN, tag="1_overview/1_score/personal/test_acc")
    assert [step for _, step, _ in points] == [0, 1]


def test_the_score_by_bytes_is_a_run_beside(get):
    (sent,) = [value for _, step, value in get_totals(get) if step == 1]
    points = get("plugin/scalars/scalars", run=f"{RUN}/by_kilobytes", tag="5_scores_by_kB/global/test_acc")
    assert points[-1][1] == sent // 1000


def get_totals(get):
    tags = ("1_overview/2_bytes/comm/uplink_bytes_total", "3_costs/comm/downlink_bytes_total")
    ways = [get("plugin/scalars/scalars", run=RUN, tag=tag) for tag in tags]
    return [(wall, step, up + down) for (wall, step, up), (_, _, down) in zip(*ways, strict=True)]


def test_custom_scalars_histograms_pictures_and_hyperparameters(get):
    layout = get("plugin/custom_scalars/layout")
    assert [category["title"] for category in layout["category"]][:2] == [
        "scores",
        "scores by kilobytes sent, both ways",
    ]
    assert "clients/test_acc" in get("plugin/histograms/tags")[RUN]
    assert {"mask/layers", "mask/overlap", "density/per_layer"} <= set(get("plugin/images/tags")[RUN])
    plugins = {name for name, plugin in get("plugins_listing").items() if plugin["enabled"]}
    assert {"scalars", "custom_scalars", "histograms", "images", "hparams"} <= plugins
