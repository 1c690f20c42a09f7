"""Aggregation of the updates of a round: sums, order statistics, clipping and noise."""
