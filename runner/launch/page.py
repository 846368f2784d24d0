"""The page that is written when a run or a sweep ends, and after each run of a sweep."""

from __future__ import annotations

import logging
from pathlib import Path

from runner.config import disk

log = logging.getLogger(__name__)


def write_page(folder: Path, left: int = 0) -> Path | None:
    """Write ``report.html`` into the folder of a run or sweep."""
    try:
        from runner import report

        return report.write(folder, left)
    except Exception as error:
        why = disk.told(error) or f"the page of {folder} could not be written: {error!r}"
        log.warning("%s", why)
        return None
