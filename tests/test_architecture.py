"""The rules that a parser can hold: layers, fences, depth of inheritance, encodings, ASCII."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "lightning_sparsefl"
LAYERS = [
    "errors",
    "seeds",
    "types",
    "files",
    "sparse",
    "wire",
    "cost",
    "report",
    "models",
    "data",
    "callbacks",
    "federated",
    "algorithms",
    "cli",
    "testing",
]

SUBPACKAGES = [
    "exchange",
    "client",
    "distributed",
    "aggregation",
    "fleet",
    "sampling",
    "algorithm",
    "options",
    "storage",
    "local",
    "rounds",
    "evaluation",
    "tracking",
    "commands",
    "trainer",
]
"""Subpackages and files of federated/: each imports only from those before it."""
STACKED = [
    "functorch",
    "logs",
    "fibers",
    "fused",
    "rules",
    "reasons",
    "states",
    "reading",
    "metrics",
    "batch_pass",
    "recording",
    "fitting",
    "trials",
    "gradients",
    "scoring",
    "worker",
]
"""Those of federated/local/stacked/."""
MOST_FILES = 20
"""Of a subpackage, `__init__.py` included."""

FENCED = {"torch.distributed": "federated", "Fabric": "federated", "matplotlib": "report"}
"""What only one layer may mention: a dotted name, or one component of it."""
TORCH_ONLY = ("sparse", "wire")
ALLOWED_THERE = sys.stdlib_module_names | {"torch", "typing_extensions", PACKAGE.name}
MORE_IN = {"sparse/freeze.py": {"scipy"}, "wire/file.py": {"safetensors"}}
"""Files that may import one library besides torch."""
DRAWERS = {"util", "utils", "utilities", "misc", "common", "helpers"}
TEXT = {".py", ".yaml", ".yml", ".toml", ".md", ".cff"}


def modules(root: Path) -> Iterator[tuple[Path, str, ast.Module]]:
    """Each source file under `root`, with its layer and its syntax tree."""
    for path in sorted(root.rglob("*.py")):
        yield path, path.relative_to(root).parts[0].removesuffix(".py"), ast.parse(path.read_text())


def imported(tree: ast.Module, path: Path, root: Path) -> set[str]:
    """Absolute dotted names of everything a file imports, wherever in the file it does so."""
    package = (root.name, *path.relative_to(root).parent.parts)
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            anchor = package[: len(package) - node.level + 1] if node.level else ()
            source = [*anchor, *([node.module] if node.module else [])]
            names |= {".".join([*source, alias.name]) for alias in node.names}
    return names


def attributes(tree: ast.Module) -> set[str]:
    """Every attribute chain that starts at a name, such as ``torch.distributed.barrier``."""
    return {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_chain(node)}


def _is_chain(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _is_chain(node.value))


def layer_violations(root: Path) -> list[str]:
    """Files outside every layer, and imports that point right."""
    found = []
    for path, layer, tree in modules(root):
        if layer in ("__init__", "__main__"):  # the front page may name everything, and an entry point what it starts
            continue
        if layer not in (*LAYERS, "__about__"):
            found.append(f"{path.name}: `{layer}` is no layer")
            continue
        for name in imported(tree, path, root):
            first, _, rest = name.partition(".")
            if first == root.name and not _points_left(rest.partition(".")[0], layer):
                found.append(f"{path.relative_to(root)}: `{layer}` imports `{name}`")
    return found


def _points_left(target: str, layer: str) -> bool:
    if target == "__about__":
        return True
    return target in LAYERS and layer in LAYERS and LAYERS.index(target) <= LAYERS.index(layer)


def subpackage_violations(root: Path, folder: str = "federated", order: Sequence[str] = SUBPACKAGES) -> list[str]:
    """Files of a folder outside every subpackage, imports of later ones, and subpackages with too many files."""
    found, engine = [], root / folder
    above = [root.name, *Path(folder).parts]
    sizes = Counter(path.relative_to(engine).parent.as_posix() for path in engine.rglob("*.py"))
    found += [f"{subpackage}: {count} files" for subpackage, count in sizes.items() if count > MOST_FILES]
    for path, subpackage, tree in modules(engine):
        if subpackage == "__init__":
            continue
        if subpackage not in order:
            found.append(f"{path.name}: `{subpackage}` is no subpackage")
            continue
        for name in imported(tree, path, root):
            *parents, target = [*name.split("."), "", ""][: len(above) + 1]
            if parents == above and target and (target not in order or order.index(target) > order.index(subpackage)):
                found.append(f"{path.relative_to(root)}: `{subpackage}` imports `{name}`")
    return found


def borrowed_names(root: Path, folders: Sequence[Path]) -> list[str]:
    """Imports of a name that the named file does not define itself, or, outside of tests, of a private one.

    What the `__init__.py` of a package exports may be imported from there.
    """
    found = []
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
                continue
            source = root.parent.joinpath(*node.module.split(".")).with_suffix(".py")
            if source.is_relative_to(root) and source.is_file():
                names = {each.name for each in node.names}
                private = {name for name in names if re.match("_[^_]", name)} if "tests" not in path.parts else set()
                found += [f"{path.name}: `{node.module}.{name}`" for name in names - defined(source) | private]
    return found


@cache
def defined(path: Path) -> set[str]:
    """Names that a file defines at its top level, and does not import."""
    tree = ast.parse(path.read_text())
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        names |= {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
    return names


def circles(root: Path) -> list[str]:
    """Files that import each other, directly or through others; imports for type checkers count."""
    files = {".".join([root.name, *path.relative_to(root).with_suffix("").parts]): path for path in root.rglob("*.py")}
    graph = {}
    for module, path in files.items():
        names = imported(ast.parse(path.read_text()), path, root)
        # `from package.module import name` names module.name: the longest prefix that is a file is the target
        targets = {_module_of(name, files) for name in names}
        graph[module] = targets - {None, module}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return list(error.args[1])
    return []


def _module_of(name: str, files: dict[str, Path]) -> str | None:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        prefix = ".".join(parts[:end])
        if prefix in files:
            return prefix
    return None


def fence_violations(root: Path) -> list[str]:
    """Fenced names outside their layer, foreign imports where only torch is allowed, and drawers."""
    found = []
    for path, layer, tree in modules(root):
        where, names = path.relative_to(root), imported(tree, path, root)
        for name in names | attributes(tree):
            for fenced, home in FENCED.items():
                if layer != home and f".{fenced}." in f".{name}.":
                    found.append(f"{where}: `{name}` belongs under {home}/")
        if layer in TORCH_ONLY:
            foreign = {name.partition(".")[0] for name in names} - ALLOWED_THERE - MORE_IN.get(where.as_posix(), set())
            found += [f"{where}: {layer}/ imports `{name}`" for name in sorted(foreign)]
        if DRAWERS & {part.removesuffix(".py") for part in where.parts}:
            found.append(f"{where}: a concept is missing where a drawer of helpers is needed")
    return found


def encoding_violations(root: Path) -> list[str]:
    """Text files that are opened with the encoding of the machine."""
    return [
        f"{path.relative_to(root)}:{node.lineno}: `{ast.unparse(node)}` has no encoding"
        for path, _, tree in modules(root)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _opens_text(node) and "encoding" not in {word.arg for word in node.keywords}
    ]


def _opens_text(call: ast.Call) -> bool:
    """Whether a call reads or writes text, as far as its name and its mode tell."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in ("read_text", "write_text"):
        return True
    place = 0 if isinstance(call.func, ast.Attribute) and name == "open" else 1  # of the mode
    if name not in ("open", "fdopen") or (place == 0 and call.args and not isinstance(call.args[0], ast.Constant)):
        return False  # such as os.open(path, flags)
    modes = [*call.args[place : place + 1], *(word.value for word in call.keywords if word.arg == "mode")]
    return not any(isinstance(mode, ast.Constant) and "b" in str(mode.value) for mode in modes)


def depth_violations(root: Path) -> list[str]:
    """Public classes under algorithms/ with another base than FederatedAlgorithm, and any built on those.

    A private module there holds a part of one method, not a method.
    """
    classes = [
        (path, node)
        for path, layer, tree in modules(root)
        for node in ast.walk(tree)
        if layer == "algorithms" and isinstance(node, ast.ClassDef)
    ]
    methods = {node.name for _, node in classes}
    found = []
    for path, node in classes:
        bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
        public = not (node.name.startswith("_") or path.name.startswith("_"))
        if (public and bases != ["FederatedAlgorithm"]) or methods & set(bases):
            found.append(f"{path.name}: {node.name}({', '.join(bases)})")
    return found


def test_imports_only_point_left():
    assert layer_violations(PACKAGE) == []


def test_subpackages_of_the_engine_keep_their_order():
    assert subpackage_violations(PACKAGE) == []
    assert subpackage_violations(PACKAGE, "federated/local/stacked", STACKED) == []


def test_names_are_imported_from_where_they_are_defined():
    folders = [PACKAGE, REPOSITORY / "tests", REPOSITORY / "integrations", REPOSITORY / "benchmarks"]
    assert borrowed_names(PACKAGE, folders) == []


@pytest.mark.parametrize("name", ["pack_plain", "_as_mismatch"])
def test_a_planted_borrowed_name_is_caught(tmp_path: Path, name: str):
    root = planted(tmp_path, "federated/storage/records.py", "from a import pack_plain\ndef _as_mismatch(): ...")
    planted(tmp_path, "federated/export.py", f"from {root.name}.federated.storage.records import {name}")
    assert len(borrowed_names(root, [root])) == 1


def test_no_files_import_each_other():
    assert circles(PACKAGE) == []


@pytest.mark.parametrize(
    ("where", "source"),
    [
        ("federated/exchange/flat.py", "from lightning_sparsefl.federated.rounds.server import Server"),
        ("federated/storage/records.py", "from ..local import node"),
        ("federated/local/node.py", "if TYPE_CHECKING:\n    from lightning_sparsefl.federated.commands import run"),
        ("federated/drafts/node.py", ""),
        ("federated/client.py", "from lightning_sparsefl.federated.fleet import Fleet"),
    ],
)
def test_a_planted_import_between_subpackages_is_caught(tmp_path: Path, where: str, source: str):
    assert len(subpackage_violations(planted(tmp_path, where, source))) == 1


def test_a_planted_import_within_the_stacked_engine_is_caught(tmp_path: Path):
    source = "from lightning_sparsefl.federated.local.stacked.fitting.fit import fit_stack"
    root = planted(tmp_path, "federated/local/stacked/states/leaves.py", source)
    assert len(subpackage_violations(root, "federated/local/stacked", STACKED)) == 1


def test_a_planted_circle_is_caught(tmp_path: Path):
    planted(tmp_path, "federated/local/a.py", "from lightning_sparsefl.federated.local.b import B")
    planted(tmp_path, "federated/local/b.py", "if TYPE_CHECKING:\n    from lightning_sparsefl.federated.local import c")
    package = planted(tmp_path, "federated/local/c.py", "from lightning_sparsefl.federated.local.a import A")
    assert len(circles(package)) == 4


def test_a_subpackage_with_too_many_files_is_caught(tmp_path: Path):
    for number in range(MOST_FILES + 1):
        package = planted(tmp_path, f"federated/local/file_{number}.py", "")
    assert subpackage_violations(package) == [f"local: {MOST_FILES + 1} files"]


def test_fences_hold():
    assert fence_violations(PACKAGE) == []


def test_text_files_have_one_encoding_on_all_machines():
    assert encoding_violations(PACKAGE) == []


def test_algorithms_inherit_one_level():
    assert depth_violations(PACKAGE) == []


def test_every_layer_exists():
    present = {layer for _, layer, _ in modules(PACKAGE)}
    assert present == {*LAYERS, "__init__", "__about__", "__main__"}


def test_the_page_tells_the_same_order():
    assert " < ".join(LAYERS) in (REPOSITORY / "docs" / "architecture.md").read_text()


@pytest.mark.parametrize(
    "folder", ["lightning_sparsefl", "tests", "benchmarks", "callbacks", "configs", "docs", "notebooks", "."]
)
def test_text_is_ascii(folder: str):
    root = REPOSITORY / folder
    files = [path for path in (root.iterdir() if folder == "." else root.rglob("*")) if path.suffix in TEXT]
    assert files, f"nothing to read under {folder}"
    assert [path.name for path in files if not path.read_bytes().isascii()] == []


def planted(root: Path, where: str, source: str) -> Path:
    """A package under `root` with `source` as its only file."""
    package = root / "lightning_sparsefl"
    (package / where).parent.mkdir(parents=True, exist_ok=True)
    (package / where).write_text(source)
    return package


@pytest.mark.parametrize(
    ("where", "source"),
    [
        ("wire/dense.py", "from lightning_sparsefl.federated.trainer import FederatedTrainer"),
        ("wire/dense.py", "import lightning_sparsefl.federated.trainer as trainer"),
        ("wire/dense.py", "from ..callbacks import StaticMask"),
        ("wire/dense.py", "from .. import callbacks"),
        ("sparse/masks.py", "from lightning_sparsefl import data"),
        ("sparse/__init__.py", "from ..wire import Codec"),
        ("sparse/deep/masks.py", "def lazily():\n    from ...wire import codec"),
        ("types.py", "from . import cli"),
        ("errors.py", "if TYPE_CHECKING:\n    import lightning_sparsefl.types"),
        ("__about__.py", "from . import errors"),
        ("models/lenet.py", "import lightning_sparsefl"),
        ("models/lenet.py", "from lightning_sparsefl import FedAvg"),
        ("drafts/lenet.py", ""),
    ],
)
def test_a_planted_import_is_caught(tmp_path: Path, where: str, source: str):
    assert len(layer_violations(planted(tmp_path, where, source))) == 1


@pytest.mark.parametrize(
    ("where", "source"),
    [
        ("cli.py", "from lightning_sparsefl.algorithms import FedAvg"),
        ("cli.py", "from .__about__ import __version__"),
        ("wire/dense.py", "from .codec import Codec\nfrom . import codec\nfrom ..types import Message"),
        ("sparse/masks.py", "import torch\nfrom lightning_sparsefl import errors, seeds, types"),
        ("__init__.py", "from lightning_sparsefl.algorithms import FedAvg"),
    ],
)
def test_an_import_to_the_left_passes(tmp_path: Path, where: str, source: str):
    package = planted(tmp_path, where, source)
    assert layer_violations(package) + fence_violations(package) == []


@pytest.mark.parametrize(
    ("where", "source"),
    [
        ("data/vision.py", "import torch.distributed as dist"),
        ("data/vision.py", "from torch import distributed"),
        ("data/vision.py", "from torch.distributed import barrier"),
        ("data/vision.py", "import torch\nprint(torch.distributed.is_available)"),
        ("algorithms/fedavg.py", "from lightning.fabric import Fabric"),
        ("algorithms/fedavg.py", "import lightning as L\nfabric = L.Fabric()"),
        ("cli.py", "def draw():\n    from matplotlib import pyplot"),
        ("sparse/masks.py", "import numpy as np"),
        ("wire/dense.py", "from lightning.pytorch import Callback"),
        ("wire/dense.py", "from safetensors import safe_open"),
        ("wire/file.py", "import scipy"),
        ("models/utils.py", ""),
        ("models/helpers/a.py", ""),
    ],
)
def test_a_planted_fence_jumper_is_caught(tmp_path: Path, where: str, source: str):
    assert fence_violations(planted(tmp_path, where, source))


@pytest.mark.parametrize(
    ("where", "source"),
    [
        ("federated/aggregation/reducers.py", "import torch.distributed\nfrom lightning.fabric import Fabric"),
        ("report/plots.py", "import matplotlib.pyplot as plt"),
        ("wire/file.py", "from safetensors.torch import save_file"),
        ("callbacks/monitor.py", "from lightning.fabric.utilities import rank_zero_info"),
    ],
)
def test_inside_the_fence_all_is_well(tmp_path: Path, where: str, source: str):
    assert fence_violations(planted(tmp_path, where, source)) == []


@pytest.mark.parametrize(
    ("source", "violations"),
    [
        ("path.read_text()", 1),
        ("path.write_text(text)", 1),
        ("path.open()", 1),
        ("path.open('a', newline='')", 1),
        ("open(path)", 1),
        ("open(path, 'w')", 1),
        ("open(path, mode='w')", 1),
        ("os.fdopen(descriptor, 'r+')", 1),
        ("path.read_text(encoding='utf-8')", 0),
        ("path.open('rb')", 0),
        ("path.open(mode='rb')", 0),
        ("open(path, 'xb')", 0),
        ("os.fdopen(descriptor, 'rb')", 0),
        ("os.open(path, os.O_RDONLY)", 0),
        ("Image.open(path)", 0),
    ],
)
def test_a_planted_text_file_without_encoding_is_caught(tmp_path: Path, source: str, violations: int):
    assert len(encoding_violations(planted(tmp_path, "data/vision.py", source))) == violations


@pytest.mark.parametrize(
    ("source", "violations"),
    [
        ("class FedAvg(FederatedAlgorithm): ...\nclass FedProx(FedAvg): ...", 1),
        ("class FedAvg(FederatedAlgorithm): ...\nclass _Hidden(FedAvg): ...", 1),
        ("class FedAvg(Mixin, FederatedAlgorithm): ...", 1),
        ("class FedAvg: ...", 1),
        ("class FedAvg(algorithm.FederatedAlgorithm): ...\nclass _Plan: ...", 0),
    ],
)
def test_a_deep_hierarchy_is_caught(tmp_path: Path, source: str, violations: int):
    assert len(depth_violations(planted(tmp_path, "algorithms/fedavg.py", source))) == violations


def test_a_private_module_of_a_method_may_have_other_classes(tmp_path: Path):
    package = planted(tmp_path, "algorithms/_bandit.py", "class Options: ...")
    assert depth_violations(package) == []
    planted(tmp_path, "algorithms/_bandit.py", "class FedProx(FederatedAlgorithm): ...\nclass Deep(FedProx): ...")
    assert len(depth_violations(package)) == 1
