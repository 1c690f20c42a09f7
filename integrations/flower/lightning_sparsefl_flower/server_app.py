"""The ServerApp."""

from __future__ import annotations

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from lightning_sparsefl.errors import SparseFLError

from lightning_sparsefl_flower.server import ServerOptions, fit

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds that are left.

    Args:
        grid: Flower's grid.
        context: Context with the run's configuration.

    Raises:
        RuntimeError: If the run cannot go on; Flower shows the sentence as the run's details.
    """
    try:
        done = fit(grid, ServerOptions.of(context.run_config))
    except SparseFLError as error:
        raise RuntimeError(str(error)) from error.__cause__
    if done.stop is not None:
        raise RuntimeError('stopped by a signal; `ckpt-path="last"` goes on from the last finished round')
