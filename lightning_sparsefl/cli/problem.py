"""Parts of the error messages of jsonargparse."""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_sparsefl.cli.classes import classes_in, options_of_class
from lightning_sparsefl.cli.suggestions import import_path

_STEP = re.compile(
    r"^(?P<indent> *(?:- )?)(?:"
    r"Parser key [\"'](?P<key>[\w.]+)[\"']"
    r"|Problem with given class_path '(?P<class_path>[\w.]+)'"
    r"|Option '(?P<option>[\w.]+)' is not accepted)",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Problem:
    """An error message of jsonargparse."""

    message: str
    """The message, of several lines."""
    options: Sequence[str]
    """Options of the parser, with dashes."""
    elsewhere: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Options of all subcommands by their names."""
    folder: Path = field(default_factory=Path.cwd)
    """Folder in which the program was started; the parser works in that of a configuration while it reads it."""
    ckpt_path: str | None = None
    """Path in `--ckpt_path`, if it is the only source of a configuration and has none."""

    @cached_property
    def steps(self) -> list[re.Match[str]]:
        """Keys, classes and the option on the way to the error, from the outermost one; only the first alternative."""
        steps: list[re.Match[str]] = []
        for step in _STEP.finditer(self.message):
            if not steps or len(step["indent"]) > len(steps[-1]["indent"]):
                steps.append(step)
        return steps

    @property
    def key(self) -> str:
        """Dotted name of the option."""
        return ".".join(name for step in self.steps if (name := step["key"] or step["option"]))

    @property
    def value(self) -> str:
        """Value of the option, as it was given."""
        got = re.findall(r"Got value: (.*)|Given value: (.*)", self.message)
        return next((first or second for first, second in got), "")

    @property
    def given_class(self) -> str:
        """Class in the value: the value itself, or its `class_path`."""
        named = re.match(r"\{'class_path': '([^']*)'", self.value)
        return named[1] if named else self.value

    @property
    def classes(self) -> dict[str, str]:
        """Import paths of the classes around the option by their dotted keys, from the outermost one."""
        keys: list[str] = []
        classes = {}
        guessed = bool(self.steps) and self.steps[-1]["option"] == "class_path"  # then the last class is the default
        for step in self.steps[:-2] if guessed else self.steps:
            keys += [step["key"]] if step["key"] else []
            if step["class_path"]:
                classes[".".join(keys)] = step["class_path"]
        return classes

    @property
    def class_path(self) -> str | None:
        """Import path of the innermost class whose options are wrong."""
        return next(reversed(self.classes.values()), None)

    @property
    def beside_class_path(self) -> tuple[str, Sequence[str]]:
        """A class in the value that has options besides its `class_path`, with their names; empty if unknown."""
        try:
            return next(_beside_class_path(literal_eval(self.value)), ("", ()))
        except (SyntaxError, ValueError):  # not a plain value
            return "", ()

    @property
    def bases(self) -> tuple[type, ...]:
        """Base classes of the option, which is one of `class_path` or else of the parser."""
        kind = None if self.class_path is None else import_path(self.class_path)
        if isinstance(kind, type):
            return classes_in(options_of_class(kind).get(self.steps[-1]["key"]))
        tried = re.search(r"Subtypes: \[(.*)\]", self.message)
        found = [import_path(path) for path in re.findall(r"(?:\w+\.)+\w+", tried[1])] if tried else []
        return tuple(kind for kind in found if isinstance(kind, type))


def _beside_class_path(value: Any) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the classes in a value that have options besides their `class_path`, with the names of these."""
    if isinstance(value, Mapping):
        options = [str(name) for name in value if name not in ("class_path", "init_args", "dict_kwargs")]
        if "class_path" in value and options:
            yield str(value["class_path"]), options
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for item in inner:
        yield from _beside_class_path(item)
