"""What of a deployment's run folder is equal to a simulation's, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_sparsefl.federated.storage.safe_load import load_plain
from lightning_sparsefl.testing.contents import comparable, difference, rows, stored_records

_OF_BYTES = ("ledger", "clients.csv", "metrics.csv")
"""Parts with numbers of bytes."""


def compare(simulated: Path, deployed: Path, same_bytes: bool = True) -> dict[str, str]:
    """Compare two run folders.

    Args:
        simulated: Run folder of `sparsefl fit`.
        deployed: Run folder of the same configuration on Flower.
        same_bytes: Whether the messages have equal sizes, which those of secure sums have not.

    Returns:
        By part of the folder, where the two first differ, as a clause; empty if they are equal.
    """
    one, other = _parts(simulated), _parts(deployed)
    names = [name for name in one if same_bytes or name not in _OF_BYTES]
    return {name: difference(comparable(one[name]), comparable(other[name])) for name in names}


def _parts(folder: Path) -> dict[str, Any]:
    content = load_plain(folder / "checkpoints" / "last.ckpt")
    own = content["sparsefl"]
    records = {client: versions[max(versions)] for client, versions in stored_records(folder)["server"].items()}
    return {
        "global weights": content["state_dict"],
        "server state": {name: own[name] for name in ("masks", "extra", "sampler", "round") if name in own},
        "server's records": {client: record["shared"] for client, record in sorted(records.items())},
        "ledger": own["ledger"],
        "clients.csv": rows(folder / "clients.csv"),
        "metrics.csv": rows(folder / "metrics.csv"),
    }
