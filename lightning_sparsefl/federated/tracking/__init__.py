"""Recording of the metrics of a run: loggers, tables, callbacks and the progress bar."""
