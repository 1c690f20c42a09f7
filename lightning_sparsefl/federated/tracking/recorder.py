"""Where a round's numbers go: callbacks, loggers, tables and pictures."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.pytorch.loggers import Logger, TensorBoardLogger

from lightning_sparsefl.federated.evaluation.scores import Scores, higher_is_better
from lightning_sparsefl.federated.rounds.coordinator import Outcome, RoundResult
from lightning_sparsefl.federated.storage.run_folder import RunFolder
from lightning_sparsefl.federated.tracking.round_trainer import RoundTrainer
from lightning_sparsefl.report import bin_edges
from lightning_sparsefl.types import ServerState

if TYPE_CHECKING:
    from lightning_sparsefl.federated.commands.run import Session


_SILENT = {
    "federation": (
        *("local_engine", "placement", "wire", "checkpoint_every_n_rounds", "pictures_every_n_rounds"),
        "workers_per_device",
    ),
    "trainer": ("max_steps", "log_every_n_steps", "default_root_dir"),
}
"""Options that change no result, or follow from others."""
_COMPARED = ("comm/uplink_bytes_total", "comm/downlink_bytes_total", "flops/train_total", "sparsity/density")
"""What a run costs, beside its scores."""
_LAYER = "sparsity/layer/"


def hyperparameters(trainer: Any, data: Any, module: Any) -> dict[str, Any]:
    """What identifies a run in a logger, flat, as plain values.

    All of the method's and the module's own options are there; of the federation's and the trainer's those that can
    change a result and are not at their default.

    Args:
        trainer: A `FederatedTrainer`.
        data: The clients' data.
        module: The user's module.
    """
    local, federation = trainer.local_options, trainer.federation
    hparams = {name: value for name, value in module.hparams.items() if not name.startswith("_")}
    parts: dict[str, Mapping[str, Any]] = {
        "federation": {
            "clients_per_round": federation.clients_per_round,
            **_changed(federation, _SILENT["federation"]),
        },
        "trainer": {
            "max_rounds": trainer.max_rounds,
            "max_epochs": local.max_epochs,
            "seed": trainer.seed,
            "round_lr": trainer.round_lr,
            "client_callbacks": ", ".join(type(callback).__name__ for callback in trainer.client_callbacks) or None,
            **_changed(local, _SILENT["trainer"]),
        },
        "data": {name: getattr(data, name, None) for name in ("num_clients", "partition", "batch_size")},
        "model": hparams,
    }
    flat = _flat("algorithm", trainer.algorithm) | {"data": type(data).__name__, "model": type(module).__name__}
    for group, values in parts.items():
        for name, value in values.items():
            flat |= _flat(f"{group}/{name}", value)
    return flat


def _changed(options: Any, silent: Sequence[str]) -> dict[str, Any]:
    """Fields that are not at their default."""
    fields = [field for field in dataclasses.fields(options) if field.name not in silent]
    return {f.name: getattr(options, f.name) for f in fields if getattr(options, f.name) != f.default}


def _flat(name: str, value: Any) -> dict[str, Any]:
    """A dataclass as its name and its fields, so that each is a column of its own; nothing for None."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return {} if value is None else {name: _plain(value)}
    flat: dict[str, Any] = {name: type(value).__name__}
    for field in dataclasses.fields(value):
        flat |= _flat(f"{name}/{field.name}", getattr(value, field.name))
    return flat


def _plain(value: Any) -> bool | int | float | str:
    """A value that every logger takes: a short text, or the name where the text would be an address."""
    if isinstance(value, bool | int | float | str):
        return value
    text = str(value)
    return getattr(value, "__name__", type(value).__name__) if text.startswith("<") else shorten(text, 80)


def log_hyperparameters(loggers: Sequence[Logger], params: Mapping[str, Any]) -> None:
    """Give every logger a run's hyper-parameters.

    TensorBoard's is kept from declaring a metric `hp_metric` of value -1, after which it would ignore the real ones.

    Args:
        loggers: Of the run.
        params: As :func:`hyperparameters` made them.
    """
    for logger in loggers:
        beside: dict[str, Any] = {"metrics": {}} if isinstance(logger, TensorBoardLogger) else {}
        logger.log_hyperparams(dict(params), **beside)


class Recorder:
    """Writes what a session measures.

    Args:
        session: With its run folder open.
        facade: Of the run; its loggers are written to.
        loggers: Of the run.
    """

    def __init__(self, session: Session, facade: RoundTrainer, loggers: Sequence[Logger]) -> None:
        self.session, self.facade, self.loggers = session, facade, loggers
        self.scored = 0
        """Rounds that were finished when the newest scores were taken."""
        self._boards = [logger for logger in loggers if isinstance(logger, TensorBoardLogger)]
        self._scores: Mapping[str, float] = {}
        self.finetuned: Mapping[str, float] = {}
        """Scores after the clients' last local fit."""
        self._personal: Mapping[int, Mapping[str, float]] = {}
        self._clients_scored = 0
        self._metrics: Mapping[str, float] = {}
        self._declared = session.folder is not None and _was_scored(session.folder)

    def record(
        self,
        number: int,
        result: RoundResult,
        scores: Scores | None,
        last: bool,
        further: Mapping[str, float] | None = None,
    ) -> Mapping[str, float]:
        """Log one round.

        Args:
            number: Of the round, from 0; the x-axis of every logger.
            result: Of the round.
            scores: If it was evaluated.
            last: Whether it is the last one.
            further: More scores, that are logged and are not in the final table.

        Returns:
            All logged keys.
        """
        if scores is not None:
            self.keep(scores, number + 1)
        self._metrics = {**result.metrics, **self.session.ledger.round_totals(number), **self.session.ledger.totals}
        metrics = {**self._metrics, **(self._scores if scores is not None else {}), **(further or {})}
        if self.session.ranks.first:
            self._write(number, metrics, result, scores, last)
        return metrics

    def _write(
        self, number: int, metrics: Mapping[str, float], result: RoundResult, scores: Scores | None, last: bool
    ) -> None:
        assert self.session.folder is not None
        if scores is not None:
            self._declare()
            self._histograms(number, scores)
        self.session.folder.metrics.append([{"round": number, **metrics}])
        self.session.folder.clients.append(_client_rows(number, result.outcomes, scores))
        for logger in self.loggers:
            logger.log_metrics(dict(metrics), step=number)
        every = self.session.federation.pictures_every_n_rounds
        if self._boards and every and (last or (number + 1) % every == 0):
            self._pictures(number, result)
        for logger in self.loggers:
            logger.save()

    def keep(self, scores: Scores, rounds: int) -> None:
        """Take scores into the final table.

        Args:
            scores: The newest.
            rounds: Finished when they were taken.
        """
        self._scores, self._personal, self.scored = scores.summary(), scores.personal, rounds
        self._clients_scored = len(scores.personal)

    def add_scores(self, scores: Scores, rounds: int) -> None:
        """Keep and log scores of a round that was recorded without them, because a callback stopped the run there."""
        self.keep(scores, rounds)
        if self.session.ranks.first:
            for logger in self.loggers:
                logger.log_metrics(dict(self._scores), step=rounds - 1)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: what the final table and the next pictures are made of, and what callbacks see."""
        pictured = self._boards and self.session.federation.pictures_every_n_rounds
        return {
            "scores": dict(self._scores),
            "scored": self.scored,
            "clients_scored": self._clients_scored,
            "personal": {i: dict(metrics) for i, metrics in self._personal.items()} if pictured else {},
            "metrics": _untimed(self._metrics),
            "callback_metrics": _untimed({n: float(v) for n, v in self.facade.callback_metrics.items()}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; of a new run there is nothing to take."""
        if state:
            counts = {name: state[name] for name in ("scored", "clients_scored")}
            logged = [state[name] for name in ("scores", "metrics", "callback_metrics")]
            for numbers in (counts, *logged, *state["personal"].values()):
                _require_numbers(numbers)
            self._scores, self.scored, self._metrics = state["scores"], state["scored"], state["metrics"]
            self._personal, self._clients_scored = state["personal"], state["clients_scored"]
            self.facade.report(state["callback_metrics"])

    def summary(self, server: ServerState) -> dict[str, Any]:
        """The final table: the last scores, the totals, and what they belong to."""
        totals = {n: v for n, v in self._metrics.items() if n.endswith("_total")}
        summary: dict[str, Any] = {
            "algorithm": type(self.session.algorithm).__name__,
            "rounds": server.round,
            "clients": self.session.data.num_clients,
            "clients_scored": self._clients_scored,
            "seed": self.session.seed,
            **self._scores,
            **{n: value for n, value in self._metrics.items() if n.startswith(("personal_after/", "privacy/"))},
            **self.finetuned,
            **totals,
        }
        if "sparsity/density" in self._metrics:
            summary["sparsity/density"] = self._metrics["sparsity/density"]
        return summary

    def _declare(self) -> None:
        """Once in a run, when the scores' names are known: tell TensorBoard what to compare and to draw together."""
        if self._declared:
            return
        self._declared = True
        trainer, data, module = self.session.trainer, self.session.data, self.session.module
        compared = [name for name in self._scores if not name.endswith("_std")]
        compared.sort(key=lambda name: not higher_is_better(name))
        costs = [name for name in _COMPARED if name in self._metrics]
        for board in self._boards:
            hparams_summary(board, hyperparameters(trainer, data, module), [*compared, *costs])
            board.experiment.add_custom_scalars(_charts(self._scores))

    def _histograms(self, number: int, scores: Scores) -> None:
        """How each metric is spread over clients; a client whose metric is not finite is left out."""
        for name in _names(scores.personal):
            values = list(_finite(scores.personal, name).values())
            for board in self._boards if values else ():
                edges = bin_edges(values, higher_is_better(name))
                board.experiment.add_histogram(f"clients/{name}", np.array(values), number, bins=edges)

    def _pictures(self, number: int, result: RoundResult) -> None:
        from lightning_sparsefl.report import pictures  # matplotlib is slow to import

        figures = {}
        masks = self.session.store.packed_masks(pictures.MOST_CLIENTS)
        if len(masks) > 1:
            figures["mask/overlap"] = pictures.overlap_figure(masks, number, of=self.session.data.num_clients)
        layers = {n.removeprefix(_LAYER): v for n, v in result.metrics.items() if n.startswith(_LAYER)}
        if layers:
            figures["sparsity/density_per_layer"] = pictures.density_figure(layers, number)
        for name in filter(higher_is_better, _names(self._personal)):
            values = _finite(self._personal, name)
            if values:
                figures[f"clients/{name}_sorted"] = pictures.clients_figure(values, name, self.scored - 1)
        for tag, figure in figures.items():
            image = pictures.pixels(figure)
            for board in self._boards:
                board.experiment.add_image(tag, image, number)


def _untimed(metrics: Mapping[str, float]) -> dict[str, float]:
    """Without what no two runs have in common."""
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


def _require_numbers(metrics: Mapping[str, Any]) -> None:
    """Raise :class:`TypeError` unless all values are numbers, as those of a checkpoint should be."""
    for name, value in metrics.items():
        if not isinstance(value, int | float):
            raise TypeError(f"its {name!r} is of the type {type(value).__name__}")


def _was_scored(folder: RunFolder) -> bool:
    """Whether a run that goes on has logged scores before."""
    return any(value for row in folder.metrics.read() for name, value in row.items() if name.startswith("global/"))


def _names(personal: Mapping[int, Mapping[str, float]]) -> list[str]:
    return sorted({name for metrics in personal.values() for name in metrics})


def _finite(personal: Mapping[int, Mapping[str, float]], name: str) -> dict[int, float]:
    return {i: metrics[name] for i, metrics in personal.items() if math.isfinite(metrics.get(name, math.nan))}


def _charts(scores: Mapping[str, float]) -> dict[str, dict[str, list[Any]]]:
    """TensorBoard's custom scalars: what belongs together in one chart, by regular expressions."""
    metrics = [name.removeprefix("global/") for name in scores if name.startswith("global/")]
    metrics.sort(key=lambda name: not higher_is_better(name))
    parts = ("global/{0}$", "personal/{0}$", "personal/{0}_worst10$")
    return {
        "scores": {name: ["Multiline", [part.format(re.escape(name)) for part in parts]] for name in metrics},
        "costs": {
            "bytes in total": ["Multiline", [rf"comm/{part}_bytes_total$" for part in ("uplink", "downlink", "paper")]],
            "training FLOPs in total": ["Multiline", [rf"flops/{part}_total$" for part in ("train", "paper")]],
        },
    }


def _client_rows(number: int, outcomes: Sequence[Outcome], scores: Scores | None) -> list[dict[str, Any]]:
    """One row for each client that trained or was scored in a round."""
    rows: dict[int, dict[str, Any]] = {}
    for outcome in outcomes:
        charge = {} if outcome.charge is None else dataclasses.asdict(outcome.charge)
        rows[outcome.client] = {
            "round": number,
            "client": outcome.client,
            "trained": int(outcome.failure is None),
            "failure": outcome.failure or "",
            "num_examples": outcome.num_examples,
            **{n: v for n, v in charge.items() if n not in ("round", "client")},
            **{f"local/{name}": value for name, value in outcome.metrics.items()},
            **{f"personal_after/{name}": value for name, value in (outcome.after or {}).items()},
        }
    groups = {} if scores is None else {"personal": scores.personal, "unseen": scores.unseen}
    for group, clients in groups.items():
        for client, metrics in clients.items():
            row = rows.setdefault(client, {"round": number, "client": client, "trained": 0})
            row.update({f"{group}/{name}": value for name, value in metrics.items()})
    return [rows[client] for client in sorted(rows)]


def hparams_summary(logger: TensorBoardLogger, params: Mapping[str, Any], metrics: Sequence[str]) -> None:
    """Show hyper-parameters in TensorBoard's own tab, beside the metrics of these names.

    Lightning's logger would add a point of value 0 to each metric; this writes the declaration alone.
    """
    from torch.utils.tensorboard.summary import hparams

    writer = logger.experiment._get_file_writer()
    for part in hparams(dict(params), dict.fromkeys(metrics, 0.0)):
        writer.add_summary(part)
