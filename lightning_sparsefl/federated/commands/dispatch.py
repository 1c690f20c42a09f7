"""Starts the processes of a command, and runs one process's part of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lightning.fabric import Fabric
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.commands.export import export
from lightning_sparsefl.federated.commands.fit import fit
from lightning_sparsefl.federated.commands.inputs import (
    check_data,
    check_module,
    make_layers,
    warn_of_full_capacities,
)
from lightning_sparsefl.federated.commands.interruption_messages import kept_by_command
from lightning_sparsefl.federated.commands.replay import replay
from lightning_sparsefl.federated.commands.run import Run
from lightning_sparsefl.federated.commands.score import score
from lightning_sparsefl.federated.distributed.freed_memory import freed_memory_kept
from lightning_sparsefl.federated.distributed.heartbeat import heartbeats
from lightning_sparsefl.federated.distributed.launcher import launch
from lightning_sparsefl.federated.distributed.ranks import Ranks
from lightning_sparsefl.federated.distributed.signals import Interrupted, exit_exception, terminated_at_once
from lightning_sparsefl.federated.distributed.torch_settings import deterministic_algorithms, intra_op_threads
from lightning_sparsefl.federated.exchange.orders import Split
from lightning_sparsefl.federated.rounds.cohort import Cohort
from lightning_sparsefl.federated.rounds.run_options import RunOptions
from lightning_sparsefl.report import silenced

Verb = Literal["fit", "validate", "test", "replay", "export"]
_COMMANDS: dict[Verb, Callable[..., Any]] = {
    "fit": fit,
    "validate": score,
    "test": score,
    "replay": replay,
    "export": export,
}


class Dispatched(NamedTuple):
    """What a command leaves."""

    result: Any
    """What the command returned."""
    folder: Path | None
    """Folder of the run."""
    stop: BaseException | None
    """Exception to raise after a signal, when the last finished round is committed."""


def dispatch(
    options: RunOptions,
    fabric: Fabric,
    verb: Verb,
    module: LightningModule,
    data: Any,
    ckpt_path: str | None,
    connect: Callable[[Run], Cohort] | None = None,
    **asked: Any,
) -> Dispatched:
    """Run a command on all processes.

    Args:
        options: Options of the run.
        fabric: Fabric of the run, not launched yet.
        verb: Name of the command.
        module: The user's module.
        data: The clients' data.
        ckpt_path: A checkpoint to start from, ``last``, or None.
        connect: Function that makes the cohort of clients elsewhere; None = the processes of the run are the nodes.
        **asked: Further arguments of the command.

    Returns:
        What the command returned, the run folder if there is one, and the exception that a signal asks to raise.

    Raises:
        InvalidOption: If module, data and options do not fit each other.
    """
    if fabric.world_size > data.num_clients:
        raise InvalidOption(
            f"`trainer.devices`, `trainer.num_nodes` and `federation.workers_per_device` ask for "
            f"{fabric.world_size} ranks, but the data has {data.num_clients} clients; "
            "expected at most one rank per client."
        )
    options = options.shrunk(data.num_clients) if options.fast_dev_run else options
    check_data(data, options.federation)
    make_layers(module, options.seed)
    check_module(module)
    if verb == "fit":
        warn_of_full_capacities(options)
    result = launch(fabric, partial(_work, options, verb, module, data, ckpt_path, connect, asked))
    folder, signal = result["folder"], result["signal"]
    first = in_other_processes(fabric) or fabric.is_global_zero
    return Dispatched(
        result=result["result"],
        folder=None if folder is None else Path(folder),
        stop=None if signal is None else exit_exception(signal, first),
    )


def in_other_processes(fabric: Fabric) -> bool:
    """Return whether fork or spawn does the work, so that this process's module is not the one that trains.

    Args:
        fabric: Fabric of the run.
    """
    return fabric.world_size > 1 and type(fabric.strategy.launcher).__name__ == "_MultiProcessingLauncher"


def _work(
    options: RunOptions,
    verb: Verb,
    module: LightningModule,
    data: Any,
    ckpt_path: str | None,
    connect: Callable[[Run], Cohort] | None,
    asked: dict[str, Any],
    fabric: Fabric,
) -> dict[str, Any]:
    """Run one process's part; the result is small and plain, since it may cross a pipe."""
    splits: dict[str, Split] = {"validate": "val", "test": "test", "export": getattr(data, "eval_split", "val")}
    ranks = Ranks(fabric)
    with (
        silenced(options.quiet),
        intra_op_threads(options.num_threads),
        deterministic_algorithms(options.deterministic),
        freed_memory_kept(fabric.device),
        isolate_rng(),
        heartbeats(ranks),
        terminated_at_once(),
    ):
        rank_zero_info(f"{fabric.world_size} rank(s), {options.num_threads} intra-op thread(s) each")
        run, signal, result = None, None, {}
        try:
            run = Run(options, ranks, module, data, ckpt_path, splits.get(verb), connect)
            result = _COMMANDS[verb](run, **asked)
            signal = _signal_at_the_end(run)
        except (Interrupted, KeyboardInterrupt) as stop:
            if verb != "export" and (run is None or not run.has_begun):  # both say themselves what they keep
                folder = None if run is None else run.resume_point.folder
                rank_zero_info(f"{str(stop) or 'SIGINT'}: {kept_by_command(verb, folder)}")
            if isinstance(stop, KeyboardInterrupt):
                raise
            signal = stop.number
    path = None if run is None or run.folder is None else str(run.folder.path)
    return {"result": result, "folder": path, "signal": signal}


def _signal_at_the_end(run: Run) -> int | None:
    """Return the number of a signal that a rank received when nothing was left to stop; the same on all ranks."""
    numbers = run.ranks.share(lambda: run.cohort.interrupts.number)
    return next((number for number in numbers if number is not None), None)
