import random
from fractions import Fraction

import pytest
import torch

from lightning_sparsefl.federated.aggregation.exact_sum import ExactSum, merge_headers

CPU = torch.device("cpu")


def exact_sum(terms):
    total = ExactSum(terms[0].shape, CPU)
    for term in terms:
        total.add(term)
    return total


def slow_sum(terms):
    """The definition, in fractions, rounded once."""
    columns = torch.stack(terms).T.tolist()
    return torch.tensor([float(sum(map(Fraction, column))) for column in columns], dtype=torch.float64)


def drawn(count, spread, seed=0):
    g = torch.Generator().manual_seed(seed)
    sizes = 2.0 ** torch.randint(-spread, spread + 1, (count, 20), generator=g)
    return list((torch.randn(count, 20, generator=g) * sizes).double() * torch.randint(1, 900, (count, 1), generator=g))


@pytest.mark.parametrize("spread", [0, 10, 30, 120])
def test_is_the_sum_of_fractions_up_to_what_lies_64_bits_below_the_largest_term(spread):
    terms = drawn(40, spread)
    largest = float(torch.stack(terms).abs().max())
    torch.testing.assert_close(exact_sum(terms).value(), slow_sum(terms), rtol=1e-15, atol=40 * largest * 2.0**-64)


@pytest.mark.parametrize("spread", [0, 30, 120])
def test_any_order_and_any_split_give_the_same_bytes(spread):
    terms, rng = drawn(40, spread), random.Random(0)
    whole = exact_sum(terms).value()
    for ranks in (1, 2, 3):
        rng.shuffle(terms)
        parts = [exact_sum(terms[i::ranks]) for i in range(ranks)]
        header = merge_headers({"key": {"name": part.header}} for part in parts)["key"]["name"]
        for digit, *others in zip(*(part.align(header) for part in parts), strict=True):
            digit += sum(others)
        assert torch.equal(parts[0].value(), whole)


def test_plain_sums_would_depend_on_the_order():
    """The test above can fail."""
    terms = drawn(40, 30)
    assert not torch.equal(sum(terms), sum(reversed(terms)))


@pytest.mark.parametrize("value", [0.0, 1e-300, 1.7e308, 2.0**32, 2.0**32 - 2.0**-21, -1.0])
def test_one_term_is_itself(value):
    assert float(exact_sum([torch.tensor(value, dtype=torch.float64)]).value()) == value


def test_no_place_is_kept_for_zeros_and_three_at_most_for_anything():
    assert exact_sum([torch.zeros(2), torch.zeros(2)]).header.top is None
    total = exact_sum(drawn(40, 120))
    assert len(total._places) == 3
