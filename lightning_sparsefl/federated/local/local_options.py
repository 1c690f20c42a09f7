"""How every client trains."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_sparsefl.errors import check_types, require


@dataclass(frozen=True, kw_only=True)
class LocalOptions:
    """Options of local training, the same for every client; named as the arguments of ``lightning.pytorch.Trainer``."""

    max_epochs: int = 1
    """Number of local epochs; -1 = unlimited."""
    max_steps: int = -1
    """Number of optimizer steps; -1 = unlimited."""
    gradient_clip_val: float | None = None
    """Value at which gradients are clipped; None = no clipping."""
    gradient_clip_algorithm: str | None = None
    """Clipping by "norm" or by "value"; None = "norm"."""
    accumulate_grad_batches: int = 1
    """Number of batches whose gradients are accumulated for one optimizer step."""
    limit_train_batches: int | float = 1.0
    """Training batches per epoch, as a number (int) or a fraction (float)."""
    limit_val_batches: int | float = 1.0
    """Validation batches, as a number (int) or a fraction (float)."""
    limit_test_batches: int | float = 1.0
    """Test batches, as a number (int) or a fraction (float)."""
    log_every_n_steps: int = 50
    """Number of steps between two writes to the loggers."""
    default_root_dir: str = "."
    """Folder for the files of callbacks, used without a logger."""

    def __post_init__(self) -> None:
        check_types(self, "trainer.")
        require(self.max_epochs >= -1, "trainer.max_epochs", self.max_epochs, "a whole number >= -1")
        require(self.max_steps >= -1, "trainer.max_steps", self.max_steps, "a whole number >= -1")
        require(
            self.max_epochs != -1 or self.max_steps != -1, "trainer.max_epochs", -1, "a limit here or in `max_steps`"
        )
        batches, known = self.accumulate_grad_batches, (None, "norm", "value")
        require(batches >= 1, "trainer.accumulate_grad_batches", batches, "a whole number >= 1")
        clip = self.gradient_clip_val
        require(clip is None or clip >= 0, "trainer.gradient_clip_val", clip, "a number >= 0 or None")
        algorithm = self.gradient_clip_algorithm
        require(algorithm in known, "trainer.gradient_clip_algorithm", algorithm, "'norm', 'value' or None")
        for split in ("train", "val", "test"):
            limit = getattr(self, f"limit_{split}_batches")
            fits = limit >= 0 if isinstance(limit, int) else 0 <= limit <= 1
            require(fits, f"trainer.limit_{split}_batches", limit, "a whole number >= 0 or a fraction in [0, 1]")
