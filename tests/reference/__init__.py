"""Slow twins: what the package computes, written again from the papers, and the comparison of the two."""

import pytest

pytest.register_assert_rewrite("reference.freezing", "reference.harness")
