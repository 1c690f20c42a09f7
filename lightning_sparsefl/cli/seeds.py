"""A group of runs that differ only in their seeds: ``sparsefl fit --seeds 0,1,2``.

::

    runs/<algorithm>/group_<digest>/    the digest is of the configuration without its seed
    |-- config.yaml                     the configuration
    |-- seeds.json                      the seeds of all commands so far
    |-- seed_0/                         a run folder, as `sparsefl fit --seed_everything 0` leaves it
    `-- seed_1/

The name of the folder follows from the configuration, so that the same command finds the group again, on every rank.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from lightning.fabric.utilities.seed import max_seed_value

from lightning_sparsefl.cli.run_config import CONFIG
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.storage.atomic_files import write_text_atomically
from lightning_sparsefl.federated.storage.run_folder import RunFolder
from lightning_sparsefl.report import print_line, print_table
from lightning_sparsefl.report.seeds import seed_rows
from lightning_sparsefl.report.tables import LEGEND

SEEDS = "seeds.json"
"""Name of the file in the folder of a group."""
OWN_KEYS = ("seeds", "seed_everything", "ckpt_path", "config")
"""Keys of a configuration in which the runs of a group differ, or that say where it came from."""
_MAY_CHANGE = frozenset(
    f"trainer.{name}"
    for name in (
        *("max_rounds", "max_time", "devices", "accelerator", "strategy", "num_nodes", "logger", "default_root_dir"),
        *("enable_progress_bar", "quiet"),
    )
)
"""Options in which runs of a group may differ, since they say where and how long they run."""
_MOST_DIGITS = len(str(max_seed_value))
_MOST_COLUMNS = 3
"""Maximum number of runs with a column each, so that the table fits into 80 columns."""


@dataclass(frozen=True)
class SeedGroup:
    """A group of runs that differ only in their seeds."""

    folder: Path
    """Folder of the group."""
    seeds: Sequence[int]
    """Seeds of the runs of this command, in their order."""
    config: str
    """Text of the configuration without :data:`OWN_KEYS`."""
    earlier: Sequence[int] = ()
    """Seeds of the runs of earlier commands, which the group keeps."""

    @property
    def all_seeds(self) -> list[int]:
        """Seeds of all runs of the group: of earlier commands, of this one, and of those that run beside it."""
        names = (path.name.removeprefix("seed_") for path in self.folder.glob("seed_*"))
        beside = sorted(int(name) for name in names if name.isascii() and name.isdecimal())
        return list(dict.fromkeys([*self.earlier, *self.seeds, *beside]))

    def run_dir(self, seed: int) -> Path:
        """Return the folder of a run.

        Args:
            seed: Seed of the run.
        """
        return self.folder / f"seed_{seed}"

    def require_alike(self) -> None:
        """Check that no run is to begin that would differ from those that have begun in more than its seed.

        Raises:
            InvalidOption: Naming an option that differs.
        """
        begun = self._begun()
        new = next((seed for seed in self.seeds if seed not in begun), None)
        if new is None or not begun or self._changed is None:
            return
        option, before, now = self._changed
        raise InvalidOption(
            f"{self.folder} is a group of runs with `{option}: {before}`, and seed {new} would begin with "
            f"`{option}: {now}`; set it as in the group, or leave out `ckpt_path` for another group."
        )

    def write(self) -> None:
        """Write the seeds, and the configuration unless the runs that have begun may still refuse it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._changed is None or not self._begun():
            self.write_config()
        write_text_atomically(self.folder / SEEDS, json.dumps(self.all_seeds) + "\n")

    def write_config(self) -> None:
        """Write the configuration, with which the group goes on when it is given as `ckpt_path`."""
        write_text_atomically(self.folder / CONFIG, self.config)

    @cached_property
    def _changed(self) -> tuple[str, Any, Any] | None:
        """Name and values of an option that differs from the group's and may change results; None without one."""
        path = self.folder / CONFIG
        if not path.is_file():
            return None
        before, now = (_options(yaml.safe_load(text)) for text in (path.read_text(encoding="utf-8"), self.config))
        names = [name for name in {**before, **now} if name not in _MAY_CHANGE and before.get(name) != now.get(name)]
        return next(((name, before.get(name), now.get(name)) for name in names), None)

    def finished(self) -> dict[int, Mapping[str, Any]]:
        """Return the final tables of the runs that have one, by seed."""
        tables = {seed: RunFolder(self.run_dir(seed)).read_summary() for seed in self._begun()}
        return {seed: table for seed, table in tables.items() if table}

    def _begun(self) -> list[int]:
        return [seed for seed in self.all_seeds if self.run_dir(seed).is_dir()]

    def print(self) -> None:
        """Print one table of all finished runs: mean and standard deviation over seeds, and a few runs."""
        tables = self.finished()
        first = next(iter(tables.values()))
        columns = ("", "mean", "std", *(f"seed {seed}" for seed in tables))
        shown = len(columns) if len(tables) <= _MOST_COLUMNS else 3
        rounds = sorted({table["rounds"] for table in tables.values()})  # several, if runs stop early
        count = f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else rounds[0]
        seeds = "1 seed" if len(tables) == 1 else f"{len(tables)} seeds"
        title = f"{first['algorithm']} after {count} rounds, {first['clients']} clients, {seeds}"
        print_table(title, columns[:shown], [row[:shown] for row in seed_rows(list(tables.values()))])
        print_line(f"std is the sample standard deviation over seeds.\n{LEGEND}\n")
        print_line(f"Group of runs: {self.folder}")


def _options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a configuration by their names, such as `trainer.max_rounds`."""
    found: dict[str, Any] = {}
    for section, value in config.items():
        if isinstance(value, Mapping):
            own = value.get("init_args")
            found |= {f"{section}.{name}": each for name, each in {**value, **(own or {})}.items() if each is not own}
        else:
            found[section] = value
    return found


def seeds_of(value: Any) -> list[int]:
    """Return the seeds that an option names.

    Args:
        value: Value of the option: whole numbers, separated by commas or in a list.

    Raises:
        InvalidOption: If they are not different whole numbers from 0 to 4294967295, the largest seed of NumPy.

    Example:
        >>> seeds_of("0,1,2"), seeds_of([7]), seeds_of(3)
        ([0, 1, 2], [7], [3])
    """
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    words = [str(part).strip() for part in parts]
    seeds = [int(word) for word in words if word.isascii() and word.isdecimal() and len(word) <= _MOST_DIGITS]
    seeds = [seed for seed in seeds if seed <= max_seed_value]
    if len(seeds) != len(words) or len(set(seeds)) != len(seeds) or not seeds:
        given = value if isinstance(value, str) else ",".join(words)
        raise InvalidOption(
            f"`seeds` is {given!r}; expected different whole numbers from 0 to {max_seed_value}, such as 0,1,2."
        )
    return seeds


def group_of(value: Any, ckpt_path: str | None, root: Path, algorithm: str, config: str) -> SeedGroup | None:
    """Return the group that a command asks for, or None if it asks for one run.

    Args:
        value: Value of the option `seeds`, or None.
        ckpt_path: Folder of the group to go on with, or what a single run starts from.
        root: Folder of all run folders.
        algorithm: Name of the algorithm.
        config: Text of the configuration without :data:`OWN_KEYS`.

    Raises:
        InvalidOption: If the seeds are not valid, or `ckpt_path` is not the folder of a group.
    """
    starts = ckpt_path in (None, "auto")  # a group goes on without being asked to
    folder = None if starts else Path(os.path.expanduser(str(ckpt_path)))
    known = folder is not None and (folder / SEEDS).is_file()
    if folder is not None and known:
        earlier = _earlier(folder, replaced=value is not None)
        return SeedGroup(folder, earlier if value is None else seeds_of(value), config, earlier)
    if value is None:
        return None
    if folder is not None:
        raise InvalidOption(
            f"`ckpt_path` is {str(ckpt_path)!r}; with `seeds`, expected the folder of a group of runs, or none: the "
            "same command goes on where its group was stopped."
        )
    digest = hashlib.sha256(config.encode()).hexdigest()[:8]
    folder = root / algorithm / f"group_{digest}"
    return SeedGroup(folder, seeds_of(value), config, _earlier(folder, replaced=True))


def _earlier(folder: Path, replaced: bool) -> list[int]:
    """Return the seeds of earlier commands, which are unknown if the group is new or its file is damaged.

    Args:
        folder: Folder of the group.
        replaced: Whether a damaged file is replaced; else it is an error.
    """
    path = folder / SEEDS
    try:
        return seeds_of(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return []
    except ValueError as error:  # not JSON, or no seeds
        if replaced:
            return []
        raise InvalidOption(f"{path} is damaged ({error}); set `seeds`.") from error
