"""Error messages of the parser, rewritten to one line that names the option, its value and what was expected."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from importlib import import_module
from inspect import isfunction
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args, get_origin

from jsonargparse import ArgumentParser

from lightning_sparsefl.cli.classes import NotCreated, described, known_classes, options_of_class, own_classes
from lightning_sparsefl.cli.help import BASES, KINDS
from lightning_sparsefl.cli.problem import Problem
from lightning_sparsefl.cli.suggestions import did_you_mean, import_path, no_subcommand, unknown_subcommand
from lightning_sparsefl.errors import nearest
from lightning_sparsefl.report.reading.options import class_name

_PARSER_DETAILS = re.compile(
    r"Does not validate|Subtypes:|Errors:|Expected a <class 'NoneType'>|Given value|Expected a path but"
)
_IMPORT_PATH = r"((?:[A-Za-z_]\w*\.)+[A-Za-z_]\w*)"
_OTHER_TYPES = r"^Expected a <class '[\w.]+'>; |[.;] Expected a <class '[\w.]+'>"
_OF_FUNCTION = "expects a function or a callable class"
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "list": "a list",
    "tuple": "a list",
    "collections.abc.Sequence": "a list, as in '[a, b]'",
    "dict": "a mapping",
}
_OF_CONFIGS = frozenset({"algorithm", "data", "model"})
"""Options that the configuration of a run has."""


def short_message(
    message: str,
    options: Sequence[str] = (),
    elsewhere: Mapping[str, Sequence[str]] = MappingProxyType({}),
    folder: Path | None = None,
    ckpt_path: str | None = None,
) -> str:
    r"""Rewrite an error message of jsonargparse to one line without the types that the parser tried.

    Args:
        message: Error message of jsonargparse, of several lines.
        options: Options of the parser, with dashes, among which a similar one is suggested.
        elsewhere: Options of all subcommands by their names.
        folder: Folder in which the program was started. Default: the current one.
        ckpt_path: Path in `--ckpt_path`, if it is the only source of a configuration and has none.

    Example:
        >>> short_message("Parser key \"lr\":\n  Does not validate\n  Errors:\n    - Expected a <class 'float'>")
        '`lr`: expected a number.'
        >>> short_message("unrecognized arguments: --trainer.max_round 5", ["--trainer.max_rounds"])
        '`--trainer.max_round` is not an option; did you mean `--trainer.max_rounds`?'
    """
    problem = Problem(message, options, elsewhere, folder or Path.cwd(), ckpt_path)
    for pattern, rewrite in _RULES:
        match = re.search(pattern, message)
        if match:
            text = rewrite(problem, match)
            return text if text.endswith(("?", ".")) else f"{text}."
    return _condensed(message)


def where_listed(message: str, program: str) -> str:
    r"""Return the sentence that says which command lists the options.

    Args:
        message: Error message of jsonargparse, of several lines.
        program: Command whose options are wrong, such as ``sparsefl fit``, or the program if no subcommand is known.

    Example:
        >>> where_listed("unrecognized arguments: --x", "sparsefl fit")
        '`sparsefl fit --help` lists the options.'
        >>> message = "Parser key 'algorithm':\n  Problem with given class_path 'lightning_sparsefl.FedSpa':"
        >>> where_listed(message, "sparsefl fit")
        '`sparsefl fit --algorithm.help FedSpa` lists the options of FedSpa.'
    """
    problem = Problem(message, ())
    classes = {
        k: class_name(path)
        for k, path in problem.classes.items()
        if path.rpartition(".")[2] not in BASES and callable(import_path(path))
    }
    if classes:
        asked = " ".join(f"--{key}.help {name}" for key, name in classes.items())
        return f"`{program} {asked}` lists the options of {list(classes.values())[-1].rpartition('.')[2]}."
    if problem.key in _OF_CONFIGS:
        return f"`{program} --{problem.key}.help` lists the classes."
    return f"`{program} --help` lists the {'options' if ' ' in program else 'subcommands'}."


def _condensed(message: str) -> str:
    """Join the lines of a message without the types that the parser tried."""
    lines = [line.strip().removeprefix("- ") for line in message.splitlines()]
    parts = list(dict.fromkeys(line for line in lines if line and not _PARSER_DETAILS.match(line)))
    text = " ".join(part if part.endswith((":", ".")) else f"{part};" for part in parts).rstrip(";")
    return text if text.endswith(".") else f"{text}."


def _required(problem: Problem, match: re.Match[str]) -> str:
    given = match[1].split(", ")
    keys = [f"{problem.key}.{key}" if problem.classes else key.partition(".")[2] or key for key in given]
    names = ", ".join(f"`{key}`" for key in keys)
    if not _OF_CONFIGS.intersection(keys):
        return f"No value for {names}; expected {' '.join(f'--{key} VALUE' for key in keys)}"
    if problem.ckpt_path is None:
        return (
            f"No value for {names}; expected options, a file in `--config`, or in `--ckpt_path` a run folder with a "
            "config.yaml"
        )
    where = "not" if Path(problem.ckpt_path).is_dir() else "not in"
    return (
        f"`ckpt_path` is {problem.ckpt_path!r}, which is {where} a run folder with a config.yaml; expected such a "
        f"folder, or {names} by options or a file in `--config`"
    )


def _unrecognized(problem: Problem, match: re.Match[str]) -> str:
    name = match[1].partition("=")[0]
    name = f"--{problem.key}.{name.removeprefix('--')}" if problem.classes else name
    if problem.options and not any(option.startswith("-") for option in problem.options):  # those are the subcommands
        return f"`{name}` is not an option before the subcommand; expected options of a subcommand after its name"
    having = [f"`{subcommand}`" for subcommand, options in problem.elsewhere.items() if name in options]
    if having:
        return f"`{name}` is not an option of this subcommand, but of {', '.join(having)}"
    return f"`{name}` is not an option" + (_of_python(name) or _of_class(name) or did_you_mean(name, problem.options))


def _of_python(name: str) -> str:
    """Return what takes the place of an argument that only Python code has, to be appended; empty for other names."""
    if name.removeprefix("--") != "trainer.run_dir":
        return ""
    return ", but an argument in Python; expected `trainer.default_root_dir`, below which a run makes its folder"


def _of_class(name: str) -> str:
    """Return what must precede the help of an option of a class, to be appended; empty for other names."""
    group, _, option = name.removeprefix("--").partition(".")
    if group not in KINDS or not option.endswith(".help"):
        return ""
    return f" as long as the class of `{group}` is not known; expected `--{group} NAME {name}`"


def _before_subcommand(problem: Problem, match: re.Match[str]) -> str:
    return (
        f"`{match[1]}` is set before the subcommand, by an option or a `--config` there; expected options of "
        f"`{match[2]}` after its name"
    )


def _no_name(problem: Problem, match: re.Match[str]) -> str:
    where, key = f"`{problem.key}`" if problem.key else "The configuration", match[1].removesuffix(".")
    return f"{where} has the key {key}; expected the name of an option, in quotes if YAML takes it for another value"


def _no_value(problem: Problem, match: re.Match[str]) -> str:
    name = match[1].rpartition("/")[2].removesuffix("+")  # the long one
    return f"No value for `{name}`; expected {name} VALUE"


def _not_accepted(problem: Problem, match: re.Match[str]) -> str:
    """Rewrite the message for an option that a class does not have, or only the base class, which is tried as well."""
    if problem.classes and not problem.steps[-1]["option"]:
        return _wrong_type(problem, match)
    kind = None if problem.class_path is None else import_path(problem.class_path)
    if not isinstance(kind, type):
        options = [option.removeprefix("--") for option in problem.options]
        return f"`{match[1]}` is not an option" + (_of_python(match[1]) or did_you_mean(match[1], options))
    names = list(options_of_class(kind))
    known = f"; expected one of {', '.join(names)}" if names else "; it has none"
    return f"`{problem.key}` is not an option of {kind.__name__}" + (did_you_mean(match[1], names) or known)


def _beside_class_path(problem: Problem, match: re.Match[str]) -> str:
    name, options = problem.beside_class_path
    text = f"`{problem.key.removesuffix('.class_path')}`"
    if not options:
        return f"{text} has options besides `class_path`; expected them below `init_args`"
    listed = ", ".join(f"`{option}`" for option in options)
    return f"{text} is {name} with {listed} besides `class_path`; expected options of a class below `init_args`"


def _unknown_class(problem: Problem, match: re.Match[str]) -> str:
    kind = _only_class(problem.bases)
    if kind is not None:
        return _no_options(problem, match[1], kind)
    if match[1] in known_classes(object):
        return _other_kind(problem, match)
    text = f"`{problem.key}` is {match[1]!r}, which is not a known class"
    return text + (did_you_mean(match[1], known_classes(*problem.bases)) or _expected_class(problem))


def _unknown_class_of_help(problem: Problem, match: re.Match[str]) -> str:
    known = known_classes(KINDS.get(match[1], object))
    hint = did_you_mean(match[2], known) or f"; `--{match[1]}.help` lists the classes"
    return f"`--{match[1]}.help` is {match[2]!r}, which is not a known class{hint if match[1] in KINDS else ''}"


def _only_class(bases: Sequence[type]) -> type | None:
    """Return the class whose options an option consists of, such as `ServerOptimizer`; None if one can be chosen."""
    return bases[0] if len(bases) == 1 and is_dataclass(bases[0]) and not own_classes(*bases) else None


def _no_options(problem: Problem, value: str, kind: type) -> str:
    """Rewrite the message for a single value in the place of several options of a class."""
    options = options_of_class(kind)
    for name, hint in options.items():
        near = nearest(value, get_args(hint)) if get_origin(hint) is Literal else None
        if near is not None:
            return f"`{problem.key}` is {value!r}; did you mean `--{problem.key}.{name} {near}`?"
    listed = ", ".join(f"`{problem.key}.{name}`" for name in options)
    return f"`{problem.key}` is {value!r}; expected the options of {kind.__name__}: {listed}"


def _other_kind(problem: Problem, match: re.Match[str]) -> str:
    bases, given = " or ".join(dict.fromkeys(base.__name__ for base in problem.bases)), match[1] or problem.given_class
    if isfunction(import_path(given)):
        return f"`{problem.key}` is {given!r}, a function; expected one with the return annotation `-> {bases}`"
    text = f"`{problem.key}` is {given!r}, which is not a subclass of {bases}"
    return text + _expected_class(problem)


def _expected_class(problem: Problem) -> str:
    names = own_classes(*problem.bases) or known_classes(*problem.bases)
    known = f" or one of {', '.join(names)}" if names else " of a class"
    return f"; expected an import path{known}"


def _given_path(problem: Problem) -> str:
    """Return the import path that failed: that of a function, or else of the innermost class."""
    return problem.value if _OF_FUNCTION in problem.message else str(problem.class_path)


def _no_module(problem: Problem, match: re.Match[str]) -> str:
    path = _given_path(problem)
    given = f"`{problem.key}` is {path!r}"
    if path.endswith((".yaml", ".yml")):
        return f"{given}, which does not exist; expected a file or the name of a class"
    files = [file.stem for file in problem.folder.glob("*.py")]
    return (
        f"{given}, but there is no module {match[1]!r} among the installed packages or in the current folder, "
        f"{problem.folder}" + (_beside_configuration(problem, match[1]) or did_you_mean(match[1], files))
    )


def _beside_configuration(problem: Problem, module: str) -> str:
    """Return what to do if a module is in the folder of the configuration that the parser reads, else nothing."""
    folder, file = Path.cwd(), f"{module.replace('.', '/')}.py"
    if folder == problem.folder or not (folder / file).is_file():
        return ""
    return f"; `{file}` is beside the configuration: run the command in {folder}, or add that folder to PYTHONPATH"


def _not_installed(problem: Problem, match: re.Match[str]) -> str:
    created = re.search(rf"{_IMPORT_PATH} cannot be created", problem.message)
    path = problem.class_path or (created and created[1])
    name = path.rpartition(".")[2] if path else f"`{problem.key}`"
    return f"{name} needs the package {match[1]}, which is not installed; run `pip install '{match[1]}'`"


def _no_attribute(problem: Problem, match: re.Match[str]) -> str:
    names = [name for name in dir(import_path(match[1])) if not name.startswith("_")]
    return f"`{problem.key}` is {_given_path(problem)!r}, but {match[1]} has no {match[2]!r}" + did_you_mean(
        match[2], names
    )


def _no_group_file(problem: Problem, match: re.Match[str]) -> str:
    return f"`{match[1]}` is {match[2]!r}; expected options by name, or a YAML file that has them"


def _wrong_type(problem: Problem, match: re.Match[str]) -> str:
    """Rewrite the message for a value of another type, of which there may be several."""
    path = re.fullmatch(_IMPORT_PATH, problem.value)
    if path is not None and problem.bases and _import_error(path[1]) is not None:  # one of the types is a class
        return _not_imported(problem, path)
    expected = []
    for name, choices in re.findall(r"Expected a (?:<class '([\w.]+)'>|typing\.Literal\[(.*?)\])", problem.message):
        if name != "NoneType":
            expected.append(_TYPES.get(name, f"a {name}") if name else _listed(choices))
    value = "" if not problem.value or problem.value.startswith("NestedArg(") else f" is {problem.value!r};"
    return f"`{problem.key}`{value or ':'} expected {' or '.join(dict.fromkeys(expected)) or 'null'}"


def _no_class(problem: Problem, match: re.Match[str]) -> str:
    """Rewrite the message for a value that cannot be a class, such as a list."""
    return f"`{problem.key}` is {problem.value}; expected the name of a class, or its `class_path` and `init_args`"


def _not_imported(problem: Problem, match: re.Match[str]) -> str:
    """Rewrite the message for a module whose import failed."""
    reason = _import_error(match[1]) or _condensed(problem.message).partition(": ")[2]
    return f"`{problem.key}` is {match[1]!r}, which cannot be imported: {reason}"


def _abstract(problem: Problem, match: re.Match[str]) -> str:
    given = match[1] or problem.given_class
    return f"`{problem.key}` is {given!r}, which has abstract methods; expected a subclass that has them all"


def _nested_not_imported(problem: Problem, match: re.Match[str]) -> str:
    """Rewrite the message for an option of a class whose own class may be in a module that cannot be imported."""
    error = _import_error(match[2])
    if error is None:
        return _condensed(problem.message)
    key = problem.key if problem.key.endswith(f".{match[1]}") else f"{problem.key}.{match[1]}"
    return f"`{key}` is {match[2]!r}, which cannot be imported: {error}"


def _import_error(path: str) -> str | None:
    """Return the error of the import of a class's module with its type, which the parser leaves out, or None."""
    try:
        import_module(path.rpartition(".")[0])
    except Exception as error:
        return described(error)
    return None


def _not_created(problem: Problem, match: re.Match[str]) -> str:
    """Rewrite the message for a class whose constructor failed; a data set may just not be on disk."""
    group = next((name for name, kind in KINDS.items() if kind in problem.bases), None)
    reason = re.sub(_OTHER_TYPES, "", _condensed(problem.message)).removesuffix(".")
    failed = NotCreated.PATTERN.fullmatch(reason)
    if failed is not None:
        reason = failed[2] if failed[1] == match[1] else f"{failed[1]}: {failed[2]}"
    text = f"{class_name(match[1])}{' cannot' if group is None else ', which cannot'} be created ({reason})"
    text = text if group is None else f"`{group}` is {text}"
    sources = [f"`{group}.{name}.{option}`" for name, option in _sources(problem.value)]
    missing = re.search(r"not found|no such file|not exist|download", reason, re.IGNORECASE)
    return f"{text}; for missing data, set {' or '.join(sources)}" if missing and sources else text


def _not_created_in_list(problem: Problem, match: re.Match[str]) -> str:
    return match[1]


def _sources(value: str) -> Iterator[tuple[str, str]]:
    """Yield the options of classes in a value that say where data is, each with the name of its class's option."""
    for name, path in re.findall(r"(\w+)=Namespace\(class_path='([\w.]+)'", value):
        kind = import_path(path)
        options = options_of_class(kind) if isinstance(kind, type) else {}
        yield from ((name, option) for option in ("root", "download") if option in options)


def _listed(choices: str) -> str:
    return f"one of {choices}" if "," in choices else choices


def _no_subcommand(problem: Problem, match: re.Match[str]) -> str:
    return no_subcommand(problem.options)


def _unknown_subcommand(problem: Problem, match: re.Match[str]) -> str:
    return unknown_subcommand(match[1], problem.options)


_RULES: tuple[tuple[str, Callable[[Problem, re.Match[str]], str]], ...] = (
    (r"the following arguments are required: (.+)", _required),
    (r"argument subcommand: invalid choice: '([^']*)'", _unknown_subcommand),
    (r'expected "subcommand" to be one of', _no_subcommand),
    (r"unrecognized arguments: (\S+)", _unrecognized),
    (r"Key must be a string, got: (.*)", _no_name),
    (r"argument (\S+): expected (?:one|at least one) argument", _no_value),
    (r"Option '([\w.]+)' is not accepted before subcommand '(\w+)'", _before_subcommand),
    (r"\A--([\w.]+)\.help: Expected a dot import path string: (\S+)", _unknown_class_of_help),
    (r"does not accept option '([\w.]+)'", _not_accepted),
    (r"Option 'class_path' is not accepted", _beside_class_path),
    (r"Option '([\w.]+)' is not accepted", _not_accepted),
    (r"Expected a dot import path string: (\S+)", _unknown_class),
    (r"No module named '([\w.]+)'", _no_module),
    (r"Requirement '([\w-]+[^']*)' not met", _not_installed),
    (r"module '([\w.]+)' has no attribute '(\w+)'", _no_attribute),
    (r"\AParser key [\"']([\w.]+)[\"']:\s+Unable to load config '([^']*)'", _no_group_file),
    (r"Expected an instantiatable class, but (?:(\S+) )?is abstract", _abstract),
    (rf"Problem with given class_path '{_IMPORT_PATH}':\s+Parser key \S+\s+Expected a <class '", _wrong_type),
    (r"Import path (?:(\S+) )?does not correspond to a subclass", _other_kind),
    (r"\ADoes not validate(?s:.*)Given value: Namespace\(class_path='([\w.]+)'", _not_created),
    (r"\ADoes not validate(?s:.*?)(?m:^[ -]*)([\w.]+ cannot be created \(.*\)\.)\n", _not_created_in_list),
    (r"Expected a (?:<class '(?!NoneType)|typing\.Literal)", _wrong_type),
    (r"Not a valid subclass of \w+", _no_class),
    (rf"\AParser key (?s:.*)Given value: {_IMPORT_PATH}\Z", _not_imported),
    (rf"Given value: NestedArg\(key='([\w.]+)', val='{_IMPORT_PATH}'\)\Z", _nested_not_imported),
)
"""Patterns of messages, the first of which that matches decides how the message is rewritten."""


def options_of(parser: ArgumentParser) -> list[str]:
    """Return the options of a parser, with dashes, or else its subcommands.

    Args:
        parser: Parser that reports an error.
    """
    subcommands = parser._subcommands_action
    return list(subcommands.choices) if subcommands is not None else list(parser._option_string_actions)


def options_elsewhere(parser: ArgumentParser) -> dict[str, list[str]]:
    """Return the options of all subcommands by their names; empty for a parser that is not of a subcommand.

    Args:
        parser: Parser that reports an error.
    """
    program = getattr(parser, "parent_parser", None)
    return {} if program is None else {n: options_of(p) for n, p in program._subcommands_action.choices.items()}
