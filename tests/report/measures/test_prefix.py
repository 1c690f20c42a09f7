"""Numbers that a text states."""

import math

import pytest

from lightning_sparsefl.report.measures.prefix import amount
from lightning_sparsefl.report.tables import quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("170000", 170_000),
        ("170kB", 170_000),
        ("170 KB", 170_000),
        (" 1.5MB ", 1_500_000),
        (".5k", 500),
        ("3.", 3),
        ("2e6", 2e6),
        ("2.5E-1 G", 2.5e8),
        ("1E", 1e18),
        ("8.041 kB", 8041),  # as a product it is 8040.999999999999
    ],
)
def test_a_number_with_or_without_a_prefix(text, value):
    assert amount(text, "B") == value


@pytest.mark.parametrize("value", [1, 999, 8041, 1_234_000, 5.6e10, 7e21])
@pytest.mark.parametrize("unit", ["B", "FLOP"])
def test_a_printed_number_is_read_again(value, unit):
    assert amount(quantity(value, unit), unit) == value


@pytest.mark.parametrize(
    "text",
    ["", "k", "B", "-1", "+1", ".", "1e", "nan", "inf", "1 KiB", "1,5", "1mB", "1 FLOP", "1 k B", "1e12345", "\u0663"],
)
def test_a_text_that_states_no_number(text):
    assert math.isnan(amount(text, "B"))
