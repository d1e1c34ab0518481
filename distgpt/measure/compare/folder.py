"""The folder of a comparison: what lies where, and that nothing of anybody else's is overwritten."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from distgpt.errors import StorageError, UsageError
from distgpt.files import atomic_file, storage_errors
from distgpt.machine.stages import STAGES

FORMAT, VERSION = "distgpt-comparison", 1


class Folder:
    """The files of one comparison, by name, and a run directory for each stage."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.result = path / "compare.json"
        self.report = path / "report.html"
        self.prompt = path / "prompt.txt"
        self.config = path / "config.toml"

    def of_stage(self, stage: str) -> Path:
        return self.path / stage

    def refuse_foreign(self) -> None:
        """Only an empty folder, or one of an earlier comparison, may be used."""
        with storage_errors("use", self.path):
            if self.path.exists() and not self.path.is_dir():
                raise UsageError(f"--out {self.path} is no folder; choose another")
            if self.path.is_dir() and any(self.path.iterdir()) and not self._is_ours():
                raise UsageError(f"--out {self.path} is not empty and holds no comparison; choose another")

    def begin(self, config: str, prompt: str, need: int) -> None:
        """Make it, take away what an earlier comparison left, and see that there is room for this one."""
        with storage_errors("use", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.path).free + self._earlier()
            if free < need:
                raise StorageError(
                    f"{self.path} has room for {free / 1e6:,.0f} MB, and the weights of the stages with one"
                    f" checkpoint take {need / 1e6:,.0f} MB"
                )
            for stage in STAGES:
                shutil.rmtree(self.of_stage(stage), ignore_errors=True)
            self.report.unlink(missing_ok=True)
        self.write(self.config, config)
        self.write(self.prompt, prompt)

    def save(self, found: dict[str, Any]) -> None:
        text = json.dumps({"format": FORMAT, "version": VERSION, **found}, indent=1, allow_nan=False)
        self.write(self.result, text + "\n")

    def write(self, path: Path, text: str) -> None:
        with atomic_file(path) as file:
            file.write(text.encode())

    def _earlier(self) -> int:
        """Bytes that will be free once the stages of an earlier comparison are gone."""
        files = (file for stage in STAGES for file in self.of_stage(stage).rglob("*"))
        return sum(file.lstat().st_size for file in files)

    def _is_ours(self) -> bool:
        try:
            found = json.loads(self.result.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return isinstance(found, dict) and found.get("format") == FORMAT
