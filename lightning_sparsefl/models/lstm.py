"""Language model of two LSTM layers, the network that FedLPS trains on Reddit (2,845,392 parameters)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from lightning_sparsefl.errors import require
from lightning_sparsefl.models.task import Classifier, check_classes, mean_logits

_IGNORED = -100
"""Target of a position that does not count, the default of `cross_entropy`."""


class NextTokenScores(Classifier):
    """Scores of a classifier of tokens, over the positions whose target is not -100."""

    unknown: int | None

    def set_up_scores(self, num_classes: int, unknown: int | None) -> None:
        """Create the metrics.

        Args:
            num_classes: Size of the vocabulary.
            unknown: Token whose prediction never counts as correct.
        """
        self.unknown = unknown
        self.val_acc = MulticlassAccuracy(num_classes, average="micro", ignore_index=_IGNORED, validate_args=False)
        self.test_acc = MulticlassAccuracy(num_classes, average="micro", ignore_index=_IGNORED, validate_args=False)

    def training_loss(self, logits: Tensor | list[Tensor], targets: Tensor) -> Tensor:
        """Compute the mean cross-entropy over the positions that count; 0 for a batch without any."""
        loss = super().training_loss(logits, targets)
        return torch.where((targets != _IGNORED).any(), loss, torch.zeros_like(loss))  # the mean of nothing is NaN

    def train_acc(self, logits: Tensor | list[Tensor], targets: Tensor) -> Tensor:
        """Compute the accuracy over the positions that count."""
        right, counted = self.predict(mean_logits(logits)) == targets, targets != _IGNORED
        return (right & counted).sum() / counted.sum().clamp_min(1)

    def predict(self, logits: Tensor) -> Tensor:
        """Return the most probable tokens, with -1 for the token of unknown words.

        Args:
            logits: Logits of shape (batch, vocabulary, length).
        """
        tokens = logits.argmax(1)
        return tokens if self.unknown is None else tokens.masked_fill(tokens == self.unknown, -1)

    def _score(self, batch: tuple[Tensor, Tensor], split: str, accuracy: MulticlassAccuracy) -> None:
        """Log the mean loss and the accuracy over the positions that count, not over sequences."""
        inputs, targets = batch
        logits, counted = mean_logits(self(inputs)), int((targets != _IGNORED).sum())
        accuracy.update(self.predict(logits), targets)
        loss = F.cross_entropy(logits, targets) if counted else logits.new_zeros(())  # which counts 0 times
        self.log(f"{split}_loss", loss, batch_size=counted)
        self.log(f"{split}_acc", accuracy, batch_size=counted, prog_bar=True)


class LanguageLSTM(NextTokenScores):
    """Language model that predicts the next token: an embedding, two LSTM layers and a linear decoder.

    A batch is two int64 tensors of shape (batch, length): the tokens, and the token that follows each of them.
    Accuracies and losses are means over all positions whose target is not -100; those of a training epoch are means of
    its batches, weighted by their sequences.

    Args:
        num_classes: Size of the vocabulary.
        embedding: Size of the embedding and of the second LSTM layer.
        hidden: Size of the first LSTM layer.
        length: Number of tokens in a sequence, used only to count FLOPs; that of `data.length`.
        tied: Whether the decoder shares the weights of the embedding.
        lr: Learning rate.
        momentum: Momentum of SGD.
        weight_decay: Weight decay (L2 penalty) of SGD.
        unknown: Token whose prediction never counts as correct, the one for unknown words in LEAF; None for all
            tokens alike.

    Raises:
        InvalidOption: If an option is out of its range.

    Example:
        >>> sum(parameter.numel() for parameter in LanguageLSTM(num_classes=10_000).parameters())
        2845392
    """

    def __init__(
        self,
        num_classes: int = 10_000,
        embedding: int = 200,
        hidden: int = 256,
        length: int = 10,
        tied: bool = True,
        lr: float = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        unknown: int | None = None,
    ) -> None:
        check_classes(num_classes)
        for name, value in {"embedding": embedding, "hidden": hidden, "length": length}.items():
            require(value >= 1, f"model.{name}", value, "a whole number >= 1")
        super().__init__(
            _Language(num_classes, embedding, hidden, tied),
            num_classes=num_classes,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
        )
        self.set_up_scores(num_classes, unknown)
        self.example_input_array = torch.zeros(1, length, dtype=torch.int64)


class _Language(nn.Module):
    """Network with logits of shape (batch, vocabulary, length), the layout that `cross_entropy` expects.

    With tied weights the decoder holds them, since it is the head of the network.
    """

    def __init__(self, vocabulary: int, embedding: int, hidden: int, tied: bool) -> None:
        super().__init__()
        self.embedding = None if tied else nn.Embedding(vocabulary, embedding)
        self.lstm1 = nn.LSTM(embedding, hidden, batch_first=True)
        self.lstm2 = nn.LSTM(hidden, embedding, batch_first=True)
        self.decoder = nn.Linear(embedding, vocabulary)
        if tied:  # one name for the shared parameter: under two it would be averaged, sent and counted twice
            nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
            nn.init.zeros_(self.decoder.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        vectors = F.embedding(tokens, self.decoder.weight) if self.embedding is None else self.embedding(tokens)
        states, _ = self.lstm1(vectors)
        states, _ = self.lstm2(states)
        logits: Tensor = self.decoder(states)
        return logits.transpose(1, 2)
