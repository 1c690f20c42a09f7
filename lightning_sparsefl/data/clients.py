"""Ordinary Lightning data modules, one per client, as a federation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader

from lightning_sparsefl.data.federated import FederatedDataModule, no_loader
from lightning_sparsefl.errors import InvalidOption, require


class ClientDataModules(FederatedDataModule):
    """Client k trains and is scored on the loaders of ``modules[k]``, as they are.

    The pooled loaders join the clients' data sets, with the batch size and ``collate_fn`` of client 0.

    Args:
        modules: One LightningDataModule per client. Each is prepared, and set up once for fitting
            and testing.
        num_classes: Number of classes; None = that of ``modules[0]``, and unknown if it has none.
        sample_shape: Channels, height, width; None = that of ``modules[0]``, and unknown if it has none.
        eval_split: Whether training is followed on the clients' validation or test loaders.
        client_sizes: Training samples of each client, for what is computed before ``setup``; None = unknown,
            shown as 0 until then.

    Raises:
        InvalidOption: If there is no module, or `client_sizes` does not fit them.
    """

    def __init__(
        self,
        modules: Sequence[L.LightningDataModule],
        *,
        num_classes: int | None = None,
        sample_shape: tuple[int, int, int] | None = None,
        eval_split: Literal["val", "test"] = "val",
        client_sizes: Sequence[int] | None = None,
    ) -> None:
        require(len(modules) > 0, "data.modules", modules, "at least one data module")
        if client_sizes is not None and len(client_sizes) != len(modules):
            raise InvalidOption(
                f"`data.client_sizes` has {len(client_sizes)} entries; expected one for each of the {len(modules)} "
                "modules."
            )
        self._told_sizes = client_sizes
        super().__init__(
            num_clients=len(modules), batch_size=getattr(modules[0], "batch_size", 1), eval_split=eval_split
        )
        self.modules = list(modules)
        for name, value in (("num_classes", num_classes), ("sample_shape", sample_shape)):
            known = getattr(modules[0], name, None) if value is None else value
            if known is not None:
                setattr(self, name, known)
        self._is_set_up = False

    def prepare_data(self) -> None:
        """Prepare every client's module."""
        for module in self.modules:
            module.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        """Set up every client's module and count its training samples. Later calls do nothing.

        Raises:
            InvalidOption: If a training data set is empty or has no length.
        """
        if self._is_set_up:
            return
        for module in self.modules:
            module.trainer = self.trainer
            module.setup("fit")
            module.setup("test")
        loaders = [self.client_train_dataloader(client) for client in range(self.num_clients)]
        self.client_sizes = [_num_samples(loader, client) for client, loader in enumerate(loaders)]
        self.batch_size = loaders[0].batch_size or self.batch_size
        self._is_set_up = True

    def teardown(self, stage: str) -> None:
        """Tear down every client's module."""
        for module in self.modules:
            module.teardown(stage)

    def client_train_dataloader(self, client: int) -> DataLoader[Any]:
        """The client's own ``train_dataloader()``."""
        return _single(self.modules[client].train_dataloader(), "train_dataloader", client)

    def client_val_dataloader(self, client: int) -> DataLoader[Any] | None:
        """The client's own ``val_dataloader()``; None if it has none."""
        module = self.modules[client]
        if not is_overridden("val_dataloader", module):
            return None
        loader = module.val_dataloader()
        return None if loader is None else _single(loader, "val_dataloader", client)

    def client_test_dataloader(self, client: int) -> DataLoader[Any]:
        """The client's own ``test_dataloader()``.

        Raises:
            InvalidOption: If it has none.
        """
        module = self.modules[client]
        if not is_overridden("test_dataloader", module):
            raise InvalidOption(
                f"The data module of client {client} has no `test_dataloader`; define one, or set "
                "`data.eval_split: val`."
            )
        return _single(module.test_dataloader(), "test_dataloader", client)

    def client_label_counts(self, client: int) -> Tensor:
        """How many training examples of each class a client owns; reads its training loader once.

        Raises:
            InvalidOption: If the number of classes is unknown.
        """
        if not hasattr(self, "num_classes"):
            raise InvalidOption("Counting labels needs the number of classes; set `data.num_classes`.")
        counts = torch.zeros(self.num_classes, dtype=torch.int64)
        for _, labels in self.client_train_dataloader(client):
            counts += torch.bincount(labels, minlength=self.num_classes)
        return counts

    def train_dataloader(self) -> DataLoader[Any]:
        """All clients' training data."""
        clients = range(self.num_clients)
        return _pool([self.client_train_dataloader(client) for client in clients], shuffle=True)

    def val_dataloader(self) -> DataLoader[Any] | list[Any] | None:
        """All clients' validation data; without any None, or nothing in a plain ``Trainer``."""
        loaders = [self.client_val_dataloader(client) for client in range(self.num_clients)]
        present = [loader for loader in loaders if loader is not None]
        return _pool(present) if present else no_loader(self)

    def test_dataloader(self) -> DataLoader[Any]:
        """All clients' test data."""
        return _pool([self.client_test_dataloader(client) for client in range(self.num_clients)])

    def _nominal_sizes(self) -> list[int]:
        return [0] * self.num_clients if self._told_sizes is None else list(self._told_sizes)


def _single(loader: Any, hook: str, client: int) -> DataLoader[Any]:
    if not isinstance(loader, DataLoader):
        raise InvalidOption(
            f"`{hook}` of client {client} returns a {type(loader).__name__}: expected one DataLoader; change "
            "that data module."
        )
    return loader


def _num_samples(loader: DataLoader[Any], client: int) -> int:
    size = len(loader.dataset) if hasattr(loader.dataset, "__len__") else 0
    if size == 0:
        raise InvalidOption(
            f"The training data set of client {client} is empty or has no length: expected a sized data set; "
            "change that data module."
        )
    return size


def _pool(loaders: Sequence[DataLoader[Any]], shuffle: bool = False) -> DataLoader[Any]:
    first = loaders[0]
    joined: ConcatDataset[Any] = ConcatDataset([loader.dataset for loader in loaders])
    return DataLoader(joined, batch_size=first.batch_size or 1, collate_fn=first.collate_fn, shuffle=shuffle)
