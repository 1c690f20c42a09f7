"""Export of one model of a run to files that can be used without a federation.

::

    model.ckpt           an ordinary Lightning checkpoint, for `load_from_checkpoint` and `Trainer.test(ckpt_path=...)`
    model.safetensors    the `state_dict` without zeros, for `load_sparse`
    model.onnx           the forward pass without units whose weights are all zero
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import lightning as L
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_sparsefl.errors import ExportMismatch, InvalidOption, require_folder, require_type
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.federated.commands import onnx_file
from lightning_sparsefl.federated.commands.client_number import client_number
from lightning_sparsefl.federated.commands.interruption_messages import kept_by_export
from lightning_sparsefl.federated.commands.run import Run
from lightning_sparsefl.federated.evaluation.scorer import score_global
from lightning_sparsefl.federated.exchange.orders import SCORING_STEPS, Order
from lightning_sparsefl.federated.exchange.plain_values import pack_plain
from lightning_sparsefl.federated.fleet import names_of
from lightning_sparsefl.federated.local.worker import ClientWorker
from lightning_sparsefl.federated.storage import checkpoint
from lightning_sparsefl.federated.storage.atomic_files import write_atomically
from lightning_sparsefl.federated.storage.disk_full import raise_disk_full
from lightning_sparsefl.federated.storage.safe_load import load_plain
from lightning_sparsefl.report import print_line, print_table, quantity, score
from lightning_sparsefl.sparse.masks import apply
from lightning_sparsefl.types import RunState, Weights
from lightning_sparsefl.wire import export_sparse, load_sparse

Format = Literal["ckpt", "safetensors", "onnx"]
MEMORY = "in memory"
_TOLERANCE = 1e-5
"""Relative tolerance of metrics under ONNX, whose operations have a different order."""


@dataclass(frozen=True)
class ExportRequest:
    """The options of an export."""

    bare: LightningModule
    """Copy of the user's module before any changes by the method."""
    client: int | str | None = None
    """Number or name of the client whose personal model is exported; None = the global model."""
    out: str | None = None
    """Folder of the files; None = ``export/`` in the run folder."""
    formats: Sequence[Format] = ("ckpt", "safetensors")
    """Formats of the files."""
    check: bool = False
    """Whether to load and evaluate the files."""

    def require(self, algorithm: FederatedAlgorithm, num_clients: int) -> None:
        """Raise :class:`InvalidOption` if an option is not valid.

        Args:
            algorithm: Method of the run.
            num_clients: Number of clients of the run.
        """
        require_type("client", self.client, int | str | None)
        require_type("formats", self.formats, list[str])
        if not isinstance(self.client, str | None) and not 0 <= self.client < num_clients:
            raise InvalidOption(
                f"`client` is {self.client}; expected a number from 0 to {num_clients - 1}, or null for the global "
                "model."
            )
        if self.client is None and not algorithm.has_global_model:
            raise InvalidOption(
                f"`client` is null, and {type(algorithm).__name__} trains no global model; expected a number from 0 to "
                f"{num_clients - 1}, or the name of a client, to export its personal model."
            )
        strangers = [name for name in self.formats if name not in get_args(Format)]
        if strangers or not self.formats:
            raise InvalidOption(f"`formats` is {list(self.formats)}; expected some of {list(get_args(Format))}.")
        if "onnx" in self.formats:
            onnx_file.require(self.bare)


@dataclass(frozen=True)
class Exported:
    """The files of an export and their scores."""

    files: Mapping[Format, Path]
    """Paths of the files by format."""
    scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Metrics of the model ``in memory`` and of each loaded file, with `check`."""
    notes: Sequence[str] = ()
    """Notes for users of the files."""
    kept: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Numbers of parameters and of nonzero parameters, of the model in memory and of the ONNX file."""


def export(run: Run, request: ExportRequest) -> Exported:
    """Export one model of a checkpoint on rank 0, while the other ranks wait.

    Args:
        run: Parts of the run.
        request: Options of the export.

    Raises:
        InvalidOption: If a file cannot be written, or not be checked.
        ExportMismatch: If the scores of a file differ from those of the model in memory.
    """
    if request.check and "onnx" in request.formats and _is_bfloat16(run.worker.module):
        raise InvalidOption(
            "`check` is True, and model.onnx would be in bfloat16, which NumPy lacks; expected `check: false`, or "
            "`formats` without 'onnx'."
        )
    state, _ = run.start(training=False)
    client = None if request.client is None else client_number(run.data, request.client)
    if client is not None:
        version = run.server.node_version(client, state.server.round)
        run.visiting.fetch({} if version is None else {client: version}, None)
    exported = run.ranks.share(lambda: _export(run, state, client, request) if run.ranks.first else None)[0]
    assert exported is not None
    return exported


def _is_bfloat16(module: LightningModule) -> bool:
    return any(parameter.dtype == torch.bfloat16 for parameter in module.parameters())


def _export(run: Run, state: RunState, client: int | None, request: ExportRequest) -> Exported:
    files: dict[Format, Path] = {}
    try:
        job = _Job(run, state, client, request)
        with raise_disk_full(job.folder, "the model is not exported; free some space, or set `out`"):
            files.update(job.write())
        scores = dict(job.scores(files)) if request.check else {}
    except KeyboardInterrupt:
        rank_zero_info(f"SIGINT: {kept_by_export(list(files.values()))}")
        raise
    exported = Exported(files, scores, tuple(job.notes), job.kept)
    _print(job.title, exported)
    _require_equal(exported, exact=run.ranks.fabric.strategy.precision.precision in ("32-true", "64-true"))
    return exported


class _Job:
    """The export of one model."""

    def __init__(self, run: Run, state: RunState, client: int | None, request: ExportRequest) -> None:
        self.run, self.state, self.server, self.client, self.request = run, state, state.server, client, request
        self.name = "global" if client is None else f"client-{client}"
        worker, self.notes = run.worker, list[str]()
        self.weights = self._weights()
        worker.load(self.weights)
        module = worker.module.eval()
        self.module_state = checkpoint.saved_state(module.state_dict())
        self.adapted = self._note_changes()
        parameters = [name for name, _ in module.named_parameters()]
        self.kept = {MEMORY: _count(self.module_state[name] for name in parameters)}

    @property
    def title(self) -> str:
        """Title of the printed table."""
        method, names = type(self.run.algorithm).__name__, names_of(self.run.data)
        own = f" ({names[self.client]})" if names and self.client is not None else ""
        whose = self.name.replace("-", " ") + own
        scored = f", {self.run.split} set" if self.request.check else ""
        return f"{method} after {self.server.round} rounds: {whose}{scored}"

    def _weights(self) -> Weights:
        client = self.client
        if client is None:
            return apply(self.server.weights, self.server.masks)
        if self.run.server_records.get(client, self.server.round) is None:
            method = type(self.run.algorithm).__name__
            self.notes.append(f"Client {client} never trained: this is the model that {method} gives a new client.")
        return self.run.node.personal_weights(self._order(client))

    def _order(self, client: int) -> Order:
        """Return the order to evaluate a client."""
        return self.run.server.order(self.state, client, "score", (self.run.split,))

    def _note_changes(self) -> bool:
        """Return whether the method changed the names in the module, and add a note if so."""
        bare = self.request.bare.state_dict().keys()
        names = [name for name in [*bare, *self.module_state] if (name in bare) != (name in self.module_state)]
        if names:
            method = type(self.run.algorithm).__name__
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            what = f"there is {'no ' if names[0] in bare else ''}`{names[0]}`{more} in the files"
            self.notes.append(
                f"{method} changes the module ({what}): call `algorithm.adapt(module)` before loading them."
            )
        return bool(names)

    # ---- files

    def write(self) -> Iterator[tuple[Format, Path]]:
        """Write the files, and yield the format and the path of each."""
        folder = self.folder
        for name in dict.fromkeys(self.request.formats):
            path = folder / f"model.{name}"
            if name == "ckpt":
                write_atomically(path, self._checkpoint())
            elif name == "safetensors":
                self._write_safetensors(path)
            else:
                self._write_onnx(path)
            yield name, path

    @property
    def folder(self) -> Path:
        """Folder of the files."""
        if self.request.out is not None:
            out = Path(os.path.expanduser(self.request.out))
            require_folder("out", out)
            return out
        resume_point = self.run.resume_point
        assert resume_point.checkpoint is not None
        beside = resume_point.checkpoint.parent
        own = beside.parent if beside.name == "checkpoints" else beside  # the run's, also of `previous.ckpt`
        return (resume_point.folder or own) / "export" / self.name

    def _checkpoint(self) -> dict[str, Any]:
        module = self.run.worker.module
        plain = checkpoint.plain_hparams(module)
        left_out = [name for name in module.hparams if name not in plain]
        if left_out:
            self.notes.append(
                f"The hyper-parameters {left_out} are not plain values, so they are not in model.ckpt: pass them to "
                "`load_from_checkpoint`."
            )
        content: dict[str, Any] = {
            "state_dict": self.module_state,
            "epoch": self.server.round,
            "global_step": self.server.round,
            "pytorch-lightning_version": L.__version__,
            **checkpoint.hparams_of(module),
        }
        module.on_save_checkpoint(content)
        try:
            pack_plain(content)
        except TypeError as error:
            raise InvalidOption(
                f"`{type(module).__name__}.on_save_checkpoint` adds a value of another type, so that the checkpoint "
                "could not be loaded safely; expected numbers, strings, None, tensors, dicts and lists."
            ) from error
        return content

    def _write_safetensors(self, path: Path) -> None:
        extra = [name for name, value in self.module_state.items() if not isinstance(value, Tensor)]
        if extra:
            raise InvalidOption(
                f"The model has the extra state `{extra[0]}` (`get_extra_state`), and model.safetensors holds tensors "
                "only; remove `safetensors` from `formats`."
            )
        export_sparse(self.module_state, path)

    def _write_onnx(self, path: Path) -> None:
        module, note = onnx_file.narrowed(self.run.worker.module, self.run.data, self.module_state)
        sizes = onnx_file.write(module, self.run.data, path)
        self.notes += [text for text in (note, sizes) if text]
        self.kept["onnx"] = _count(module.parameters())

    # ---- scores

    def scores(self, files: Mapping[Format, Path]) -> Iterator[tuple[str, Mapping[str, float]]]:
        """Yield the metrics of the model in memory and of each file.

        Args:
            files: Paths of the files by format.
        """
        show, total = self.run.phases.show, 1 + len(files)
        show("check", 0, total, "models")
        yield MEMORY, self._score(self.run.worker, self.weights)
        for done, (name, path) in enumerate(files.items(), start=1):
            show("check", done, total, "models")
            if name == "onnx":
                yield name, self._score_onnx(path)
            else:
                state = load_plain(path)["state_dict"] if name == "ckpt" else load_sparse(path)
                worker = self._fresh(state)
                yield name, self._score(worker, worker.initial)
        show("check", total, total, "models")

    def _score(self, worker: ClientWorker, weights: Weights) -> Mapping[str, float]:
        """Evaluate a model as the run does."""
        run, client = self.run, self.client
        if client is None:
            return score_global(replace(self.server, weights=weights, masks={}), worker, run.split, run.options.seed)
        return worker.evaluate(Client(self._order(client), {}, worker), weights, run.split)

    def _score_onnx(self, path: Path) -> Mapping[str, float]:
        """Evaluate the module with its forward pass replaced by an ONNX file."""
        worker = self._fresh(self.module_state)
        forward = onnx_file.Forward(path, worker.module.forward)
        vars(worker.module)["forward"] = forward
        metrics = self._score(worker, worker.initial)
        if not forward.calls:
            step = SCORING_STEPS[self.run.split]
            raise ExportMismatch(
                f"{path} was written but not evaluated: `{step}` never calls the module's `forward`; "
                "call `self(...)` there, or remove `onnx` from `formats`."
            )
        return metrics

    def _fresh(self, state: Mapping[str, Tensor]) -> ClientWorker:
        """Return a worker with a new copy of the user's module that has loaded a state."""
        module = copy.deepcopy(self.request.bare)
        if self.adapted:
            self.run.algorithm.adapt(module)
        self.run.place(module)
        module.load_state_dict(state, strict=True)
        return self.run.worker_of(module)


def _count(parameters: Iterator[Tensor]) -> tuple[int, int]:
    sizes = [(value.numel(), int(torch.count_nonzero(value))) for value in parameters]
    return sum(size for size, _ in sizes), sum(kept for _, kept in sizes)


def _print(title: str, exported: Exported) -> None:
    columns = [MEMORY, *exported.files] if exported.scores else list(exported.files)

    def row(name: str, cell: Callable[[str], str]) -> tuple[str, ...]:
        return (name, *map(cell, columns))

    metrics = sorted({n for s in exported.scores.values() for n in s}, key=lambda n: ("loss" in n, n))
    rows = [row(n, lambda c, n=n: score(exported.scores[c][n]) if n in exported.scores[c] else "") for n in metrics]  # type: ignore[misc]
    kept = {column: exported.kept.get(column, exported.kept[MEMORY]) for column in columns}
    rows += [
        row("parameters", lambda c: f"{kept[c][0]:,}"),
        row("density (not zero)", lambda c: f"{kept[c][1] / max(kept[c][0], 1):.4f}"),
        row("file", lambda c: "" if c == MEMORY else quantity(exported.files[c].stat().st_size, "B")),  # type: ignore[index]
    ]
    print_table(title, ("", *(c if c == MEMORY else exported.files[c].name for c in columns)), rows)  # type: ignore[index]
    for note in exported.notes:
        print_line(note)
    print_line(f"Folder: {next(iter(exported.files.values())).parent}")


def _require_equal(exported: Exported, exact: bool) -> None:
    """Raise `ExportMismatch` if the scores of a file differ from those of the model in memory.

    Args:
        exported: Files and their scores.
        exact: Whether the run computes in the dtype of the weights, as an ONNX file does.
    """
    for name, metrics in exported.scores.items():
        for metric, expected in exported.scores[MEMORY].items():
            got = metrics.get(metric, float("nan"))
            near = abs(got - expected) <= _TOLERANCE * max(1.0, abs(expected)) or not exact
            same = got == expected or (got != got and expected != expected)
            if not same and not (name == "onnx" and near):
                raise ExportMismatch(
                    f"The {name} file has a {metric} of {got!r}, the model in memory one of {expected!r}; "
                    "expected equal values: the module may have state that is not in its `state_dict`."
                )
