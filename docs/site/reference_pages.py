"""Pages of the reference: the API by package, and the options of the command line from its parser."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from jsonargparse import set_parsing_settings
from rst import code, heading, list_table

from lightning_sparsefl import sparse
from lightning_sparsefl.cli import SparseFLCLI, SparseFLParser
from lightning_sparsefl.cli.help import TITLES
from lightning_sparsefl.federated import FederatedTrainer

PACKAGES = (
    "federated",
    "algorithms",
    "callbacks",
    "data",
    "models",
    "types",
    "wire",
    "cost",
    "report",
    "sparse",
    "testing",
    "errors",
    "seeds",
)
"""Packages and modules with a page of the API, besides the modules of `sparse`."""
CLASSES = {"algorithm": "algorithms", "model": "models", "data": "data"}
"""Options whose value is a class, with the package that has the classes of this project."""


def reference_pages() -> dict[str, str]:
    """Return the pages as reStructuredText by file name."""
    parts = [name for name in sparse.__all__ if inspect.ismodule(getattr(sparse, name))]
    modules = [*PACKAGES, *(f"sparse.{name}" for name in parts)]
    pages = {f"reference/api/{name}.rst": api_page(f"lightning_sparsefl.{name}") for name in modules}
    pages["reference/api.rst"] = f"{heading('API', '=')}\n\n{API}"
    pages["reference/command_line.rst"] = command_line_page()
    return pages


API = """The names of these modules are public. ``lightning_sparsefl`` itself exports the methods, ``FederatedTrainer``,
``Federation``, ``FederatedAlgorithm``, ``export_sparse`` and ``load_sparse``.

.. toctree::
   :maxdepth: 1
   :glob:

   api/*
"""


def api_page(name: str) -> str:
    """Return the page of a module: its docstring, a table of its names, and their docstrings.

    Args:
        name: Import path of the module.
    """
    module = import_module(name)
    content = vars(module)
    names = content.get("__all__") or [key for key in content if _is_defined_in(module, key)]
    public = [key for key in names if not inspect.ismodule(content[key])]
    described = [key for key in public if inspect.isclass(content[key]) or inspect.isroutine(content[key])]
    rows = [(f":py:obj:`{key}`", (inspect.getdoc(content[key]) or "").partition("\n")[0]) for key in described]
    parts = [
        heading(name.removeprefix("lightning_sparsefl."), "="),
        f".. automodule:: {name}",
        f".. currentmodule:: {name}",
        list_table(("name", "summary"), rows) if rows else "",
        *(_directive(key, content[key]) for key in public),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _is_defined_in(module: ModuleType, name: str) -> bool:
    """Return whether a name is public, and a class, function or type of a module, not an import."""
    own = getattr(vars(module)[name], "__module__", None) == module.__name__
    return not name.startswith("_") and (own or name in vars(module).get("__annotations__", {}))


def _directive(name: str, value: Any) -> str:
    """Return the directive that documents a public name."""
    if inspect.isclass(value):
        kind = "exception" if issubclass(value, Exception) else "class"
        bases = "" if value.__bases__ == (object,) else "   :show-inheritance:\n"
        return f".. auto{kind}:: {name}\n   :members:\n{bases}"
    return f".. auto{'function' if inspect.isroutine(value) else 'data'}:: {name}\n"


class _Parsed(Exception):
    """Raised with the parser, before anything is parsed."""


class _Parser(SparseFLCLI):
    def parse_arguments(self, parser: Any, args: Any) -> None:
        raise _Parsed(parser)


def command_line_parser() -> Any:
    """Return the parser of `sparsefl`."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    try:
        _Parser(trainer_class=FederatedTrainer, parser_class=SparseFLParser, parser_kwargs={"prog": "sparsefl"})
    except _Parsed as parsed:
        return parsed.args[0]
    raise AssertionError("the parser was not made")


def command_line_page() -> str:
    """Return the page of subcommands and options."""
    subcommands = command_line_parser()._subcommands_action
    helps = {action.dest: action.help for action in subcommands._get_subactions()}
    common = _options(subcommands.choices["fit"])
    parts = [heading("Command line", "="), COMMAND_LINE]
    for name, parser in subcommands.choices.items():
        own = [action for key, action in _options(parser).items() if name == "fit" or _differs(action, common.get(key))]
        table = _table([action for action in own if not _group(action.dest)])
        parts += [heading(f"sparsefl {name}"), helps[name], table]
    parts += [heading("Groups of options"), "Of all subcommands but ``configs``."]
    for group, title in TITLES.items():
        text = f"{title}."
        if group in CLASSES:
            text += f" The options of each class are in :doc:`api/{CLASSES[group]}`."
        table = _table([action for action in common.values() if _group(action.dest) == group])
        parts += [heading(code(f"--{group}"), "~"), text, table]
    return "\n\n".join(part for part in parts if part) + "\n"


def _differs(action: argparse.Action, other: argparse.Action | None) -> bool:
    return other is None or action.help != other.help


COMMAND_LINE = """Made from the parser of the installed program. ``sparsefl SUBCOMMAND --help`` shows the same, and
``sparsefl fit --GROUP.help NAME`` the options of one class. An option is also a key of the YAML files that ``--config``
takes: ``--trainer.max_rounds 5`` is ``trainer: {max_rounds: 5}``.

All subcommands but ``configs`` have the options of ``fit``, or others of the same name, and the groups of options
below.

``sparsefl --print_completion bash`` (or ``zsh``) prints a script that completes options and names, and needs the extra
``completion``. Write it to a file, ``sparsefl --print_completion bash > ~/.sparsefl-completion``, and add
``source ~/.sparsefl-completion`` to ``~/.bashrc``."""


def _group(key: str) -> str:
    name = key.partition(".")[0]
    return name if name in TITLES else ""


def _options(parser: Any) -> dict[str, argparse.Action]:
    """Return the options of a subcommand by name, without those that only print a help text."""
    shown = (action for action in parser._actions if action.help != argparse.SUPPRESS and action.dest != "help")
    named = {max(action.option_strings, key=len, default=action.dest).removesuffix("+"): action for action in shown}
    return {name: action for name, action in named.items() if not name.endswith(".help")}


def _table(actions: Sequence[Any]) -> str:
    """Return the table of options; nothing without options."""
    header = ("option", "type", "default", "meaning")
    return list_table(header, [_row(action) for action in actions], widths=(24, 20, 14, 42)) if actions else ""


def _row(action: Any) -> tuple[str, str, str, str]:
    names = [name for name in action.option_strings if not name.endswith("+")] or [action.metavar or action.dest]
    kind = getattr(action, "_typehint", None) or action.type
    flag = action.nargs == 0 or action.default in (None, argparse.SUPPRESS)
    meaning = " ".join((action.help or "").replace("%%", "%").split())
    return ", ".join(map(code, names)), code(_type(kind)), "" if flag else code(str(action.default)), meaning


def _type(kind: Any) -> str:
    if kind is None:
        return ""
    text = kind.__name__ if inspect.isclass(kind) else str(kind)
    return re.sub(r"(\w+\.)+(?=\w)", "", text)  # names of classes without their modules
