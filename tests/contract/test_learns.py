"""A federation of every exported algorithm learns."""

from helpers.algorithms import every_variant


@every_variant
def test_learns(algorithm, federation):
    untrained = federation(algorithm, verb="validate")
    trained = federation(algorithm, rounds=5, num_train=600)
    assert trained.summary["personal/val_acc"] > untrained.summary["personal/val_acc"] + 0.2
