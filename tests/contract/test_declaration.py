"""Every exported algorithm is a frozen value that documents itself; a new one is tested by being exported."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
from lightning.pytorch import Callback

from helpers.algorithms import ALGORITHMS, VARIANTS, every_exported, slow_but_quick
from helpers.networks import module_for
from lightning_sparsefl import FedDST, FedLPS, Hermes, LotteryFL, PruneTrain, algorithms
from lightning_sparsefl.federated import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client

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


class Added(Callback):
    """A callback that a subclass of a method adds."""


def with_added(algorithm):
    """Return the method as a subclass whose `callbacks` are one more."""
    kind = type(algorithm)

    def callbacks(self, message, client):
        return [*kind.callbacks(self, message, client), Added()]

    added = type(f"Added{kind.__name__}", (kind,), {"callbacks": callbacks})
    return added(**{field.name: getattr(algorithm, field.name) for field in dataclasses.fields(algorithm)})


def several_fits(algorithm):
    """Return whether a method is one of those whose options decide where they fit."""
    return isinstance(algorithm, FedDST | FedLPS | Hermes | LotteryFL | PruneTrain)


@pytest.mark.parametrize(
    "algorithm",
    slow_but_quick([*VARIANTS[: len(ALGORITHMS)], *filter(several_fits, VARIANTS[len(ALGORITHMS) :])]),
    ids=repr,
)
def test_passes_the_callbacks_of_a_subclass_to_every_fit(algorithm, federation, monkeypatch):
    fit, passed = Client.fit, []

    def watched(client, weights, masks=None, trainable=None, callbacks=(), **options):
        if client._task == "train":
            passed.append(any(isinstance(callback, Added) for callback in callbacks))
        return fit(client, weights, masks, trainable, callbacks, **options)

    monkeypatch.setattr(Client, "fit", watched)
    federation(with_added(algorithm), module=module_for(algorithm)(), rounds=2)
    assert passed
    assert all(passed)
