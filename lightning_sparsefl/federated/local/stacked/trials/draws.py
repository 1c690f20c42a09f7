"""Random numbers of a training step in a trial: those of a client are the same alone and in a stack."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from lightning_sparsefl.federated.local.stacked.logs import NotStackable
from lightning_sparsefl.federated.local.stacked.states.findings import Findings
from lightning_sparsefl.seeds import derive_seed, seed_all
from lightning_sparsefl.sparse.attributes import attributes_replaced


class DrawsNumbers(NotStackable):
    """A training step draws random numbers of torch, which are others in a stack than those of a client alone."""


@contextmanager
def drawing_nothing(*key: int | str) -> Iterator[None]:
    """Raise :class:`DrawsNumbers` if a stack draws random numbers of torch within the context, without dropout.

    Args:
        key: Key by which the stack seeds the generators.
    """
    seed_all(*key)
    before = torch.get_rng_state()
    yield
    if not torch.equal(torch.get_rng_state(), before):
        raise DrawsNumbers("draws random numbers of torch, which are others than those of a client alone")


@contextmanager
def drawing_by_client(module: LightningModule, clients: Sequence[int]) -> Iterator[None]:
    """Let the training step draw numbers within the context that depend on the client and on what it has drawn.

    Args:
        module: Module of the user.
        clients: Numbers of the clients that step together.
    """
    step, draws = module.training_step, _ClientDraws(clients)

    @functools.wraps(step)
    def training_step(*args: Any, **kwargs: Any) -> Any:
        with draws:
            return step(*args, **kwargs)

    with attributes_replaced(module, {"training_step": training_step}):
        yield


def drawing_as_found(module: LightningModule, findings: Findings, *clients: int) -> AbstractContextManager[None]:
    """Return the context of :func:`drawing_by_client`, or one that does nothing if the step is not known to draw.

    Args:
        module: Module of the user.
        findings: Findings about its step.
        *clients: Numbers of the clients that step together.
    """
    return drawing_by_client(module, clients) if findings.draws else nullcontext()


class _ClientDraws(TorchDispatchMode):
    """Seeds each operation that draws numbers by the client, its name and shapes, and how often it was done.

    In a stack these operations have the clients in the first dimension of their tensors and sizes, since the rules of
    ``vmap`` put it there; without either, they are done for one client after another. What is neither draws other
    numbers than a client alone, so that the trial finds a difference.

    Args:
        clients: Numbers of the clients that step together.
    """

    def __init__(self, clients: Sequence[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._clients = clients
        self._done = Counter[Hashable]()

    def __enter__(self) -> _ClientDraws:
        """Begin a step."""
        self._done.clear()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do an operation."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        count = len(self._clients)
        if count == 1:
            return self._draw(func, self._clients[0], args, kwargs)
        rows = [_row(func, place, count, args) for place in range(count)]
        if rows[0] is None:
            turn = self._done[func]
            self._done[func] += 1
            return self._draw(func, self._clients[turn % count], args, kwargs)
        drawn = [self._draw(func, client, row, kwargs) for client, row in zip(self._clients, rows, strict=True)]
        return args[0] if func._schema.is_mutable else tree_map(lambda *each: torch.stack(each), *drawn)

    def _draw(self, func: OpOverload, client: int, args: Any, kwargs: Any) -> Any:
        key = (client, func._schema.name.removesuffix("_"), repr(list(_shapes(func, args))))
        self._done[key] += 1
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            torch.manual_seed(derive_seed(*key, self._done[key]))
            return func(*args, **kwargs)


def _row(func: OpOverload, place: int, count: int, args: Sequence[Any]) -> list[Any] | None:
    """Return the arguments of one client out of those of all; None if they do not have the clients as rows."""
    shapes, row = dict(_shapes(func, args)), list(args)
    if not shapes or any(shape[:1] != [count] for shape in shapes.values()):
        return None
    for at, shape in shapes.items():
        row[at] = args[at][place] if isinstance(args[at], Tensor) else shape[1:]
    return row


def _shapes(func: OpOverload, args: Sequence[Any]) -> Iterator[tuple[int, list[int]]]:
    """Iterate over the places and shapes of the tensors among the arguments, and of the size of a new one."""
    for at, (argument, value) in enumerate(zip(func._schema.arguments, args, strict=False)):
        if isinstance(value, Tensor) or argument.name == "size":
            yield at, list(value.shape if isinstance(value, Tensor) else value)
