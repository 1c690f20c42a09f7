"""Packages of the wheel: the Python package, and the folders `configs` and `callbacks` of this repository inside it.

Everything else is in pyproject.toml, which cannot add such folders to the packages that it finds. An editable install
reads the folders where they are.
"""

from setuptools import find_packages, setup

FOLDERS = {"lightning_sparsefl.configs": "configs", "lightning_sparsefl.recipes": "callbacks"}

setup(
    packages=[*find_packages(include=["lightning_sparsefl*"]), *FOLDERS],
    package_dir=FOLDERS,
    package_data={"lightning_sparsefl": ["py.typed"], **{name: ["**/*.yaml", "cluster/*"] for name in FOLDERS}},
)
