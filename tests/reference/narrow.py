"""What the twins of narrow networks share."""

from __future__ import annotations

from reference.freezing import BODY

RATES = (1.0, 0.6, 0.5, 0.3)
WIDE = [0.5, 0.7, 1.0]
"""Capacities of two clients each: widths of .5, .6 and 1."""
OWN_WIDTH = [0.5, 0.5, 0.6, 0.6, 1.0, 1.0]
NARROW_PLAN = [["net.2"], ["net.2"], ["net.0"], ["net.0"], list(BODY), list(BODY)]
"""The first groups that fit: the body has 28 + 20 parameters at width .5 and in a base network, 35 + 30 at width .6."""
