"""Loggers of other libraries, whose runs have identifiers: a resumed run goes on in the same ones."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.storage.atomic_files import write_text_atomically
from lightning_sparsefl.federated.storage.run_folder import checkpoints_of
from lightning_sparsefl.report.reading.options import read_options

FILE = "loggers.json"
"""Name of the file in a run folder with the identifiers of the loggers' runs."""
_IDENTIFIER = re.compile(r"[A-Za-z0-9_-]{1,128}")


def runs_of_loggers(loggers: Sequence[Logger], algorithm: str) -> list[Path]:
    """Return the runs of an algorithm that have a checkpoint, in the folder in which a logger makes those of its runs.

    Args:
        loggers: Loggers of the user, of which the first with such a folder gives runs theirs.
        algorithm: Name of the algorithm.

    Returns:
        Folders of the runs, in the order of their last commits.
    """
    for logger in loggers:
        root = None if isinstance(logger, CSVLogger) else _root(logger)
        if root is not None:
            named = getattr(logger, "_version", None)
            found = root.glob("*") if named is None else [Path(logger.log_dir or "")]
            runs = [run for run in found if checkpoints_of(run) and _algorithm_of(run) == algorithm]
            return sorted(runs, key=lambda run: checkpoints_of(run)[0].stat().st_mtime)
    return []


def _root(logger: Logger) -> Path | None:
    """Return the folder in which a logger makes a folder for each run, without a version for a new one."""
    root = getattr(logger, "root_dir", None)
    return Path(root) if isinstance(root, str | PathLike) else None


def _algorithm_of(run: Path) -> Any:
    try:
        return read_options(run / TensorBoardLogger.NAME_HPARAMS_FILE).get("algorithm")
    except InvalidOption:
        return None


def continue_loggers(loggers: Sequence[Logger], folder: Path) -> None:
    """Make loggers continue the runs that they began in a run folder, unless the user names others.

    Args:
        loggers: Loggers of the run, which have not logged yet.
        folder: Folder of the run.
    """
    boards = [logger for logger in loggers if isinstance(logger, TensorBoardLogger) and logger._version is None]
    for board in boards:
        if Path(board.root_dir).resolve() == folder.parent.resolve():
            board._version = folder.name
    known = _read(folder / FILE)
    for name, logger in _named(loggers).items():
        if name not in known:
            continue
        if isinstance(logger, WandbLogger) and logger._experiment is None and logger._id is None:
            logger._id = logger._wandb_init["id"] = known[name]
        elif isinstance(logger, MLFlowLogger) and logger._run_id is None:
            _continue_mlflow(logger, known[name])


def _continue_mlflow(logger: MLFlowLogger, run_id: str) -> None:
    """Set the run of an MLflow logger, and its status, if its store still has the run."""
    from mlflow.exceptions import MlflowException

    try:
        logger._mlflow_client.update_run(run_id, status="RUNNING")
    except MlflowException as error:
        rank_zero_warn(f"The run {run_id} is not in {logger._tracking_uri} ({error}): MLflow starts a new one.")
    else:
        logger._run_id = run_id


def note_loggers(loggers: Sequence[Logger], folder: Path) -> None:
    """Write the identifiers of the loggers' runs to the run folder.

    Args:
        loggers: Loggers of the run, which have logged its hyper-parameters.
        folder: Folder of the run.
    """
    known = {name: str(logger.version) for name, logger in _named(loggers).items()}
    if known:
        write_text_atomically(folder / FILE, json.dumps(known, indent=2) + "\n")


def log_hyperparameters(loggers: Sequence[Logger], params: Mapping[str, Any]) -> None:
    """Log the hyper-parameters of a run to every logger.

    The TensorBoard logger must not declare its metric `hp_metric` of value -1, since it would ignore others after it.
    MLflow accepts no other value for a parameter of a resumed run, such as more rounds, and keeps the first one.

    Args:
        loggers: Loggers of the run.
        params: Hyper-parameters of the run.
    """
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(dict(params), metrics={})
        elif isinstance(logger, MLFlowLogger):
            known = logger.experiment.get_run(logger.run_id).data.params if logger.experiment is not None else {}
            logger.log_hyperparams({name: value for name, value in params.items() if name not in known})
        else:
            logger.log_hyperparams(dict(params))


def close_loggers(loggers: Sequence[Logger]) -> None:
    """End the runs of loggers that would otherwise record a later run of this process as well.

    Args:
        loggers: Loggers of a run that has ended.
    """
    for logger in loggers:
        if isinstance(logger, WandbLogger) and logger._experiment is not None:
            logger._experiment.finish()


def _named(loggers: Sequence[Logger]) -> dict[str, Logger]:
    """Return the loggers whose runs have identifiers, by class and place."""
    ours = [logger for logger in loggers if isinstance(logger, WandbLogger | MLFlowLogger)]
    return {f"{type(logger).__name__}-{place}": logger for place, logger in enumerate(ours)}


def _read(path: Path) -> dict[str, str]:
    """Return the identifiers of a file, or an empty dict if it is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        valid = isinstance(content, dict) and all(_IDENTIFIER.fullmatch(run) for run in content.values())
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError):
        valid = False
    if not valid:
        rank_zero_warn(f"{path} is damaged; its loggers start new runs.")
        return {}
    return dict(content)
