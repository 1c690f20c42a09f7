"""Metric objects (torchmetrics) of a module for several clients at once."""
