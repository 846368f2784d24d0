"""Whatever is typed: a request that can be run, or one message that says why it cannot."""

import os

import pytest
from hypothesis import HealthCheck, given, settings

from runner.cli import arguments
from runner.config.identity import config_hash
from runner.config.problem import RequestError
from tests.generated.overrides import REQUEST

EXAMPLES = os.environ.get("RUNNER_TESTS_EXAMPLES")


def asked(words):
    """What the command does before it imports torch."""
    try:
        return arguments.checked(arguments.read(words))
    except RequestError as error:
        return error


@pytest.mark.usefixtures("outputs")
@pytest.mark.timeout(0)
@settings(
    max_examples=int(EXAMPLES or 24),
    deadline=None,  # the clock of a busy machine tells nothing
    database=None,
    derandomize=EXAMPLES is None,  # the gate runs the same examples every day
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
@given(words=REQUEST)
def test_a_request_runs_or_is_refused_in_one_message(tmp_path, words):
    if {"-m", "--multirun"} & {*words} and not any("sweep" in word for word in words):
        words = [*words, "sweep.max_jobs=6"]  # so that an example does not take minutes
    before = list(tmp_path.rglob("*"))
    outcome = asked(words)
    if isinstance(outcome, RequestError):
        assert len(str(outcome).splitlines()) == 1 + len(outcome.problems)
        assert all(problem.message for problem in outcome.problems)
    else:
        assert outcome.jobs
        assert all(len(config_hash(job.plain)) == 16 for job in outcome.jobs)
    assert list(tmp_path.rglob("*")) == before
