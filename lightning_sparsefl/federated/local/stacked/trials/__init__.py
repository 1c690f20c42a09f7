"""Trials before a run: whether clients can be stacked, and whether their callbacks can begin together."""
