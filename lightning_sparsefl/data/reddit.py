"""Reddit comments in the format of LEAF (Caldas et al., arXiv:1812.01097), with one client per user."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_sparsefl.data.federated import FederatedDataModule
from lightning_sparsefl.errors import DataNotFound, InvalidOption, is_whole, require
from lightning_sparsefl.seeds import generator

SOURCE = "https://github.com/TalwalkarLab/leaf/tree/master/data/reddit"
PADDING, UNKNOWN = 0, 1
"""Tokens for padding and for words outside the vocabulary, as in LEAF."""
IGNORED = -100
"""Target of padded positions, which `torch.nn.functional.cross_entropy` leaves out."""
_Users = dict[str, dict[str, list[Any]]]


class FederatedReddit(FederatedDataModule):
    """Next-word prediction on comments of Reddit users (December 2017), of which each is a client.

    A sample is a sequence of `length` tokens of one comment, int64, and its target the token that follows each of them;
    targets of padded positions are -100. Sequences without a target are left out, and so are users without training or
    test sequences. The vocabulary consists of the `num_classes` - 2 most frequent tokens in the training files of all
    users, and of the two tokens for padding (0) and unknown words (1). LEAF stores its vocabulary as a pickle, which is
    not read; the rule is LEAF's.

    The published files are ``train/*.json`` and ``test/*.json`` with the key ``user_data``: comments as lists of
    sequences in ``x``, and in ``y`` their ``target_tokens`` and ``count_tokens``.

    Args:
        root: Folder that contains ``reddit/train`` and ``reddit/test``.
        num_classes: Size of the vocabulary.
        length: Number of tokens in a sequence.
        users: Users that are clients: drawn at ``random``, or those with the ``largest`` numbers of training sequences,
            as in FedLPS (arXiv:2412.07216).
        options: Further arguments of :class:`FederatedDataModule`; `partition` has no effect.

    Raises:
        InvalidOption: If an option is out of its range.
    """

    num_train = 0

    def __init__(
        self,
        root: str = "data",
        *,
        num_classes: int = 10_000,
        length: int = 10,
        users: Literal["random", "largest"] = "random",
        **options: Any,
    ) -> None:
        require(users in ("random", "largest"), "data.users", users, "'random' or 'largest'")
        require(num_classes >= 3, "data.num_classes", num_classes, "a whole number >= 3")
        require(length >= 1, "data.length", length, "a whole number >= 1")
        self.root, self.users = os.path.expanduser(root), users
        self.num_classes, self.length, self.sample_shape = num_classes, length, (1, 1, length)
        self._owners: dict[str, Tensor] = {}
        super().__init__(**options)

    def prepare_data(self) -> None:
        """Check that the data is there, which is not downloaded, and write the files of `memory_map`.

        Raises:
            DataNotFound: If a folder is missing, with the page that offers the data.
        """
        for part in ("train", "test"):
            self._files(part)
        super().prepare_data()

    def load(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Load the sequences and targets of the chosen users, int64 of shape (sequences, length).

        Raises:
            DataNotFound: If a folder has no files, or a file is damaged or of another format.
            InvalidOption: If there are fewer users than clients, or sequences of another length.
        """
        parts = {part: self._read(part) for part in ("train", "test")}
        vocabulary = self._vocabulary(parts["train"].values())
        sizes, tests = ({name: _num_samples(own) for name, own in users.items()} for users in parts.values())
        users = self._choose({user: size for user, size in sizes.items() if size and tests.get(user)})
        tensors: list[Tensor] = []
        for part, content in parts.items():
            own = [self._tensors(content[user], vocabulary) for user in users]
            self._owners[part] = torch.cat([torch.full((len(x),), client) for client, (x, _) in enumerate(own)])
            tensors += [torch.cat([x for x, _ in own]), torch.cat([y for _, y in own])]
        return tensors[0], tensors[1], tensors[2], tensors[3]

    def assign(self, labels: Tensor, seed: int) -> Sequence[Tensor]:
        """Give each client the sequences of its user."""
        return [(self._owners["train"] == client).nonzero().flatten() for client in range(self.num_clients)]

    def choose_test(self, client: int, train_labels: Tensor, test_labels: Tensor, rng: torch.Generator) -> Tensor:
        """Choose test sequences of the client's user, at most `test_per_client`."""
        mine = (self._owners["test"] == client).nonzero().flatten()
        return mine[torch.randperm(len(mine), generator=rng)[: self.test_per_client]].sort().values

    def client_label_counts(self, client: int) -> Tensor:
        """Count the target tokens of a client's training sequences, int64 of shape (classes,)."""
        counts = torch.zeros(self.num_classes, dtype=torch.int64)
        for _, targets in self.client_train_dataloader(client):
            counts += torch.bincount(targets[targets != IGNORED], minlength=self.num_classes)
        return counts

    def _nominal_sizes(self) -> list[int]:
        """Return 0 for sizes that are unknown before the data is loaded."""
        require(is_whole(self.num_clients, 1), "data.num_clients", self.num_clients, "a whole number >= 1")
        return [self.examples_per_client or 0] * self.num_clients

    def _files(self, part: str) -> list[Path]:
        folder = Path(self.root) / "reddit" / part
        files = sorted(folder.glob("*.json"))
        if not files:
            raise DataNotFound(
                f"`FederatedReddit` found no JSON files in {folder.absolute()}; download the preprocessed data that "
                f"{SOURCE} links to, and move its folders `train` and `test` into {folder.parent.absolute()}, or set "
                "another folder with `--data.root <folder>`."
            )
        return files

    def _read(self, part: str) -> _Users:
        users: _Users = {}
        for path in self._files(part):
            users |= _users_in(path)
        return users

    def _vocabulary(self, users: Iterable[dict[str, list[Any]]]) -> dict[str, int]:
        """Return the number of each token: by descending frequency, then in alphabetical order."""
        counts = Counter(chain.from_iterable(_sequences(user["x"]) for user in users))
        del counts["<PAD>"]
        frequent = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[: self.num_classes - 2]
        words = {word: number for number, (word, _) in enumerate(frequent, start=UNKNOWN + 1)}
        return words | {"<PAD>": PADDING}

    def _choose(self, users: Mapping[str, int]) -> list[str]:
        """Choose one user per client, of users with their numbers of training sequences."""
        if len(users) < self.num_clients:
            raise InvalidOption(
                f"`data.num_clients` is {self.num_clients}, but {len(users)} users in {self.root}/reddit have training "
                "and test sequences with a target; lower it."
            )
        if self.users == "largest":
            return sorted(sorted(users, key=lambda user: (-users[user], user))[: self.num_clients])
        order = torch.randperm(len(users), generator=generator(self.seed_in_use(), "reddit users"))
        return [sorted(users)[place] for place in order[: self.num_clients].tolist()]

    def _tensors(self, user: dict[str, list[Any]], vocabulary: dict[str, int]) -> tuple[Tensor, Tensor]:
        """Return the tokens and the targets of a user's sequences."""
        inputs = self._numbers(chain.from_iterable(user["x"]), vocabulary)
        targets = self._numbers(chain.from_iterable(label["target_tokens"] for label in user["y"]), vocabulary)
        targets = targets.masked_fill(~torch.tensor(list(_are_targets(user))), IGNORED)
        some = (targets != IGNORED).any(1)
        return inputs[some], targets[some]

    def _numbers(self, sequences: Iterable[list[str]], vocabulary: dict[str, int]) -> Tensor:
        rows = [[vocabulary.get(word, UNKNOWN) for word in sequence] for sequence in sequences]
        wrong = next((len(row) for row in rows if len(row) != self.length), None)
        expected = f"{wrong}, the number of tokens of the sequences in {self.root}/reddit"
        require(wrong is None, "data.length", self.length, expected)
        return torch.tensor(rows)


def _users_in(path: Path) -> _Users:
    """Read the users of one file, and check that they have the fields that are used."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # no JSON, or no UTF-8
        content = None
    users = content.get("user_data") if isinstance(content, dict) else None
    if not isinstance(users, dict) or not all(map(_is_user, users.values())):
        raise DataNotFound(
            f"`FederatedReddit` found {path.absolute()} damaged or not in LEAF's format; replace it by the file of the "
            f"preprocessed data that {SOURCE} links to, or remove it."
        )
    return users


def _is_user(user: Any) -> bool:
    """Return whether a value has the fields of a user that are used."""
    if not isinstance(user, dict) or not _is_nested(user.get("x"), 3, str) or not _is_nested(user.get("y"), 1, dict):
        return False
    return all(
        _is_nested(label.get("target_tokens"), 2, str) and _is_nested(label.get("count_tokens"), 2, int, float)
        for label in user["y"]
    )


def _is_nested(value: Any, depth: int, *kinds: type) -> bool:
    """Return whether a value is a list, or for a larger depth a list of lists, of items of the given types."""
    if not isinstance(value, list):
        return False
    if depth == 1:
        return set(map(type, value)) <= set(kinds)
    return all(_is_nested(own, depth - 1, *kinds) for own in value)


def _num_samples(user: dict[str, list[Any]]) -> int:
    """Return the number of a user's sequences with a target; some have only those of empty comments, or none."""
    return sum(map(any, _are_targets(user)))


def _are_targets(user: dict[str, list[Any]]) -> Iterator[list[bool]]:
    """Yield which tokens are targets, for each sequence of a user.

    LEAF also counts the end of a comment, whose target is padding; a sequence may consist of that alone.
    """
    for label in user["y"]:
        for words, counts in zip(label["target_tokens"], label["count_tokens"], strict=False):
            yield [count > 0 and word != "<PAD>" for word, count in zip(words, counts, strict=False)]


def _sequences(comments: Iterable[Any]) -> Iterator[Any]:
    """Yield the tokens of all sequences of all comments."""
    return chain.from_iterable(chain.from_iterable(comments))
