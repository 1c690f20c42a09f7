"""`checkpoints/last.ckpt`: the last committed round, from which a run goes on.

A checkpoint is an ordinary Lightning one, whose ``state_dict`` is the global model, plus the engine's own part under
``sparsefl``, with a checksum over all of it and over the record files. It holds plain types and tensors only, so it
loads with ``weights_only=True``. The one before it is kept beside it, with the record files that it names.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_sparsefl.errors import CheckpointMismatch, InvalidOption, SparseFLError
from lightning_sparsefl.federated.exchange.flat import Layout
from lightning_sparsefl.federated.exchange.hashing import fingerprint
from lightning_sparsefl.federated.exchange.plain_values import pack_plain, unpack_plain
from lightning_sparsefl.federated.storage.atomic_files import write_bytes_atomically
from lightning_sparsefl.federated.storage.record_store import StoredRecords
from lightning_sparsefl.federated.storage.safe_load import load_plain
from lightning_sparsefl.sparse.versions import versions_of, with_versions
from lightning_sparsefl.types import PendingUpdate, RunState, ServerState

FORMAT = 5
_OWN = "sparsefl"
"""Key of what only this package reads."""
LAST, PREVIOUS, REFUSED = "last.ckpt", "previous.ckpt", "last.ckpt.refused"
CLIENTS = "clients"


@dataclass(frozen=True)
class SelectedRound:
    """The best round so far by `federation.select`."""

    key: str
    """Key that the round was selected by."""
    value: float
    """Value of the key."""
    state: RunState
    """State after the round."""


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint; `to_plain` and `from_plain` are the only places that know its schema."""

    state: RunState
    """State after the committed round."""
    module: Mapping[str, Tensor]
    """The module's ``state_dict`` with the global weights."""
    identity: Mapping[str, Any]
    """What a checkpoint and every command that reads it must agree on; see :func:`identity`."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """Further facts that training results depend on."""
    reported: Mapping[str, Any] = field(default_factory=dict)
    """Facts that results may depend on, and whose change is only reported."""
    server_records: StoredRecords = field(default_factory=StoredRecords)
    """What the server keeps about clients."""
    node_records: StoredRecords = field(default_factory=StoredRecords)
    """What the nodes keep of clients."""
    ledger: Mapping[str, Any] = field(default_factory=dict)
    """State of the ledger."""
    callbacks: Mapping[str, Any] = field(default_factory=dict)
    """States of the round-level callbacks."""
    log: Mapping[str, Any] = field(default_factory=dict)
    """State of the recorder."""
    selected: SelectedRound | None = None
    """The best round so far, if one is looked for."""
    stopped_by: str = ""
    """State key of the callback that asked for no more rounds; empty if none did."""
    unrecorded: Mapping[str, Any] | None = None
    """What is logged of the last round, as plain values, if a signal came before its scores; None = it is recorded."""
    hyper_parameters: Mapping[str, Any] = field(default_factory=dict)
    """Hyper-parameters of the module, as :func:`hparams_of` returns them."""
    added: Mapping[str, Any] = field(default_factory=dict)
    """What `on_save_checkpoint` of the module and of callbacks adds."""
    initial: str | None = None
    """SHA-256 of the weights that the run began with; None = an earlier version has written the checkpoint."""
    initial_weights: Mapping[str, Tensor] = field(default_factory=dict)
    """These weights, in a checkpoint that stands alone."""

    def ordinary(self) -> dict[str, Any]:
        """Return the content that any checkpoint of Lightning has."""
        return {
            "state_dict": saved_state(self.module),
            "epoch": self.state.server.round,
            "global_step": self.state.server.round,
            "pytorch-lightning_version": L.__version__,
            "callbacks": dict(self.callbacks),
            **self.hyper_parameters,
        }

    def to_plain(self) -> dict[str, Any]:
        """Return the content of the file."""
        selected = self.selected
        content: dict[str, Any] = {
            **self.ordinary(),
            **self.added,
            _OWN: {
                "format": FORMAT,
                "run": self.state.run,
                "identity": {**self.identity, "training": dict(self.training), "reported": dict(self.reported)},
                "state": {**_plain_state(self.state), "weights": None},  # the weights are the state_dict
                "ledger": dict(self.ledger),
                "server records": vars(self.server_records),
                "node records": vars(self.node_records),
                "selected": None if selected is None else {**vars(selected), "state": _plain_state(selected.state)},
                "log": dict(self.log),
                "stopped by": self.stopped_by,
                "unrecorded": self.unrecorded,
                "initial": self.initial,
                "initial weights": dict(self.initial_weights),
            },
        }
        content[_OWN]["checksum"] = fingerprint(content)
        return content

    @classmethod
    def from_plain(cls, content: Mapping[str, Any], layout: Layout, device: torch.device) -> Checkpoint:
        """Restore a checkpoint from the content of its file.

        Args:
            content: Content from :func:`load_checkpoint`.
            layout: Layout of the model.
            device: Device of the state's tensors.

        Raises:
            TypeError: If a value has another type than this class writes, as other errors do.
        """
        own, module = content[_OWN], content["state_dict"]
        weights = torch.cat([module[name].reshape(-1).to(layout.dtype) for name in layout.names]).to(device)
        selected = own["selected"]
        run = _run_from(own["run"])
        if not isinstance(own["stopped by"], str):
            raise TypeError("`stopped by` is not a string")
        identity = dict(own["identity"])
        reported = identity.pop("reported")
        if not isinstance(reported, Mapping) or not all(isinstance(name, str) for name in reported):
            raise TypeError("`reported` is not a mapping from names")
        cpu = torch.device("cpu")
        return cls(
            state=_state_from(own["state"], run, device, layout.tree(weights)),
            module=module,
            training=identity.pop("training"),
            reported=reported,
            identity=identity,
            server_records=StoredRecords(**own["server records"]),
            node_records=StoredRecords(**own["node records"]),
            ledger=own["ledger"],
            callbacks={key: unpack_plain(state, cpu) for key, state in content["callbacks"].items()},
            log=own["log"],
            selected=None if selected is None else _selected_from(selected, run, device),
            stopped_by=own["stopped by"],
            unrecorded=own["unrecorded"],
            initial=_digest_from(own.get("initial")),
            initial_weights=own.get("initial weights", {}),
        )


def _digest_from(digest: Any) -> str | None:
    if digest is not None and not isinstance(digest, str):
        raise TypeError(f"`initial` is {str(digest)[:40]!r}")
    return digest


def _plain_state(state: RunState) -> dict[str, Any]:
    server = state.server
    trees = {name: pack_plain(getattr(server, name), f"ServerState.{name}") for name in ("weights", "masks", "extra")}
    pending = [pack_plain(vars(update)) for update in state.pending]
    sampler = pack_plain(state.sampler, "sampler state")
    return {"round": server.round, "sampler": sampler, "pending": pending, "seconds": state.seconds, **trees}


def _run_from(run: Any) -> str:
    if not isinstance(run, str) or re.fullmatch("[0-9a-f]{32}", run) is None:
        raise TypeError(f"`run` is {str(run)[:40]!r}")
    return run


def _state_from(plain: Mapping[str, Any], run: str, device: torch.device, weights: Any = None) -> RunState:
    round = plain["round"]
    if type(round) is not int or round < 0:
        raise TypeError(f"`round` is {str(round)[:20]!r}")
    trees = {name: unpack_plain(plain[name], device) for name in ("weights", "masks", "extra")}
    weights = trees["weights"] if weights is None else weights
    server = ServerState(round, weights, trees["masks"], trees["extra"])
    seconds = plain.get("seconds", 0.0)  # checkpoints of earlier versions have no clock
    if type(seconds) is not float or not seconds >= 0:
        raise TypeError(f"`seconds` is {str(seconds)[:20]!r}")
    pending = tuple(PendingUpdate(**unpack_plain(update, device)) for update in plain["pending"])
    return RunState(server, unpack_plain(plain["sampler"], device), pending, run, seconds)


def _selected_from(plain: Mapping[str, Any], run: str, device: torch.device) -> SelectedRound:
    if type(plain["value"]) is not float:
        raise TypeError(f"the value of the selected round is {plain['value']!r}"[:80])
    return SelectedRound(plain["key"], plain["value"], _state_from(plain["state"], run, device))


def saved_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``state_dict`` for a file: copies of tensors on the CPU, and plain values of `get_extra_state`.

    Args:
        state: Result of ``module.state_dict()``.

    Raises:
        InvalidOption: If an extra state holds a type that could not be read again.
    """
    cpu = torch.device("cpu")

    def saved(name: str, value: Any) -> Any:
        return value.detach().cpu().clone() if isinstance(value, Tensor) else unpack_plain(pack_plain(value, name), cpu)

    try:
        content = {name: saved(name, value) for name, value in state.items()}
    except TypeError as error:
        raise InvalidOption(f"`get_extra_state` of the model: {error}") from error
    return with_versions(content, versions_of(state))


def callback_states(callbacks: list[Callback]) -> dict[str, Any]:
    """Return the states of round-level callbacks as plain values.

    Args:
        callbacks: Callbacks of the round level.

    Raises:
        TypeError: If a state holds a type that could not be read again.
    """
    return {
        callback.state_key: pack_plain(state, f"{type(callback).__name__}.state_dict")
        for callback in callbacks
        if (state := callback.state_dict())
    }


def plain_hparams(module: LightningModule) -> dict[str, Any]:
    """Return the hyper-parameters that a checkpoint may hold; others, such as classes and functions, are left out.

    Args:
        module: The user's module.
    """
    return {name: _builtin(value) for name, value in module.hparams.items() if _is_plain(value)}


def hparams_of(module: LightningModule) -> dict[str, Any]:
    """Return what a checkpoint holds of the hyper-parameters, with the name of the one argument that they may be.

    Args:
        module: The user's module.
    """
    found: dict[str, Any] = {LightningModule.CHECKPOINT_HYPER_PARAMS_KEY: plain_hparams(module)}
    name = getattr(module, "_hparams_name", None)
    return found if name is None else {**found, LightningModule.CHECKPOINT_HYPER_PARAMS_NAME: name}


def added_by(hooks: Sequence[Callable[[dict[str, Any]], object]], content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what hooks add to a checkpoint; other changes of theirs are left out, since a run goes on from the rest.

    Args:
        hooks: The hooks `on_save_checkpoint`, as functions of the content.
        content: Content of the checkpoint so far.
    """
    offered = {name: dict(value) if isinstance(value, Mapping) else value for name, value in content.items()}
    for hook in hooks:
        _call(hook, offered)
    added = {name: value for name, value in offered.items() if name not in content and name != _OWN}
    unsafe = [name for name, value in added.items() if not _is_plain(value)]
    if unsafe:
        rank_zero_warn(
            f"`on_save_checkpoint` adds {', '.join(map(repr, unsafe))}, which could not be loaded safely, so that the "
            "run's checkpoints do not have it; expected numbers, strings, None, tensors, dicts and lists."
        )
    return {name: _builtin(value) for name, value in added.items() if name not in unsafe}


def _call(hook: Callable[[dict[str, Any]], object], content: dict[str, Any]) -> None:
    """Call a hook; a run does not end for what its own checkpoints do not need."""
    try:
        hook(content)
    except Exception as error:
        rank_zero_warn(
            f"`on_save_checkpoint` failed ({type(error).__name__}: {error}), so that the run's checkpoints do not have "
            "all that it adds."
        )


def _is_plain(value: Any) -> bool:
    try:
        pack_plain(value)
    except TypeError:
        return False
    return True


def _builtin(value: Any) -> Any:
    """Return plain values without kinds of mappings and sequences that only a pickle could restore."""
    if isinstance(value, Mapping):
        return {key: _builtin(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (tuple if isinstance(value, tuple) else list)(_builtin(item) for item in value)
    return value if isinstance(value, Tensor) else pack_plain(value)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read the content of a checkpoint of a federated run.

    Args:
        path: The file.

    Raises:
        CheckpointMismatch: If it is damaged, or of another format.
    """
    content: dict[str, Any] = load_plain(path)
    own = content.get(_OWN) if isinstance(content, dict) else None
    if not isinstance(own, dict) or own.get("format") != FORMAT:
        has_weights = own is None and isinstance(content, dict) and "state_dict" in content
        advice = "; the weights in it can be read by `load_from_checkpoint` of their module" if has_weights else ""
        raise CheckpointMismatch(
            f"{path} is not a checkpoint of a federated run in format {FORMAT}{advice}; expected a run's "
            f"`checkpoints/{LAST}` (option `ckpt_path`)."
        )
    if own.pop("checksum", None) != fingerprint(content):
        raise CheckpointMismatch(f"{path} is damaged: its checksum does not match; choose another `ckpt_path`.")
    return content


def read_checkpoint(
    path: Path, layout: Layout, device: torch.device, like: Mapping[str, Any], module: Mapping[str, Any]
) -> Checkpoint:
    """Read a checkpoint, and check that it is of this run.

    Args:
        path: The file.
        layout: Layout of the model.
        device: Device of the state's tensors.
        like: Identity of this run; with the key ``training``, facts that must agree where training goes on.
        module: ``state_dict`` of this run's module.

    Raises:
        CheckpointMismatch: If it is damaged, or of another run.
    """
    with as_checkpoint_error(path):
        content = load_checkpoint(path)
        theirs, ours = content[_OWN]["identity"], dict(like)
        training = ours.pop("training", {})
        require_equal_facts(path, theirs, ours)
        require_equal_facts(path, theirs["training"], training)
        _require_shapes(path, content["state_dict"], module)
        checkpoint = Checkpoint.from_plain(content, layout, device)
        layout.check(checkpoint.state.server.masks, f"{path}, among its masks,", torch.bool)
        for update in checkpoint.state.pending:
            for tree in (update.changes, update.votes):
                layout.check_shapes(tree, f"{path}, among its pending updates,")
        return checkpoint


def report_changes(
    path: Path | None,
    theirs: Mapping[str, Any],
    ours: Mapping[str, Any],
    consequence: str = "the result may differ from that of a run without this change",
) -> None:
    """Warn about facts that differ from those of a checkpoint, and that a run may change when it goes on.

    Args:
        path: The checkpoint.
        theirs: Facts of the checkpoint, plain values by dotted name.
        ours: Facts of this run.
        consequence: Possible result of a change, as a clause.
    """
    for name in sorted({*theirs, *ours}):
        if theirs.get(name) != ours.get(name):
            rank_zero_warn(
                f"{path} was written with `{name}` = {theirs.get(name)!r}, and this run has {ours.get(name)!r}; "
                f"{consequence}."
            )


def previous_records(path: Path) -> Mapping[str, StoredRecords] | None:
    """Read how a checkpoint refers to the clients' records, by store.

    Args:
        path: The file; if it does not exist, the references are empty.

    Returns:
        The references, or None if the file cannot be read.
    """
    if not path.exists():
        return {"server": StoredRecords(), "nodes": StoredRecords()}
    try:
        with as_checkpoint_error(path):
            own = load_checkpoint(path)[_OWN]
            return {name: StoredRecords(**own[key]) for name, key in _STORES.items()}
    except CheckpointMismatch:
        return None


_STORES = {"server": "server records", "nodes": "node records"}


@contextlib.contextmanager
def as_checkpoint_error(path: Path | None) -> Iterator[None]:
    """Convert any error that the content of a checkpoint causes into :class:`CheckpointMismatch`.

    Args:
        path: The file.
    """
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
        raise TypeError("`state_dict` is not a mapping")
    for name, value in like.items():
        if isinstance(value, Tensor) and state[name].shape != value.shape:
            raise CheckpointMismatch(
                f"{path} is damaged: `{name}` has the shape {tuple(state[name].shape)}, expected {tuple(value.shape)}."
            )


def load_callback(path: Path | None, callback: Callback, state: Any) -> None:
    """Restore the state of a round-level callback.

    A `ModelCheckpoint` deletes files that its state names, in its own folder; Lightning takes ``folder/../elsewhere``
    for a part of that folder.

    Args:
        path: The checkpoint.
        callback: Callback, set up already.
        state: State from the checkpoint.

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


def require_equal_facts(path: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Check that a checkpoint is of this run.

    Args:
        path: The checkpoint.
        theirs: Facts of the checkpoint by name.
        ours: Facts of this run.

    Raises:
        CheckpointMismatch: If a fact of this run differs.
    """
    for name, value in ours.items():
        if theirs.get(name) != value:
            option, got, expected = _difference(name, theirs.get(name), value)
            raise CheckpointMismatch(
                f"{path} is of another run, or of this one before an option changed: `{option}` was {got}, and is "
                f"{expected} now; choose the run's own `ckpt_path`, or its configuration, or load its global model by "
                "`load_from_checkpoint` of the module."
            )


def _difference(name: str, theirs: Any, ours: Any) -> tuple[str, Any, Any]:
    """Return a fact's name and values, or its first entries that differ, so that the error message stays short."""
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        for key in [*ours, *theirs]:
            if theirs.get(key) != ours.get(key):
                return f"{name.removesuffix(' options')}.{key}", theirs.get(key), ours.get(key)
    return name, theirs, ours


def save(path: Path, data: bytes, again: bool = False) -> None:
    """Write a checkpoint, whole or not at all, and keep the one of the commit before.

    Args:
        path: The file.
        data: Encoded content from :meth:`Checkpoint.to_plain`.
        again: Whether it replaces one of the same round, so that the commit before is kept already.
    """
    write_bytes_atomically(path, data, keep=None if again else path.with_name(PREVIOUS))
