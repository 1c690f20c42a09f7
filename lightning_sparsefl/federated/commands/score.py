"""Scores the models of a checkpoint, or the initial ones."""

from __future__ import annotations

from lightning_sparsefl.federated.commands.run import Run
from lightning_sparsefl.report import print_table, summary_rows


def score(run: Run) -> dict[str, float]:
    """Score the global and the personal models; return the logged keys.

    Args:
        run: Parts of the run.
    """
    state, _ = run.start(training=False)
    with run.cohort.interrupts:
        scores = run.scorer.scores(state).summary()
    if run.ranks.first:
        rounds = state.server.round
        title = f"{type(run.algorithm).__name__}, {run.split} sets, after {rounds} round{'s' if rounds != 1 else ''}"
        print_table(title, ("", ""), summary_rows(scores))
    return scores
