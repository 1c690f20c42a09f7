"""Training of roots of weights, under which small weights become smaller.

Schwarz et al., "Powerpropagation: A sparsity inducing weight reparameterisation", NeurIPS 2021, arXiv:2110.00296.
"""

from __future__ import annotations

from torch import Tensor

from lightning_sparsefl.callbacks.options import check_arguments, require
from lightning_sparsefl.callbacks.reparameterized import Reparameterized
from lightning_sparsefl.sparse.reparameterize import power, power_slope, root
from lightning_sparsefl.types import Weights


class PowerPropagation(Reparameterized):
    """Trains theta where the module has ``sign(theta) * |theta| ** exponent``.

    Gradients of theta are multiplied by ``exponent * |theta| ** (exponent - 1)``, so that large weights grow and a
    weight of 0 stays 0. The model starts where it is: the first theta is the root of the weights. Weight decay acts on
    theta. :class:`~lightning_sparsefl.callbacks.reparameterized.Reparameterized` says where theta is.

    Args:
        exponent: The paper's alpha, >= 1; 1 changes nothing.
        layers: Patterns of layer names and types, such as ``["*conv*", "type:Linear", "!head*"]``; None = all weights
            of linear, convolutional, recurrent, attention and embedding layers.
        theta: Values of theta by name to start from, which determine the layers; None = the roots of the weights.

    Raises:
        InvalidOption: If the exponent is below 1, a pattern matches no layer, the optimizer is LBFGS, or another
            callback trains the same weights as a function of other numbers, or grows some of them from 0.

    Example:
        >>> PowerPropagation(exponent=2.0).exponent
        2.0
    """

    @check_arguments
    def __init__(
        self, exponent: float = 1.25, layers: list[str] | str | None = None, theta: Weights | None = None
    ) -> None:
        require(exponent >= 1, "PowerPropagation", "exponent", exponent, "a number >= 1")
        super().__init__(layers, theta)
        self.exponent = exponent

    @property
    def stays_at_zero(self) -> bool:
        """Whether a weight of 0 has a theta without gradient, as the paper's powers have."""
        return self.exponent > 1

    def first(self, name: str, weight: Tensor) -> Tensor:
        """Return the root of a weight."""
        return root(weight, self.exponent)

    def shown(self, name: str, theta: Tensor) -> Tensor:
        """Return the power of theta."""
        return power(theta, self.exponent)

    def slope(self, name: str, theta: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient by the chain rule."""
        return gradient if self.exponent == 1 else gradient * power_slope(theta, self.exponent)
