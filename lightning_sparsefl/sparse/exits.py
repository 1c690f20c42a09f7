"""Early exits: a model in blocks, of which the first ones with their exits are a model too.

DepthFL (Kim et al., ICLR 2023) and ScaleFL (Ilhan et al., CVPR 2023).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_sparsefl.sparse.layer_groups import head_of
from lightning_sparsefl.sparse.uses import EACH_ONCE, TensorUses
from lightning_sparsefl.types import Weights


def blocks_of(names: Sequence[str], exits: Mapping[str, str]) -> dict[str, int]:
    """Return the number of the block that each tensor belongs to, from 0; an exit belongs to the block that it follows.

    Args:
        names: Names of all tensors, in the order in which the module holds them.
        exits: Name of the last module of each block and name of its exit, in the order of the forward pass.

    Example:
        >>> names = ["stem.weight", "a.weight", "one.weight", "b.weight", "c.weight", "two.weight"]
        >>> blocks_of(names, {"a": "one", "c": "two"})
        {'stem.weight': 0, 'a.weight': 0, 'one.weight': 0, 'b.weight': 1, 'c.weight': 1, 'two.weight': 1}
    """
    found, passed = {}, 0
    for name in names:
        own = [at for at, exit in enumerate(exits.values()) if name.startswith(f"{exit}.")]
        last = [at for at, module in enumerate(exits) if name.startswith(f"{module}.")]
        if not own and last:
            passed = last[0] + 1
        found[name] = (own or last or [min(passed, len(exits) - 1)])[0]
    return found


def exit_heads(weights: Weights, exits: Mapping[str, str], uses: TensorUses = EACH_ONCE) -> dict[str, int]:
    """Return the tensors of the last linear layer of each exit, with the number of its block.

    Args:
        weights: Parameters of the module by name.
        exits: Name of the last module of each block and name of its exit.
        uses: Uses of the parameters by layers, from :func:`~lightning_sparsefl.sparse.uses.uses_of`.

    Example:
        >>> weights = {name: torch.ones(2, 2) for name in ("a.weight", "one.0.weight", "one.1.weight")}
        >>> exit_heads(weights, {"a": "one"})
        {'one.1.weight': 0}
    """
    found: dict[str, int] = {}
    for block, exit in enumerate(exits.values()):
        own = {name: value for name, value in weights.items() if name.startswith(f"{exit}.")}
        found.update(dict.fromkeys(head_of(own, uses=uses, named=None), block))
    return found


def mutual_slopes(logits: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradient by each exit's logits of what all exits learn from each other.

    The term of exit i is ``1 / (L - 1) sum over j != i of KL(softmax_j + 1e-7 || softmax_i)``, averaged over samples,
    where the other exits are constants; its gradient is ``1 / (L - 1) sum over j of (m_j softmax_i - p_j)`` with
    ``p_j = softmax_j + 1e-7`` and its sum m_j.

    Args:
        logits: Logits of each exit, classes in the last dimension.

    Example:
        >>> mutual_slopes([torch.zeros(1, 2), torch.tensor([[0.0, 1.0986123]])])[0]
        tensor([[ 0.2500, -0.2500]])
    """
    if len(logits) < 2:
        return [torch.zeros_like(value) for value in logits]
    shares = [value.detach().softmax(-1) for value in logits]
    targets = [share + 1e-7 for share in shares]
    masses, rows = [target.sum(-1, keepdim=True) for target in targets], logits[0][..., 0].numel()
    return [
        sum(
            (mass * share - target for j, (mass, target) in enumerate(zip(masses, targets, strict=True)) if j != i),
            start=torch.zeros_like(share),
        )
        / (rows * (len(logits) - 1))
        for i, share in enumerate(shares)
    ]


def teaching_slopes(logits: Sequence[Tensor], temperature: float = 3.0) -> list[Tensor]:
    """Return the gradient by each exit's logits of what the other exits learn from the last one (ScaleFL).

    The term of L exits is ``2 / (L (L + 1)) sum over j < L of j T^2 mean(p (log p - log q_j))`` with the temperature T,
    ``p = softmax(z_L / T)`` and ``q_j = softmax(z_j / T)``, where the mean is over samples and classes. As in the
    authors' program, the last exit is no constant.

    Args:
        logits: Logits of each exit, classes in the last dimension.
        temperature: Temperature T of the probabilities, above 0.

    Example:
        >>> teaching_slopes([torch.zeros(1, 2), torch.tensor([[0.0, 3.2958369]])])[0]
        tensor([[ 0.1250, -0.1250]])
    """
    *others, last = (value.detach() / temperature for value in logits)
    log_p, count = F.log_softmax(last, -1), len(logits)
    p = log_p.exp()
    slopes, pulled = [], torch.zeros_like(last)
    for place, own in enumerate(others, start=1):
        log_q = F.log_softmax(own, -1)
        share = 2 * place / (count * (count + 1)) * temperature / last.numel()
        slopes.append(share * (log_q.exp() - p))
        gap = log_p - log_q
        pulled = pulled + share * p * (gap - (p * gap).sum(-1, keepdim=True))
    return [*slopes, pulled]
