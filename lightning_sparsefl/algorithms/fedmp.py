"""FedMP: Federated Learning through Adaptive Model Pruning in Heterogeneous Edge Computing.

Jiang, Xu, Xu, Wang, Qiao, Zhao, ICDE 2022, doi 10.1109/ICDE53745.2022.00062; Table I of FedLPS (arXiv:2412.07216).

For each participant a bandit on the server (E-UCB; see `cost/eucb.py`) chooses a pruning ratio a. The client trains the
``(1 - a) C`` units of each layer with the largest sums of absolute weights in the global model. The server puts what a
client did not train back from the global model before it averages (R2SP), which equals adding the plain mean of the
changes. A ratio is rewarded by the fall of the training loss over the distance of the client's time from the cohort's
mean, so that clients of a round come to take equally long. Clients are scored with the whole model.

Departures from the paper, of which no program is public:

- Only descriptions of the paper's pruning and of R2SP were available. The constants of the bandit (a discount of .98,
  leaves down to a width of .02) and the details of its bound are ours.
- The loss of a round is the mean of the participants' training losses in their last local epoch. The first round has no
  loss to compare with, and rewards nothing.
- Distances in time below a millisecond count as one. Times are simulated from FLOPs, bytes and the client's capacity.
- Batch norms use the statistics of the current batch and keep none, since running statistics would mix networks of
  different units.
- Under this name, the program of FedLPS (Table I) has another bandit: it explores with probability 1/m, prunes at most
  .8 of the units, and splits arms with copies of their rewards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from lightning.pytorch import LightningModule

from lightning_sparsefl.cost import Devices, eucb, narrow_facts
from lightning_sparsefl.errors import InvalidOption, check_types, require
from lightning_sparsefl.federated.aggregation.reducers import PlainMean, Reducer
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.seeds import generator
from lightning_sparsefl.sparse.masks import apply, subtract
from lightning_sparsefl.sparse.unit_tables import groups_of, unit_tables
from lightning_sparsefl.sparse.units import unit_masks
from lightning_sparsefl.sparse.width import held_units, make_norms_static, ranked_units
from lightning_sparsefl.types import ClientView, CostFacts, Costs, Merged, Message, ServerState, Shared, Update, Weights

_LEAST_SECONDS = 1e-3
"""Distance in time that counts at least, so that rewards stay finite."""


@dataclass(frozen=True, kw_only=True)
class FedMP(FederatedAlgorithm):
    """Clients train the units of largest magnitude, in a number that a bandit chooses by loss and time."""

    ratio: float | None = None
    """Fraction of the units that is pruned for every client, in [0, 1); null = the bandit's choice."""
    discount: float = 0.98
    """Factor by which a reward of the bandit counts less after each later one (lambda), in (0, 1]."""
    width: float = 0.02
    """Width of an interval of ratios, above 0, down to which the bandit splits it (theta)."""
    loss: str = "train_loss"
    """Metric of local training whose fall is rewarded; the module must log it."""
    flops_per_second: float = 727e9
    """Operations per second of a device of capacity 1; other devices have the fraction that is their capacity."""
    bytes_per_second: float = 14.9 * 2**20
    """Uplink bandwidth of every device."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        fits = self.ratio is None or 0 <= self.ratio < 1
        require(fits, "algorithm.ratio", self.ratio, "a number in [0, 1), or null")
        require(0 < self.discount <= 1, "algorithm.discount", self.discount, "a number in (0, 1]")
        require(self.width > 0, "algorithm.width", self.width, "a number above 0")
        for name in ("flops_per_second", "bytes_per_second"):
            require(getattr(self, name) > 0, f"algorithm.{name}", getattr(self, name), "a number above 0")

    @property
    def needs_metrics(self) -> bool:  # type: ignore[override]
        """Whether the ratios are the bandit's."""
        return self.ratio is None

    @property
    def _bandit(self) -> eucb.EUCBOptions:
        return eucb.EUCBOptions(discount=self.discount, width=self.width)

    def adapt(self, module: LightningModule) -> None:
        """Remove the running statistics of batch norms; no parameter is renamed."""
        make_norms_static(module)

    # ---- the server

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Store the positions of the units, from which the server makes masks."""
        return ServerState(round=0, weights=weights, extra={"units": unit_tables(fleet.units)})

    def pruned(self, view: ClientView) -> float:
        """Return the pruning ratio of a client's round; a pure function of the view, so that it can be repeated.

        Args:
            view: View of the client.
        """
        if self.ratio is not None:
            return self.ratio
        state = view.shared.get("bandit") or eucb.start()
        return eucb.choose(state, generator(view.seed, view.round, view.id, "FedMP ratio"), self._bandit)

    def download(self, server: ServerState, view: ClientView) -> Message:
        """Send the units with the largest weights of the global model."""
        kept = 1 - self.pruned(view)
        if kept == 1:
            return Message(weights=server.weights)
        groups = groups_of(server.extra["units"])
        units = ranked_units(groups, kept, "magnitude", weights=server.weights, rounding="nearest")
        masks = unit_masks(groups, units, server.weights)
        return Message(weights=apply(server.weights, masks), masks=masks)

    def download_for(self, server: ServerState, view: ClientView, task: Literal["score", "finetune"]) -> Message:
        """Send the whole model."""
        return Message(weights=server.weights)

    def reducer(self) -> Reducer:
        """Return the mean over the cohort, in which units that a client did not train count as unchanged (R2SP)."""
        return PlainMean()

    def aggregate(self, server: ServerState, merged: Merged) -> ServerState:
        """Add the mean change; note the fall of the training loss and the mean time, for the rewards."""
        after = super().aggregate(server, merged)
        if self.ratio is not None or not merged.reports:
            return after
        reports, before = [merged.reports[k] for k in sorted(merged.reports)], server.extra.get("progress", {})
        progress = {"loss": _mean([_required_metric(report, self.loss) for report in reports])}
        progress["seconds"] = _mean([_required_metric(report, "seconds") for report in reports])
        if "loss" in before:
            progress["fall"] = before["loss"] - progress["loss"]
        return replace(after, extra={**after.extra, "progress": progress})

    def observe(self, server: ServerState, view: ClientView, report: Mapping[str, float]) -> Shared | None:
        """Reward the ratio of the round by the fall of the loss over the distance from the cohort's mean time."""
        progress = server.extra.get("progress", {})
        if self.ratio is not None or "fall" not in progress:
            return None
        fall = float(progress["fall"])
        if not math.isfinite(fall):  # a loss that is not a number says nothing about the ratio
            return None
        distance = max(abs(report["seconds"] - float(progress["seconds"])), _LEAST_SECONDS)
        state = view.shared.get("bandit") or eucb.start()
        return {"bandit": eucb.learn(state, self.pruned(view), fall / distance, self._bandit)}

    def simulated_seconds(self, view: ClientView, flops: float, bytes_up: int) -> float | None:
        """Return the seconds of training and upload on a device of the client's capacity."""
        devices = Devices(flops_per_second=self.flops_per_second, bytes_per_second=self.bytes_per_second)
        return devices.seconds(view.capacity, flops, bytes_up)

    # ---- a client

    def train(self, message: Message, client: Client) -> Update:
        """Train the units of the message, and return the change."""
        kept = held_units(client.units, message.masks)
        result = client.fit(message.weights, callbacks=self.callbacks(message, client), units=kept)
        change = subtract(result.weights, message.weights)
        return Update(weights=change, kind="difference", metrics=result.metrics)

    def costs(self, facts: CostFacts) -> Costs:
        """Return the costs of the narrow network, including those of its biases."""
        return super().costs(narrow_facts(facts))


def _mean(values: list[float]) -> torch.Tensor:
    return torch.tensor(sum(values) / len(values), dtype=torch.float64)


def _required_metric(report: Mapping[str, float], name: str) -> float:
    """Return a metric of a client's report, or raise if it is missing."""
    if name in report:
        return report[name]
    remedy = (
        "set the module's `example_input_array`, so that its FLOPs and with them the times can be counted"
        if name == "seconds"
        else "log it in `training_step`, or set `algorithm.loss`"
    )
    raise InvalidOption(f"FedMP rewards pruning ratios by `{name}`, but a client reported {sorted(report)}; {remedy}.")
