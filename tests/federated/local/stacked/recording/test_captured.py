"""Captured operations are those that were recorded; that steps keep their bytes, other tests of this folder show."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from helpers.captures import capture_on_cpu
from lightning_sparsefl.federated.local.stacked.recording.captured import CapturedOperations, graphs_of
from lightning_sparsefl.federated.local.stacked.recording.operations import OperationRecorder


def test_results_and_written_inputs_are_those_of_the_operations():
    total, weight, x = torch.zeros(2), torch.ones(1, 3).expand(2, 3), torch.ones(2, 3)
    labels, unused = torch.tensor([0, 1]), torch.zeros(1)
    with OperationRecorder([total, weight, x, labels, unused]) as recorder:
        total += (weight * x).sum(1)
        results = [x * torch.tensor([1.0, 2.0, 3.0]), labels + 1]
    operations = recorder.operations(results)
    assert (operations.written, operations.used) == ([0], [0, 1, 2, 3])
    captured = CapturedOperations(operations, [total, weight, x, labels, unused], capture_on_cpu)
    found = []
    for factor in (2.0, 3.0):
        total, weight = torch.ones(2), torch.full((1, 3), factor).expand(2, 3)
        found.append(captured.run(total, weight, 5 * x, labels, unused))
        assert total.tolist() == [1 + 15 * factor] * 2
    assert all(values.tolist() == [[5, 10, 15]] * 2 and numbers.tolist() == [1, 2] for values, numbers in found)
    assert found[0][0].data_ptr() != found[1][0].data_ptr()


@pytest.mark.parametrize("moved", [lambda x: x.to("meta"), lambda x: torch.zeros(2, device="meta").copy_(x)])
def test_a_copy_to_another_device_is_not_captured(moved):
    x, captures = torch.ones(2), []
    with OperationRecorder([x]) as recorder:
        moved(x)
    operations = recorder.operations([x])
    assert operations.copies_across
    with pytest.raises(ValueError, match="a graph cannot copy to another device"):
        CapturedOperations(operations, [x], captures.append)
    assert not captures


def test_constants_live_as_long_as_the_graph_that_reads_them():
    """A graph knows addresses only, and holds nothing that keeps their memory."""
    x = torch.ones(3)
    with OperationRecorder([x]) as recorder:
        results = [x + torch.tensor([1.0, 2.0, 3.0])]
    operations = recorder.operations(results)
    constants = weakref.ref(operations.run.__self__)
    captured = CapturedOperations(operations, [x], lambda work: (work(), lambda: None))
    del recorder, results, operations
    gc.collect()
    assert captured.run(x)[0].tolist() == [2, 3, 4]
    assert constants() is not None


def test_graphs_leave_half_of_the_memory_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 51)
    work = []
    with pytest.raises(MemoryError):
        graphs_of(torch.device("cuda"))(lambda: work.append(1))
    assert not work
    assert graphs_of(torch.device("cpu")) is None
