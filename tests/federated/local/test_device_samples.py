"""Samples on the device: the batches and runs of samples on the CPU, and copies that do not outlive their storage."""

from __future__ import annotations

import gc

import pytest
import torch

from lightning_sparsefl import FedAvg, FederatedTrainer, Federation
from lightning_sparsefl.data import Dirichlet, Examples, FederatedDigits, Normalize
from lightning_sparsefl.data.examples import CropFlip
from lightning_sparsefl.federated.local.fast import device_samples
from lightning_sparsefl.federated.local.fast.device_samples import DeviceSamples
from lightning_sparsefl.models import MLP

CPU = torch.device("cpu")


def stored(first=0, last=6, transform=None, of=None):
    inputs, labels = of or (torch.arange(12.0).view(6, 2), torch.arange(6))
    return Examples(inputs[first:last], labels[first:last], transform)


def twice(samples, *examples):
    samples.of(examples)
    return samples.of(examples)


def is_copy(found, given):
    return found.inputs.untyped_storage().data_ptr() != given.inputs.untyped_storage().data_ptr()


def test_a_storage_is_copied_once_for_all_clients_when_it_is_read_again():
    tensors = torch.arange(12.0).view(6, 2), torch.arange(6)
    first, second = stored(0, 4, of=tensors), stored(4, 6, of=tensors)
    samples = DeviceSamples(CPU, limit=1000)
    assert samples.of([first])[0] is first
    a, b = samples.of([first, second])
    assert a.inputs.untyped_storage().data_ptr() == b.inputs.untyped_storage().data_ptr()
    assert is_copy(a, first)
    assert a.inputs.equal(first.inputs)
    assert b.inputs.equal(second.inputs)
    assert b.labels.equal(second.labels)


def test_a_view_keeps_its_strides():
    columns = torch.arange(12.0).view(2, 6).T
    (found,) = twice(DeviceSamples(CPU, limit=1000), Examples(columns[1:4], torch.arange(3)))
    assert found.inputs.equal(columns[1:4])
    assert found.inputs.stride() == columns.stride()


def test_a_write_is_copied():
    examples, samples = stored(), DeviceSamples(CPU, limit=1000)
    twice(samples, examples)
    examples.labels.zero_()
    assert samples.of([examples])[0] is examples
    assert samples.of([examples])[0].labels.sum() == 0


def test_copies_do_not_outlive_their_storage():
    samples = DeviceSamples(CPU, limit=1000)
    for _ in range(3):
        (found,) = twice(samples, stored())
        del found
        gc.collect()
    assert len(samples._known) == 2


@pytest.mark.parametrize("kept", [0, 95, 96])  # 48 bytes of labels, and as many of inputs
def test_what_does_not_fit_stays_on_the_cpu(kept):
    examples = stored()
    assert is_copy(twice(DeviceSamples(CPU, limit=kept), examples)[0], examples) is (kept == 96)


def test_a_device_without_room_keeps_no_copies(monkeypatch):
    def full(*args, **kwargs):
        raise RuntimeError("out of memory")

    examples, samples = stored(), DeviceSamples(CPU, limit=1000)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", full)
        assert twice(samples, examples)[0] is examples
    assert twice(samples, examples)[0] is examples


def test_samples_that_draw_random_numbers_stay_with_their_transform():
    images = torch.zeros(6, 1, 4, 4), torch.arange(6)
    samples = DeviceSamples(CPU, limit=10_000)
    plain, cropped = stored(of=images, transform=Normalize((0.5,), (0.5,))), stored(of=images, transform=CropFlip(1))
    assert twice(samples, cropped)[0] is cropped
    assert twice(samples, plain, cropped)[0] is plain  # all of a stack are read in the same place
    (found,) = twice(samples, plain)
    assert is_copy(found, plain)
    assert found.__getitems__([2])[0].equal(plain.__getitems__([2])[0])


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Train a federation whose samples may take a number of bytes on the device; return scores and weights."""

    def run(engine, limit):
        monkeypatch.setattr(device_samples, "_limit_of", lambda device: limit)
        trainer = FederatedTrainer(
            algorithm=FedAvg(),
            federation=Federation(clients_per_round=5, local_engine=engine, pictures_every_n_rounds=0),
            accelerator="cpu",
            max_rounds=3,
            default_root_dir=str(tmp_path),
            enable_progress_bar=False,
            seed=1,
        )
        data = FederatedDigits(num_clients=6, partition=Dirichlet(0.5), batch_size=16, eval_split="test", seed=1)
        torch.manual_seed(1)
        module = MLP(num_classes=10, sample_shape=(1, 8, 8), lr=0.1)
        return trainer.fit(module, data), module.state_dict()

    return run


@pytest.mark.parametrize("engine", ["fast", "stacked"])
def test_a_run_has_the_same_bits(engine, run, monkeypatch):
    made = []
    copied = DeviceSamples._copied
    monkeypatch.setattr(DeviceSamples, "_copied", lambda self, whole: made.append(whole.nbytes) or copied(self, whole))
    scores, weights = run(engine, limit=0)
    assert not made
    scores_of_copies, weights_of_copies = run(engine, limit=2**20)
    assert made
    assert scores_of_copies == scores
    assert all(weights_of_copies[name].equal(weight) for name, weight in weights.items())


def test_a_hook_of_the_transfer_gets_batches_of_the_cpu(monkeypatch, tmp_path):
    class Moves(FederatedDigits):
        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

    monkeypatch.setattr(device_samples, "_limit_of", lambda device: 2**20)
    monkeypatch.setattr(DeviceSamples, "_copied", None)  # a copy would fail
    trainer = FederatedTrainer(
        algorithm=FedAvg(),
        federation=Federation(clients_per_round=2, local_engine="fast"),
        accelerator="cpu",
        max_rounds=2,
        default_root_dir=str(tmp_path),
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(MLP(num_classes=10, sample_shape=(1, 8, 8), lr=0.1), Moves(num_clients=2, eval_split="test"))
