"""The merge of a run's rounds under a federation's options: reducer, clipping, noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from lightning.fabric.utilities.rank_zero import rank_zero_warn

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.aggregation.noise import read_key, require_cipher
from lightning_sparsefl.federated.aggregation.privacy import NoisySum, Privacy
from lightning_sparsefl.federated.aggregation.reducers import Accumulator, CoverageMean, PlainMean, Reducer
from lightning_sparsefl.federated.aggregation.stale_mean import StaleMean
from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.exchange.flat import Layout
from lightning_sparsefl.federated.exchange.hook_results import check_result, check_weights
from lightning_sparsefl.federated.options import Federation
from lightning_sparsefl.types import Merged, PendingUpdate, RunState


class MergePolicy:
    """Merges the updates of a run's rounds.

    Args:
        algorithm: Federated method, whose own reducer is the default.
        federation: Options of the federation.
        layout: Layout of the model's tensors.
        clients: Number of clients that cohorts are drawn from.
        stale: Rule by which late updates are merged; None = they are not.

    Raises:
        InvalidOption: If the options do not fit the method or the model.
    """

    def __init__(
        self,
        algorithm: FederatedAlgorithm,
        federation: Federation,
        layout: Layout,
        clients: int,
        stale: StaleMean | None = None,
    ) -> None:
        self.algorithm, self.federation, self.layout, self.clients = algorithm, federation, layout, clients
        self.stale, self._has_warned = stale, False
        self._check_reducer()
        if federation.privacy is not None:
            self._check_privacy(federation.privacy)
        self._check_buffers()
        self._check_changes()

    def start(self, state: RunState, total_weight: int) -> Accumulator:
        """Return an empty merge for one round.

        Args:
            state: State before the round.
            total_weight: Upper bound of the updates' summed weights.
        """
        federation, server = self.federation, state.server
        if federation.privacy is None or federation.clip_update is None:
            reducer = federation.reducer or self.algorithm.reducer()
            merge = reducer.start(self.layout, server.weights, total_weight)
            check_result(reducer, "start", merge, Accumulator)
            return merge
        return NoisySum(
            self.layout,
            server.weights,
            deviation=federation.privacy.noise_multiplier * federation.clip_update,
            cohort=federation.clients_per_round,
            secret=self.secret,
            context=("noise", state.run, server.round),
        )

    def result(
        self,
        merge: Accumulator,
        reports: Mapping[int, Mapping[str, float]],
        state: RunState,
        late: Sequence[PendingUpdate],
    ) -> Merged:
        """Return the merged update of a round, with late updates that arrived in it.

        Args:
            merge: Sum of the round's updates, complete on all ranks.
            reports: Metrics of the round's clients.
            state: State before the round.
            late: Updates of earlier rounds.
        """
        merged = merge.result(reports)
        self._warn_of_no_weights(merged)
        if self.stale is None or not late:
            return merged
        weights = self.algorithm.weights_to_step(state.server)
        check_weights(self.algorithm, "weights_to_step", weights, self.layout)
        return self.stale.merge(
            merged,
            merge.weights_of_votes(),
            late,
            server=weights,
            round=state.server.round,
            buffers=self.layout.buffers,
            silence_counts=merge.silence_counts,
        )

    def _warn_of_no_weights(self, merged: Merged) -> None:
        """Warn once of options that act on the changes of weights, if updates have none."""
        names = ("reducer", "clip_update", "server_optimizer")
        chosen = " and ".join(f"`federation.{name}`" for name in names if getattr(self.federation, name) is not None)
        if not chosen or self._has_warned:
            return
        if not any(name not in merged.covered or bool(merged.covered[name].any()) for name in merged.weights):
            self._has_warned = True
            rank_zero_warn(
                f"{chosen} had no effect, since the updates of {type(self.algorithm).__name__} have no weights: trees "
                "in `extra` are always averaged."
            )

    def metrics(self, rounds: int) -> dict[str, float]:
        """Return epsilon and delta of the finished rounds; an empty mapping without `federation.privacy`."""
        privacy = self.federation.privacy
        if privacy is None:
            return {}
        epsilon = privacy.epsilon(rounds, self.federation.clients_per_round, self.clients)
        return {"privacy/epsilon": epsilon, "privacy/delta": privacy.delta}

    @cached_property
    def secret(self) -> bytes:
        """Secret key of the noise and of the cohorts."""
        return read_key(None if self.federation.privacy is None else self.federation.privacy.key_file)

    def _check_reducer(self) -> None:
        chosen, own = self.federation.reducer, self.algorithm.reducer()
        check_result(self.algorithm, "reducer", own, Reducer)
        if self.stale is not None and not isinstance(chosen or own, CoverageMean | PlainMean):
            raise InvalidOption(
                f"`federation.sampler` is {self.federation.sampler}, which merges late updates into a mean, and the "
                f"reducer is {chosen or own}; expected `CoverageMean` or `PlainMean` as `federation.reducer`."
            )
        if chosen is not None and type(own) is not CoverageMean and chosen != own:
            raise InvalidOption(
                f"`federation.reducer` is {chosen}, but {type(self.algorithm).__name__} merges by {own}, as its "
                "equations say; set `federation.reducer: null`."
            )

    def _check_changes(self) -> None:
        """Refuse options that change the mean that a method needs, or that need changes which it does not send."""
        federation, method = self.federation, self.algorithm
        late = None if self.stale is None else federation.sampler
        robust = None if isinstance(federation.reducer, CoverageMean) else federation.reducer
        plain = federation.reducer if isinstance(federation.reducer, PlainMean) else None
        changes = {"clip_update": federation.clip_update, "sampler": late}
        for clause, options in (
            (method.needs_exact_mean, {**changes, "reducer": robust, "server_optimizer": federation.server_optimizer}),
            (method.sends_unreceived, {**changes, "reducer": plain}),
        ):
            name = next((name for name, value in options.items() if value is not None), None)
            if clause is not None and name is not None:
                raise InvalidOption(
                    f"`federation.{name}` is {options[name]}, but {type(method).__name__} {clause}; expected null."
                )

    def _check_buffers(self) -> None:
        if self.algorithm.mixes_buffers and self.layout.buffers and self.federation.buffers != "average":
            raise InvalidOption(
                f"`federation.buffers` is {self.federation.buffers!r}, but {type(self.algorithm).__name__} averages "
                f"buffers, such as {min(self.layout.buffers)!r}, among its clients; expected 'average'."
            )

    def _check_privacy(self, privacy: Privacy) -> None:
        if not self.algorithm.can_be_private:
            raise InvalidOption(
                f"`federation.privacy` cannot hold for {self.algorithm}, where more than the sum of the updates tells "
                "of a client; expected a method that says `can_be_private`, such as FedAvg."
            )
        if self.layout.buffers and self.federation.buffers == "average":
            raise InvalidOption(
                "`federation.privacy` adds no noise to averaged buffers, and the model has "
                f"{min(self.layout.buffers)!r}; set `federation.buffers` to `local` or `server`."
            )
        if privacy.delta >= 1 / self.clients:
            raise InvalidOption(
                f"`federation.privacy.delta` is {privacy.delta}; expected below 1 / {self.clients}, the number of "
                "clients: else giving away one client at random would count as private."
            )
        if privacy.key_file is None:
            read_key(None)  # raises now instead of in the first round; only training needs the file itself
        require_cipher()
        self.metrics(1)  # asks for dp-accounting now, not after a round
