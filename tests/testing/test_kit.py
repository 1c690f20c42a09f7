"""Each broken class is caught by the check whose promise it breaks, and sound ones pass all checks."""

import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch
from lightning.pytorch import Callback
from torch.multiprocessing import ProcessRaisedException

from helpers.networks import module_for
from lightning_sparsefl import FederatedAlgorithm, algorithms
from lightning_sparsefl.callbacks import ProximalTerm
from lightning_sparsefl.data import IID, ByGroup
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated import PlainMean, Uniform
from lightning_sparsefl.testing import (
    BrokenPromise,
    algorithm_checks,
    check_algorithm,
    check_callback,
    check_partition,
    check_reducer,
    check_sampler,
    checks,
    partition_checks,
    promises,
)
from lightning_sparsefl.testing.contents import comparable, difference
from lightning_sparsefl.testing.small_federation import SmallFederation
from lightning_sparsefl.testing.small_fit import Net
from lightning_sparsefl.types import Update
from testing import broken

METHODS = {
    broken.ReadsTheClock: "is_reproducible",
    broken.LooksAtTheRank: "is_the_same_on_several_ranks",
    broken.Forgets: "is_the_same_after_a_resume",
    broken.MutatesItsMessage: "leaves_messages_unchanged",
    broken.MutatesItsMemory: "leaves_messages_unchanged",
    broken.MutatesTheState: "leaves_the_servers_state_unchanged",
    broken.LearnsNothing: "learns",
    broken.RemembersOutsideOfMemory: "is_the_same_through_a_pipe",
    broken.KeepsItsHead: "scores_what_clients_trained",
    broken.CountsInAModule: "is_the_same_after_a_resume",
    broken.MutatesItsRecord: "leaves_the_servers_state_unchanged",
    broken.TrainsUnderMasksOfItsOwn: "trains_with_its_masks_and_callbacks",
    broken.TrainsDense: "trains_with_its_masks_and_callbacks",
    broken.KeepsItsCallbackForAll: "is_the_same_in_stacks",
    broken.LeavesItsCallbacksOut: "trains_with_its_masks_and_callbacks",
}
CALLBACKS = {
    broken.LetsWeightsGrow: "holds_its_masks",
    broken.ForgetsAverages: "holds_masks_under_averaging",
    broken.CountsAgain: "is_the_same_after_a_resume",
    broken.CountsWithinAnEpoch: "is_the_same_after_a_resume",
    broken.LeavesAHook: "saves_an_ordinary_checkpoint",
    broken.NeedsATrainer: "trains_in_a_client_as_in_a_trainer",
    broken.LeavesNames: "saves_an_ordinary_checkpoint",
}


SAMPLERS = {
    broken.DrawsFromTheGlobalGenerator: "draws_from_its_generator",
    broken.ChangesItsState: "leaves_its_state_unchanged",
    broken.CountsItself: "is_the_same_after_a_resume",
}
REDUCERS = {
    broken.Smallest: "learns",
    broken.CountsMerges: "is_the_same_after_a_resume",
    broken.MergesWhatIsNotSent: "is_the_same_when_encoded",
    broken.CountsRanks: "is_the_same_on_several_ranks",
}
PARTITIONS = {
    broken.CanBeChanged: "is_a_frozen_value",
    broken.GivesTwice: "gives_examples_to_one_client",
    broken.DrawsWithNumPy: "depends_on_the_seed_alone",
    broken.SeedsWithAHash: "depends_on_the_seed_alone",
    broken.MovesAGenerator: "leaves_the_global_generators_alone",
    broken.WritesLabels: "leaves_labels_unchanged",
    broken.DeniesLabels: "needs_labels_only_if_it_says_so",
}


@pytest.mark.parametrize(("kind", "name"), (METHODS | CALLBACKS | SAMPLERS | REDUCERS | PARTITIONS).items())
def test_the_named_check_catches_it(kind, name):
    found = dict(checks(kind()))
    with pytest.raises(BrokenPromise, match=f"^`{kind.__name__}` breaks the promise `{name}` ") as caught:
        found[name]()
    assert caught.value.promise == name
    assert str(caught.value).count(". ") == 0  # one sentence
    assert re.search(rf"read `help\(lightning_sparsefl\.testing\.\w+\.{name}\)`\.$", str(caught.value))
    assert isinstance(caught.value, AssertionError)


@pytest.mark.slow
def test_a_sound_method_passes_and_takes_no_pytest():
    assert check_algorithm(broken.Sound()) == tuple(name for name, _ in checks(algorithms.FedAvg()))


def test_a_sound_callback_passes():
    names = check_callback(broken.Rows())
    assert names == tuple(name for name, _ in checks(broken.Rows()))
    assert {name for name, _ in checks(Callback())} < set(names)


class LogsNaN(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.log("share", float("nan"))


def frozen_net(seed=1):
    module = Net(seed=seed)
    module.net[0].weight.requires_grad_(False)
    return module


def test_a_metric_may_be_nan_and_a_parameter_frozen():
    check_callback(LogsNaN(), module=frozen_net)


def test_a_partition_that_no_other_process_can_import_is_checked_in_this_one(monkeypatch):
    monkeypatch.setattr(partition_checks, "_SPLIT", "import sys; sys.exit(3)")
    dict(checks(broken.SeedsWithAHash()))["depends_on_the_seed_alone"]()
    monkeypatch.setattr(partition_checks, "_SPLIT", "raise ValueError('no')")
    with pytest.raises(BrokenPromise, match="another process cannot split: ValueError: no"):
        dict(checks(broken.SeedsWithAHash()))["depends_on_the_seed_alone"]()


def test_a_method_with_its_own_train_is_resumed_with_the_engine_of_the_first_run(federation):
    class Trains(algorithms.FedAvg):
        def train(self, message, client):
            return super().train(message, client)

    algorithm_checks.is_the_same_after_a_resume(Trains(), federation)
    algorithm_checks.leaves_failed_clients_out(Trains(), federation)


def test_a_module_may_log_further_metrics(tmp_path):
    class LogsMore(module_for(broken.Sound())):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self.log("val_size", float(len(batch[1])))

    small = SmallFederation(tmp_path, lambda algorithm: LogsMore(), "cpu")
    algorithm_checks.exports_what_it_scored(broken.Sound(), small)


@pytest.mark.slow_after_first
@pytest.mark.parametrize("partition", [IID(), ByGroup("x")], ids=repr)
def test_a_sound_partition_passes(partition):
    assert check_partition(partition) == tuple(name for name, _ in checks(IID()))


@pytest.mark.parametrize("subject", [algorithms.FedAvg, Callback, Uniform, IID, 3])
def test_what_is_neither_is_refused(subject):
    with pytest.raises(InvalidOption, match="expected a `FederatedAlgorithm`"):
        check_algorithm(subject)
    with pytest.raises(InvalidOption, match="expected a `Callback`"):
        check_callback(subject)
    with pytest.raises(InvalidOption, match="expected a `CohortSampler`"):
        check_sampler(subject)
    with pytest.raises(InvalidOption, match="expected a `Reducer`"):
        check_reducer(subject)
    with pytest.raises(InvalidOption, match="expected a `Partition`"):
        check_partition(subject)
    with pytest.raises(InvalidOption):
        checks(subject)


def test_an_error_of_a_method_is_a_broken_promise_that_keeps_its_cause(federation):
    class Fails(algorithms.FedAvg):
        def aggregate(self, server, merged):
            raise ZeroDivisionError("no\nvotes.")

    with pytest.raises(BrokenPromise, match=r"ZeroDivisionError: no votes \(test_kit\.py, line \d+\); read") as caught:
        algorithm_checks.learns(Fails(), federation)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_error_in_the_other_process_is_reported(federation):
    @dataclass(frozen=True, kw_only=True)
    class Unknown(FederatedAlgorithm):
        def train(self, message, client):
            return replace(super().train(message, client), weights={"foo": torch.zeros(1)})

    (check,) = [check for name, check in checks(Unknown()) if name == "is_the_same_through_a_pipe"]
    words = r"InvalidUpdate: The update of client \d from `Unknown\.train` holds 'foo', which the model"
    with pytest.raises(BrokenPromise, match=words):
        check()


def test_every_check_states_its_promise():
    for subject in (algorithms.FedAvg(), broken.Rows(), Uniform(), PlainMean(), IID()):
        for name, check in checks(subject):
            assert check.args[0].__name__ == name
            assert check.args[0].__doc__.startswith("Check that ")
            assert promises.summary(check.args[0])


def test_the_method_and_the_random_state_are_left_as_they_were():
    torch.manual_seed(4)
    before, method = torch.get_rng_state(), broken.Sound()
    dict(checks(method))["is_reproducible"]()
    assert torch.equal(torch.get_rng_state(), before)
    assert pickle.dumps(method) == pickle.dumps(broken.Sound())


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ({"a": [1.5]}, {"a": [1.5]}, ""),
        ({"a": [1.5]}, {"a": [2.5]}, "`x.a.0` is 1.5 in one and 2.5 in the other"),
        ({"a": 1}, {"b": 1}, "`x.a` is in only one of both"),
        ([1], [1, 2], "`x.1` is in only one of both"),
        (float("nan"), float("nan"), ""),
        ({"a": [float("nan")]}, {"a": [float("nan")]}, ""),
    ],
)
def test_the_first_difference_is_named(one, other, said):
    assert difference(comparable(one), comparable(other), "x") == said


def test_an_error_on_another_rank_is_the_last_line_of_its_traceback():
    @promises.promise
    def holds(subject, bench):
        """Check that all is well."""
        text = 'Traceback (most recent call last):\n  File "a.py", line 1\npackage.errors.Odd: ranks differ. More.\n'
        raise ProcessRaisedException(f"\n\n-- Process 1 terminated with the following error:\n{text}", 1, 2)

    with pytest.raises(BrokenPromise, match=r"\(all is well\): Odd: ranks differ; read"):
        holds(3, None)


def test_a_killed_run_that_fails_in_another_process_is_repeated_in_this_one(federation, monkeypatch):
    """As one does that waits for a thread, which a fork does not have, or that runs in a daemon."""
    pool = ThreadPoolExecutor(1)

    class Waits(algorithms.FedAvg):
        def aggregate(self, server, merged):
            return pool.submit(super().aggregate, server, merged).result()

    monkeypatch.setattr(algorithm_checks, "_LONGEST", 3)
    algorithm_checks.is_the_same_after_a_resume(Waits(), federation)
    pool.shutdown()
    assert {each.name for each in federation.folder.iterdir()} == {"straight", "resumed", "resumed here"}


def test_callbacks_may_wait_for_a_later_round(federation):
    class WarmsUp(algorithms.FedAvg):
        def callbacks(self, message, client):
            return [ProximalTerm(strength=0.1)]

        def train(self, message, client):
            result = client.fit(message.weights, callbacks=self.callbacks(message, client) if client.round else [])
            return Update(weights=result.weights, weight=client.num_examples, metrics=result.metrics)

    algorithm_checks.trains_with_its_masks_and_callbacks(WarmsUp(), federation)


def test_a_method_that_fits_twice_has_to_charge_it(federation):
    @dataclass(frozen=True, kw_only=True)
    class Twice(FederatedAlgorithm):
        def train(self, message, client):
            client.fit(message.weights)
            return super().train(message, client)

    with pytest.raises(BrokenPromise, match="`train` fits 2 times, and `costs` charges one fit; override it"):
        algorithm_checks.profiles_its_costs(Twice(), federation)

    class Charged(Twice):
        def costs(self, facts):
            return super().costs(replace(facts, epochs=2 * facts.epochs))

    algorithm_checks.profiles_its_costs(Charged(), federation)


def test_an_error_of_a_simulation_says_so_and_names_the_line(federation):
    @dataclass(frozen=True, kw_only=True)
    class Relies(FederatedAlgorithm):
        def train(self, message, client):
            return [super().train(message, client)][len(client.fit(message.weights).metrics) - 1 :][1]

    said = r"of the simulation, which calls no hook of a callback: IndexError: .* \(test_kit\.py, line \d+\); read"
    with pytest.raises(BrokenPromise, match=said):
        algorithm_checks.profiles_its_costs(Relies(), federation)
