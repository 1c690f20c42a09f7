"""The hybrid form of Sub-FedAvg."""

from __future__ import annotations

import dataclasses
import math

import lightning as L
import pytest
import torch
from torch import nn

from helpers.networks import Classifier
from helpers.scripted import Scripted, scripted_client
from lightning_sparsefl import FederatedTrainer, Federation, SubFedAvg
from lightning_sparsefl.callbacks import GroupPenalty
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.masks import dense_like, density, intersect, same
from lightning_sparsefl.sparse.submodel import narrow
from lightning_sparsefl.sparse.units import find_groups, unit_masks
from lightning_sparsefl.types import Message


def lenet():
    """The authors' LeNet-5 for CIFAR-10: 6 and 16 channels with norms, fully connected layers of 120 and 84."""
    convs = (nn.Conv2d(3, 6, 5), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2))
    convs += (nn.Conv2d(6, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*convs, nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10))


torch.manual_seed(0)
NET = lenet()
GROUPS = find_groups(NET, torch.zeros(1, 3, 32, 32))
BUFFERS = [name for name, _ in NET.named_buffers()]
WEIGHTS = {name: value for name, value in NET.state_dict().items() if value.is_floating_point()}
WEIGHTS = {**WEIGHTS, "1.weight": torch.arange(1.0, 7), "5.weight": -torch.arange(1.0, 17)}
"""The first channels have the smallest scales."""
PARAMETERS = {name: WEIGHTS[name] for name, _ in NET.named_parameters()}
FULL = dense_like(PARAMETERS)
EARLY = {name: value.flip(0) if "weight" in name else value for name, value in PARAMETERS.items()}
HALF = {"0": torch.arange(6) >= 3, "4": torch.arange(16) >= 8}
"""Channels after one removal."""
HYBRID = {"channels": True, "density": 0.5, "min_change": 5e-4}


def train(method, masks=FULL, early=EARLY, scores=(0.9, 0.9)):
    script = Scripted(WEIGHTS, early, units=GROUPS)
    left = iter(scores)

    def evaluate(client, weights, split):
        script.evaluations.append((weights, split))
        return {"val_acc": next(left)}

    script.evaluate = evaluate
    message = Message(weights={n: w * masks.get(n, True) for n, w in WEIGHTS.items()}, masks=masks)
    return method.train(message, scripted_client(script)), script


def kept(update, name):
    return int(update.shared["masks"][name].sum())


def channels_of(masks):
    return [masks["1.weight"].tolist(), masks["5.weight"].tolist()]


WHOLE_CHANNELS = [[True] * 6, [True] * 16]
HALF_CHANNELS = [units.tolist() for units in HALF.values()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channel_step": 1}, r"`algorithm.channel_step` is 1; expected a number in \[0, 1\)"),
        ({"min_channel_change": -1.0}, "`algorithm.min_channel_change` is -1.0; expected a number >= 0"),
        ({"penalty": -1.0}, "`algorithm.penalty` is -1.0; expected a number >= 0"),
        ({"min_channels": ()}, r"`algorithm.min_channels` is \(\); expected one or more whole numbers >= 1"),
        ({"min_channels": (3, 0)}, r"`algorithm.min_channels` is \(3, 0\); expected one or more"),
    ],
)
def test_options_outside_their_range_are_refused(options, message):
    with pytest.raises(InvalidOption, match=message):
        SubFedAvg(channels=True, **options)


class Normless(L.LightningModule):
    """A module without norms."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
        self.example_input_array = torch.zeros(1, 4)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        raise AssertionError("nobody trains")

    def validation_step(self, batch):
        raise AssertionError("nobody is scored")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Nothing(L.LightningDataModule):
    def train_dataloader(self):
        return torch.utils.data.DataLoader([torch.zeros(4)])

    val_dataloader = train_dataloader


def test_a_module_without_norms_is_refused_before_training(tmp_path):
    trainer = FederatedTrainer(
        algorithm=SubFedAvg(channels=True),
        federation=Federation(clients_per_round=1),
        max_rounds=1,
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        default_root_dir=str(tmp_path),
    )
    with pytest.raises(InvalidOption, match="`SubFedAvg` finds no norm that scales hidden channels of the model"):
        trainer.fit(Normless(), [Nothing()])


def test_channels_with_the_smallest_scales_are_removed_and_matrices_pruned():
    # floor(.45 * 6) + 1 = 3 and floor(.45 * 16) + 1 = 8 channels; of n weights ceil(.1 * (n - 1))
    update, script = train(SubFedAvg(**HYBRID))
    masks = update.shared["masks"]
    assert channels_of(masks) == HALF_CHANNELS
    assert same(
        {name: masks[name] for name in ("0.weight", "0.bias", "4.weight", "5.bias")},
        {
            n: m
            for n, m in unit_masks(GROUPS, HALF, PARAMETERS).items()
            if n in ("0.weight", "0.bias", "4.weight", "5.bias")
        },
    )
    assert kept(update, "11.weight") == 10080 - 1008
    assert kept(update, "13.weight") == 840 - 84
    first = PARAMETERS["9.weight"].abs().flatten()
    pruned = (first >= first.sort().values[4800]).view(120, 400)
    pruned[:, :200] = False  # 25 columns read each of the 8 channels
    assert torch.equal(masks["9.weight"], pruned)
    assert all(bool(masks[name].all()) for name in ("9.bias", "11.bias", "13.bias"))
    assert update.votes is masks
    assert not update.weights["1.weight"][:3].any()
    # the first score is that of the pruned matrices, the second one of that and the removed channels
    (first, split), (second, _) = script.evaluations
    assert split == "val"
    assert bool(first["1.weight"].all())
    assert int((first["13.weight"] != 0).sum()) == 756
    assert torch.equal(second["1.weight"], update.weights["1.weight"])
    ((_, held, units, callbacks),) = script.fits
    assert same(held, FULL)
    assert units is None
    (penalty,) = (callback for callback in callbacks if isinstance(callback, GroupPenalty))
    assert (penalty.strength, penalty.stairs, penalty.groups) == (1e-4, None, "scales")


@pytest.mark.filterwarnings("ignore:Clients of `SubFedAvg` prune only:UserWarning")  # once in a process
@pytest.mark.parametrize(
    ("options", "early", "scores", "matrices", "channels"),
    [
        ({}, EARLY, (0.5, 0.9), False, True),
        ({}, EARLY, (0.9, 0.5), True, False),
        ({"density": 1.0}, EARLY, (0.9,), False, True),  # the target is of the matrices alone
        ({"min_change": 0.5}, EARLY, (0.9,), False, True),
        ({"min_channel_change": 1.0}, EARLY, (0.9,), True, False),  # 22 of 22 channels differ, which is not more
        ({"min_channels": (4, 9)}, EARLY, (0.9,), True, False),
        ({}, {**EARLY, **{n: PARAMETERS[n] for n in ("1.weight", "5.weight")}}, (0.9,), True, False),
        ({}, PARAMETERS, (), False, False),
    ],
)
def test_both_prunings_have_tests_of_their_own(options, early, scores, matrices, channels):
    update, script = train(SubFedAvg(**{**HYBRID, **options}), early=early, scores=scores)
    assert len(script.evaluations) == len(scores)
    if not (matrices or channels):
        assert update.shared is None
        assert same(update.votes, FULL)
        return
    assert (kept(update, "13.weight") == 756) == matrices
    assert channels_of(update.shared["masks"]) == (HALF_CHANNELS if channels else WHOLE_CHANNELS)


def test_one_layer_can_be_at_its_floor():
    update, _ = train(SubFedAvg(**HYBRID, min_channel_change=0.5, min_channels=(4, 8)))
    # the 16 channels of the second layer differ, of 22
    assert channels_of(update.shared["masks"]) == [WHOLE_CHANNELS[0], HALF_CHANNELS[1]]


def test_a_narrow_module_is_trained_and_its_copy_compared_at_full_width():
    masks = intersect(FULL, unit_masks(GROUPS, HALF, PARAMETERS))
    early = narrow(EARLY, GROUPS, HALF)
    assert early["1.weight"].shape == (3,)
    method = SubFedAvg(**HYBRID, min_channels=(1,))
    ours, script = train(method, masks, early)
    theirs, _ = train(method, masks, {n: w * masks[n] for n, w in EARLY.items()})
    ((_, held, units, _),) = script.fits
    assert same(held, masks)
    assert {name: mask.tolist() for name, mask in units.items()} == dict(zip(("0", "4"), HALF_CHANNELS, strict=True))
    assert same(ours.shared["masks"], theirs.shared["masks"])
    # floor(.45 * 3) + 1 = 2 and floor(.45 * 8) + 1 = 4 more
    assert channels_of(ours.shared["masks"]) == [[False] * 5 + [True], [False] * 12 + [True] * 4]


@pytest.mark.parametrize("masks_only", ["", "a reason"])
def test_channels_that_cannot_be_cut_are_masked(masks_only):
    masks = intersect(FULL, unit_masks(GROUPS, HALF, PARAMETERS))
    script = Scripted(WEIGHTS, EARLY, {"val_acc": 0.1})
    script.units = tuple(dataclasses.replace(g, masks_only=masks_only if g.name == "4" else "") for g in GROUPS)
    SubFedAvg(**HYBRID).train(Message(weights=WEIGHTS, masks=masks), scripted_client(script))
    assert list(script.fits[0][2]) == (["0"] if masks_only else ["0", "4"])


def test_without_a_penalty_there_is_no_callback_for_it():
    _, script = train(SubFedAvg(**HYBRID, penalty=0.0))
    assert len(script.fits[0][3]) == 1


# The rest of the way as a fraction of what is left: .05 less of it above .16, but not .05 at most as without channels
@pytest.mark.parametrize(
    ("left", "density", "fraction"),
    [
        (0.9, 0.5, 0.2),
        (0.65, 0.5, 0.15 / 0.65 - 0.05),
        (0.6, 0.5, 0.1 / 0.6 - 0.05),
        (0.55, 0.5, 0.05 / 0.55),
        (0.5, 0.5, 0),
    ],
)
def test_the_last_pruning(left, density, fraction):
    method = SubFedAvg(channels=True, density=density, step=0.2)
    assert method._fraction(left) == pytest.approx(fraction)
    assert SubFedAvg(channels=True, density=density, step=0.2, last_step="full")._fraction(0.55) == 0.2


def test_two_gates_on_training_data_are_charged(facts):
    costs = SubFedAvg(channels=True, gate="train").costs(facts())
    assert (costs.flops_paper, costs.flops_analytic) == (14 * 3 * 34, 14 * 3 * 34 + 2 * 7 * 34)


class Known:
    """What the engine knows of the model."""

    units = GROUPS


def test_a_profile_has_the_masks_of_open_gates(fleet):
    people = fleet(clients=2, buffers=[name for name in BUFFERS if name in WEIGHTS], model=Known())
    people.clients_per_round = 2
    method = SubFedAvg(**HYBRID)
    state = method.init(WEIGHTS, people)
    later = [method.profile_state(state, round).masks for round in range(3)]
    assert [channels_of(masks) for masks in later] == [WHOLE_CHANNELS, HALF_CHANNELS, HALF_CHANNELS]
    rest = 1 - 0.5 / density(later[1])  # the removal of channels has come near the target, so less than .1 of 756 go
    assert rest < 0.1
    assert [int(masks["13.weight"].sum()) for masks in later] == [840, 756, 756 - math.ceil(rest * 755)]
    update, _ = train(method)
    assert same(later[1], update.shared["masks"])


NOTED, WIDTHS = [], set()


class Noting(SubFedAvg):
    """Notes each client's masks before and after its round."""

    def train(self, message, client):
        update = super().train(message, client)
        NOTED.append((client.id, message.masks, (update.shared or {"masks": message.masks})["masks"]))
        return update


class Measured(Classifier):
    """Notes the width of its hidden layer in training."""

    def training_step(self, batch, batch_idx):
        WIDTHS.add(len(self.net[0].weight))
        return super().training_step(batch, batch_idx)


@pytest.mark.slow_after_first
@pytest.mark.parametrize(
    ("execution", "norm"), [("cut", nn.BatchNorm1d(16)), ("mask", nn.BatchNorm1d(16)), ("cut", nn.LayerNorm(16))]
)
def test_clients_train_ever_fewer_whole_channels(federation, execution, norm):
    NOTED.clear()
    WIDTHS.clear()
    method = Noting(**HYBRID, min_score=0.2, penalty=0.01, min_channels=(4,))
    module = Measured()
    module.net[1] = norm
    federation(method, rounds=5, module=module, federation={"execution": execution})
    held, channels = {}, {16}
    for client, before, after in NOTED:
        assert same(before, held.get(client, before))
        assert all(bool((after[name] <= mask).all()) for name, mask in before.items())
        units = after["net.1.weight"]
        assert torch.equal(units, after["net.1.bias"])
        assert torch.equal(units, after["net.0.bias"])
        assert not after["net.0.weight"][~units].any()
        assert not after["net.4.weight"][:, ~units].any()
        held[client] = after
        channels.add(int(units.sum()))
    assert channels == {16, 8, 4}
    assert {16} == WIDTHS if execution == "mask" else {16, 8} <= WIDTHS <= {16, 8, 4}


# 16, 8 and 4 channels have 15 numbers each, and 4 biases are left: 244, 124 and 64. Four of six clients take part, so
# that in rounds 0 to 5 a client has pruned 0, 0, 1, 2, 2 and 3 times.
def test_a_profile_counts_what_open_gates_leave(federation):
    def bytes_of(**options):
        method = SubFedAvg(channels=True, min_channels=(4,), **options)
        return federation(method, rounds=6, verb="profile").summary.content["run"]["paper"]["bytes"]

    assert bytes_of(step=0.0, last_step="full") == 2 * 4 * 4 * (2 * 244 + 124 + 3 * 64)
    assert bytes_of(density=0.1) < 2 * 4 * 4 * (2 * 244 + 124 + 3 * 64)
