"""Convert notebooks to Markdown with their stored outputs.

To run a notebook again and store its outputs:

    pip install nbconvert ipykernel
    jupyter nbconvert --to notebook --execute --inplace docs/notebooks/first-model.ipynb
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any


def convert(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return the page of a notebook, and its pictures by file name."""
    parts, pictures = [], {}
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source.replace(".ipynb)", ".md)"))
            continue
        parts.append(f"```python\n{source}\n```")
        for is_picture, values in groupby(_outputs(cell), lambda value: isinstance(value, bytes)):
            if is_picture:
                for value in values:
                    name = f"{path.stem}-{len(pictures) + 1}.png"
                    pictures[name] = value
                    parts.append(f"![The plot drawn by the code above]({name})")
            else:
                parts.append(f"```text\n{''.join(values).rstrip()}\n```")
    download = f"[Download this notebook]({path.name})."
    return "\n\n".join([*parts, download]) + "\n", pictures


def _outputs(cell: dict[str, Any]) -> Iterator[str | bytes]:
    """Yield the text and the pictures that a cell printed."""
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            yield base64.b64decode(data["image/png"])
        else:
            yield "".join(output.get("text") or data.get("text/plain", ""))
