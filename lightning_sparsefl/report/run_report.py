"""Reports of runs: groups, tables and figures, in the terminal and in files."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from rich.console import Console
from rich.progress import track

from lightning_sparsefl.errors import InvalidOption, is_number, require, require_folder
from lightning_sparsefl.report.documents.cells import EXCEEDED, part_rows
from lightning_sparsefl.report.documents.page import page
from lightning_sparsefl.report.documents.tables import csv_text, group_rows, latex, markdown, run_rows
from lightning_sparsefl.report.measures.summary import BUDGETS, Question, Summary, budget_text, summarize
from lightning_sparsefl.report.measures.values import MODELS, Budgeted, choose_metric, good_rows
from lightning_sparsefl.report.output import is_silent, print_line
from lightning_sparsefl.report.plots.clients import distribution_plot, duration_plot, participation_plot
from lightning_sparsefl.report.plots.data import Plot
from lightning_sparsefl.report.plots.masks import density_plot, mean_similarity_plot, similarity_plot
from lightning_sparsefl.report.plots.scores import default_target, score_plots, target_plot
from lightning_sparsefl.report.reading.groups import group_runs
from lightning_sparsefl.report.reading.runs import Run, names_of
from lightning_sparsefl.report.tables import print_table


class Report:
    """Report of one or many runs, grouped by their method and the options that differ, over seeds.

    Args:
        runs: Runs, from :func:`load_runs`.
        metric: Metric that the report is about, without the group of the score, such as ``test_acc``. Default: the
            first one of which higher is better.
        target: Score whose costs are reported, of the global and of the personal models. Default: for each of the two,
            the weakest of the best scores of all runs, to two decimals, which every run has reached.
        budget: Largest number of bytes, in both directions, of the last evaluated round whose scores are reported.
            Default: no such scores.
        flops_budget: Largest number of FLOPs of local training, as `budget`.
        by: Dotted names of the options to group by, such as ``algorithm.density``. Default: the method and all options
            that differ, except for seeds.
        only: Names of the groups to report. Default: all.
        different_data: Whether runs on different data are reported together.

    Raises:
        InvalidOption: If the runs are of different data, the metric, an option or a group is unknown, or a number is
            not valid.

    Example:
        ::

            from lightning_sparsefl.report import Report, load_runs

            report = Report(load_runs(["runs"]), target=0.9)
            report.print()
            report.write("report")
    """

    def __init__(
        self,
        runs: Sequence[Run],
        *,
        metric: str | None = None,
        target: float | None = None,
        budget: float | None = None,
        flops_budget: float | None = None,
        by: Sequence[str] | None = None,
        only: Sequence[str] | None = None,
        different_data: bool = False,
    ) -> None:
        if not runs:
            raise InvalidOption("`runs` is empty; expected one or more runs (`load_runs`).")
        if target is not None and not (is_number(target) and math.isfinite(target)):
            raise InvalidOption(f"`target` is {target!r}; expected a number, or none for a score that all runs reach.")
        self.budgets = dict(_budgets({"bytes": budget, "flops": flops_budget}))
        """Budget by ``bytes`` and ``flops``, for those costs that have one."""
        self.groups = group_runs(runs, by, only, different_data)
        """Groups of runs, in the order of their first runs."""
        self.runs = [run for group in self.groups for run in group.runs]
        """Runs of the groups."""
        self.metric = choose_metric(self.runs, metric)
        """Metric of the report; None if no run has been evaluated."""
        self.targets = dict(self._targets(target))
        """Target by ``global`` and ``personal``, for those models that have scores."""

    def _targets(self, target: float | None) -> Iterator[tuple[str, float]]:
        for model in MODELS if self.metric is not None else ():
            reachable = default_target(self.groups, f"{model}/{self.metric}")
            if not math.isnan(reachable):
                yield model, reachable if target is None else float(target)

    @cached_property
    def summary(self) -> Summary:
        """Table of the report: scores, costs and costs to the target of each group and run."""
        return summarize(self.groups, Question(self.metric, self.targets, self.budgets))

    @cached_property
    def plots(self) -> list[Plot]:
        """Data of all figures, also of those that cannot be drawn, which say why."""
        return [
            *score_plots(self.groups, self.metric),
            target_plot(self.groups, self.metric, self.targets),
            distribution_plot(self.groups, self.metric),
            density_plot(self.groups),
            similarity_plot(self.groups),
            mean_similarity_plot(self.groups),
            participation_plot(self.groups),
            duration_plot(self.groups),
        ]

    @cached_property
    def names(self) -> dict[Path, str]:
        """Short name of each run by its folder."""
        return dict(zip([run.path for run in self.runs], names_of(self.runs), strict=True))

    def notes(self) -> list[str]:
        """Return what a reader of the numbers should know of runs, costs, seeds and differences between groups."""
        notes = [
            f"{self.names[run.path]} has not finished: {run.rounds} rounds so far."
            for run in self.runs
            if not run.is_finished
        ]
        notes += [
            f"{self.names[run.path]} has no rounds before round {run.missing_rounds + 1} in its folder, so that its "
            "costs to a target are not known."
            for run in self.runs
            if run.missing_rounds
        ]
        notes += [*self._unreached(), *self._unknown_budgets()]
        for group in self.groups:
            seeds = Counter(run.seed for run in group.runs if run.seed)
            notes += [
                f"{group.name} has {count} runs of seed {seed}, which count as different ones."
                for seed, count in seeds.items()
                if count > 1
            ]
        return [*notes, *self._differences()]

    def _unreached(self) -> Iterator[str]:
        """Yield the targets that no run has reached, whose costs are no part of the table."""
        for model, target in self.targets.items():
            if not any(good_rows(run, f"{model}/{self.metric}", target).any() for run in self.runs):
                title = self.summary.titles[f"target_{model}"]
                yield f"{title} are not known, since no score in the run folders reaches it (`--target`)."

    def _unknown_budgets(self) -> Iterator[str]:
        """Yield the budgets of which no score is known, which are no part of the table."""
        found = {measure.name for measure in self.summary.measures}
        for cost, budget in self.budgets.items() if self.targets else ():
            if not any(f"budget_{model}_{cost}" in found for model in self.targets):
                yield (
                    f"Scores within {budget_text(cost, budget)} are not known, since no run folder has these costs of "
                    f"the first rounds (`--{BUDGETS[cost].option}`)."
                )

    def _differences(self) -> Iterator[str]:
        """Yield differences between the runs that the scores and costs of a table do not show as such."""
        rounds = {run.rounds for run in self.runs if run.is_finished}
        if len(rounds) > 1:
            yield (
                f"The runs have from {min(rounds)} to {max(rounds)} rounds; their last scores are of different rounds, "
                "and their costs are not of equal work."
            )
        engines = sorted({run.local_engine for run in self.runs if run.local_engine})
        if len(engines) > 1:
            yield (
                f"The runs differ in `federation.local_engine` ({', '.join(engines)}): compare no durations; results "
                "differ by rounding."
            )

    @property
    def title(self) -> str:
        """Title of the page."""
        names = ", ".join(dict.fromkeys(run.method for run in self.runs))
        return f"{names}: {_counted(len(self.runs), 'run')}"

    def _facts(self) -> list[str]:
        """Return the sentences below the title."""
        several = len(self.groups) < len(self.runs)
        runs, groups = _counted(len(self.runs), "run"), _counted(len(self.groups), "group")
        data = dict.fromkeys(str(run.options["data"]) for run in self.runs if "data" in run.options)
        facts = [
            f"{runs} in {groups} of equal options"
            + (f" on {', '.join(data)}" if data else "")
            + (f"; {self.metric} is the metric." if self.metric else ".")
        ]
        if several:
            facts.append("Numbers are means and sample standard deviations over the runs of a group.")
        facts.append("The best mean of a column is bold. An empty cell is a number that is not known.")
        if self.budgets:
            facts.append(f"A cell with {EXCEEDED} is one of a group without an evaluated round within the budget.")
        return facts

    def print(self) -> None:
        """Print the table of the groups on the terminal, one row for each group in each of its parts."""
        for part, title in self.summary.titles.items():
            if part in self.summary.parts():
                headers, rows = part_rows(self.summary, part)
                cells = [
                    (name, len(self.summary.runs[name]), *(cell.text() for cell in found))
                    for name, found in rows.items()
                ]
                print_table(title, ("group", "runs", *headers), cells)
        for note in self.notes():
            print_line(note)

    def write(self, folder: str | Path) -> Path:
        """Write the page, the figures and the tables; files of an earlier report are replaced.

        Args:
            folder: Folder of the report, which is created if needed.

        Returns:
            Path of the HTML page.

        Raises:
            InvalidOption: If there is a file in place of the folder, or its name is empty.
        """
        require(folder != "", "out", folder, "a folder, which is created if needed")
        folder = Path(folder)
        require_folder("out", folder)
        (folder / "figures").mkdir(parents=True, exist_ok=True)
        (folder / "tables").mkdir(exist_ok=True)
        pictures = {}
        console = Console(stderr=True)  # a bar in a terminal, nothing in a log file
        plots: Iterable[Plot] = self.plots
        if _shows_bars(console):  # a disabled bar of rich before 14.3 still writes an empty line
            plots = track(plots, "Figures", console=console, transient=True)
        for plot in plots:
            files = self._draw(plot)
            pictures[plot.name] = files.get("svg", b"")
            _write(folder / "figures", plot.name, files)
        for part in ("scores", "costs", *(f"{kind}_{model}" for kind in ("target", "budget") for model in MODELS)):
            (folder / "tables" / f"{part}.tex").unlink(missing_ok=True)  # this report may lack it
        for name, text in self._tables():
            (folder / "tables" / name).write_text(text, encoding="utf-8")
        path = folder / "index.html"
        text = page(
            title=self.title,
            facts=self._facts(),
            notes=self.notes(),
            summary=self.summary,
            plots=self.plots,
            pictures=pictures,
            groups=self.groups,
            names=self.names,
        )
        path.write_text(text, encoding="utf-8")
        return path

    def _draw(self, plot: Plot) -> dict[str, bytes]:
        """Return the files of a figure by extension; none if it is missing."""
        if plot.missing is not None:
            return {}
        from lightning_sparsefl.report.plots.drawing import draw_files  # matplotlib is slow to import

        places = {group.name: place for place, group in enumerate(self.groups)}
        return {**draw_files(plot, places), "csv": csv_text(plot.rows()).encode()}

    def _tables(self) -> Iterable[tuple[str, str]]:
        yield "groups.csv", csv_text(group_rows(self.summary))
        yield "runs.csv", csv_text(run_rows(self.summary, self.groups, self.names))
        yield "groups.md", markdown(self.summary)
        for part in self.summary.parts():
            yield f"{part}.tex", latex(self.summary, part)


def _budgets(given: Mapping[Budgeted, float | None]) -> Iterator[tuple[Budgeted, float]]:
    """Yield the budgets that are set.

    Raises:
        InvalidOption: If one is not a number above 0.
    """
    for cost, budget in given.items():
        if budget is not None:
            option, expected = BUDGETS[cost].option, BUDGETS[cost].expected
            require(is_number(budget) and 0 < budget < math.inf, option, budget, expected)
            yield cost, float(budget)


def _counted(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _shows_bars(console: Console) -> bool:
    return (console.is_terminal or console.is_jupyter) and not is_silent()


def _write(folder: Path, name: str, files: dict[str, bytes]) -> None:
    """Write the files of a figure, and delete those of an earlier report that this one does not have."""
    for kind in ("png", "pdf", "svg", "csv"):
        path = folder / f"{name}.{kind}"
        if kind in files:
            path.write_bytes(files[kind])
        else:
            path.unlink(missing_ok=True)
