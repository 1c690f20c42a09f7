"""Export of a module's forward pass to ONNX, and the use of such a file as a forward pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, cast
from warnings import catch_warnings, filterwarnings

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_structure, tree_unflatten

from lightning_sparsefl.errors import ExportMismatch, InvalidOption
from lightning_sparsefl.federated.local.example_input import difference_on, example_of, units_of
from lightning_sparsefl.files import replacing
from lightning_sparsefl.sparse.attributes import attribute_replaced
from lightning_sparsefl.sparse.forward import split_arguments
from lightning_sparsefl.sparse.submodel import cut
from lightning_sparsefl.sparse.tracing import tensors
from lightning_sparsefl.sparse.width import used_units
from lightning_sparsefl.types import Weights

_TERMINAL_CODE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
"""Codes by which an error message is colored."""
_UNKNOWN_OUTPUT = "in output, which is not a known type"
"""Part of the error about a `forward` that returns an object of its own, such as a cache of keys and values."""


def require(module: LightningModule) -> None:
    """Raise :class:`InvalidOption` if a module cannot be exported, or a required package is not installed.

    Args:
        module: Module to export.
    """
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise InvalidOption(
            f"`formats` has 'onnx', which needs {' and '.join(missing)}: pip install 'lightning-sparsefl[onnx]'."
        )
    if not is_overridden("forward", module, LightningModule):
        raise InvalidOption(
            f"`{type(module).__name__}` has no `forward`, which an ONNX file contains; define it, or remove 'onnx' "
            "from `formats`."
        )


def narrowed(module: LightningModule, data: Any, weights: Weights) -> tuple[LightningModule, str]:
    """Cut the units whose weights are all zero; return the module and a note, which is empty without such units.

    Args:
        module: Module with the weights loaded.
        data: Data module of the clients, for the shape of a sample.
        weights: Weights of the module.
    """
    try:
        groups = units_of(module, data)
    except InvalidOption:  # a module without units, or one that cannot be traced, is exported unchanged
        return module, ""
    used = used_units(groups, weights)
    units, kept = sum(group.size for group in groups), sum(int(mask.sum()) for mask in used.values())
    if kept == units:
        return module, ""
    try:
        small = cast(LightningModule, cut(module, groups, used))
    except InvalidOption as reason:
        return module, f"model.onnx contains {units - kept:,} of {units:,} units that are all zeros: {reason}"
    differs = difference_on(example_of(module, data), module, small, {})
    if differs is not None:
        return module, (
            f"model.onnx contains {units - kept:,} of {units:,} units that are all zeros, since the model without them "
            f"{differs}."
        )
    return small, f"model.onnx contains {kept:,} of {units:,} units: the weights of the others are zeros."


def write(module: LightningModule, data: Any, path: Path) -> str:
    """Export the forward pass of a module for batches of any size.

    Args:
        module: Module to export.
        data: Data module of the clients, for the shape of a sample.
        path: Path of the file.

    Returns:
        Note on the sizes of inputs that the file fixes, or an empty string.

    Raises:
        InvalidOption: If the forward pass cannot be exported.
    """
    sample, name = example_of(module, data), type(module).__name__
    inputs = apply_to_collection(sample, Tensor, _two)
    batch = torch.export.Dim("batch")
    arguments, named = split_arguments(module, inputs)
    shapes = apply_to_collection(named or arguments, Tensor, lambda _: {0: batch})
    options: dict[str, Any] = {"dynamo": True, "dynamic_shapes": shapes, "external_data": False, "verbose": False}
    try:
        with replacing(path) as file, _attention_in_parts(), _keywords_named(module, named), catch_warnings():
            filterwarnings("ignore", "# The axis name: batch will not be used")  # all inputs share that axis
            module.eval().to_onnx(file.name, arguments, kwargs=named, **options)
    except OSError:
        raise
    except Exception as error:
        reason = _reason(error)
        advice = "let it return tensors alone, as with `use_cache=False`, or " if _UNKNOWN_OUTPUT in reason else ""
        raise InvalidOption(
            f"`{name}.forward` cannot be exported to ONNX ({reason}); {advice}remove 'onnx' from `formats`."
        ) from error
    return _fixed_sizes([tuple(value.shape[1:]) for value in tensors(inputs)])


@contextmanager
def _keywords_named(module: LightningModule, named: Mapping[str, Any]) -> Iterator[None]:
    """Let ``forward(self, **batch)`` show the names of its keywords, without which torch's exporter writes wrong code.

    Args:
        module: Module to export.
        named: Keyword arguments of ``forward``; without any, nothing changes.
    """
    if not named:
        yield
        return
    original = module.forward

    def forward(**keywords: Any) -> Any:
        return original(**keywords)

    forward.__signature__ = Signature([Parameter(name, Parameter.KEYWORD_ONLY) for name in named])  # type: ignore
    with attribute_replaced(module, "forward", forward):
        yield


@contextmanager
def _attention_in_parts() -> Iterator[None]:
    """Let attention compute with operations that ONNX has, rather than with torch's fused one for inference."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def _reason(error: BaseException) -> str:
    """Return the type and the first line of the first error of a chain, without the codes of a terminal."""
    while error.__cause__ is not None:
        error = error.__cause__
    line = _TERMINAL_CODE.sub("", str(error)).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def _fixed_sizes(shapes: Sequence[tuple[int, ...]]) -> str:
    if not any(shapes):
        return ""
    listed = " and ".join(f"({', '.join(['batch', *map(str, shape)])})" for shape in shapes)
    return f"model.onnx takes inputs of the sizes {listed}: only that of the batch may vary."


def _two(value: Tensor) -> Tensor:
    """Return a batch of two samples, since an exporter treats a length of 1 as a constant."""
    return torch.cat([value, value])


class Forward:
    """Callable that runs an ONNX file, with outputs as those of a module's `forward`: a tensor, or a dict of some.

    Args:
        path: Path of the file.
        original: The `forward` that the file contains, which is called once.
    """

    def __init__(self, path: Path, original: Callable[..., Any]) -> None:
        self.calls, self._sizes, self._original = 0, _input_sizes(path), original
        self._structure: TreeSpec | None = None
        self._session, self._names = _session(path)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run the file as the `forward` of the module."""
        self.calls += 1
        given = signature(self._original).bind(*inputs, **named)
        by_name = [given.kwargs[name] for name in self._names if name in given.kwargs]
        values = list(tensors((given.args, by_name if len(by_name) == len(given.kwargs) else given.kwargs)))
        if len(values) != len(self._names):
            raise ExportMismatch(
                f"model.onnx was written, but cannot be checked: it has the inputs {', '.join(self._names)}, and the "
                f"steps of the module pass {len(values)}; set `example_input_array` to what they pass, remove 'onnx' "
                "from `formats`, or leave out `check`."
            )
        feeds = {name: value.detach().cpu().numpy() for name, value in zip(self._names, values, strict=True)}
        for name, value in feeds.items():
            _require_fit(name, value.shape, self._sizes[name])
        try:
            found = self._session.run(None, feeds)
        except Exception as error:
            raise ExportMismatch(
                f"model.onnx was written, but its check fails ({_reason(error)}); remove 'onnx' from `formats`, or "
                "leave out `check`."
            ) from error
        outputs = [torch.from_numpy(value.copy()).to(values[0].device) for value in found]
        if self._structure is None:
            self._structure = tree_structure(self._original(*inputs, **named))
        return tree_unflatten(outputs, self._structure)


def _session(path: Path) -> tuple[Any, list[str]]:
    """Return what runs an ONNX file, with the names of its inputs: onnxruntime, or the reference evaluator of onnx.

    The latter also runs what an installed onnxruntime has no kernel for, such as convolutions in double precision.
    """
    if find_spec("onnxruntime") is not None:
        from onnxruntime import InferenceSession

        with suppress(Exception):
            session = InferenceSession(str(path), providers=["CPUExecutionProvider"])
            return session, [entry.name for entry in session.get_inputs()]
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(str(path))
    return evaluator, list(evaluator.input_names)


def _input_sizes(path: Path) -> dict[str, tuple[int | str, ...]]:
    """Return the sizes of each input of an ONNX file; a string is the name of one that may vary."""
    import onnx

    return {
        entry.name: tuple(
            size.dim_value if size.HasField("dim_value") else size.dim_param
            for size in entry.type.tensor_type.shape.dim
        )
        for entry in onnx.load(str(path)).graph.input
    }


def _require_fit(name: str, shape: tuple[int, ...], sizes: tuple[int | str, ...]) -> None:
    """Check the sizes of an input, which the reference evaluator does not."""
    fits = len(shape) == len(sizes) and all(
        isinstance(size, str) or size == got for got, size in zip(shape, sizes, strict=True)
    )
    if not fits:
        listed = ", ".join(map(str, sizes))
        raise ExportMismatch(
            f"model.onnx was written, but cannot be checked: its input `{name}` has the sizes ({listed}), and a batch "
            f"of the data has {tuple(shape)}; pad all samples to one length, remove 'onnx' from `formats`, or leave "
            "out `check`."
        )
