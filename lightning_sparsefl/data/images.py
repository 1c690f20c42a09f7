"""Files of images."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def rgb_image(path: Path) -> Any:
    """Decode the image in a file to RGB, as an object of PIL; return None for a file that is no image.

    Args:
        path: Path of the file.

    Raises:
        OSError: If the file cannot be opened.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except OSError as error:
        if error.errno is None:  # of PIL, which cannot decode the file
            return None
        raise
