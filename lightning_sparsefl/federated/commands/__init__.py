"""What a run can be asked for: fit, score, export, replay, profile."""
