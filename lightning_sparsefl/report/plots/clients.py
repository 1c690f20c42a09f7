"""Data of the figures over clients: distribution of their scores, participation and duration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from lightning_sparsefl.report.measures.direction import higher_is_better, worst_tenth
from lightning_sparsefl.report.measures.mean_std import mean_std
from lightning_sparsefl.report.plots.data import Boxes, Maps, Panel
from lightning_sparsefl.report.plots.scores import NOT_EVALUATED
from lightning_sparsefl.report.reading.columns import Column
from lightning_sparsefl.report.reading.groups import Group
from lightning_sparsefl.report.reading.runs import Run

MOST_PANELS = 6
"""Maximum number of groups with a panel of their own."""
_NOT_SIMULATED = "time was not simulated (set `federation.devices`)"


def client_scores(run: Run, metric: str) -> dict[int, float]:
    """Return the scores of the clients' own models at the last evaluation, by client; NaN for one that is not finite.

    Args:
        run: Run.
        metric: Name of the metric.
    """
    values = run.clients.get(f"personal/{metric}")
    if values is None or np.isnan(values).all():
        return {}
    rounds, scored = run.clients["round"], ~np.isnan(values)
    chosen = scored & (rounds == rounds[scored].max())
    return {
        int(client): float(value) if np.isfinite(value) else math.nan
        for client, value in zip(run.clients["client"][chosen], values[chosen], strict=True)
    }


def distribution_plot(groups: Sequence[Group], metric: str | None) -> Boxes:
    """Return the distribution of the clients' scores at the last evaluation, and the mean of the worst tenth.

    Args:
        groups: Groups of runs.
        metric: Name of the metric; None if no run has been evaluated.
    """
    values: dict[str, Column] = {}
    tenths: dict[str, float] = {}
    for group in groups if metric is not None else ():
        found = [list(scores.values()) for run in group.runs if (scores := client_scores(run, str(metric)))]
        pooled = np.array([value for own in found for value in own])
        if np.isfinite(pooled).any():
            values[group.name] = pooled[np.isfinite(pooled)]
            tenths[group.name] = mean_std(worst_tenth(own, higher_is_better(str(metric))) for own in found).mean
    return Boxes(
        name="clients",
        title=f"{metric or 'Score'} over clients",
        caption=(
            f"{metric or 'Score'} of each client's own model at the last evaluation, with the clients of all runs of a "
            "group together. Box: quartiles and median; whiskers: 1.5 times the distance of the quartiles; dots: "
            "clients outside. Diamond: mean of the worst tenth of the clients of a run, averaged over runs. Scores "
            "that are not finite are left out, and their run from the diamond."
        ),
        missing=None if values else NOT_EVALUATED if metric is None else f"`clients.csv` has no personal {metric}",
        x_label=f"personal {metric}",
        values=values,
        worst_tenths=tenths,
    )


def duration_plot(groups: Sequence[Group]) -> Boxes:
    """Return the distribution of the simulated time of a client in a round.

    Args:
        groups: Groups of runs.
    """
    values = {
        group.name: np.concatenate(found)
        for group in groups
        if (found := [seconds for run in group.runs if len(seconds := _known_seconds(run, trained=True))])
    }
    return Boxes(
        name="durations",
        title="Duration of a client's round",
        caption=(
            "Simulated time of local training and upload, for each client that trained in time and each round of all "
            "runs of a group. Box: quartiles and median; whiskers: 1.5 times the distance of the quartiles; dots: "
            "values outside."
        ),
        missing=None if values else _NOT_SIMULATED,
        x_label="time of a client in a round",
        x_unit="s",
        values=values,
    )


def _known_seconds(run: Run, trained: bool = False) -> Column:
    """Return the times of the clients of all rounds, or without those of late ones, which may be expected alone."""
    if "simulated_seconds" not in run.clients:
        return np.array([])
    seconds = run.clients["simulated_seconds"]
    chosen = np.isfinite(seconds)
    return seconds[chosen & (run.clients["trained"] == 1) if trained and "trained" in run.clients else chosen]


def participation_plot(groups: Sequence[Group]) -> Maps:
    """Return who trained in which round of the first run of each group, and for how long where that is known.

    Args:
        groups: Groups of runs.
    """
    shown = [group for group in groups if _has_clients(group.runs[0])][:MOST_PANELS]
    timed = bool(shown) and all(len(_known_seconds(group.runs[0])) for group in shown)
    return Maps(
        name="participation",
        title="Participation",
        caption=(
            "Clients that trained in each round, in the first run of each group"
            + (f" (the first {MOST_PANELS} of {len(groups)} groups)" if len(groups) > MOST_PANELS else "")
            + (
                ", coloured by their simulated time."
                if timed
                else ". Time was not simulated, so that durations are unknown."
            )
            + " Cross: a client that was drawn, and failed or was late."
        ),
        missing=None if shown else "no round has finished yet",
        x_label="communication round",
        y_label="client",
        colour_label="simulated time" if timed else None,
        colour_unit="s",
        panels=[_participation(group, timed) for group in shown],
    )


def _has_clients(run: Run) -> bool:
    """Return whether clients of a finished round are known; `clients.csv` may have rows of the first one before."""
    return run.rounds > 0 and len(run.clients.get("round", ())) > 0


def _participation(group: Group, timed: bool) -> Panel:
    run = group.runs[0]
    columns: Mapping[str, Column] = run.clients
    numbers, clients = np.unique(columns["client"].astype(int), return_inverse=True)
    rounds = columns["round"].astype(int)
    table = np.full((len(numbers), run.rounds), np.nan)
    trained = (columns["trained"] == 1) & (rounds < run.rounds)
    table[clients[trained], rounds[trained]] = columns["simulated_seconds"][trained] if timed else 1.0
    charged = np.isfinite(columns.get("downlink_bytes", np.zeros(0)))
    drawn = (columns["trained"] == 0) & charged if len(charged) else np.zeros(len(clients), dtype=bool)
    failed = (drawn | (columns.get("failure", np.zeros(len(clients))) == 1)) & (rounds < run.rounds)
    return Panel(
        title=panel_title(group),
        table=table,
        row_names=[str(client) for client in numbers],
        column_names=[str(round + 1) for round in range(run.rounds)],
        marks=[(int(client), int(round)) for client, round in zip(clients[failed], rounds[failed], strict=True)],
    )


def panel_title(group: Group) -> str:
    """Return the title of a panel with the first run of a group.

    Args:
        group: Group of runs.
    """
    seed = group.runs[0].seed
    return f"{group.name}, seed {seed}" if len(group.runs) > 1 and seed else group.name
