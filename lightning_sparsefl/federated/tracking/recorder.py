"""Recording of the results of each round in loggers, tables and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger
from torch import Tensor

from lightning_sparsefl.cost import Ledger
from lightning_sparsefl.federated.evaluation.scores import Scores
from lightning_sparsefl.federated.rounds.coordinator import RoundResult
from lightning_sparsefl.federated.rounds.outcome import Outcome
from lightning_sparsefl.federated.rounds.run_options import RunOptions
from lightning_sparsefl.federated.storage.record_store import RecordStore
from lightning_sparsefl.federated.storage.run_folder import RunFolder
from lightning_sparsefl.federated.tracking.round_trainer import RoundTrainer
from lightning_sparsefl.federated.tracking.tags import kilobytes
from lightning_sparsefl.federated.tracking.tensorboard import Boards, packed_masks
from lightning_sparsefl.report.overlap import MOST_CLIENTS, mask_overlap, overlap_rows
from lightning_sparsefl.types import ServerState


class Recorder:
    """Writer of the metrics of a run.

    Args:
        folder: Folder of the run.
        options: Options of the run.
        writes: Whether this process writes; only the first rank does.
        ledger: Ledger of the run.
        records: Records of the server about clients.
        round_trainer: Trainer object of the round-level callbacks.
        loggers: Loggers of the run.
        hparams: Hyper-parameters of the run.
        num_clients: Number of clients of the run.
        recorded: Whether the last round of the run is recorded; if not, its scores are dropped and logged again.
    """

    def __init__(
        self,
        folder: RunFolder,
        options: RunOptions,
        writes: bool,
        ledger: Ledger,
        records: RecordStore,
        round_trainer: RoundTrainer,
        loggers: Sequence[Logger],
        hparams: Mapping[str, Any],
        num_clients: int,
        recorded: bool = True,
    ) -> None:
        self.folder, self.options, self.loggers = folder, options, loggers
        self._writes, self._ledger, self._records, self._round_trainer = writes, ledger, records, round_trainer
        self._num_clients = num_clients
        sent = kilobytes(ledger.totals) - (not recorded)
        self._boards = Boards(loggers, hparams, declared=_was_scored(folder), sent=sent)
        self.scored = 0
        """Number of finished rounds at the last evaluation."""
        self._pictured = 0
        """Number of finished rounds at the last overlaps and pictures."""
        self.finetuned: Mapping[str, float] = {}
        """Scores after the clients' last local fit."""
        self._scores: Mapping[str, float] = {}
        self._personal: Mapping[int, Mapping[str, float]] = {}
        self._clients_scored = 0
        self._metrics: Mapping[str, float] = {}

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
            number: Number of the round, from 0; the x-axis of every logger.
            result: Result of the round.
            scores: Scores of the round, if it was evaluated.
            last: Whether it is the last round.
            further: Additional scores, which are logged but not included in the summary.

        Returns:
            All logged keys.
        """
        if scores is not None:
            self.keep(scores, number + 1)
        self._metrics = {**result.metrics, **self._ledger.round_totals(number), **self._ledger.totals}
        scored = {} if scores is None else self._scored(scores)
        metrics = {**self._metrics, **scored, **(further or {})}
        every = self.options.federation.pictures_every_n_rounds
        pictured = last or bool(every and (number + 1) % every == 0)
        self._pictured = number + 1 if pictured else self._pictured
        if self._writes:
            self._write(number, metrics, result, scores, pictured)
        return metrics

    def _write(
        self, number: int, metrics: Mapping[str, float], result: RoundResult, scores: Scores | None, pictured: bool
    ) -> None:
        if scores is not None:
            self._boards.declare(self._scores, self._metrics)
            self._boards.histograms(number, scores.personal)
        self.folder.metrics.append([{"round": number, **metrics}])
        self.folder.clients.append(_client_rows(number, result.outcomes, scores, self._ledger.counts_flops))
        self._log(number, metrics)
        if pictured:
            self._picture(result.state.server)
        self._save()

    def _picture(self, server: ServerState) -> None:
        """Write the overlaps of masks and the pictures of the last recorded round."""
        number, overlaps = server.round - 1, self._overlaps()
        if overlaps is not None:
            self.folder.overlaps.append(overlap_rows(*overlaps, number))
        if self._boards and self.options.federation.pictures_every_n_rounds:
            self._boards.pictures(number, self._metrics, overlaps, self._num_clients, self._personal, self.scored)
            self._boards.masks(number, server, self._records)

    def _overlaps(self) -> tuple[list[int], Tensor] | None:
        """Return the clients whose masks the server knows and the overlaps of these masks; None for fewer than two."""
        masks = packed_masks(self._records, MOST_CLIENTS)
        return (list(masks), mask_overlap(list(masks.values()))) if len(masks) > 1 else None

    def keep(self, scores: Scores, rounds: int) -> None:
        """Store scores for the summary.

        Args:
            scores: Scores of the last evaluation.
            rounds: Number of finished rounds at the evaluation.
        """
        self._scores, self._personal, self.scored = scores.summary(), scores.personal, rounds
        self._clients_scored = sum(bool(metrics) for metrics in scores.personal.values())

    def add_scores(self, scores: Scores, rounds: int, further: Mapping[str, float]) -> Mapping[str, float]:
        """Store and log scores of a round that was recorded without them because a callback stopped the run.

        Args:
            scores: Scores of the round.
            rounds: Number of finished rounds.
            further: Additional scores, which are logged but not included in the summary.

        Returns:
            The keys of the scores.
        """
        self.keep(scores, rounds)
        number, metrics = rounds - 1, {**self._scored(scores), **further}
        if self._writes:
            self._boards.declare(self._scores, self._metrics)
            self._boards.histograms(number, scores.personal)
            self.folder.metrics.fill([{"round": number, **metrics}], ["round"])
            rows = _client_rows(number, (), scores, self._ledger.counts_flops)
            self.folder.clients.fill(rows, ["round", "client"])
            self._log(number, metrics)
            self._save()
        return metrics

    def add_pictures(self, server: ServerState) -> None:
        """Write overlaps and pictures of a round that was recorded without them because a callback stopped the run.

        Args:
            server: State of the server after the round.
        """
        if self._writes and self._pictured != server.round:
            self._picture(server)
            self._save()
        self._pictured = server.round

    def is_complete(self, rounds: int) -> bool:
        """Return whether the last round has its scores, overlaps and pictures.

        Args:
            rounds: Number of finished rounds.
        """
        return self.scored == self._pictured == rounds

    def _scored(self, scores: Scores) -> dict[str, float]:
        """Return what is logged of the scores that were stored last."""
        return {**self._scores, "comm/scoring_bytes": scores.downlink_bytes}

    def _log(self, number: int, metrics: Mapping[str, float]) -> None:
        """Log metrics in all loggers, in TensorBoard under its tags."""
        for logger in self.loggers:
            if not isinstance(logger, TensorBoardLogger):
                logger.log_metrics(dict(metrics), step=number)
        self._boards.scalars(number, metrics, kilobytes(self._ledger.totals))

    def _save(self) -> None:
        """Write what the loggers hold to their files, before the round is committed."""
        for logger in self.loggers:
            logger.save()

    def close(self) -> None:
        """Close the files that no logger closes."""
        self._boards.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the summary, the next pictures and callbacks need, for a checkpoint."""
        pictured = self._boards and self.options.federation.pictures_every_n_rounds
        return {
            "scores": dict(self._scores),
            "scored": self.scored,
            "pictured": self._pictured,
            "clients_scored": self._clients_scored,
            "personal": {i: dict(metrics) for i, metrics in self._personal.items()} if pictured else {},
            "metrics": _untimed(self._metrics),
            "callback_metrics": _untimed({n: float(v) for n, v in self._round_trainer.callback_metrics.items()}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint.

        Args:
            state: State from :meth:`state_dict`; empty for a new run.

        Raises:
            TypeError: If a value is not a number.
        """
        if state:
            counts = {name: state[name] for name in ("scored", "pictured", "clients_scored")}
            logged = [state[name] for name in ("scores", "metrics", "callback_metrics")]
            for numbers in (counts, *logged, *state["personal"].values()):
                _require_numbers(numbers)
            self._scores, self.scored, self._metrics = state["scores"], state["scored"], state["metrics"]
            self._personal, self._clients_scored = state["personal"], state["clients_scored"]
            self._pictured = state["pictured"]
            self._round_trainer.report(state["callback_metrics"])

    def summary(self, server: ServerState, stopped_by: str) -> dict[str, Any]:
        """Return the summary of the run: its identification, the last scores and the totals.

        Args:
            server: State of the server after the last round.
            stopped_by: State key of the callback that stopped the run; empty if none did.
        """
        totals = {n: v for n, v in self._metrics.items() if n.endswith("_total")}
        summary: dict[str, Any] = {
            "algorithm": type(self.options.algorithm).__name__,
            "rounds": server.round,
            **({"stopped_by": stopped_by} if stopped_by else {}),
            "clients": self._num_clients,
            "clients_scored": self._clients_scored,
            "seed": self.options.seed,
            **self._scores,
            **{n: value for n, value in self._metrics.items() if n.startswith(("personal_after/", "privacy/"))},
            **self.finetuned,
            **totals,
        }
        if "density/all" in self._metrics:
            summary["density/all"] = self._metrics["density/all"]
        return summary


def _untimed(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics without measured times, which differ between equal runs."""
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


def _require_numbers(metrics: Mapping[str, Any]) -> None:
    """Raise :class:`TypeError` unless all values are numbers, as those of a checkpoint should be."""
    for name, value in metrics.items():
        if not isinstance(value, int | float):
            raise TypeError(f"its {name!r} is of the type {type(value).__name__}")


def _was_scored(folder: RunFolder) -> bool:
    """Return whether a resumed run has logged scores before."""
    groups = ("global/", "personal/")
    return any(value for row in folder.metrics.read() for name, value in row.items() if name.startswith(groups))


def _client_rows(
    number: int, outcomes: Sequence[Outcome], scores: Scores | None, counts_flops: bool
) -> list[dict[str, Any]]:
    """Return one row for each client that was trained or evaluated in a round."""
    rows: dict[int, dict[str, Any]] = {}
    left_out = {"round", "client"} if counts_flops else {"round", "client", "flops_train", "flops_paper"}
    for outcome in outcomes:
        charge = {} if outcome.charge is None else vars(outcome.charge)
        simulated = outcome.simulated_seconds
        after = next(iter(outcome.scores.values()), {})
        rows[outcome.client] = {
            "round": number,
            "client": outcome.client,
            "trained": int(outcome.status == "counted"),
            "failure": outcome.failure or "",
            "num_examples": outcome.num_examples,
            **{n: v for n, v in charge.items() if n not in left_out},
            **({} if simulated is None else {"simulated_seconds": simulated}),
            **{f"local/{name}": value for name, value in outcome.metrics.items()},
            **{f"personal_after/{name}": value for name, value in after.items()},
        }
    groups = {} if scores is None else {"personal": scores.personal, "unseen": scores.unseen}
    for group, clients in groups.items():
        for client, metrics in clients.items():
            row = rows.setdefault(client, {"round": number, "client": client, "trained": 0})
            row.update({f"{group}/{name}": value for name, value in metrics.items()})
    return [rows[client] for client in sorted(rows)]
