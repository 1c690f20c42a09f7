"""The commands of the trainer: fit, score, export, replay and profile."""
