"""The federation that methods are compared on."""

import pytest

from reference.harness import Fit


@pytest.fixture
def fit(tmp_path):
    """Runs a federation; returns the initial weights and the rounds."""
    return Fit(tmp_path)
