"""Where a round's numbers go: callbacks, loggers, tables and pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger

from lightning_sparsefl.federated.coordinator import Outcome, RoundResult
from lightning_sparsefl.federated.evaluate import Scores
from lightning_sparsefl.federated.facade import RoundTrainer
from lightning_sparsefl.types import ServerState

if TYPE_CHECKING:
    from lightning_sparsefl.federated.session import Session


def hyperparameters(trainer: Any, data: Any, module: Any) -> dict[str, Any]:
    """What identifies a run in a logger, flat, as plain values.

    Args:
        trainer: A `FederatedTrainer`.
        data: The clients' data.
        module: The user's module.
    """
    parts = {
        "algorithm": {"name": type(trainer.algorithm).__name__, **_fields(trainer.algorithm)},
        "federation": _fields(trainer.federation),
        "trainer": {"max_rounds": trainer.max_rounds, "seed": trainer.seed, **_fields(trainer.local_options)},
        "data": {"name": type(data).__name__, "num_clients": data.num_clients, "batch_size": getattr(data, "batch_size", None)},
        "model": {"name": type(module).__name__, **dict(module.hparams)},
    }
    return {f"{group}/{name}": _plain(value) for group, values in parts.items() for name, value in values.items()}


def _fields(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else {}


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else str(value)


class Recorder:
    """Writes what a session measures.

    Args:
        session: With its run folder open.
        facade: Of the run; its loggers are written to.
        loggers: Of the run.
    """

    def __init__(self, session: Session, facade: RoundTrainer, loggers: Sequence[Logger]) -> None:
        self.session, self.facade, self.loggers = session, facade, loggers
        self._scores: Mapping[str, float] = {}
        self._metrics: Mapping[str, float] = {}

    def record(self, number: int, result: RoundResult, scores: Scores | None, last: bool) -> Mapping[str, float]:
        """Log one round.

        Args:
            number: Of the round, from 0; the x-axis of every logger.
            result: Of the round.
            scores: If it was evaluated.
            last: Whether it is the last one.

        Returns:
            All logged keys.
        """
        if scores is not None:
            self._scores = scores.summary()
        self._metrics = {**result.metrics, **self.session.ledger.round_totals(number), **self.session.ledger.totals}
        metrics = {**self._metrics, **(self._scores if scores is not None else {})}
        if self.session.ranks.first:
            assert self.session.folder is not None
            self.session.folder.metrics.append([{"round": number, **metrics}])
            self.session.folder.clients.append(_client_rows(number, result.outcomes, scores))
            for logger in self.loggers:
                logger.log_metrics(dict(metrics), step=number)
                logger.save()
            self._draw(number, result, scores, last)
        return metrics

    def summary(self, server: ServerState) -> dict[str, Any]:
        """The final table: the last scores, the totals, and what they belong to."""
        totals = {n: v for n, v in self._metrics.items() if n.endswith("_total")}
        summary: dict[str, Any] = {
            "algorithm": type(self.session.algorithm).__name__,
            "rounds": server.round,
            "clients": self.session.data.num_clients,
            "seed": self.session.seed,
            **self._scores,
            **totals,
        }
        if "sparsity/density" in self._metrics:
            summary["sparsity/density"] = self._metrics["sparsity/density"]
        return summary

    def _draw(self, number: int, result: RoundResult, scores: Scores | None, last: bool) -> None:
        """Pictures, every few rounds: matplotlib is slow."""
        every = self.session.federation.pictures_every_n_rounds
        writers = [logger.experiment for logger in self.loggers if isinstance(logger, TensorBoardLogger)]
        if not writers or every == 0 or (not last and number % every):
            return
        from lightning_sparsefl.report import pictures

        figures = {}
        masks = self._masks()
        if len(masks) > 1:
            figures["mask/overlap"] = pictures.overlap_figure(masks, number)
        layers = {n.removeprefix("sparsity/layer/"): v for n, v in result.metrics.items() if n.startswith("sparsity/layer/")}
        if layers:
            figures["sparsity/density_per_layer"] = pictures.density_figure(layers, number)
        for writer in writers:
            for tag, figure in figures.items():
                writer.add_image(tag, pictures.pixels(figure), number)
            if scores is not None:
                for name in sorted({n for metrics in scores.personal.values() for n in metrics}):
                    values = pictures.score_values(scores.personal, name)
                    writer.add_histogram(f"clients/{name}", values, number)

    def _masks(self) -> dict[int, Any]:
        """The masks that clients uploaded, where the method keeps masks per client."""
        store, clients = self.session.store, range(self.session.data.num_clients)
        records = {i: store.get(i).shared for i in clients if i in store}
        return {i: shared["masks"] for i, shared in records.items() if "masks" in shared}


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
        }
    for client, metrics in (scores.personal if scores is not None else {}).items():
        row = rows.setdefault(client, {"round": number, "client": client, "trained": 0})
        row.update({f"personal/{name}": value for name, value in metrics.items()})
    return [rows[client] for client in sorted(rows)]


def hparams_summary(logger: TensorBoardLogger, params: Mapping[str, Any], metrics: Sequence[str]) -> None:
    """Show hyper-parameters in TensorBoard's own tab, beside the metrics of these names.

    Lightning's logger would add a point of value 0 to each metric; this writes the declaration alone.
    """
    from torch.utils.tensorboard.summary import hparams

    writer = logger.experiment._get_file_writer()
    for part in hparams(dict(params), dict.fromkeys(metrics, 0.0)):
        writer.add_summary(part)
