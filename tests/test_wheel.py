"""The package as pip installs it: built from a source distribution, unpacked outside of the clone, and used there."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import Distribution
from pathlib import Path

import pytest
import yaml

import lightning_sparsefl.algorithms

ROOT = Path(__file__).parents[1]
SOURCES = ("lightning_sparsefl", "configs", "callbacks", "pyproject.toml", "setup.py", "README.md", "LICENSE")
BUILD = "from setuptools import build_meta; import sys; build_meta.build_{}(sys.argv[1])"
USE = """
import sys, lightning_sparsefl
from lightning_sparsefl.cli import main
print(lightning_sparsefl.__file__)
for command in sys.argv[1:]:
    print("===")
    try:
        main(command.split())
    except SystemExit as stop:
        assert not stop.code
"""


def python(folder, *arguments, **environment):
    """Run Python in a folder, with the environment of this process but its paths of Python."""
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | environment
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel from the source distribution of a copy of the clone, without network and without isolation."""
    folder = tmp_path_factory.mktemp("wheel")
    clone = folder / "clone"
    clone.mkdir()
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, clone)
    python(clone, "-c", BUILD.format("sdist"), folder)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    python(next((folder / "unpacked").iterdir()), "-c", BUILD.format("wheel"), folder)
    return next(folder.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_has_every_module_and_configuration_and_nothing_else(wheel):
    folders = {"lightning_sparsefl": "lightning_sparsefl", "configs": "lightning_sparsefl/configs"}
    folders["callbacks"] = "lightning_sparsefl/recipes"
    expected = {
        f"{target}/{path.relative_to(ROOT / source).as_posix()}"
        for source, target in folders.items()
        for path in (ROOT / source).rglob("*")
        if path.suffix in (".py", ".yaml", ".sh") or path.name == "py.typed"
    }
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == expected


@pytest.mark.slow
def test_the_installed_package_runs_outside_of_the_clone(wheel, tmp_path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)  # what pip does with a wheel of pure Python, but for the scripts
    cell = "paper/fedspa/table1/emnist_letters_a_fedspa_dst"
    commands = [
        "configs table1/emnist_letters_a",
        f"configs --copy {cell} mine.yaml",
        f"profile --config {cell} --json",
    ]
    out = python(tmp_path, "-c", USE, *commands, "fit --config quickstart -c debug --quiet", PYTHONPATH=str(site))
    where, listed, copied, profile, _ = out.split("===\n")
    assert Path(where.strip()).is_relative_to(site)
    assert f"{cell} " in listed
    assert copied == "Copied to mine.yaml\n"
    assert (tmp_path / "mine.yaml").read_text() == (ROOT / "configs" / f"{cell}.yaml").read_text()
    assert json.loads(profile[profile.index("{") :])["algorithm"] == "FedSpa"
    assert (tmp_path / "runs" / "FedSpa" / "version_0" / "summary.json").is_file()
    (info,) = site.glob("*.dist-info")
    entry_points = {point.name: point.value for point in Distribution.at(info).entry_points}
    assert entry_points == {"sparsefl": "lightning_sparsefl.cli:main"}


def test_the_image_is_built_from_files_that_exist_and_are_sent_to_the_daemon():
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    sources = {name for names in copied for name in names.split()}
    assert sources == set(SOURCES)
    sent = (ROOT / ".dockerignore").read_text().split()
    assert {f"!{name}" for name in sources} == {line for line in sent if line.startswith("!")}


def test_the_citation_lists_the_paper_of_every_method():
    papers = yaml.safe_load((ROOT / "CITATION.cff").read_text())["references"]
    known = {" ".join(paper["title"].split()).lower() for paper in papers}
    arxiv = {identifier["value"] for paper in papers for identifier in paper.get("identifiers", ())}
    missing = []
    for name in lightning_sparsefl.algorithms.__all__:
        module = sys.modules[getattr(lightning_sparsefl.algorithms, name).__module__]
        title = " ".join(module.__doc__.split("\n\n")[0].split()).rstrip(".").lower()
        cited = any(paper in title or title in paper for paper in known)
        if not cited and not arxiv & set(re.findall(r"arXiv:\d+\.\d+", module.__doc__.split("\n\n")[1])):
            missing.append(name)
    assert missing == ["Local"]  # training without a federation
    assert all(paper["authors"] and paper["year"] for paper in papers)
