"""One bar over rounds."""

from __future__ import annotations

import sys
from typing import Any

from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from lightning_sparsefl.federated.evaluation.scores import higher_is_better

_SPREAD = ("_std", "_worst10")


class RoundProgressBar(ProgressBar):
    """Shows rounds done, the time left, and the newest global and personal score."""

    def __init__(self) -> None:
        super().__init__()
        self._bar: Any = None
        self._shown = True

    def disable(self) -> None:
        """Show nothing, as on ranks other than the first."""
        self._shown = False

    def enable(self) -> None:
        """Show the bar."""
        self._shown = True

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Open the bar, at the round that a resumed run starts from."""
        self._bar = Tqdm(
            desc="Rounds",
            total=trainer.max_epochs,
            initial=trainer.current_epoch,
            disable=not (self._shown and trainer.is_global_zero),
            dynamic_ncols=True,
            file=sys.stdout,
            bar_format="{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}",  # leaves room at 80 columns
        )

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Advance by a round."""
        scores: dict[str, str] = {}
        for name, value in trainer.callback_metrics.items():
            group = name.split("/")[0]
            if group in ("global", "personal") and higher_is_better(name) and not name.endswith(_SPREAD):
                scores.setdefault(group, f"{float(value):.3f}")
        self._bar.set_postfix(scores, refresh=False)
        self._bar.update(1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the finished bar on the screen."""
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the bar as it was."""
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
