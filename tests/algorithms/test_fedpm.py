from __future__ import annotations

import math
from dataclasses import replace

import lightning as L
import pytest
import torch
from torch import nn

from lightning_sparsefl import FedPM
from lightning_sparsefl.callbacks.stochastic_mask import StochasticMask
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.fleet import Fleet
from lightning_sparsefl.sparse.supermask import posterior_scores, score_gradient, signed_constant, signed_constants
from lightning_sparsefl.types import Merged, Message


class Module(L.LightningModule):
    def __init__(self, *layers):
        super().__init__()
        self.net = nn.Sequential(*layers)


def start(method, module, view, buffers=()):
    method.adapt(module)
    weights = {n: v.detach().clone() for n, v in module.state_dict().items() if v.is_floating_point()}
    return method.init(weights, Fleet([view()], frozenset(buffers), torch.device("cpu")))


def small():
    torch.manual_seed(0)
    return Module(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))


BUFFERS = ("net.1.running_mean", "net.1.running_var")


def test_the_small_numbers():
    frequency = torch.tensor([0.75, 1.0], dtype=torch.float64)
    scores = posterior_scores(frequency, 0.01)
    torch.testing.assert_close(scores.sigmoid(), torch.tensor([0.745, 0.99], dtype=torch.float64))
    assert float(scores[0]) == pytest.approx(1.0721207, abs=1e-7)


def test_the_gradient_of_a_score():
    """That of autograd, where the draw passes the gradient times the chance."""
    scores = torch.randn(5, requires_grad=True)
    frozen, gradient = torch.randn(5), torch.randn(5)
    chance = scores.sigmoid()
    (chance.detach() * chance * frozen * gradient).sum().backward()
    torch.testing.assert_close(score_gradient(gradient, frozen, scores.detach()), scores.grad)


def test_what_the_module_freezes_stays_as_it_is():
    module = small()
    module.net[0].requires_grad_(False)
    before = {name: value.clone() for name, value in module.net[0].state_dict().items()}
    FedPM().adapt(module)
    assert all(torch.equal(value, before[name]) for name, value in module.net[0].state_dict().items())
    assert signed_constants(dict(module.named_parameters())) == ("net.3.weight", "net.3.bias")
    module.requires_grad_(False)
    with pytest.raises(InvalidOption, match=r"but `Module` has none that train; expected a module with some"):
        FedPM().adapt(module)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_become_signed_constants_and_are_known_again(dtype):
    module = small()
    FedPM().adapt(module)
    assert torch.equal(module.net[0].bias.abs(), torch.full((2,), math.e / 3))
    weight = module.net[3].weight
    assert set(weight.unique().tolist()) == {signed_constant(torch.tensor(s), 8).item() for s in (-1.0, 1.0)}
    once = {name: value.clone() for name, value in module.state_dict().items()}
    FedPM().adapt(module)
    assert all(torch.equal(value, once[name]) for name, value in module.state_dict().items())
    parameters = {name: value.to(dtype) for name, value in module.named_parameters()}
    assert signed_constants(parameters) == ("net.0.weight", "net.0.bias", "net.3.weight", "net.3.bias")
    rounded = {name: value.float() for name, value in parameters.items()}
    assert signed_constants(rounded) == signed_constants(parameters)
    assert signed_constants({"norm.weight": torch.full((2,), math.e, dtype=dtype)}) == ()  # of no layer


def test_a_layer_with_spectral_norm_and_further_parameters_of_a_layer_keep_their_numbers():
    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.scale = nn.Parameter(torch.full((2,), 0.3))

    old = nn.utils.spectral_norm(nn.Linear(3, 3))
    module = Module(nn.Linear(3, 3), old, nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2)), Scaled())
    before = {name: value.clone() for name, value in module.state_dict().items()}
    FedPM().adapt(module)
    masked = ("net.0.weight", "net.0.bias", "net.3.weight", "net.3.bias")
    changed = {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == set(masked)
    assert set(signed_constants(dict(module.named_parameters()))) == changed


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm], ids=["old", "new"])
def test_weight_norm_is_refused_before_anything_changes(norm):
    module = Module(nn.Linear(3, 3), norm(nn.Linear(3, 2)))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(InvalidOption, match=r"`algorithm` cannot mask `net\.1\.weight`, which the parametrization"):
        FedPM().adapt(module)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_only_scores_and_what_is_not_masked_travel(view):
    method, person = FedPM(), view()
    server = start(method, small(), view, BUFFERS)
    message = method.download(server, person)
    others = ["net.1.weight", "net.1.bias", "net.1.running_mean", "net.1.running_var"]
    assert list(message.weights) == others
    scored = method.download_for(server, person, "score")
    for name, values in server.extra["scores"].items():
        kept = torch.where(values > 0, server.extra["frozen"][name], 0)
        assert torch.equal(scored.weights[name], kept)
        assert torch.equal(scored.masks[name], values > 0)


def test_the_server_takes_the_frequency_of_the_bits(view):
    method = FedPM()
    server = start(method, small(), view, BUFFERS)
    frequency = {name: torch.full_like(value, 0.25) for name, value in server.extra["scores"].items()}
    frequency["net.3.bias"] = torch.tensor([1.0, 0.75, 0.0])
    mean = {name: torch.zeros_like(value) for name, value in server.weights.items()}
    merged = Merged(weights=mean, covered={n: torch.zeros_like(v).bool() for n, v in mean.items()})
    after = method.aggregate(server, replace(merged, extra={"bits": frequency}))
    assert after.extra["scores"]["net.3.bias"].sigmoid().tolist() == pytest.approx([0.99, 0.745, 0.01])
    frozen = server.extra["frozen"]["net.3.bias"]
    assert after.weights["net.3.bias"].tolist() == [frozen[0], frozen[1], 0.0]
    assert torch.equal(after.weights["net.1.weight"], server.weights["net.1.weight"])
    assert not after.weights["net.0.weight"].any()
    without = method.aggregate(server, merged)
    assert all(torch.equal(s, server.extra["scores"][n]) for n, s in without.extra["scores"].items())


def test_the_smallest_probability_is_an_option(view):
    method = FedPM(least=0.1)
    server = start(method, small(), view, BUFFERS)
    mean = {name: torch.zeros_like(value) for name, value in server.weights.items()}
    covered = {name: torch.zeros_like(value).bool() for name, value in mean.items()}
    bits = {"net.3.bias": torch.tensor([1.0, 0.75, 0.0])}
    after = method.aggregate(server, Merged(weights=mean, covered=covered, extra={"bits": bits}))
    assert after.extra["scores"]["net.3.bias"].sigmoid().tolist() == pytest.approx([0.9, 0.7, 0.1])


def test_a_turn_sends_one_bit_for_every_score(view, client):
    method = FedPM()
    server = start(method, small(), view, BUFFERS)
    message = method.download(server, view())
    someone, script = client({n: torch.full_like(v, 0.5) for n, v in server.weights.items()})

    def fit(client, weights, masks, trainable, callbacks, **options):
        (mask,) = callbacks
        assert isinstance(mask, StochasticMask)
        mask._theta = {name: torch.full_like(value, 40.0) for name, value in mask.scores.items()}
        mask._theta["net.3.bias"] = torch.tensor([40.0, -40.0, 0.0])
        mask._frozen = dict(server.extra["frozen"])
        return type(script).fit(script, client, weights, masks, trainable, callbacks)

    someone._worker = type("Bench", (), {"fit": staticmethod(fit)})
    update = method.train(message, someone)
    assert list(update.weights) == list(message.weights)
    assert update.weights["net.1.weight"].tolist() == [0.5, 0.5]  # as trained
    assert update.weight == 1
    assert update.metrics == {"train_loss": 0.5}
    assert all(bits.dtype == torch.bool for bits in update.extra["bits"].values())
    assert update.extra["bits"]["net.0.weight"].all()
    assert update.extra["bits"]["net.3.bias"][:2].tolist() == [True, False]
    frozen = server.extra["frozen"]["net.3.bias"]
    assert method.trained(message, update)["net.3.bias"].tolist() == [frozen[0], 0.0, 0.0]


def test_costs_are_four_bytes_for_a_score_on_the_way_down_and_a_bit_on_the_way_up(facts):
    message = Message({"norm": torch.ones(4)}, extra={"scores": {"w": torch.zeros(3, 4), "b": torch.zeros(3)}})
    costs = FedPM().costs(facts(message=message))
    assert (costs.bytes_down_paper, costs.bytes_up_paper) == (4 * (4 + 15), 4 * 4 + 2)


def test_bits_are_a_bit_on_the_wire(federation):
    """The upload of scores as bits, beside norms, buffers and headers."""
    trainer = federation(FedPM(), rounds=1, federation={"wire": "encode"})
    up = trainer.summary["comm/uplink_bytes_total"] / 4
    numbers = 8 * 16 + 16 + 16 * 4 + 4
    assert numbers / 8 + 4 * 64 <= up < numbers / 8 + 4 * 64 + 250
    assert trainer.summary["comm/downlink_bytes_total"] / 4 > 4 * numbers


def test_what_cannot_be_is_refused(fleet):
    for least in (0.0, 0.5):
        with pytest.raises(InvalidOption, match=rf"`algorithm.least` is {least}; expected a number in \(0, 0.5\)"):
            FedPM(least=least)
    with pytest.raises(InvalidOption, match="masks linear and convolutional layers, but `Module` has none"):
        FedPM().adapt(Module(nn.BatchNorm1d(3)))
    weights = {name: value.detach() for name, value in small().named_parameters()}
    with pytest.raises(InvalidOption, match="FedPM finds no signed constants among the first weights"):
        FedPM().init(weights, fleet())
