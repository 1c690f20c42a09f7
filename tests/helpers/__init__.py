"""What tests of several folders share; `pythonpath` in pyproject.toml makes it importable."""

import pytest

pytest.register_assert_rewrite("helpers.federation", "helpers.freezing")
