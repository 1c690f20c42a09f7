"""What the server knows of the clients' data: their sizes, and perhaps a test set of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from lightning_sparsefl.errors import InvalidOption


class ServerData:
    """Stands in for a data module whose data is on the nodes.

    Args:
        described: Data module of the configuration; only its options are read, and with `holdout` its test set.
        holdout: Whether the data module can load its test set here, for the scores of the global model.

    Raises:
        InvalidOption: If the held-out set is not one of test samples.
    """

    def __init__(self, described: Any, holdout: bool) -> None:
        if holdout and getattr(described, "eval_split", "val") != "test":
            raise InvalidOption(
                "`holdout` is true, but `data.eval_split` is not 'test'; set it, or `holdout` to false."
            )
        self.described, self.holdout = described, holdout
        self.sizes: Mapping[int, int] = {}
        """Number of training samples by client, set when the nodes have said hello."""

    def __getattr__(self, name: str) -> Any:
        """Return an option of the data module."""
        if name.startswith("__") or name == "described":  # which copying asks for before it is set
            raise AttributeError(name)
        return getattr(self.described, name)

    @property
    def client_sizes(self) -> list[int]:
        """Numbers of training samples."""
        return [self.sizes[client] for client in range(int(self.described.num_clients))]

    def num_examples(self, client: int) -> int:
        """Return the number of a client's training samples."""
        return self.sizes[client]

    def prepare_data(self) -> None:
        """Prepare the test set if it is here."""
        if self.holdout:
            self.described.prepare_data()

    def setup(self, stage: str) -> None:
        """Set up the test set if it is here."""
        if self.holdout:
            self.described.setup(stage)

    def client_train_dataloader(self, client: int) -> NoReturn:
        """Raise :class:`InvalidOption`: no client's data is here."""
        raise InvalidOption(
            f"The data of client {client} is on its node; expected `sample_shape` and `batch_size` in the data module, "
            "or `example_input_array` in the model."
        )

    client_val_dataloader = client_test_dataloader = client_train_dataloader
