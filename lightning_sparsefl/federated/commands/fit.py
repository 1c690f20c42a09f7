"""The rounds of a fit: trained, scored, recorded and committed, until they are done, stopped or interrupted."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from lightning_sparsefl.errors import ClientFailed
from lightning_sparsefl.federated.commands.replay import replay_command
from lightning_sparsefl.federated.distributed.signals import Interrupted
from lightning_sparsefl.federated.storage import checkpoint
from lightning_sparsefl.federated.storage.atomic_files import raise_disk_full
from lightning_sparsefl.federated.storage.run_folder import RunFolder, new_version
from lightning_sparsefl.federated.tracking.recorder import Recorder, hyperparameters, log_hyperparameters
from lightning_sparsefl.federated.tracking.round_trainer import RoundTrainer
from lightning_sparsefl.report import print_table, summary_rows
from lightning_sparsefl.types import ServerState

if TYPE_CHECKING:
    from lightning_sparsefl.federated.commands.run import Session


class Fit:
    """A run that begins, or goes on, in its folder.

    Args:
        session: Set up; it gets the folder.
        server: The state to go on from.
        resumed: What else its checkpoint yielded; None = a new run.
    """

    def __init__(self, session: Session, server: ServerState, resumed: checkpoint.Resumed | None) -> None:
        self.session, self.trainer, self.ranks, self.store = session, session.trainer, session.ranks, session.store
        self.federation, self.scorer, self.origin = session.federation, session.scorer, session.origin
        self._server, self._resumed, self._committed = server, resumed, server.round
        session.folder = self.folder = self._open_folder()
        self._loggers = self._open_loggers()
        self._facade = RoundTrainer(
            self.ranks.fabric,
            session.module,
            self.trainer.callbacks,
            self._loggers,
            str(self.folder.path),
            self.trainer.max_rounds,
            self.federation.clients_per_round,
            self.trainer.check_val_every_n_round,
            self._copy,
        )

    def run(self) -> dict[str, float]:
        """Run the rounds that are left; returns the final table."""
        with self.folder.lock, raise_disk_full(self.folder.path):
            self._begin()
            with self.session.coordinator.interrupts:
                try:
                    self._rounds()
                    self._recorder.finetuned, rows = self.scorer.finetuned(self._server)
                except BaseException as error:
                    self._fail(error)
                    raise
            if rows and self.ranks.first:
                self.folder.write_finetuned(rows)
            self.session.bench.load(self._server.weights)
            return self._close()

    # ---- the run folder

    def _open_folder(self) -> RunFolder:
        """The same on all ranks."""
        path: Path | None = None
        if self.origin.folder is not None:
            path = self.origin.folder
        elif self.ranks.first:
            # a CSVLogger's folder has a metrics.csv of its own
            own = next(
                (log.log_dir for log in self._users_loggers() if log.log_dir and not isinstance(log, CSVLogger)), None
            )
            path = Path(own) if own else new_version(Path(self.trainer.default_root_dir) / self.session.name)
        path = self.ranks.gather(path)[0]
        assert path is not None
        folder = RunFolder(path)
        self.ranks.share(folder.lock.acquire if self.ranks.first else lambda: None)
        if self.ranks.first:
            self.origin.promote_previous()
        return folder

    def _users_loggers(self) -> list[Logger]:
        """The user's loggers."""
        option = self.trainer.logger_option
        return [option] if isinstance(option, Logger) else list(option) if isinstance(option, list) else []

    def _open_loggers(self) -> list[Logger]:
        """The user's, or one in the run folder, which drops what came after the committed round."""
        loggers, path = self._users_loggers(), self.folder.path
        if not loggers and self.trainer.logger_option is not False:
            purge: dict[str, Any] = {} if self.origin.folder is None else {"purge_step": self._server.round}
            loggers = [
                TensorBoardLogger(path.parent.parent, path.parent.name, path.name, default_hp_metric=False, **purge)
            ]
        log_hyperparameters(loggers, hyperparameters(self.trainer, self.session.data, self.session.module))
        return loggers

    def _begin(self) -> None:
        """Undo what came after the committed round, and take over what its checkpoint holds beside the server."""
        self._facade.call("setup", "fit")  # first, as in a Trainer: ModelCheckpoint restores what belongs to its folder
        if self.ranks.first:
            self.folder.cut_back(self._server.round)
            if self.origin.folder is not None:
                folder = self.folder.checkpoints
                self.store.discard_left_over(
                    folder / checkpoint.CLIENTS, lambda: checkpoint.index_of(folder / checkpoint.PREVIOUS)
                )
        self._recorder = Recorder(self.session, self._facade, self._loggers)
        if self._resumed is not None:
            self._go_on(self._resumed)
        self._stopped = self._facade.should_stop
        self._states = checkpoint.callback_states(self.trainer.callbacks)

    def _go_on(self, resumed: checkpoint.Resumed) -> None:
        for callback in self.trainer.callbacks:
            if callback.state_key in resumed.callbacks:
                checkpoint.load_callback(self.origin.checkpoint, callback, resumed.callbacks[callback.state_key])
        with checkpoint.as_checkpoint_error(self.origin.checkpoint):
            self._recorder.load_state_dict(resumed.log)
        if self.origin.folder is not None:  # where a run was killed after a callback had stopped it
            self._facade.should_stop = (
                resumed.stopped and self.session.final_table().get("rounds") != self._server.round
            )

    # ---- rounds

    def _rounds(self) -> None:
        facade = self._facade
        facade.current_epoch = facade.global_step = self._server.round
        for hook in ("on_fit_start", "on_train_start"):
            facade.call(hook)
        while self._server.round < self.trainer.max_rounds and not facade.should_stop:
            self._round()
        self._score_late()
        for hook in ("on_train_end", "on_fit_end"):
            facade.call(hook)
        facade.call("teardown", "fit")

    def _round(self) -> None:
        """One round, scored, recorded and committed."""
        facade, number = self._facade, self._server.round
        facade.call("on_train_epoch_start")
        last = number + 1 == self.trainer.max_rounds
        scored = last or (number + 1) % self.trainer.check_val_every_n_round == 0
        after = self.session.split if scored and self.federation.eval_after_training else None
        result = self.session.coordinator.round(self._server, after)
        self._server = server = result.server
        for index, outcome in enumerate(result.outcomes):
            facade.call("on_train_batch_start", outcome.client, index)
            facade.call("on_train_batch_end", dict(outcome.metrics), outcome.client, index)
        scores = self.scorer.scores(server) if scored else None
        further = {} if scores is None else self.scorer.select(server, scores)
        facade.global_step = server.round
        facade.report(self._recorder.record(number, result, scores, last, further))
        if scores is not None:
            facade.call("on_validation_start")
            facade.call("on_validation_end")
        facade.call("on_train_epoch_end")
        facade.current_epoch = server.round
        if facade.should_stop:
            self._score_late()
        self._stopped = facade.should_stop
        self._states = checkpoint.callback_states(self.trainer.callbacks)
        if last or facade.should_stop or server.round % self.federation.checkpoint_every_n_rounds == 0:
            self._commit()

    def _score_late(self) -> None:
        """The last round is scored even if a callback stopped the run between two evaluations."""
        if self._recorder.scored != self._server.round:
            self._recorder.add_scores(self.scorer.scores(self._server), self._server.round)

    # ---- commits

    def _commit(self) -> None:
        """Make the finished round the one that a crash leaves; the first rank writes, and the others wait."""
        records = self.folder.checkpoints / checkpoint.CLIENTS
        self.ranks.share(self._write if self.ranks.first else lambda: None)
        self.ranks.share(lambda: self.store.follow(records, self._server.round))
        self._committed = self._server.round

    def _write(self) -> None:
        folder = self.folder.checkpoints
        index = self.store.commit(folder / checkpoint.CLIENTS, self._server.round)
        clients = {"index": index, "checksums": self.store.checksums}
        checkpoint.save(folder / checkpoint.LAST, self._checkpoint(clients, self._states))
        self.store.discard_unreferenced(folder / checkpoint.CLIENTS)

    def _copy(self, with_clients: bool) -> dict[str, Any]:
        """A checkpoint that stands alone; its records are needed where it is written."""
        states = checkpoint.callback_states(self.trainer.callbacks)
        if not with_clients or not self.ranks.first:
            return self._checkpoint({}, states)
        selected = self.scorer.state_dict()
        if selected is not None:
            with self.store.seen_as(selected["records"]):
                selected = {**selected, "records": self.store.records()}
        return self._checkpoint({"records": self.store.records()}, states, selected)

    def _checkpoint(
        self, clients: Mapping[str, Any], callbacks: Mapping[str, Any], selected: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        return checkpoint.compose(
            self._server,
            self.session.bench,
            self.session.ledger,
            callbacks,
            {**self.session.identity, "training": self.session.settings},
            clients,
            self._recorder.state_dict(),
            selected or self.scorer.state_dict(),
            self._stopped,
        )

    # ---- ends

    def _fail(self, error: BaseException) -> None:
        """Commit what a signal has left, and tell those who want to know."""
        if isinstance(error, Interrupted):
            if self._server.round > self._committed:
                self._commit()
            rank_zero_info(f"{error}: {self._committed} rounds are committed; `ckpt_path: last` goes on from there.")
        with contextlib.suppress(OSError):  # what cannot be written now hides no error before it
            if isinstance(error, ClientFailed):
                self._offer_replay(error)
            self._facade.call("on_exception", error)
            for logger in self._loggers:
                logger.finalize("failed")

    def _offer_replay(self, error: ClientFailed) -> None:
        """Commit the state that the client started from, and say how to run its fit again."""
        last = self.folder.checkpoints / checkpoint.LAST
        if self._committed != self._server.round or not last.exists():
            self._commit()
        error.replay = replay_command(error, self.folder.path, last)

    def _close(self) -> dict[str, float]:
        """Write and print the final table."""
        summary = self._recorder.summary(self._server)
        if self.ranks.first:
            self.folder.write_summary(summary)
            method, clients = type(self.session.algorithm).__name__, self.session.data.num_clients
            title = f"{method} after {self._server.round} rounds, {clients} clients"
            print_table(title, ("", ""), summary_rows(summary))
            print(f"Run folder: {self.folder.path}")
            if any(isinstance(logger, TensorBoardLogger) for logger in self._loggers):
                print(f"TensorBoard: tensorboard --logdir {self.folder.path}")
        for logger in self._loggers:
            logger.finalize("success")
        return summary
