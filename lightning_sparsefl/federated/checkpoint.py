"""`checkpoints/last.ckpt`: the last committed round, from which a run goes on.

A checkpoint is an ordinary Lightning one, whose ``state_dict`` is the global model, plus the engine's own part under
``sparsefl``. It holds plain types and tensors only, so it loads with ``weights_only=True``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback, LightningModule

from lightning_sparsefl.cost import Ledger
from lightning_sparsefl.errors import CheckpointMismatch
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Bench
from lightning_sparsefl.federated.files import load_plain, write_atomically
from lightning_sparsefl.federated.store import ClientStore, pack_plain, unpack_plain
from lightning_sparsefl.types import ServerState

FORMAT = 1
LAST = "last.ckpt"
CLIENTS = "clients"


def identity(algorithm: FederatedAlgorithm, bench: Bench) -> dict[str, Any]:
    """What a checkpoint and whoever reads it must agree on, as plain types."""
    options = _fields(algorithm)
    return {
        "algorithm": type(algorithm).__name__,
        "algorithm options": {
            name: v if isinstance(v, bool | int | float | str | None) else repr(v) for name, v in options.items()
        },
        "number of clients": int(bench.data.num_clients),
        "model": {name: list(shape) for name, shape in bench.flat.layout.shapes.items()},
    }


def _fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass; nothing of anything else."""
    if not dataclasses.is_dataclass(value):
        return {}
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def compose(
    server: ServerState,
    bench: Bench,
    ledger: Ledger,
    callbacks: list[Callback],
    who: Mapping[str, Any],
    clients: Mapping[str, Any],
    selected: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The content of a checkpoint.

    Args:
        server: After the committed round.
        bench: With the module.
        ledger: Of the costs so far.
        callbacks: Of the round level; each saves its own state.
        who: As :func:`identity` made it.
        clients: ``index`` into the record files, or the ``records`` themselves.
        selected: The best round so far, if one is looked for.
    """
    bench.load(server.weights)
    states = {callback.state_key: state for callback in callbacks if (state := callback.state_dict())}
    pack_plain(states)  # a state that could not be read again is refused now, by its type
    return {
        "state_dict": {name: tensor.detach().cpu().clone() for name, tensor in bench.module.state_dict().items()},
        "epoch": server.round,
        "global_step": server.round,
        "pytorch-lightning_version": L.__version__,
        "callbacks": states,
        LightningModule.CHECKPOINT_HYPER_PARAMS_KEY: _plain_hparams(bench.module),
        "sparsefl": {
            "format": FORMAT,
            "identity": dict(who),
            "round": server.round,
            "masks": pack_plain(server.masks),
            "extra": pack_plain(server.extra),
            "ledger": ledger.state_dict(),
            "clients": dict(clients),
            "selected": selected,
        },
    }


def _plain_hparams(module: LightningModule) -> dict[str, Any]:
    """Hyper-parameters that a checkpoint may hold; others (classes, functions) stay out."""
    return {name: value for name, value in module.hparams.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    try:
        pack_plain(value)
    except TypeError:
        return False
    return True


@dataclasses.dataclass(frozen=True)
class Resumed:
    """What a checkpoint yields."""

    server: ServerState
    callbacks: Mapping[str, Any]
    selected: Mapping[str, Any] | None = None
    """The best round so far, as it was composed."""


def restore(
    path: Path,
    bench: Bench,
    ledger: Ledger,
    store: ClientStore,
    who: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> Resumed:
    """Read a checkpoint into the ledger and the store.

    Args:
        path: Of the checkpoint.
        bench: Gives the layout and the device.
        ledger: Filled.
        store: Filled.
        who: The identity of this run.
        settings: Further facts that must agree where training goes on; none where models are only scored.

    Raises:
        CheckpointMismatch: If it is torn, foreign, or of another run.
    """
    content = load_plain(path)
    own = content.get("sparsefl") if isinstance(content, Mapping) else None
    if not isinstance(own, Mapping) or own.get("format") != FORMAT:
        raise CheckpointMismatch(
            f"{path} is not a checkpoint of a federated run in format {FORMAT}; expected a run's `checkpoints/{LAST}` "
            "(option `ckpt_path`)."
        )
    _compare(path, own["identity"], who)
    _compare(path, own["identity"]["training"], settings)
    clients = own["clients"]
    store.load(clients.get("index", {}), path.parent / CLIENTS, clients.get("records", {}))
    ledger.load_state_dict(own["ledger"])
    bench.restore_counters(content["state_dict"])
    device = bench.device
    names = bench.flat.layout.names
    weights = torch.cat([content["state_dict"][name].reshape(-1).to(bench.flat.layout.dtype) for name in names]).to(
        device
    )
    server = ServerState(
        round=own["round"],
        weights=bench.flat.layout.tree(weights),
        masks=unpack_plain(own["masks"], device),
        extra=unpack_plain(own["extra"], device),
    )
    return Resumed(server=server, callbacks=content["callbacks"], selected=own.get("selected"))


def _compare(path: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    for name, value in ours.items():
        if theirs.get(name) != value:
            got, expected = _difference(theirs.get(name), value)
            raise CheckpointMismatch(
                f"{path} is of another run: its {name} is {got}, this run's is {expected}; "
                "choose the run's own `ckpt_path`, or its configuration."
            )


def _difference(theirs: Any, ours: Any) -> tuple[Any, Any]:
    """The first entries that differ, so that the sentence stays short."""
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        for key in [*ours, *theirs]:
            if theirs.get(key) != ours.get(key):
                return {key: theirs.get(key)}, {key: ours.get(key)}
    return theirs, ours


def save(path: Path, content: Mapping[str, Any]) -> None:
    """Write a checkpoint; whole, or not at all."""
    write_atomically(path, dict(content))
