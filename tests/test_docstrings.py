"""Each entry under `Args:` names the thing first; files that do not yet hold to it are listed, and the lists shrink."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "lightning_sparsefl"
FRAGMENTS = {
    *("Of", "As", "At", "By", "For", "From", "In", "On", "Per", "To", "With", "Within", "Without"),  # prepositions
    *("After", "Before", "Beside", "Besides", "Between", "During", "If", "Than", "Until", "When"),
    *("That", "What", "Where", "Who", "Whom", "Whose"),  # "Whether", "Which" and "How" ask for the value of an option
    *("Its", "Their", "It", "They", "Those"),  # pronouns that stand for the function or the argument
    *("Decides", "Does", "Finds", "Gives", "Has", "Holds", "Is", "Keeps", "Knows", "Makes", "Reads", "Says", "Takes"),
    *("Called", "Changed", "Drawn", "Filled", "Finished", "Kept", "Launched", "Named", "Shown", "Used"),  # participles
    *("Also", "Not", "Only"),
}
"""First words of descriptions that go on from the name instead of naming a thing, as "seed: Of the run." does."""
NOT_YET: frozenset[str] = frozenset(
    {
        "lightning_sparsefl/algorithms/fedbabu.py",
        "lightning_sparsefl/algorithms/feddip.py",
        "lightning_sparsefl/algorithms/heterofl.py",
        "lightning_sparsefl/algorithms/splitmix.py",
        "lightning_sparsefl/callbacks/clock.py",
        "lightning_sparsefl/callbacks/dynamic_mask.py",
        "lightning_sparsefl/callbacks/feedback.py",
        "lightning_sparsefl/callbacks/global_magnitude_pruning.py",
        "lightning_sparsefl/callbacks/gradient_offset.py",
        "lightning_sparsefl/callbacks/gradual_pruning.py",
        "lightning_sparsefl/callbacks/layer_freezing.py",
        "lightning_sparsefl/callbacks/learned_importance.py",
        "lightning_sparsefl/callbacks/masking.py",
        "lightning_sparsefl/callbacks/options.py",
        "lightning_sparsefl/callbacks/proximal_term.py",
        "lightning_sparsefl/callbacks/static_mask.py",
        "lightning_sparsefl/callbacks/trial.py",
        "lightning_sparsefl/callbacks/unit_scores.py",
        "lightning_sparsefl/cli.py",
        "lightning_sparsefl/cost/device.py",
        "lightning_sparsefl/cost/flops.py",
        "lightning_sparsefl/cost/ledger.py",
        "lightning_sparsefl/cost/pucbv.py",
        "lightning_sparsefl/data/examples.py",
        "lightning_sparsefl/data/federated.py",
        "lightning_sparsefl/data/partition.py",
        "lightning_sparsefl/errors.py",
        "lightning_sparsefl/federated/aggregation/clipping.py",
        "lightning_sparsefl/federated/aggregation/exact_sum.py",
        "lightning_sparsefl/federated/aggregation/privacy.py",
        "lightning_sparsefl/federated/aggregation/reducers.py",
        "lightning_sparsefl/federated/aggregation/robust.py",
        "lightning_sparsefl/federated/algorithm.py",
        "lightning_sparsefl/federated/client.py",
        "lightning_sparsefl/federated/commands/export.py",
        "lightning_sparsefl/federated/commands/fit.py",
        "lightning_sparsefl/federated/commands/onnx_file.py",
        "lightning_sparsefl/federated/commands/profile.py",
        "lightning_sparsefl/federated/commands/replay.py",
        "lightning_sparsefl/federated/commands/run.py",
        "lightning_sparsefl/federated/distributed/launcher.py",
        "lightning_sparsefl/federated/distributed/placement.py",
        "lightning_sparsefl/federated/distributed/rank_consistency.py",
        "lightning_sparsefl/federated/distributed/ranks.py",
        "lightning_sparsefl/federated/distributed/signals.py",
        "lightning_sparsefl/federated/evaluation/scorer.py",
        "lightning_sparsefl/federated/evaluation/scores.py",
        "lightning_sparsefl/federated/exchange/failures.py",
        "lightning_sparsefl/federated/exchange/flat.py",
        "lightning_sparsefl/federated/fleet.py",
        "lightning_sparsefl/federated/local/batches.py",
        "lightning_sparsefl/federated/local/buffers.py",
        "lightning_sparsefl/federated/local/engines.py",
        "lightning_sparsefl/federated/local/example_input.py",
        "lightning_sparsefl/federated/local/fast_loops.py",
        "lightning_sparsefl/federated/local/fast_steps.py",
        "lightning_sparsefl/federated/local/fast_trainer.py",
        "lightning_sparsefl/federated/local/hooks.py",
        "lightning_sparsefl/federated/local/isolation.py",
        "lightning_sparsefl/federated/local/lightning_trainer.py",
        "lightning_sparsefl/federated/local/round_lr.py",
        "lightning_sparsefl/federated/local/support.py",
        "lightning_sparsefl/federated/options.py",
        "lightning_sparsefl/federated/rounds/coordinator.py",
        "lightning_sparsefl/federated/rounds/merge_policy.py",
        "lightning_sparsefl/federated/rounds/update_checks.py",
        "lightning_sparsefl/federated/sampling.py",
        "lightning_sparsefl/federated/storage/atomic_files.py",
        "lightning_sparsefl/federated/storage/checkpoint.py",
        "lightning_sparsefl/federated/storage/record_database.py",
        "lightning_sparsefl/federated/storage/records.py",
        "lightning_sparsefl/federated/storage/resume.py",
        "lightning_sparsefl/federated/storage/run_folder.py",
        "lightning_sparsefl/federated/storage/safe_load.py",
        "lightning_sparsefl/federated/storage/sqlite_store.py",
        "lightning_sparsefl/federated/tracking/recorder.py",
        "lightning_sparsefl/federated/tracking/round_trainer.py",
        "lightning_sparsefl/federated/trainer.py",
        "lightning_sparsefl/models/alexnet.py",
        "lightning_sparsefl/models/cnn.py",
        "lightning_sparsefl/models/mobilenet.py",
        "lightning_sparsefl/models/norm.py",
        "lightning_sparsefl/models/preresnet.py",
        "lightning_sparsefl/models/resnet.py",
        "lightning_sparsefl/models/vgg.py",
        "lightning_sparsefl/report/masks.py",
        "lightning_sparsefl/report/pictures.py",
        "lightning_sparsefl/report/tables.py",
        "lightning_sparsefl/sparse/apply.py",
        "lightning_sparsefl/sparse/density.py",
        "lightning_sparsefl/sparse/importance.py",
        "lightning_sparsefl/sparse/nm.py",
        "lightning_sparsefl/sparse/prune.py",
        "lightning_sparsefl/sparse/regrow.py",
        "lightning_sparsefl/sparse/scores.py",
        "lightning_sparsefl/sparse/submodel.py",
        "lightning_sparsefl/sparse/tracing.py",
        "lightning_sparsefl/sparse/units.py",
        "lightning_sparsefl/sparse/width.py",
        "lightning_sparsefl/wire/codec.py",
        "lightning_sparsefl/wire/dense.py",
        "lightning_sparsefl/wire/trees.py",
        "lightning_sparsefl/wire/values.py",
    }
)
"""Files with such entries. Take a file out when it has none left; none may be added."""
ENTRY = re.compile(r"^ {4}\*{0,2}(\w+)(?: \(.*?\))?: +(\w+)", re.MULTILINE)


def fragments(source: str) -> Iterator[str]:
    """Yield the entries under `Args:` of all functions and classes that begin with a fragment."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        section = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)*)", ast.get_docstring(node) or "", re.MULTILINE)
        for name, word in ENTRY.findall(section[1]) if section else ():
            if word in FRAGMENTS:
                yield f"{node.name}: `{name}: {word} ...`"


def found() -> dict[str, list[str]]:
    """Return the fragments by file."""
    files = {path.relative_to(REPOSITORY).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    return {name: entries for name, text in files.items() if (entries := list(fragments(text)))}


def test_an_entry_names_the_thing_first():
    offenders = {name: entries for name, entries in found().items() if name not in NOT_YET}
    assert not offenders


def test_the_list_of_files_with_fragments_shrinks():
    clean = sorted(NOT_YET - set(found()))
    assert not clean, "take these out of NOT_YET"


@pytest.mark.parametrize(
    ("entry", "refused"),
    [
        ("seed: Of the run.", True),
        ("seed (int): Of the run.", True),
        ("**options: As in a run.", True),
        ("folder: Where files go.", True),
        ("seed: Random seed of the run.", False),
        ("verbose: Whether to print.", False),
        ("seed: Offset of the first round.", False),
    ],
)
def test_a_planted_fragment_is_found(entry: str, refused: bool):
    source = f'class A:\n    def f(self, x):\n        """Do it.\n\n        Args:\n            {entry}\n        """\n'
    assert bool(list(fragments(source))) == refused


@pytest.mark.skipif(find_spec("ruff") is None, reason="ruff is not installed (extra `dev`)")
def test_the_list_of_files_without_imperative_summaries_shrinks():
    """Files under `per-file-ignores` of D401 in pyproject.toml have at least one summary that is not imperative."""
    listed = re.findall(r'^"(\S+\.py)" = \["D401"\]', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=D401", "--output-format=concise", *listed]
    said = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False).stdout
    clean = sorted(name for name in listed if f"{name}:" not in said)
    assert not clean, "take these out of `per-file-ignores`"
