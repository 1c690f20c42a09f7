"""Fuzzing of everything that reads bytes: messages, orders, answers, sparse files and the checkpoint files of a run.

Valid bytes are changed at random and read: bits, bytes, lengths and longer pieces, with huge numbers, duplicated names
and names that are paths; in archives also the records, in checkpoints the values, and in databases the rows, with
corrected checksums. Only errors of the package may be raised, no allocation may fail with a limit of 96 MB above the
memory of the process, and no file may be created outside the run folder.

    python tests/stress/fuzz.py --minutes 10 --out result.json
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import platform
import random
import resource
import shutil
import sqlite3
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_sparsefl import FederatedTrainer, Federation, FedSpa, export_sparse, load_sparse
from lightning_sparsefl.data import FederatedBlobs
from lightning_sparsefl.errors import CheckpointMismatch, MalformedPayload, SparseFLError
from lightning_sparsefl.federated.commands.run import Run
from lightning_sparsefl.federated.distributed.ranks import Ranks
from lightning_sparsefl.federated.exchange.encoding import (
    decode_answer,
    decode_order,
    encode_answer,
    encode_order,
    order_header,
)
from lightning_sparsefl.federated.exchange.hashing import fingerprint
from lightning_sparsefl.federated.exchange.orders import Answer, ClientFacts, Order
from lightning_sparsefl.federated.storage.record_database import RecordDatabase, row_digest
from lightning_sparsefl.federated.storage.shards import shard_name
from lightning_sparsefl.models import MLP
from lightning_sparsefl.sparse.masks import digest
from lightning_sparsefl.types import Message, Update
from lightning_sparsefl.wire import Codec

HEADROOM = 96 * 2**20
HUGE = (b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\xff" * 4, b"\xff\xff\xff\x7f", b"\x00\x00\x00\x80", b"\xfe\xff")
PATHS = (b"../../outside", b"/tmp/outside", b"..\\outside")


@dataclass
class Target:
    """A reader of bytes."""

    seeds: list[bytes]
    """Valid bytes."""
    read: Callable[[bytes], object]
    error: type[SparseFLError]
    """Expected error for malformed bytes."""


@dataclass
class Found:
    """Results of a target."""

    cases: int = 0
    refused: int = 0
    slowest_seconds: float = 0.0
    strangers: Counter[str] = field(default_factory=Counter)
    """Errors that are not of the package, by type and text."""
    hungry: int = 0
    """Number of failed allocations."""

    def report(self) -> dict[str, Any]:
        """Return the results as plain values."""
        return {
            "cases": self.cases,
            "refused": self.refused,
            "read": self.cases - self.refused,
            "foreign_errors": sum(self.strangers.values()),
            "failed_allocations": self.hungry,
            "slowest_seconds": self.slowest_seconds,
        }


# ---- bytes


def mutate(data: bytes, pick: random.Random, other: bytes = b"") -> bytes:
    """Change bytes in one to four places."""
    out = bytearray(data)
    for _ in range(pick.choice((1, 1, 1, 2, 4))):
        at, length = pick.randrange(len(out) + 1), pick.choice((1, 1, 2, 4, 8, 32))
        piece = pick.choice((pick.randbytes(length), pick.choice(HUGE), bytes(length), pick.choice(PATHS)))
        source = other if other and pick.random() < 0.5 else bytes(out)
        start = pick.randrange(len(source) + 1)
        how = pick.randrange(7)
        if how == 0 and at < len(out):
            out[at] ^= 1 << pick.randrange(8)
        elif how == 1:
            out[at : at + len(piece)] = piece
        elif how == 2:
            out[at:at] = piece
        elif how == 3:
            del out[at : at + length]
        elif how == 4:
            out[at:at] = source[start : start + 8 * length]
        elif how == 5:
            out[at : at + length] = source[start : start + length]
        elif pick.random() < 0.3:
            del out[at:]
    return bytes(out)


def mutate_archive(data: bytes, pick: random.Random, other: bytes = b"") -> bytes:
    """Change, duplicate, rename, drop or compress a record of an archive, with correct checksums."""
    if pick.random() < 0.4:
        return mutate(data, pick, other)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
    at = next(i for i, (name, _) in enumerate(records) if name.endswith("data.pkl"))
    at = pick.randrange(len(records)) if pick.random() < 0.3 else at
    name, content = records[at]
    how = pick.randrange(8)
    if how < 5:
        records[at] = name, mutate(content, pick, records[pick.randrange(len(records))][1])
    elif how == 5:
        records[at] = pick.choice(PATHS).decode() + name, content
    elif how == 6:
        records.insert(at, (pick.choice(records)[0], content))
    else:
        del records[at]
    packed, compress = io.BytesIO(), pick.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with warnings.catch_warnings(), zipfile.ZipFile(packed, "w", compress) as archive:
        warnings.simplefilter("ignore")  # for two records with one name
        for name, content in records:
            with archive.open(_entry(name, compress), "w") as file:
                file.write(content)
    return packed.getvalue()


def _entry(name: str, compress: int) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name)
    entry.compress_type = compress
    return entry


def mutate_header(data: bytes, pick: random.Random, other: bytes = b"") -> bytes:
    """Change a value or a name in the header of a safetensors file, or any bytes."""
    if pick.random() < 0.4:
        return mutate(data, pick, other)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if pick.random() < 0.5:
        tensors = json.loads(header["__metadata__"]["tensors"])
        _change(tensors, pick)
        header["__metadata__"]["tensors"] = json.dumps(tensors)
    else:
        _change(header, pick)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def mutate_exchange(data: bytes, pick: random.Random, other: bytes = b"") -> bytes:
    """Change a value or a name in the header of an order or an answer, or any bytes."""
    if pick.random() < 0.4:
        return mutate(data, pick, other)
    end = 4 + int.from_bytes(data[:4], "little")
    header = json.loads(data[4:end])
    _change(header, pick)
    text = json.dumps(header).encode()
    return len(text).to_bytes(4, "little") + text + data[end:]


def mutate_content(data: bytes, pick: random.Random, other: bytes = b"") -> bytes:
    """Change one to three values of a checkpoint, with a correct checksum, or of a record."""
    content = torch.load(io.BytesIO(data), weights_only=True)
    for _ in range(pick.choice((1, 1, 2, 3))):
        _change(content, pick, STRANGE + STRANGE_TENSORS)
    own = content.get("sparsefl")
    if isinstance(own, dict):
        own.pop("checksum", None)
        own["checksum"] = fingerprint(content)
    packed = io.BytesIO()
    torch.save(content, packed)
    return packed.getvalue()


def mutate_rows(data: bytes, pick: random.Random, other: bytes = b"") -> bytes:
    """Change the content of a row in a database of records, with a correct checksum, or any bytes."""
    if pick.random() < 0.4:
        return mutate(data, pick, other)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.sqlite"
        path.write_bytes(data)
        with closing(sqlite3.connect(path)) as database, database:
            rows = database.execute("SELECT rowid, client, round, content FROM records").fetchall()
            row, client, version, content = pick.choice(rows)
            changed = pick.choice((mutate_archive, mutate_content))(content, pick, b"")
            database.execute(
                "UPDATE records SET content = ?, digest = ? WHERE rowid = ?",
                (changed, row_digest(client, version, changed), row),
            )
        return path.read_bytes()


def accept_rows(path: Path) -> None:
    """Write into a checkpoint what it would contain if it had been written with the present rows of the shards.

    Args:
        path: Checkpoint of a run with `federation.store: disk`.
    """
    content = torch.load(path, weights_only=True)
    own = content["sparsefl"]
    sums = own["server records"]["checksums"]
    for key in sums:
        shard, round = map(int, key.split("/"))
        with closing(RecordDatabase(path.parent / "clients", shard_name("server", shard))) as database:
            sums[key] = f"{database._sum(round):032x}"
        with closing(sqlite3.connect(database.path)) as rows, rows:
            rows.execute("UPDATE served SET total = ? WHERE round = ?", (sums[key], round))
    del own["checksum"]
    own["checksum"] = fingerprint(content)
    torch.save(content, path)


STRANGE: tuple[Any, ...] = (2**62, 2**31, -1, 0, 1.5, True, None, "8", [], {}, [2**40, 2**40], [1] * 70, 10**30)
STRANGE_TENSORS = (torch.zeros(0), torch.ones(3, dtype=torch.uint8), torch.full((2, 2), torch.nan), torch.tensor(2**62))


METHODS_OWN = "extra"
"""State whose meaning only the method knows, so that changes cannot be detected (docs/security.md)."""


def _change(tree: dict[Any, Any], pick: random.Random, values: Sequence[Any] = STRANGE) -> None:
    names = [name for name in tree if name != METHODS_OWN]
    if not names:
        return
    name = pick.choice(names)
    value = tree[name]
    strange = copy.deepcopy(pick.choice(values))
    if isinstance(value, dict) and value and pick.random() < 0.8:
        _change(value, pick, values)
    elif isinstance(value, list) and value and pick.random() < 0.7:
        value[pick.randrange(len(value))] = strange
    elif pick.random() < 0.3:
        tree[pick.choice(PATHS).decode()] = tree.pop(name)
    else:
        tree[name] = strange


# ---- targets


def wire_targets() -> dict[str, Target]:
    """Create the targets for the decoders of messages and updates."""
    schema = {"a": torch.zeros(6), "b": torch.zeros(20, 30), "n": torch.zeros(2, dtype=torch.int64)}
    rng = torch.Generator().manual_seed(0)
    few = torch.rand(20, 30, generator=rng) < 0.01
    masks = {"a": torch.arange(6) < 3, "b": few, "x": torch.tensor([True, False])}
    rows = torch.zeros(20, 30, dtype=torch.bool)
    rows[:10, ::2] = True
    codec, dense = Codec(schema), Message(weights=schema)
    message = Message(
        weights={"b": torch.randn(20, 30, generator=rng), "a": torch.ones(6), "x": torch.ones(2)},
        masks=masks,
        trainable={"b": ~few, "a": masks["a"]},
        extra={"c": {"b": torch.randn(20, 30, generator=rng) * few, "y": torch.zeros(9)}},
    )
    grid = Message(weights=schema, masks={"b": rows})
    update = Update(
        weights={"a": torch.ones(6), "x": torch.ones(2)},
        votes={"a": ~masks["a"]},
        metrics={"loss": 1.0, "acc": 0.5},
        shared={"masks": masks, "list": [None, True, -5, 0.5, "s", ("t",), {"b": ~few}], "w": torch.arange(3)},
    )
    messages = [codec.encode_message(value) for value in (message, grid, dense)]
    known = codec.encode_message(message, masks)
    updates = [codec.encode_update(update, message)]
    return {
        "message": Target(messages, codec.decode_message, MalformedPayload),
        "message_known": Target([known], lambda data: codec.decode_message(data, masks), MalformedPayload),
        "update": Target(updates, lambda data: codec.decode_update(data, message), MalformedPayload),
    }


def exchange_targets() -> dict[str, Target]:
    """Create the targets for the decoders of orders and answers."""
    schema = {"a": torch.zeros(6), "b": torch.zeros(20, 30)}
    masks = {"b": torch.arange(600).reshape(20, 30) % 7 == 0}
    codec, message = Codec(schema), Message(weights=schema, masks=masks)
    facts = ClientFacts(num_examples=5, capacity=0.5, max_rounds=3, local_epochs=2)
    order = Order("run", 1, 2, "train", facts, "key", message, ("val", "test"), digest(masks), 2, (1, 2))
    update = Update(weights=schema, metrics={"loss": 1.0})
    size = codec.update_size(update, message)
    scores = {"val": {"acc": 0.5}}
    answers = [
        Answer("run", 1, 2, "train", 5, update=update, up=size, scores=scores, version=3, elapsed=0.5),
        Answer("run", 1, 2, "score", 5, failure="its data is missing"),
    ]

    def read_order(data: bytes) -> object:
        header, body = order_header(data)
        return decode_order(header, body, codec, None if header["held"] is None else masks)

    return {
        "order": Target([encode_order(order, codec, masks)], read_order, MalformedPayload),
        "answer": Target(
            [encode_answer(answer, codec, message) for answer in answers],
            lambda data: decode_answer(data, codec, message),
            MalformedPayload,
        ),
    }


def file_target(folder: Path) -> Target:
    """Create the target for the reader of sparse files."""
    path, eye = folder / "w.safetensors", torch.eye(64)
    export_sparse({"d": torch.ones(3), "s": eye, "h": eye.half(), "e": torch.zeros(0, 2), "n": torch.tensor(3)}, path)

    def read(data: bytes) -> object:
        path.write_bytes(data)
        return load_sparse(path)

    return Target([path.read_bytes()], read, CheckpointMismatch)


def checkpoint_targets(folder: Path) -> dict[str, Target]:
    """Create the targets for the files of a checkpoint: the checkpoint itself, record files, and the database."""
    last, records, goes_on = files_of_a_run(folder / "ram", "ram")
    _, database, _ = files_of_a_run(folder / "disk", "disk")
    return {"checkpoint": last, "checkpoint_content": goes_on, "records": records, "database": database}


def files_of_a_run(folder: Path, store: Literal["ram", "disk"]) -> tuple[Target, Target, Target]:
    """Create targets that read the last checkpoint and the newest records of a run, and one that resumes the run."""
    with redirect_stdout(io.StringIO()):
        trainer = _fit(folder, store)
    assert trainer.run_folder is not None
    last = trainer.run_folder / "checkpoints" / "last.ckpt"
    trainer.fabric.launch()
    run = Run(trainer.options, Ranks(trainer.fabric), _module(), _data(), str(last))

    def reads(path: Path) -> Target:
        good, checkpoint = path.read_bytes(), last.read_bytes()

        def read(content: bytes) -> object:
            path.write_bytes(content)
            try:
                if path.suffix == ".sqlite":
                    with suppress(SparseFLError, sqlite3.Error):
                        accept_rows(last)
                return run.start()
            finally:
                last.write_bytes(checkpoint)
                path.write_bytes(good)

        return Target([good], read, CheckpointMismatch)

    def go_on(content: bytes) -> object:
        with tempfile.TemporaryDirectory(dir=folder) as place, redirect_stdout(io.StringIO()):
            copied = Path(place) / last.relative_to(folder)
            shutil.copytree(last.parents[1], copied.parents[1])
            copied.write_bytes(content)
            return _fit(Path(place), store, str(copied))

    return (
        reads(last),
        reads(max((last.parent / "clients").glob("server*"))),
        Target([last.read_bytes()], go_on, CheckpointMismatch),
    )


def _fit(folder: Path, store: Literal["ram", "disk"], ckpt_path: str | None = None) -> FederatedTrainer:
    """Train two rounds, or a third one from a checkpoint."""
    trainer = FederatedTrainer(
        algorithm=FedSpa(density=0.5),
        federation=Federation(clients_per_round=2, select="personal/val_acc", pictures_every_n_rounds=0, store=store),
        max_rounds=2 if ckpt_path is None else 3,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        default_root_dir=str(folder),
        seed=0,
    )
    trainer.fit(_module(), _data(), ckpt_path)
    return trainer


def _data() -> FederatedBlobs:
    return FederatedBlobs(num_clients=4, num_classes=3, dim=4, val_fraction=0.2, batch_size=8)


def _module() -> MLP:
    torch.manual_seed(0)
    return MLP(num_classes=3, sample_shape=(1, 1, 4))


MUTATIONS: Mapping[str, Callable[[bytes, random.Random, bytes], bytes]] = {
    "order": mutate_exchange,
    "answer": mutate_exchange,
    "file": mutate_header,
    "checkpoint": mutate_archive,
    "checkpoint_content": mutate_content,
    "records": mutate_archive,
    "database": mutate_rows,
}
"""Mutations of the targets for which :func:`mutate` is not used alone."""


def make_targets(folder: Path) -> dict[str, Target]:
    """Create all targets.

    Args:
        folder: Folder for files and a small run.
    """
    return {**wire_targets(), **exchange_targets(), "file": file_target(folder), **checkpoint_targets(folder)}


# ---- the loop


@contextmanager
def little_memory(room: int = HEADROOM) -> Iterator[None]:
    """Limit the address space to what is used now plus `room` bytes."""
    if not Path("/proc/self/statm").exists():  # the used address space is only known on Linux
        yield
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def wanted_memory(error: BaseException | None) -> bool:
    """Return whether a failed allocation has caused an error."""
    while error is not None:
        if isinstance(error, MemoryError) or "llocate" in str(error) or "nough memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def attempt(name: str, target: Target, pick: random.Random, found: Found) -> None:
    """Change valid bytes and read them once."""
    change = MUTATIONS.get(name, mutate)
    data = change(pick.choice(target.seeds), pick, pick.choice(target.seeds))
    start = time.perf_counter()
    try:
        target.read(data)
    except SparseFLError as error:
        found.refused += 1
        found.hungry += wanted_memory(error)
        if type(error) is SparseFLError or not str(error):
            found.strangers[f"{type(error).__name__}: {error}"] += 1
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        found.refused += 1
        found.hungry += wanted_memory(error)
        found.strangers[f"{type(error).__name__}: {str(error)[:200]}"] += 1
    found.cases += 1
    found.slowest_seconds = max(found.slowest_seconds, time.perf_counter() - start)


def main() -> None:
    """Fuzz, print JSON, and write it to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1, help="minutes of fuzzing, shared by the targets")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the changes")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pick = random.Random(arguments.seed)
    result: dict[str, Any] = {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "minutes": arguments.minutes,
        "seed": arguments.seed,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "inside"
        folder.mkdir()
        targets = make_targets(folder)
        found = {target: Found() for target in targets}
        end = time.monotonic() + 60 * arguments.minutes
        before = sorted(path.relative_to(name) for path in Path(name).rglob("*"))
        with little_memory():
            while time.monotonic() < end:
                for target in targets:
                    attempt(target, targets[target], pick, found[target])
        after = sorted(path.relative_to(name) for path in Path(name).rglob("*"))
    result |= {target: found[target].report() for target in targets}
    result["new_files"] = len(set(after) - set(before))
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    strangers = [f"{target}: {text}" for target in targets for text in found[target].strangers]
    if strangers:
        raise SystemExit("\n".join(strangers))


if __name__ == "__main__":
    main()
