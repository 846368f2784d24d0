"""How many examples are generated."""

import os

from hypothesis import HealthCheck, settings

EXAMPLES = int(os.environ.get("RUNNER_TESTS_EXAMPLES", "24"))
"""Requests and configurations to generate; damaged folders are a tenth of this."""


def examples(share=1.0):
    """Settings for this share of the examples. A failure prints how to repeat it."""
    return settings(
        max_examples=max(1, round(EXAMPLES * share)),
        deadline=None,  # the clock of a busy machine tells nothing
        database=None,
        # The gate runs the same examples every day.
        derandomize="RUNNER_TESTS_EXAMPLES" not in os.environ,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
