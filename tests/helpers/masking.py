"""Callbacks that mask, and what tests ask of them."""

from __future__ import annotations

from lightning_sparsefl.callbacks import (
    DynamicMask,
    DynamicPruningWithFeedback,
    GlobalMagnitudePruning,
    GradualPruning,
    StaticMask,
)

KINDS = [StaticMask, DynamicMask, GradualPruning, GlobalMagnitudePruning, DynamicPruningWithFeedback]
"""Kinds that differ in how they come by their masks."""


def kept_of(callback):
    return {name: mask.clone() for name, mask in callback.masks.items()}
