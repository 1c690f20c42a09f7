"""Which masks a callback owns: claims, keys, checkpoints, and modules that change."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

from helpers.masking import KINDS, kept_of
from lightning_sparsefl.callbacks import GradualPruning, StaticMask
from lightning_sparsefl.errors import IncompatibleMasks, InvalidOption
from lightning_sparsefl.sparse.masks import same

pytestmark = pytest.mark.filterwarnings("ignore:.*never moves its mask.*")


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_two_that_claim_the_same_weights_are_refused(first, second, net, fit):
    with pytest.raises(InvalidOption) as caught:
        fit(net(), [first(layers=["net.0*", "net.2*"]), second(layers="net.[24]*")], epochs=1)
    claim = f"Two `{first.__name__}` claim" if first is second else f"`{first.__name__}` and `{second.__name__}` both"
    assert str(caught.value).startswith(claim)
    assert "`net.2.weight`; keep one of them, or give them `layers` that do not overlap." in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_one_callback_twice_is_refused(kind, net, fit):
    callback = kind()
    for twins in ([callback, callback], [kind(), kind()]):
        with pytest.raises(InvalidOption, match=f"^Two `{kind.__name__}` claim `net.0.weight`; keep one"):
            fit(net(), twins, epochs=1)


def test_given_masks_are_claims_too_and_the_remedy_names_where_they_may_come_from(net, fit):
    given = StaticMask(masks={"net.4.weight": torch.ones(3, 6, dtype=torch.bool)})
    fit(net(), [given, GradualPruning(layers="!net.4*")], epochs=1)
    with pytest.raises(InvalidOption, match=r"both claim `net.4.weight`; .* such as FedSpa, brings a `StaticMask`"):
        fit(net(), [GradualPruning(), given], epochs=1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pattern_without_a_layer_is_refused(kind, net, fit):
    with pytest.raises(InvalidOption, match=f"`{kind.__name__}`: the pattern 'conv.' in `layers` matches no layer"):
        fit(net(), [kind(layers=["net.0*", "conv*"])], epochs=1)


@pytest.mark.filterwarnings("ignore:.*the fit goes on with the masks drawn with `seed=")
def test_two_of_a_class_share_a_module_and_a_checkpoint(net, fit, tmp_path):
    def pair():
        return [StaticMask(0.3, seed=1, layers="net.0*"), StaticMask(0.6, "uniform", seed=2, layers=["!net.0*"])]

    first, path = pair(), tmp_path / "pair.ckpt"
    fit(net(), first, epochs=1).save_checkpoint(path)
    second = pair()[::-1]
    for callback in second:
        callback.seed = 9
    fit(net(seed=4), second, epochs=2, ckpt_path=path)
    assert same(first[0].masks, second[1].masks)
    assert same(first[1].masks, second[0].masks)


def test_layers_that_are_made_late(net, fit):
    module = net()
    inner = module.net
    module.net = nn.Identity()
    kind = type(module)

    class Late(kind):
        def configure_model(self):
            self.net = inner

    module.__class__ = Late
    callback = StaticMask(density=0.3)
    fit(module, [callback], epochs=1)
    assert len(callback.masks) == 3
    module.net = nn.Identity()
    with pytest.raises(InvalidOption, match=r"Two `StaticMask` claim `net.0.weight`"):
        fit(module, [StaticMask(), StaticMask()], epochs=1)


@pytest.mark.parametrize("kind", KINDS)
def test_masks_of_another_module_are_refused(kind, net, fit):
    callback, other = kind(), net()
    fit(net(), [callback], epochs=1)
    other.net[2] = nn.Linear(9, 7)
    other.net[4] = nn.Linear(7, 3)
    with pytest.raises(IncompatibleMasks, match=r"mask of `net.2.weight` has shape \(6, 9\), expected \(7, 9\)"):
        fit(other, [callback], epochs=1)


@pytest.mark.filterwarnings("ignore:.*epochs .0.")  # for which the added one comes too late
@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_with_one_more_of_its_class_keeps_the_masks(kind, net, fit, tmp_path):
    first = kind(layers="net.0.*")
    fit(net(), [first], epochs=3).save_checkpoint(tmp_path / "one.ckpt")
    pair = [kind(layers=["net.0.*"]), kind(layers="net.2.*")]  # a list instead of a string is no difference
    before = []

    class Note(Callback):
        def on_train_start(self, trainer, pl_module):
            before.extend(kept_of(callback) for callback in pair)

    fit(net(seed=4), [*pair, Note()], epochs=4, ckpt_path=tmp_path / "one.ckpt")
    assert same(before[0], first.masks)
    assert list(before[1]) == ["net.2.weight"]


def test_two_callbacks_that_have_trained_apart_may_train_together(net, fit):
    first, second = StaticMask(layers="net.0.*"), StaticMask(layers="net.2.*")
    for callback in (first, second):
        fit(net(), [callback], epochs=1)
    module = net()
    fit(module, [first, second], epochs=1)
    assert (module.net[0].weight == 0).any()
    assert (module.net[2].weight == 0).any()


@pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided")
def test_layers_that_are_spelled_in_another_way_find_their_masks(net, fit, tmp_path):
    first, second = StaticMask(), StaticMask(layers=["net.*"])
    fit(net(), [first], epochs=1).save_checkpoint(tmp_path / "one.ckpt")
    second.seed = 2  # by which other masks are drawn
    with pytest.warns(UserWarning, match="drawn with `seed=0`"):
        fit(net(), [second], epochs=2, ckpt_path=tmp_path / "one.ckpt")
    assert same(first.masks, second.masks)


@pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided")
def test_masks_of_a_checkpoint_that_fit_no_callback_are_refused(net, fit, tmp_path):
    fit(net(), [StaticMask(layers=["net.0.*", "net.2.*"])], epochs=1).save_checkpoint(tmp_path / "one.ckpt")
    pair = [StaticMask(layers="net.0.*"), StaticMask(layers="net.2.*")]
    with pytest.raises(InvalidOption, match=r"the checkpoint has masks of some of these layers by Static"):
        fit(net(), pair, epochs=2, ckpt_path=tmp_path / "one.ckpt")


@pytest.mark.parametrize("layers", [None, ["net.0.*", "net.2.*"]])
@pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided")
def test_masks_of_other_layers_are_refused_or_left(layers, net, fit, tmp_path):
    fit(net(), [StaticMask(layers=["net.0.*"])], epochs=1).save_checkpoint(tmp_path / "one.ckpt")
    with pytest.raises(InvalidOption, match="expected the `layers` with which it was saved"):
        fit(net(), [StaticMask(layers=layers)], epochs=2, ckpt_path=tmp_path / "one.ckpt")
    other = StaticMask(layers=["net.2.*"])
    fit(net(), [other], epochs=2, ckpt_path=tmp_path / "one.ckpt")
    assert list(other.masks) == ["net.2.weight"]


class Split(SingleDeviceStrategy):
    """Stands for a strategy that splits parameters over processes, as FSDP does."""

    @property
    def restore_checkpoint_after_setup(self):
        return True


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_a_strategy_splits_are_refused(kind, net, fit):
    with pytest.raises(InvalidOption, match="cannot mask parameters that `Split` splits over processes; expected"):
        fit(net(), [kind()], strategy=Split("cpu"))
