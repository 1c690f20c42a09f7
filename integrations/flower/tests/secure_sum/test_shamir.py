import secrets
from itertools import combinations

import pytest

from lightning_sparsefl_flower.secure_sum.shamir import PRIME, SHARE_BYTES, combine, split


def is_prime(number):
    """Miller and Rabin's test with 40 bases."""
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in (secrets.randbelow(number - 3) + 2 for _ in range(40)):
        powers = [pow(base, odd << k, number) for k in range(twos)]
        if powers[0] != 1 and number - 1 not in powers:
            return False
    return True


def test_the_field_has_a_prime_size_and_room_for_a_key():
    assert is_prime(PRIME)
    assert not is_prime(PRIME + 2)
    assert 2**256 < PRIME < 2 ** (8 * SHARE_BYTES)


@pytest.mark.parametrize("secret", [0, 1, 2**256 - 1, PRIME - 1])
@pytest.mark.parametrize("threshold", [1, 3, 5])
def test_every_subset_of_the_threshold_restores_the_secret(secret, threshold):
    shares = split(secret, threshold, [1, 2, 5, 7, 1000])
    for size in range(threshold, 6):
        for points in combinations(shares, size):
            assert combine({point: shares[point] for point in points}) == secret


def test_fewer_shares_fit_every_secret():
    """For each other secret there is a polynomial through the same shares: they tell nothing."""
    shares = split(5, 3, [1, 2, 3])
    known = {1: shares[1], 2: shares[2]}
    for secret in (0, 6, 2**200):
        # the third share for which this would be the secret
        third = (secret - 3 * known[1] + 3 * known[2]) % PRIME
        assert combine({**known, 3: third}) == secret


@pytest.mark.parametrize(
    ("secret", "threshold", "points"),
    [(-1, 1, [1]), (PRIME, 1, [1]), (0, 0, [1]), (0, 2, [1]), (0, 1, [0]), (0, 1, [1, 1])],
)
def test_what_cannot_be_split_is_refused(secret, threshold, points):
    with pytest.raises(ValueError, match="expected"):
        split(secret, threshold, points)
