"""Methods and options with which updates cannot be summed under masks, since the server must see single ones."""

from __future__ import annotations

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.aggregation.reducers import CoverageMean, PlainMean
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.options import Federation

from lightning_sparsefl_flower.secure_sum.policy import Policy

_MEANS = (CoverageMean, PlainMean)


def require_summable(algorithm: FederatedAlgorithm, federation: Federation, policy: Policy) -> None:
    """Raise unless a federation's updates can be summed under masks.

    Args:
        algorithm: The federated method.
        federation: Options of the federation.
        policy: What nodes demand of a sum.

    Raises:
        InvalidOption: If they cannot; the message says why.
    """
    reason = option_obstacle(federation) or method_obstacle(algorithm)
    if reason is not None:
        raise InvalidOption(f"`secure_sum` hides single updates, but {reason}.")
    cohort, needed = federation.clients_per_round, policy.needed(federation.clients_per_round)
    if cohort < needed:
        raise InvalidOption(
            f"`federation.clients_per_round` is {cohort}; expected at least {needed} with `secure_sum`, so that "
            "`secure_sum.min_clients` can be left."
        )


def option_obstacle(federation: Federation) -> str | None:
    """Return which option needs single updates, as a clause, or None.

    Args:
        federation: Options of the federation.
    """
    reducer, sampler = federation.reducer, federation.sampler
    if reducer is not None and type(reducer) not in _MEANS:
        return f"`federation.reducer` is {reducer}, which sorts them; expected a mean"
    if federation.privacy is not None:
        return "`federation.privacy` needs the server to check the norm of each; set `federation.privacy: null`"
    if federation.clip_update is not None:
        return "`federation.clip_update` lets the server check the norm of each; set `federation.clip_update: null`"
    if sampler is not None and sampler.late_merge() is not None:
        return f"`federation.sampler` is {sampler}, which merges late ones by themselves; expected another sampler"
    if federation.devices is not None:
        return "`federation.devices` simulates times from the size of each; set `federation.devices: null`"
    return None


def method_obstacle(algorithm: FederatedAlgorithm) -> str | None:
    """Return why a method needs single updates, by what it declares and overrides, as a clause, or None.

    Args:
        algorithm: The federated method.
    """
    kind, name = type(algorithm), type(algorithm).__name__
    if type(algorithm.reducer()) not in _MEANS:
        return f"{name} merges by {algorithm.reducer()}, which needs them"
    if algorithm.uploads_shared:
        return f"{name} uploads what the server keeps of each client (`uploads_shared`)"
    if kind.observe is not FederatedAlgorithm.observe:
        return f"{name} overrides `observe`, which looks at one client at a time"
    if kind.survey is not FederatedAlgorithm.survey:
        return f"{name} overrides `survey`, whose answers may be of one client"
    return None
