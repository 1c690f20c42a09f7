"""Server optimizers: the mean change of a round is a gradient, from which the server makes its own step.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan, ICLR 2021, arXiv:2003.00295, Algorithm 2; FedAvgM is of
Hsu, Qi, Brown, arXiv:1909.06335.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from lightning_sparsefl.errors import InvalidOption, check_types, require
from lightning_sparsefl.sparse.moments import Rule, adaptive_step, first_moment, second_moment, unbiased, wide
from lightning_sparsefl.types import Masks, Merged, ServerState, Weights

Moments: TypeAlias = Mapping[str, Weights]
"""The trees ``m`` and, except with momentum, ``v``, over the parameters; see also :meth:`ServerOptimizer._counted`."""
_DEFAULTS: dict[str, dict[str, float]] = {
    "momentum": {"lr": 1.0, "beta1": 0.9},
    "adagrad": {"lr": 0.1, "beta1": 0.0},
    "adam": {"lr": 0.1, "beta1": 0.9},
    "yogi": {"lr": 0.1, "beta1": 0.9},
    "adamw": {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "tau": 1e-8, "weight_decay": 0.01},
}
_PREFIX = "server."
"""Prefix of the names of the moments in `ServerState.extra`."""


@dataclass(frozen=True, kw_only=True)
class ServerOptimizer:
    """Optimizer of the server, which makes the server's step of the clients' mean change; null = the default of a rule.

    m and v are kept for every parameter, and steps are computed, in float32 at least. A coordinate that no client votes
    on keeps its value and its moments, and buffers are merged as without it.
    """

    rule: Rule = "adam"
    """FedAvgM (`momentum`), FedAdagrad, FedAdam, FedYogi, or AdamW with bias correction."""
    lr: float | None = None
    """Learning rate of the server, above 0; null = 1 with momentum, 0.001 with AdamW, 0.1 else."""
    beta1: float | None = None
    """Decay of the mean of changes, in [0, 1); null = 0 with Adagrad, 0.9 else."""
    beta2: float | None = None
    """Decay of the mean of squared changes, in [0, 1), which Adam, Yogi and AdamW have; null = 0.999 with AdamW, 0.99
    else."""
    tau: float | None = None
    """Degree of adaptivity, above 0, added to the root of v; null = 1e-8 with AdamW, 0.001 else. Except with AdamW, v
    starts at its square."""
    weight_decay: float | None = None
    """Fraction of the weights that is taken away in a round, in units of `lr`, >= 0, of each parameter that a round
    has changed; null = 0.01 with AdamW, 0 else."""
    start: Literal["zero", "mean"] = "zero"
    """Moments before the first round: 0 and the square of `tau`; or `mean`: the server takes the first round's mean
    change as it is, and starts with it and its square (REFL)."""

    def __post_init__(self) -> None:
        check_server_optimizer(self, "federation.server_optimizer.")

    def first(self, parameters: Weights) -> dict[str, Weights]:
        """Return the moments before the first round.

        Args:
            parameters: Weights of the server without buffers.
        """
        return {key: {n: torch.full_like(wide(w), value) for n, w in parameters.items()} for key, value in self._first}

    def step(self, server: ServerState, merged: Merged, before: Moments) -> tuple[Merged, Moments]:
        """Return the merge with the optimizer's step instead of the mean change, and the next moments.

        Args:
            server: State of the server before the round.
            merged: The round's updates after the reduction.
            before: Moments before the round.
        """
        before = self._counted(before, server, merged.covered)
        weights, after = dict(merged.weights), {key: dict[str, Tensor]() for key in before}
        for name in before["m"]:
            mean, old, covered = merged.weights[name], wide(server.weights[name]), merged.covered.get(name)
            change = wide(mean) - (0 if merged.kind == "difference" else old)
            change = change if covered is None else torch.where(covered, change, 0)
            kept = {key: wide(tree[name]) for key, tree in before.items()}
            step, moved = self._step(old, change, kept, server.round)
            for key, moment in moved.items():
                after[key][name] = moment if covered is None else torch.where(covered, moment, kept[key])
            step = step if covered is None else torch.where(covered, step, 0)
            weights[name] = (step if merged.kind == "difference" else old + step).to(mean.dtype)
        return replace(merged, weights=weights), after

    def _counted(self, moments: Moments, server: ServerState, covered: Masks) -> Moments:
        """Return the moments with AdamW's steps of each coordinate, ``t``, once these are not the number of rounds.

        Until then every coordinate has had votes, and a tree of equal numbers would say nothing.
        """
        whole = all(bool(mask.all()) for mask in (*covered.values(), *server.masks.values()))
        if self.rule != "adamw" or "t" in moments or whole:
            return moments
        steps = {n: torch.full_like(m, server.round, dtype=torch.float32) for n, m in moments["m"].items()}
        return {**moments, **self.forget({"t": steps}, server.masks)}

    def _step(self, weight: Tensor, change: Tensor, before: Weights, round: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the change of one parameter, and its moments, of which there are those before the round."""
        options = self._options
        lr, beta1, beta2 = options["lr"], options["beta1"], options["beta2"]
        if round == 0 and self.start == "mean":
            return change, {key: moment for key, moment in (("m", change), ("v", change.square())) if key in before}
        m, decay = first_moment(self.rule, before["m"], change, beta1), lr * options["weight_decay"]
        decayed = decay * weight if decay and (change.any() or before["m"].any()) else 0.0  # frozen ones never change
        if self.rule == "momentum":
            return lr * m - decayed, {"m": m}
        v = second_moment(self.rule, before["v"], change, beta2)
        if self.rule != "adamw":
            return adaptive_step(m, v, lr, options["tau"]) - decayed, {"m": m, "v": v}
        counted = {"t": before["t"] + 1} if "t" in before else {}
        steps = counted.get("t", round + 1)
        step = adaptive_step(unbiased(m, beta1, steps), unbiased(v, beta2, steps), lr, options["tau"])
        return step - decayed, {"m": m, "v": v, **counted}

    def forget(self, moments: Moments, masks: Masks) -> dict[str, Weights]:
        """Return the moments with their first values where the server's masks keep nothing.

        Args:
            moments: Moments after a round.
            masks: Masks of the server after the round.
        """
        first = dict(self._first)
        return {
            key: {n: torch.where(masks[n], t, first.get(key, 0.0)) if n in masks else t for n, t in tree.items()}
            for key, tree in moments.items()
        }

    @property
    def _options(self) -> dict[str, float]:
        """The options with the rule's defaults."""
        own = {name: value for name, value in asdict(self).items() if value is not None}
        return {"beta2": 0.99, "tau": 1e-3, "weight_decay": 0.0, **_DEFAULTS[self.rule], **own}

    @property
    def _first(self) -> tuple[tuple[str, float], ...]:
        """The first values of the moments that the rule has, by their names."""
        square = 0.0 if self.rule == "adamw" else float(self._options["tau"] ** 2)
        return (("m", 0.0),) if self.rule == "momentum" else (("m", 0.0), ("v", square))


def require_no_moments(server: ServerState, method: str) -> None:
    """Check that the first state of a method leaves the names of the moments to the server's optimizer.

    Args:
        server: State from the method's `init`.
        method: Name of the method.

    Raises:
        InvalidOption: If an extra tree has the name of a moment.
    """
    for key in server.extra:
        if key.startswith(_PREFIX):
            raise InvalidOption(
                f"The state from `{method}.init` has `extra[{key!r}]`, but names with `{_PREFIX}` are those of the "
                "moments of `federation.server_optimizer`; expected another name."
            )


def optimized(
    optimizer: ServerOptimizer, server: ServerState, merged: Merged, buffers: Set[str]
) -> tuple[Merged, Moments]:
    """Apply the federation's server optimizer to a merge; see :meth:`ServerOptimizer.step`.

    Args:
        optimizer: The optimizer.
        server: State of the server before the round, whose extra trees have the moments.
        merged: The round's updates after the reduction.
        buffers: Names of the buffers.
    """
    before = {key.removeprefix(_PREFIX): tree for key, tree in server.extra.items() if key.startswith(_PREFIX)}
    if not before:
        before = optimizer.first({name: weight for name, weight in server.weights.items() if name not in buffers})
    return optimizer.step(server, merged, before)


def with_moments(optimizer: ServerOptimizer, server: ServerState, moments: Moments) -> ServerState:
    """Return the method's next state with the optimizer's moments, for what the server's masks keep.

    Args:
        optimizer: The optimizer.
        server: State of the server after the round.
        moments: Moments after the round.
    """
    kept = {_PREFIX + key: tree for key, tree in optimizer.forget(moments, server.masks).items()}
    return replace(server, extra={**server.extra, **kept})


def check_server_optimizer(options: Any, prefix: str) -> None:
    """Raise :class:`InvalidOption` if an option of a server optimizer is out of its range.

    Args:
        options: Dataclass with the fields of :class:`ServerOptimizer`.
        prefix: Prefix of the names of fields in the error message.
    """
    check_types(options, prefix)
    fits = options.rule != "adamw" or options.start == "zero"
    require(fits, f"{prefix}start", options.start, "'zero' with the rule 'adamw', whose moments are corrected for it")
    positive, share, least = "a number above 0, or null", "a number in [0, 1), or null", "a number >= 0, or null"
    for name, fits, expected in (
        ("lr", lambda value: 0 < value < math.inf, positive),
        ("beta1", lambda value: 0 <= value < 1, share),
        ("beta2", lambda value: 0 <= value < 1, share),
        ("tau", lambda value: 0 < value < math.inf, positive),
        ("weight_decay", lambda value: 0 <= value < math.inf, least),
    ):
        value = getattr(options, name)
        require(value is None or fits(value), f"{prefix}{name}", value, expected)
