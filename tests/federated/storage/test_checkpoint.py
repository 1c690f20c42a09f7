"""What a checkpoint says of a run comes back from its file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_sparsefl.federated.exchange.flat import Layout
from lightning_sparsefl.federated.exchange.plain_values import encoded
from lightning_sparsefl.federated.storage.checkpoint import (
    PREVIOUS,
    Checkpoint,
    SelectedRound,
    read_checkpoint,
    report_changes,
    save,
)
from lightning_sparsefl.types import PendingUpdate, RunState, ServerState

RUN = "0123456789abcdef" * 2
WEIGHTS = {"w": torch.arange(4.0), "b": torch.ones(2)}
MASKS = {"w": torch.tensor([True, False, True, True])}


def checkpoint():
    late = PendingUpdate(client=5, round=2, arrival=9.5, weight=3, num_examples=4, changes=WEIGHTS, votes=MASKS)
    server = ServerState(3, WEIGHTS, MASKS, {"theta": {"w": torch.full((4,), 2.0)}})
    best = ServerState(2, {name: value - 1 for name, value in WEIGHTS.items()}, {}, {})
    return Checkpoint(
        state=RunState(server, {"drawn": [1, 2]}, (late,), RUN, seconds=7.5),
        module=WEIGHTS,
        identity={"algorithm": "X"},
        training={"seed": 3},
        reported={"torch": "2"},
        ledger={"bytes": 12},
        log={"scored": 3},
        selected=SelectedRound("personal/val_acc", 0.75, RunState(best, run=RUN, seconds=5.0)),
        stopped_by="EarlyStopping",
        unrecorded={"metrics": {"density/all": 0.5}},
        initial="ab" * 32,
        initial_weights=WEIGHTS,
    )


def test_a_checkpoint_comes_back(tmp_path):
    layout, path = Layout(WEIGHTS, {}), tmp_path / "last.ckpt"
    made = checkpoint()
    content = made.to_plain()
    save(path, encoded(content))
    like = {"algorithm": "X", "training": {"seed": 3}}
    again = read_checkpoint(path, layout, torch.device("cpu"), like, WEIGHTS)
    assert again.to_plain()["sparsefl"]["checksum"] == content["sparsefl"]["checksum"]
    assert (again.state.run, again.state.seconds, again.state.sampler) == (RUN, 7.5, {"drawn": [1, 2]})
    assert again.state.server.round == 3
    (late,) = again.state.pending
    assert (late.client, late.round, late.arrival, late.weight, late.num_examples) == (5, 2, 9.5, 3, 4)
    assert late.votes["w"].tolist() == MASKS["w"].tolist()
    assert again.selected is not None
    assert (again.selected.key, again.selected.value, again.selected.state.seconds) == ("personal/val_acc", 0.75, 5.0)
    assert again.selected.state.server.round == 2
    assert again.selected.state.server.weights["w"].tolist() == [-1, 0, 1, 2]
    assert (again.stopped_by, again.unrecorded) == (made.stopped_by, made.unrecorded)
    assert (again.ledger, again.log, again.reported) == (made.ledger, made.log, made.reported)


def test_the_commit_before_is_kept_also_where_the_last_one_is_written_again(tmp_path):
    path = tmp_path / "last.ckpt"
    for data, again in ((b"1", False), (b"2", False), (b"2 again", True)):
        save(path, data, again)
    assert (path.read_bytes(), path.with_name(PREVIOUS).read_bytes()) == (b"2 again", b"1")


def test_facts_that_one_side_lacks_are_reported():
    with pytest.warns(UserWarning, match=r"last\.ckpt was written with `threads` = None, and this run has 2"):
        report_changes(Path("last.ckpt"), {}, {"threads": 2})
