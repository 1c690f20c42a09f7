"""How updates become one: sums, order statistics, clipping and noise."""
