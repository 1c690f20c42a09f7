"""FedOpt: Adaptive Federated Optimization.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan, ICLR 2021, arXiv:2003.00295, Algorithm 2. With the rule
`momentum`, FedAvgM of Hsu, Qi, Brown, arXiv:1909.06335.

The mean change of the clients' weights is a gradient for an optimizer of the server: momentum (FedAvgM), Adagrad, Adam
or Yogi. `federation.server_optimizer` does the same for other methods.

Departures from the paper:

- Neither moment is corrected for its bias, as in the paper's Algorithm 2; PyTorch's and some public versions do so. The
  rule `adamw`, which is not in the paper, is PyTorch's AdamW with this correction.
- v starts at the square of `tau`, which the paper allows, and m at 0. ``start="mean"`` is the variant of REFL.
- The default `lr` is 0.1 for the adaptive rules; the paper tunes it together with the clients' rate for each data set.
- FedAvgM has one step ``w + lr m`` with ``m = beta1 m + D``; Nesterov's form is not offered.
- Buffers are averaged as in FedAvg, and have no moments.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Literal

from lightning_sparsefl.federated.aggregation.server_optimizer import ServerOptimizer, check_server_optimizer
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.types import Merged, ServerState, Weights


@dataclass(frozen=True, kw_only=True)
class FedOpt(FederatedAlgorithm):
    """FedAvg with an optimizer of the server, which makes its step of the clients' mean change."""

    can_be_private = True
    has_server_optimizer = True

    rule: Literal["momentum", "adagrad", "adam", "yogi", "adamw"] = "adam"
    """FedAvgM (`momentum`), FedAdagrad, FedAdam, FedYogi, or AdamW with bias correction."""
    lr: float | None = None
    """Learning rate of the server, above 0; null = 1 with momentum, 0.001 with AdamW, 0.1 else."""
    beta1: float | None = None
    """Decay of the mean of changes, in [0, 1); null = 0 with Adagrad, 0.9 else."""
    beta2: float | None = None
    """Decay of the mean of squared changes, in [0, 1), which Adam, Yogi and AdamW have; null = 0.999 with AdamW, 0.99
    else."""
    tau: float | None = None
    """Degree of adaptivity, above 0, added to the root of v; null = 1e-8 with AdamW, 0.001 else."""
    weight_decay: float | None = None
    """Fraction of the weights that is taken away in a round, in units of `lr`, >= 0; null = 0.01 with AdamW, 0 else."""
    start: Literal["zero", "mean"] = "zero"
    """Moments before the first round: 0 and the square of `tau`; or `mean`: the server takes the first round's mean
    change as it is, and starts with it and its square (REFL)."""

    def __post_init__(self) -> None:
        check_server_optimizer(self, "algorithm.")

    @property
    def optimizer(self) -> ServerOptimizer:
        """Optimizer of the server."""
        return ServerOptimizer(**asdict(self))

    def init(self, weights: Weights, fleet: Fleet) -> ServerState:
        """Return the first weights and the first moments of all parameters."""
        parameters = {name: weight for name, weight in weights.items() if name not in fleet.buffers}
        return ServerState(round=0, weights=weights, extra=self.optimizer.first(parameters))

    def aggregate(self, server: ServerState, merged: Merged) -> ServerState:
        """Take the optimizer's step instead of the clients' mean change."""
        before = {key: server.extra[key] for key in ("m", "v", "t") if key in server.extra}
        merged, moments = self.optimizer.step(server, merged, before)
        return replace(super().aggregate(server, merged), extra={**server.extra, **moments})
