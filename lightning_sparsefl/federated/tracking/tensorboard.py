"""Content in TensorBoard besides scalars: histograms, pictures, charts and hyper-parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from torch import Tensor

from lightning_sparsefl.federated.exchange.plain_values import packed_mask
from lightning_sparsefl.federated.rounds.round_metrics import higher_is_better
from lightning_sparsefl.federated.storage.record_store import RecordStore
from lightning_sparsefl.report import bin_edges

_COMPARED = ("comm/uplink_bytes_total", "comm/downlink_bytes_total", "flops/train_total", "density/all")
"""Metrics of the costs of a run, compared in addition to its scores."""
_LAYER = "density/layer/"


class Boards:
    """The TensorBoard loggers of a run.

    Args:
        loggers: All loggers of the run.
        hparams: Hyper-parameters of the run.
        declared: Whether the run has written the layout of its metrics before.
    """

    def __init__(self, loggers: Sequence[Logger], hparams: Mapping[str, Any], declared: bool) -> None:
        self._boards = [logger for logger in loggers if isinstance(logger, TensorBoardLogger)]
        self._hparams, self._declared = hparams, declared

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
        compared = [name for name in scores if not name.endswith("_std")]
        compared.sort(key=lambda name: not higher_is_better(name))
        costs = [name for name in _COMPARED if name in metrics]
        for board in self._boards:
            hparams_summary(board, self._hparams, [*compared, *costs])
            board.experiment.add_custom_scalars(_charts(scores, metrics))

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
        records: RecordStore,
        num_clients: int,
        personal: Mapping[int, Mapping[str, float]],
        scored: int,
    ) -> None:
        """Draw the overlap of clients' masks, the density of each layer, and the clients' sorted metrics.

        Args:
            number: Number of the round, from 0.
            metrics: Logged keys of the round.
            records: Records of the server about clients.
            num_clients: Number of clients of the run.
            personal: Last metrics by client.
            scored: Number of finished rounds at the evaluation of these metrics.
        """
        from lightning_sparsefl.report import pictures  # matplotlib is slow to import

        figures = {}
        masks = packed_masks(records, pictures.MOST_CLIENTS)
        if len(masks) > 1:
            figures["mask/overlap"] = pictures.overlap_figure(masks, number, of=num_clients)
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


def _names(personal: Mapping[int, Mapping[str, float]]) -> list[str]:
    return sorted({name for metrics in personal.values() for name in metrics})


def _finite(personal: Mapping[int, Mapping[str, float]], name: str) -> dict[int, float]:
    return {i: metrics[name] for i, metrics in personal.items() if math.isfinite(metrics.get(name, math.nan))}


def _charts(scores: Mapping[str, float], costs: Mapping[str, float]) -> dict[str, dict[str, list[Any]]]:
    """Return the custom scalars: the tags of each chart as regular expressions."""
    metrics = [name.removeprefix("global/") for name in scores if name.startswith("global/")]
    metrics.sort(key=lambda name: not higher_is_better(name))
    parts = ("global/{0}$", "personal/{0}$", "personal/{0}_worst10$")
    spent = {"bytes in total": [rf"comm/{part}_bytes_total$" for part in ("uplink", "downlink", "paper")]}
    if "flops/train_total" in costs:
        spent["training FLOPs in total"] = [rf"flops/{part}_total$" for part in ("train", "paper")]
    return {
        "scores": {name: ["Multiline", [part.format(re.escape(name)) for part in parts]] for name in metrics},
        "costs": {name: ["Multiline", tags] for name, tags in spent.items()},
    }


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
