"""Small networks in which channels are shared in as many ways as there are.

Activations are smooth or leaky, so no unit is dead by accident.
"""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from helpers.conv1d import Conv1D


class Residual(nn.Module):
    """Two blocks on one stream, then a wider one behind a projection."""

    def __init__(self, norm):
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.norm = norm(4)
        self.blocks = nn.ModuleList(self._block(4, norm) for _ in range(2))
        self.wide = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.project = nn.Conv2d(4, 8, 1, stride=2, bias=False)
        self.wide_norm = norm(8)
        self.fc = nn.Linear(8, 3)

    @staticmethod
    def _block(width, norm):
        one, two = nn.Conv2d(width, 6, 3, padding=1), nn.Conv2d(6, width, 3, padding=1)
        return nn.Sequential(OrderedDict(conv1=one, norm1=norm(6), act=nn.LeakyReLU(), conv2=two, norm2=norm(width)))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = F.leaky_relu(self.norm(self.stem(inputs)))
        for block in self.blocks:
            hidden = F.leaky_relu(block(hidden) + hidden)
        hidden = F.leaky_relu(self.wide_norm(self.wide(hidden)) + self.project(hidden))
        return self.fc(hidden.mean((2, 3)))


class Dense(nn.Module):
    """Concatenation of two branches, one of which is read again."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)
        self.norm, self.three, self.fc = nn.BatchNorm2d(7), nn.Conv2d(7, 5, 1), nn.Linear(5 * 4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        one = torch.tanh(self.one(inputs))
        both = torch.cat([one, torch.tanh(self.two(one))], dim=1)
        hidden = F.adaptive_avg_pool2d(torch.tanh(self.three(F.leaky_relu(self.norm(both)))), 2)
        return self.fc(torch.flatten(hidden, 1))


class Gated(nn.Module):
    """Squeeze and excitation: a channel times a gate computed from all channels."""

    def __init__(self):
        super().__init__()
        self.conv, self.down, self.up = nn.Conv2d(2, 6, 3), nn.Linear(6, 3), nn.Linear(3, 6)
        self.last = nn.Conv2d(6, 3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.conv(inputs))
        gate = torch.sigmoid(self.up(F.gelu(self.down(hidden.mean((2, 3))))))
        return self.last(hidden * gate[:, :, None, None]).amax((2, 3))


class Shared(nn.Module):
    """One layer called twice, and a parameter that belongs to no layer."""

    def __init__(self):
        super().__init__()
        self.first, self.again, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        return self.last(torch.tanh(self.again(torch.tanh(self.again(hidden)))))


class Language(nn.Module):
    """Embedding, a recurrent network, and a layer on its outputs and last state."""

    def __init__(self, kind, **options):
        super().__init__()
        self.emb = nn.Embedding(7, 4)
        self.rnn = kind(4, 5, batch_first=True, **options)
        self.fc = nn.Linear(10 if options.get("bidirectional") else 5, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs, state = self.rnn(self.emb(tokens))
        hidden = state[0] if isinstance(state, tuple) else state
        return self.fc(outputs) if self.rnn.bidirectional else self.fc(outputs + hidden[-1].unsqueeze(1))


class Packed(Language):
    """A recurrent network on sequences of several lengths, of which a layer reads the outputs and the last state."""

    def forward(self, tokens: Tensor) -> Tensor:
        lengths = (tokens > 2).sum(1).clamp(min=1)
        packed = pack_padded_sequence(self.emb(tokens), lengths, batch_first=True, enforce_sorted=False)
        outputs, state = self.rnn(packed)
        hidden = state[0] if isinstance(state, tuple) else state
        return self.fc(pad_packed_sequence(outputs, batch_first=True)[0] + hidden[-1].unsqueeze(1))


def sequential(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


def group_norm(width: int) -> nn.GroupNorm:
    return nn.GroupNorm(2, width)


NETS = {
    "flatten": lambda: sequential(
        nn.Conv2d(2, 3, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 3)
    ),
    "batch norm": lambda: Residual(nn.BatchNorm2d),
    "group norm": lambda: Residual(group_norm),
    "instance norm": lambda: Residual(lambda width: nn.InstanceNorm2d(width, affine=True)),
    "depthwise": lambda: sequential(
        nn.Conv2d(2, 4, 1),
        nn.BatchNorm2d(4),
        nn.LeakyReLU(),
        nn.Conv2d(4, 8, 3, groups=4, padding=1),
        nn.BatchNorm2d(8),
        nn.LeakyReLU(),
        nn.Conv2d(8, 3, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ),
    "grouped": lambda: sequential(
        nn.Conv2d(2, 6, 3), nn.Tanh(), nn.Conv2d(6, 8, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(32, 3)
    ),
    "transposed": lambda: sequential(
        nn.Conv2d(2, 4, 3), nn.PReLU(4), nn.ConvTranspose2d(4, 3, 2), nn.Tanh(), nn.Conv2d(3, 1, 1)
    ),
    "layer norm": lambda: sequential(
        nn.Flatten(),
        nn.Linear(72, 6),
        nn.LayerNorm(6),
        nn.GELU(),
        nn.Linear(6, 4, bias=False),
        nn.LayerNorm(4),
        nn.Linear(4, 2),
    ),
    "concatenation": Dense,
    "gate": Gated,
    "sigmoid": lambda: sequential(nn.Flatten(), nn.Linear(72, 4), nn.Sigmoid(), nn.Linear(4, 3)),
    "inputs first": lambda: sequential(
        nn.Flatten(), Conv1D(5, 72), nn.Tanh(), Conv1D(4, 5), nn.GELU(), nn.Linear(4, 2)
    ),
    "shared": Shared,
    "lstm": lambda: Language(nn.LSTM, num_layers=2),
    "gru": lambda: Language(nn.GRU),
    "packed": lambda: Packed(nn.LSTM, num_layers=2),
    "bidirectional": lambda: Language(nn.LSTM, num_layers=2, bidirectional=True, bias=False),
}


def sample(net: nn.Module) -> Tensor:
    """Two random inputs."""
    if isinstance(net, Language):
        return torch.randint(7, (2, 3))
    return torch.randn(2, 4) if isinstance(net, Shared) else torch.randn(2, 2, 6, 6)


@pytest.fixture(params=NETS)
def net(request) -> tuple[nn.Module, Tensor]:
    """A double-precision network in evaluation mode, none of whose weights is special, and an input."""
    torch.manual_seed(0)
    module = NETS[request.param]().double()
    with torch.no_grad():
        for value in module.buffers():
            if value.is_floating_point():
                value.copy_(torch.rand_like(value) + 0.5)
        for value in module.parameters():
            value.add_(0.3 * torch.randn_like(value))
    inputs = sample(module)
    return module.eval(), inputs.double() if inputs.is_floating_point() else inputs
