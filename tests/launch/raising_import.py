"""A module that cannot be imported on rank 1."""

import os

from tests.launch.raising import PlantedError

if os.environ.get("RANK") == "1":
    raise PlantedError("planted error") from KeyError("planted cause")


class Callback:
    """Does nothing."""

    def on_step(self, trainer, metrics):
        pass
