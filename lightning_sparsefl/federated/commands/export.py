"""One model of a run as files that need no federation: a Lightning checkpoint, safetensors, ONNX.

::

    model.ckpt           an ordinary Lightning checkpoint, for `load_from_checkpoint` and `Trainer.test(ckpt_path=...)`
    model.safetensors    its `state_dict` without zeros, for `load_sparse`
    model.onnx           its forward pass without the units that are all zeros
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import lightning as L
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_sparsefl.errors import ExportMismatch, InvalidOption
from lightning_sparsefl.federated.client import ClientWorker
from lightning_sparsefl.federated.commands import onnx_file
from lightning_sparsefl.federated.evaluation.scores import score_global
from lightning_sparsefl.federated.local.isolation import isolate_metrics
from lightning_sparsefl.federated.storage import checkpoint
from lightning_sparsefl.federated.storage.atomic_files import load_plain, write_atomically
from lightning_sparsefl.federated.storage.records import pack_plain
from lightning_sparsefl.report import print_table, quantity, score
from lightning_sparsefl.sparse.masks import apply
from lightning_sparsefl.types import ServerState, Weights
from lightning_sparsefl.wire import export_sparse, load_sparse

if TYPE_CHECKING:
    from lightning_sparsefl.federated.commands.run import Session

Format = Literal["ckpt", "safetensors", "onnx"]
MEMORY = "in memory"
_TOLERANCE = 1e-5
"""Of metrics under ONNX, whose arithmetic has another order."""


@dataclass(frozen=True)
class ExportRequest:
    """What to write."""

    bare: LightningModule
    """A copy of the user's module, as no method has changed it."""
    client: int | None = None
    """Whose personal model; None = the global one."""
    out: str | None = None
    """Folder; None = ``export/`` of the run."""
    formats: Sequence[Format] = ("ckpt", "safetensors")
    """Files to write."""
    check: bool = False
    """Whether to load and score what was written."""

    @property
    def name(self) -> str:
        """Of the model."""
        return "global" if self.client is None else f"client-{self.client}"

    def require(self, num_clients: int) -> None:
        """Raise :class:`InvalidOption` where the request cannot be met."""
        if self.client is not None and not 0 <= self.client < num_clients:
            raise InvalidOption(
                f"`client` is {self.client}; expected a number from 0 to {num_clients - 1}, or none for the global "
                "model."
            )
        strangers = [name for name in self.formats if name not in get_args(Format)]
        if strangers or not self.formats:
            raise InvalidOption(f"`formats` is {list(self.formats)}; expected some of {list(get_args(Format))}.")
        if "onnx" in self.formats:
            onnx_file.require(self.bare)


@dataclass(frozen=True)
class Exported:
    """What was written, and how it scores."""

    files: Mapping[Format, Path]
    """The files."""
    scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """With `check`: the metrics of ``in memory``, and of each format as it was loaded."""
    notes: Sequence[str] = ()
    """What whoever loads the files must know."""
    kept: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Of the model in memory, and of the ONNX file: parameters, and how many are not zero."""


def export(session: Session, server: ServerState, request: ExportRequest) -> Exported:
    """Write one model.

    Args:
        session: Of the run.
        server: After the checkpoint's round.
        request: What to write.

    Raises:
        InvalidOption: If something cannot be written.
        ExportMismatch: If a file scores otherwise than the model in memory.
    """
    job = _Job(session, server, request)
    files = dict(job.write())
    scores = dict(job.scores(files)) if request.check else {}
    exported = Exported(files, scores, tuple(job.notes), job.kept)
    _print(job.title, exported)
    _require_equal(exported, exact=session.ranks.fabric.strategy.precision.precision in ("32-true", "64-true"))
    return exported


class _Job:
    """One model on its way into files."""

    def __init__(self, session: Session, server: ServerState, request: ExportRequest) -> None:
        self.session, self.server, self.request = session, server, request
        bench, self.notes = session.bench, list[str]()
        self.weights = self._weights()
        bench.load(self.weights)
        module = bench.module.eval()
        self.state = {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}
        self.adapted = self._note_changes()
        parameters = [name for name, _ in module.named_parameters()]
        self.kept = {MEMORY: _count(self.state[name] for name in parameters)}

    @property
    def title(self) -> str:
        """Of the table."""
        method, whose = type(self.session.algorithm).__name__, self.request.name.replace("-", " ")
        scored = f", {self.session.split} set" if self.request.check else ""
        return f"{method} after {self.server.round} rounds: {whose}{scored}"

    def _weights(self) -> Weights:
        client = self.request.client
        if client is None:
            return apply(self.server.weights, self.server.masks)
        coordinator = self.session.coordinator
        if client not in self.session.store:
            method = type(self.session.algorithm).__name__
            self.notes.append(f"Client {client} never trained: this is what {method} gives to a client that it meets.")
        return self.session.scorer.own(self.server)(coordinator.client(client, self.server.round))

    def _note_changes(self) -> bool:
        """Say whether the method changed the module, so that the files do not fit the bare one."""
        bare = self.request.bare.state_dict().keys()
        names = [name for name in [*bare, *self.state] if (name in bare) != (name in self.state)]
        if names:
            method = type(self.session.algorithm).__name__
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            what = f"there is {'no ' if names[0] in bare else ''}`{names[0]}`{more} in the files"
            self.notes.append(
                f"{method} changes the module ({what}): call `algorithm.adapt(module)` before you load them."
            )
        return bool(names)

    # ---- files

    def write(self) -> Iterator[tuple[Format, Path]]:
        """Write the files."""
        folder = self._folder()
        for name in dict.fromkeys(self.request.formats):
            path = folder / f"model.{name}"
            if name == "ckpt":
                write_atomically(path, self._checkpoint())
            elif name == "safetensors":
                export_sparse(self.state, path)
            else:
                self._write_onnx(path)
            yield name, path

    def _folder(self) -> Path:
        if self.request.out is not None:
            return Path(self.request.out)
        origin = self.session.origin
        assert origin.checkpoint is not None
        return (origin.folder or origin.checkpoint.parent) / "export" / self.request.name

    def _checkpoint(self) -> dict[str, Any]:
        module = self.session.bench.module
        plain = checkpoint.plain_hparams(module)
        left_out = [name for name in module.hparams if name not in plain]
        if left_out:
            self.notes.append(
                f"The hyper-parameters {left_out} are no plain values and not in model.ckpt: give them to "
                "`load_from_checkpoint`."
            )
        content: dict[str, Any] = {
            "state_dict": self.state,
            "epoch": self.server.round,
            "global_step": self.server.round,
            "pytorch-lightning_version": L.__version__,
            LightningModule.CHECKPOINT_HYPER_PARAMS_KEY: plain,
        }
        module.on_save_checkpoint(content)
        try:
            pack_plain(content)
        except TypeError as error:
            raise InvalidOption(
                f"`{type(module).__name__}.on_save_checkpoint` adds what is no plain value, so that the checkpoint "
                "could not be loaded without executing it; expected numbers, strings, None, tensors, dicts and lists."
            ) from error
        return content

    def _write_onnx(self, path: Path) -> None:
        module, note = onnx_file.narrowed(self.session.bench.module, self.session.data, self.state)
        self.notes += [note] if note else []
        onnx_file.write(module, self.session.data, path)
        self.kept["onnx"] = _count(module.parameters())

    # ---- scores

    def scores(self, files: Mapping[Format, Path]) -> Iterator[tuple[str, Mapping[str, float]]]:
        """The metrics of the model in memory, and of each file."""
        yield MEMORY, self._score(self.session.bench, self.weights)
        for name, path in files.items():
            if name == "onnx":
                yield name, self._score_onnx(path)
            else:
                state = load_plain(path)["state_dict"] if name == "ckpt" else load_sparse(path)
                bench = self._fresh(state)
                yield name, self._score(bench, bench.initial)

    def _score(self, bench: ClientWorker, weights: Weights) -> Mapping[str, float]:
        """As an evaluation of the run does."""
        session, client = self.session, self.request.client
        if client is None:
            return score_global(replace(self.server, weights=weights, masks={}), bench, session.split, session.seed)
        return bench.evaluate(session.coordinator.client(client, self.server.round), weights, session.split)

    def _score_onnx(self, path: Path) -> Mapping[str, float]:
        """With the file in the place of the module's forward pass."""
        bench = self._fresh(self.state)
        forward = onnx_file.Forward(path)
        vars(bench.module)["forward"] = forward
        metrics = self._score(bench, bench.initial)
        if not forward.calls:
            step = {"val": "validation_step", "test": "test_step"}[self.session.split]
            raise ExportMismatch(
                f"{path} is written and was not scored: `{step}` never calls the module's `forward`; "
                "call `self(...)` there, or leave `onnx` out of `formats`."
            )
        return metrics

    def _fresh(self, state: Mapping[str, Tensor]) -> ClientWorker:
        """A bench for a module that has seen nothing but the user's `__init__` and a file."""
        module, fabric = copy.deepcopy(self.request.bare), self.session.ranks.fabric
        if self.adapted:
            self.session.algorithm.adapt(module)
        fabric.strategy.precision.convert_module(module)
        fabric.to_device(module)
        isolate_metrics(module)
        module.load_state_dict(state, strict=True)
        return self.session.bench_of(module)


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
        print(note)
    print(f"Folder: {next(iter(exported.files.values())).parent}")


def _require_equal(exported: Exported, exact: bool) -> None:
    """Raise where a file scores otherwise.

    Args:
        exported: What was written.
        exact: Whether all of the arithmetic is that of the weights' own type, as an ONNX file's is.
    """
    for name, metrics in exported.scores.items():
        for metric, expected in exported.scores[MEMORY].items():
            got = metrics.get(metric, float("nan"))
            near = abs(got - expected) <= _TOLERANCE * max(1.0, abs(expected)) or not exact
            same = got == expected or (got != got and expected != expected)
            if not same and not (name == "onnx" and near):
                raise ExportMismatch(
                    f"The {name} file has a {metric} of {got!r}, the model in memory one of {expected!r}; "
                    "expected the same: the module may hold more than its `state_dict` says."
                )
