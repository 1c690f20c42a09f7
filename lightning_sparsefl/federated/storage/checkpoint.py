"""`checkpoints/last.ckpt`: the last committed round, from which a run goes on.

A checkpoint is an ordinary Lightning one, whose ``state_dict`` is the global model, plus the engine's own part under
``sparsefl``, with a checksum of all of it and of the record files. It holds plain types and tensors only, so it loads
with ``weights_only=True``. The one before it is kept beside it, with the record files that it names.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_sparsefl.cost import Ledger
from lightning_sparsefl.errors import CheckpointMismatch, SparseFLError
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import ClientWorker
from lightning_sparsefl.federated.storage.atomic_files import fingerprint, load_plain, write_atomically
from lightning_sparsefl.federated.storage.records import MemoryStore, pack_plain, unpack_plain
from lightning_sparsefl.types import ServerState

FORMAT = 2
LAST, PREVIOUS, REFUSED = "last.ckpt", "previous.ckpt", "last.ckpt.refused"
CLIENTS = "clients"


def identity(algorithm: FederatedAlgorithm, bench: ClientWorker) -> dict[str, Any]:
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


def callback_states(callbacks: list[Callback]) -> dict[str, Any]:
    """States of the round level's callbacks, as plain types; one that cannot be read again is refused, by its type."""
    return {callback.state_key: pack_plain(state) for callback in callbacks if (state := callback.state_dict())}


def compose(
    server: ServerState,
    bench: ClientWorker,
    ledger: Ledger,
    callbacks: Mapping[str, Any],
    who: Mapping[str, Any],
    clients: Mapping[str, Any],
    log: Mapping[str, Any],
    selected: Mapping[str, Any] | None = None,
    stopped: bool = False,
) -> dict[str, Any]:
    """The content of a checkpoint.

    Args:
        server: After the committed round.
        bench: With the module.
        ledger: Of the costs so far.
        callbacks: As :func:`callback_states` made them.
        who: As :func:`identity` made it.
        clients: ``index`` into the record files and their ``checksums``, or the ``records`` themselves.
        log: What the recorder goes on with.
        selected: The best round so far, if one is looked for.
        stopped: Whether a callback asked for no more rounds.
    """
    bench.load(server.weights)
    content: dict[str, Any] = {
        "state_dict": {name: tensor.detach().cpu().clone() for name, tensor in bench.module.state_dict().items()},
        "epoch": server.round,
        "global_step": server.round,
        "pytorch-lightning_version": L.__version__,
        "callbacks": dict(callbacks),
        LightningModule.CHECKPOINT_HYPER_PARAMS_KEY: plain_hparams(bench.module),
        "sparsefl": {
            "format": FORMAT,
            "identity": dict(who),
            "round": server.round,
            "masks": pack_plain(server.masks),
            "extra": pack_plain(server.extra),
            "ledger": ledger.state_dict(),
            "clients": dict(clients),
            "selected": selected,
            "log": dict(log),
            "stopped": stopped,
        },
    }
    content["sparsefl"]["checksum"] = fingerprint(content)
    return content


def plain_hparams(module: LightningModule) -> dict[str, Any]:
    """Hyper-parameters that a checkpoint may hold; others (classes, functions) stay out."""
    plain = {}
    for name, value in module.hparams.items():
        with contextlib.suppress(TypeError):
            pack_plain(value)
            plain[name] = _builtin(value)
    return plain


def _builtin(value: Any) -> Any:
    """Plain values without kinds of mappings and sequences that only a pickle could bring back."""
    if isinstance(value, Mapping):
        return {key: _builtin(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (tuple if isinstance(value, tuple) else list)(_builtin(item) for item in value)
    return value if isinstance(value, torch.Tensor) else pack_plain(value)


@dataclasses.dataclass(frozen=True)
class Resumed:
    """What a checkpoint yields."""

    server: ServerState
    callbacks: Mapping[str, Any]
    selected: Mapping[str, Any] | None = None
    """The best round so far, as it was composed."""
    log: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What the recorder goes on with."""
    stopped: bool = False
    """Whether a callback had asked for no more rounds."""


def restore(
    path: Path,
    bench: ClientWorker,
    ledger: Ledger,
    store: MemoryStore,
    who: Mapping[str, Any],
    settings: Mapping[str, Any],
    moved: bool = False,
) -> Resumed:
    """Read a checkpoint into the ledger and the store, which stay as they are if it is refused.

    Args:
        path: Of the checkpoint.
        bench: Gives the layout and the device.
        ledger: Filled.
        store: Filled.
        who: The identity of this run.
        settings: Further facts that must agree where training goes on; none where models are only scored.
        moved: Whether training goes on in another folder.

    Raises:
        CheckpointMismatch: If it is torn, damaged, foreign, or of another run.
    """
    with as_checkpoint_error(path):
        return _take_over(path, load_checkpoint(path), bench, ledger, store, who, settings, moved)


def _take_over(
    path: Path,
    content: Mapping[str, Any],
    bench: ClientWorker,
    ledger: Ledger,
    store: MemoryStore,
    who: Mapping[str, Any],
    settings: Mapping[str, Any],
    moved: bool,
) -> Resumed:
    own = content["sparsefl"]
    _compare(path, own["identity"], who)
    _compare(path, own["identity"]["training"], settings)
    _require_shapes(path, content["state_dict"], bench.module.state_dict())
    _require_round(own["round"])
    if type(own["stopped"]) is not bool:
        raise TypeError("it does not say whether the run was stopped")
    bench.flat.layout.check(unpack_plain(own["masks"], bench.device), f"{path}, among its masks,")
    clients = own["clients"]
    index, records, checksums = (clients.get(part, {}) for part in ("index", "records", "checksums"))
    store.load(index, path.parent / CLIENTS, records, checksums, moved)
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
    states = {key: unpack_plain(state, torch.device("cpu")) for key, state in content["callbacks"].items()}
    return Resumed(server, states, own["selected"], own["log"], own["stopped"])


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint of ours.

    Raises:
        CheckpointMismatch: If it is torn, damaged or foreign.
    """
    content: dict[str, Any] = load_plain(path)
    own = content.get("sparsefl") if isinstance(content, dict) else None
    if not isinstance(own, dict) or own.get("format") != FORMAT:
        raise CheckpointMismatch(
            f"{path} is not a checkpoint of a federated run in format {FORMAT}; expected a run's `checkpoints/{LAST}` "
            "(option `ckpt_path`)."
        )
    if own.pop("checksum", None) != fingerprint(content):
        raise CheckpointMismatch(f"{path} is damaged: its checksum is of another content; choose another `ckpt_path`.")
    return content


def index_of(path: Path) -> Any:
    """The index of the clients' records in a checkpoint; empty if there is no such file, None if it is no good."""
    if not path.exists():
        return {}
    try:
        with as_checkpoint_error(path):
            return load_checkpoint(path)["sparsefl"]["clients"]["index"]
    except CheckpointMismatch:
        return None


@contextlib.contextmanager
def as_checkpoint_error(path: Path | None) -> Iterator[None]:
    """What fails inside, since the content of a checkpoint is not what it should be, becomes a sentence."""
    try:
        yield
    except SparseFLError:
        raise
    except Exception as error:
        raise CheckpointMismatch(
            f"{path} is damaged, or of another version ({type(error).__name__}: {error}); choose another `ckpt_path`."
        ) from error


def _require_shapes(path: Path, state: Any, like: Mapping[str, Any]) -> None:
    if not isinstance(state, Mapping):
        raise TypeError("its state_dict is none")
    for name, value in like.items():
        if isinstance(value, torch.Tensor) and state[name].shape != value.shape:
            raise CheckpointMismatch(
                f"{path} is damaged: `{name}` has the shape {tuple(state[name].shape)}, expected {tuple(value.shape)}."
            )


def _require_round(number: Any) -> None:
    if type(number) is not int or number < 0:
        raise TypeError(f"its round is {str(number)[:20]!r}")


def load_callback(path: Path | None, callback: Callback, state: Any) -> None:
    """Give a round-level callback its state back.

    A `ModelCheckpoint` deletes files that its state names, in its own folder; Lightning takes ``folder/../elsewhere``
    for a part of that folder.

    Args:
        path: Of the checkpoint.
        callback: Set up already.
        state: From the checkpoint.

    Raises:
        CheckpointMismatch: If the state does not fit, or names a file elsewhere.
    """
    with as_checkpoint_error(path):
        if isinstance(callback, ModelCheckpoint) and state.get("dirpath") == callback.dirpath is not None:
            folder = Path(callback.dirpath).resolve()
            named = [*state["best_k_models"], state["kth_best_model_path"], state["last_model_path"]]
            strays = [name for name in named if name and not Path(name).resolve().is_relative_to(folder)]
            if strays:
                raise CheckpointMismatch(f"{path} names {strays[0]!r}, which is not in {folder}; choose another one.")
        callback.load_state_dict(state)


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
    """Write a checkpoint, whole or not at all, and keep the one that it replaces."""
    write_atomically(path, dict(content), keep=path.with_name(PREVIOUS))
