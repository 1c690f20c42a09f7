"""The cheap checks of an update against slow ones, which look at it number by number."""

import math

import torch

from lightning_sparsefl.errors import InvalidUpdate
from lightning_sparsefl.federated.exchange.flat import Layout
from lightning_sparsefl.federated.exchange.update_checks import check_update_schema, non_finite_reason
from lightning_sparsefl.types import Message, Update

WEIGHTS = {"a": torch.ones(3, 2), "b": torch.ones(4)}


def numbers(value):
    """All floats in the float tensors of nested values."""
    if hasattr(value, "is_floating_point"):
        return value.flatten().tolist() if value.is_floating_point() else []
    if isinstance(value, dict):
        return [number for item in value.values() for number in numbers(item)]
    if isinstance(value, list | tuple):
        return [number for item in value for number in numbers(item)]
    return []


def all_can_be_summed(update):
    """Whether every number that the server would see is finite and at most 2^64."""
    seen = (update.weights, update.extra, update.shared)
    return all(math.isfinite(number) and abs(number) <= 2.0**64 for part in seen for number in numbers(part))


def within(votes, allowed, weights):
    """Whether every vote that is cast is allowed; a missing name is True everywhere."""
    for name, tensor in weights.items():
        for place in range(tensor.numel()):
            vote = bool(votes[name].flatten()[place]) if name in votes else True
            may = bool(allowed[name].flatten()[place]) if name in allowed else True
            if vote and not may:
                return False
    return True


def test_the_sum_tells_what_the_single_numbers_tell():
    rng = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(300):
        dtype = [torch.float32, torch.float16, torch.float64][int(torch.randint(3, (), generator=rng))]
        large = min(torch.finfo(dtype).max, 2.0**64)  # sums of float16 overflow, and are fine
        values = torch.tensor([0.0, 1.0, large, -large, 2.0**65, float("inf"), -float("inf"), float("nan")])
        chances = torch.tensor([9.0, 9.0, 9.0, 9.0, 0.2, 0.2, 0.2, 0.2])
        drawn = values[torch.multinomial(chances, 8, True, generator=rng)].to(dtype)
        update = Update(
            weights={"a": drawn[:3], "b": drawn[3:5]}, extra={"e": {"a": drawn[5:]}}, shared={"n": drawn[:1]}
        )
        assert (non_finite_reason(update) is None) == all_can_be_summed(update)
        seen.add(non_finite_reason(update) is None)
    assert seen == {True, False}


def test_votes_are_compared_as_slowly_as_can_be():
    rng = torch.Generator().manual_seed(0)
    seen = set()

    def some_masks(share):
        masks = {n: torch.rand(w.shape, generator=rng) < share for n, w in WEIGHTS.items()}
        return {n: m for n, m in masks.items() if torch.rand((), generator=rng) < 0.7}

    for _ in range(300):
        message, votes = Message(weights=WEIGHTS, masks=some_masks(0.95)), some_masks(0.5)
        try:
            check_update_schema(
                Update(weights=WEIGHTS, votes=votes), message, Layout(WEIGHTS, {}), lambda m: m.masks, "It"
            )
            passes = True
        except InvalidUpdate:
            passes = False
        assert passes == within(votes, message.masks, WEIGHTS)
        seen.add(passes)
    assert seen == {True, False}
