"""The norms of the zoo: group norm, batch norm, and batch norm that keeps nothing."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor, nn

from lightning_sparsefl.errors import InvalidOption, require

Norm = Literal["group", "batch", "batch_static"]
"""``group``: over groups of channels of each sample. ``batch``: over the batch in training, by running statistics in
evaluation; the statistics are buffers, which `federation.buffers` is about. ``batch_static``: over the batch, in
training and in evaluation, without running statistics, so that there is no buffer to average (PerFedMask, FedLPS).
Scores then depend on what else is in a batch, and a batch of one sample is normalised over its own pixels; where it has
but one pixel left, it is refused."""


class _BatchNorm2d(nn.BatchNorm2d):
    """Says what to do about a batch in which there is nothing to normalise over."""

    def forward(self, inputs: Tensor) -> Tensor:
        try:
            return super().forward(inputs)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise InvalidOption(
                f"A batch norm over {self.num_features} channels got a batch of one sample and one pixel, which leaves "
                "nothing to normalise over; expected batches of two samples at least: set `data.drop_last: true`, "
                "another `data.batch_size` (`data.eval_batch_size`), or `model.norm: group`."
            ) from error


def norm2d(norm: Norm, channels: int, groups: int) -> nn.Module:
    """A layer of the kind.

    Args:
        norm: The kind.
        channels: Of the images.
        groups: With ``group``, how many; a divisor of the channels.

    Raises:
        InvalidOption: If the kind is unknown.

    Example:
        >>> norm2d("batch_static", 4, 2).running_mean is None
        True
    """
    require(norm in get_args(Norm), "model.norm", norm, "'group', 'batch' or 'batch_static'")
    if norm == "group":
        return nn.GroupNorm(groups, channels)
    return _BatchNorm2d(channels, track_running_stats=norm == "batch")
