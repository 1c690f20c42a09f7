"""Names of splits: different for different options, the same in all processes, and refused where neither is known."""

import importlib.util
import sys
from collections import OrderedDict
from dataclasses import InitVar, dataclass, make_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_sparsefl.data import IID, Dirichlet, NoiseShift
from lightning_sparsefl.data.split_name import split_name
from lightning_sparsefl.errors import InvalidOption


@dataclass
class Given:
    value: Any


@dataclass
class AlsoGiven:
    value: Any


@dataclass
class Slotted:
    __slots__ = ("value",)
    value: Any


def name(value, seed=0):
    return split_name(Given, {"partition": value}, seed)


def long(changed):
    """More values than PyTorch and NumPy print."""
    values = torch.zeros(5000, dtype=torch.int64)
    values[2000:3000] = changed
    return values


DIFFERENT = {
    "numbers": (1, 1.0, True, "1", b"1", None, -0.0, 0.0, 1j),
    "containers": ((1,), [1], {1}, {1: 1}, {"1": 1}, ((1,),), "(1,)", {"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "paths": (Path("a"), "a", ("path", "b"), Path("b")),
    "tensors": (long(0), long(1), long(0).int(), long(0)[None], long(0).tolist(), torch.tensor(0)),
    "arrays": (long(0).numpy(), long(1).numpy(), long(0).int().numpy(), long(0)[None].numpy(), np.float32(0)),
    "dataclasses": (Given(1), AlsoGiven(1), Given(2), Slotted(1), Given(Given(1)), Given(AlsoGiven(1))),
    "tensors in dataclasses": (Given(long(0)), Given(long(1)), Given([long(0)]), Given({"a": long(1)})),
    "those of the package": (IID(), Dirichlet(0.5), Dirichlet(1.0), NoiseShift(0.3)),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_different_values_have_different_names(kind):
    assert len({name(value) for value in DIFFERENT[kind]}) == len(DIFFERENT[kind])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Given(long(1)), Given(long(1))),
        (long(1).expand(2, -1), long(1).repeat(2, 1)),
        (np.ones((3, 4)).T, np.ones((4, 3))),
        ({"a", "b", "c"}, {"c", "b", "a"}),
        (float("nan"), float("nan")),
        (torch.zeros(0), torch.zeros(0)),
        (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)),
    ],
)
def test_equal_values_have_one_name(first, second):
    assert name(first) == name(second)


def test_class_seed_and_working_directory_are_part_of_the_name(tmp_path, monkeypatch):
    names = {name(1), name(1, seed=1), split_name(AlsoGiven, {"partition": 1}, 0), split_name(Given, {"other": 1}, 0)}
    monkeypatch.chdir(tmp_path)
    assert len(names | {name(1)}) == 5


class Plain:
    def __init__(self, value):
        self.value = value


class Derived(Given):
    def __init__(self, value, further):
        super().__init__(value)
        self.further = further


@dataclass
class Consumed:
    value: InitVar[int]

    def __post_init__(self, value):
        self.kept = value


@pytest.mark.parametrize(
    ("value", "described"),
    [
        (Plain(1), "a Plain,"),
        ([Plain(1)], "a list with a Plain,"),
        (Given({"a": (Plain(1),)}), "a Given with a Plain,"),
        (len, "a builtin_function_or_method,"),
        (lambda: 1, "a function,"),
        (Given, "a type,"),
        (OrderedDict(a=1), "a OrderedDict,"),
        (torch.eye(2).to_sparse(), "a Tensor,"),
        (torch.ones(2, device="meta"), "a Tensor,"),
        (np.array([Plain(1)]), "a ndarray,"),
        (np.ma.array([1]), "a MaskedArray,"),
        (torch.nn.Parameter(torch.ones(1)), "a Parameter,"),
        (Derived(1, 2), "a Derived,"),
        (Consumed(1), "a Consumed,"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_value_whose_content_is_not_known_is_refused(value, described):
    with pytest.raises(InvalidOption, match=rf"`data\.partition` is {described} from .*memory_map` to null"):
        name(value)


def own_class(file, module, monkeypatch):
    """A class that a file defines, loaded as a module of some name."""
    file.write_text("from dataclasses import dataclass\n\n@dataclass\nclass Own:\n    value: int\n")
    spec = importlib.util.spec_from_file_location(module, file)
    loaded = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module, loaded)
    spec.loader.exec_module(loaded)
    return loaded.Own


def test_a_class_of_a_script_has_one_name_in_all_processes_and_another_in_another_script(tmp_path, monkeypatch):
    """The module of a script is `__main__`, or `__mp_main__` in a process that it spawns, or that of its file."""
    files = {"first": "a.py", "__mp_main__": "a.py", "second": "b.py"}
    names = [name(own_class(tmp_path / file, module, monkeypatch)(1)) for module, file in files.items()]
    assert names[0] == names[1] != names[2]


def test_names_are_those_of_files():
    kind = make_dataclass("Stars", [])
    assert split_name(kind, {}, 0).startswith("Stars-")
