"""Lightning callbacks over `sparse/`: one object, the same behaviour in a `Trainer` and in a client."""

from lightning_sparsefl.callbacks.activation_pruning import ActivationPruning
from lightning_sparsefl.callbacks.budget_aware_extrusion import BudgetAwareExtrusion
from lightning_sparsefl.callbacks.dynamic_mask import DynamicMask
from lightning_sparsefl.callbacks.dynamic_pruning_with_feedback import DynamicPruningWithFeedback
from lightning_sparsefl.callbacks.epoch_snapshots import EpochSnapshots
from lightning_sparsefl.callbacks.global_magnitude_pruning import GlobalMagnitudePruning
from lightning_sparsefl.callbacks.gradient_offset import GradientOffset
from lightning_sparsefl.callbacks.gradient_sum import GradientSum
from lightning_sparsefl.callbacks.gradual_pruning import GradualPruning
from lightning_sparsefl.callbacks.group_penalty import GroupPenalty
from lightning_sparsefl.callbacks.layer_freezing import LayerFreezing
from lightning_sparsefl.callbacks.learned_importance import LearnedImportance
from lightning_sparsefl.callbacks.loss_squares import LossSquares
from lightning_sparsefl.callbacks.lottery_rewind import LotteryRewind
from lightning_sparsefl.callbacks.meta_step import MetaStep
from lightning_sparsefl.callbacks.moreau_envelope import MoreauEnvelope
from lightning_sparsefl.callbacks.nm_pruning import NMPruning
from lightning_sparsefl.callbacks.ordered_dropout import OrderedDropout
from lightning_sparsefl.callbacks.personal_mixture import PersonalMixture
from lightning_sparsefl.callbacks.power_propagation import PowerPropagation
from lightning_sparsefl.callbacks.proximal_term import ProximalTerm
from lightning_sparsefl.callbacks.sparsity_monitor import SparsityMonitor
from lightning_sparsefl.callbacks.static_mask import StaticMask
from lightning_sparsefl.callbacks.step_meter import StepMeter

__all__ = [
    "ActivationPruning",
    "BudgetAwareExtrusion",
    "DynamicMask",
    "DynamicPruningWithFeedback",
    "EpochSnapshots",
    "GlobalMagnitudePruning",
    "GradientOffset",
    "GradientSum",
    "GradualPruning",
    "GroupPenalty",
    "LayerFreezing",
    "LearnedImportance",
    "LossSquares",
    "LotteryRewind",
    "MetaStep",
    "MoreauEnvelope",
    "NMPruning",
    "OrderedDropout",
    "PersonalMixture",
    "PowerPropagation",
    "ProximalTerm",
    "SparsityMonitor",
    "StaticMask",
    "StepMeter",
]
