"""Where a run's numbers go: loggers, tables, callbacks and the progress bar."""
