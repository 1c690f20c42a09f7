from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_sparsefl import FedAvg, SparsyFed
from lightning_sparsefl.callbacks import PowerPropagation
from lightning_sparsefl.callbacks.sparse_inputs import SparseInputs
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated import ServerOptimizer
from lightning_sparsefl.sparse.masks import kept, same
from lightning_sparsefl.sparse.reparameterize import power, power_slope, root
from lightning_sparsefl.types import FitResult, Merged, Message

WEIGHTS = {
    "a.weight": torch.tensor([[0.25, -1.0], [0.5, 0.1]]),
    "a.bias": torch.tensor([9.0]),
    "mean": torch.ones(2, 2),
}


def test_the_small_numbers():
    theta = torch.tensor([0.25], dtype=torch.float64)
    assert power(theta, 1.25).item() == pytest.approx(0.1767767, abs=1e-7)
    assert power_slope(theta, 1.25).item() == pytest.approx(0.8838835, abs=1e-7)
    assert power(root(-theta, 1.25), 1.25).item() == pytest.approx(-0.25)


def test_the_model_starts_at_the_first_weights(fleet, view):
    method = SparsyFed(exponent=2.0)
    server = method.init(WEIGHTS, fleet(buffers=["mean"]))
    torch.testing.assert_close(dict(server.weights), WEIGHTS)
    message = method.download(server, view())
    torch.testing.assert_close(message.weights["a.weight"], torch.tensor([[0.5, -1.0], [0.5**0.5, 0.1**0.5]]))
    assert list(message.masks) == ["a.weight"]
    assert message.weights["mean"] is WEIGHTS["mean"]
    for task in ("score", "finetune"):
        assert method.download_for(server, view(), task).weights is server.weights


def test_a_client_keeps_the_largest_theta_and_sends_zeros_for_what_it_drops(client):
    masks = {"w": torch.tensor([True, True, True, False])}
    message = Message(weights={"w": torch.tensor([3.0, 2.0, 1.0, 0.0]), "bias": torch.ones(1)}, masks=masks)
    method, (someone, script) = (
        SparsyFed(density=0.5, exponent=2.0),
        client({"w": torch.ones(4), "bias": torch.ones(1)}),
    )

    def fit(client, weights, masks, trainable, callbacks, **options):
        assert masks == {}
        inputs, powers = callbacks
        assert isinstance(inputs, SparseInputs)
        assert isinstance(powers, PowerPropagation)
        powers._theta = {"w": torch.tensor([3.0, -0.5, 2.0, 0.0])}
        return FitResult(weights=script.trained, metrics={}, steps=1)

    someone._worker = type("Bench", (), {"fit": staticmethod(fit)})
    update = method.train(message, someone)
    assert update.weights["w"].tolist() == [3.0, 0.0, 2.0, 0.0]
    assert (update.kind, update.weight) == ("weights", 7)
    assert same(update.votes, masks)
    assert method.trained(message, update)["w"].tolist() == [9.0, 0.0, 4.0, 0.0]
    assert SparsyFed(exponent=1.0).may_vote(message) == {}
    assert len(SparsyFed(prune_activations=False).callbacks(message, someone)) == 1


def test_the_server_averages_theta_and_shows_its_power(fleet):
    method = SparsyFed(exponent=2.0)
    server = method.init(WEIGHTS, fleet(buffers=["mean"]))
    mean = {**WEIGHTS, "a.weight": torch.tensor([[0.0, -2.0], [1.0, 9.0]])}
    covered = {"a.weight": torch.tensor([[True, True], [True, False]])}
    after = method.aggregate(server, Merged(weights=mean, covered=covered))
    expected = torch.tensor([[0.0, -2.0], [1.0, 0.1**0.5]])
    torch.testing.assert_close(after.extra["theta"]["a.weight"], expected)
    torch.testing.assert_close(after.weights["a.weight"], expected * expected.abs())
    assert after.weights["a.weight"][0, 0] == 0


def test_an_optimizer_of_the_server_steps_theta(federation):
    """A rate of 0 but for rounding: the model stays as it was."""
    still = ServerOptimizer(rule="momentum", lr=1e-9, beta1=0.0)
    module = federation.module()
    first = {name: value.detach().clone() for name, value in module.named_parameters()}
    trainer = federation(SparsyFed(), rounds=2, module=module, federation={"server_optimizer": still})
    path = trainer.run_folder / "checkpoints" / "last.ckpt"
    weights = torch.load(path, weights_only=True)["state_dict"]
    for name, value in first.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6)


def test_profile_and_costs_take_the_least_that_is_sent(fleet, view, facts):
    method = SparsyFed(density=0.5)
    first = method.init(WEIGHTS, fleet(buffers=["mean"]))
    assert kept(method.download(method.profile_state(first, 0), view()).masks) == 4
    later = method.profile_state(first, 3)
    assert later.round == 3
    assert kept(method.download(later, view()).masks) == 2
    held = {"a.weight": torch.tensor([[True, True, True, False, False]] * 2), "b.weight": torch.ones(3, 2).bool()}
    costs = method.costs(facts(held))
    assert costs.bytes_down_paper == 4 * (6 + 6 + 2)
    assert costs.bytes_up_paper == 4 * (8 + 2)
    again = SparsyFed(density=0.5, exponent=1.0).costs(facts(held))  # whose weights of 0 train too
    assert replace(again, flops_paper=costs.flops_paper, flops_analytic=costs.flops_analytic) == costs
    assert again.flops_paper == again.flops_analytic == 14 * 3 * 34 > costs.flops_analytic


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [("density", 0.0, r"a number in \(0, 1\]"), ("exponent", 0.9, "a number >= 1"), ("exponent", -1, "a number >= 1")],
)
def test_an_option_outside_its_range_is_refused(option, value, expected):
    with pytest.raises(InvalidOption, match=rf"`algorithm.{option}` is {value}; expected {expected}"):
        SparsyFed(**{option: value})


def test_dense_and_without_a_power_it_is_fedavg_to_the_bit(federation):
    weights = []
    for method in (SparsyFed(density=1.0, exponent=1.0), FedAvg(), SparsyFed(density=1.0)):
        trainer = federation(method, rounds=2, folder=str(len(weights)))
        path = trainer.run_folder / "checkpoints" / "last.ckpt"
        weights.append(torch.load(path, weights_only=True)["state_dict"])
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert any(not torch.equal(value, weights[2][name]) for name, value in weights[0].items())


def test_the_dead_stay_dead_and_the_model_gets_sparse(federation):
    trainer = federation(SparsyFed(density=0.4, prune_activations=False), rounds=3)
    path = trainer.run_folder / "checkpoints" / "last.ckpt"
    weights = torch.load(path, weights_only=True)["state_dict"]
    zeros = sum(int((weights[name] == 0).sum()) for name in ("net.0.weight", "net.4.weight"))
    assert 0.1 * 192 < zeros <= 0.6 * 192
