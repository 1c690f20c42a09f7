"""FedLPS: Learnable Sparse Customization in Heterogeneous Edge Computing.

Xue, Sun, Liu, Wang, Liu, Wang, arXiv:2412.07216. Equations and tables are numbered as there.

Each client trains a part of the units (channels, neurons, hidden states) of the common model: as many as its density s
says, which a bandit chooses for it within its capacity (P-UCBV, section 4; see `cost.pucbv`), and those of the largest
scores Q, which it keeps and trains with the weights on ``task(w M) + mu ||w - w_r||^2 + lambda ||Q - sigma(|w|)||^2``
(eqs. 6 to 11). It uploads its change of the kept weights (eq. 12), and the server adds their mean by samples (eq. 13).

Departures. The authors' code was read, not copied; it does not train the scores: its mask is no function of them, they
are drawn anew in every round, and what pulls them is the same for all units.

- The step that turns scores into a mask has no gradient; scores are taken as gates on the units' outputs, straight
  through, and dropped units get theirs from one batch with all units there (`probe`), whose FLOPs are charged.
- Scores start as ``sigmoid(|w| / layer mean)`` of the weights that a client receives first, and are tied to that: the
  sum of the paper is near 1 for every unit of a wide layer.
- A dropped unit loses its bias, its norm and its readers' incoming slices too, so that it really can be cut out
  (`federation.execution: cut`, with `refresh: round`). ``flops/paper`` counts outgoing rows only and the last batch in
  full, as Tables I and II do; ``flops/train`` counts what is left. Bytes count the pattern, the paper's do not.
- Exactly ``max(floor(s J + .5), 1)`` of a layer's J units are kept; the code keeps one less, or none. The units of the
  last step are kept and uploaded, not those of the scores after it, which may not have been trained.
- The server adds no noise, and clients that were never drawn are scored with the common model under their first mask.
- The bandit's logarithm is never negative, and arms that were never pulled come first.

The defaults are those that the paper prints, mu = lambda = 1 on sums of squares. At a learning rate of .1 they take a
fifth of a client's change back in every step; the authors' code leaves the pull towards the received weights out and
averages the other term. `reduction: mean` is close to that. Their code also draws densities below .5 for a lower
capacity alone, trains on batches of 5, and scores clients of density 1/4 or less with the dense common model; measured
differences are in docs/results.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from lightning_sparsefl.callbacks import LearnedImportance, ProximalTerm
from lightning_sparsefl.callbacks.learned_importance import blind_ranking
from lightning_sparsefl.callbacks.unit_scores import ScoreSteps, UnitScores
from lightning_sparsefl.cost import Devices, forward_flops, pucbv
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.aggregation.reducers import PlainMean, Reducer
from lightning_sparsefl.federated.algorithm import BYTES_PER_WEIGHT, FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.evaluation.scores import higher_is_better
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.federated.options import check_choices
from lightning_sparsefl.seeds import derive_seed, generator
from lightning_sparsefl.sparse.importance import gate_gradients, relative
from lightning_sparsefl.sparse.masks import add, apply, counts, subtract
from lightning_sparsefl.sparse.submodel import narrow, widen
from lightning_sparsefl.sparse.units import UnitGroup, keep_units, unit_counts, unit_masks, unit_norms
from lightning_sparsefl.types import (
    ClientView,
    CostFacts,
    Costs,
    FitResult,
    Masks,
    Message,
    ServerState,
    Shared,
    Update,
    Weights,
)


@dataclass(frozen=True, kw_only=True)
class FedLPS(FederatedAlgorithm):
    """A client trains the units that its own scores choose, as many as its own bandit chooses."""

    fixed_length = True

    ratio: Literal["bandit", "fixed", "capacity"] = "bandit"
    """What a client's density is: the bandit's choice, `density` whatever the client's capacity (the paper's FLST), or
    its capacity (RCR)."""
    density: float = 0.5
    """With `ratio: fixed`: fraction of each layer's units that is trained, in (0, 1]."""
    pattern: Literal["learned", "magnitude", "ordered", "random", "rolling"] = "learned"
    """Which units are kept: those of the largest scores, those of the largest weights, the first ones, drawn ones, or
    a window that moves on by a unit in every round."""
    refresh: Literal["step", "round"] = "step"
    """When learned and magnitude patterns change: before every step (the paper), or once a round."""
    probe: bool = True
    """Whether dropped units get a gradient at the start of a round."""
    score_lr: float = 0.1
    """Learning rate of the scores."""
    score_strength: float = 1.0
    """Strength of the term that ties scores and magnitudes (lambda)."""
    mu: float = 1.0
    """Strength of the pull towards the received weights."""
    reduction: Literal["sum", "mean"] = "sum"
    """Whether both terms are sums of squares, or means over all units and all weights."""
    dynamic: bool = False
    """Whether a client draws its capacity anew in every round, from 1, 1/2, 1/4, 1/8, 1/16 (Dyn); else it is that of
    `federation.capacities` (Fix)."""
    flops_per_second: float = 727e9
    """Of a device of capacity 1; the others have their share of it."""
    bytes_per_second: float = 14.9 * 2**20
    """Uplink of every device."""
    alpha: float = 1.0
    """Weight of the upload in a client's time."""
    arms: int = 5
    """Parts of (0, 1] that the bandit starts from (I_0)."""
    rho: float = 0.5
    """Weight of the bandit's bonus for what is little known."""
    drop: float = 0.05
    """By how much, in [0, 1], accuracy must fall for lower densities to be given up (-Delta)."""

    def __post_init__(self) -> None:
        check_choices(self, "algorithm.")
        if not 0 < self.density <= 1:
            raise InvalidOption(f"`FedLPS(density={self.density})`: expected a number in (0, 1].")
        for name in ("score_lr", "score_strength", "mu", "rho", "drop"):
            if not getattr(self, name) >= 0:
                raise InvalidOption(f"`FedLPS({name}={getattr(self, name)})`: expected a number >= 0.")
        if self.arms < 1:
            raise InvalidOption(f"`FedLPS(arms={self.arms})`: expected a whole number >= 1.")
        self._devices()

    @property
    def _changes_in_training(self) -> bool:
        return self.refresh == "step" and self.pattern in ("learned", "magnitude")

    def _devices(self) -> Devices:
        return Devices(
            dynamic=self.dynamic,
            flops_per_second=self.flops_per_second,
            bytes_per_second=self.bytes_per_second,
            alpha=self.alpha,
        )

    # ---- the server

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Note how long a run is for one client (the bandit's xi).

        Raises:
            InvalidOption: If units that change before every step should be cut out, or the bandit's metric is better
                when it is lower.
        """
        monitor = fleet.views[0].monitor
        if self.ratio == "bandit" and not higher_is_better(monitor):
            raise InvalidOption(
                f"`federation.monitor` is {monitor!r}, which falls as a model gets better, but FedLPS' bandit rewards "
                "what rises; expected an accuracy, such as 'train_acc'."
            )
        if fleet.execution == "cut" and self._changes_in_training:
            raise InvalidOption(
                f"`federation.execution: cut` trains the same units for a round, but `FedLPS(pattern={self.pattern!r}, "
                "refresh='step')` changes them before every step; set `algorithm.refresh: round`."
            )
        often = torch.tensor([fleet.max_rounds / fleet.clients_per_round])
        return ServerState(round=0, weights=weights, extra={"bandit": {"xi": often}})

    def download(self, server: ServerState, view: ClientView) -> Message:
        """The whole model, and the density to train at."""
        density = torch.tensor(self._density(server, view))
        return Message(weights=server.weights, extra={"units": {"density": density}})

    def _density(self, server: ServerState, view: ClientView) -> float:
        """Of a client's round; a function of what the server knows, so that it can be asked again."""
        if self.ratio == "fixed":
            return self.density
        capacity, options = self._devices().capacity(view), self._bandit(server)
        if self.ratio == "capacity":
            return capacity
        state = view.shared.get("bandit") or pucbv.start(options)
        return pucbv.choose(state, capacity, generator(view.seed, view.round, view.id, "density"), options)

    def _bandit(self, server: ServerState) -> pucbv.Options:
        xi = float(server.extra["bandit"]["xi"])
        return pucbv.Options(arms=self.arms, rho=self.rho, xi=xi, drop=self.drop)

    def reducer(self) -> Reducer:
        """Eq. 13: what a client did not train counts as unchanged."""
        return PlainMean()

    def seconds(self, view: ClientView, flops: float, bytes_up: int) -> float | None:
        """Of computing and uploading, on a device of the client's capacity."""
        return self._devices().seconds(self._devices().capacity(view), flops, bytes_up)

    def observe(self, server: ServerState, view: ClientView, report: Mapping[str, float]) -> Shared | None:
        """Reward the density that was tried."""
        if self.ratio != "bandit":
            return None
        options, capacity = self._bandit(server), self._devices().capacity(view)
        state = view.shared.get("bandit") or pucbv.start(options)
        accuracy, before = _known(report, view.monitor, view.monitor), state["accuracy"]
        before = _known(report, _first(view.monitor), view.monitor) if before is None else before
        tried, seconds = self._density(server, view), report["seconds"]
        return {"bandit": pucbv.learn(state, capacity, tried, accuracy, before, seconds, options)}

    # ---- a client

    def train(self, message: Message, client: Client) -> Update:
        """Train the client's part of the model, and which part it is."""
        density, first = float(message.extra["units"]["density"]), {}
        if self.ratio == "bandit" and not client.shared:
            scored = client.evaluate({}, "train")
            first = {_first(client.monitor): v for n, v in scored.items() if n == _as_validated(client.monitor)}
        scores = self._scores(message.weights, client) if self.pattern == "learned" else {}
        if self._changes_in_training:
            result, kept, scores = self._fit_and_choose(message, client, density, scores)
        else:
            result, kept, scores = self._choose_and_fit(message, client, density, scores)
        votes = unit_masks(client.units, kept, message.weights)
        return Update(
            weights=apply(subtract(result.weights, message.weights), votes),
            kind="difference",
            weight=client.num_examples,
            votes=votes,
            memory={"weights": narrow(result.weights, client.units, kept), "kept": kept, "scores": scores},
            metrics={**result.metrics, **first},
        )

    def _scores(self, weights: Weights, client: Client) -> Weights:
        """The client's own, after a look at the units that were dropped when it was last here."""
        scores: Weights = client.memory.get("scores") or relative(unit_norms(client.units, weights))
        if not self.probe:
            return scores
        slopes = gate_gradients(client.units, weights, client.gradient(weights))
        return {name: score - self.score_lr * slopes.get(name, 0) for name, score in scores.items()}

    def _fit_and_choose(
        self, message: Message, client: Client, density: float, scores: Weights
    ) -> tuple[FitResult, Masks, Weights]:
        """Units that change before every step."""
        chosen = LearnedImportance(
            density,
            pattern=self.pattern,
            lr=self.score_lr,
            strength=self.score_strength,
            reduction=self.reduction,
            probe=False,  # done, on the weights as received
            scores=scores,
            groups=client.units,
        )
        result = client.fit(message.weights, callbacks=[self._pull(message.weights, client), chosen])
        kept = chosen.kept or self._kept(message.weights, client, density, scores)  # in a rehearsal nothing is trained
        return result, kept, dict(chosen.scores)

    def _choose_and_fit(
        self, message: Message, client: Client, density: float, scores: Weights
    ) -> tuple[FitResult, Masks, Weights]:
        """Units that stay for the round, so that the others can be cut out."""
        kept = self._kept(message.weights, client, density, scores)
        steps = ScoreSteps(scores, self.score_lr, self.score_strength, self.reduction)
        learns = [UnitScores(steps, client.units, kept, message.weights)] if scores else []
        callbacks = [self._pull(message.weights, client), *learns]
        return client.fit(message.weights, callbacks=callbacks, units=kept), kept, steps.scores

    def _pull(self, weights: Weights, client: Client) -> ProximalTerm:
        """Towards the weights as received, of which a narrow module has its part."""
        size = sum(weights[name].numel() for name in weights) if self.reduction == "mean" else 1
        return ProximalTerm(2 * self.mu / size)

    def _kept(self, weights: Weights, client: Client, density: float, scores: Weights) -> dict[str, torch.Tensor]:
        if self.pattern == "learned":
            ranking = scores
        elif self.pattern == "magnitude":
            ranking = unit_norms(client.units, weights)
        else:
            ranking = blind_ranking(client.units, self.pattern, derive_seed(client.seed, client.id), client.round)
        return keep_units(ranking, unit_counts(client.units, density))

    def personalize(self, server: ServerState, client: Client) -> Weights:
        """What the client trained last; the common weights under its first mask if it was never drawn."""
        if "kept" in client.memory:
            own, kept = client.memory["weights"], client.memory["kept"]
            return widen(own, client.units, kept, server.weights, zeros=True)
        density = self.density if self.ratio == "fixed" else self._devices().capacity(client.view)
        scores = relative(unit_norms(client.units, server.weights))
        kept = self._kept(server.weights, client, density, scores)
        return apply(server.weights, unit_masks(client.units, kept, server.weights))

    def trained(self, message: Message, update: Update) -> Weights:
        """The client's part of the model."""
        return apply(add(message.weights, update.weights), update.votes or {})

    # ---- costs

    def costs(self, facts: CostFacts) -> Costs:
        """Training of the part, and for hardware also the probe, and at the client's first time its first accuracy."""
        units: Sequence[UnitGroup] = facts.model.units
        weights, density = facts.message.weights, float(facts.message.extra["units"]["density"])
        kept = keep_units(blind_ranking(units, "ordered", 0, 0), unit_counts(units, density))  # any as many
        rows, both = (unit_masks(units, kept, weights, incoming=incoming) for incoming in (False, True))
        exact = super().costs(replace(facts, message=replace(facts.message, masks=both)))
        dense, batches = forward_flops(facts.layers), math.ceil(facts.samples / facts.batch_size)
        extra = 3 * min(facts.batch_size, facts.samples) * dense if self.probe and self.pattern == "learned" else 0.0
        if self.ratio == "bandit" and not (facts.view.shared or facts.again):
            extra += facts.samples * dense
        counted = {name: weight for name, weight in weights.items() if name not in facts.buffers}
        held = counts({name: mask for name, mask in rows.items() if mask.dim() > 1})
        sent = sum(held.get(name, weight.numel()) for name, weight in counted.items())
        return Costs(
            flops_paper=3 * facts.epochs * batches * facts.batch_size * forward_flops(facts.layers, rows),
            flops_analytic=exact.flops_analytic + extra,
            bytes_down_paper=BYTES_PER_WEIGHT * sum(weight.numel() for weight in counted.values()),
            bytes_up_paper=BYTES_PER_WEIGHT * sent,
        )


def _first(monitor: str) -> str:
    """The key of the accuracy that a client's first model had on its training data."""
    return f"{monitor}_first"


def _as_validated(monitor: str) -> str:
    """The metric's name where training data are scored: ``val_acc`` for ``train_acc``."""
    return monitor.replace("train", "val", 1)


def _known(report: Mapping[str, float], name: str, monitor: str) -> float:
    if name not in report:
        raise InvalidOption(
            f"`federation.monitor` is {monitor!r}, so the module must log `{monitor}` in training and "
            f"`{_as_validated(monitor)}` in validation, which FedLPS' bandit learns from; a client reported "
            f"{sorted(report)}."
        )
    return report[name]
