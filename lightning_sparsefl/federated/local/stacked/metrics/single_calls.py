"""Methods of metric objects that are called for one client of a stack after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torchmetrics import Metric

from lightning_sparsefl.callbacks.stacking.hidden_metrics import METHODS, SharedCount, hidden_state
from lightning_sparsefl.federated.exchange.failures import is_out_of_memory
from lightning_sparsefl.federated.local.stacked import functorch
from lightning_sparsefl.federated.local.stacked.logs import NotStackable
from lightning_sparsefl.federated.local.stacked.rules import BRANCHES, failing_alone
from lightning_sparsefl.federated.local.stacked.states.leaves import map_tensors, unwrapped
from lightning_sparsefl.sparse.attributes import attributes_replaced

_WITH_VALUES = ("update", "compute")
"""Methods that may depend on values in a way that has no form for several clients."""


class ListState(NamedTuple):
    """One list of samples of one metric object."""

    key: str
    rows: list[list[Any]]
    """List of each client."""


@dataclass
class MetricUse:
    """How several clients use one metric object.

    Each of its methods is tried for all clients at once when it is first called; one that fails, such as an `update`
    that branches on values, is called for one client after another from then on. So is every method of a metric that
    keeps samples in a list.
    """

    metric: Metric
    lent: Mapping[str, Any]
    """Attributes while several clients use the object at once."""
    own: Mapping[str, Any]
    """Attributes while one client of several uses it."""
    lists: Sequence[ListState]
    single: set[str] = field(default_factory=set)
    """Methods that are called for one client after another."""
    _proven: set[str] = field(default_factory=set)
    """Methods that have been called for all clients at once."""

    def __post_init__(self) -> None:
        if self.lists:
            self.single |= set(METHODS)

    @cached_property
    def _wraps(self) -> bool:
        """Whether the object calls the methods of other objects, each of which is tried for itself."""
        return any(isinstance(child, Metric) for child in self.metric.modules() if child is not self.metric)

    @cached_property
    def _hidden(self) -> dict[str, Any]:
        """What stands in the place of lists."""
        return {each.key: hidden_state(self._refuse) for each in self.lists}

    def methods(self, low: int, counts: Sequence[int], level: int) -> dict[str, Any]:
        """Return the methods that differ from those of `lent`, and what stands in the place of lists.

        Args:
            low: First client that uses the object.
            counts: Number of updates of each client that uses it.
            level: Number of the level of ``vmap``.
        """
        if self._wraps:
            return self._hidden and {**self._hidden, **dict.fromkeys(METHODS, self._refuse)}
        names = METHODS if self.lists else [name for name in _WITH_VALUES if name not in self._proven]
        return {**self._hidden, **{name: partial(self._call, name, low, counts, level) for name in names}}

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        reads = "wraps other metric objects" if self._wraps else "is read without its methods"
        raise NotStackable(f"uses the metric object `{type(self.metric).__name__}`, which keeps samples and {reads}")

    def _call(self, name: str, low: int, counts: Sequence[int], level: int, *args: Any, **kwargs: Any) -> Any:
        """Call a method, for all clients at once if it can be."""
        calls = _Calls(self, low, counts, level)
        if name in self.single:
            return calls.one_by_one(name, args, kwargs)
        table = vars(self.metric)
        before = {key: value.clone() for key, value in calls.states().items()}
        others = {key: value for key, value in table.items() if key not in before}
        try:
            with _WithoutBranches(), NotStackable.noted() as noted:
                value = self.lent[name](*args, **kwargs)
            if noted:  # which the method has caught
                raise noted[0]
        except Exception as error:
            if is_out_of_memory(error):
                raise
            table.update(others | before)
            self.single.add(name)
            return calls.one_by_one(name, args, kwargs)
        self._proven.add(name)
        return value


class _WithoutBranches(TorchFunctionMode):
    """Context in which code cannot branch on values, not even where all clients take the same branch for once."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, unless it lets code branch on a value."""
        if func in BRANCHES:
            raise NotStackable("branches on the value of a tensor")
        return func(*args, **(kwargs or {}))


class _Calls:
    """Calls of a metric object's methods within a level of ``vmap``.

    Args:
        use: How clients use the object.
        low: First client that uses it.
        counts: Number of updates of each client that uses it.
        level: Number of the level.
    """

    def __init__(self, use: MetricUse, low: int, counts: Sequence[int], level: int) -> None:
        self._use, self._low, self._counts, self._level = use, low, counts, level
        self._table = vars(use.metric)

    def states(self) -> dict[str, Tensor]:
        """Return the tensors among the object's states."""
        defaults = self._use.metric._defaults.items()
        return {key: self._table[key] for key, each in defaults if isinstance(each, Tensor) and key in self._table}

    def one_by_one(self, name: str, args: Any, kwargs: Any) -> Any:
        """Call a method for one client after another, and return the values of all of them."""
        use, table = self._use, self._table
        count, updates = table["_update_count"], 0
        with functorch.Outside(), torch._C.DisableTorchFunction():  # which has no use for the rules of layers
            given = map_tensors((args, kwargs), self._plain)
            states = {key: self._plain(state) for key, state in self.states().items()}
            values, after = [], []
            for place, before in enumerate(self._updates(count)):
                own: dict[str, Any] = {key: state[place] for key, state in states.items()}
                own |= {each.key: each.rows[self._low + place] for each in use.lists}
                with attributes_replaced(use.metric, {**use.own, **own, "_update_count": before, "_computed": None}):
                    given_args, given_kwargs = map_tensors(given, itemgetter(place))
                    with failing_alone(f"{type(use.metric).__name__}.{name}"):
                        values.append(getattr(use.metric, name)(*given_args, **given_kwargs))
                    after.append({key: table[key] for key in states})
                    updates = table["_update_count"] - before
                    for each in use.lists:
                        each.rows[self._low + place] = table[each.key]
            table.update({key: self._all(*(row[key] for row in after)) for key in states})
            value = self._all_of(values)
        table["_update_count"] = 0 if name == "reset" else count + updates
        table["_computed"] = None
        if name == "forward":
            table["_forward_cache"] = value
        return value

    def _updates(self, count: Any) -> list[int]:
        """Return each client's number of updates at this point of the step."""
        if isinstance(count, SharedCount):
            return [own + count.value - max(self._counts) for own in self._counts]
        return [count] * len(self._counts)  # since a reset in this step

    def _plain(self, tensor: Tensor) -> Tensor:
        """Return a tensor with the clients in dimension 0."""
        return unwrapped(tensor, self._level, len(self._counts))

    def _all_of(self, values: Sequence[Any]) -> Any:
        """Return nested values of each client as those of all of them."""
        try:
            return tree_map(self._all, *values)
        except ValueError as error:
            raise NotStackable(self._forms) from error

    @property
    def _forms(self) -> str:
        return f"gets values of several forms from `{type(self._use.metric).__name__}`"

    def _all(self, *values: Any) -> Any:
        """Return one value of each client as a value of all of them."""
        if isinstance(values[0], Tensor):
            if len({value.shape for value in values}) > 1:
                raise NotStackable(self._forms)
            return functorch.wrap(torch.stack(values), 0, self._level)
        if any(value != values[0] for value in values):
            raise NotStackable(f"gets a value from `{type(self._use.metric).__name__}` that is no tensor")
        return values[0]
