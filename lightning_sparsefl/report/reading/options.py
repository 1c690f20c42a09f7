"""The options of a run as flat plain values, from the configuration in its folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from lightning_sparsefl.errors import InvalidOption

Options: TypeAlias = Mapping[str, bool | int | float | str]
FILES = ("config.yaml", "hparams.yaml")
"""Files with the options of a run, the most complete one first."""
SEEDS = ("seed_everything", "trainer.seed", "data.seed", "federation.privacy.key_file")
"""Options that do not separate groups: the seeds over which means are taken, also the secret one of a private run."""
WITHOUT_EFFECT = {
    "ckpt_path": (),
    "config": (),
    "data": ("download", "eval_batch_size", "memory_map", "num_workers", "root"),
    "federation": (
        *("checkpoint_every_n_rounds", "eval_after_training", "local_engine", "pictures_every_n_rounds", "placement"),
        *("record_steps", "stack_size", "store", "wire", "workers_per_device"),
    ),
    "trainer": (
        *("accelerator", "default_root_dir", "deterministic", "devices", "enable_progress_bar", "logger", "num_nodes"),
        *("num_threads", "quiet", "strategy", "timeout"),
    ),
}
"""Options that do not change results, or only by rounding, or only add scores; without names, the whole group."""
_MOST = 10_000
"""Maximum number of options of a run."""
_TRAINING_DATA = ("data.batch_size", "data.drop_last")
"""Options of the data module that do not change which data the clients have."""


def read_options(path: Path) -> dict[str, bool | int | float | str]:
    """Read the options of a run.

    Args:
        path: Path of a `config.yaml`, written by the command line, or of a `hparams.yaml`.

    Returns:
        Values by dotted name, such as ``algorithm`` and ``algorithm.density``. Options of value null are left out.

    Raises:
        InvalidOption: If the file cannot be read.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(content, Mapping):
            raise ValueError("it is not a mapping")
        found: dict[str, bool | int | float | str] = {}
        for count, (name, value) in enumerate(_flat("", content)):
            if count > _MOST:
                raise ValueError(f"it has more than {_MOST} options")
            if value is not None:
                found[name] = value
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InvalidOption(f"{path} is not the configuration of a run ({reason}); remove it, or repair it.") from None
    return found


def with_effect(options: Options) -> dict[str, bool | int | float | str]:
    """Return the options that can change the results of a run.

    Args:
        options: Options from :func:`read_options`.

    Example:
        >>> with_effect({"algorithm.density": 0.5, "trainer.devices": 2})
        {'algorithm.density': 0.5}
    """
    return {name: value for name, value in options.items() if not _is_without_effect(name)}


def _flat(name: str, value: Any) -> Iterator[tuple[str, bool | int | float | str | None]]:
    """Yield the options in a value; a class is the option itself, and its arguments are below it.

    Mappings and null yield None, so that values that a short file repeats by references are counted, too.
    """
    if isinstance(value, Mapping) and "class_path" in value:
        yield name, class_name(str(value["class_path"]))
        yield from _flat(name, value.get("init_args") or {})
    elif isinstance(value, Mapping):
        yield name, None
        for key, item in value.items():
            yield from _flat(f"{name}.{key}".lstrip(".").replace("/", "."), item)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        if any(isinstance(item, Mapping | list) for item in value):
            for place, item in enumerate(value):
                yield from _flat(f"{name}.{place}", item)
        else:
            yield name, "[" + ", ".join(map(str, value)) + "]"
    else:
        yield name, value if value is None or isinstance(value, bool | int | float) else str(value)


def class_name(path: str) -> str:
    """Return the short name of a class of this package, and the import path of any other.

    Args:
        path: Import path of the class.

    Example:
        >>> class_name("lightning_sparsefl.data.IID"), class_name("mine.IID")
        ('IID', 'mine.IID')
    """
    return path.rpartition(".")[2] if path.startswith("lightning_sparsefl.") else path


def _is_without_effect(name: str) -> bool:
    group, _, rest = name.partition(".")
    return group in WITHOUT_EFFECT and (not WITHOUT_EFFECT[group] or rest.split(".")[0] in WITHOUT_EFFECT[group])


def is_about_data(name: str) -> bool:
    """Return whether an option decides which data the clients have.

    Args:
        name: Dotted name of the option.

    Example:
        >>> is_about_data("data.partition.alpha"), is_about_data("data.batch_size"), is_about_data("model.lr")
        (True, False, False)
    """
    return name.split(".")[0] == "data" and name not in (*_TRAINING_DATA, *SEEDS)
