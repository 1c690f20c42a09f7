"""Data of the figures of masks: density of the layers over rounds, and similarity of clients' masks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_sparsefl.report.measures.mean_std import mean_std
from lightning_sparsefl.report.measures.values import column
from lightning_sparsefl.report.plots.clients import MOST_PANELS
from lightning_sparsefl.report.plots.data import Curves, Line, Maps, Panel
from lightning_sparsefl.report.reading.columns import Column
from lightning_sparsefl.report.reading.groups import Group
from lightning_sparsefl.report.reading.runs import Run

_LAYER = "density/layer/"
_NO_MASKS = (
    "no run has recorded masks of two or more clients (`overlap.csv`); only methods whose clients upload masks do"
)


def layers(group: Group) -> list[str]:
    """Return the names of the masked tensors of a group, in the order of the model.

    Args:
        group: Group of runs.
    """
    names = (name.removeprefix(_LAYER) for run in group.runs for name in run.metrics if name.startswith(_LAYER))
    return list(dict.fromkeys(names))


def layer_densities(group: Group) -> Column:
    """Return the density of each layer in each round, as the mean over the runs that have a value.

    Args:
        group: Group of runs.

    Returns:
        Densities in [0, 1], float64 of shape (layers, rounds); NaN where no run has a value.
    """
    rounds = max(run.rounds for run in group.runs)
    table = np.full((len(layers(group)), rounds), np.nan)
    for row, name in enumerate(layers(group)):
        values: list[list[float]] = [[] for _ in range(rounds)]
        for run in group.runs:
            for round, value in zip(column(run, "round"), column(run, _LAYER + name), strict=True):
                values[int(round)].append(float(value))
        table[row] = [mean_std(found).mean for found in values]
    return table


def density_plot(groups: Sequence[Group]) -> Maps:
    """Return the density of each layer over the rounds, for each group of sparse runs.

    Args:
        groups: Groups of runs.
    """
    sparse = [group for group in groups if layers(group) and any(run.rounds for run in group.runs)]
    shown = sparse[:MOST_PANELS]
    return Maps(
        name="density",
        title="Density of the layers",
        caption=(
            "Fraction of the weights of each layer that the clients of a round held, as the mean over these clients "
            "and over the runs of a group; at the right, the value of the last round. Layers are in the order of the "
            "model."
            + (f" The first {MOST_PANELS} of {len(sparse)} groups with masks." if len(sparse) > MOST_PANELS else "")
        ),
        missing=None if shown else "no run has masks: all layers are dense",
        x_label="communication round",
        y_label="",
        colour_label="density",
        limits=(0.0, 1.0),
        panels=[_densities(group) for group in shown],
        shows_last=True,
    )


def _densities(group: Group) -> Panel:
    table = layer_densities(group)
    return Panel(group.name, table, layers(group), [str(round + 1) for round in range(table.shape[1])])


def similarity_plot(groups: Sequence[Group]) -> Maps:
    """Return the overlap of the masks of each pair of clients when it was last recorded.

    Args:
        groups: Groups of runs.
    """
    shown = [group for group in groups if len(group.runs[0].overlaps.get("round", ()))][:MOST_PANELS]
    panels = [_similarity(group) for group in shown]
    return Maps(
        name="mask_similarity",
        title="Similarity of the clients' masks",
        caption=(
            "Jaccard overlap of the masks that each pair of clients uploaded last, in the first run of each group: the "
            "weights that both keep as a fraction of those that either keeps. "
            f"Recorded after {_recorded(shown)}. At most 64 clients are compared; the diagonal is left out."
        ),
        missing=None if shown else _NO_MASKS,
        x_label="client",
        y_label="client",
        colour_label="Jaccard overlap",
        panels=panels,
    )


def _recorded(groups: Sequence[Group]) -> str:
    """Return the numbers of finished rounds at which overlaps were last recorded."""
    rounds = dict.fromkeys(int(group.runs[0].overlaps["round"].max()) + 1 for group in groups)
    return f"round {', '.join(map(str, rounds))}"


def _similarity(group: Group) -> Panel:
    overlaps = group.runs[0].overlaps
    newest = overlaps["round"] == overlaps["round"].max()
    first, other = (overlaps[name][newest].astype(int) for name in ("client", "other"))
    clients, places = np.unique(np.concatenate([first, other]), return_inverse=True)
    row, column_ = places[: len(first)], places[len(first) :]
    table = np.full((len(clients), len(clients)), np.nan)
    table[row, column_] = table[column_, row] = overlaps["overlap"][newest]
    names = [str(client) for client in clients]
    return Panel(group.name, table, names, names)


def mean_similarity_plot(groups: Sequence[Group]) -> Curves:
    """Return the mean overlap of the masks of all pairs of clients in each recorded round.

    Args:
        groups: Groups of runs.
    """
    lines = [line for group in groups if (line := _mean_overlaps(group)).x]
    return Curves(
        name="mask_similarity_rounds",
        title="Similarity of masks over rounds",
        caption=(
            "Mean Jaccard overlap over all pairs of clients, in the rounds in which it was recorded "
            "(`federation.pictures_every_n_rounds`). Line: mean over runs; band: one sample standard deviation."
        ),
        missing=None if lines else _NO_MASKS,
        x_label="communication round",
        panels={"mean overlap of masks": lines} if lines else {},
    )


def _mean_overlaps(group: Group) -> Line:
    points: dict[int, list[float]] = {}
    for run in group.runs:
        for round, mean in mean_overlaps(run).items():
            points.setdefault(round, []).append(mean)
    rounds = sorted(points)
    return Line(group.name, [mean_std([round]) for round in rounds], [mean_std(points[round]) for round in rounds])


def mean_overlaps(run: Run) -> dict[int, float]:
    """Return the mean overlap over all pairs of clients, by the number of finished rounds.

    Args:
        run: Run.
    """
    rounds = run.overlaps.get("round", np.array([]))
    return {int(round) + 1: float(run.overlaps["overlap"][rounds == round].mean()) for round in np.unique(rounds)}
