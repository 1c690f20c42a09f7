import numpy as np
import pytest

from lightning_sparsefl.report import bin_edges


def test_accuracies_have_the_same_hundredths_in_every_round():
    first, later = bin_edges([0.1, 0.25], rising=True), bin_edges([0.97, 1.0], rising=True)
    assert first == later
    counts, _ = np.histogram([0.0, 0.005, 0.29, 0.995, 1.0], bins=first)
    assert [int(i) for i in counts.nonzero()[0]] == [0, 29, 99]
    assert int(counts.sum()) == 5


@pytest.mark.parametrize(
    ("values", "rising"),
    [([0.01, 0.02, 0.04], False), ([-3.0, 7.0], True), ([2.5], False), ([0.0, 0.0], False), ([1e9] * 3, True)],
)
def test_other_bins_are_equal_and_lose_no_client(values, rising):
    edges = bin_edges(values, rising)
    assert len(edges) == 31
    assert np.diff(edges) == pytest.approx(np.full(30, (edges[-1] - edges[0]) / 30), rel=1e-6)
    assert np.histogram(values, bins=edges)[0].sum() == len(values)
    if min(values) < max(values):
        assert (edges[0], edges[-1]) == (min(values), max(values))
