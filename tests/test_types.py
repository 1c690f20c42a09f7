"""The values that methods exchange: each field is described where `help()` shows it."""

import dataclasses
import inspect
import re

import pytest

from lightning_sparsefl import types

VALUES = [kind for kind in vars(types).values() if dataclasses.is_dataclass(kind)]


@pytest.mark.parametrize("kind", VALUES, ids=lambda kind: kind.__name__)
def test_the_docstring_describes_every_field(kind):
    section = inspect.getdoc(kind).partition("\n\nAttributes:\n")[2]
    assert re.findall(r"^    (\w+): \S", section, re.MULTILINE) == [field.name for field in dataclasses.fields(kind)]
