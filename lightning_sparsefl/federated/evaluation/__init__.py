"""Scores of the global and of the personal models."""
