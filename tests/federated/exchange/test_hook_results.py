"""A hook that returns something else is named by the error message, instead of a line of the engine."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from lightning.pytorch import Callback

from helpers.networks import Classifier
from lightning_sparsefl import FedAvg, FederatedAlgorithm
from lightning_sparsefl.cost import Devices
from lightning_sparsefl.errors import InvalidOption, SparseFLError
from lightning_sparsefl.federated import ServerOptimizer
from lightning_sparsefl.types import Costs, Message, ServerState

DEFAULT = FederatedAlgorithm


def nothing(*_):
    return None


def unknown(self, server, view):
    return Message(weights={"foo": torch.zeros(2)})


def scalars(self, server, view):
    return Message(weights={name: torch.ones(()) for name in server.weights})


def no_mapping(*_):
    return 3


BAD = [
    ("init", nothing, r"`Mine\.init` returned None; expected a `ServerState`, so add a `return`\."),
    ("download", nothing, r"`Mine\.download` returned None; expected a `Message`"),
    ("download", unknown, r"The message from `Mine\.download` holds 'foo', which the model does not have"),
    ("download", scalars, r"The message from `Mine\.download` holds .* with shape \(\); expected"),
    (
        "download",
        lambda self, server, view: Message(weights={n: w.half() for n, w in server.weights.items()}),
        r"The message from `Mine\.download` holds 'net\.0\.weight' as torch\.float16; expected torch\.float32\.",
    ),
    (
        "init",
        lambda self, weights, fleet: ServerState(0, {name: weight.double() for name, weight in weights.items()}),
        r"The state from `Mine\.init` holds 'net\.0\.weight' as torch\.float64; expected torch\.float32\.",
    ),
    (
        "aggregate",
        lambda self, server, merged: replace(server, weights={n: w.double() for n, w in merged.weights.items()}),
        r"The state from `Mine\.aggregate` holds 'net\.0\.weight' as torch\.float64; expected torch\.float32\.",
    ),
    (
        "init",
        lambda self, weights, fleet: ServerState(0, weights, masks={n: torch.ones_like(w) for n, w in weights.items()}),
        r"The state from `Mine\.init`, among its masks, holds .* as torch\.float32; expected torch\.bool\.",
    ),
    (
        "personalize",
        lambda self, message, client: {name: weight.double() for name, weight in message.weights.items()},
        r"The tree from `Mine\.personalize` holds 'net\.0\.weight' as torch\.float64; expected torch\.float32\.",
    ),
    ("download_for", nothing, r"`Mine\.download_for` returned None; expected a `Message`"),
    ("train", lambda self, message, client: client.fit(message.weights), r"`Mine\.train` returned a `FitResult`"),
    (
        "train",
        lambda self, message, client: client.fit({"foo": torch.ones(1)}),
        "A tree that is loaded into the module holds 'foo'",
    ),
    (
        "train",
        lambda self, message, client: replace(DEFAULT.train(self, message, client), shared=torch.ones(1)),
        r"has a `Tensor` as `shared`; expected a mapping",
    ),
    (
        "train",
        lambda self, message, client: replace(DEFAULT.train(self, message, client), extra={"a": torch.ones(1)}),
        r"has a `Tensor` as `extra\['a'\]`; expected a mapping",
    ),
    ("callbacks", lambda *_: Callback(), "`callbacks` of `client.fit` are .*; expected a list of Lightning"),
    ("callbacks", lambda *_: [Callback], "`callbacks` of `client.fit` are .*; expected a list of Lightning"),
    ("reducer", nothing, r"`Mine\.reducer` returned None; expected a `Reducer`"),
    (
        "aggregate",
        lambda self, server, merged: merged.weights,
        r"`Mine\.aggregate` returned .*expected a `ServerState`",
    ),
    (
        "aggregate",
        lambda self, server, merged: ServerState(server.round, {}),
        r"The state from `Mine\.aggregate` lacks the weights 'net\.0\.weight'; expected all tensors",
    ),
    (
        "init",
        lambda self, weights, fleet: ServerState(0, weights, extra={"v": torch.ones(2)}),
        r"The state from `Mine\.init` has a `Tensor` as `extra\['v'\]`; expected a tree of tensors",
    ),
    (
        "download",
        lambda self, server, view: Message(weights=server.weights, extra={"v": {"a": 1.0}}),
        r"The message from `Mine\.download` has a `float` as `extra\['v'\]\['a'\]`; expected a dense tensor",
    ),
    (
        "init",
        lambda self, weights, fleet: ServerState(0, weights, extra={"server.m": {"a": torch.ones(2)}}),
        r"`Mine\.init` has `extra\['server\.m'\]`, but names with `server\.` are those of the moments",
    ),
    (
        "init",
        lambda self, weights, fleet: ServerState(0, weights, masks={name: torch.ones(1) for name in weights}),
        r"The state from `Mine\.init`, among its masks, holds .* with shape \(1,\); expected",
    ),
    (
        "aggregate",
        lambda self, server, merged: ServerState(server.round, merged.weights, masks=None),
        r"The state from `Mine\.aggregate` has a `NoneType` as `masks`; expected a tree of tensors",
    ),
    (
        "aggregate",
        lambda self, server, merged: ServerState(server.round, {n: w / 0 for n, w in merged.weights.items()}),
        r"The state from `Mine\.aggregate` has weights 'net\.0\.weight' that are not finite; expected finite ones",
    ),
    (
        "aggregate",
        lambda self, server, merged: ServerState(
            server.round, merged.weights, extra={"v": {"n": torch.ones(1, dtype=torch.int64), "a": torch.zeros(2) / 0}}
        ),
        r"`Mine\.aggregate` has NaN in `extra\['v'\]\['a'\]`; expected numbers, also .* 0\. The round before is comm",
    ),
    (
        "aggregate",
        lambda self, server, merged: ServerState(
            server.round, merged.weights, extra={"v": {"a": torch.eye(2).to_sparse()}}
        ),
        r"has a `Tensor` as `extra\['v'\]\['a'\]`; expected a dense tensor",
    ),
    (
        "download",
        lambda self, server, view: Message(weights=None),
        r"The message from `Mine\.download` has a `NoneType` as `weights`; expected a tree of tensors",
    ),
    (
        "download",
        lambda self, server, view: Message(weights=server.weights, extra=[1]),
        r"The message from `Mine\.download` has a `list` as `extra`; expected a mapping from names to trees",
    ),
    (
        "download",
        lambda self, server, view: Message(
            weights=server.weights,
            trainable={n: torch.zeros_like(w, dtype=torch.bool) for n, w in server.weights.items()},
        ),
        r"The masks of trainable weights of client \d are False everywhere; expected one to train",
    ),
    ("costs", nothing, r"`Mine\.costs` returned None; expected a `Costs`"),
    (
        "costs",
        lambda *_: Costs(1.0, math.inf, 1.0, 1.0),
        r"`Mine\.costs` returned inf as `flops_analytic`; expected a finite number >= 0\.",
    ),
    ("costs", lambda *_: Costs(1.0, 1.0, -5, 1.0), r"`Mine\.costs` returned -5 as `bytes_down_paper`; expected a fini"),
    ("costs", lambda *_: Costs("1", 1.0, 1.0, 1.0), r"`Mine\.costs` returned '1' as `flops_paper`; expected a finite"),
    ("simulated_seconds", lambda *_: math.nan, r"`Mine\.simulated_seconds` returned nan for client \d; expected a"),
    ("simulated_seconds", lambda *_: -1.0, r"`Mine\.simulated_seconds` returned -1\.0 for client \d; expected"),
    ("simulated_seconds", lambda *_: "1", r"`Mine\.simulated_seconds` returned '1' for client \d; expected a finite"),
    (
        "train",
        lambda self, message, client: replace(DEFAULT.train(self, message, client), votes=[1]),
        r"has a `list` as `votes`; expected a mapping",
    ),
    (
        "train",
        lambda self, message, client: replace(DEFAULT.train(self, message, client), metrics={3: 1.0}),
        r"The update of client \d from `Mine\.train` has the metric 3; expected a name",
    ),
    (
        "train",
        lambda self, message, client: replace(DEFAULT.train(self, message, client), memory={(1, 2): 1.0}),
        r"`Mine\.train` has in `memory` the key \(1, 2\); expected keys that are strings",
    ),
    ("observe", no_mapping, r"`Mine\.observe` returned an `int`; expected a `Mapping` or None"),
    ("weights_to_step", nothing, r"`Mine\.weights_to_step` returned None; expected a `Mapping`"),
    ("weights_to_step", lambda *_: {}, r"The tree from `Mine\.weights_to_step` lacks the weights 'net\.0\.weight'"),
    ("alike", lambda *_: [1], r"`Mine\.alike` returned \[1\]; expected a hashable value, such as a number"),
    (
        "observe",
        lambda *_: {"x": object()},
        r"`Mine\.observe\(\)\['x'\]` holds a `object`; expected numbers, strings, None",
    ),
    (
        "observe",
        lambda *_: {"masks": {"net.0.weight": 1}},
        r"The record from `Mine\.observe` holds `masks` with 'net\.0\.weight', which is not a bool mask",
    ),
    (
        "download",
        lambda self, server, view: Message(server.weights, masks={n: w * 0 for n, w in server.weights.items()}),
        r"The message from `Mine\.download`, in `masks`, holds .* as torch\.float32; expected torch\.bool\.",
    ),
    (
        "download",
        lambda self, server, view: Message(server.weights, trainable={n: w[:1] > 0 for n, w in server.weights.items()}),
        r"The message from `Mine\.download`, in `trainable`, holds .* with shape \(1, 8\); expected",
    ),
    ("may_vote", nothing, r"`Mine\.may_vote` returned None; expected a `Mapping`, so add a `return`"),
    (
        "may_vote",
        lambda self, message: {name: torch.ones_like(w) for name, w in message.weights.items()},
        r"The tree from `Mine\.may_vote` holds 'net\.0\.weight' as torch\.float32; expected torch\.bool\.",
    ),
    (
        "init",
        lambda self, weights, fleet: fleet.survey(Message(weights={"foo": torch.ones(2)})),
        r"The message from `Mine\.init` holds 'foo', which the model does not have",
    ),
    ("trained", nothing, r"`Mine\.trained` returned None; expected a `Mapping`"),
    ("trained", lambda *_: {"foo": torch.ones(2)}, r"The tree from `Mine\.trained` holds 'foo', which the model does"),
    ("finetune", lambda *_: {"foo": torch.ones(2)}, r"The tree from `Mine\.finetune` holds 'foo', which the model do"),
    ("personalize", lambda *_: {"net.0.weight": 1.0}, r"from `Mine\.personalize` has a `float` as 'net\.0\.weight'; e"),
    ("personalize", nothing, r"`Mine\.personalize` returned None; expected a `Mapping`"),
    (
        "personalize",
        lambda self, message, client: {name: torch.ones(()) for name in message.weights},
        r"The tree from `Mine\.personalize` holds .* with shape \(\); expected",
    ),
    ("finetune", no_mapping, r"`Mine\.finetune` returned an `int`; expected a `Mapping` or None"),
]


OPTIONS = {
    "weights_to_step": {"server_optimizer": ServerOptimizer()},
    "alike": {"local_engine": "stacked"},
    "trained": {"eval_after_training": True},
}
"""What makes the engine call a hook."""


class Causal(Classifier):
    """Has a mask of attention among the buffers of its state."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))


def test_a_buffer_that_cannot_be_merged_is_named_with_the_remedy(federation):
    message = r"`FedAvg\.init` has the buffer 'mask' with values that are not finite; .*, or `persistent=False`, since"
    with pytest.raises(InvalidOption, match=message):
        federation(FedAvg(), rounds=1, module=Causal())


@pytest.mark.parametrize(("name", "hook", "message"), BAD)
def test_the_hook_is_named(federation, name, hook, message):
    method = dataclass(frozen=True, kw_only=True)(type("Mine", (FederatedAlgorithm,), {name: hook}))
    with pytest.raises(SparseFLError, match=message):
        federation(method(), rounds=1, federation=OPTIONS.get(name, {}))


@pytest.mark.parametrize(
    ("name", "hook", "message"),
    [
        ("equal_costs", lambda *_: {}, r"`Mine\.equal_costs` returned \{\}; expected a hashable value"),
        ("profile_state", nothing, r"`Mine\.profile_state` returned None; expected a `ServerState`"),
        ("costs", lambda *_: Costs(1, -1, 1, 1), r"`Mine\.costs` returned -1 as `flops_analytic`; expected a finite"),
    ],
)
def test_the_hook_is_named_by_profile(federation, name, hook, message):
    method = dataclass(frozen=True, kw_only=True)(type("Mine", (FederatedAlgorithm,), {name: hook}))
    with pytest.raises(SparseFLError, match=message):
        federation(method(), verb="profile", quiet=True)


@pytest.mark.parametrize(
    ("hook", "result", "message"),
    [
        ("seconds", None, r"`Mine\.seconds` returned None for client \d; expected a finite number >= 0\."),
        ("seconds", math.nan, r"`Mine\.seconds` returned nan for client \d; expected a finite number >= 0\."),
        ("seconds", -3.0, r"`Mine\.seconds` returned -3\.0 for client \d; expected a finite number >= 0\."),
        ("capacity", 2.0, r"`Mine\.capacity` returned 2\.0 for client \d; expected a number in \(0, 1\]\."),
        ("capacity", 0, r"`Mine\.capacity` returned 0 for client \d; expected a number in \(0, 1\]\."),
        ("capacity", "1", r"`Mine\.capacity` returned '1' for client \d; expected a number in \(0, 1\]\."),
    ],
)
def test_the_hook_of_devices_is_named(federation, hook, result, message):
    devices = type("Mine", (Devices,), {hook: lambda *_, **__: result})()
    with pytest.raises(SparseFLError, match=message):
        federation(FedAvg(), rounds=1, federation={"devices": devices})


def test_a_class_in_place_of_a_method(federation):
    with pytest.raises(SparseFLError, match=r"the class `FederatedAlgorithm`; .* such as `FederatedAlgorithm\(\)`"):
        federation(FederatedAlgorithm, rounds=1)
