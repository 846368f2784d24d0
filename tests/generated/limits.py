"""How many examples are generated, and how long one may take."""

import os
import time
from contextlib import contextmanager

from hypothesis import HealthCheck, settings

EXAMPLES = int(os.environ.get("RUNNER_TESTS_EXAMPLES", "40"))
"""Requests and configurations to generate; damaged folders are a tenth of this."""

SECONDS = 5.0
"""Processor time of this thread that one example may take."""


def examples(share=1.0):
    """Settings for this share of the examples. A failure prints how to repeat it."""
    return settings(
        max_examples=max(1, round(EXAMPLES * share)),
        deadline=None,  # the clock of a busy machine tells nothing
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


@contextmanager
def in_time():
    started = time.thread_time()
    yield
    assert time.thread_time() - started < SECONDS
