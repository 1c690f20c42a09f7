"""`checkpoints/initial.ckpt`: the weights that a run began with.

Every node knows them without a message, and what a client lacks of a model begins with them. A process that goes on
with the run makes the module anew, with the same weights only if it was given the same seed.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_sparsefl.errors import CheckpointMismatch
from lightning_sparsefl.federated.exchange.flat import FlatTree, Layout
from lightning_sparsefl.federated.exchange.hashing import fingerprint
from lightning_sparsefl.federated.exchange.plain_values import encoded
from lightning_sparsefl.federated.storage.atomic_files import write_bytes_atomically
from lightning_sparsefl.federated.storage.checkpoint import as_checkpoint_error
from lightning_sparsefl.federated.storage.safe_load import load_plain
from lightning_sparsefl.types import Weights

INITIAL = "initial.ckpt"


class InitialWeights:
    """The initial weights of a run on one process, and their file.

    Args:
        weights: Weights of the module before any training, which a restored run replaces in place.
        layout: Layout of the model.
    """

    def __init__(self, weights: FlatTree, layout: Layout) -> None:
        self.weights, self._layout = weights, layout
        self._is_saved = False

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the weights, which checkpoints hold."""
        return fingerprint(dict(self.weights))

    def save(self, folder: Path) -> None:
        """Write the file, if this process has not done so.

        Args:
            folder: Folder of the checkpoints.
        """
        if not self._is_saved:
            write_bytes_atomically(folder / INITIAL, encoded(self.copied()))
            self._is_saved = True

    def copied(self) -> dict[str, Tensor]:
        """Return copies of the weights on the CPU, which a file holds without the vector that they are views of."""
        return {name: value.detach().cpu().clone() for name, value in self.weights.items()}

    def restore(self, checkpoint: Path, digest: str | None, contained: Weights) -> None:
        """Take the weights over that the run of a checkpoint began with.

        Args:
            checkpoint: Path of the checkpoint, beside which the file is.
            digest: SHA-256 of the weights; None = the checkpoint, of an earlier version, does not know it.
            contained: Weights in the checkpoint itself, if it stands alone.

        Raises:
            CheckpointMismatch: If the weights are damaged, or of another run.
        """
        if digest is None or digest == self.digest:
            return
        path = checkpoint if contained else checkpoint.with_name(INITIAL)
        if not path.is_file():
            rank_zero_warn(
                f"{checkpoint} has no {INITIAL} beside it, and its run began with other weights than this model: "
                f"layers that clients keep for themselves begin with this model's; copy {INITIAL} too, or seed the "
                "model as the run did."
            )
            return
        with as_checkpoint_error(path):
            weights = contained or load_plain(path)
            if fingerprint(weights) != digest:
                raise CheckpointMismatch(
                    f"{path} is damaged, or of another run than {checkpoint}: its checksum does not match; choose "
                    "another `ckpt_path`."
                )
            self._layout.check(weights, str(path))
        self.weights.vector.copy_(self._layout.flatten(weights))
        if not self.weights.is_view:
            for name, value in self.weights.items():
                value.copy_(weights[name])
        self.digest = digest
