from __future__ import annotations

import copy
import itertools

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_sparsefl.callbacks import LotteryRewind, StaticMask
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.masks import counts, density, kept, same

SIZES = {"net.0.weight": 36, "net.2.weight": 54, "net.4.weight": 18}
TOTAL = sum(SIZES.values())


class Probe(Callback):
    """Masks, the learning rate and the weights after every batch."""

    def __init__(self, callback):
        self.callback, self.masks, self.rates, self.weights = callback, [], [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.masks.append({name: mask.clone() for name, mask in self.callback.masks.items()})
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.weights.append({name: weight.detach().clone() for name, weight in pl_module.named_parameters()})


def batches():
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    y = x[:, :3].argmax(1)
    return [(x[at : at + 4], y[at : at + 4]) for at in range(0, 20, 4)]


def by_paper(module, recipe, slow, plan, final, scope, epochs):
    """Iterative magnitude pruning with rewinding in plain torch: a new optimizer for every cycle."""
    (back, *ends), module = plan, copy.deepcopy(module)
    weights = dict(module.named_parameters())
    masks = {name: torch.ones_like(w, dtype=torch.bool) for name, w in weights.items() if w.dim() > 1}
    optimizer, step = recipe.optimizer(module.parameters()), 0
    then = copy.deepcopy(module.state_dict())
    for _ in range(epochs):
        for index, batch in enumerate(batches()):
            (module.loss(batch) / recipe.accumulate).backward()
            if (index + 1) % recipe.accumulate and index + 1 < 5:
                continue
            for name, mask in masks.items():
                weights[name].grad[~mask] = 0
            if recipe.clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), recipe.clip)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step in ends:
                share = final ** ((ends.index(step) + 1) / len(ends))
                masks = pruned(slow, weights, masks, share, scope)
                module.load_state_dict(then)
                optimizer = recipe.optimizer(module.parameters())
            with torch.no_grad():
                for name, mask in masks.items():
                    weights[name][~mask] = 0
            if step == back:
                then = copy.deepcopy(module.state_dict())
    return {name: weight.detach() for name, weight in weights.items()}, masks


def pruned(slow, weights, masks, share, scope):
    score = {name: weights[name].detach().abs().numpy() for name in masks}
    old = {name: mask.numpy() for name, mask in masks.items()}
    if scope == "global":
        new = slow.shrink_globally(score, old, int(share * TOTAL + 1e-9))
    else:
        new = slow.shrink(score, old, {name: max(1, int(share * size + 1e-9)) for name, size in SIZES.items()})
    return {name: torch.from_numpy(mask) for name, mask in new.items()}


@pytest.mark.parametrize(("scope", "rewind"), [("global", 0.5), ("layer", 0.0)])
def test_it_trains_as_on_paper(scope, rewind, net, fit, recipe, slow):
    module, callback = net(recipe), LotteryRewind(density=0.25, cycles=3, rewind=rewind, scope=scope)
    probe = Probe(callback)
    fit(module, [callback, probe], recipe, epochs=6)
    total = 6 * (3 if recipe.accumulate == 2 else 5)  # 18 or 30
    plan = {(30, 0.5): (7, 15, 22), (18, 0.5): (4, 9, 13), (30, 0.0): (0, 10, 20), (18, 0.0): (0, 6, 12)}[total, rewind]
    weights, masks = by_paper(net(recipe), recipe, slow, plan, 0.25, scope, epochs=6)
    assert same(callback.masks, masks)
    torch.testing.assert_close(dict(module.named_parameters()), weights, rtol=0, atol=1e-6)
    assert [kept(each) for each in probe.masks] == sorted((kept(each) for each in probe.masks), reverse=True)
    assert len({kept(each) for each in probe.masks}) == 3


def test_a_return_brings_back_what_was_there_under_the_masks(net, fit, recipes):
    module, callback = net(recipes["momentum, decay"]), LotteryRewind(density=0.2, cycles=2, rewind=0.2)
    probe = Probe(callback)
    fit(module, [callback, probe], recipes["momentum, decay"], epochs=6)
    (end,), back = callback.cycle_ends(30), 3
    assert end == 16
    for name, weight in probe.weights[back - 1].items():
        mask = callback.masks.get(name, torch.ones_like(weight, dtype=torch.bool))
        assert torch.equal(probe.weights[end - 1][name], weight * mask)


@pytest.mark.parametrize("rewind", [0.0, 0.3])
@pytest.mark.parametrize("cycles", [2, 3, 5])
def test_learning_rates_go_back_with_their_schedulers(rewind, cycles, net, fit):
    callback = LotteryRewind(density=0.3, cycles=cycles, rewind=rewind)
    module, probe, total = net(), Probe(callback), 60
    module.configure_optimizers = lambda: planned(module, callback.cycle_steps(total))
    fit(module, [callback, probe], epochs=total // 5)  # a scheduler that is stepped too often would complain
    ends, start = [*callback.cycle_ends(total), total], int(rewind * callback.cycle_ends(total)[0] + 1e-9)
    first = probe.rates[: ends[0] - 1]
    for begin, end in itertools.pairwise(ends):
        again = probe.rates[begin : end - 1]
        both = min(len(again), len(first) - start)
        assert both > 2
        assert again[:both] == first[start : start + both]
        assert abs(end - begin - (ends[0] - start)) <= 1


def planned(module, steps):
    optimizer = torch.optim.SGD(module.parameters(), 0.3, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, steps)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_an_optimizer_that_is_born_with_a_memory_has_it_again(net, fit):
    module, callback = net(), LotteryRewind(density=0.5, cycles=2, rewind=0.0)
    optimizer = []
    module.optimizer = lambda parameters: torch.optim.Adagrad(parameters, 0.1, initial_accumulator_value=0.5)
    fit(module, [callback, Remembers(optimizer)], epochs=4)
    before, after = optimizer[9], optimizer[10]  # the first cycle ends after 10 steps
    assert [float(each) for each in before] == [0.5] * len(before)
    assert all(float(each) > 0.5 for each in after)


def test_every_cycle_begins_with_the_same_memory(net, fit):
    module, callback = net(), LotteryRewind(density=0.5, cycles=4, rewind=0.0)
    seen = []
    module.optimizer = lambda parameters: torch.optim.Adagrad(parameters, 0.1, initial_accumulator_value=0.5)
    fit(module, [callback, Remembers(seen)], epochs=4)
    for end in callback.cycle_ends(20):
        assert [float(each) for each in seen[end - 1]] == [0.5] * len(seen[0])


class Remembers(Callback):
    """The smallest of what an Adagrad has summed up, after every batch."""

    def __init__(self, seen):
        self.seen = seen

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append([state["sum"].max() for state in trainer.optimizers[0].state.values()])


class Kill(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(trainer.default_root_dir + "/half.ckpt")


@pytest.mark.parametrize("epochs", [4, 12])  # the return is after the checkpoint, and both keeping and returning are
def test_a_scheduler_goes_back_after_a_resume_too(epochs, net, fit, tmp_path):
    results = []
    for path in (None, tmp_path / "half.ckpt"):
        module, callback = net(seed=len(results)), LotteryRewind(density=0.3, cycles=2, rewind=0.4)
        steps = callback.cycle_steps(5 * epochs)
        module.configure_optimizers = lambda module=module, steps=steps: planned(module, steps)
        probe = Probe(callback)
        fit(module, [callback, probe, *([Kill()] if path is None else [])], epochs=epochs, ckpt_path=path)
        results.append((dict(module.named_parameters()), probe.rates, callback.state_dict()))
    (weights, rates, state), (others, other_rates, other) = results
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert rates[10:] == other_rates
    assert state["then"] == other["then"] == {"weights": {}, "optimizers": [], "schedulers": []}


def test_a_second_fit_holds_the_ticket_and_rewinds_nothing(net, fit, recipes):
    recipe = recipes["momentum, decay"]
    module, callback = net(recipe), LotteryRewind(density=0.25, cycles=3)
    fit(module, [callback], recipe)
    other = copy.deepcopy(module)
    held = dict(callback.masks)
    assert density(held) == 0.25
    fit(module, [callback], recipe)
    fit(other, [StaticMask(masks=held)], recipe)
    assert same(callback.masks, held)
    assert all(torch.equal(weight, other.get_parameter(name)) for name, weight in module.named_parameters())
    callback.density = 0.125
    probe = Probe(callback)
    fit(module, [callback, probe], recipe)
    assert [kept(masks) for masks in probe.masks] == [27] * 4 + [19] * 5 + [13] * 6


def test_density_1_is_dense_training(net, fit, by_hand, recipe):
    module = net(recipe)
    fit(module, [LotteryRewind(density=1.0)], recipe)
    torch.testing.assert_close(dict(module.named_parameters()), by_hand(net(recipe), recipe), rtol=0, atol=1e-6)


@pytest.mark.parametrize("total", [1, 2, 3, 5, 17])
def test_a_short_fit_reaches_the_density_all_the_same(total, net, fit):
    module, callback = net(), LotteryRewind(density=0.1, cycles=5, rewind=0.3)
    fit(module, [callback], epochs=total, batches=1)
    assert kept(callback.masks) == int(0.1 * TOTAL)
    assert all(not module.get_parameter(name)[~mask].any() for name, mask in callback.masks.items())


def test_layers_have_the_same_density_or_compete(net, fit):
    each, together = LotteryRewind(density=0.3, scope="layer"), LotteryRewind(density=0.3)
    for callback in (each, together):
        fit(net(), [callback])
    assert counts(each.masks) == {name: int(0.3 * size) for name, size in SIZES.items()}
    assert kept(together.masks) == int(0.3 * TOTAL)
    assert counts(together.masks) != counts(each.masks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 0}, r"`LotteryRewind\(density=0\)`: expected a number in \(0, 1\]"),
        ({"cycles": 1}, r"`LotteryRewind\(cycles=1\)`: expected a whole number >= 2"),
        ({"rewind": 1.0}, r"`LotteryRewind\(rewind=1.0\)`: expected a share of the first cycle in \[0, 1\)"),
        ({"scope": "unit"}, r"`LotteryRewind\(scope='unit'\)`: expected 'layer' or 'global'"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(InvalidOption, match=message):
        LotteryRewind(**options)


def test_a_layer_without_weights_is_left_alone(net, fit):
    module = net()
    with pytest.warns(UserWarning, match="zero-element"):
        module.empty = torch.nn.Linear(0, 3)
    callback = LotteryRewind(density=0.3, scope="layer")
    fit(module, [callback])
    assert counts(callback.masks) == {name: int(0.3 * size) for name, size in SIZES.items()}


def test_a_density_that_cannot_be_reached_is_refused(net, fit):
    with pytest.raises(InvalidOption, match=r"`net\.0\.weight` cannot reach 0.02"):
        fit(net(), [LotteryRewind(density=0.02, scope="layer")])
    with pytest.raises(InvalidOption, match="1 weight in all is too few"):
        fit(net(), [LotteryRewind(density=0.01)])
    callback = LotteryRewind(density=0.5)
    fit(net(), [callback])
    callback.density = 0.9
    with pytest.raises(InvalidOption, match="`all layers` has 54 weights left, fewer than the 97"):
        fit(net(), [callback])


@pytest.mark.parametrize("end", [1, 2, 3])
def test_a_run_resumed_with_more_epochs_keeps_its_ticket_or_goes_on_to_it(end, net, fit, tmp_path):
    options = {"density": 0.2, "cycles": 3, "rewind": 0.2}
    first = LotteryRewind(**options)

    class Save(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch + 1 == end:
                trainer.save_checkpoint(tmp_path / "some.ckpt")

    fit(net(), [first, Save()], epochs=3)
    callback = LotteryRewind(**options)
    fit(net(seed=3), [callback], epochs=6, ckpt_path=tmp_path / "some.ckpt")
    assert density(callback.masks) == density(first.masks) <= 0.2
    if end == 3:  # all cycles were over
        assert same(first.masks, callback.masks)


def test_more_cycles_than_the_checkpoint_kept_a_state_for_are_refused(net, fit, tmp_path):
    trainer = fit(net(), [LotteryRewind(density=0.5, cycles=2)], epochs=2)
    trainer.save_checkpoint(tmp_path / "ended.ckpt")
    with pytest.raises(InvalidOption, match=r"`LotteryRewind\(cycles=3\)`: .* fit of 2 cycles .*; expected `cycles=2`"):
        fit(net(), [LotteryRewind(density=0.5, cycles=3)], epochs=3, ckpt_path=tmp_path / "ended.ckpt")


def test_groups_that_an_unfrozen_backbone_adds_stay(net, fit):
    """Such as those of `BackboneFinetuning`: their parameters go back, and their options stay."""

    class Thaw(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                trainer.optimizers[0].add_param_group({"params": pl_module.net[0].parameters(), "lr": 0.01})

    module, first = net(), net()
    module.configure_optimizers = lambda: torch.optim.SGD(
        [parameter for name, parameter in module.named_parameters() if not name.startswith("net.0")], 0.1, momentum=0.9
    )
    callback = LotteryRewind(0.5, cycles=2, rewind=0.0, layers=["net.*"])
    seen = []

    class Look(Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            if density(callback.masks) < 1 and not seen:
                seen.append([group["lr"] for group in trainer.optimizers[0].param_groups])
                for name, weight in pl_module.named_parameters():
                    mask = callback.masks.get(name, torch.ones_like(weight))
                    torch.testing.assert_close(weight, first.get_parameter(name) * mask, rtol=0, atol=0)

    fit(module, [callback, Thaw(), Look()], epochs=4)
    assert seen == [[0.1, 0.01]]


class Ends(Callback):
    """Ends a fit early, as EarlyStopping does."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = True


def test_a_fit_after_one_that_was_ended_returns_to_its_own_weights(net, fit):
    callback = LotteryRewind(density=0.25, cycles=3, rewind=0.0)
    with pytest.warns(UserWarning, match="the fit ended at step 1 of 15"):
        fit(net(seed=1), [callback, Ends()])
    assert callback.state_dict()["then"]["weights"]
    module, probe = net(seed=0), Probe(callback)
    first = module.net[4].bias.detach().clone()
    fit(module, [callback, probe])
    assert torch.equal(probe.weights[callback.cycle_ends(15)[0] - 1]["net.4.bias"], first)


class Counts(nn.Module):
    """Counts its passes in a buffer that no checkpoint has."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.register_buffer("passes", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.passes += 1
        return self.layer(x)


def test_buffers_that_no_checkpoint_has_go_back_too(net, fit):
    module, callback = net(), LotteryRewind(density=0.25, cycles=2, rewind=0.0)
    module.net[4] = Counts(module.net[4])
    (end,) = callback.cycle_ends(15)
    fit(module, [callback])
    assert int(module.net[4].passes) == 15 - end
