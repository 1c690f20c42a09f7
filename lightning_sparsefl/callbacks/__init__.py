"""Lightning callbacks over `sparse/`: one object, the same behaviour in a `Trainer` and in a client."""

from lightning_sparsefl.callbacks.dynamic_mask import DynamicMask
from lightning_sparsefl.callbacks.dynamic_pruning_with_feedback import DynamicPruningWithFeedback
from lightning_sparsefl.callbacks.global_magnitude_pruning import GlobalMagnitudePruning
from lightning_sparsefl.callbacks.gradient_offset import GradientOffset
from lightning_sparsefl.callbacks.gradual_pruning import GradualPruning
from lightning_sparsefl.callbacks.group_penalty import GroupPenalty
from lightning_sparsefl.callbacks.layer_freezing import LayerFreezing
from lightning_sparsefl.callbacks.learned_importance import LearnedImportance
from lightning_sparsefl.callbacks.lottery_rewind import LotteryRewind
from lightning_sparsefl.callbacks.nm_pruning import NMPruning
from lightning_sparsefl.callbacks.proximal_term import ProximalTerm
from lightning_sparsefl.callbacks.sparsity_monitor import SparsityMonitor
from lightning_sparsefl.callbacks.static_mask import StaticMask

__all__ = [
    "DynamicMask",
    "DynamicPruningWithFeedback",
    "GlobalMagnitudePruning",
    "GradientOffset",
    "GradualPruning",
    "GroupPenalty",
    "LayerFreezing",
    "LearnedImportance",
    "LotteryRewind",
    "NMPruning",
    "ProximalTerm",
    "SparsityMonitor",
    "StaticMask",
]
