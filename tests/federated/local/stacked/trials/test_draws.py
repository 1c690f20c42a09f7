"""Training steps that draw random numbers of torch: each client draws its own, and the trial compares the rest."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_sparsefl import APFL, FedDIP, FedSpa
from lightning_sparsefl.federated.local.stacked import functorch
from lightning_sparsefl.federated.local.stacked.rules import LayerRules
from lightning_sparsefl.federated.local.stacked.trials.draws import DrawsNumbers, drawing_by_client, drawing_nothing
from tests.federated.local.stacked import test_odd_modules as odd
from tests.federated.local.stacked.test_odd_modules import Plain, check_alone, fit, said_alone

DRAWS = {
    "randn": lambda x: torch.randn(5, 3),
    "randn of two": lambda x: torch.randn(2, 2),
    "rand": lambda x: torch.rand(()),
    "rand twice": lambda x: torch.rand(3) - torch.rand(3),
    "randint": lambda x: torch.randint(0, 1000, (5,)),
    "randint below": lambda x: torch.randint(1000, (5, 3)),
    "randn_like": torch.randn_like,
    "rand_like": torch.rand_like,
    "randperm": lambda x: torch.stack([torch.randperm(50), torch.randperm(50)]),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "normal": lambda x: torch.normal(x, x.exp()),
    "normal of numbers": lambda x: torch.normal(0.0, 1.0, (5, 3)),
    "in place": lambda x: torch.zeros_like(x).normal_() + torch.zeros_like(x).uniform_(),
    "in new memory": lambda x: torch.empty(5, 3).normal_() + torch.empty((5, 3), dtype=x.dtype).exponential_(),
    "gumbel": F.gumbel_softmax,
    "dropout": F.dropout,
    "more dropout": lambda x: F.dropout(x, 0.7),
}


class Drawing(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.training_step = draw


@pytest.mark.parametrize("name", DRAWS)
def test_a_client_draws_the_same_numbers_alone_and_beside_another(name):
    inputs, module = torch.randn(2, 5, 3, dtype=torch.float64), Drawing(DRAWS[name])
    before, alone = torch.get_rng_state(), []
    for client in range(2):
        with drawing_by_client(module, (client,)):
            alone += [module.training_step(inputs[client]), module.training_step(inputs[client])]
    with drawing_by_client(module, (0, 1)), functorch.vmap_level(2) as level, LayerRules(2, level, set()):
        drawn, at = functorch.unwrap(module.training_step(functorch.wrap(inputs, 0, level)), level)
    assert at is not None
    for client, row in enumerate(drawn.movedim(at, 0)):
        first, again = alone[2 * client : 2 * client + 2]
        assert torch.equal(row, first)
        assert torch.equal(first, again)
    assert not torch.equal(alone[0], alone[2])
    assert torch.equal(torch.get_rng_state(), before)
    assert module.training_step is DRAWS[name]


def test_draws_outside_of_the_step_are_found():
    with pytest.raises(DrawsNumbers), drawing_nothing("key"), drawing_by_client(Drawing(torch.rand_like), (0, 1)):
        torch.rand(1)


class Noisy(Plain):
    def noise(self, inputs):
        return torch.randn_like(inputs)

    def training_step(self, batch, batch_idx):
        noise = self.noise(batch[0])
        self.log("noise", noise.double().mean(), on_step=True, on_epoch=True)
        return F.cross_entropy(self(batch[0] + 0.1 * noise), batch[1])


class Diffusion(Plain):
    """Predicts the noise that is added at a random time."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shares", torch.linspace(0.1, 0.9, 10))
        self.out = nn.Linear(8, 8)

    def training_step(self, batch, batch_idx):
        inputs = batch[0]
        times, noise = torch.randint(0, 10, (len(inputs),), device=self.device), torch.randn_like(inputs)
        share = self.shares[times][:, None]
        self.log("noise", noise.mean() + times.double().mean(), on_step=True, on_epoch=True)
        return F.mse_loss(self.out(share * inputs + (1 - share) * noise), noise)


class Autoencoder(Plain):
    """A variational autoencoder."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(2, 8)

    def training_step(self, batch, batch_idx):
        mean, spread = self.encoder(batch[0]).chunk(2, 1)
        noise = torch.randn_like(mean)
        self.log("noise", noise.mean(), on_step=True, on_epoch=True)
        loss = F.mse_loss(self.decoder(mean + noise * (spread / 2).exp()), batch[0])
        return loss + 0.1 * (mean.square() + spread.exp() - spread - 1).mean()


class Sampling(Autoencoder):
    """A variational autoencoder in terms of a distribution, which checks its parameters."""

    def training_step(self, batch, batch_idx):
        mean, spread = self.encoder(batch[0]).chunk(2, 1)
        posterior = torch.distributions.Normal(mean, (spread / 2).exp())
        code, prior = posterior.rsample(), torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
        self.log("noise", (code - mean).detach().mean(), on_step=True, on_epoch=True)
        divergence = torch.distributions.kl_divergence(posterior, prior).mean()
        return F.mse_loss(self.decoder(code), batch[0]) + 0.1 * divergence


class Mixed(Plain):
    def training_step(self, batch, batch_idx):
        order, share = torch.randperm(len(batch[0])), torch.rand(())
        self.log("noise", share, on_step=True, on_epoch=True)
        return F.cross_entropy(self(share * batch[0] + (1 - share) * batch[0][order]), batch[1])


class Sampled(Plain):
    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.log("noise", torch.bernoulli(logits.sigmoid()).mean() + torch.rand(()), on_step=True, on_epoch=True)
        return F.cross_entropy(logits + F.gumbel_softmax(logits) + F.dropout(logits), batch[1])


@pytest.mark.parametrize("kind", [Noisy, Diffusion, Autoencoder, Sampling, Mixed, Sampled])
def test_each_client_draws_its_own_numbers_in_each_batch_and_again_in_another_run(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(odd, "SIZES", [20] * 4)
    runs = []
    for folder in ("one", "two"):
        torch.manual_seed(1)
        runs.append(fit(kind(), "stacked", tmp_path / folder, max_epochs=4))  # the last ones by recorded steps
    (weights, tables, sizes, said), (others, *_) = runs
    assert sizes == [4, 4]
    assert not said_alone(said)
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    last, means = ({row[f"local/noise_{when}"] for row in tables[1]} for when in ("step", "epoch"))
    assert len(last) == len(means) == 8  # of four clients in two rounds
    assert not last & means  # since the batches of an epoch have different numbers


@pytest.mark.slow_after_first
@pytest.mark.parametrize("algorithm", [FedSpa(density=0.5), FedDIP(), APFL()])
def test_methods_beside_random_numbers(algorithm, tmp_path, monkeypatch):
    monkeypatch.setattr(odd, "SIZES", [20] * 4)
    _, _, sizes, said = fit(Noisy(), "stacked", tmp_path, algorithm=algorithm)
    assert set(sizes) == {4}
    assert not said_alone(said)


class Branches(Plain):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (2 if torch.rand(()) < 0.5 else 1)


class Reads(Plain):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * float(torch.rand(()))


class OwnGenerator(Plain):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * torch.rand((), generator=torch.Generator().manual_seed(batch_idx))


class InAHook(Plain):
    def on_train_batch_start(self, batch, batch_idx):
        batch[0].add_(torch.randn_like(batch[0]))


class SameForAll(Plain):
    """Draws into a tensor that ``vmap`` cannot fill for each client."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * torch.zeros(3).normal_().exp().sum()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Branches, "branches on the value of a tensor, which differs between clients"),
        (Reads, "reads a number out of a tensor"),
        (OwnGenerator, "otherwise for several clients at once than for one"),
        (InAHook, "draws random numbers of torch, which are others than those of a client alone"),
        (SameForAll, "writes in place into a tensor that all clients share"),
    ],
)
def test_what_random_numbers_cannot_do_is_named(kind, words, tmp_path):
    check_alone(kind, words, tmp_path)
