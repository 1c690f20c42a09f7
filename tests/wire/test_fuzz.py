"""Round trips of anything that can be sent or written; `tests/test_security.py` has what cannot."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_sparsefl.sparse.masks import apply, intersect, pack, unpack
from lightning_sparsefl.types import Message, Update
from lightning_sparsefl.wire import Codec, bitmask, dense, export_sparse, indices, load_sparse
from lightning_sparsefl.wire.frame import Reader, Writer
from lightning_sparsefl.wire.schema import Schema
from lightning_sparsefl.wire.values import read_metrics, read_value, write_metrics, write_value

SETTINGS = settings(
    derandomize=True, deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow], database=None
)
SCHEMA = {"w": torch.zeros(7, 5), "b": torch.zeros(7), "n": torch.zeros((), dtype=torch.int64)}
NAMES = st.one_of(st.sampled_from([*SCHEMA, "x"]), st.text(max_size=4))
DTYPES = st.sampled_from(dense.DTYPES)
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def values(shape, dtype, density, seed):
    rng = torch.Generator().manual_seed(seed)
    kept = torch.rand(shape, generator=rng) < density
    return (torch.randn(shape, generator=rng) * 20).to(dtype) * kept


def tensors(shapes=SHAPES, dtypes=DTYPES):
    return st.builds(values, shapes, dtypes, st.sampled_from([0.0, 0.1, 1.0]), st.integers(0, 99))


def masks_of(shape):
    return st.builds(
        lambda density, seed: values(shape, torch.bool, density, seed), st.floats(0, 1), st.integers(0, 99)
    )


PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=6), tensors())
TREES = st.recursive(
    PLAIN,
    lambda parts: st.one_of(
        st.lists(parts, max_size=3), st.lists(parts, max_size=3).map(tuple), st.dictionaries(NAMES, parts, max_size=3)
    ),
    max_leaves=8,
)
MASKS = st.fixed_dictionaries({}, optional={name: masks_of(tuple(value.shape)) for name, value in SCHEMA.items()})
WEIGHTS = st.fixed_dictionaries(
    {}, optional={name: tensors(st.just(tuple(value.shape)), st.just(value.dtype)) for name, value in SCHEMA.items()}
)


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


@SETTINGS
@given(st.integers(0, 2**63 - 1), st.text(), st.floats(allow_nan=False))
def test_frame(number, text, real):
    writer = Writer(keep=True)
    writer.varint(number)
    writer.text(text)
    writer.real(real)
    reader = Reader(writer.payload(), room=0)
    assert (reader.varint(2**63 - 1), reader.text(), reader.real(), reader.left) == (number, text, real, 0)


@SETTINGS
@given(st.integers(0, 300).flatmap(lambda size: masks_of((size,))))
def test_bitmask_and_indices(mask):
    count = int(mask.sum())
    coded = indices.encode(mask)
    assert len(coded) == indices.size(len(mask), count)
    assert torch.equal(indices.decode(memoryview(coded), len(mask), count), mask)
    assert torch.equal(bitmask.decode(memoryview(bitmask.encode(mask)), len(mask)), mask)
    assert torch.equal(unpack(pack(mask), mask.shape), mask)


@SETTINGS
@given(TREES, MASKS)
def test_values(value, reference):
    schema, writer = Schema(SCHEMA), Writer(keep=True)
    write_value(writer, schema, value, reference)
    reader = Reader(writer.payload(), room=writer.decoded)
    assert equal(read_value(reader, schema, reference), value)
    assert reader.left == 0


@SETTINGS
@given(st.dictionaries(st.text(max_size=8), st.floats(allow_nan=False), max_size=5))
def test_metrics(metrics):
    writer = Writer(keep=True)
    write_metrics(writer, metrics)
    assert read_metrics(Reader(writer.payload(), room=0)) == metrics


@SETTINGS
@given(WEIGHTS, MASKS, MASKS, MASKS, TREES, st.one_of(st.none(), MASKS), st.integers(1, 2**63 - 1))
def test_messages_and_updates(weights, masks, trainable, known, shared, votes, weight):
    codec = Codec(SCHEMA)
    message = Message(weights=weights, masks=masks, trainable=trainable, extra={"c": weights})
    payload = codec.encode_message(message, known)
    assert len(payload) == codec.message_size(message, known).total
    back = codec.decode_message(payload, known)
    assert equal(back.weights, apply(weights, masks))
    assert equal([back.masks, back.trainable, back.extra], [masks, trainable, {"c": weights}])
    update = Update(weights=weights, weight=weight, votes=votes, shared={"s": shared})
    arrived = codec.decode_update(codec.encode_update(update, message), message)
    assert equal(arrived.weights, apply(weights, intersect(trainable, masks) if votes is None else votes))
    assert equal([arrived.votes, arrived.shared, arrived.weight], [votes, {"s": shared}, weight])


@SETTINGS
@given(tree=st.dictionaries(st.text(max_size=5).filter(lambda n: not n.endswith("#mask")), tensors(), max_size=4))
def test_files(tree, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "fuzz" / "w.safetensors"
    export_sparse(tree, path)
    assert equal(load_sparse(path), tree)
