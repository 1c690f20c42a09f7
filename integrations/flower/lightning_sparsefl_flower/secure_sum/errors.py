"""Errors of a secure sum."""

from __future__ import annotations

from lightning_sparsefl.errors import SparseFLError


class SecureSumRefused(SparseFLError, ValueError):
    """Message or request that a side of the protocol refuses, or an update that cannot be summed under masks."""


class TooFewClients(SparseFLError, RuntimeError):
    """Too few clients are left for a secure sum, which therefore tells nothing."""
