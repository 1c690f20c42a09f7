"""Option ``--config``: a file, or the name of one that is installed with the package."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ActionConfigFile

from lightning_sparsefl.cli.packaged import packaged_config, suggestion
from lightning_sparsefl.errors import InvalidOption

_TEXTS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")
"""Tags of keys that are texts, and of the key `<<`."""
_NOTHING = "tag:yaml.org,2002:null"
"""Tag of an empty value."""
_OPTIONS = ("-c", "--config")
"""Names of the option."""


class ConfigFileOrName(ActionConfigFile):
    """Option for a configuration file, or for the name of one that is installed with the package."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        """Apply the file of that path if there is one, else that of the package.

        Raises:
            InvalidOption: If the file has no options.
        """
        super().__call__(parser, cfg, checked_config(values), option_string)  # type: ignore[no-untyped-call]


def checked_config(value: Any, option: str = "--config") -> Any:
    """Return the path of the packaged file that names a configuration, else the value.

    Args:
        value: Path of a file, name of a packaged file, or options as text.
        option: Option or environment variable that has the value.

    Raises:
        InvalidOption: If the value is empty, a folder or no path, or the file has no options.
    """
    if not isinstance(value, str) or value.lstrip().startswith("{") or _has_options(value):
        return value
    packaged = packaged_config(value)
    if packaged is not None:
        return packaged
    if not value.strip() or Path(value).is_dir():
        what = ", which is a folder" if value.strip() else ""
        raise InvalidOption(f"`{option}` is '{value}'{what}; expected a YAML file, or a name of `sparsefl configs`.")
    if Path(value).is_file():
        _require_options(Path(value).read_bytes(), value, option)
    elif not Path(value).exists():
        siblings = [str(other) for other in Path(value).parent.glob("*")]
        raise InvalidOption(f"`{option}` is {value!r}, which does not exist{suggestion(value, siblings)}")
    return value


def with_pipes_read(args: Sequence[str]) -> list[str]:
    """Replace pipes after `--config`, such as ``-`` and ``<(...)`` of a shell, by the options that they have.

    A pipe can be read once, and the arguments are parsed more often, also by other processes.

    Args:
        args: Arguments of the command line.

    Raises:
        InvalidOption: If a pipe has no options.
    """
    read = list(args)
    for place, arg in enumerate(read):
        option, equals, value = arg.partition("=")
        if option in _OPTIONS and equals:
            read[place] = f"{option}={_text_of(value)}"
        elif option in _OPTIONS and place + 1 < len(read):
            read[place + 1] = _text_of(read[place + 1])
    return read


def _text_of(value: str) -> str:
    """Return the content of a pipe; another value as it is."""
    if value != "-" and (_has_options(value) or not Path(value).is_fifo()):
        return value
    content = sys.stdin.buffer.read() if value == "-" else Path(value).read_bytes()
    _require_options(content, value, "--config")
    return content.decode("utf-8")


def _has_options(text: str) -> bool:
    """Return whether a text is a mapping, as in ``--config "trainer: {max_rounds: 3}"``, and no path."""
    try:
        return isinstance(yaml.safe_load(text), Mapping)
    except yaml.YAMLError:
        return False


def _require_options(content: bytes, path: str, option: str) -> None:
    try:
        text = content.decode("utf-8")
        options, document = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        place = "" if mark is None else f", as line {mark.line + 1}, column {mark.column + 1} shows: {problem}"
        raise InvalidOption(f"`{option}` is '{path}', which is not YAML{place}; repair it.") from None
    if not isinstance(options, Mapping):
        what = "is empty" if options is None else f"has a {type(options).__name__}"
        raise InvalidOption(
            f"`{option}` is '{path}', which {what}; expected options by name, as `sparsefl configs --show quickstart` "
            "prints them."
        )
    try:
        _check_nodes(document, f"`{option}` is '{path}', which")
    except RecursionError:
        raise InvalidOption(
            f"`{option}` is '{path}', which refers to itself by an anchor; expected values that end."
        ) from None


def _check_nodes(document: yaml.Node | None, file: str) -> None:
    """Raise an error for a mapping that YAML accepts and a configuration cannot have.

    Args:
        document: Node of the document.
        file: Start of the message, which names the file.
    """
    for key in _repeated(document):
        line = key.start_mark.line + 1
        raise InvalidOption(f"{file} has `{key.value}` twice in one mapping, again in line {line}; remove one of them.")
    for key in _without_name(document):
        raise InvalidOption(
            f"{file} has the key `{key.value}` in line {key.start_mark.line + 1}; expected the name of an option, in "
            "quotes if YAML takes it for another value."
        )
    for key, expected in _no_class(document):
        raise InvalidOption(f"{file} has a wrong `{key.value}` in line {key.start_mark.line + 1}; expected {expected}.")


def _repeated(node: yaml.Node | None) -> Iterator[yaml.Node]:
    """Yield the keys that a mapping has twice, of which YAML keeps the last value."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _repeated(item)
    if isinstance(node, yaml.MappingNode):
        names = set()
        for key, value in node.value:
            if key.value in names:
                yield key
            names.add(key.value)
            yield from _repeated(value)


def _without_name(node: yaml.Node | None, groups: int = 2) -> Iterator[yaml.Node]:
    """Yield the keys in the place of an option that are not text; the value of an option may have such keys.

    Args:
        node: Node of the document.
        groups: Number of levels from here on whose keys are options: the groups, and the options of a group.
    """
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _without_name(item, 0)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if groups and key.tag not in _TEXTS:
                yield key
            yield from _without_name(value, max(groups - 1, key.value == "init_args"))


def _no_class(node: yaml.Node | None) -> Iterator[tuple[yaml.Node, str]]:
    """Yield the keys `class_path` and `init_args` whose values are of another kind, with what is expected."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _no_class(item)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == "class_path" and value.tag != _TEXTS[0]:
                yield key, "the name of a class"
            if key.value == "init_args" and not isinstance(value, yaml.MappingNode) and value.tag != _NOTHING:
                yield key, "options by name"
            yield from _no_class(value)
