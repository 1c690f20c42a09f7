"""The server of a deployment: `sparsefl fit` with its clients on the nodes of Flower's grid."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid
from lightning_sparsefl.errors import InvalidOption, require
from lightning_sparsefl.federated.commands.dispatch import Dispatched, dispatch
from lightning_sparsefl.federated.commands.run import Run

from lightning_sparsefl_flower.cohort import Collect, FlowerCohort, collect_each
from lightning_sparsefl_flower.configuration import Configured, read
from lightning_sparsefl_flower.directory import Directory
from lightning_sparsefl_flower.facts import facts_of
from lightning_sparsefl_flower.link import Link
from lightning_sparsefl_flower.registry import Registry
from lightning_sparsefl_flower.secure_link import SecureLink
from lightning_sparsefl_flower.secure_sum.obstacles import require_summable
from lightning_sparsefl_flower.secure_sum.policy import Policy
from lightning_sparsefl_flower.secure_sum.server import SecureCollect
from lightning_sparsefl_flower.server_data import ServerData

_BOUND = "nodes.json"
"""Name of the file in the root folder that records which key has which clients, if no `registry` is given."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of a run on Flower; see the comments in pyproject.toml."""

    config: str
    """YAML file that `sparsefl fit --config` reads, on the server."""
    root: str = "runs"
    """Folder of the run folders, `trainer.default_root_dir` of the server."""
    ckpt_path: str = ""
    """Checkpoint to go on from, `last` or `auto`; empty = a new run."""
    registry: str = ""
    """JSON file with the key of each client; empty = clients are bound to the key that first claims them."""
    timeout: float = 3600.0
    """Seconds to wait for the answers of a phase, and for nodes at the start."""
    max_examples: int = 1_000_000
    """Largest number of training samples that a client may state."""
    holdout: bool = False
    """Whether the server can load the test set, so that the global model is scored."""
    poll: float = 1.0
    """Seconds between two looks for replies."""
    secure_sum: str = ""
    """Threshold, least clients and least coverage of secure sums, such as `0.67,3,2`; empty = single updates."""

    def __post_init__(self) -> None:
        require(self.timeout > 0, "timeout", self.timeout, "a number of seconds above 0")
        require(self.poll >= 0, "poll", self.poll, "a number of seconds >= 0")
        if self.secure_sum:
            Policy.read(self.secure_sum)
        require(self.max_examples >= 1, "max-examples", self.max_examples, "a whole number >= 1")

    @classmethod
    def of(cls, run_config: Any) -> ServerOptions:
        """Read the options of a run.

        Args:
            run_config: Flower's run configuration.

        Raises:
            InvalidOption: If an option has a wrong type, or is unknown.
        """
        given = {name.replace("-", "_"): value for name, value in run_config.items()}
        kinds = {field.name: field.type for field in fields(cls)}
        for name, value in given.items():
            if name not in kinds:
                raise InvalidOption(f"`{name}` is no option of a run; expected some of {sorted(kinds)}.")
            if kinds[name] == "float" and type(value) is int:
                given[name] = float(value)
            elif type(value).__name__ != kinds[name]:
                raise InvalidOption(f"`{name}` is {value!r}; expected a value of type {kinds[name]}.")
        return cls(**given)


def fit(grid: Grid, options: ServerOptions) -> Dispatched:
    """Run the rounds that are left.

    Args:
        grid: Flower's grid.
        options: Options of the run.

    Returns:
        The final table, the run folder, and the exception that a signal asks to raise.

    Raises:
        InvalidOption: If an option is not valid, or clients are on no node.
        ClientFailed: If a client fails and `federation.on_client_error` is ``raise``.
    """
    configured = read(options.config, ["--trainer.default_root_dir", options.root])
    data, trainer = ServerData(configured.data, options.holdout), configured.trainer

    def connect(run: Run) -> FlowerCohort:
        return _connected(run, grid, options, configured, data)

    ckpt_path = options.ckpt_path or configured.ckpt_path
    return dispatch(trainer.options, trainer.fabric, "fit", configured.module, data, ckpt_path, connect)


def _connected(run: Run, grid: Grid, options: ServerOptions, configured: Configured, data: ServerData) -> FlowerCohort:
    """Wait for the nodes, and return the cohort of their clients."""
    link, secure = Link(grid, options.poll), Policy.read(options.secure_sum) if options.secure_sum else None
    if secure is not None:
        require_summable(run.algorithm, run.federation, secure)
    path = Path(options.registry) if options.registry else Path(options.root) / _BOUND
    directory = Directory(
        link,
        Registry(path, binds=not options.registry),
        facts_of(run, configured.data, secure),
        int(data.num_clients),
        options.max_examples,
        options.timeout,
    )
    collect: Collect = collect_each
    if secure is not None:
        collect = SecureCollect(run.layout, secure, SecureLink(directory, options.timeout))
    cohort = FlowerCohort(
        directory, run.about, run.codec, run.device, run.ranks, options.timeout, options.holdout, collect
    )
    link.check = cohort.interrupts.check
    with cohort.interrupts:
        directory.wait()
    data.sizes = directory.sizes
    return cohort
