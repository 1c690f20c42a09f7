"""Group norm of images in the layout ``channels_last``.

On a CPU, torch's kernel for this layout (2.15) takes one and a half to four times as long for groups of fewer than
eight channels, and half as long for larger groups.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


def group_norm(images: Tensor, scale: Tensor | None, shift: Tensor | None, groups: int, eps: float) -> Tensor:
    """Return ``F.group_norm`` of images (Wu and He 2018, arXiv:1803.08494, eq. 1 to 3).

    Args:
        images: Images of shape (B, C, H, W).
        scale: Factors of the channels, of shape (C,); None = 1.
        shift: Summands of the channels, of shape (C,); None = 0.
        groups: Number of groups.
        eps: Summand of the variances.
    """
    return cast(Tensor, _GroupNorm.apply(images, scale, shift, groups, eps))


class _GroupNorm(torch.autograd.Function):
    """Group norm by sums over the pixels of each channel, whose values are a row in memory."""

    @staticmethod
    def forward(
        ctx: Any, images: Tensor, scale: Tensor | None, shift: Tensor | None, groups: int, eps: float
    ) -> Tensor:
        pixels = _pixels(images)
        number = pixels.shape[1] * pixels.shape[2] // groups
        mean = _of_groups(pixels.sum(1), groups).sum(-1) / number
        centred = pixels - _of_channels(mean, pixels)
        variance = _of_groups(centred.square().sum(1), groups).sum(-1) / number
        inverse = (variance + eps).rsqrt()
        factor = _of_channels(inverse, pixels) if scale is None else _of_channels(inverse, pixels) * scale
        ctx.save_for_backward(centred, inverse, scale)
        ctx.shifted = shift is not None
        outputs = torch.empty_like(images)  # no view, so that the next layer may write into it
        if shift is None:
            torch.mul(centred, factor, out=_pixels(outputs))
        else:
            torch.addcmul(shift, centred, factor, out=_pixels(outputs))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (centred, inverse, scale) = grads, ctx.saved_tensors
        pixels, groups = _pixels(grad), inverse.shape[1]
        number = pixels.shape[1] * pixels.shape[2] // groups
        along, total = (pixels * centred).sum(1), pixels.sum(1)  # of shape (B, C)
        scaled = [_of_groups(each if scale is None else each * scale, groups).sum(-1) for each in (along, total)]
        factor = _of_channels(inverse, pixels) if scale is None else _of_channels(inverse, pixels) * scale
        through_variance = _of_channels(-scaled[0] * inverse**3 / number, pixels)
        through_mean = _of_channels(-scaled[1] * inverse / number, pixels)
        inputs = torch.addcmul(through_mean, centred, through_variance).addcmul_(pixels, factor)
        of_scale = None if scale is None else (_of_groups(along, groups) * inverse.unsqueeze(-1)).sum(0).flatten()
        return _images(inputs, grad), of_scale, total.sum(0) if ctx.shifted else None, None, None


def _pixels(images: Tensor) -> Tensor:
    """Return images of shape (B, C, H, W) as (B, H * W, C)."""
    return images.permute(0, 2, 3, 1).flatten(1, 2)


def _images(pixels: Tensor, like: Tensor) -> Tensor:
    """Return (B, H * W, C) as images of the shape of others."""
    batch, channels, rows, columns = like.shape
    return pixels.view(batch, rows, columns, channels).permute(0, 3, 1, 2)


def _of_groups(channels: Tensor, groups: int) -> Tensor:
    """Return (B, C) as (B, groups, C / groups)."""
    return channels.view(len(channels), groups, -1)


def _of_channels(groups: Tensor, pixels: Tensor) -> Tensor:
    """Return (B, groups) as (B, 1, C) for pixels of shape (B, H * W, C)."""
    return groups.repeat_interleave(pixels.shape[2] // groups.shape[1], 1).unsqueeze(1)
