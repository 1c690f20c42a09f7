"""Masks of the coordinates that a sum is over."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from lightning_sparsefl.federated.exchange.flat import Layout
from lightning_sparsefl.types import Masks, Message, Update, Weights
from torch import Tensor

from lightning_sparsefl_flower.secure_sum.errors import SecureSumRefused


def common_support(layout: Layout, votes: Masks, unsent: list[str]) -> Tensor:
    """Return the coordinates that all clients send and vote on, if these are the same for all.

    Args:
        layout: Layout of the model.
        votes: Masks of votes.
        unsent: Names of the tensors that are not sent.
    """
    pieces = []
    for name in layout.names:
        mask = votes.get(name, torch.ones(layout.shapes[name], dtype=torch.bool)).cpu()
        pieces.append((torch.zeros_like(mask) if name in unsent else mask).reshape(-1))
    return torch.cat(pieces)


def restricted(update: Update, votes: Masks, support: Tensor, layout: Layout) -> Update:
    """Return an update that votes on no coordinate outside of a support.

    Args:
        update: Update of a client.
        votes: Its votes, from :func:`voted`.
        support: Coordinates that may be voted on, bool of shape (size,).
        layout: Layout of the model.
    """
    found = dict(votes)
    for name, allowed in layout.split(support):
        if not bool(allowed.all()):
            found[name] = allowed & found[name].cpu() if name in found else allowed
    return replace(update, votes=found)


def pack_bits(mask: Tensor) -> bytes:
    """Return a mask as bytes, 8 coordinates in each.

    Args:
        mask: Bool of shape (size,).
    """
    return np.packbits(mask.cpu().numpy()).tobytes()


def unpack_bits(payload: bytes, size: int) -> Tensor:
    """Return the mask of bytes.

    Args:
        payload: Bytes from :func:`pack_bits`.
        size: Number of coordinates.

    Raises:
        SecureSumRefused: If there are more or fewer.
    """
    if len(payload) != -(-size // 8):
        raise SecureSumRefused(f"A mask of {size} coordinates has {len(payload)} bytes; expected {-(-size // 8)}.")
    return torch.from_numpy(np.unpackbits(np.frombuffer(payload, np.uint8), count=size).astype(bool))


def _tree_on_cpu(tree: Weights) -> Weights:
    return {name: tensor.cpu() for name, tensor in tree.items()}


def update_on_cpu(update: Update) -> Update:
    """Return an update whose tensors are on the CPU.

    Args:
        update: Update of a client.
    """
    votes = None if update.votes is None else _tree_on_cpu(update.votes)
    extra = {key: _tree_on_cpu(tree) for key, tree in update.extra.items()}
    return replace(update, weights=_tree_on_cpu(update.weights), votes=votes, extra=extra)


def message_on_cpu(message: Message) -> Message:
    """Return a message whose weights and masks are on the CPU.

    Args:
        message: Message to a client.
    """
    weights, masks = _tree_on_cpu(message.weights), _tree_on_cpu(message.masks)
    return replace(message, weights=weights, masks=masks, trainable=_tree_on_cpu(message.trainable))
