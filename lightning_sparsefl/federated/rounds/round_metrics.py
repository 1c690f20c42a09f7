"""A round's logged keys, and how a metric is spread over clients."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.exchange.flat import Layout
from lightning_sparsefl.federated.rounds.outcome import Outcome
from lightning_sparsefl.report.measures.client_statistics import STATISTICS
from lightning_sparsefl.report.measures.direction import higher_is_better, worst_tenth
from lightning_sparsefl.report.measures.mean_std import mean


def round_metrics(outcomes: Sequence[Outcome], layout: Layout) -> dict[str, float]:
    """Compute a round's logged keys: participants, local metrics, densities, simulated time.

    Args:
        outcomes: Outcomes of all participants.
        layout: Layout of the model.
    """
    trained = [outcome for outcome in outcomes if outcome.status == "counted"]
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    keys: dict[str, float] = {"clients/trained": len(trained), "clients/failed": len(failed)}
    for name in sorted({name for o in trained for name in o.metrics}):
        having = [o for o in trained if name in o.metrics]
        total = sum(o.num_examples for o in having)
        keys[f"local/{name}"] = sum(o.num_examples * o.metrics[name] for o in having) / total
    keys["density/all"] = _mean_density(trained, layout)
    for name in sorted({name for o in trained for name in o.densities}, key=layout.names.index):
        keys[f"density/layer/{name}"] = sum(o.densities.get(name, 1.0) for o in trained) / len(trained)
    keys["mask/changed"] = sum(o.changed for o in trained) / max(len(trained), 1)
    simulated = [o.simulated_seconds for o in trained if o.simulated_seconds is not None]
    return {**keys, "time/simulated": max(simulated)} if simulated else keys


def late_metrics(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Compute what late clients cost: their number, FLOPs and bytes.

    Args:
        outcomes: Outcomes of all participants.
    """
    charges = [outcome.charge for outcome in outcomes if outcome.status == "late" and outcome.charge is not None]
    return {
        "clients/late": len(charges),
        "flops/late": math.fsum(charge.flops_train for charge in charges),
        "comm/late_bytes": sum(charge.downlink_bytes for charge in charges),
    }


def _mean_density(trained: Sequence[Outcome], layout: Layout) -> float:
    """Average over the cohort the density of all masked tensors together; 1 without masks."""
    sizes = {name: float(shape.numel()) for name, shape in layout.shapes.items()}
    densities = [
        sum(d * sizes[n] for n, d in o.densities.items()) / sum(sizes[n] for n in o.densities) if o.densities else 1.0
        for o in trained
    ]
    return sum(densities) / max(len(densities), 1)


def spread(group: str, personal: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Compute mean, standard deviation and worst tenth of each metric over clients, unweighted.

    Args:
        group: First part of the keys.
        personal: Metrics by client number.

    Raises:
        InvalidOption: If a metric has the name of a statistic of another one.

    Example:
        >>> spread("finetuned", {0: {"acc": 1.0}})
        {'finetuned/acc': 1.0, 'finetuned/acc_std': 0.0, 'finetuned/acc_worst10': 1.0}
    """
    keys: dict[str, float] = {}
    names = metric_names(personal)
    for name in sorted(names):
        require_free(names, name, "_std", "_worst10")
        values = [metrics[name] for metrics in personal.values() if name in metrics]
        keys[f"{group}/{name}"] = center = mean(values)
        keys[f"{group}/{name}_std"] = math.sqrt(mean([(value - center) * (value - center) for value in values]))
        keys[f"{group}/{name}_worst10"] = worst_tenth(values, higher_is_better(name))
    return keys


def metric_names(personal: Mapping[int, Mapping[str, float]]) -> set[str]:
    """Return the names of all metrics that any client has.

    Args:
        personal: Metrics by client number.
    """
    return {name for metrics in personal.values() for name in metrics}


def require_free(names: Collection[str], name: str, *suffixes: str) -> None:
    """Raise :class:`InvalidOption` if the module logs a metric under the name of a statistic of another one.

    Args:
        names: Names of all metrics.
        name: Name of the metric with the statistics.
        *suffixes: Ends of the names of the statistics.
    """
    for suffix in suffixes:
        if name + suffix in names:
            raise InvalidOption(
                f"`model` logs '{name + suffix}' beside '{name}', but that is the key of a statistic of '{name}' "
                f"({STATISTICS[suffix]}); expected another name of the logged metric in the module."
            )
