"""Norms of the networks: group norm, and batch norm with or without running statistics."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor, nn

from lightning_sparsefl.errors import InvalidOption, require

Norm = Literal["group", "batch", "batch_static"]
"""Kind of norm.

- ``group``: over groups of channels of each sample.
- ``batch``: over the batch in training, with running statistics in evaluation. The statistics are buffers; see the
  option `federation.buffers`.
- ``batch_static``: over the batch in training and in evaluation, without running statistics, so that there are no
  buffers to average (PerFedMask, FedLPS). Scores depend on the other samples of a batch; a batch of one sample is
  normalised over its own pixels, and raises an error if there is only one pixel.
"""


class _BatchNorm2d(nn.BatchNorm2d):
    """Batch norm whose error for a batch with one value per channel names the options to change."""

    def forward(self, inputs: Tensor) -> Tensor:
        try:
            return super().forward(inputs)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise InvalidOption(
                f"A batch norm over {self.num_features} channels received a batch of one sample and one pixel, so it "
                "has only one value per channel; expected batches of at least two samples: set `data.drop_last: true`, "
                "another `data.batch_size` (`data.eval_batch_size`), or `model.norm: group`."
            ) from error


def norm2d(norm: Norm, channels: int, groups: int) -> nn.Module:
    """Create a norm for images.

    Args:
        norm: Kind of the norm.
        channels: Number of channels of the images.
        groups: Number of groups for ``group``; a divisor of `channels`.

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
