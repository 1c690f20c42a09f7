"""What fits and evaluations of stacks find out about a module, and are then done again with."""

from __future__ import annotations

from collections.abc import Callable

from lightning_sparsefl.federated.local.stacked.logs import ChangesAttribute, SeesOneClient


class Findings:
    """What has been found out about the steps and hooks of a module.

    A fit or an evaluation that finds something else is done again with it.

    Attributes:
        attributes: Path of a submodule and name of its attribute, for each attribute that steps and hooks change.
        hooks: Hooks that cannot see the gradients of all clients at once, and are called for each client.
        draws: Whether the training step draws random numbers of torch besides those of its layers.
        settled: Whether the trial is over. A hook that is found later is one of that fit alone, so that results do not
            depend on what a process has fitted before.
    """

    def __init__(self) -> None:
        self.attributes: set[tuple[str, str]] = set()
        self.hooks: set[str] = set()
        self.draws = self.settled = False

    def repeat(self, run: Callable[[], None], undo: Callable[[], None] = lambda: None) -> set[str]:
        """Run a function until it finds nothing else, and return the hooks that it has found.

        Args:
            run: Function that raises :class:`.ChangesAttribute` for an attribute, and :class:`.SeesOneClient` for a
                hook.
            undo: Function that undoes a run that has raised.

        Raises:
            ChangesAttribute: If the attribute is known, so that its value cannot be kept for each client.
        """
        hooks = set(self.hooks)
        try:
            while self._finds_more(run):
                undo()
            return self.hooks - hooks
        finally:
            if self.settled:
                self.hooks = hooks

    def _finds_more(self, run: Callable[[], None]) -> bool:
        """Run a function, and return whether it has found something else."""
        try:
            run()
        except ChangesAttribute as error:
            if error.attributes <= self.attributes:
                raise
            self.attributes |= error.attributes
            return True
        except SeesOneClient as error:
            self.hooks.add(error.hook)
            return True
        return False
