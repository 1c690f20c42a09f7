"""Storage on disk: the run folder, checkpoints, and the records of clients."""
