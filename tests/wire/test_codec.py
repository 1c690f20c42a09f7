from __future__ import annotations

import random

import pytest
import torch

from lightning_sparsefl.errors import IncompatibleMasks, InvalidOption, MalformedPayload
from lightning_sparsefl.sparse.masks import apply, intersect
from lightning_sparsefl.types import Message, Update
from lightning_sparsefl.wire import Codec, Size
from lightning_sparsefl.wire.dense import DTYPES

SCHEMA = {
    "conv.weight": torch.zeros(4, 3, 3, 3),
    "conv.bias": torch.zeros(4),
    "norm.running_mean": torch.zeros(4),
    "scale": torch.zeros(()),
    "half": torch.zeros(5, 7, dtype=torch.float16),
    "brain": torch.zeros(33, dtype=torch.bfloat16),
    "double": torch.zeros(2, 9, dtype=torch.float64),
    "steps": torch.zeros((), dtype=torch.int64),
    "empty": torch.zeros(0, 3),
    "large": torch.zeros(40, 50),
}
CODEC = Codec(SCHEMA)
STRANGERS = ["extra.weight", "z", "other scale"]


def test_an_expanded_scalar_is_taken():
    codec, scale = Codec({"scale": torch.zeros(1)}), torch.tensor(2.0).expand(1)
    message = Message(weights={"scale": scale}, extra={"tree": {"other": scale}})
    decoded = codec.decode_message(codec.encode_message(message))
    assert decoded.weights["scale"].tolist() == decoded.extra["tree"]["other"].tolist() == [2.0]


class Draw:
    """Messages and updates of every kind, from one seed."""

    def __init__(self, seed: int) -> None:
        self.pick = random.Random(seed)
        self.rng = torch.Generator().manual_seed(seed)

    def chance(self, p=0.5):
        return self.pick.random() < p

    def tensor(self, shape, dtype, density=None):
        density = self.pick.choice([0.0, 0.01, 0.3, 1.0, 1.0]) if density is None else density
        values = torch.randn(shape, generator=self.rng) * 20
        return (values * (torch.rand(shape, generator=self.rng) < density)).to(dtype)

    def shape(self):
        return tuple(self.pick.choice([0, 1, 2, 3, 17]) for _ in range(self.pick.randrange(4)))

    def mask(self, shape):
        density = self.pick.choice([0.0, 0.003, 0.1, 0.5, 0.9, 0.997, 1.0])
        return torch.rand(shape, generator=self.rng) < density

    def weights(self):
        if self.chance(0.3):
            return {name: self.tensor(value.shape, value.dtype) for name, value in SCHEMA.items()}
        names = [name for name in SCHEMA if self.chance(0.7)]
        self.pick.shuffle(names)
        tree = {name: self.tensor(SCHEMA[name].shape, SCHEMA[name].dtype) for name in names}
        for name in names:
            if self.chance(0.1):
                tree[name] = self.tensor(self.shape(), self.pick.choice(DTYPES))
        return tree | {
            name: self.tensor(self.shape(), self.pick.choice(DTYPES)) for name in STRANGERS if self.chance(0.3)
        }

    def masks(self, weights, near=None):
        shapes = {name: value.shape for name, value in (SCHEMA | dict(weights)).items()}
        names = [name for name in shapes if self.chance(0.5)]
        self.pick.shuffle(names)
        masks = {name: self.mask(shapes[name]) for name in names}
        for name in names:
            if near and name in near and near[name].shape == shapes[name]:
                how = self.pick.randrange(4)
                if how == 0:
                    masks[name] = near[name]
                elif how == 1:
                    masks[name] = near[name].clone()
                elif how == 2:
                    masks[name] = near[name] ^ (torch.rand(shapes[name], generator=self.rng) < 0.01)
        return masks

    def known(self, masks):
        return self.pick.choice([None, {}, masks, dict(masks), self.masks({}), self.masks({}, masks)])

    def extra(self):
        return {name: self.weights() for name in ("control", "momentum") if self.chance(0.4)}

    def value(self, masks, depth=0):
        kinds = 10 if depth < 3 else 7
        match self.pick.randrange(kinds):
            case 0:
                return None
            case 1:
                return self.chance()
            case 2:
                return self.pick.choice([0, -1, 2**40, -(2**70), self.pick.randrange(1000)])
            case 3:
                return self.pick.choice([0.0, -1.5, 1e300, float("inf")])
            case 4:
                return self.pick.choice(["", "word", "\u00e9\U0001f600"])
            case 5:
                return self.tensor(self.shape(), self.pick.choice(DTYPES))
            case 6:
                return self.masks({}, masks)
            case 7:
                return [self.value(masks, depth + 1) for _ in range(self.pick.randrange(3))]
            case 8:
                return tuple(self.value(masks, depth + 1) for _ in range(self.pick.randrange(3)))
        names = self.pick.sample([*SCHEMA, "arms", "q", ""], self.pick.randrange(4))
        return {name: self.value(masks, depth + 1) for name in names}

    def message(self):
        weights = self.weights()
        masks = self.masks(weights) if self.chance(0.8) else {}
        trainable = self.masks(weights, masks) if self.chance(0.4) else {}
        return Message(weights=weights, masks=masks, trainable=trainable, extra=self.extra())

    def update(self, message):
        weights = {name: value for name, value in message.weights.items() if self.chance(0.9)}
        default = intersect(message.trainable, message.masks)
        return Update(
            weights=weights,
            kind=self.pick.choice(["weights", "difference"]),
            weight=self.pick.choice([1, 500, 2**62]),
            votes=self.pick.choice([None, {}, default, self.masks(weights, default)]),
            extra=self.extra(),
            shared=self.pick.choice(
                [None, {}, {"masks": self.masks(weights, message.masks), "x": self.value(message.masks)}]
            ),
            memory={"secret": object()},
            metrics={"loss": 0.5, "acc": self.pick.random()} if self.chance() else {},
        )


def equal(a, b):
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("seed", range(150))
def test_what_arrives_is_what_was_sent_and_weighs_what_was_said(seed):
    draw = Draw(seed)
    message = draw.message()
    known = draw.known(message.masks)
    payload = CODEC.encode_message(message, known)
    size = CODEC.message_size(message, known)
    assert size.total == len(payload)
    assert 0 <= size.masks <= size.total
    arrived = CODEC.decode_message(payload, known)
    assert equal(arrived.weights, apply(message.weights, message.masks))
    assert equal(arrived.masks, message.masks)
    assert equal(arrived.trainable, message.trainable)
    assert equal(arrived.extra, message.extra)

    update = draw.update(message)
    payload = CODEC.encode_update(update, message)
    assert CODEC.update_size(update, message).total == len(payload)
    back = CODEC.decode_update(payload, message)
    votes = intersect(message.trainable, message.masks) if update.votes is None else update.votes
    assert equal(back.weights, apply(update.weights, votes))
    assert (back.votes is None) == (update.votes is None)
    assert back.votes is None or equal(back.votes, update.votes)
    assert equal(back.extra, update.extra)
    assert equal(back.shared, update.shared)
    assert (back.kind, back.weight, back.metrics) == (update.kind, update.weight, update.metrics)
    assert back.memory is None


@pytest.mark.parametrize("name", ["large", "scores"])
def test_bools_in_extra_take_at_most_one_bit_per_coordinate(name):
    for seed in range(20):
        rng = torch.Generator().manual_seed(seed)
        bits = torch.rand(40, 50, generator=rng) < 0.5
        sizes = {}
        for key, tree in {"empty": {name: bits[:0]}, "full": {name: bits}}.items():
            update = Update(weights={}, extra={"core": tree})
            payload = CODEC.encode_update(update, Message(weights=SCHEMA))
            sizes[key] = CODEC.update_size(update, Message(weights=SCHEMA)).total
            assert sizes[key] == len(payload)
            assert equal(CODEC.decode_update(payload, Message(weights=SCHEMA)).extra, update.extra)
        assert sizes["full"] <= sizes["empty"] + -(-bits.numel() // 8) + 3


def test_updates_can_be_coded_by_who_decoded_the_message():
    for seed in range(30):
        draw = Draw(seed)
        message = draw.message()
        received = CODEC.decode_message(CODEC.encode_message(message))
        update = draw.update(message)
        assert CODEC.encode_update(update, received) == CODEC.encode_update(update, message)


def drawn_from_the_seed(message):
    """The votes of a method whose messages hold a seed."""
    rng = torch.Generator().manual_seed(int(message.extra["draw"]["seed"]))
    return {"large": torch.rand(40, 50, generator=rng) < 0.3}


@pytest.mark.parametrize("seed", [0, 1, 2**62 + 1, 2**63 - 1, -(2**63)])
def test_votes_that_follow_from_a_seed_in_the_message_take_one_byte(seed):
    codec = Codec(SCHEMA, drawn_from_the_seed)
    message = Message(weights=SCHEMA, extra={"draw": {"seed": torch.tensor(seed)}})
    received = codec.decode_message(codec.encode_message(message))
    assert equal(received.extra["draw"]["seed"], torch.tensor(seed))

    weights = {"large": torch.randn(40, 50, generator=torch.Generator().manual_seed(3))}
    update = Update(weights=weights, votes=drawn_from_the_seed(received))
    payload = codec.encode_update(update, received)
    arrived = codec.decode_update(payload, message)
    assert equal(arrived.votes, update.votes)
    assert equal(arrived.weights, apply(weights, update.votes))
    size = codec.update_size(update, message)
    assert (size.total, size.masks) == (len(payload), 0)
    other = Update(weights=weights, votes={"large": ~update.votes["large"]})
    changed = codec.update_size(other, message)
    assert changed.masks == 250
    assert equal(codec.decode_update(codec.encode_update(other, message), received).votes, other.votes)
    implied = 1 + 1  # the flag of votes, and that they are the expected ones
    values = 4 * int(update.votes["large"].sum())
    assert size.total == HEADER + 2 + implied + 3 + values + 1 + 2 + 1


HEADER, DENSE = 9, 4 * (4 * 27 + 4 + 4 + 1 + 2000) + 2 * (35 + 33) + 8 * 18 + 8


def test_a_dense_message_is_its_values_and_14_bytes():
    message = Message(weights=SCHEMA)
    assert CODEC.message_size(message) == Size(total=HEADER + 1 + 1 + DENSE + 1 + 2, masks=0)


def test_a_dense_update_is_its_values_and_16_bytes():
    update = Update(weights=SCHEMA)
    assert CODEC.update_size(update, Message(weights=SCHEMA)) == Size(
        total=HEADER + 2 + 1 + 1 + DENSE + 1 + 2 + 1, masks=0
    )


def test_a_mask_is_paid_for_once():
    draw = Draw(0)
    mask = torch.rand(40, 50, generator=draw.rng) < 0.5
    message = Message(weights=SCHEMA, masks={"large": mask})
    new, old = CODEC.message_size(message), CODEC.message_size(message, {"large": mask.clone()})
    assert (new.masks, old.masks) == (250, 0)
    assert new.total - old.total == 250 + 3
    assert old.total == HEADER + 1 + 1 + DENSE + 2 + 2 - 4 * int((~mask).sum())

    kept = CODEC.update_size(Update(weights=SCHEMA, shared={"masks": {"large": mask}}), message)
    moved = CODEC.update_size(Update(weights=SCHEMA, shared={"masks": {"large": ~mask}}), message)
    assert kept.masks == 0
    assert moved.masks == 250


def test_frozen_and_unvoted_weights_are_not_uploaded():
    full = CODEC.update_size(Update(weights=SCHEMA), Message(weights=SCHEMA)).total
    frozen = Message(weights=SCHEMA, trainable={"large": torch.zeros(40, 50, dtype=torch.bool)})
    assert CODEC.update_size(Update(weights=SCHEMA), frozen).total == full - 8000
    assert CODEC.update_size(Update(weights=SCHEMA, votes={}), frozen).total == full + 2
    assert CODEC.message_size(frozen).total == CODEC.message_size(Message(weights=SCHEMA)).total + 3


def test_tensors_that_require_gradients_and_other_layouts():
    weights = {"large": torch.randn(50, 40, requires_grad=True).T}
    masks = {"large": (torch.rand(50, 40) < 0.5).T}
    message = Message(weights=weights, masks=masks)
    arrived = CODEC.decode_message(CODEC.encode_message(message))
    assert equal(arrived.weights["large"], (weights["large"] * masks["large"]).detach())


def test_a_tensor_of_64_dimensions():
    shape = (1,) * 62 + (2, 2)
    message = Message(weights={"deep": torch.ones(shape)}, masks={"deep": torch.ones(shape, dtype=torch.bool)})
    assert CODEC.decode_message(CODEC.encode_message(message)).weights["deep"].shape == shape


@pytest.mark.parametrize(
    ("message", "error", "words"),
    [
        (
            Message(weights=SCHEMA, masks={"scale": torch.ones(2, dtype=torch.bool)}),
            IncompatibleMasks,
            r"mask of `scale` has shape \(2,\); expected \(\)",
        ),
        (
            Message(weights=SCHEMA, masks={"scale": torch.ones(())}),
            IncompatibleMasks,
            "mask of `scale` is torch.float32; expected torch.bool",
        ),
        (
            Message(weights={"z": torch.zeros(1, dtype=torch.complex64)}),
            InvalidOption,
            "`z` is torch.complex64, which cannot be encoded",
        ),
        (Message(weights={}, extra={"c": torch.ones(1)}), InvalidOption, r"`extra\['c'\]` is not a mapping of tensors"),
        (Message(weights={}, extra=[1]), InvalidOption, "`extra` is a list; expected a mapping from names"),
    ],
)
def test_messages_that_cannot_be_sent(message, error, words):
    with pytest.raises(error, match=words):
        CODEC.encode_message(message)
    with pytest.raises(error, match=words):
        CODEC.message_size(message)


@pytest.mark.parametrize(
    ("update", "words"),
    [
        (Update(weights={}, weight=0), "`Update.weight` is 0; expected a whole number from 1"),
        (Update(weights={}, weight=1.5), "`Update.weight` is 1.5; expected a whole number from 1"),
        (Update(weights={}, kind="both"), "`Update.kind` is 'both'; expected one of"),
        (Update(weights={}, shared=[1]), "`shared` is a list; expected a mapping with string keys, or None"),
        (Update(weights={}, shared={"f": print}), "`f` contains a builtin_function_or_method"),
    ],
)
def test_updates_that_cannot_be_sent(update, words):
    with pytest.raises(InvalidOption, match=words):
        CODEC.encode_update(update, Message(weights={}))


def test_a_payload_of_another_kind_version_or_model():
    message = Message(weights={})
    payload = CODEC.encode_message(message)
    with pytest.raises(MalformedPayload, match=r"starts with b'SFL.x01M'; expected b'SFL.x01U'"):
        CODEC.decode_update(payload, message)
    with pytest.raises(MalformedPayload, match=r"starts with b'SFL.x02M'"):
        CODEC.decode_message(payload.replace(b"\x01M", b"\x02M"))
    with pytest.raises(
        MalformedPayload, match=r"encoded for a model with fingerprint [0-9a-f]{8}; expected [0-9a-f]{8}"
    ):
        Codec({"w": torch.ones(1)}).decode_message(payload)
    with pytest.raises(MalformedPayload, match="ends at byte 0"):
        CODEC.decode_message(b"")


def test_an_update_of_weight_zero_is_refused():
    payload = bytearray(CODEC.encode_update(Update(weights={}), Message(weights={})))
    assert payload[HEADER + 1] == 1
    payload[HEADER + 1] = 0
    with pytest.raises(MalformedPayload, match="The update has weight 0; expected at least 1"):
        CODEC.decode_update(bytes(payload), Message(weights={}))


def test_an_update_of_an_unknown_kind_is_refused():
    payload = bytearray(CODEC.encode_update(Update(weights={}), Message(weights={})))
    payload[HEADER] = 2
    with pytest.raises(MalformedPayload, match=rf"Byte {HEADER} of the payload is 2; expected less than 2"):
        CODEC.decode_update(bytes(payload), Message(weights={}))


def small():
    """A short message and update that use every encoding, with the codec for them."""
    schema = {"a": torch.zeros(6), "b": torch.zeros(300), "n": torch.zeros(2, dtype=torch.int64)}
    rng = torch.Generator().manual_seed(0)
    few = torch.zeros(300, dtype=torch.bool)
    few[[3, 200]] = True
    masks = {"a": torch.rand(6, generator=rng) < 0.5, "b": few, "x": torch.tensor([True, False])}
    message = Message(
        weights={"b": torch.randn(300, generator=rng), "a": torch.randn(6, generator=rng), "x": torch.ones(2)},
        masks=masks,
        trainable={"b": ~few, "a": masks["a"]},
        extra={"c": {"b": torch.randn(300, generator=rng) * few, "y": torch.zeros(9)}},
    )
    update = Update(
        weights={"a": torch.ones(6), "x": torch.ones(2)},
        votes={"a": ~masks["a"]},
        metrics={"loss": 1.0},
        shared={"masks": masks, "list": [None, True, -5, 0.5, "s", ("t",), {"b": ~few}], "w": torch.arange(3)},
    )
    return Codec(schema), message, update


def decoders():
    codec, message, update = small()
    return [
        (codec.encode_message(message), lambda data: codec.decode_message(data)),
        (codec.encode_message(message, message.masks), lambda data: codec.decode_message(data, message.masks)),
        (codec.encode_update(update, message), lambda data: codec.decode_update(data, message)),
    ]


def survives(decode, data):
    """A payload that is not ours is refused with our error, or is another message."""
    try:
        decode(data)
    except MalformedPayload:
        return False
    return True


@pytest.mark.parametrize("which", range(3))
def test_a_payload_cut_short_anywhere_is_refused(which):
    payload, decode = decoders()[which]
    assert survives(decode, payload)
    for length in range(len(payload)):
        assert not survives(decode, payload[:length])
    assert not survives(decode, payload + b"\x00")


@pytest.mark.parametrize("which", range(3))
def test_a_payload_with_any_byte_changed_is_refused_or_decodes(which):
    payload, decode = decoders()[which]
    pick = random.Random(which)
    outcomes = set()
    for place in range(len(payload)):
        for flip in {1 << pick.randrange(8), 1 << pick.randrange(8), 0xFF, pick.randrange(1, 256)}:
            data = bytearray(payload)
            data[place] ^= flip
            outcomes.add(survives(decode, bytes(data)))
    assert outcomes == {True, False}


@pytest.mark.parametrize("which", range(3))
def test_noise_behind_a_good_header_is_refused_or_decodes(which):
    payload, decode = decoders()[which]
    pick = random.Random(which)
    refused = 0
    for _ in range(1500):
        noise = bytes(pick.choice((0, 0, 1, 2, 8, 9, 10, pick.randrange(256))) for _ in range(pick.randrange(40)))
        refused += not survives(decode, payload[:HEADER] + noise)
    assert refused > 1000


def test_a_short_payload_cannot_take_much_memory():
    codec = Codec({"w": torch.zeros(100_000)})
    empty = codec.encode_message(Message(weights={}))[:HEADER]
    all_zero = b"\x0a\x00\x02\x00"  # a known tensor, not bool, by its positions, of which there are none
    extra = b"\x08\x7f" + b"".join(b"\x00\x02" + b"%02d" % i + b"\x08\x01\x01" + all_zero for i in range(99))
    with pytest.raises(MalformedPayload, match="beyond the limit for this model"):
        codec.decode_message(empty + b"\x01" + b"\x00\x00" + b"\x01" + extra)


def test_what_could_not_be_decoded_is_not_encoded():
    codec = Codec({"w": torch.zeros(1000)})
    zeros = Update(weights={}, shared={"many": {f"{i}": {"w": torch.zeros(1000)} for i in range(40)}})
    with pytest.raises(
        InvalidOption,
        match=r"The payload of .* bytes would decode to .*; expected fewer tensors in `extra` or `shared`",
    ):
        codec.encode_update(zeros, Message(weights={}))
    fine = Update(weights={}, shared={"many": {f"{i}": {"w": torch.zeros(1000)} for i in range(10)}})
    assert len(codec.encode_update(fine, Message(weights={}))) < 200


@pytest.mark.parametrize("trees", [1, 16])
def test_many_small_tensors_with_extra_trees_are_within_the_limit(trees):
    """As of SCAFFOLD with gates of one element: the objects take more memory than the values."""
    weights = {f"gate{place}": torch.ones(1) for place in range(20)}
    codec, extra = Codec(weights), {str(tree): weights for tree in range(trees)}
    message, update = Message(weights, extra=extra), Update(weights, extra=extra)
    assert codec.decode_message(codec.encode_message(message)).extra == extra
    assert codec.decode_update(codec.encode_update(update, message), message).extra == extra


def test_zeros_of_the_widest_type_under_a_mask_are_within_the_limit():
    """Each byte of the mask stands for 8 bools and 8 values of 8 bytes."""
    codec, shape = Codec({"w": torch.zeros(1)}), (80_000,)
    zeros = Message({"x": torch.zeros(shape, dtype=torch.float64)}, masks={"x": torch.zeros(shape, dtype=torch.bool)})
    payload = codec.encode_message(zeros)
    assert len(payload) < 10_100
    assert torch.equal(codec.decode_message(payload).weights["x"], zeros.weights["x"])


def test_sizes_make_no_bytes(monkeypatch):
    draw = Draw(7)
    message = draw.message()
    update = draw.update(message)

    def never(*_):
        raise AssertionError("encoded a tensor to weigh it")

    for where in ("dense", "bitmask", "indices"):
        monkeypatch.setattr(f"lightning_sparsefl.wire.{where}.encode", never)
    assert CODEC.message_size(message).total > 0
    assert CODEC.update_size(update, message).total > 0
