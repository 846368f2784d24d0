"""Whatever is typed: a request that can be run, or one message that says why it cannot."""

import pytest
from hypothesis import given

from runner.cli import run
from runner.compose.request import request
from runner.config.identity import config_hash
from runner.config.problem import RequestError
from runner.run_folder.earlier import earlier_record
from tests.generated.limits import examples
from tests.generated.overrides import REQUEST

# Each of a sweep's runs is checked: fewer runs, so that an example does not take minutes.
FEW = "sweep.max_jobs=6"


def asked(words):
    """What the command does before it imports torch."""
    try:
        flags = run.read(words)
        source = run.source_of(flags)
        given = {"multirun": flags.multirun, "source": source, "earlier": earlier_record}
        return request(flags.overrides, **given)
    except RequestError as error:
        return error


@pytest.mark.usefixtures("outputs")
@pytest.mark.timeout(0)
@examples()
@given(words=REQUEST)
def test_a_request_runs_or_is_refused_in_one_message(tmp_path, words):
    if not any("sweep" in word for word in words):
        words = [*words, FEW] if "-m" in words or "--multirun" in words else words
    before = list(tmp_path.rglob("*"))
    outcome = asked(words)
    if isinstance(outcome, RequestError):
        assert len(str(outcome).splitlines()) == 1 + len(outcome.problems)
        assert all(problem.message for problem in outcome.problems)
    else:
        assert outcome.jobs
        for job in outcome.jobs:
            assert len(config_hash(job.plain)) == 16
    assert list(tmp_path.rglob("*")) == before
