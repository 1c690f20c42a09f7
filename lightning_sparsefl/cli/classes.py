"""Classes that can be chosen for an option, the options that a class has, and the creation of its objects."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import wraps
from inspect import isabstract
from pydoc import locate
from typing import Any, ClassVar, get_args, get_type_hints

import lightning.pytorch.callbacks
import lightning.pytorch.loggers
import torch
from jsonargparse import ArgumentParser

import lightning_sparsefl.algorithms
import lightning_sparsefl.callbacks
import lightning_sparsefl.data
import lightning_sparsefl.federated
import lightning_sparsefl.models
from lightning_sparsefl.errors import InvalidOption, SparseFLError

_OWN = (
    lightning_sparsefl.algorithms,
    lightning_sparsefl.data,
    lightning_sparsefl.models,
    lightning_sparsefl.federated,
    lightning_sparsefl.callbacks,
)
_OTHERS = (lightning.pytorch.callbacks, lightning.pytorch.loggers, torch.optim, torch.optim.lr_scheduler)


def own_classes(*bases: type) -> dict[str, type]:
    """Return the classes of this package that can be chosen for an option, by name.

    Args:
        bases: Base classes of the option.
    """
    return _subclasses(bases, _OWN)


def known_classes(*bases: type) -> dict[str, type]:
    """Return the classes of this package, Lightning and torch that can be chosen for an option, by name.

    Args:
        bases: Base classes of the option.
    """
    return _subclasses(bases, (*_OWN, *_OTHERS))


def _subclasses(bases: tuple[type, ...], packages: Iterable[object]) -> dict[str, type]:
    public = {name: c for package in packages for name, c in vars(package).items() if not name.startswith("_")}
    classes = {name: c for name, c in public.items() if isinstance(c, type) and not isabstract(c)}
    return {name: c for name, c in sorted(classes.items()) if issubclass(c, bases) and c not in bases}


def options_of_class(kind: type) -> dict[str, Any]:
    """Return the types of the options of a class by name, with those that it passes on to its base class.

    Args:
        kind: Class.

    Example:
        >>> from lightning_sparsefl.data import Dirichlet
        >>> options_of_class(Dirichlet)
        {'alpha': <class 'float'>, 'min_examples': <class 'int'>}
    """
    names = ArgumentParser().add_class_arguments(kind, fail_untyped=False)
    inits = [vars(base).get("__init__") for base in reversed(kind.__mro__)]
    hints = {name: hint for init in inits for name, hint in _hints_of(init).items()}
    return {name: hints.get(name) for name in names if "." not in name}


def defaults_of(path: str | None) -> dict[str, Any]:
    """Return the defaults of the options of a class, or of a function in its place, by name; None = no default.

    Args:
        path: Import path of the class; None = no class.

    Example:
        >>> defaults_of("lightning_sparsefl.data.Dirichlet")
        {'alpha': None, 'min_examples': 1}
    """
    kind: Any = None if path is None else locate(path)
    parser = ArgumentParser()
    if isinstance(kind, type):
        parser.add_class_arguments(kind, fail_untyped=False)
    elif callable(kind):
        parser.add_function_arguments(kind, fail_untyped=False)
    found: dict[str, Any] = parser.get_defaults(skip_validation=True).as_dict()
    return found


def _hints_of(function: Any) -> dict[str, Any]:
    try:
        return get_type_hints(function)
    except (NameError, TypeError):  # a name that only type checkers import, or no `__init__` of its own
        return {}


def classes_in(annotation: Any) -> tuple[type, ...]:
    """Return the classes that a type consists of, without None.

    Args:
        annotation: Type, which may be a union.

    Example:
        >>> classes_in(int | list[str] | None)
        (<class 'int'>, <class 'str'>)
    """
    inner = get_args(annotation)
    if inner:
        return tuple(kind for part in inner for kind in classes_in(part))
    return (annotation,) if isinstance(annotation, type) and annotation is not type(None) else ()


class NotCreated(InvalidOption):
    """Class of the configuration whose constructor raised an exception that is not of this package.

    Args:
        kind: Class.
        error: Exception of the constructor.
    """

    PATTERN: ClassVar[re.Pattern[str]] = re.compile(r"([\w.]+) cannot be created \((.*)\)", re.DOTALL)
    """Message without its full stop: the import path of the class, and the exception."""

    def __init__(self, kind: type, error: Exception) -> None:
        super().__init__(f"{kind.__module__}.{kind.__qualname__} cannot be created ({described(error)}).")


def described(error: BaseException) -> str:
    """Return the type of an exception with its text, if it has one.

    Args:
        error: Exception.

    Example:
        >>> described(KeyError("x")), described(ValueError())
        ("KeyError: 'x'", 'ValueError')
    """
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def naming_the_class(create: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that creates an object as another one does, and names its class if that fails.

    Args:
        create: Function of a class and the arguments of its constructor.

    Raises:
        NotCreated: If the constructor raises an exception that is not of this package.
    """

    @wraps(create)
    def created(kind: type, *args: Any, **kwargs: Any) -> Any:
        try:
            return create(kind, *args, **kwargs)
        except SparseFLError:
            raise
        except Exception as error:
            raise NotCreated(kind, error) from error

    return created


def call_function(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the object that a function in the place of a class creates.

    Args:
        function: Function with an annotation of what it returns.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Raises:
        TypeError: If the object is of another class than the annotation says.
    """
    created = function(*args, **kwargs)
    kind = _hints_of(function).get("return")
    if isinstance(kind, type) and not isinstance(created, kind):
        raise TypeError(f"it returns {created!r}, but is annotated with {kind.__name__}")
    return created
