"""Content in TensorBoard besides scalars: histograms, pictures, charts and hyper-parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from lightning_sparsefl.federated.exchange.plain_values import packed_mask
from lightning_sparsefl.federated.storage.record_store import RecordStore
from lightning_sparsefl.federated.tracking.tags import BY_BYTES, main_scores, scores_by_bytes, tagged, tags_of
from lightning_sparsefl.report import bin_edges
from lightning_sparsefl.report.measures.client_statistics import is_statistic
from lightning_sparsefl.report.measures.direction import higher_is_better
from lightning_sparsefl.report.overlap import MOST_CLIENTS
from lightning_sparsefl.sparse.masks import unpack
from lightning_sparsefl.types import ServerState

_COMPARED = ("comm/uplink_bytes_total", "comm/downlink_bytes_total", "flops/train_total", "density/all")
"""Metrics of the costs of a run, compared in addition to its scores."""
_LAYER = "density/layer/"
BY_KILOBYTES = "by_kilobytes"
"""Name of the folder in that of the logger with the scores whose x-axis is bytes."""


class Boards:
    """The TensorBoard loggers of a run.

    Args:
        loggers: All loggers of the run.
        hparams: Hyper-parameters of the run.
        declared: Whether the run has written the layout of its metrics before.
        sent: Bytes of the run so far, in kB; scores after them are dropped, since they were not committed.
    """

    def __init__(self, loggers: Sequence[Logger], hparams: Mapping[str, Any], declared: bool, sent: int = 0) -> None:
        self._boards = [logger for logger in loggers if isinstance(logger, TensorBoardLogger)]
        self._hparams, self._declared, self._sent = hparams, declared, sent
        self._by_bytes: list[SummaryWriter] = []

    def __bool__(self) -> bool:
        return bool(self._boards)

    def declare(self, scores: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        """Write the compared metrics and the layout of charts once, when the names of the scores are known.

        Args:
            scores: Scores of a round.
            metrics: Other logged keys of the round.
        """
        if self._declared:
            return
        self._declared = True
        compared = [name for name in scores if not is_statistic(name, scores, ("_std",))]
        compared.sort(key=lambda name: not higher_is_better(name))
        costs = [name for name in _COMPARED if name in metrics]
        for board in self._boards:
            tags = tags_of([*scores, *metrics])
            hparams_summary(board, self._hparams, [tags[name] for name in (*compared, *costs)])
            board.experiment.add_custom_scalars(_charts(scores, metrics))

    def scalars(self, number: int, metrics: Mapping[str, float], sent: int) -> None:
        """Write the metrics of a round under their tags, and the scores again with kilobytes as their x-axis.

        The latter are in a folder of their own, which TensorBoard shows as another run, since a tag has one x-axis.

        Args:
            number: Number of the round, from 0.
            metrics: Logged keys of the round.
            sent: Bytes of the run so far, in kB.
        """
        for board in self._boards:
            board.log_metrics(tagged(metrics), step=number)
        scores = scores_by_bytes(metrics)
        if scores and sent and not self._by_bytes:
            folders = [Path(board.log_dir) / BY_KILOBYTES for board in self._boards]
            # also of a run that was killed before its first commit, and starts over
            self._by_bytes = [
                SummaryWriter(folder, purge_step=self._sent + 1 if folder.exists() else None) for folder in folders
            ]
        for writer in self._by_bytes if sent else ():
            for tag, score in scores.items():
                writer.add_scalar(tag, score, sent)
            writer.flush()

    def close(self) -> None:
        """Close the files that no logger closes."""
        for writer in self._by_bytes:
            writer.close()

    def masks(self, number: int, server: ServerState, records: RecordStore) -> None:
        """Draw the masks of all layers: the fraction of clients that keep each weight, else the server's masks.

        Args:
            number: Number of the round, from 0.
            server: State of the server after the round.
            records: Records of the server about clients.
        """
        from lightning_sparsefl.report import masks, pictures  # matplotlib is slow to import

        kept = kept_by_clients(packed_masks(records, MOST_CLIENTS), server.weights) or server.masks
        if kept and self._boards:
            image = pictures.pixels(masks.mask_figure(kept, number, "round"))
            for board in self._boards:
                board.experiment.add_image("mask/layers", image, number)

    def histograms(self, number: int, personal: Mapping[int, Mapping[str, float]]) -> None:
        """Write the distribution of each metric over clients, without clients whose metric is not finite.

        Args:
            number: Number of the round, from 0.
            personal: Metrics by client.
        """
        for name in _names(personal):
            values = list(_finite(personal, name).values())
            for board in self._boards if values else ():
                edges = bin_edges(values, higher_is_better(name))
                board.experiment.add_histogram(f"clients/{name}", np.array(values), number, bins=edges)

    def pictures(
        self,
        number: int,
        metrics: Mapping[str, float],
        overlaps: tuple[Sequence[int], Tensor] | None,
        num_clients: int,
        personal: Mapping[int, Mapping[str, float]],
        scored: int,
    ) -> None:
        """Draw the overlap of clients' masks, the density of each layer, and the clients' sorted metrics.

        Args:
            number: Number of the round, from 0.
            metrics: Logged keys of the round.
            overlaps: Numbers of clients and the overlaps of their masks; None if fewer than two clients have masks.
            num_clients: Number of clients of the run.
            personal: Last metrics by client.
            scored: Number of finished rounds at the evaluation of these metrics.
        """
        from lightning_sparsefl.report import pictures  # matplotlib is slow to import

        figures = {}
        if overlaps is not None:
            figures["mask/overlap"] = pictures.overlap_figure(*overlaps, number, of=num_clients)
        layers = {n.removeprefix(_LAYER): v for n, v in metrics.items() if n.startswith(_LAYER)}
        if layers:
            figures["density/per_layer"] = pictures.density_figure(layers, number)
        for name in filter(higher_is_better, _names(personal)):
            values = _finite(personal, name)
            if values:
                figures[f"clients/{name}_sorted"] = pictures.clients_figure(values, name, scored - 1)
        for tag, figure in figures.items():
            image = pictures.pixels(figure)
            for board in self._boards:
                board.experiment.add_image(tag, image, number)


def packed_masks(records: RecordStore, most: int) -> dict[int, dict[str, Tensor]]:
    """Return the masks that clients uploaded last, with one bit per weight.

    Args:
        records: Records of the server about clients.
        most: Maximum number of clients to read, in ascending order of their numbers.

    Returns:
        Packed masks by client and name, without clients that have not uploaded masks.
    """
    found = {}
    clients: Iterable[int] = records.clients()
    for client in islice(clients, most):
        masks = (records.get(client) or {}).get("shared", {}).get("masks", {})
        found[client] = {name: packed_mask(mask) for name, mask in masks.items()}
    return {client: masks for client, masks in found.items() if masks}


def kept_by_clients(packed: Mapping[int, Mapping[str, Tensor]], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the fraction of clients that keep each weight.

    Args:
        packed: Packed masks by client and name.
        weights: Weights by name, in the order of the model.

    Returns:
        Fractions in [0, 1] by name, for tensors that any client has a mask of.
    """
    names = [name for name in weights if any(name in masks for masks in packed.values())]
    return {name: _mean_mask([masks.get(name) for masks in packed.values()], weights[name].shape) for name in names}


def _mean_mask(packed: Sequence[Tensor | None], shape: torch.Size) -> Tensor:
    """Return the mean of packed masks, in which None keeps all weights."""
    total = torch.zeros(shape)
    for bits in packed:
        total += 1.0 if bits is None else unpack(bits, shape)
    return total / len(packed)


def _names(personal: Mapping[int, Mapping[str, float]]) -> list[str]:
    return sorted({name for metrics in personal.values() for name in metrics})


def _finite(personal: Mapping[int, Mapping[str, float]], name: str) -> dict[int, float]:
    return {i: metrics[name] for i, metrics in personal.items() if math.isfinite(metrics.get(name, math.nan))}


def _charts(scores: Mapping[str, float], costs: Mapping[str, float]) -> dict[str, dict[str, list[Any]]]:
    """Return the custom scalars, one tag for each chart, so that its lines are runs."""
    main = main_scores(scores)
    tags = tags_of([*scores, *costs])
    shown = [name for name in _COMPARED if name in costs]
    return {
        "scores": {name: _chart(tags[name]) for name in main},
        "scores by kilobytes sent, both ways": {name: _chart(f"{BY_BYTES}/{name}") for name in main},
        "costs and density": {name: _chart(tags[name]) for name in shown},
    }


def _chart(tag: str) -> list[Any]:
    return ["Multiline", [f"^{re.escape(tag)}$"]]


def hparams_summary(logger: TensorBoardLogger, params: Mapping[str, Any], metrics: Sequence[str]) -> None:
    """Write hyper-parameters for TensorBoard's HParams tab, together with the metrics of these names.

    Lightning's logger would also write a point of value 0 for each metric; this writes only the declaration.

    Args:
        logger: TensorBoard logger.
        params: Hyper-parameters of the run.
        metrics: Names of the metrics.
    """
    from torch.utils.tensorboard.summary import hparams

    writer = logger.experiment._get_file_writer()
    for part in hparams(dict(params), dict.fromkeys(metrics, 0.0)):
        writer.add_summary(part)
