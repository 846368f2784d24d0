"""Work on the ranks of a request, which it starts itself or torchrun and srun have started."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from runner.config.environment import joins, started_rank
from runner.config.schema import RunConfig
from runner.launch.failure import Failure, attempt
from runner.request.jobs import Job


def require_same(job: Job, **arguments: Any) -> None:
    """Refuse the request on all ranks if torchrun or srun started one with another request."""
    started = started_rank()
    if started is not None and started.world_size > 1:
        from runner.launch.agreement import require_same_request

        require_same_request({**job.plain, **arguments}, job.config.launch.timeout)


def on_ranks(
    config: RunConfig, folder: Path, work: Callable[..., Any], sinks: Sequence[Any] = ()
) -> dict[str, Any]:
    """Return what ``work`` returns on the ranks of a request, or raise the Failure of one.

    A rank that joins others ends with the exit code of its part.
    """
    if joins():
        from runner.launch.rank import join

        raise SystemExit(join(work, config.launch.timeout))
    from runner.launch.train import train

    folder.mkdir(parents=True, exist_ok=True)
    result = attempt(lambda: train(config, folder, sinks, work))
    exit_code = result.exit_code if isinstance(result, Failure) else 0
    for sink in sinks:
        sink.close(None, exit_code)
    if isinstance(result, Failure):
        raise result
    return result
