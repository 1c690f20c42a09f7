"""Directions of metrics by their names, and the worst tenth of values."""

from __future__ import annotations

import math

import pytest

from lightning_sparsefl.report.measures.direction import higher_is_better, worst_tenth


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


def test_the_worst_tenth_of_values_without_a_number_is_none():
    for values in ([0.9, math.nan, 0.1], [math.nan, 0.9], [0.1, math.nan]):
        assert math.isnan(worst_tenth(values, rising=True))
    assert worst_tenth([0.1 * n for n in range(20)], rising=False) == pytest.approx(1.85)
