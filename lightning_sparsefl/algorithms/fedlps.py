"""FedLPS: Learnable Sparse Customization in Heterogeneous Edge Computing.

Xue, Sun, Liu, Wang, Liu, Wang, arXiv:2412.07216. Equations and tables are numbered as in the paper.

Each client trains a part of the units (channels, neurons, hidden states) of the global model. A bandit (P-UCBV,
section III-C; see `algorithms/_pucbv.py`) draws the client's density s, the fraction of each layer's units; a density
above the client's capability z is reset to z (section III-B). The client keeps the units with the largest scores Q,
which it stores between rounds and trains together with the weights on
``task(w M) + mu ||w - w_r||^2 + lambda ||Q - sigma(|w|)||^2`` (eqs. 6 to 11). It uploads the change of the kept weights
(eq. 12), and the server adds the mean of the changes, weighted by samples (eq. 13).

Departures from the paper:

- The step function that turns scores into a mask has no gradient. A score is taken as a gate on its unit's output,
  with a straight-through gradient. Dropped units get theirs from one batch with all units present (`probe`), a
  training batch, augmented as such, that is passed in evaluation mode at the start of a participation; its FLOPs are
  charged.
- Scores start as ``sigmoid(|w| / layer mean)`` of the first weights that a client receives, and are tied to that
  value: with the paper's sum of absolute weights the sigmoid is close to 1 for every unit of a wide layer. Their
  learning rate, `score_lr`, is an option of its own and stays constant; the paper has one rate for both.
- By default, both terms are means (``reduction="mean"``): over the units of each layer, summed over layers, and over
  all weights. The paper prints sums of squares with mu = lambda = 1 (``reduction="sum"``). At a learning rate of .1
  the sum takes back a fifth of a client's change in every step, so that a client moves about as far as in five steps
  however long it trains. The published results were made with a mean per layer and without the mu term.
- A dropped unit also loses its bias, its norm and the incoming slices of the layers that read it, so that it can be
  cut out (`federation.execution: cut`, with ``refresh="round"``). ``flops/paper`` counts outgoing rows only and the
  last batch in full, as Tables I and II do; ``flops/train`` counts the remaining operations. The bytes include the
  pattern of units, which the paper does not count.
- Exactly ``max(floor(s J + .5), 1)`` of a layer's J units are kept, those of the last step, not those that the scores
  after it would select, since these may not have been trained.
- The reset to z is computed by the server, which knows the capacities here; the density is the one that the client
  would train at. Capacities without `dynamic` are dealt to equally many clients each, not drawn.
- Clients that were never drawn are scored with the global model under their first mask.
- See `algorithms/_pucbv.py` for those of the bandit.

What the authors' program (github.com/sunnyxuejj/FedLPS) does differently; it was read, not copied:

- It does not learn the scores: the mask is not a function of them in the computation graph, they are drawn anew in
  every participation, and the lambda term pulls all units of a layer equally. It keeps k - 1 units, none where k is 1,
  and the biases of dropped units. It adds Gaussian noise (standard deviation .001) to every tensor in every round, and
  averages clients evenly.
- Its bandit covers densities from .5 to 1, so that it decides for the strongest clients only.
- It scores a client with the last model that the client trained at a density above 1/4, and with the dense global
  model without one. The program of the ablations (FedLPS_Ablation, Table II) scores P-UCBV clients of density 1/4
  or less with the global body and their own last layer, but every client of RCR and FLST with its own last model: the
  rows of that table come from different evaluation protocols.
- Learning rate .1 * .998^round, weight decay 1.2e-6, and momentum .5 in the scripts of the ablations on CIFAR-10, here
  0 as in that of FedLPS; batches of 32 (MNIST), 20 (CIFAR, Tiny-ImageNet) or 5 (Reddit); no augmentation. On Reddit one
  local epoch, where the paper prints 5.
- Clients of MNIST have two random shards, so that about a tenth of them has one class. Here they have two classes.

:meth:`FedLPS.as_published_code` sets the options that approximate it; measured results are in docs/results.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_sparsefl.algorithms import _pucbv as pucbv
from lightning_sparsefl.callbacks import LearnedImportance, ProximalTerm
from lightning_sparsefl.callbacks.unit_scores import ScoreSteps, UnitScores
from lightning_sparsefl.cost import BYTES_PER_WEIGHT, Devices, forward_flops
from lightning_sparsefl.errors import InvalidOption, check_types, require
from lightning_sparsefl.federated.aggregation.reducers import PlainMean, Reducer
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.report.measures.direction import higher_is_better
from lightning_sparsefl.seeds import generator
from lightning_sparsefl.sparse.importance import gate_gradients, relative
from lightning_sparsefl.sparse.masks import add, apply, counts, subtract
from lightning_sparsefl.sparse.submodel import keep_statistics, narrow, widen
from lightning_sparsefl.sparse.units import UnitGroup, keep_units, unit_counts, unit_masks, unit_norms
from lightning_sparsefl.sparse.width import blind_ranking
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
    """Clients train the units that their learned scores select, at densities that a bandit selects.

    Raises:
        InvalidOption: If an option is out of its range.

    Example:
        >>> FedLPS().reduction, FedLPS.as_published_code().arms_from
        ('mean', 0.5)
    """

    # Above 250 lines, most of which document the options; the bandit and the scores are in modules of their own.

    fixed_length = True

    ratio: Literal["bandit", "fixed", "capacity"] = "bandit"
    """Source of a client's density: the bandit's choice, reset to the client's capacity if it is larger; `density`,
    whatever the capacity (FLST in the paper); or the capacity (RCR)."""
    density: float = 0.5
    """Fraction of each layer's units that is trained with ``ratio="fixed"``, in (0, 1]."""
    pattern: Literal["learned", "magnitude", "ordered", "random", "rolling"] = "learned"
    """Units that are kept: those with the largest scores, those with the largest weights, the first ones, random ones,
    or a window that moves by one unit per round."""
    refresh: Literal["step", "round"] = "step"
    """When learned and magnitude patterns are updated: before every step (the paper), or once a round."""
    probe: bool = True
    """Whether dropped units get a gradient at the start of a round."""
    score_lr: float = 0.1
    """Learning rate of the scores."""
    score_strength: float = 1.0
    """Strength of the term that ties scores and magnitudes (lambda), >= 0."""
    mu: float = 1.0
    """Strength of the proximal term, which pulls towards the received weights, >= 0."""
    reduction: Literal["mean", "sum"] = "mean"
    """Whether these terms are means of squares (over each layer's units, summed over layers; over all weights) or sums
    of squares, as the paper prints them."""
    dynamic: bool = False
    """Whether a client's capacity is drawn from `levels` in every round (Dyn in the paper); else it is that of
    `federation.capacities` (Fix)."""
    levels: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125, 0.0625)
    """Capacities to draw from with `dynamic`, each in (0, 1]; Figures 7 and 8 vary them."""
    flops_per_second: float = 727e9
    """Operations per second of a device of capacity 1; other devices have the fraction that is their capacity."""
    bytes_per_second: float = 14.9 * 2**20
    """Uplink bandwidth of every device."""
    alpha: float = 1.0
    """Weight of the upload in a client's simulated time, >= 0 (eq. 14)."""
    time_unit: float = 1.0
    """Seconds that count as 1 in the bandit's rewards; the authors' program uses a dense round of the strongest
    device. With its `rho` it decides how much the exploration bonus counts."""
    arms: int = 5
    """Number of equal intervals that the bandit starts from (I_0)."""
    arms_from: float = 0.0
    """Lower end of the densities that the bandit draws, in [0, 1); a lower capacity is used all the same."""
    explore: Literal["untried", "bonus", "epsilon"] = "untried"
    """How the bandit explores: intervals without rewards first; by the bonus alone, with an empty mean of 0 (the
    literal eq. 16); or, in addition to that, by random choices with probability 1/m (the authors' program)."""
    compare_with: Literal["last", "best"] = "last"
    """Accuracy that the bandit compares a new one with: that of the client's last participation, or its best so far
    (the authors' program)."""
    rho: float = 0.5
    """Weight of the bandit's exploration bonus, >= 0."""
    drop: float = 0.05
    """Fall of the accuracy, in [0, 1], beyond which the bandit eliminates the densities below (-Delta)."""
    score_above: float = 0.0
    """Density, in [0, 1), above which a client's trained model becomes its personal model. Above 0, clients without
    such a model are scored with the dense global model (the authors' program: 1/4)."""

    @classmethod
    def as_published_code(cls, **options: Any) -> FedLPS:
        """Return the method with the options that approximate the authors' program, which made the published results.

        Its round-level learning rate is an option of the trainer, ``round_lr: ExponentialRoundLR(0.998)``;
        ``configs/paper/fedlps/as_published_code.yaml`` has both. `time_unit` depends on the model and stays 1 s. The
        errors that the module's docstring lists (dead scores, lost units, noise) are not imitated, nor is the
        bookkeeping of its bandit, which splits an interval before training and credits rewards to other intervals.

        Args:
            options: Options that differ from these.
        """
        published: dict[str, Any] = {
            "mu": 0.0,
            "reduction": "mean",
            "arms_from": 0.5,
            "explore": "epsilon",
            "compare_with": "best",
            "score_above": 0.25,
            "dynamic": True,
        }
        return cls(**{**published, **options})

    def __post_init__(self) -> None:
        check_types(self, "algorithm.")
        require(0 < self.density <= 1, "algorithm.density", self.density, "a number in (0, 1]")
        for name in ("arms_from", "score_above"):
            value = getattr(self, name)
            require(0 <= value < 1, f"algorithm.{name}", value, "a number in [0, 1)")
        require(self.time_unit > 0, "algorithm.time_unit", self.time_unit, "a number above 0")
        for name in ("score_lr", "score_strength", "mu", "rho", "drop"):
            value = getattr(self, name)
            require(value >= 0, f"algorithm.{name}", value, "a number >= 0")
        require(self.arms >= 1, "algorithm.arms", self.arms, "a whole number >= 1")
        self._devices()

    @property
    def at_full_capacity(self) -> str | None:
        """Training of the full model."""
        return "trains the full model on every client" if self.ratio == "capacity" and not self.dynamic else None

    @property
    def needs_metrics(self) -> bool:  # type: ignore[override]
        """Whether the densities are the bandit's."""
        return self.ratio == "bandit"

    def adapt(self, module: LightningModule) -> None:
        """Raise for a module without `validation_step`, which the bandit's first reward needs.

        Raises:
            InvalidOption: If the bandit is used and the module has none.
        """
        if self.ratio == "bandit" and not is_overridden("validation_step", module, LightningModule):
            raise InvalidOption(
                f"`algorithm` is FedLPS, whose bandit scores a client's training data with `validation_step`, but "
                f"`{type(module).__name__}` has none; define it, or set `algorithm.ratio: fixed`."
            )

    @property
    def _changes_in_training(self) -> bool:
        return self.refresh == "step" and self.pattern in ("learned", "magnitude")

    def _devices(self) -> Devices:
        return Devices(
            dynamic=self.dynamic,
            levels=tuple(self.levels),
            flops_per_second=self.flops_per_second,
            bytes_per_second=self.bytes_per_second,
            alpha=self.alpha,
        )

    # ---- the server

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Return the first state, with the rounds of the run per client of a round (the bandit's xi).

        Raises:
            InvalidOption: If `federation.execution: cut` meets units that change before every step, or a lower value
                of the bandit's metric is better.
        """
        monitor = fleet.views[0].monitor
        if self.ratio == "bandit" and not higher_is_better(monitor):
            raise InvalidOption(
                f"`federation.monitor` is {monitor!r}, which falls as a model improves, but FedLPS' bandit maximizes "
                "it; expected an accuracy, such as 'train_acc'."
            )
        if fleet.execution == "cut" and self._changes_in_training:
            raise InvalidOption(
                "`federation.execution: cut` trains the same units for a whole round, but "
                f"`FedLPS(pattern={self.pattern!r}, refresh='step')` changes them before every step; set "
                "`algorithm.refresh: round`."
            )
        often = torch.tensor([fleet.max_rounds / fleet.clients_per_round])
        return ServerState(round=0, weights=weights, extra={"bandit": {"xi": often}})

    def download(self, server: ServerState, view: ClientView) -> Message:
        """Return the whole model and the density to train at."""
        density = torch.tensor(self._density(server, view))
        return Message(weights=server.weights, extra={"units": {"density": density}})

    def _density(self, server: ServerState, view: ClientView) -> float:
        """Return the density of a client's round; a pure function of the server's knowledge, so it can be repeated."""
        if self.ratio == "fixed":
            return self.density
        capacity, options = self._devices().capacity(view), self._bandit(server)
        if self.ratio == "capacity":
            return capacity
        state = view.shared.get("bandit") or pucbv.start(options)
        drawn = pucbv.choose(state, generator(view.seed, view.round, view.id, "density"), options)
        return min(drawn, capacity)

    def _bandit(self, server: ServerState) -> pucbv.PUCBVOptions:
        return pucbv.PUCBVOptions(
            arms=self.arms,
            lowest=self.arms_from,
            rho=self.rho,
            xi=float(server.extra["bandit"]["xi"]),
            drop=self.drop,
            explore=self.explore,
            compare_with=self.compare_with,
        )

    def reducer(self) -> Reducer:
        """Return the mean of eq. 13, in which weights that a client did not train count as unchanged."""
        return PlainMean()

    def simulated_seconds(self, view: ClientView, flops: float, bytes_up: int) -> float | None:
        """Return the seconds of training and upload on a device of the client's capacity (eq. 14)."""
        return self._devices().seconds(self._devices().capacity(view), flops, bytes_up)

    def observe(self, server: ServerState, view: ClientView, report: Mapping[str, float]) -> Shared | None:
        """Return the bandit's state after the reward of the density that was used."""
        if self.ratio != "bandit":
            return None
        options = self._bandit(server)
        state = view.shared.get("bandit") or pucbv.start(options)
        accuracy, before = _required_metric(report, view.monitor, view.monitor), state["accuracy"]
        before = _required_metric(report, _initial_key(view.monitor), view.monitor) if before is None else before
        used, time = self._density(server, view), report["seconds"] / self.time_unit
        return {"bandit": pucbv.learn(state, used, accuracy, before, time, options)}

    # ---- a client

    def train(self, message: Message, client: Client) -> Update:
        """Train the client's part of the model and the scores that select it.

        Raises:
            InvalidOption: If the module does not log the bandit's metric, in validation before the client's first
                training, and in training after it.
        """
        density, first = float(message.extra["units"]["density"]), {}
        if self.ratio == "bandit" and not client.memory:
            scored, name = client.evaluate({}, "train"), _as_validated(client.monitor)
            if scored:  # `profile` has no scores
                first = {_initial_key(client.monitor): _required_metric(scored, name, client.monitor)}
        scores = self._scores(message.weights, client) if self.pattern == "learned" else {}
        if self._changes_in_training:
            result, kept, scores = self._fit_and_choose(message, client, density, scores)
        else:
            result, kept, scores = self._choose_and_fit(message, client, density, scores)
        if first:  # not only in `observe`, after the training of the whole cohort
            _required_metric(result.metrics, client.monitor, client.monitor)
        votes = unit_masks(client.units, kept, message.weights)
        return Update(
            weights=apply(subtract(result.weights, message.weights), votes),
            kind="difference",
            weight=client.num_examples,
            votes=votes,
            memory={**self._personal_model(result.weights, client, density, kept), "scores": scores},
            metrics={**result.metrics, **first},
        )

    def _personal_model(self, weights: Weights, client: Client, density: float, kept: Masks) -> dict[str, Any]:
        """Return the client's personal model: the trained one, or the stored one if the density is too low."""
        if density > self.score_above:
            return {"weights": narrow(weights, client.units, kept), "kept": kept}
        return {name: client.memory[name] for name in ("weights", "kept") if name in client.memory}

    def _scores(self, weights: Weights, client: Client) -> Weights:
        """Return the client's scores, after a gradient step for all units at once with `probe`."""
        scores: Weights = client.memory.get("scores") or relative(unit_norms(client.units, weights))
        if not self.probe:
            return scores
        slopes = gate_gradients(client.units, weights, client.gradient(weights))
        return {name: score - self.score_lr * slopes.get(name, 0) for name, score in scores.items()}

    def _fit_and_choose(
        self, message: Message, client: Client, density: float, scores: Weights
    ) -> tuple[FitResult, Masks, Weights]:
        """Train with units that are selected before every step."""
        chosen = LearnedImportance(
            density,
            pattern=self.pattern,
            lr=self.score_lr,
            strength=self.score_strength,
            reduction=self.reduction,
            probe=False,  # `_scores` has taken that step, at the weights as received
            scores=scores,
            groups=client.units,
        )
        callbacks = [*self.callbacks(message, client), self._proximal_term(message.weights, client), chosen]
        result = client.fit(message.weights, callbacks=callbacks)
        kept = chosen.kept or self._kept(message.weights, client, density, scores)  # `profile` trains no step
        weights = keep_statistics(result.weights, client.units, kept, message.weights, client.buffers)
        return replace(result, weights=weights), kept, dict(chosen.scores)

    def _choose_and_fit(
        self, message: Message, client: Client, density: float, scores: Weights
    ) -> tuple[FitResult, Masks, Weights]:
        """Train with units that stay the same for the round, so that the others can be cut out."""
        kept = self._kept(message.weights, client, density, scores)
        steps = ScoreSteps(scores, self.score_lr, self.score_strength, self.reduction)
        learns = [UnitScores(steps, client.units, kept, message.weights)] if scores else []
        callbacks = [*self.callbacks(message, client), self._proximal_term(message.weights, client), *learns]
        return client.fit(message.weights, callbacks=callbacks, units=kept), kept, steps.scores

    def _proximal_term(self, weights: Weights, client: Client) -> ProximalTerm:
        """Return the proximal term; its anchor, the received weights, is taken from the module, which may be narrow."""
        trained = sum(weight.numel() for name, weight in weights.items() if name not in client.buffers)
        return ProximalTerm(2 * self.mu / (trained if self.reduction == "mean" else 1))

    def _kept(self, weights: Weights, client: Client, density: float, scores: Weights) -> dict[str, torch.Tensor]:
        if self.pattern == "learned":
            ranking = scores
        elif self.pattern == "magnitude":
            ranking = unit_norms(client.units, weights)
        else:
            ranking = blind_ranking(client.units, self.pattern, client.constant_seed("pattern"), client.round)
        return keep_units(ranking, unit_counts(client.units, density))

    def download_for(self, server: ServerState, view: ClientView, task: Literal["score", "finetune"]) -> Message:
        """Send the model, and the density for clients that were never drawn."""
        density = self.density if self.ratio == "fixed" else self._devices().capacity(view)
        return Message(weights=server.weights, extra={"units": {"density": torch.tensor(density)}})

    def personalize(self, message: Message, client: Client) -> Weights:
        """Return the client's last model; without one, the global weights under the client's first mask."""
        if "kept" in client.memory:
            own, kept = client.memory["weights"], client.memory["kept"]
            return widen(own, client.units, kept, message.weights, zeros=True)
        if self.score_above:
            return message.weights
        density = float(message.extra["units"]["density"])
        scores = relative(unit_norms(client.units, message.weights))
        kept = self._kept(message.weights, client, density, scores)
        return apply(message.weights, unit_masks(client.units, kept, message.weights))

    def trained(self, message: Message, update: Update) -> Weights:
        """Return the client's part of the model."""
        return apply(add(message.weights, update.weights), update.votes or {})

    # ---- costs

    def costs(self, facts: CostFacts) -> Costs:
        """Return the costs of training the part; ``flops_analytic`` includes the probe and the first accuracy."""
        units: Sequence[UnitGroup] = facts.model.units
        weights, density = facts.message.weights, float(facts.message.extra["units"]["density"])
        kept = keep_units(
            blind_ranking(units, "ordered", 0, 0), unit_counts(units, density)
        )  # costs depend on the number of units alone
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


def _initial_key(monitor: str) -> str:
    """Return the key of the accuracy of the initial model on a client's training data."""
    return f"{monitor}_first"


def _as_validated(monitor: str) -> str:
    """Return the metric's name when training data are scored: ``val_acc`` for ``train_acc``."""
    return monitor.replace("train", "val", 1)


def _required_metric(report: Mapping[str, float], name: str, monitor: str) -> float:
    """Return a metric of a client's report, or raise if the module does not log it."""
    if name not in report:
        raise InvalidOption(
            f"`federation.monitor` is {monitor!r}, so the module must log `{monitor}` in training and "
            f"`{_as_validated(monitor)}` in validation, from which FedLPS' bandit learns; a client reported "
            f"{sorted(report)}."
        )
    return report[name]
