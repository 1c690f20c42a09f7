"""Validation of the module and the data of the user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch.nn.parameter import UninitializedParameter

from lightning_sparsefl.data import ClientDataModules
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.exchange.flat import require_trainable
from lightning_sparsefl.federated.options import Federation
from lightning_sparsefl.federated.rounds.run_options import RunOptions
from lightning_sparsefl.seeds import seed_all

ClientData = LightningDataModule | Sequence[LightningDataModule]
"""A federated data module, or one ordinary data module per client."""

_ATTRIBUTES = (
    "num_clients",
    "num_examples",
    *(f"client_{split}_dataloader" for split in ("train", "val", "test")),
    "val_dataloader",
    "test_dataloader",
)
"""Attributes that the engine needs of a federated data module."""


def as_client_data(data: ClientData | None) -> Any:
    """Return a federated data module.

    Args:
        data: Federated data module, or a sequence of ordinary data modules, one per client.

    Raises:
        InvalidOption: If `data` is neither.
    """
    if isinstance(data, Sequence):
        strangers = [type(part).__name__ for part in data if not isinstance(part, LightningDataModule)]
        if strangers:
            raise InvalidOption(f"`data` lists a {strangers[0]}; expected one LightningDataModule per client.")
        data = ClientDataModules(list(data))
    missing = [name for name in _ATTRIBUTES if not hasattr(data, name)]
    if missing:
        raise InvalidOption(
            f"`data` is a {type(data).__name__} without `{missing[0]}`; expected a `FederatedDataModule`, such as "
            "`FederatedDataset(train_set, test_set, num_clients=10)`, which divides data sets among clients, or a list "
            "with one LightningDataModule per client."
        )
    return data


def check_data(data: Any, federation: Federation) -> None:
    """Raise :class:`InvalidOption` if the options do not fit the data.

    Args:
        data: Data module of the clients.
        federation: Options of the federation.
    """
    federation.check_fleet(data.num_clients)
    split = getattr(data, "eval_split", "val")
    if split not in ("val", "test"):
        raise InvalidOption(f"`data.eval_split` is {split!r}; expected 'val' or 'test'.")


def warn_of_full_capacities(options: RunOptions) -> None:
    """Warn if all capacities are 1 and the method needs others to differ from training the full model.

    Args:
        options: Options of the run.
    """
    consequence, capacities = options.algorithm.at_full_capacity, options.federation.capacities
    if consequence is not None and all(capacity == 1 for capacity in capacities or ()):
        rank_zero_warn(
            f"`federation.capacities` is 1 for all clients, so that {type(options.algorithm).__name__} {consequence}; "
            "set it to fractions of the model, for example [0.25, 0.5, 1.0]."
        )


def make_layers(module: LightningModule, seed: int) -> None:
    """Call a module's `configure_model`, so that the layers that it makes are part of the federation.

    A `Trainer` calls the hook at the start of each local fit, where it must leave these layers as they are.

    Args:
        module: Module of the user, changed in place.
        seed: Random seed of the run, on which the first weights of these layers depend.

    Raises:
        InvalidOption: If the hook makes its layers anew in each call.
    """
    if not isinstance(module, LightningModule) or not is_overridden("configure_model", module):
        return
    with isolate_rng():
        seed_all(seed, "configure_model")
        module.configure_model()
        made = dict(module.named_parameters())
        module.configure_model()
    again = dict(module.named_parameters())
    replaced = next((name for name in {**made, **again} if made.get(name) is not again.get(name)), None)
    if replaced is not None:
        raise InvalidOption(
            f"`{type(module).__name__}.configure_model` makes {replaced!r} anew in each call, and each local fit calls "
            "it; expected it to make only layers that are missing, after `if self.layer is None` (option `model`)."
        )


def check_module(module: LightningModule) -> None:
    """Raise :class:`InvalidOption` if a module cannot be trained.

    Args:
        module: Module of the user.
    """
    if hasattr(module, "_orig_mod"):
        raise InvalidOption(
            "`model` is compiled as a whole; expected a `lightning.LightningModule`: compile one of its submodules "
            "instead, such as `self.net = torch.compile(self.net)`."
        )
    if not isinstance(module, LightningModule):
        raise InvalidOption(
            f"`model` is a {type(module).__module__}.{type(module).__name__}; expected a `lightning.LightningModule` "
            "(one of the package `pytorch_lightning` is another class)."
        )
    for hook in ("training_step", "configure_optimizers"):
        if not is_overridden(hook, module):
            raise InvalidOption(f"`{type(module).__name__}` has no `{hook}`; define it to train (option `model`).")
    require_trainable(module)
    if any(isinstance(parameter, UninitializedParameter) for parameter in module.parameters()):
        raise InvalidOption(
            f"`{type(module).__name__}` has lazy layers; expected layers of known shapes, since clients share them "
            "(option `model`)."
        )
