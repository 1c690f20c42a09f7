"""Every exported algorithm keeps the promises that `lightning_sparsefl.testing` checks for users' own methods."""

import pytest

from helpers.algorithms import every_algorithm, every_exported, every_variant
from lightning_sparsefl import FedLPS, FedSpa
from lightning_sparsefl.testing import algorithm_checks as checks


@every_exported
def test_is_a_frozen_value(algorithm, federation):
    checks.is_a_frozen_value(algorithm, federation)


@every_algorithm
def test_learns(algorithm, federation):
    checks.learns(algorithm, federation)


@every_algorithm
def test_leaves_messages_unchanged(algorithm, federation):
    checks.leaves_messages_unchanged(algorithm, federation)


@every_algorithm
def test_leaves_the_servers_state_unchanged(algorithm, federation):
    checks.leaves_the_servers_state_unchanged(algorithm, federation)


@every_algorithm
def test_is_the_same_on_several_ranks(algorithm, federation):
    checks.is_the_same_on_several_ranks(algorithm, federation)


@every_algorithm
def test_is_the_same_in_both_engines(algorithm, federation):
    checks.is_the_same_in_both_engines(algorithm, federation)


@every_algorithm
def test_is_the_same_in_stacks(algorithm, federation):
    checks.is_the_same_in_stacks(algorithm, federation)


@every_algorithm
def test_is_the_same_when_encoded(algorithm, federation):
    checks.is_the_same_when_encoded(algorithm, federation)


@every_variant
def test_is_the_same_after_a_resume(algorithm, federation):
    checks.is_the_same_after_a_resume(algorithm, federation)


@every_algorithm
def test_is_the_same_through_a_pipe(algorithm, federation):
    checks.is_the_same_through_a_pipe(algorithm, federation)


@every_algorithm
def test_leaves_failed_clients_out(algorithm, federation):
    checks.leaves_failed_clients_out(algorithm, federation)


@every_algorithm
def test_exports_what_it_scored(algorithm, federation):
    checks.exports_what_it_scored(algorithm, federation)


@every_algorithm
def test_scores_what_clients_trained(algorithm, federation):
    checks.scores_what_clients_trained(algorithm, federation)


@every_algorithm
def test_profiles_its_costs(algorithm, federation):
    checks.profiles_its_costs(algorithm, federation)


@every_algorithm
def test_trains_with_its_masks_and_callbacks(algorithm, federation):
    checks.trains_with_its_masks_and_callbacks(algorithm, federation)


@pytest.mark.parametrize("algorithm", [FedSpa(), FedLPS()], ids=repr)  # for the others, equal ranks imply it
def test_is_reproducible(algorithm, federation):
    checks.is_reproducible(algorithm, federation)
