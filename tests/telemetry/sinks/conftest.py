"""What tests of sinks share: a server that answers may take its time on a busy machine."""

import pytest

from runner.telemetry.sinks import wandb_sink


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("INIT_SECONDS", "FINISH_SECONDS", "STALLED_SECONDS"):
        monkeypatch.setattr(wandb_sink, limit, 120.0)
