"""Several callbacks of one class in one trainer: each has a state of its own in a checkpoint."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback

from lightning_sparsefl import callbacks as exported
from lightning_sparsefl.callbacks import (
    EpochSnapshots,
    GradientOffset,
    GradientSum,
    LayerFreezing,
    MetaStep,
    MoreauEnvelope,
    PersonalMixture,
    StaticMask,
    StepMeter,
)
from lightning_sparsefl.errors import InvalidOption

OPTIONS = {
    EpochSnapshots: {"epochs": [1]},
    GradientOffset: {"offset": {"net.0.weight": torch.ones(9, 4)}},
    LayerFreezing: {"trainable": {"net.0.weight": torch.arange(36).view(9, 4) > 9}},
    MetaStep: {"lr": 0.1},
    MoreauEnvelope: {"strength": 1.0, "lr": 0.1},
    PersonalMixture: {"alpha": 0.5},
    StepMeter: {"mu": 0.0},
}
KINDS = [getattr(exported, name) for name in exported.__all__]


@pytest.mark.parametrize("kind", KINDS, ids=exported.__all__)
def test_two_callbacks_with_equal_options_have_two_states_or_are_refused_by_name(kind, net, fit):
    pair = [kind(**OPTIONS.get(kind, {})) for _ in range(2)]
    try:
        trainer = fit(net(), pair)
    except InvalidOption as error:
        assert f"`{kind.__name__}`" in str(error)  # noqa: PT017 - each kind may do one or the other
    else:
        states = trainer._checkpoint_connector.dump_checkpoint()["callbacks"]
        stateful = kind.state_dict is not Callback.state_dict
        assert not stateful or len({callback.state_key for callback in pair} & states.keys()) == 2


def sums_around_a_mask():
    return [GradientSum(), StaticMask(density=0.5), GradientSum()]


def test_each_goes_on_with_its_own_state(net, fit, tmp_path):
    whole, first, resumed = sums_around_a_mask(), sums_around_a_mask(), sums_around_a_mask()
    fit(net(), whole, epochs=3)
    fit(net(), first, epochs=2).save_checkpoint(tmp_path / "two.ckpt")
    fit(net(), resumed, epochs=3, ckpt_path=tmp_path / "two.ckpt")
    for callback, same in zip(whole, resumed, strict=True):
        assert callback.state_key == same.state_key
    for place in (0, 2):
        assert all(torch.equal(resumed[place].sums[name], total) for name, total in whole[place].sums.items())
    pruned = ~whole[1].masks["net.0.weight"]
    assert whole[0].sums["net.0.weight"][pruned].any()
    assert not whole[2].sums["net.0.weight"][pruned].any()
    assert first[0].state_key == "GradientSum"
