"""The options of a federation, the CLI group `federation`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from lightning_sparsefl.cost import Availability, Devices
from lightning_sparsefl.errors import InvalidOption, check_types, is_whole, require
from lightning_sparsefl.federated.aggregation.privacy import Privacy
from lightning_sparsefl.federated.aggregation.reducers import Reducer
from lightning_sparsefl.federated.aggregation.server_optimizer import ServerOptimizer
from lightning_sparsefl.federated.sampling.samplers import CohortSampler, Uniform
from lightning_sparsefl.seeds import generator

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Federation:
    """Options of the federation: sampling of clients, local training, aggregation, evaluation and storage."""

    clients_per_round: int = 10
    """Number of clients in the cohort of a round."""
    sampler: CohortSampler | None = None
    """Rule for sampling the cohort; null = `Uniform`: without replacement, from the seed and the round; with `privacy`,
    from its secret key. See docs/scaling.md."""
    devices: Devices | None = None
    """Devices of the clients, whose times are logged as ``time/simulated`` and known to samplers; null = time is not
    simulated. A method that simulates time itself, such as FedLPS, keeps its own devices."""
    availability: Availability | None = None
    """Times at which clients can be drawn, as `intervals` of the simulated clock that repeat after a `period`; null =
    always. Fewer lists than clients are spread over the clients like `capacities`. It requires `devices`, or a method
    that simulates time, such as FedLPS."""
    capacities: list[float] | None = None
    """Fraction of the full model that each client can train, in (0, 1]; null = 1 for all clients. Fewer numbers than
    clients are levels: each applies to a block of clients, of equal sizes up to one client. With ``[0.125, 1]``, the
    first half of the clients has the capacity 0.125."""
    shuffle_capacities: bool = False
    """Whether the capacities are assigned in random order, from the seed, instead of in the order of the clients;
    `local_epochs` and `availability` then follow the same order, also without `capacities`."""
    redraw_capacities: bool = False
    """Whether each client's capacity is drawn from the numbers of `capacities` in every round anew, all equally likely,
    from the seed, instead of fixed for the run. A client is scored with its capacity of the next round."""
    local_epochs: list[int | list[int]] | None = None
    """Number of local epochs of each client, spread over the clients like `capacities`; null = `trainer.max_epochs` for
    all. With a pair ``[low, high]`` instead of a number, the client's number is drawn from `low` to `high`, both
    included, in every round, from the seed."""
    redraw_local_epochs: bool = False
    """Whether each client's entry of `local_epochs` is drawn in every round anew, all equally likely, from the seed,
    instead of fixed for the run. With nine pairs ``[1, 19]`` and a 20, about 9 of 10 participants are stragglers."""
    eval_clients: int | Literal["all"] = "all"
    """Number of clients in an evaluation; a random sample of that size, the same in every round, or all clients."""
    unseen_clients: int = 0
    """Number of randomly chosen clients that never train; their scores are logged as ``unseen/*``."""
    eval_after_training: bool = False
    """Whether the participants of an evaluated round are also evaluated directly after their local training, as
    ``personal_after/*``."""
    select: str | None = None
    """Key of a score, such as ``global/val_acc``: clients are fine-tuned from the round with its best value; null =
    from the last round. Lower is better for names with ``loss``, ``error`` and the like, and for ``_std``. With
    `data.eval_split: test`, the validation sets are evaluated as well for their keys."""
    execution: Literal["mask", "cut"] = "mask"
    """How a client excludes units of the model from training: by multiplying them by zero, or by removing them, which
    takes less time and gives equal weights up to rounding. It has no effect on masks over single weights."""
    finetune_epochs: int = 0
    """Number of epochs of each client's final fit after the last round, for methods without their own fine-tuning."""
    monitor: str = "train_acc"
    """Metric of local training that methods use, such as the bandit of FedLPS; the module must log it."""
    local_engine: Literal["auto", "fast", "trainer", "stacked"] = "auto"
    """Engine of local training: `fast`, which trains clients one after another, with the bits of a real Lightning
    `Trainer`; `trainer`, which is one; `stacked`, which trains and scores several clients of a small model as one
    batched computation, with results equal up to rounding; or `auto`: on a CPU or a CUDA device `stacked` where it is
    expected to be faster, else `fast` wherever its results are known to be equal to those of a Trainer."""
    stack_size: int | Literal["auto"] = "auto"
    """Largest number of clients that are trained, and that are scored, as one stack; 1 = one after another; auto = from
    the sizes of the model, of the batch and of the cohort."""
    record_steps: bool = True
    """Whether a stack repeats the operations of its training, validation and test steps without calling the module for
    each batch, once the same shapes have occurred a few times. Weights and scores are the same; turn it off for a step
    with effects outside of torch, such as `print`."""
    on_client_error: Literal["raise", "skip"] = "raise"
    """Whether a failure of a client's local work ends the run, or its round is merged, and its evaluation goes on,
    without the client."""
    min_clients: int = 1
    """Minimum number of clients to merge a round from, with `on_client_error: skip`."""
    client_timeout: float | None = None
    """Maximum duration of a client's round in seconds, after which the client has failed; null = no limit. It is
    checked between batches, so a step that hangs is ended by `trainer.timeout` only. Clients with a limit train one
    after another. With `skip`, a run that depends on the clock is not reproducible."""
    placement: Literal["static", "dynamic"] = "static"
    """Placement of clients on ranks: planned in advance, longest first, by the clients' last FLOPs and the measured
    speed of each rank; or dynamic: each free rank takes the longest remaining client. The weights are the same."""
    workers_per_device: int = 1
    """Number of ranks per device, for models so small that one client does not use it fully; on a CPU, processes."""
    buffers: Literal["average", "local", "server"] = "average"
    """Whether floating-point buffers, such as running means, are averaged by samples, kept by each client, or never
    changed on the server. Clients of FedP3, Hermes and SpaFL keep theirs with their own weights in any case."""
    reducer: Reducer | None = None
    """Rule for merging updates: `CoverageMedian`, `TrimmedMean`, `PlainMean` or `CoverageMean`; null = that of the
    method. Methods whose equations require another rule than `CoverageMean` do not allow a change."""
    server_optimizer: ServerOptimizer | None = None
    """Optimizer that makes the server's step of the clients' mean change, with `rule`, `lr` and others, for any method
    but FedOpt and FLASC, which have their own; null = the server takes the mean. See docs/merging.md."""
    clip_update: float | None = None
    """Maximum Euclidean norm of a client's change, over the parameters that it votes on; a longer update is scaled down
    before it is sent, as a difference. null = no clipping."""
    privacy: Privacy | None = None
    """Differential privacy of clients, with `noise_multiplier`, `delta` and `key_file`; requires `clip_update`, and a
    method whose updates consist of weights only. ``privacy/epsilon`` is logged. See docs/merging.md."""
    wire: Literal["count", "encode"] = "count"
    """Whether the exact sizes of messages are only computed, or messages are encoded and decoded."""
    store: Literal["ram", "disk"] = "ram"
    """Storage of the records of clients between rounds: in the memory of the ranks, or in databases in the run folder,
    which all ranks must be able to access. On disk, memory depends on the size of the cohort instead of the number of
    clients that ever trained."""
    checkpoint_every_n_rounds: int = 1
    """Number of rounds between two commits of `checkpoints/last.ckpt`; the last round is always committed."""
    pictures_every_n_rounds: int = 10
    """Number of rounds between two sets of pictures in TensorBoard and of overlaps of masks in overlap.csv, which the
    last round always has; 0 = no pictures, and overlaps of the last round only."""

    def __post_init__(self) -> None:
        check_types(self, "federation.")
        least = {"unseen_clients": 0, "finetune_epochs": 0, "pictures_every_n_rounds": 0}
        least |= dict.fromkeys(
            ("clients_per_round", "min_clients", "checkpoint_every_n_rounds", "workers_per_device"), 1
        )
        for name, smallest in least.items():
            value = getattr(self, name)
            require(is_whole(value, smallest), f"federation.{name}", value, f"a whole number >= {smallest}")
        timeout, scored = self.client_timeout, self.eval_clients
        fits = timeout is None or 0 < timeout < math.inf
        require(fits, "federation.client_timeout", timeout, "a number of seconds above 0, or null")
        require(
            scored == "all" or is_whole(scored, 1), "federation.eval_clients", scored, "'all' or a whole number >= 1"
        )
        size = self.stack_size
        require(size == "auto" or is_whole(size, 1), "federation.stack_size", size, "'auto' or a whole number >= 1")
        fits = all(0 < capacity <= 1 for capacity in self.capacities or [])
        require(fits, "federation.capacities", self.capacities, "numbers in (0, 1]")
        epochs = self.local_epochs
        fits = epochs is None or (isinstance(epochs, list | tuple) and all(map(_is_range, epochs)))
        expected = "whole numbers >= 1, or pairs [low, high] of them"
        require(fits, "federation.local_epochs", self.local_epochs, expected)
        if self.redraw_capacities:
            expected = "a list of levels to draw from with `federation.redraw_capacities`"
            require(bool(self.capacities), "federation.capacities", self.capacities, expected)
        if self.redraw_local_epochs:
            expected = "a list to draw from with `federation.redraw_local_epochs`"
            require(bool(epochs), "federation.local_epochs", epochs, expected)
        self._check_merge()

    def _check_merge(self) -> None:
        fits = self.clip_update is None or 0 < self.clip_update < math.inf
        require(fits, "federation.clip_update", self.clip_update, "a number above 0, or null")
        if self.privacy is None:
            return
        if self.clip_update is None:
            raise InvalidOption(
                "`federation.privacy` is set and `federation.clip_update` is not; expected a norm above 0, since the "
                "noise is calibrated to updates of at most that norm."
            )
        expected = "null with `federation.privacy`, whose noise is added to a sum"
        require(self.reducer is None, "federation.reducer", self.reducer, expected)
        expected = "null with `federation.privacy`, whose epsilon assumes uniform cohorts"
        require(self.sampler in (None, Uniform()), "federation.sampler", self.sampler, expected)
        require(self.availability is None, "federation.availability", self.availability, expected)

    def check_fleet(self, num_clients: int) -> None:
        """Raise :class:`InvalidOption` if the options do not fit the number of clients.

        Args:
            num_clients: Number of clients of the data.
        """
        training = num_clients - self.unseen_clients
        expected = f"at most {num_clients - 1}, so that one of the data's {num_clients} clients is left to train"
        require(training > 0, "federation.unseen_clients", self.unseen_clients, expected)
        if self.clients_per_round > training:
            held_out = f", {self.unseen_clients} of them unseen" if self.unseen_clients else ""
            unchanged = " (the default)" if self.clients_per_round == type(self).clients_per_round else ""
            raise InvalidOption(
                f"`federation.clients_per_round` is {self.clients_per_round}{unchanged}, but the data has "
                f"{num_clients} clients{held_out}; lower it to {training} or less."
            )
        expected = f"at most `federation.clients_per_round`, {self.clients_per_round}"
        require(self.min_clients <= self.clients_per_round, "federation.min_clients", self.min_clients, expected)
        for name, listed in (("capacities", self.capacities), ("local_epochs", self.local_epochs)):
            if listed is not None and not 0 < len(listed) <= num_clients:
                raise InvalidOption(
                    f"`federation.{name}` has {len(listed)} numbers; expected one for each of the {num_clients} "
                    "clients, or fewer, which are spread over the clients."
                )
        if self.availability is not None:
            lists, expected = self.availability.intervals, f"at most one list for each of the {num_clients} clients"
            require(len(lists) <= num_clients, "federation.availability.intervals", lists, expected)

    def fleet_capacities(self, num_clients: int, seed: int) -> Blocks[float]:
        """Return the capacities of all clients, in (0, 1].

        Args:
            num_clients: Number of clients of the data.
            seed: Random seed of the run, used with `shuffle_capacities`.

        Example:
            >>> capacities = Federation(capacities=[0.25, 1.0]).fleet_capacities(4, seed=0)
            >>> [capacities[client] for client in range(4)]
            [0.25, 0.25, 1.0, 1.0]
        """
        levels = [1.0] if self.capacities is None else self.capacities
        return Blocks(levels, num_clients, self._places(num_clients, seed))

    def fleet_epochs(self, num_clients: int, seed: int) -> Blocks[tuple[int, int]] | None:
        """Return the smallest and the largest number of local epochs of all clients; None = `trainer.max_epochs`.

        Args:
            num_clients: Number of clients of the data.
            seed: Random seed of the run, used with `shuffle_capacities`.

        Example:
            >>> epochs = Federation(local_epochs=[4, [1, 2]]).fleet_epochs(4, seed=0)
            >>> [epochs[client] for client in range(4)]
            [(4, 4), (4, 4), (1, 2), (1, 2)]
        """
        if self.local_epochs is None:
            return None
        ranges = [(entry, entry) if isinstance(entry, int) else (entry[0], entry[1]) for entry in self.local_epochs]
        return Blocks(ranges, num_clients, self._places(num_clients, seed))

    def fleet_intervals(self, num_clients: int, seed: int) -> Blocks[Sequence[Sequence[float]]] | None:
        """Return the intervals in which the clients are available; None = always.

        Args:
            num_clients: Number of clients of the data.
            seed: Random seed of the run, used with `shuffle_capacities`.
        """
        if self.availability is None:
            return None
        return Blocks(self.availability.intervals, num_clients, self._places(num_clients, seed))

    def _places(self, num_clients: int, seed: int) -> Tensor | None:
        """Return the clients' positions in a random order, or None."""
        return torch.randperm(num_clients, generator=generator(seed, "capacities")) if self.shuffle_capacities else None


@dataclass(frozen=True)
class Blocks(Generic[_T]):
    """Mapping from the number of a client to the level of its block of clients, computed on access."""

    levels: Sequence[_T]
    """Levels of the blocks of clients."""
    num_clients: int
    """Number of clients."""
    places: Tensor | None = None
    """Positions of the clients in a random order, int64 of shape (clients,); None = in the order of their numbers."""

    def __len__(self) -> int:
        return self.num_clients

    def __getitem__(self, client: int) -> _T:
        if not 0 <= client < self.num_clients:
            raise IndexError(client)
        place = client if self.places is None else int(self.places[client])
        return self.levels[place * len(self.levels) // self.num_clients]


def _is_range(entry: Any) -> bool:
    """Return whether an entry of `local_epochs` is a number, or a pair of numbers in ascending order."""
    if not isinstance(entry, list | tuple):
        return is_whole(entry, 1)
    return len(entry) == 2 and is_whole(entry[0], 1) and is_whole(entry[1], entry[0])
