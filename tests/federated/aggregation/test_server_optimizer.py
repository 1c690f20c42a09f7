"""Server optimizers as an option of the federation: with every method, masks, ranks, resume, and bad values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.algorithms import each_kind, every_algorithm
from helpers.networks import module_for
from lightning_sparsefl import FedAvg, FedDIP, FedOpt
from lightning_sparsefl.errors import CheckpointMismatch, InvalidOption
from lightning_sparsefl.federated import ServerOptimizer
from lightning_sparsefl.federated.aggregation.server_optimizer import optimized, with_moments
from lightning_sparsefl.federated.exchange.plain_values import unpack_plain
from lightning_sparsefl.types import Merged, ServerState

YOGI = ServerOptimizer(rule="yogi", lr=0.02)
MEAN = ServerOptimizer(rule="momentum", lr=1, beta1=0)
"""The server takes the mean, as without an optimizer."""
SILENT = {"SpaFL"}
"""Methods whose clients send no parameters but something else to merge (FedPM's send those of norms, too)."""


def weights(trainer):
    return torch.load(trainer.run_folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def state(trainer):
    return torch.load(trainer.run_folder / "checkpoints" / "last.ckpt", weights_only=True)["sparsefl"]["state"]


def test_a_coordinate_without_voters_keeps_its_value_and_moments():
    old = torch.tensor([1.0, 2.0])
    server = ServerState(round=3, weights={"w": old}, extra={"server.m": {"w": torch.ones(2)}})
    covered = {"w": torch.tensor([True, False])}
    for kind, mean in (("weights", [3.0, 0.0]), ("difference", [2.0, 0.0])):
        merged = Merged(weights={"w": torch.tensor(mean)}, covered=covered, kind=kind)
        new, moments = optimized(ServerOptimizer(rule="momentum", beta1=0.5), server, merged, frozenset())
        assert moments["m"]["w"].tolist() == [2.5, 1.0]
        change = new.weights["w"] - (old if kind == "weights" else 0)
        assert change.tolist() == [2.5, 0.0]


def test_a_round_of_adam_from_the_first_moments():
    server = ServerState(round=0, weights={"w": torch.zeros(1), "mean": torch.zeros(1)})
    merged = Merged(weights={"w": torch.ones(1), "mean": torch.full((1,), 5.0)}, covered={})
    new, moments = optimized(ServerOptimizer(), server, merged, {"mean"})
    assert float(new.weights["w"]) == pytest.approx(0.1 * 0.1 / ((0.99e-6 + 0.01) ** 0.5 + 1e-3), rel=1e-6)
    assert float(new.weights["mean"]) == 5.0
    assert {key: list(tree) for key, tree in moments.items()} == {"m": ["w"], "v": ["w"]}


@pytest.mark.parametrize("rule", ["momentum", "adagrad", "adam", "yogi", "adamw"])
def test_a_parameter_that_the_round_does_not_change_does_not_decay(rule):
    weights = {"frozen": torch.tensor([2.0, 4.0]), "w": torch.tensor([2.0, 4.0])}
    server = ServerState(round=0, weights=weights)
    merged = Merged(weights={**weights, "w": torch.tensor([2.0, 5.0])}, covered={})
    new, _ = optimized(ServerOptimizer(rule=rule, lr=0.5, weight_decay=0.1), server, merged, frozenset())
    assert torch.equal(new.weights["frozen"], weights["frozen"])
    assert float(new.weights["w"][0]) == pytest.approx(2.0 - 0.5 * 0.1 * 2.0)


def test_a_parameter_decays_while_former_changes_move_it():
    weights = {"w": torch.tensor([2.0, 4.0])}
    server = ServerState(round=1, weights=weights, extra={"server.m": {"w": torch.tensor([1.0, 0.0])}})
    optimizer = ServerOptimizer(rule="momentum", lr=0.5, beta1=0.8, weight_decay=0.1)
    new, _ = optimized(optimizer, server, Merged(weights=weights, covered={}), frozenset())
    assert new.weights["w"].tolist() == pytest.approx([2.0 * 0.95 + 0.5 * 0.8, 4.0 * 0.95])


def test_a_coordinate_without_voters_is_no_change():
    old = torch.tensor([2.0, 4.0])
    merged = Merged(weights={"w": torch.tensor([2.0, 0.0])}, covered={"w": torch.tensor([True, False])})
    optimizer = ServerOptimizer(rule="momentum", lr=0.5, weight_decay=0.1)
    new, _ = optimized(optimizer, ServerState(round=0, weights={"w": old}), merged, frozenset())
    assert torch.equal(new.weights["w"], old)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["weights", "difference"])
def test_adamw_steps_of_narrow_weights_are_computed_in_float32(dtype, kind):
    optimizer, old = ServerOptimizer(rule="adamw", weight_decay=0.0), torch.zeros(3, dtype=dtype)
    server = ServerState(round=0, weights={"w": old})
    mean = torch.tensor([0.0, 1e-3, -1.0], dtype=dtype)
    new, moments = optimized(optimizer, server, Merged(weights={"w": mean}, covered={}, kind=kind), frozenset())
    assert new.weights["w"].dtype == dtype
    assert new.weights["w"].tolist() == pytest.approx([0.0, 1e-3, -1e-3], rel=0.01)
    assert {tree["w"].dtype for tree in moments.values()} == {torch.float32}


def test_moments_of_weights_that_the_masks_drop_start_again():
    server = ServerState(round=1, weights={"w": torch.zeros(2)}, masks={"w": torch.tensor([True, False])})
    moments = {"m": {"w": torch.ones(2), "b": torch.ones(1)}, "v": {"w": torch.ones(2), "b": torch.ones(1)}}
    extra = with_moments(ServerOptimizer(tau=0.5), replace(server, extra={"plan": {}}), moments).extra
    assert extra["plan"] == {}
    assert extra["server.m"]["w"].tolist() == [1.0, 0.0]
    assert extra["server.v"]["w"].tolist() == [1.0, 0.25]
    assert (float(extra["server.m"]["b"]), float(extra["server.v"]["b"])) == (1.0, 1.0)


LATE = torch.tensor([True, True, False])


def adamw_after(rounds, covered, masks=None):
    """The state after rounds of the change 1 in all covered coordinates, and the step of a last one that covers all."""
    optimizer = ServerOptimizer(rule="adamw", weight_decay=0.0)
    server = ServerState(round=0, weights={"w": torch.zeros(3)}, masks=masks or {})
    mean = {"w": torch.ones(3)}
    for round in range(rounds):
        _, moments = optimized(optimizer, server, Merged(mean, covered, "difference"), frozenset())
        server = replace(with_moments(optimizer, server, moments), round=round + 1)
    return server, optimized(optimizer, server, Merged(mean, {}, "difference"), frozenset())[0].weights["w"]


@pytest.mark.parametrize("rounds", [1, 10, 500])
def test_the_first_step_of_adamw_is_as_long_in_any_round(rounds):
    for server, step in (adamw_after(rounds, {"w": LATE}), adamw_after(rounds, {}, {"w": LATE})):
        assert step.tolist() == pytest.approx([1e-3] * 3, rel=1e-4)
        assert server.extra["server.t"]["w"].tolist() == [rounds, rounds, 0]


def test_adamw_has_no_counts_while_all_coordinates_have_votes():
    for covered in ({}, {"w": torch.ones(3, dtype=torch.bool)}):
        server, _ = adamw_after(3, covered)
        assert set(server.extra) == {"server.m", "server.v"}
    optimizer, merged = ServerOptimizer(rule="adamw"), Merged({"w": torch.ones(3)}, {"w": LATE}, "difference")
    _, moments = optimized(optimizer, server, merged, frozenset())
    assert moments["t"]["w"].tolist() == [4, 4, 3]


@pytest.mark.slow_after_first
@each_kind
def test_momentum_0_and_rate_1_change_no_method(algorithm, federation):
    options = {"rounds": 2, "precision": "64-true"}
    plain = federation(algorithm, **options, folder="plain")
    ours = federation(algorithm, **options, folder="ours", federation={"server_optimizer": MEAN})
    for name, value in weights(plain).items():
        assert torch.allclose(weights(ours)[name].double(), value.double(), rtol=0, atol=1e-6), name


@pytest.mark.slow_after_first
@every_algorithm
def test_every_method_runs_with_yogi(algorithm, federation):
    if algorithm.has_server_optimizer:
        with pytest.raises(InvalidOption, match=f"{type(algorithm).__name__} has an optimizer of the server among"):
            federation(algorithm, federation={"server_optimizer": YOGI})
        return
    if algorithm.needs_exact_mean:
        with pytest.raises(
            InvalidOption, match=f"but {type(algorithm).__name__} {algorithm.needs_exact_mean}; expected"
        ):
            federation(algorithm, federation={"server_optimizer": YOGI})
        return
    plain = federation(algorithm, rounds=2, folder="plain")
    ours = federation(algorithm, rounds=2, folder="ours", federation={"server_optimizer": YOGI})
    moved = any(bool(moment.any()) for moment in state(ours)["extra"]["server.m"].values())
    assert moved != (type(algorithm).__name__ in SILENT)
    assert moved != all(torch.equal(weights(ours)[name], value) for name, value in weights(plain).items())
    assert all(bool(torch.isfinite(value).all()) for value in weights(ours).values())
    names = dict(module_for(algorithm)().named_parameters())
    assert set(state(ours)["extra"]["server.m"]) == set(state(ours)["extra"]["server.v"]) == set(names)


def test_the_option_is_fedopt(federation):
    option = federation(FedAvg(), folder="option", federation={"server_optimizer": YOGI})
    method = federation(FedOpt(rule="yogi", lr=0.02), folder="method")
    assert all(torch.equal(weights(option)[name], value) for name, value in weights(method).items())


def test_masked_methods_keep_their_masks(federation):
    run = federation(FedDIP(density=0.3, reconfigure_every=1), federation={"server_optimizer": YOGI})
    held = unpack_plain(state(run)["masks"], torch.device("cpu"))
    assert held
    for name, mask in held.items():
        assert not weights(run)[name][~mask].any()
        assert not state(run)["extra"]["server.m"][name][~mask].any()


def test_ranks_and_a_resumed_run_give_the_bytes_of_one(federation, last):
    option = {"federation": {"server_optimizer": YOGI}}
    one = federation(FedAvg(), **option, folder="one")
    assert last(federation(FedAvg(), **option, folder="two", devices=2)) == last(one)
    federation(FedAvg(), **option, folder="resumed", rounds=1)
    assert (
        last(federation(FedAvg(), **option, folder="resumed", ckpt_path="last"))["sparsefl"]["state"]
        == (last(one)["sparsefl"]["state"])
    )


def test_a_run_goes_on_with_the_optimizer_it_had(federation):
    federation(FedAvg(), rounds=1, max_epochs=1, federation={"server_optimizer": YOGI})
    with pytest.raises(CheckpointMismatch, match=r"`federation\.server_optimizer` was"):
        federation(FedAvg(), rounds=2, max_epochs=1, ckpt_path="last")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rule": "sgd"}, "`federation.server_optimizer.rule` is 'sgd'; expected one of"),
        ({"lr": -1.0}, "`federation.server_optimizer.lr` is -1.0; expected a number above 0, or null"),
        ({"lr": 0.0}, "`federation.server_optimizer.lr` is 0.0; expected a number above 0, or null"),
        ({"beta2": 1.0}, r"`federation.server_optimizer.beta2` is 1.0; expected a number in \[0, 1\), or null"),
        ({"tau": 0.0}, "`federation.server_optimizer.tau` is 0.0; expected a number above 0, or null"),
        ({"weight_decay": -1.0}, "`federation.server_optimizer.weight_decay` is -1.0; expected a number >= 0"),
        ({"beta1": "0.9"}, "`federation.server_optimizer.beta1` is '0.9'; expected a number or null"),
    ],
    ids=str,
)
def test_an_option_out_of_range_is_refused(options, said):
    with pytest.raises(InvalidOption, match=said):
        ServerOptimizer(**options)


def test_factors_of_zero_are_options():
    assert ServerOptimizer(beta1=0.0, beta2=0.0, weight_decay=0.0).beta2 == 0
