"""The progress over rounds: a bar in a terminal or a notebook, elsewhere a line for each evaluated round."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from rich.console import Console

from lightning_sparsefl.federated.tracking.phase_progress import PhaseProgress
from lightning_sparsefl.report import print_line, quantity
from lightning_sparsefl.report.measures.client_statistics import is_statistic
from lightning_sparsefl.report.measures.direction import higher_is_better

_REFRESH_SECONDS = 0.2
_PHASES = {"train": "train", "score": "score", "finetune": "fine-tune", "survey": "survey"}
"""Words for the work of clients, by the task in the name of a phase."""


class RoundProgressBar(ProgressBar):
    """Progress over rounds, with the last global and personal score.

    In a terminal or a notebook it is a bar, which also shows the clients of the current round or evaluation that this
    process has finished. Elsewhere, such as in the log file of a cluster, it is a line for each evaluated round. Work
    before the first round and after the last one, and long rounds in a log file, are shown by a :class:`PhaseProgress`.

    Args:
        live: Whether to show the bar. Default: whether the standard output is a terminal or a notebook.
    """

    def __init__(self, live: bool | None = None) -> None:
        super().__init__()
        self.phases = PhaseProgress(live)
        """Progress of the work outside rounds."""
        self._live = live
        self._bar: Any = None
        self._shown = True
        self._evaluated = False
        self._scores: dict[str, str] = {}
        self._refreshed = 0.0
        self._started, self._first_round = 0.0, 0

    def disable(self) -> None:
        """Hide the progress, as on ranks other than the first."""
        self._shown = self.phases.shown = False

    def enable(self) -> None:
        """Show the progress."""
        self._shown = self.phases.shown = True

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Create the bar, starting at the first round of a resumed run."""
        self._started, self._first_round = time.monotonic(), trainer.current_epoch
        self._shown = self._shown and trainer.is_global_zero
        console = Console()
        live = console.is_terminal or console.is_jupyter if self._live is None else self._live
        if not (live and self._shown):
            return
        self._bar = Tqdm(
            desc="Rounds",
            total=trainer.max_epochs,
            initial=trainer.current_epoch,
            dynamic_ncols=True,
            file=sys.stdout,
            bar_format="{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}",  # fits into 80 columns
        )

    def on_client_end(self, phase: str, done: int, total: int) -> None:
        """Show how many clients of the current phase this process has finished, in the bar at most five times a second.

        Args:
            phase: Name of the phase, such as ``train 3`` or ``score 4``.
            done: Number of finished clients.
            total: Number of clients of this process, or of all if it is not known in advance.
        """
        word, _, number = phase.partition(" ")
        now = time.monotonic()
        if self._bar is None:
            self.phases.show(_phase_name(word, number), done, total)
        elif now - self._refreshed >= _REFRESH_SECONDS:
            self._refreshed = now
            self._bar.set_postfix({_PHASES[word]: f"{done}/{total}", **self._scores})

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Remember that the round was evaluated."""
        self._evaluated = True

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Advance by one round and update the scores."""
        self._scores = _scores(trainer.callback_metrics)
        if self._bar is not None:
            self._bar.set_postfix(self._scores, refresh=False)
            self._bar.update(1)
        elif self._shown and self._evaluated:
            print_line(self._line(trainer.current_epoch + 1, trainer.max_epochs, trainer.callback_metrics))
        self._evaluated = False

    def _line(self, finished: int, rounds: int, metrics: Mapping[str, Any]) -> str:
        """Return the line of an evaluated round."""
        elapsed = time.monotonic() - self._started
        left = elapsed / (finished - self._first_round) * (rounds - finished)
        parts = [f"round {finished}/{rounds}", *(f"{name} {score}" for name, score in self._scores.items())]
        if "comm/uplink_bytes_total" in metrics:
            parts.append(f"up {quantity(float(metrics['comm/uplink_bytes_total']), 'B')}")
        clock = Tqdm.format_interval
        return "  ".join([*parts, f"elapsed {clock(elapsed)}", f"remaining {clock(left)}"])

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the finished bar, which stays on the screen."""
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the bar, which stays on the screen as it was."""
        self._close()

    def _close(self) -> None:
        self.phases.close()
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _phase_name(word: str, number: str) -> str:
    """Return the name of a phase with the round counted from 1, as in the lines of rounds.

    Example:
        >>> _phase_name("train", "3"), _phase_name("score", "4"), _phase_name("survey", "")
        ('train, round 4', 'score, round 4', 'survey')
    """
    return f"{_PHASES[word]}, round {int(number) + (word == 'train')}" if number else _PHASES[word]


def _scores(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Return the first global and personal score that should rise, by group and metric."""
    scores: dict[str, tuple[str, str]] = {}
    for name, value in metrics.items():
        group, _, metric = name.partition("/")
        if group in ("global", "personal") and higher_is_better(name) and not is_statistic(name, metrics):
            scores.setdefault(group, (f"{group} {metric}", f"{float(value):.3f}"))
    return dict(scores.values())
