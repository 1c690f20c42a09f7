"""The passes of a recorded round, where clients pass a batch several times, or two models."""

from __future__ import annotations

from collections import defaultdict

from reference.harness import samples


def passes(done):
    """The samples of each pass by client, in order: in training mode, and in evaluation mode."""
    trained, evaluated = defaultdict(list), defaultdict(list)
    for training, numbers in done.passed_on:
        (trained if training else evaluated)[int(numbers[0]) // 100].append(numbers)
    return trained, evaluated


def every(count, passed):
    """Each batch once, of passes that come `count` times in a row."""
    for low in range(0, len(passed), count):
        assert len({numbers.tobytes() for numbers in passed[low : low + count]}) == 1
    assert len(passed) % count == 0
    return batches_of(passed[::count])


def batches_of(passed):
    """Inputs and labels of each pass."""
    return [samples(numbers) for numbers in passed]
