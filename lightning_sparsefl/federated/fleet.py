"""All clients of a run, as `init` sees them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, overload

import torch

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.seeds import generator
from lightning_sparsefl.sparse.density import Shapes, maskable, prunable
from lightning_sparsefl.sparse.parts import only, without
from lightning_sparsefl.sparse.prune import random_masks
from lightning_sparsefl.sparse.units import UnitGroup
from lightning_sparsefl.sparse.uses import EACH_ONCE, TensorUses
from lightning_sparsefl.types import ClientView, LayerFlops, Masks, Merged, Message, Weights

_MOST_LISTED = 1000


class KnowsModel(Protocol):
    """An object that holds the model."""

    @property
    def norms(self) -> frozenset[str]:
        """Names of the tensors of the model's norms."""
        ...

    @property
    def uses(self) -> TensorUses:
        """Uses of the model's parameters by its layers."""
        ...

    @property
    def units(self) -> Sequence[UnitGroup]:
        """The model's groups of units."""
        ...

    @property
    def exits(self) -> Mapping[str, str]:
        """Name of the last module of each block, and of its exit; empty for a model without early exits."""
        ...


class LazyClientViews(Sequence[ClientView]):
    """The views of many clients, each made when it is asked for.

    Args:
        clients: Numbers of the clients.
        view: Function that makes the view of a client.
    """

    def __init__(self, clients: Sequence[int], view: Callable[[int], ClientView]) -> None:
        self._clients, self._view = clients, view

    def __len__(self) -> int:
        return len(self._clients)

    @overload
    def __getitem__(self, place: int) -> ClientView: ...
    @overload
    def __getitem__(self, place: slice) -> LazyClientViews: ...
    def __getitem__(self, place: int | slice) -> ClientView | LazyClientViews:
        chosen = self._clients[place]
        return self._view(chosen) if isinstance(chosen, int) else LazyClientViews(chosen, self._view)


def names_of(data: Any) -> list[str]:
    """Return the names of the clients; empty if the data names none.

    Args:
        data: The clients' data, whose `client_names` are optional.
    """
    names = getattr(data, "client_names", None)
    return [] if names is None else list(map(str, names))


def sizes_fact(data: Any) -> list[int] | str:
    """Return the clients' numbers of training samples in short form, for comparison on resume.

    Args:
        data: The clients' data. If its `client_sizes` follow from a rule, their attribute `rule` may state it, so that
            no client needs to be asked.

    Returns:
        The sizes of up to 1,000 clients; the rule or a digest of more.
    """
    rule = getattr(getattr(data, "client_sizes", None), "rule", None)
    if data.num_clients > _MOST_LISTED and rule is not None:
        return str(rule)
    sizes = (int(data.num_examples(client)) for client in range(data.num_clients))
    if data.num_clients <= _MOST_LISTED:
        return list(sizes)
    return "digest " + hashlib.blake2b(array("q", sizes).tobytes(), digest_size=16).hexdigest()


class Fleet:
    """What an algorithm may know of all clients, and what it may ask them.

    Args:
        views: Facts of the clients that train, before round 0; a :class:`LazyClientViews` where they are many.
        buffers: Names of the model's floating-point buffers, which no mask may hold.
        device: Device of the server's weights.
        model: Object that knows the model's norms, uses of parameters, units and exits.
        survey: Asks all clients; None where none can be asked.
        clients_per_round: Number of clients of a cohort; None = all.
        execution: How units are left out of local training, `federation.execution`.
        batches: Number of batches of a client's local training; None where it is not known.
        layers: Operations of the model's layers; empty where they are not counted.
        samples: Number of samples of a client's local training; None where it is not known.
    """

    def __init__(
        self,
        views: Sequence[ClientView],
        buffers: frozenset[str],
        device: torch.device,
        model: KnowsModel | None = None,
        survey: Callable[[Message], Merged] | None = None,
        clients_per_round: int | None = None,
        execution: Literal["mask", "cut"] = "mask",
        batches: Callable[[ClientView], int] | None = None,
        layers: Sequence[LayerFlops] = (),
        samples: Callable[[ClientView], int] | None = None,
    ) -> None:
        self.layers = layers
        self.views, self.buffers, self.device = views, buffers, device
        self.seed, self.max_rounds = views[0].seed, views[0].max_rounds
        self.clients_per_round, self.execution = clients_per_round or len(views), execution
        self._model, self._survey, self._batches, self._samples = model, survey, batches, samples

    @property
    def norms(self) -> frozenset[str]:
        """Names of the parameters and buffers of the model's norms."""
        return frozenset() if self._model is None else self._model.norms

    @property
    def uses(self) -> TensorUses:
        """Uses of the model's parameters by its layers."""
        return EACH_ONCE if self._model is None else self._model.uses

    def trained(self, weights: Weights) -> Weights:
        """Return the parameters that train: no buffers, and none that the module freezes (``requires_grad=False``).

        Args:
            weights: Weights by name.
        """
        return without(weights, self.buffers | self.uses.frozen)

    def maskable(self, weights: Weights) -> tuple[str, ...]:
        """Return the names of the parameters of two or more dimensions that train, if all of them can be pruned.

        Args:
            weights: Weights by name.

        Raises:
            InvalidOption: If a parametrization, such as weight norm, computes a weight from one of them.
        """
        names = maskable(self.trained(weights))
        name = next((name for name in names if name in self.uses.computing), None)
        if name is not None:
            raise InvalidOption(
                f"`algorithm` cannot mask `{name}`, from which the parametrization `{self.uses.computing[name]}` "
                "computes a weight; remove the parametrization before training."
            )
        return names

    def prunable(self, weights: Weights, dense_layers: Sequence[str]) -> Weights:
        """Return the parameters of two or more dimensions that train and that no pattern matches.

        Args:
            weights: Weights by name.
            dense_layers: Globs over names of the layers that stay dense.

        Raises:
            InvalidOption: If a pattern matches no layer, or none is left.
        """
        return only(weights, prunable(without(weights, self.buffers), dense_layers, self.uses.frozen))

    def random_masks(self, shapes: Shapes, counts: Mapping[str, int], purpose: str) -> Masks:
        """Draw masks that depend on the seed of the run alone, on the CPU, so that they are equal on every machine.

        Args:
            shapes: Shapes by name, or tensors of these shapes.
            counts: Number of positions to keep.
            purpose: Name of the use, which has draws of its own.
        """
        drawn = random_masks(shapes, counts, generator(self.seed, purpose))
        return {name: mask.to(self.device) for name, mask in drawn.items()}

    @property
    def units(self) -> Sequence[UnitGroup]:
        """The model's groups of units.

        Raises:
            InvalidOption: If they cannot be found.
        """
        return () if self._model is None else self._model.units

    @property
    def exits(self) -> Mapping[str, str]:
        """Name of the last module of each block, and of its exit; empty for a model without early exits."""
        return {} if self._model is None else self._model.exits

    def __len__(self) -> int:
        return len(self.views)

    def batches(self, view: ClientView) -> int:
        """Return the number of batches that a client trains on in its round, over all local epochs.

        Args:
            view: Facts of the client.

        Raises:
            RuntimeError: Where it is not known.
        """
        return _known(self._batches, "batches of clients")(view)

    def samples(self, view: ClientView) -> int:
        """Return the number of samples that a client trains on in its round, each counted once in every local epoch.

        Args:
            view: Facts of the client.

        Raises:
            RuntimeError: Where it is not known.
        """
        return _known(self._samples, "samples of clients' rounds")(view)

    def survey(self, message: Message) -> Merged:
        """Ask every client a question, and merge the answers; for `init`, before round 0.

        Each client answers with the algorithm's hook `survey`. The updates are merged by their weights, with the
        clients' metrics as `reports`; a tensor that no update has keeps its initial values. The bytes are charged to
        the first round.

        Args:
            message: Message that every client receives.

        Raises:
            RuntimeError: Where no client can work.
        """
        if self._survey is None:
            raise RuntimeError("Clients cannot be asked here, since nothing is trained.")
        return self._survey(message)


def _known(count: Callable[[ClientView], int] | None, what: str) -> Callable[[ClientView], int]:
    """Return a function that counts, if there is one here."""
    if count is None:
        raise RuntimeError(f"The numbers of {what} are not known here.")
    return count
