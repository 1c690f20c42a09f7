"""What the twins of methods that freeze share: the groups of the network, and fine-tuning at the end."""

from __future__ import annotations

from reference.harness import CLIENTS, close, compare, moved, seen_batches

BODY = {"net.0": 6 * 8 + 8, "net.2": 8 * 7 + 7}
HEAD = {"net.4": 7 * 3 + 3}


def compare_freezing(fit, method, twin_of, sgd, batch_size, **federation):
    """Every round and the fine-tuning of a run against the twin that `twin_of` makes of the initial weights."""
    initial, record = fit(method, sgd, batch_size, **federation)
    twin = twin_of(initial)
    compare(record, twin, batch_size)
    assert moved(record, initial)
    after = fit.left.scored_with
    batches, _ = seen_batches(record[-1]._replace(trained_on=fit.left.trained_on))
    for k in CLIENTS:
        close(after[k], twin.finetuned(batches[k]))
    return initial, record
