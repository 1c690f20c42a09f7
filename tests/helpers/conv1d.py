"""A layer with the name, the attributes and the computation of the `Conv1D` of the package transformers."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Conv1D(nn.Module):
    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf) / nx**0.5)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, inputs: Tensor) -> Tensor:
        rows = torch.addmm(self.bias, inputs.view(-1, inputs.shape[-1]), self.weight)
        return rows.view(*inputs.shape[:-1], self.nf)


Conv1D.__module__ = "transformers.pytorch_utils"
