"""Both local engines give the same bytes."""

from helpers.algorithms import every_algorithm


@every_algorithm
def test_a_real_trainer_per_client_gives_the_same_bytes(algorithm, federation, last):
    fast = last(federation(algorithm, rounds=2, folder="fast", federation={"local_engine": "fast"}))
    assert last(federation(algorithm, rounds=2, folder="stock", federation={"local_engine": "trainer"})) == fast
