"""Processes: how they start, what they exchange, who trains whom."""
