"""The norms of the zoo: group norm, batch norm, and batch norm that keeps nothing."""

from __future__ import annotations

from typing import Literal, get_args

from torch import nn

from lightning_sparsefl.errors import InvalidOption

Norm = Literal["group", "batch", "batch_static"]
"""``group``: over groups of channels of each sample. ``batch``: over the batch in training, by running statistics in
evaluation; the statistics are buffers, which `federation.buffers` is about. ``batch_static``: over the batch, in
training and in evaluation, without running statistics, so that there is no buffer to average (PerFedMask, FedLPS).
Scores then depend on what else is in a batch, and a batch of one sample is normalised over its own pixels."""


def norm2d(norm: Norm, channels: int, groups: int, model: str) -> nn.Module:
    """A layer of the kind.

    Args:
        norm: The kind.
        channels: Of the images.
        groups: With ``group``, how many; a divisor of the channels.
        model: Class name of the network, for the message.

    Raises:
        InvalidOption: If the kind is unknown.

    Example:
        >>> norm2d("batch_static", 4, 2, "VGG11").running_mean is None
        True
    """
    if norm not in get_args(Norm):
        expected = "'group', 'batch' or 'batch_static'"
        raise InvalidOption(f"`{model}(norm={norm!r})`: expected {expected}; change `model.norm`.")
    if norm == "group":
        return nn.GroupNorm(groups, channels)
    return nn.BatchNorm2d(channels, track_running_stats=norm == "batch")
