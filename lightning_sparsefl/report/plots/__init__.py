"""Figures of a report: the data of each one, and how they are drawn."""
