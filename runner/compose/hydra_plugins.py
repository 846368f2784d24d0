"""What this project adds to Hydra's plugins."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from hydra.core.plugins import Plugins

# Hydra takes a sweeper from the namespace package ``hydra_plugins`` alone; this folder holds a
# part of it.
_HOME = Path(__file__).resolve().parents[1] / "sweep" / "plugins"


def register() -> None:
    """Make ``hydra/sweeper=clip_runner`` a choice; again does no harm."""
    if str(_HOME) not in sys.path:
        sys.path.append(str(_HOME))
    # Hydra looks for plugins once a process, which may have been before this.
    Plugins.instance().register(import_module("hydra_plugins.clip_runner").RecordSweeper)
