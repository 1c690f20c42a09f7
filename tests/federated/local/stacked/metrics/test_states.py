"""States of metric objects for several clients, and the checks of values in them."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import (
    BinaryAccuracy,
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MultilabelAccuracy,
)

from lightning_sparsefl.federated.local.isolation import isolate_metrics
from lightning_sparsefl.federated.local.stacked import functorch
from lightning_sparsefl.federated.local.stacked.logs import NotStackable
from lightning_sparsefl.federated.local.stacked.metrics.checks import check_of
from lightning_sparsefl.federated.local.stacked.metrics.states import MetricStates

LABELS = {
    "binary": (lambda: BinaryAccuracy(), [0, 1, 1], 2),
    "binary, ignoring": (lambda: BinaryAccuracy(ignore_index=-1), [0, 1, -1], 2),
    "multiclass": (lambda: MulticlassAccuracy(3), [2, 0, 1], 3),
    "confusion": (lambda: MulticlassConfusionMatrix(3, ignore_index=3), [2, 3, 1], 4),
    "multilabel": (lambda: MultilabelAccuracy(2), [[0, 1], [1, 1]], 2),
}


def checked(metric):
    """Let a metric have the check of a stack."""
    check = check_of(metric)
    vars(metric).update(check.replaced())
    return check


@pytest.mark.parametrize("name", LABELS)
def test_labels_out_of_range_are_noted_where_the_metric_may_refuse_them(name):
    make, labels, beyond = LABELS[name]
    target = torch.tensor(labels)
    preds = target.clamp(0, 1)
    known, metric = make(), make()
    known.update(preds, target)
    check = checked(metric)
    metric.update(preds, target=target)
    assert not check.flag
    assert all(torch.equal(state, known.metric_state[key]) for key, state in metric.metric_state.items())
    for wrong in (torch.full_like(target, beyond), torch.full_like(target, -2)):
        other = make()
        check = checked(other)
        with contextlib.suppress(RuntimeError, IndexError):  # where a table of counts has no place for it
            other.update(preds, wrong)
        assert check.flag


def test_a_prediction_that_is_ignored_as_a_label_is_noted():
    metric = BinaryAccuracy(ignore_index=-1)
    check = checked(metric)
    metric.update(torch.tensor([-1, 1]), torch.tensor([-1, 1]))
    assert check.flag


@pytest.mark.parametrize("kind", [MeanMetric, MaxMetric, SumMetric])
@pytest.mark.parametrize("strategy", ["warn", "error", "ignore", 0.0])
def test_nan_is_noted_and_other_values_count_as_before(kind, strategy):
    known, metric = kind(nan_strategy=strategy), kind(nan_strategy=strategy)
    check = checked(metric)
    values = torch.tensor([[1.0, 3.0], [2.0, 0.5]])
    given = (values, 3.0) if kind is MeanMetric else (values,)
    for each in (known, metric):
        each.update(*given)
        each.update(4)
    assert metric.compute() == known.compute()
    assert not check.flag
    metric.update(torch.tensor([1.0, torch.nan]))
    assert check.flag


def test_metrics_without_a_check_keep_their_own():
    assert check_of(MeanMetric(nan_strategy="disable")) is None
    assert check_of(MulticlassAccuracy(3, validate_args=False)) is None
    assert check_of(MulticlassAccuracy(average="micro")) is None  # of any number of classes


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.accuracy, self.mean = MulticlassAccuracy(3), MeanMetric()
        micro = {"average": "micro"}
        self.several = MetricCollection([MulticlassAccuracy(3, **micro), MulticlassF1Score(3, **micro)])


def attributes(module):
    found = [vars(child) for child in module.modules()]
    return [{key: value for key, value in each.items() if key != "_update_signature"} for each in map(dict, found)]


@pytest.mark.parametrize("fails", [False, True])
def test_the_objects_hold_what_they_held(fails):
    module = Holder()
    module.several.update(torch.tensor([0, 1]), torch.tensor([0, 2]))  # which makes groups
    assert len(module.several._groups) == 1
    isolate_metrics(module)
    before = attributes(module)
    states = MetricStates(module, 2)
    with states.guarded():
        with contextlib.suppress(ZeroDivisionError), functorch.vmap_level(2) as level, states.part(0, 2).shown(level):
            module.several(functorch.wrap(torch.tensor([[0, 1], [1, 1]]), 0, level), torch.tensor([0, 1]))
            module.mean.update(functorch.wrap(torch.ones(2), 0, level))
            if fails:
                raise ZeroDivisionError
        for use in (lambda: module.mean(1.0), module.mean.compute):
            with pytest.raises(NotStackable, match=r"uses of the metric object `self.mean`"):
                use()
    for now, then in zip(attributes(module), before, strict=True):
        assert now.keys() == then.keys()
        assert all(now[key] is then[key] or now[key] == then[key] for key in now if key not in ("update", "compute"))
    copy.deepcopy(module).mean.update(2.0)
    assert module.mean.compute_with_cache


def test_each_client_has_its_own_number_of_updates():
    module = Holder()
    states = MetricStates(module, 3)
    part = states.part(1, 3)
    with functorch.vmap_level(2) as level, part.shown(level):
        module.mean.update(functorch.wrap(torch.tensor([1.0, 2.0]), 0, level))
        module.mean.update(functorch.wrap(torch.tensor([3.0, 4.0]), 0, level))
    with states.part(2, 3).shown(0):
        module.mean.update(6.0)
    assert states.compute(module.mean, [False, True, True])[1:] == [2.0, 4.0]
    assert states.counts[1] == [0, 2, 3]
    states.reset(module.mean, [False, True, False])
    assert states.counts[1] == [0, 0, 3]
    assert states.compute(module.mean, [False, False, True])[2] == 4.0
