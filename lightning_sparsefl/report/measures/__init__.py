"""Numbers of runs: scores, costs, and their mean and standard deviation over seeds."""
