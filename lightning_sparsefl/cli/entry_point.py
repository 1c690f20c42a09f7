"""Entry point of the command line."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

from lightning_sparsefl.__about__ import __version__
from lightning_sparsefl.cli.configs_command import run_configs
from lightning_sparsefl.cli.conventions import (
    CONFIGS,
    EXIT_BROKEN_PIPE,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    FOLDER_COMMANDS,
    QUIET,
    SUBCOMMANDS,
)
from lightning_sparsefl.cli.plain_parser import program_parser
from lightning_sparsefl.cli.run_commands import run_command
from lightning_sparsefl.errors import ClientFailed, EvaluationFailed, SparseFLError
from lightning_sparsefl.report import silenced

_PARENT = os.getppid()
_PROGRAM = "lightning_sparsefl.cli.program"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the console script.

    Args:
        argv: Arguments; None for those of the command line.

    Returns:
        Exit code: 0, 2 after an error message, 130 after an interrupt, or 141 if the reader of the output has ended.
    """
    if argv is not None:
        sys.argv = [sys.argv[0], *argv]
    try:
        sys.path.append(str(Path.cwd()))  # for `--model my_models.Net` with a file of the user; it replaces no package
        _run(sys.argv[1:])
    except (ClientFailed, EvaluationFailed) as error:
        if error.__cause__ is not None:  # the code of the user failed, so show where
            traceback.print_exception(_from_the_users_code(error.__cause__))
        return _report(error)
    except SparseFLError as error:
        return _report(error)
    except BrokenPipeError:  # the reader of the output has ended, as in `sparsefl configs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its exit
        return EXIT_BROKEN_PIPE
    except OSError as error:  # such as a folder without write permission, a full disk, or a download without network
        return _report(_os_error_message(error))
    except KeyboardInterrupt:
        _print_error("interrupted.")
        return EXIT_INTERRUPTED
    return 0


def _run(args: list[str]) -> None:
    if args == ["--version"]:
        return print(f"sparsefl {__version__}")
    if args[:1] == [QUIET] and args[1:2] and args[1] in SUBCOMMANDS:  # it is an option of the subcommand
        args = sys.argv[1:] = [args[1], QUIET, *args[2:]]
    if _is_without_subcommand(args):
        program_parser().parse_args(args)  # which prints the help, or an error
    if args and args[0] == CONFIGS:
        return run_configs(args[1:])
    if args and args[0] in FOLDER_COMMANDS:
        with silenced(QUIET in args):
            return run_command(args)
    with _without_collection():
        from lightning_sparsefl.cli.program import run  # torch and Lightning are slow to import

    with silenced(QUIET in args):  # after the import, with which Lightning sets the levels of its loggers
        run()
    return None


@contextmanager
def _without_collection() -> Iterator[None]:
    """Import what stays until the end without cyclic garbage collection, and keep it out of later ones.

    Half a million objects of torch and Lightning would be searched nine times in a run of some seconds.
    """
    first, collects = _PROGRAM not in sys.modules, gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if first:
            gc.freeze()
            atexit.register(gc.unfreeze)  # or triton would report its types as leaked
        if collects:
            gc.enable()


def _is_without_subcommand(args: Sequence[str]) -> bool:
    """Return whether the arguments start with no subcommand, nor with an option or a variable that may name one."""
    if not args:
        return not any(name in os.environ for name in ("SPARSEFL_SUBCOMMAND", "SPARSEFL_CONFIG"))
    before = list(takewhile(lambda arg: arg not in SUBCOMMANDS, args))
    return not {"-h", "--help"}.isdisjoint(before) or not (args[0].startswith("-") or args[0] in SUBCOMMANDS)


def _from_the_users_code(error: BaseException) -> BaseException:
    """Drop the calls before the first one of the user's module, data or callback from a traceback, if there is one."""
    trace = error.__traceback__
    while trace is not None and _is_of_the_engine(trace.tb_frame.f_globals.get("__name__", "")):
        trace = trace.tb_next
    return error if trace is None else error.with_traceback(trace)


def _is_of_the_engine(module: str) -> bool:
    top, _, rest = module.partition(".")
    given = rest.partition(".")[0] in ("callbacks", "data", "models")  # which stand where the user's own would
    return top in ("torch", "lightning", "lightning_utilities") or (top == "lightning_sparsefl" and not given)


def _os_error_message(error: OSError) -> str:
    """Return what happened to which path, without the number of the error."""
    if error.filename is None or error.strerror is None:
        return str(error)
    return f"'{error.filename}' cannot be read or written: {error.strerror}."


def _report(error: Exception | str) -> int:
    _print_error(f"error: {error}")
    return EXIT_USAGE


def _print_error(text: str) -> None:
    """Print a line to the standard error, on the first rank or if that has ended."""
    orphan = os.getppid() != _PARENT
    if orphan or os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"sparsefl: {text}", file=sys.stderr)
