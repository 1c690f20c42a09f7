"""PerFedMask: who trains what, alone and over a base, what it costs, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.freezing import BUFFERS, HEAD, WEIGHTS, A, B, frozen, started, views
from lightning_sparsefl import FedAvg, Federation, HeteroFL, PerFedMask, SplitMix
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.aggregation.reducers import CoverageMean
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.masks import counts
from lightning_sparsefl.sparse.uses import TensorUses


def test_refuses_options_out_of_range():
    with pytest.raises(InvalidOption, match=r"`algorithm.finetune_epochs` is -1; expected a whole number >= 0"):
        PerFedMask(finetune_epochs=-1)


def test_refuses_a_base_of_another_kind():
    with pytest.raises(InvalidOption, match="expected `HeteroFL` or `SplitMix`"):
        PerFedMask(base=FedAvg())


@pytest.mark.parametrize("base", [HeteroFL(finetune_epochs=3), SplitMix(finetune_epochs=3)])
def test_refuses_fine_tuning_of_its_base(base):
    with pytest.raises(InvalidOption, match=r"expected `algorithm.finetune_epochs` instead of the base's"):
        PerFedMask(base=base)


def test_refuses_an_unknown_masking():
    with pytest.raises(InvalidOption, match=r"`algorithm\.masking` is 'best'; expected one of 'optimized'"):
        PerFedMask(masking="best")


class Frozen:
    """A model whose first group the module freezes."""

    uses = TensorUses(frozen=frozenset(A))


def test_budgets_are_spent_on_what_trains():
    people = views(0.4, 1.0)
    fleet = Fleet(people, BUFFERS, torch.device("cpu"), Frozen())
    server = PerFedMask().init(WEIGHTS, fleet)
    fixed = [set(PerFedMask().download(server, view).trainable) for view in people]
    assert fixed == [set(WEIGHTS), A | HEAD]  # .4 of 6 is less than the group of 6; the first client does nothing
    with pytest.raises(InvalidOption, match=r"is the whole model that trains; name a part of it"):
        PerFedMask(head="b").init({n: w for n, w in WEIGHTS.items() if n not in HEAD}, fleet)


def test_refuses_a_head_that_is_everything_or_nothing():
    with pytest.raises(InvalidOption, match="is the whole model"):
        PerFedMask(head="*").init(WEIGHTS, Fleet(views(1.0), BUFFERS, torch.device("cpu")))
    with pytest.raises(InvalidOption, match=r"no `z` to be its head; name one of .* with `algorithm\.head`\.$"):
        PerFedMask(head="z").init(WEIGHTS, Fleet(views(1.0), BUFFERS, torch.device("cpu")))


def test_a_client_trains_what_fits_its_share_of_the_body():
    # 18 parameters: 1/3 is the 6 of b, .66 is 11 and so b too, 2/3 is the 12 of a, 1 is all, .3 is nothing
    people = views(1 / 3, 0.66, 2 / 3, 1.0, 0.3)
    assert frozen(PerFedMask(), people) == [A | HEAD, A | HEAD, B | HEAD, HEAD, set(WEIGHTS)]


def test_a_client_that_can_train_nothing_does_not_try(client, facts):
    (weak, _) = people = views(0.3, 1.0)
    method = PerFedMask()
    message = method.download(started(method, people), weak)
    someone, script = client({})
    update = method.train(message, someone)
    assert (dict(update.weights), update.weight, script.fits) == ({}, 7, [])
    assert method.trained(message, update) == WEIGHTS
    costs = method.costs(replace(facts(), message=message))
    assert (costs.flops_paper, costs.flops_analytic, costs.bytes_up_paper) == (0, 0, 0)


def test_two_weak_clients_share_the_work():
    # Groups of 10 and 8, budgets of 10: one each costs 18 * 3 / 2 - 18 + 2 = 11, one for both 18 * 5 / 3 - 18 = 12.
    first, second = {"a.weight"} | HEAD, {"a.bias"} | B | HEAD
    plan = frozen(PerFedMask(groups=("a.weight", "*")), views(10 / 18, 10 / 18, 1.0))
    assert plan in ([first, second, HEAD], [second, first, HEAD])


def test_the_plan_is_drawn_from_the_runs_seed():
    people = [views(*[2 / 3] * 12, seed=seed) for seed in (1, 1, 2)]
    first, again, other = (frozen(PerFedMask(masking="random"), fleet) for fleet in people)
    assert first == again
    assert first != other
    assert all(names in (A | HEAD, B | HEAD) for names in first)


def test_sequential_masking_takes_the_first_that_fits():
    assert frozen(PerFedMask(masking="sequential"), views(2 / 3, 0.5, 1.0)) == [B | HEAD, A | HEAD, HEAD]


def test_without_a_frozen_head_it_is_a_group():
    # 34 parameters, 16 of them in c
    method = PerFedMask(freeze_head=False, masking="sequential")
    assert frozen(method, views(0.4, 0.2, 1.0)) == [B | HEAD, A | HEAD, set()]
    assert frozen(PerFedMask(freeze_head=False), views(0.5, 1.0)) == [A | B, set()]


def test_the_head_by_name():
    assert frozen(PerFedMask(head="b"), views(1.0)) == [B]


def test_clients_may_have_gaps_in_their_numbers():
    people = views(1 / 3, 1.0, ids=[2, 7])
    assert frozen(PerFedMask(), people) == [A | HEAD, HEAD]


def test_plans_under_a_base_are_made_by_width(preresnet):
    method = PerFedMask(base=HeteroFL())
    server, views = preresnet.start(method, 0.125, 0.125, 1.0, 1.0)
    for person in views:
        message = method.download(server, person)
        kept = counts(message.masks)
        body = {n: kept.get(n, w.numel()) for n, w in message.weights.items() if not n.startswith("net.fc.")}
        trained = sum(size for name, size in body.items() if name not in message.trainable)
        assert {"net.fc.weight", "net.fc.bias"} <= set(message.trainable)
        if person.capacity == 1:
            assert trained == sum(body.values()) == 11_167_040
        else:
            assert 0.1 * sum(body.values()) < trained <= 0.125 * sum(body.values())
        costs = method.costs(preresnet.facts(method, server, person))
        assert costs.bytes_up_paper == 4 * trained


def test_everything_travels_down_and_only_voters_count():
    method, people = PerFedMask(), views(1 / 3, 1.0)
    server = started(method, people)
    message = method.download(server, people[0])
    assert set(message.weights) == set(WEIGHTS)
    assert set(method.may_vote(message)) == set(message.trainable)
    assert isinstance(method.reducer(), CoverageMean)


def test_fine_tuning_is_of_the_whole_model(client):
    people = views(1.0)
    message = PerFedMask().download_for(started(PerFedMask(), people), people[0], "finetune")
    tuned = {name: value + 1 for name, value in WEIGHTS.items()}
    someone, script = client(tuned)
    assert PerFedMask(finetune_epochs=2).finetune(message, someone) == tuned
    ((weights, masks, trainable, callbacks),) = script.fits
    assert (weights, masks, trainable, list(callbacks)) == (WEIGHTS, {}, {}, [])
    assert PerFedMask(finetune_epochs=0).finetune(message, someone) is None
    assert len(script.fits) == 1


def test_costs(facts):
    # The forward pass is 22 FLOPs in a and 12 in b, 14 samples. Of a frozen a neither gradient is computed below b.
    frozen_a = {name: torch.zeros(size, dtype=torch.bool) for name, size in (("a.weight", (2, 5)), ("a.bias", (2,)))}
    costs = PerFedMask().costs(facts(trainable=frozen_a))
    assert costs.flops_analytic == costs.flops_paper == 14 * (34 + 2 * 12)
    assert (costs.bytes_down_paper, costs.bytes_up_paper) == (4 * 18, 4 * 6)
    everything = PerFedMask().costs(facts())
    assert (everything.flops_paper, everything.bytes_up_paper) == (14 * 3 * 34, 4 * 18)


def test_capacities_of_blocks():
    assert list(Federation(capacities=[0.125, 1.0]).fleet_capacities(4, seed=0)) == [0.125, 0.125, 1.0, 1.0]
    assert list(Federation(capacities=[0.5, 0.5, 1.0]).fleet_capacities(3, seed=0)) == [0.5, 0.5, 1.0]
    spread = list(Federation(capacities=[0.25, 0.5, 1.0]).fleet_capacities(8, seed=0))
    assert spread == [0.25, 0.25, 0.25, 0.5, 0.5, 0.5, 1.0, 1.0]
    assert list(Federation().fleet_capacities(2, seed=0)) == [1.0, 1.0]
    shuffled = Federation(capacities=[0.125, 1.0], shuffle_capacities=True)
    dealt = [list(shuffled.fleet_capacities(40, s)) for s in (0, 0, 1)]
    assert dealt[0] == dealt[1] != dealt[2]
    assert sorted(dealt[0]) == sorted(dealt[2]) == [0.125] * 20 + [1.0] * 20
    for capacities in ([], [0.5] * 6):
        with pytest.raises(InvalidOption, match=f"`federation.capacities` has {len(capacities)} numbers.*spread over"):
            Federation(clients_per_round=1, capacities=capacities).check_fleet(5)
