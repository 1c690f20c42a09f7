"""Directions of metrics by their names, and the worst tenth of values."""

from __future__ import annotations

import math

import pytest

from lightning_sparsefl.report.measures.direction import higher_is_better, key_should_rise, worst_tenth


@pytest.mark.parametrize(
    "name",
    [
        "val_loss",
        "valLoss",
        "val_MeanSquaredError",
        "MeanAbsoluteError",
        "val_MSE",
        "test_rmse",
        "val_CalibrationError",
        "val_HammingDistance",
        "WordErrorRate",
        "val_mape",
        "val_brier",
        "personal/val_mae_std",
        "global/KLDivergence",
        "val_cross_entropy",
        "val_ce",
    ],
)
def test_these_should_fall(name):
    assert not higher_is_better(name)


@pytest.mark.parametrize("name", ["val_acc", "val_MulticlassF1Score", "AUROC", "test_R2Score", "maerz", "val_terror"])
def test_these_should_rise(name):
    assert higher_is_better(name)


def test_spreads_and_gaps_fall_whatever_the_direction_of_their_metric():
    keys = [f"{group}/{name}" for group in ("personal", "unseen") for name in ("acc", "loss")]
    keys += [f"{key}{end}" for key in keys for end in ("_std", "_worst10", "_gap")]
    rising = [key for key in keys if key_should_rise(key, keys)]
    assert rising == [
        *("personal/acc", "unseen/acc", "personal/acc_worst10", "personal/acc_gap"),
        *("unseen/acc_worst10", "unseen/loss_gap"),
    ]


def test_the_worst_tenth_of_values_without_a_number_is_none():
    for values in ([0.9, math.nan, 0.1], [math.nan, 0.9], [0.1, math.nan]):
        assert math.isnan(worst_tenth(values, rising=True))
    assert worst_tenth([0.1 * n for n in range(20)], rising=False) == pytest.approx(1.85)


def test_the_worst_tenth_of_infinite_values_is_no_error():
    assert math.isnan(worst_tenth([math.inf, *[0.0] * 10, -math.inf], rising=True) * 0)
    assert worst_tenth([math.inf, 0.0], rising=False) == math.inf
