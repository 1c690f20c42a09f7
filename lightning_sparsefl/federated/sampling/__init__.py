"""Sampling of cohorts."""
