"""The options of a federation, the CLI group `federation`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.aggregation.privacy import Privacy
from lightning_sparsefl.federated.aggregation.reducers import Reducer
from lightning_sparsefl.seeds import generator


def check_choices(options: Any, prefix: str) -> None:
    """Raise :class:`InvalidOption` where a field whose type lists its values has another one.

    Args:
        options: A dataclass; Python code can hand it anything.
        prefix: Of the fields' names in the sentence.
    """
    for name, hint in get_type_hints(type(options)).items():
        choices = get_args(hint) if get_origin(hint) is Literal else ()
        if choices and getattr(options, name) not in choices:
            listed = ", ".join(repr(choice) for choice in choices)
            raise InvalidOption(f"`{prefix}{name}` is {getattr(options, name)!r}; expected one of {listed}.")


@dataclass(frozen=True, kw_only=True)
class Federation:
    """Who trains, what travels, and what happens when a client fails."""

    clients_per_round: int = 10
    """Clients in a round's cohort."""
    sampler: Literal["uniform"] = "uniform"
    """How the cohort is drawn: uniformly without replacement, from the seed and the round."""
    capacities: list[float] | None = None
    """Share of the full model that each client can train, in (0, 1]; none for all 1. Fewer numbers than clients go to
    blocks of equal size: ``[0.125, 1]`` makes the first half of the clients weak."""
    shuffle_capacities: bool = False
    """Whether the capacities are dealt by chance, from the seed, instead of in the order of the clients."""
    eval_clients: int | Literal["all"] = "all"
    """How many clients an evaluation scores; a number draws that many, the same ones in every round."""
    unseen_clients: int = 0
    """How many clients never train, by one fixed draw; they are scored as ``unseen/*``."""
    eval_after_training: bool = False
    """Whether participants of an evaluated round are also scored right after their local training, as
    ``personal_after/*``."""
    select: str | None = None
    """A scored key, such as ``global/val_acc``: clients are fine-tuned from the round where it was best; none = from
    the last round. With `data.eval_split: test`, keys of the validation sets are scored for it."""
    execution: Literal["mask", "cut"] = "mask"
    """How a client trains some of the model's units: the others are multiplied by zero, or really cut out, which takes
    less time and gives the same weights up to rounding. Methods with masks over single weights do not care."""
    finetune_epochs: int = 0
    """Epochs of each client's last fit, of all it is scored with, where the method has no fine-tuning of its own."""
    monitor: str = "train_acc"
    """The metric of local training that methods steer by, such as FedLPS's bandit; the module must log it."""
    local_engine: Literal["auto", "fast", "trainer"] = "auto"
    """The client loop: ours, a real Lightning `Trainer`, or ours where it is known to give equal results."""
    on_client_error: Literal["raise", "skip"] = "raise"
    """Whether a client whose local work fails ends the run, or is left out of the round."""
    min_clients: int = 1
    """With `skip`: the fewest clients a round may be merged from."""
    client_timeout: float | None = None
    """Seconds by the clock that a client's round may take, above which the client has failed; none = no limit. Looked
    at between batches, so a step that hangs is ended by `trainer.timeout` at best; with `skip` a run that depends on
    the clock does not repeat itself."""
    placement: Literal["static", "dynamic"] = "static"
    """How clients are given to ranks: planned, the longest first, by the FLOPs they were charged last and the speed
    that each rank has shown; or whoever is free takes the longest one left. The weights are the same."""
    workers_per_device: int = 1
    """Ranks on each device, for models so small that one client leaves it idle; on a CPU, processes."""
    buffers: Literal["average", "local", "server"] = "average"
    """Floating-point buffers such as running means: averaged by samples, kept by each client, or never changed."""
    reducer: Reducer | None = None
    """How updates are merged: `CoverageMedian`, `TrimmedMean`, `PlainMean` or `CoverageMean`; none = as the method
    says. A method whose equations name another than `CoverageMean` refuses a change."""
    clip_update: float | None = None
    """Largest Euclidean norm of what a client changes, over the parameters that it votes on; a longer update is scaled
    down before it is sent, as a difference. None = not clipped."""
    privacy: Privacy | None = None
    """Differential privacy of clients, as `noise_multiplier`, `delta` and `key_file`; needs `clip_update`, and a method
    whose updates are weights alone. ``privacy/epsilon`` is logged. See docs/merging.md."""
    wire: Literal["count", "encode"] = "count"
    """Whether messages are only measured, exactly, or really encoded and decoded on their way."""
    store: Literal["ram", "disk"] = "ram"
    """Where what is kept per client lies between rounds: in the memory of every rank, or in one file of the run folder,
    which all ranks must see. On disk memory grows with the cohort, not with the number of clients that ever trained."""
    checkpoint_every_n_rounds: int = 1
    """Rounds between two commits of `checkpoints/last.ckpt`; the last round is always committed."""
    pictures_every_n_rounds: int = 10
    """Rounds between two pictures in TensorBoard; the last round always has them, 0 is never."""

    def __post_init__(self) -> None:
        check_choices(self, "federation.")
        for name in ("unseen_clients", "finetune_epochs"):
            if getattr(self, name) < 0:
                raise InvalidOption(f"`federation.{name}` is {getattr(self, name)}; expected a whole number >= 0.")
        for name in ("clients_per_round", "min_clients", "checkpoint_every_n_rounds", "workers_per_device"):
            if getattr(self, name) < 1:
                raise InvalidOption(f"`federation.{name}` is {getattr(self, name)}; expected a whole number >= 1.")
        if self.client_timeout is not None and not self.client_timeout > 0:
            raise InvalidOption(
                f"`federation.client_timeout` is {self.client_timeout}; expected a number of seconds above 0, or none."
            )
        if self.pictures_every_n_rounds < 0:
            raise InvalidOption(
                f"`federation.pictures_every_n_rounds` is {self.pictures_every_n_rounds}; expected >= 0."
            )
        if isinstance(self.eval_clients, int) and self.eval_clients < 1:
            raise InvalidOption(f"`federation.eval_clients` is {self.eval_clients}; expected 'all' or a number >= 1.")
        if any(not 0 < capacity <= 1 for capacity in self.capacities or []):
            raise InvalidOption(f"`federation.capacities` is {self.capacities}; expected numbers in (0, 1].")

        self._check_merge()

    def _check_merge(self) -> None:
        if self.clip_update is not None and not 0 < self.clip_update < math.inf:
            raise InvalidOption(f"`federation.clip_update` is {self.clip_update}; expected a number above 0, or null.")
        if self.privacy is None:
            return
        if self.clip_update is None:
            raise InvalidOption(
                "`federation.privacy` is set and `federation.clip_update` is not; expected a norm above 0, since the "
                "noise hides no more than an update of that norm."
            )
        if self.reducer is not None:
            raise InvalidOption(
                f"`federation.reducer` is {self.reducer}; expected null with `federation.privacy`, whose noise is "
                "that of a sum."
            )

    def check_fleet(self, num_clients: int) -> None:
        """Raise :class:`InvalidOption` where the options do not fit the number of clients."""
        training = num_clients - self.unseen_clients
        if self.clients_per_round > training:
            held_out = f", {self.unseen_clients} of them unseen" if self.unseen_clients else ""
            raise InvalidOption(
                f"`federation.clients_per_round` is {self.clients_per_round}, but the data has {num_clients} "
                f"clients{held_out}; lower it, or raise `data.num_clients`."
            )
        if self.min_clients > self.clients_per_round:
            raise InvalidOption(
                f"`federation.min_clients` is {self.min_clients}; expected at most `federation.clients_per_round`, "
                f"{self.clients_per_round}."
            )
        if self.capacities is not None and (not self.capacities or num_clients % len(self.capacities)):
            raise InvalidOption(
                f"`federation.capacities` has {len(self.capacities)} numbers; expected one for each of the "
                f"{num_clients} clients, or for each of several blocks of equal size."
            )

    def fleet_capacities(self, num_clients: int, seed: int) -> Capacities:
        """Capacity of each client, in (0, 1].

        Args:
            num_clients: Of the data.
            seed: Of the run, where they are dealt by chance.

        Example:
            >>> capacities = Federation(capacities=[0.25, 1.0]).fleet_capacities(4, seed=0)
            >>> [capacities[client] for client in range(4)]
            [0.25, 0.25, 1.0, 1.0]
        """
        places = torch.randperm(num_clients, generator=generator(seed, "capacities")) if self.deals_by_chance else None
        levels = [1.0] if self.capacities is None else self.capacities
        return Capacities(levels, num_clients // len(levels), places)

    @property
    def deals_by_chance(self) -> bool:
        """Whether clients have different capacities in an order that chance decides."""
        return self.shuffle_capacities and self.capacities is not None


@dataclass(frozen=True)
class Capacities:
    """Capacity of each client by its number, found when it is asked for."""

    levels: Sequence[float]
    """Of the blocks of clients."""
    block: int
    """Clients of each block."""
    places: Tensor | None = None
    """Where capacities are dealt by chance: the place of each client, int64 of shape (clients,)."""

    def __getitem__(self, client: int) -> float:
        return self.levels[(client if self.places is None else int(self.places[client])) // self.block]
