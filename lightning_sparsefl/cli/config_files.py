"""Option ``--config``: a file, or the name of one that is installed with the package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any

import yaml
from jsonargparse import ActionConfigFile

from lightning_sparsefl.cli.packaged import packaged_config
from lightning_sparsefl.errors import InvalidOption


class ConfigFileOrName(ActionConfigFile):
    """Option for a configuration file, or for the name of one that is installed with the package."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        """Apply the file of that path if there is one, else that of the package.

        Raises:
            InvalidOption: If the file has no options.
        """
        packaged = packaged_config(values) if isinstance(values, str) else None
        if isinstance(values, str) and packaged is None and Path(values).is_file():
            _require_options(Path(values))
        super().__call__(parser, cfg, packaged or values, option_string)  # type: ignore[no-untyped-call]


def _require_options(path: Path) -> None:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        place = "" if mark is None else f", as line {mark.line + 1}, column {mark.column + 1} shows: {problem}"
        raise InvalidOption(f"`--config` is '{path}', which is not YAML{place}; repair it.") from None
    if not isinstance(content, Mapping | NoneType):
        raise InvalidOption(
            f"`--config` is '{path}', which has a {type(content).__name__}; expected options by name, as "
            "`sparsefl configs --show quickstart` prints them."
        )
