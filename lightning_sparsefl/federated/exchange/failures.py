"""Handling of the failure of a client: its reason, and the release of its memory."""

from __future__ import annotations

import gc
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch import LightningModule

from lightning_sparsefl.errors import ClientFailed, InvalidOption, SparseFLError, nearest
from lightning_sparsefl.sparse.density import listed
from lightning_sparsefl.types import Masks

_SAYS_OUT_OF_MEMORY = re.compile(r"out of memory|not enough memory|can't allocate memory")
"""Text of a RuntimeError for exhausted memory, for which torch has an exception type only on CUDA."""
_SAYS_ONE_SAMPLE = "more than 1 value per channel"
"""Text of torch's ValueError for a batch of one sample in a batch norm, such as the last batch of a client."""
_SAYS_SHAPES = re.compile(
    r"shapes cannot be multiplied|expected input.* channels|actual input size|\(batched\) input|"
    "Output size is too small"
)
"""Text of torch's RuntimeErrors for samples that a layer cannot read."""
_SAYS_NOT_DETERMINISTIC = "does not have a deterministic implementation"
"""Text of torch's RuntimeError for an operation that `trainer.deterministic` excludes."""
_SAYS_NO_GRADIENT = "does not require grad"
"""Text of torch's RuntimeError for a loss that depends on nothing that is trained."""
_LONGEST, _SHORT = 2000, 120
"""Numbers of characters of the reason for a failure that are kept, and of an error's text within a sentence."""
_SAYS_NO_METRIC = "conditioned on metric"
"""Text of Lightning's errors for a scheduler or callback that monitors a metric which is not there."""
_METRIC = re.compile(_SAYS_NO_METRIC + r" [`']?([^\s`']+)[`']?(.*)", re.DOTALL)
"""The name of that metric, and the text after it, which quotes the names of those that are there."""
_ALIKE = 0.8
"""Least similarity of the name of a metric that is suggested, which `train_loss` does not have to `val_loss`."""
_LOGS = "metrics|hyperparams|image|text|table|audio|video|graph|dir"
_SAYS_NO_LOGGER = re.compile(rf"'NoneType' object has no attribute '(experiment|log_({_LOGS})|save_dir)'")
"""Text of Python's error for the use of `self.logger`, which is None in the work of a client and in evaluations."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports exhausted memory of the host or the device.

    Args:
        error: Error of the local work.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("MPS backend out of memory"))
        (True, True)
    """
    if isinstance(error, MemoryError | torch.cuda.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _SAYS_OUT_OF_MEMORY.search(str(error)) is not None


def in_brief(error: BaseException) -> str:
    """Return the class of an error and the beginning of its text.

    Args:
        error: Error of the local work.

    Example:
        >>> in_brief(KeyError("label"))
        "KeyError: 'label'"
    """
    first = str(error).partition("\n")[0][:_SHORT]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def is_missing_metric(error: BaseException) -> bool:
    """Return whether a scheduler or callback monitors a missing metric.

    Args:
        error: Error of the local work.
    """
    return _SAYS_NO_METRIC in str(error)


def is_explained(error: BaseException) -> bool:
    """Return whether :func:`failure_reason` says all about an error, so that a traceback has nothing to add.

    Args:
        error: Error of the local work.
    """
    return is_missing_metric(error) or _is_one_sample(error)


def _is_one_sample(error: BaseException) -> bool:
    return isinstance(error, ValueError) and _SAYS_ONE_SAMPLE in str(error)


def failure_reason(error: Exception) -> str:
    """Return the reason for the failure of a client, as a clause.

    Args:
        error: Error of its local work.

    Example:
        >>> failure_reason(ZeroDivisionError("division by zero"))
        'ZeroDivisionError: division by zero'
        >>> reason = failure_reason(RuntimeError("Early stopping conditioned on metric `val_loss` which is missing."))
        >>> reason.partition("; ")[2]
        'set `trainer.validate_locally: true`, with `data.val_fraction` above 0, for a metric of validation'
    """
    if isinstance(error, ClientFailed):
        return error.reason
    return _storable(_reason(error))


def _storable(text: str) -> str:
    r"""Return a text that UTF-8, a table and the header of a message can hold, such as that of a path that is no text.

    Example:
        >>> _storable("cannot read \udcff.png"), len(_storable("x" * 10**6)) < 2100
        ('cannot read \\udcff.png', True)
    """
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ... ({len(text)} characters)"


def _reason(error: Exception) -> str:
    said = f"{type(error).__name__}: {error}"
    if is_out_of_memory(error):
        return f"it ran out of memory ({said.splitlines()[0].rstrip('. :')}); lower `data.batch_size`"
    if _is_one_sample(error):
        least = "give a client of few samples more of them (`data.partition.min_examples`)"
        remedy = f"set `data.drop_last: true` or another batch size, or {least}"
        return f"a batch norm got a batch of one sample ({said}); {remedy}"
    if isinstance(error, RuntimeError) and _SAYS_SHAPES.search(said):
        return f"{said.rstrip('.')}; check that `model` fits the samples of `data`"
    if _SAYS_NOT_DETERMINISTIC in said:
        return f"{said.partition(', but')[0]}; set `trainer.deterministic: warn`"
    if _SAYS_NO_LOGGER.search(said):
        remedy = "write `if self.logger:` before its use, and log numbers with `self.log`"
        return f"{said}; clients and evaluations have no logger, so {remedy}"
    if is_missing_metric(error):
        return f"{said.rstrip('.')}; {_remedy_of_metric(said)}"
    return said


def _remedy_of_metric(said: str) -> str:
    """Return what to do where a scheduler or callback monitors a metric that is not there.

    Example:
        >>> _remedy_of_metric("conditioned on metric val_los which is not available; available are ['val_loss', 'x']")
        "did you mean 'val_loss'?"
        >>> remedy = _remedy_of_metric("conditioned on metric `val_loss` which is not there; set one of: `train_loss`")
        >>> remedy.partition(",")[0]
        'set `trainer.validate_locally: true`'
    """
    found = _METRIC.search(said)
    name = nearest(found[1], re.findall(r"[`']([^`']+)[`']", found[2]), _ALIKE) if found else None
    if name is not None:
        return f"did you mean {name!r}?"
    return "set `trainer.validate_locally: true`, with `data.val_fraction` above 0, for a metric of validation"


@contextmanager
def naming_frozen_layers(trainable: Masks) -> Iterator[None]:
    """Add the layers that a method has frozen to torch's error for a loss of a fit that trains nothing.

    Args:
        trainable: Masks of what may change in the fit.

    Raises:
        RuntimeError: In the place of that error, if a tensor is frozen as a whole.

    Example:
        >>> with naming_frozen_layers({"g.weight": torch.zeros(2, dtype=torch.bool)}):
        ...     torch.zeros(()).backward()
        Traceback (most recent call last):
        RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn; the method has frozen \
`g.weight`, and one loss of the step, as of an optimizer under manual optimization, trains nothing else: let \
`algorithm.own`, `algorithm.head` or larger `federation.capacities` leave it a layer, or choose another method
    """
    try:
        yield
    except RuntimeError as error:
        frozen = [name for name, mask in trainable.items() if not mask.any()]
        if _SAYS_NO_GRADIENT not in str(error) or not frozen:
            raise
        raise RuntimeError(
            f"{error}; the method has frozen {listed(frozen, 4)}, and one loss of the step, as of an optimizer under "
            "manual optimization, trains nothing else: let `algorithm.own`, `algorithm.head` or larger "
            "`federation.capacities` leave it a layer, or choose another method"
        ) from error


@contextmanager
def naming_cut_layers(is_cut: bool) -> Iterator[None]:
    """Add to an error of torch that layers are cut, if they are, since code outside of `forward` may rely on shapes.

    Args:
        is_cut: Whether units are cut out of the layers.

    Raises:
        RuntimeError: In the place of one with another cause than memory, a missing metric or frozen layers.

    Example:
        >>> with naming_cut_layers(True):
        ...     torch.ones(4) + torch.ones(2)
        Traceback (most recent call last):
        RuntimeError: The size of tensor a (4) must match the size of tensor b (2) at non-singleton dimension 0; \
layers are cut in this run, and `federation.execution: mask` keeps their shapes
    """
    try:
        yield
    except RuntimeError as error:
        explained = is_out_of_memory(error) or is_missing_metric(error) or _SAYS_NO_GRADIENT in str(error)
        if not is_cut or explained or isinstance(error, SparseFLError):
            raise
        raise RuntimeError(
            f"{str(error).rstrip('.')}; layers are cut in this run, and `federation.execution: mask` keeps their shapes"
        ) from error


@contextmanager
def naming_evaluation_mode() -> Iterator[None]:
    """Add to an error of a gradient outside of training that the module was in evaluation mode.

    Raises:
        RuntimeError: In the place of one with another cause than memory or the run's options.

    Example:
        >>> with naming_evaluation_mode():
        ...     {"boxes": []}["loss"]
        Traceback (most recent call last):
        RuntimeError: KeyError: 'loss'; the method calls `training_step` also in evaluation mode, where a module may \
return something else: check `self.training` there
    """
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, SparseFLError):
            raise
        raise RuntimeError(
            f"{type(error).__name__}: {str(error).rstrip('.')}; the method calls `training_step` also in evaluation "
            "mode, where a module may return something else: check `self.training` there"
        ) from error


@contextmanager
def naming_single_samples(split: str) -> Iterator[None]:
    """Convert torch's error for a batch of one sample in a batch norm into one that names the options to change.

    Args:
        split: Split that is evaluated, whose batch norms use the statistics of each batch.

    Raises:
        InvalidOption: In the place of that error.
    """
    try:
        yield
    except ValueError as error:
        if _SAYS_ONE_SAMPLE not in str(error):
            raise
        raise InvalidOption(
            f"A batch norm that computes the statistics of each batch received a batch of one sample of the {split} "
            "set; expected at least two in each batch: change `data.eval_batch_size`, give a client of one sample "
            "more of them (`data.partition.min_examples`, the fraction held out), or change the norms of `model`."
        ) from error


def release_memory(error: BaseException, module: LightningModule) -> None:
    """Free the memory of a client that ran out of memory, so that it is available to the next one.

    Args:
        error: Error of the client, whose frames refer to activations and batches; they are cleared.
        module: Module of the client, whose gradients are set to None.
    """
    chain: BaseException | None = error
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__
    module.zero_grad(set_to_none=True)
    gc.collect()  # the engine's objects form reference cycles
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
