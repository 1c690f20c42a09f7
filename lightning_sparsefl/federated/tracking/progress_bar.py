"""The progress bar over rounds."""

from __future__ import annotations

import sys
from typing import Any

from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from lightning_sparsefl.federated.rounds.round_metrics import higher_is_better

_SPREAD = ("_std", "_worst10")


class RoundProgressBar(ProgressBar):
    """Progress bar with the finished rounds, the remaining time, and the last global and personal score."""

    def __init__(self) -> None:
        super().__init__()
        self._bar: Any = None
        self._shown = True

    def disable(self) -> None:
        """Hide the bar, as on ranks other than the first."""
        self._shown = False

    def enable(self) -> None:
        """Show the bar."""
        self._shown = True

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Create the bar, starting at the first round of a resumed run."""
        self._bar = Tqdm(
            desc="Rounds",
            total=trainer.max_epochs,
            initial=trainer.current_epoch,
            disable=not (self._shown and trainer.is_global_zero),
            dynamic_ncols=True,
            file=sys.stdout,
            bar_format="{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}",  # fits into 80 columns
        )

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Advance the bar by one round and update the scores."""
        scores: dict[str, str] = {}
        for name, value in trainer.callback_metrics.items():
            group = name.split("/")[0]
            if group in ("global", "personal") and higher_is_better(name) and not name.endswith(_SPREAD):
                scores.setdefault(group, f"{float(value):.3f}")
        self._bar.set_postfix(scores, refresh=False)
        self._bar.update(1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the finished bar, which stays on the screen."""
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the bar, which stays on the screen as it was."""
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
