import pytest
import torch

from lightning_sparsefl import FedAvg
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated import ExponentialRoundLR, RoundLR, StepRoundLR
from lightning_sparsefl.federated.local.round_lr import ScaleLearningRates


class Config:
    def __init__(self, scheduler):
        self.scheduler = scheduler


class FakeTrainer:
    def __init__(self, optimizer, scheduler):
        self.optimizers, self.lr_scheduler_configs = [optimizer], [Config(scheduler)]


def test_rates_of_optimizer_and_scheduler_are_scaled():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    ScaleLearningRates(0.25).on_fit_start(FakeTrainer(optimizer, scheduler), None)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_the_rate_that_swa_anneals_to_is_scaled_too():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.2, anneal_epochs=1)
    ScaleLearningRates(0.25).on_fit_start(FakeTrainer(optimizer, scheduler), None)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_factors():
    assert ExponentialRoundLR(gamma=0.998).factor(3, 10) == pytest.approx(0.998**3)
    assert [StepRoundLR().factor(r, 100) for r in (0, 49, 50, 75)] == pytest.approx([1, 1, 0.1, 0.01])
    late = StepRoundLR(milestones=[0.55])  # 0.55 * 100 is 55.00000000000001
    assert [late.factor(r, 100) for r in (54, 55)] == pytest.approx([1, 0.1])


@pytest.mark.parametrize("factor", [None, float("nan"), float("inf"), -1.0, "0.5"])
def test_a_schedule_without_a_factor_for_the_round_is_named_before_clients_train(federation, factor):
    schedule = type("Mine", (RoundLR,), {"factor": lambda self, round, most: factor if round else 1.0})()
    words = rf"^`Mine\.factor` returned {factor!r} for round 1; expected a finite number >= 0\.$"
    with pytest.raises(InvalidOption, match=words):
        federation(FedAvg(), rounds=2, round_lr=schedule, federation={"on_client_error": "skip"})


def test_an_error_of_a_schedule_is_no_failure_of_a_client(federation):
    schedule = type("Mine", (RoundLR,), {"factor": lambda self, round, most: 1 / round})()
    with pytest.raises(ZeroDivisionError):
        federation(FedAvg(), rounds=1, round_lr=schedule)


def test_a_factor_that_grows_is_refused():
    with pytest.raises(InvalidOption, match=r"`trainer\.round_lr\.gamma` is 1\.5; expected a number in \(0, 1\]"):
        ExponentialRoundLR(gamma=1.5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gamma": 0}, r"`trainer.round_lr.gamma` is 0; expected a number above 0"),
        ({"milestones": [0.5, 2]}, r"`trainer.round_lr.milestones` is \[0.5, 2\]; expected fractions of the run"),
        ({"milestones": ["x"]}, r"`trainer.round_lr.milestones` is \['x'\]"),
    ],
    ids=["gamma", "beyond the run", "text"],
)
def test_steps_out_of_range_are_refused(options, said):
    with pytest.raises(InvalidOption, match=said):
        StepRoundLR(**options)
