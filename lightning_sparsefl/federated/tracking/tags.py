"""TensorBoard's tags of the logged keys: its first screen shows how good, how costly and how sparse a run is."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lightning_sparsefl.report.measures.client_statistics import is_statistic
from lightning_sparsefl.report.measures.direction import higher_is_better

OVERVIEW, SCORES, COSTS, SPARSITY, BY_BYTES = "1_overview", "2_scores", "3_costs", "4_sparsity", "5_scores_by_kB"
"""Groups of tags; TensorBoard sorts groups by name, and digits come first."""
_GROUPS = {
    "comm/uplink_bytes_total": f"{OVERVIEW}/2_bytes",
    "comm/downlink_bytes_total": COSTS,
    "flops/train_total": COSTS,
    "density/all": f"{OVERVIEW}/3_density",
    "mask/changed": SPARSITY,
    "mask/coverage_min": SPARSITY,
}
_SCORED = ("global", "personal", "unseen")


def main_scores(names: Collection[str]) -> list[str]:
    """Return the keys of the scores for the first screen: those that should rise, or all if none should.

    Args:
        names: Logged keys.

    Example:
        >>> main_scores(["global/test_acc", "global/test_loss", "unseen/test_acc", "unseen/test_acc_std", "time/round"])
        ['global/test_acc', 'unseen/test_acc']
        >>> main_scores(["global/test_loss"])
        ['global/test_loss']
    """
    scored = [name for name in names if name.split("/")[0] in _SCORED]
    scores = [name for name in scored if not is_statistic(name, names, ("_std", "_gap"))]
    return [name for name in scores if higher_is_better(name)] or scores


def scores_first(names: Collection[str]) -> list[str]:
    """Return the keys with those of scores first, for a message that shows the first few.

    Args:
        names: Logged keys.

    Example:
        >>> scores_first(["time/round", "personal/test_acc", "local/train_acc", "global/test_acc"])
        ['global/test_acc', 'personal/test_acc', 'local/train_acc', 'time/round']
    """
    places = {group: place for place, group in enumerate((*_SCORED, "local"))}
    return sorted(names, key=lambda name: (places.get(name.split("/")[0], len(places)), name))


def tags_of(names: Collection[str]) -> dict[str, str]:
    """Return the tag of each logged key: the key itself, after the name of a group if it is one of the main keys.

    The overview has four cards, which fit into one screen: the first metric of the global model and of clients' own
    models, bytes up, and density.

    Args:
        names: Logged keys of a round.

    Example:
        >>> list(tags_of(["global/test_acc", "density/all", "time/round"]).values())
        ['1_overview/1_score/global/test_acc', '1_overview/3_density/density/all', 'time/round']
    """
    main = main_scores(names)
    metric = main[0].partition("/")[2] if main else ""
    first = [name for name in (f"global/{metric}", f"personal/{metric}") if name in main]
    groups = {**_GROUPS, **dict.fromkeys(main, SCORES), **dict.fromkeys(first, f"{OVERVIEW}/1_score")}
    return {name: f"{groups[name]}/{name}" if name in groups else name for name in names}


def tagged(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics under their tags.

    Args:
        metrics: Metrics of a round by logged key.
    """
    tags = tags_of(metrics)
    return {tags[name]: value for name, value in metrics.items()}


def scores_by_bytes(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the scores of a round under the tags of the group whose x-axis is the bytes of the run.

    Args:
        metrics: Metrics of a round by logged key.

    Example:
        >>> scores_by_bytes({"global/test_acc": 0.5, "global/test_loss": 1.0})
        {'5_scores_by_kB/global/test_acc': 0.5}
    """
    return {f"{BY_BYTES}/{name}": metrics[name] for name in main_scores(metrics)}


def kilobytes(totals: Mapping[str, float]) -> int:
    """Return the bytes of a run in both directions, in kB.

    Args:
        totals: Totals of the run by logged key.

    Example:
        >>> kilobytes({"comm/uplink_bytes_total": 1500, "comm/downlink_bytes_total": 700})
        2
    """
    return int((totals["comm/uplink_bytes_total"] + totals["comm/downlink_bytes_total"]) // 1000)
