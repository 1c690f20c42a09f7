"""The rounds of a fit: trained, scored, recorded and committed, until they are done, stopped or interrupted."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_sparsefl.errors import ClientFailed, InvalidOption
from lightning_sparsefl.federated.commands.interruption_messages import kept_by_fit
from lightning_sparsefl.federated.commands.replay import replay_command
from lightning_sparsefl.federated.commands.run import Run
from lightning_sparsefl.federated.distributed.ranks import Ranks
from lightning_sparsefl.federated.distributed.signals import Interrupted
from lightning_sparsefl.federated.evaluation.scores import Scores
from lightning_sparsefl.federated.exchange.plain_values import encoded
from lightning_sparsefl.federated.fleet import names_of
from lightning_sparsefl.federated.rounds.cohort import RankCohort
from lightning_sparsefl.federated.rounds.coordinator import RoundResult
from lightning_sparsefl.federated.storage import checkpoint
from lightning_sparsefl.federated.storage.background_write import BackgroundWrite
from lightning_sparsefl.federated.storage.checkpoint import Checkpoint
from lightning_sparsefl.federated.storage.disk_full import raise_disk_full
from lightning_sparsefl.federated.storage.folder_lock import FolderLock
from lightning_sparsefl.federated.storage.record_store import StoredRecords, commit_together
from lightning_sparsefl.federated.storage.run_folder import RunFolder, checkpoints_of, new_version
from lightning_sparsefl.federated.tracking.hyperparameters import hyperparameters
from lightning_sparsefl.federated.tracking.recorder import Recorder
from lightning_sparsefl.federated.tracking.round_trainer import RoundTrainer
from lightning_sparsefl.federated.tracking.run_loggers import continue_loggers, log_hyperparameters, note_loggers
from lightning_sparsefl.report import print_line, print_table, summary_rows
from lightning_sparsefl.report.tables import LEGEND
from lightning_sparsefl.types import RunState


def fit(run: Run) -> dict[str, Any]:
    """Run the rounds that are left.

    Args:
        run: Parts of the run; it gets its folder.

    Returns:
        The final table.
    """
    with raise_disk_full(Path(run.options.default_root_dir)), _unlocked_after(run):
        run.lock_folder()
        run.require_batches()
        state, resumed = run.start()
        table = _final_table(run)
        ended = run.options.leave_no_rounds(table) or _is_out_of_time(run, table, resumed)
        if table.get("rounds") == state.server.round and ended:
            return _finished(run, state, table)
        run.server.draw.require_times(state)  # before the run has a folder
        return Fit(run, state, resumed).run_rounds()


@contextlib.contextmanager
def _unlocked_after(run: Run) -> Iterator[None]:
    """Release the lock of the run folder at the end."""
    try:
        yield
    finally:
        if run.lock is not None:
            run.lock.release()


def _final_table(run: Run) -> dict[str, Any]:
    """Return the final table of the run that goes on in its folder."""
    folder = run.resume_point.folder
    return {} if folder is None else RunFolder(folder).read_summary()


def _is_out_of_time(run: Run, table: Mapping[str, Any], resumed: Checkpoint | None) -> bool:
    """Return whether a `Timer` has stopped a run and has no time left, as it would find after its start."""
    timers = [each for each in run.options.callbacks if isinstance(each, Timer)]
    stopped = next((timer for timer in timers if timer.state_key == table.get("stopped_by")), None)
    if stopped is None or resumed is None or stopped.state_key not in resumed.callbacks:
        return False
    checkpoint.load_callback(run.resume_point.checkpoint, stopped, resumed.callbacks[stopped.state_key])
    left = stopped.time_remaining()
    return left is not None and left <= 0


def _finished(run: Run, state: RunState, table: dict[str, Any]) -> dict[str, Any]:
    """Print and return the final table of a run that has no rounds left, and say how it would go on."""
    assert run.resume_point.folder is not None
    run.worker.load(state.server.weights)
    run.folder = RunFolder(run.resume_point.folder)
    finished, most = state.server.round, run.options.max_rounds
    _print_results(run, finished, table)
    why, advice = f"`trainer.max_rounds` is {most}", "raise it"
    if finished < most:
        why = f"{table['stopped_by']} has stopped it"
        advice = "leave it out of `trainer.callbacks`, or give a `Timer` more time,"
    rank_zero_info(f"{run.folder.shown} has finished {finished} rounds, and {why}; {advice} to train longer.")
    return table


def _print_results(run: Run, rounds: int, table: Mapping[str, Any]) -> None:
    """Print the final table on the first rank, and where the run is."""
    if not run.ranks.first:
        return
    assert run.folder is not None
    path = run.folder.shown
    title = f"{type(run.algorithm).__name__} after {rounds} rounds, {run.data.num_clients} clients"
    print_table(title, ("", ""), summary_rows(table))
    print_line(f"{LEGEND}\n")
    if table.get("stopped_by") and rounds < run.options.max_rounds:
        print_line(f"{table['stopped_by']} has stopped the run after {rounds} of {run.options.max_rounds} rounds.")
    print_line(f"Run folder: {path}")
    if any(run.folder.path.glob("events.out.tfevents.*")):
        print_line(f"TensorBoard: tensorboard --logdir {path} (to compare runs: --logdir {path.parent})")


class Fit:
    """A run that begins, or goes on, in its folder.

    Args:
        run: Parts of the run; it gets its folder.
        state: State to go on from.
        resumed: Checkpoint of the state; None = a new run.
    """

    def __init__(self, run: Run, state: RunState, resumed: Checkpoint | None) -> None:
        self.parts, self.options, self.ranks, self.scorer = run, run.options, run.ranks, run.scorer
        self._state, self._resumed = state, resumed
        is_here = resumed is not None and run.resume_point.folder is not None
        self._committed = state.server.round if is_here else 0
        self._unrecorded = None if resumed is None else self._unrecorded_of(resumed)
        self._phase, self._writing = "the setup", BackgroundWrite()
        run.folder = self.folder = self._open_folder()
        self._loggers = self._open_loggers()
        self._round_trainer = RoundTrainer(
            self.ranks.fabric,
            run.module,
            self.options.callbacks,
            self._loggers,
            str(self.folder.path),
            self.options.max_rounds,
            run.federation.clients_per_round,
            self.options.check_val_every_n_round,
            self._copy,
        )

    def run_rounds(self) -> dict[str, Any]:
        """Run the rounds that are left; return the final table."""
        with raise_disk_full(self.folder.shown), contextlib.closing(self._writing):
            self._begin()
            self.parts.has_begun = True
            with self.parts.cohort.interrupts:
                try:
                    self._rounds()
                    self._phase = "fine-tuning"
                    self._recorder.finetuned, rows = self.scorer.finetuned(self._state)
                except BaseException as error:
                    self._fail(error)
                    raise
            if rows and self.ranks.first:
                self.folder.write_finetuned(rows)
            self.parts.worker.load(self._state.server.weights)
            return self._close()

    # ---- the run folder

    def _unrecorded_of(self, resumed: Checkpoint) -> RoundResult | None:
        """Return the last round of a checkpoint if a signal came before its scores."""
        with checkpoint.as_checkpoint_error(self.parts.resume_point.checkpoint):
            plain = resumed.unrecorded
            return None if plain is None else RoundResult.from_plain(plain, resumed.state)

    @property
    def _recorded(self) -> int:
        """Number of rounds that are recorded."""
        return self._state.server.round - (self._unrecorded is not None)

    def _open_folder(self) -> RunFolder:
        """Return the run folder, the same on all ranks."""
        resume_point = self.parts.resume_point
        known = resume_point.folder or self.options.run_dir
        path = self.ranks.share(lambda: self._checked(known or self._new_folder()) if self.ranks.first else None)[0]
        assert path is not None
        folder = RunFolder(path)
        if self.parts.lock is None:  # of a new folder, or not rank 0
            self.parts.lock = FolderLock(folder.path)
        self.ranks.share(partial(self._lock, path) if self.ranks.first else lambda: None)
        if self.ranks.first:
            resume_point.promote_previous()
        return folder

    def _lock(self, path: Path) -> None:
        """Lock the run folder.

        Raises:
            InvalidOption: If another process trains there, or has begun a run there since the search for one.
        """
        assert self.parts.lock is not None
        self.parts.lock.acquire()
        point = self.parts.resume_point
        goes_on = point.checkpoint is not None and point.folder is not None
        if not goes_on and checkpoints_of(path):
            raise InvalidOption(
                f"Another process has trained in {path} while this one was set up; start this one again with "
                "`ckpt_path: auto` to go on with that run, or set another `trainer.run_dir`."
            )

    def _new_folder(self) -> Path:
        """Return the folder of a new run: that of the user's first logger with one, or a new version.

        Raises:
            InvalidOption: If the folder of the logger has a run already.
        """
        # a CSVLogger, whose metrics.csv is another one, chooses its folder when it is first asked: after this one
        others = (logger.log_dir for logger in self.options.users_loggers() if not isinstance(logger, CSVLogger))
        own = next((Path(folder) for folder in others if folder), None)
        if own is not None and any((own / name).exists() for name in ("metrics.csv", "checkpoints/last.ckpt")):
            raise InvalidOption(
                f"`trainer.logger` writes to {own}, which has a run already; give the logger another `version`, or "
                "continue that run (`ckpt_path`)."
            )
        return own or new_version(Path(self.options.default_root_dir) / self.options.name)

    def _checked(self, path: Path) -> Path:
        """Return a run folder, after a check that no logger has its metrics.csv there.

        Raises:
            InvalidOption: If a CSVLogger writes there.
        """
        loggers = (logger for logger in self.options.users_loggers() if isinstance(logger, CSVLogger))
        if any(Path(logger.log_dir).resolve() == path.resolve() for logger in loggers):
            raise InvalidOption(
                f"`trainer.logger` has a CSVLogger that writes to {path}, where the run has a metrics.csv of its own; "
                "give the logger another `name` or `version`."
            )
        return path

    def _open_loggers(self) -> list[Logger]:
        """Return the user's loggers, or one in the run folder that drops what came after the committed round."""
        loggers, path = self.options.users_loggers(), self.folder.path
        going_on = self.parts.resume_point.folder is not None
        if going_on and self.ranks.first:
            continue_loggers(loggers, path)
        if not loggers and self.options.logger is not False:
            purge: dict[str, Any] = {"purge_step": self._recorded} if going_on else {}
            loggers = [
                TensorBoardLogger(path.parent.parent, path.parent.name, path.name, default_hp_metric=False, **purge)
            ]
        log_hyperparameters(loggers, hyperparameters(self.options, self.parts.data, self.parts.module))
        if self.ranks.first:
            note_loggers(loggers, path)
        return loggers

    def _begin(self) -> None:
        """Undo what came after the committed round, and restore what its checkpoint holds besides the state."""
        with warnings.catch_warnings():
            if self._resumed is not None:  # the folder of a ModelCheckpoint has the files of its own run
                warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
            self._round_trainer.call("setup", "fit")  # first, as in a Trainer: ModelCheckpoint restores its own folder
        if self.ranks.first:
            self.folder.cut_back(self._recorded)
            if self.parts.resume_point.folder is not None:
                self._discard_left_over()
        hparams = hyperparameters(self.options, self.parts.data, self.parts.module)
        if self.ranks.first:
            self.folder.write_hyperparameters(hparams)
            names = names_of(self.parts.data)
            if names:
                self.folder.write_names(names, [self.parts.data.num_examples(client) for client in range(len(names))])
        self._recorder = Recorder(
            self.folder,
            self.options,
            self.ranks.first,
            self.parts.ledger,
            self.parts.server_records,
            self._round_trainer,
            self._loggers,
            hparams,
            int(self.parts.data.num_clients),
            recorded=self._unrecorded is None,
        )
        if self._resumed is not None:
            self._go_on(self._resumed)
        self._note_callbacks()

    def _discard_left_over(self) -> None:
        """Delete record files that a killed run left between a commit and its clean-up."""
        folder = self.folder.checkpoints
        before = checkpoint.previous_records(folder / checkpoint.PREVIOUS)
        for store in self._stores:
            store.discard_left_over(folder / checkpoint.CLIENTS, None if before is None else before[store.name])

    def _go_on(self, resumed: Checkpoint) -> None:
        path = self.parts.resume_point.checkpoint
        for callback in self._round_trainer.callbacks:
            if callback.state_key in resumed.callbacks:
                checkpoint.load_callback(path, callback, resumed.callbacks[callback.state_key])
        with checkpoint.as_checkpoint_error(path):
            self._recorder.load_state_dict(resumed.log)
        if self.parts.resume_point.folder is not None and self.options.stops_again(resumed.stopped_by):
            self._round_trainer.stopped_by = resumed.stopped_by  # the run was killed before its final table

    # ---- rounds

    def _rounds(self) -> None:
        seen = self._round_trainer
        seen.current_epoch = seen.global_step = self._recorded
        for hook in ("on_fit_start", "on_train_start"):
            seen.call(hook)
        if self._unrecorded is not None:
            self._record(self._unrecorded)
        while self._state.server.round < self.options.max_rounds and not seen.should_stop:
            self._round()
        complete = self._recorder.is_complete(self._state.server.round)
        if not complete:
            self._complete_last_round()
        if not complete or self._committed < self._state.server.round:  # a copy that is complete, in a new folder
            self._commit()
        self._finish_writing()
        for hook in ("on_train_end", "on_fit_end"):
            seen.call(hook)
        seen.call("teardown", "fit")

    def _round(self) -> None:
        """Train one round, and record it."""
        seen, number = self._round_trainer, self._state.server.round
        self._phase = f"round {number + 1}"
        seen.call("on_train_epoch_start")
        after = self.parts.split if self._is_scored(number) and self.parts.federation.eval_after_training else None
        result = self.parts.coordinator.round(self._state, after)
        self._state, self._unrecorded = result.state, result
        seen.global_step = number + 1  # of the state that a callback may save now
        for index, outcome in enumerate(o for o in result.outcomes if o.status != "late"):
            seen.call("on_train_batch_start", outcome.client, index)
            seen.call("on_train_batch_end", dict(outcome.metrics), outcome.client, index)
        self._note_callbacks()
        self._record(result)

    def _is_scored(self, number: int) -> bool:
        """Return whether a round is evaluated; the last one always is."""
        return number + 1 == self.options.max_rounds or (number + 1) % self.options.check_val_every_n_round == 0

    def _note_callbacks(self) -> None:
        """Note what a commit holds of the callbacks."""
        self._stopped_by = self._round_trainer.stopped_by
        self._states = checkpoint.callback_states(self._round_trainer.callbacks)

    def _record(self, result: RoundResult) -> None:
        """Score, record and commit a round that was trained."""
        seen, number = self._round_trainer, self._state.server.round - 1
        self._phase = f"the evaluation of round {number + 1}"
        last = number + 1 == self.options.max_rounds
        scores, further = self._scores() if self._is_scored(number) else (None, {})
        seen.global_step = number + 1
        seen.report(self._recorder.record(number, result, scores, last, further))
        self._unrecorded = None
        if scores is not None:
            self._show_scores()
        seen.call("on_train_epoch_end")
        seen.current_epoch = number + 1
        self._note_callbacks()
        if seen.should_stop:
            self._complete_last_round()
        if last or seen.should_stop or (number + 1) % self.parts.federation.checkpoint_every_n_rounds == 0:
            self._commit()

    def _scores(self) -> tuple[Scores, dict[str, float]]:
        """Score the last trained round; if that fails, commit it without scores, for the run to go on from."""
        try:
            scores = self.scorer.scores(self._state)
            return scores, self.scorer.select(self._state, scores)
        except Exception as error:
            if isinstance(error, ClientFailed) or self.ranks.all_raise(error):  # else other ranks may not know of it
                _attempt(self._commit)
                _attempt(self._finish_writing)  # before the first rank ends, and with it the others
            raise

    def _complete_last_round(self) -> None:
        """Score and picture the last round, which a callback has stopped the run after."""
        if self._recorder.scored != self._state.server.round:
            self._phase = f"the evaluation of round {self._state.server.round}"
            scores, further = self._scores()
            self._round_trainer.report(self._recorder.add_scores(scores, self._state.server.round, further))
            self._show_scores()
        self._recorder.add_pictures(self._state.server)

    def _show_scores(self) -> None:
        """Call the callbacks' hooks of an evaluation, in which the number of the epoch is that of its round."""
        seen, after = self._round_trainer, self._round_trainer.current_epoch
        seen.current_epoch = self._state.server.round - 1
        seen.call("on_validation_start")
        seen.call("on_validation_end")
        seen.current_epoch = after
        self._note_callbacks()

    # ---- commits

    @property
    def _stores(self) -> tuple[Any, ...]:
        return (self.parts.server_records, self.parts.node_records)

    def _commit(self) -> None:
        """Commit the finished round: every rank writes its records, then rank 0 the checkpoint that names them.

        The checkpoint is written while the next round trains. No rank touches the records of the commit before until
        it is on the disk.
        """
        self._finish_writing()
        records = commit_together(self._stores, self.folder.checkpoints / checkpoint.CLIENTS, self._state.server.round)
        if self.ranks.first:
            again = self._committed == self._state.server.round  # with the scores that a signal had come before
            self._writing.start(lambda: self._prepared(records, again))
        self._committed = self._state.server.round

    def _finish_writing(self) -> None:
        """Wait until the last commit is on the disk; an error is raised on all ranks."""
        self.ranks.share(self._writing.finish if self.ranks.first else lambda: None)

    def _prepared(self, records: list[StoredRecords], again: bool) -> Callable[[], None]:
        """Return a function that writes the checkpoint as it is now."""
        folder = self.folder.checkpoints
        data = encoded(self._checkpoint(records, self._states).to_plain())

        def write() -> None:
            with raise_disk_full(self.folder.shown):
                self.parts.initial.save(folder)
                checkpoint.save(folder / checkpoint.LAST, data, again)
            self.folder.discard_finetuned()
            for store in self._stores:
                store.discard_unreferenced(folder / checkpoint.CLIENTS)

        return write

    def _copy(self, with_clients: bool) -> dict[str, Any]:
        """Return the content of a checkpoint that stands alone, with the clients' records inside on rank 0."""
        records = [StoredRecords(), StoredRecords()]
        if with_clients:
            records = [StoredRecords(records=_all_records(store, self.ranks)) for store in self._stores]
        content = self._checkpoint(records, checkpoint.callback_states(self._round_trainer.callbacks))
        return replace(content, initial_weights=self.parts.initial.copied()).to_plain()

    def _checkpoint(self, records: list[StoredRecords], callbacks: Mapping[str, Any]) -> Checkpoint:
        found = Checkpoint(
            state=self._state,
            module=self.parts.module_state(self._state),
            identity=self.parts.identity,
            training=self.parts.training,
            reported=self.parts.reported,
            server_records=records[0],
            node_records=records[1],
            ledger=self.parts.ledger.state_dict(),
            callbacks=callbacks,
            log=self._recorder.state_dict(),
            selected=self.scorer.selected,
            stopped_by=self._stopped_by,
            unrecorded=None if self._unrecorded is None else self._unrecorded.to_plain(),
            hyper_parameters=checkpoint.hparams_of(self.parts.module),
            initial=self.parts.initial.digest,
        )
        return replace(found, added=self._added(found))

    def _added(self, found: Checkpoint) -> dict[str, Any]:
        """Return what the module and round-level callbacks add to a checkpoint."""
        seen: Any = self._round_trainer  # which a callback takes for a Trainer
        module = self.parts.module
        hook = "on_save_checkpoint"
        own: list[Any] = [module.on_save_checkpoint] if is_overridden(hook, module) else []
        callbacks = [each for each in seen.callbacks if is_overridden(hook, each)]
        hooks = [*(partial(each.on_save_checkpoint, seen, module) for each in callbacks), *own]
        if not hooks:
            return {}
        former, module.trainer = module._trainer, seen
        try:
            return checkpoint.added_by(hooks, found.ordinary())
        finally:
            module.trainer = former

    # ---- ends

    def _fail(self, error: BaseException) -> None:
        """Commit the last trained round after a signal, say what is kept, and notify callbacks and loggers.

        A round whose evaluation was interrupted is recorded when the run goes on.
        """
        if isinstance(error, Interrupted):
            if self._state.server.round > self._committed:
                self._commit()
            self._finish_writing()
        else:
            with contextlib.suppress(Exception):  # a further failure must not hide the first error
                self._writing.finish()
        if isinstance(error, Interrupted | KeyboardInterrupt):
            kept = kept_by_fit(self.folder.shown, self._committed, self.options.max_rounds, self._phase)
            rank_zero_info(f"{str(error) or 'SIGINT'} {kept}")
        replayable = isinstance(error, ClientFailed) and error.during == "training"
        if replayable and isinstance(self.parts.cohort, RankCohort):  # its data is here
            _attempt(self._offer_replay, error)
        _attempt(self._round_trainer.call, "on_exception", error)
        _attempt(self._recorder.close)
        for logger in self._loggers:
            _attempt(logger.finalize, "failed")

    def _offer_replay(self, error: ClientFailed) -> None:
        """Commit the state that the client started from, and add the command that runs its fit again."""
        last = self.folder.checkpoints / checkpoint.LAST
        self._finish_writing()  # so that all ranks see the same file
        if self._committed != self._state.server.round or not last.exists():
            self._commit()
            self._finish_writing()
        error.replay = replay_command(error, self.folder.path, last)

    def _close(self) -> dict[str, Any]:
        """Write and print the final table."""
        summary = self._recorder.summary(self._state.server, self._round_trainer.stopped_by)
        if self.ranks.first:
            self.folder.write_summary(summary)
        _print_results(self.parts, self._state.server.round, summary)
        self._recorder.close()
        for logger in self._loggers:
            logger.finalize("success")
        return summary


def _attempt(work: Callable[..., Any], *arguments: Any) -> None:
    """Call a function after an error, which a further one must not hide."""
    try:
        work(*arguments)
    except OSError:  # of a full disk, as the first error often is
        pass
    except Exception as further:
        rank_zero_warn(f"The end of the failed run was not complete ({type(further).__name__}: {further}).")


def _all_records(store: Any, ranks: Ranks) -> dict[int, Any]:
    """Return the records of all ranks, on rank 0."""
    mine = store.records()
    if not store.divided or ranks.size == 1:
        return dict(mine)
    parts = ranks.exchange([mine if rank == 0 else {} for rank in range(ranks.size)])
    return {client: versions for part in parts for client, versions in part.items()}
