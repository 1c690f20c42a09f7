"""Configurations, recipes of callbacks and scripts that are installed with the package, by name."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from lightning_sparsefl.cli.suggestions import did_you_mean
from lightning_sparsefl.errors import InvalidOption

_PACKAGE = Path(__file__).parents[1]
_INSTALLED = {"configs": "configs", "callbacks": "recipes"}
"""Folders of a clone, with their names inside the installed package: `callbacks` is one of its modules."""
_SUFFIXES = (".yaml", ".sh", ".py")
_CLUSTER = "cluster/"
"""Folder of files that start a run on several machines, which are not configurations of `sparsefl`."""


def _folder(name: str) -> Path:
    """Return a folder: inside the package as pip installs it, else beside it, as in a clone or an editable install."""
    installed = _PACKAGE / _INSTALLED[name]
    return installed if installed.is_dir() else _PACKAGE.parent / name


@cache
def packaged_files() -> dict[str, Path]:
    """Return the files by name, sorted.

    The name of a configuration is its path in `configs/` without suffix, that of a recipe starts with ``callbacks/``,
    and those of files for clusters keep their suffixes.
    """
    files = {}
    for folder, prefix in ((_folder("configs"), ""), (_folder("callbacks"), "callbacks/")):
        for path in folder.rglob("*"):
            if path.suffix in _SUFFIXES:
                name = prefix + path.relative_to(folder).as_posix()
                files[name if name.startswith(_CLUSTER) else name.removesuffix(".yaml")] = path
    return dict(sorted(files.items()))


def config_names() -> list[str]:
    """Return the names that `--config` accepts: all but those of files for clusters."""
    return [name for name in packaged_files() if not name.startswith(_CLUSTER)]


def packaged_config(value: str) -> Path | None:
    """Return the file of a packaged configuration, or None if the name is not known or a file has it as its path.

    Args:
        value: Name, with or without the prefix ``configs/`` and the suffix ``.yaml`` that its path has in a clone.

    Example:
        >>> packaged_config("quickstart").name
        'quickstart.yaml'
        >>> packaged_config("quickstrat")
    """
    name = value.removeprefix("configs/").removesuffix(".yaml")
    return packaged_files()[name] if name in config_names() and not Path(value).is_file() else None


def find_file(name: str) -> Path:
    """Return a packaged file.

    Args:
        name: Name as `sparsefl configs` lists it, or its path in a clone.

    Raises:
        InvalidOption: If no file has this name; the message has the most similar one.
    """
    path = name.removeprefix("configs/")
    for known in (path, path.removesuffix(".yaml")):
        if known in packaged_files():
            return packaged_files()[known]
    raise InvalidOption(f"No packaged configuration is called {name!r}" + suggestion(path))


def suggestion(name: str, others: Iterable[str] = ()) -> str:
    """Return the most similar name as a question, or else how to list the names, to be appended to a message.

    Args:
        name: Name that is not known.
        others: Further names to choose from, such as paths of files.
    """
    return did_you_mean(name, [*others, *packaged_files()]) or "; `sparsefl configs` lists those of the package."


def listing(pattern: str = "") -> str:
    """Return one line per file: its name and the first line of its description.

    Args:
        pattern: Part of the names, or a pattern of shell wildcards. Default: all files.

    Raises:
        InvalidOption: If no name matches.
    """
    wanted = pattern if any(sign in pattern for sign in "*?[") else f"*{pattern}*"
    names = [name for name in packaged_files() if fnmatchcase(name.lower(), wanted.lower())]
    if not names:
        raise InvalidOption(f"No packaged configuration matches {pattern!r}" + suggestion(pattern))
    width = max(len(name) for name in names)
    return "\n".join(f"{name:{width}}  {_summary(packaged_files()[name])}" for name in names)


def _summary(path: Path) -> str:
    """Return the first line of a file's comment or docstring, without the line that names a script's interpreter."""
    lines = (line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith(("# ", '"""')))
    return next(lines, "").lstrip('# "')


def copy(name: str, destination: Path) -> Path:
    """Copy a packaged file, and return the path of the copy.

    Args:
        name: Name of the file.
        destination: Folder, or path of the copy, whose folder is created if it is missing.

    Raises:
        InvalidOption: If the name is not known, or if the copy would replace a file.
    """
    source = find_file(name)
    target = destination / source.name if destination.is_dir() else destination
    if target.exists():
        raise InvalidOption(f"`--copy` would replace {str(target)!r}; choose another path, or remove the file.")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)
    return target
