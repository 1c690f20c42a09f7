"""Every exported algorithm is a frozen value that documents itself; a new one is tested by being exported."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from helpers.algorithms import ALGORITHMS, every_exported
from lightning_sparsefl import algorithms
from lightning_sparsefl.federated import FederatedAlgorithm

REFERENCE = Path(__file__).parents[1] / "reference"


@every_exported
def test_derives_from_the_base_and_is_its_repr(algorithm):
    assert isinstance(algorithm, FederatedAlgorithm)
    assert type(algorithm).__bases__ == (FederatedAlgorithm,)
    assert eval(repr(algorithm), vars(algorithms)) == algorithm


@every_exported
def test_says_what_it_is_and_where_it_departs(algorithm):
    module = inspect.getmodule(type(algorithm))
    assert re.search(r"arXiv:\d{4}\.\d{5}|Table \d", module.__doc__)
    assert "Departures" in module.__doc__
    source = inspect.getsource(type(algorithm))
    for field in dataclasses.fields(algorithm):  # each option has help on the command line
        assert re.search(rf'    {field.name}: .*\n    """', source), field.name


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_has_a_twin(kind):
    """A method without a slow twin is not finished."""
    name = kind.__name__
    assert f"class {name}" in (REFERENCE / f"numpy_{name.lower()}.py").read_text()
    assert f"{name}(" in (REFERENCE / f"test_{name.lower()}_twin.py").read_text()
