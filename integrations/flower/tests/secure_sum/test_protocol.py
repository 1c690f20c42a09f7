"""One sum under masks, between parties and a session in this process."""

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from lightning_sparsefl_flower.secure_sum import messages
from lightning_sparsefl_flower.secure_sum.errors import SecureSumRefused, TooFewClients
from lightning_sparsefl_flower.secure_sum.party import Party
from lightning_sparsefl_flower.secure_sum.policy import Policy
from lightning_sparsefl_flower.secure_sum.session import Session
from lightning_sparsefl_flower.secure_sum.signing import KeySigner, KeyVerifier

LENGTH, CONTEXT = 50, b"run 1, round 0"
KEYS = {
    "ed25519": Ed25519PrivateKey.generate,
    "p256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "p384": lambda: ec.generate_private_key(ec.SECP384R1()),
}


def vectors(clients, seed=0):
    rng = np.random.default_rng(seed)
    return {client: rng.integers(0, 2**64, LENGTH, dtype=np.uint64) for client in clients}


def parties_of(clients, policy, keys=None):
    verifier = None if keys is None else KeyVerifier({c: key.public_key() for c, key in keys.items()})
    return {c: Party(c, CONTEXT, policy, None if keys is None else KeySigner(keys[c]), verifier) for c in clients}


class Sum:
    """Runs a sum step by step; clients in `gone[step]` leave before they answer that step."""

    def __init__(self, clients=range(6), policy=None, keys=None, gone=None):
        self.policy, self.gone = policy or Policy(), gone or {}
        self.parties = parties_of(clients, self.policy, keys)
        self.session, self.vectors = Session(CONTEXT, self.policy), vectors(self.parties)
        self.masked = {}

    def left(self, step):
        for client in self.gone.get(step, ()):
            del self.parties[client]
        return self.parties.items()

    def share(self):
        self.roster = self.session.roster({c: p.advertise(b"facts %d" % c) for c, p in self.left("advertise")})
        return {c: p.share(self.roster) for c, p in self.left("share")}

    def mask(self, boxes):
        self.inboxes = self.session.inboxes(boxes)
        self.masked = {c: p.mask(self.vectors[c], self.inboxes[c]) for c, p in self.left("mask")}
        return self.session.survivors(self.masked.items())

    def confirm(self, survivors):
        return self.session.signatures({c: p.confirm(survivors) for c, p in self.left("confirm")})

    def reveal(self, signatures):
        return self.session.unmask({c: p.reveal(signatures) for c, p in self.left("reveal")})

    def run(self):
        return self.reveal(self.confirm(self.mask(self.share())))


@pytest.mark.parametrize("kind", [None, *KEYS])
@pytest.mark.parametrize(
    "gone",
    [{}, {"share": [0]}, {"mask": [5]}, {"confirm": [2]}, {"reveal": [3]}, {"mask": [4], "reveal": [1]}],
    ids=str,
)
def test_the_sum_is_that_of_those_whose_vectors_arrived(gone, kind):
    clients = [3, 0, 7, 12, 100, 6] if kind == "ed25519" else range(6)
    gone = {step: [sorted(clients)[place] for place in places] for step, places in gone.items()}
    keys = None if kind is None else {client: KEYS[kind]() for client in clients}
    one = Sum(clients, Policy(threshold=0.5), keys, gone)
    total = one.run()
    left = [c for c in one.vectors if c not in (*gone.get("share", ()), *gone.get("mask", ()))]
    assert np.array_equal(total, sum(one.vectors[c] for c in left))
    assert sorted(one.masked) == sorted(left)


def test_a_masked_vector_tells_nothing_of_its_client():
    """The same vector is masked by other numbers in each sum, and neither it nor a difference shows through."""
    shown = []
    for _ in range(2):
        one = Sum()
        one.mask(one.share())
        assert not any(np.array_equal(one.masked[c], one.vectors[c]) for c in one.masked)
        shown.append(np.stack([one.masked[c] for c in sorted(one.masked)]))
    assert not (shown[0] == shown[1]).any()
    high = (np.concatenate(shown) >> np.uint64(63)).mean()
    assert 0.4 < high < 0.6  # 600 fair bits


def test_without_the_own_mask_pairs_alone_would_cancel():
    """What double masking is for: the masked vectors' sum is not yet the sum."""
    one = Sum()
    one.mask(one.share())
    assert not (sum(one.masked.values()) == sum(one.vectors.values())).any()


@pytest.mark.parametrize("step", ["advertise", "share", "mask", "confirm", "reveal"])
def test_fewer_than_the_threshold_tell_nothing(step):
    with pytest.raises(TooFewClients, match=r"expected at least"):
        Sum(range(4), Policy(threshold=0.5, min_clients=3), gone={step: [0, 2]}).run()


def test_parties_refuse_small_sums_themselves():
    """A server with a lower threshold of its own gets no shares."""
    one = Sum(range(3), Policy(threshold=0.5, min_clients=2))
    strict = Party(0, CONTEXT, Policy(min_clients=4))
    others = b"".join(one.parties[c].advertise() for c in (1, 2))
    with pytest.raises(TooFewClients, match=r"3 clients are left .* expected at least 4"):
        strict.share(strict.advertise() + others)


def test_a_party_reveals_one_kind_of_share_for_each_client_and_once():
    """With both shares of a client, a server could take all masks off its vector."""
    one = Sum(gone={"mask": [5]})
    survivors = one.mask(one.share())
    party = one.parties[0]
    held = dict(party._held)
    party.confirm(survivors)
    shares = messages.decode_shares(party.reveal(b""), 6)
    assert shares == [held[c][1 if c == 5 else 0] for c in range(6)]
    for again in (lambda: party.confirm(survivors), lambda: party.reveal(b"")):
        with pytest.raises(SecureSumRefused, match="was asked to"):
            again()
    assert not party._held


def test_another_list_of_survivors_is_refused_once_one_is_confirmed():
    """A server that first calls client 1 alive and then gone would get both of its secrets."""
    one = Sum()
    survivors = one.mask(one.share())
    party = one.parties[0]
    party.confirm(survivors)
    with pytest.raises(SecureSumRefused, match="was asked to confirm"):
        party.confirm(messages.encode_clients([0, 2, 3, 4, 5]))


def test_with_long_term_keys_all_must_have_confirmed_the_same_survivors():
    keys = {client: Ed25519PrivateKey.generate() for client in range(6)}
    one = Sum(policy=Policy(), keys=keys)
    one.mask(one.share())
    everyone, fewer = messages.encode_clients(range(6)), messages.encode_clients(range(5))
    signed = {c: p.confirm(everyone if c < 3 else fewer) for c, p in one.parties.items() if c < 5}
    with pytest.raises(SecureSumRefused, match=r"3 of 6 clients have signed .* expected 5"):
        one.parties[0].reveal(messages.encode_signatures(signed.items()))
    with pytest.raises(SecureSumRefused, match="2 of 5 clients have signed"):
        one.parties[4].reveal(messages.encode_signatures(signed.items()))


@pytest.mark.parametrize("survivors", [[1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 9]])
def test_survivors_that_cannot_be_are_refused(survivors):
    one = Sum()
    one.mask(one.share())
    with pytest.raises(SecureSumRefused, match="not what client 0 can confirm"):
        one.parties[0].confirm(messages.encode_clients(survivors))


def test_keys_that_the_server_swapped_are_refused():
    """A server in the middle of a pair could compute its mask."""
    keys = {client: Ed25519PrivateKey.generate() for client in range(4)}
    one = Sum(range(4), keys=keys)
    adverts = {c: p.advertise() for c, p in one.parties.items()}
    forged = Party(1, CONTEXT, Policy(), KeySigner(Ed25519PrivateKey.generate())).advertise()
    with pytest.raises(SecureSumRefused, match="keys of client 1 are not signed"):
        one.parties[0].share(adverts[0] + forged + adverts[2] + adverts[3])


def test_keys_of_another_round_are_refused():
    keys = {client: Ed25519PrivateKey.generate() for client in range(4)}
    one = Sum(range(4), keys=keys)
    old = Party(1, b"run 1, round 7", Policy(), KeySigner(keys[1])).advertise()
    adverts = {c: p.advertise() for c, p in one.parties.items()}
    with pytest.raises(SecureSumRefused, match="keys of client 1 are not signed"):
        one.parties[0].share(adverts[0] + old + adverts[2] + adverts[3])


@pytest.mark.parametrize("change", ["without", "twice", "order", "copied"])
def test_a_wrong_roster_is_refused(change):
    one = Sum(range(4))
    a = [p.advertise() for p in one.parties.values()]
    copied = messages.decode_adverts(a[1])[0]
    copied = messages.Advert(2, copied.box_key, copied.mask_key, copied.commitment).encode()
    rosters = {"without": a[1:], "twice": [*a, a[3]], "order": [a[1], a[0], *a[2:]]}
    rosters["copied"] = [a[0], a[1], copied, a[3]]
    with pytest.raises(SecureSumRefused, match="The roster of"):
        one.parties[0].share(b"".join(rosters[change]))


@pytest.mark.parametrize("case", ["changed", "swapped", "of another"])
def test_a_box_that_was_changed_swapped_or_of_others_is_refused(case):
    one = Sum(range(4))
    boxes = {c: messages.decode_boxes(each) for c, each in one.share().items()}
    right = {c: boxes[c][0] for c in (1, 2, 3)}
    flipped = bytes([right[1][0] ^ 1]) + right[1][1:]
    wrong = {"changed": flipped, "swapped": right[2], "of another": boxes[1][2]}[case]
    with pytest.raises(SecureSumRefused, match="box from client 1"):
        one.parties[0].mask(one.vectors[0], messages.encode_boxes({**right, 1: wrong}.items()))


def test_a_key_for_which_all_secrets_are_equal_is_refused():
    one = Sum(range(4))
    adverts = [p.advertise() for p in one.parties.values()]
    low = messages.Advert(1, bytes(32), messages.decode_adverts(adverts[1])[0].mask_key, bytes(32)).encode()
    with pytest.raises(SecureSumRefused, match="not a valid X25519 key"):
        one.parties[0].share(adverts[0] + low + adverts[2] + adverts[3])


@pytest.mark.parametrize("gone", [{}, {"mask": [1]}], ids=["survivor", "dropped"])
def test_a_wrong_share_is_noticed_by_name(gone):
    """A sum with a mask left in it must not pass for a sum."""
    one = Sum(range(4), Policy(threshold=0.5), gone=gone)
    signatures = one.confirm(one.mask(one.share()))
    revealed = {c: p.reveal(signatures) for c, p in one.parties.items()}
    shares = messages.decode_shares(revealed[0], 4)
    shares[1] ^= 1 << 100  # the lowest three bits of an X25519 key do not count
    with pytest.raises(SecureSumRefused, match="The shares of client 1's"):
        one.session.unmask({**revealed, 0: messages.encode_shares(shares)})


@pytest.mark.parametrize(
    ("decode", "payload"),
    [
        (messages.decode_adverts, b"x" * 50),
        (messages.decode_adverts, Party(0, b"", Policy()).advertise(b"facts")[:-1]),
        (messages.decode_boxes, b"x" * 50),
        (messages.decode_boxes, messages.encode_boxes([(1, bytes(82)), (1, bytes(82))])),
        (messages.decode_clients, b"x" * 5),
        (messages.decode_clients, messages.encode_clients([2, 1])),
        (messages.decode_signatures, b"x" * 7),
        (messages.decode_signatures, messages.encode_signatures([(1, b"abc")])[:-1]),
        (lambda payload: messages.decode_shares(payload, 2), bytes(33)),
        (lambda payload: messages.decode_shares(payload, 1), b"\xff" * 33),
    ],
)
def test_bytes_that_are_no_message_are_refused(decode, payload):
    with pytest.raises(SecureSumRefused):
        decode(payload)


def test_messages_return_as_they_were():
    signatures = {1: b"one", 5: b""}
    assert messages.decode_signatures(messages.encode_signatures(signatures.items())) == signatures
    assert messages.decode_boxes(messages.encode_boxes([(3, bytes(82))])) == {3: bytes(82)}
