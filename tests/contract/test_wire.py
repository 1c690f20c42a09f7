"""Messages that are really encoded give the weights and the sizes of messages that are counted."""

from helpers.algorithms import every_variant
from helpers.federation import without_masks
from lightning_sparsefl.wire import Codec


@every_variant
def test_encoding_every_message_changes_nothing(algorithm, federation, last, monkeypatch):
    counted = last(federation(algorithm, folder="count"))
    lengths = {"message": [], "update": []}
    for kind in lengths:
        encode = getattr(Codec, f"encode_{kind}")

        def spy(self, *args, encode=encode, kind=kind):
            payload = encode(self, *args)
            lengths[kind].append((len(payload), getattr(self, f"{kind}_size")(*args).total))
            return payload

        monkeypatch.setattr(Codec, f"encode_{kind}", spy)
    encoded = last(federation(algorithm, folder="encode", federation={"wire": "encode"}))
    assert without_masks(encoded) == without_masks(counted)
    assert len(lengths["update"]) == 12
    assert len(lengths["message"]) > 12  # those for scoring, too
    assert all(length == size for pairs in lengths.values() for length, size in pairs)
