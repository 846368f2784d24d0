"""``python -m runner [OVERRIDES]``: check the overrides, and run what they ask for.

torch is imported only after the overrides are validated, so that a typing error, ``--help`` and
``--cfg`` cost no more than Python and Hydra do.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from runner.cli.arguments import check_jobs, note, read, source_of
from runner.cli.main import WRONG_REQUEST
from runner.compose.request import answer, help_text, request
from runner.config.environment import joins, started_rank
from runner.config.problem import NOTHING, Problem, RequestError
from runner.run_folder.earlier import earlier_record


def main(words: Sequence[str]) -> int:
    """Run the request of the arguments ``words``, or print what their flags ask for.

    Returns:
        The exit code.

    Raises:
        RequestError: the request is wrong; nothing was created.
    """
    args = read(words)
    if args.help or args.cfg is not None or args.info is not None:
        return _show(args)
    if args.shell_completion or args.hydra_help:
        return answer(args, source_of(args))
    wanted = request(
        args.overrides,
        multirun=args.multirun,
        source=source_of(args),
        earlier=None if joins() else earlier_record,  # the first rank may have begun the record
    )
    note(wanted.notes)
    if wanted.sweep is not None:
        from runner.sweep import run_sweep

        started = started_rank()
        if started is not None and started.world_size > 1:
            message = "a sweep starts its own ranks (plugin.nproc): run it without torchrun"
            raise RequestError([Problem("-m", NOTHING, message)])
        return run_sweep(wanted, words, check_jobs)
    check_jobs(wanted.jobs)
    if joins():
        from runner.launch.rank import join

        return join()
    from runner.launch import supervise

    [job] = wanted.jobs
    ended = wanted.run(
        lambda folder: supervise.run(job.config, job.plain, folder, wanted.overrides)
    )
    return ended.exit_code


def _show(args: argparse.Namespace) -> int:
    """Print the answer to ``--help``, ``--cfg`` or ``--info``."""
    source = source_of(args)
    if args.help:
        print(help_text(args.overrides, source))
        return 0
    request(args.overrides, source=source, writes=False)
    return WRONG_REQUEST if answer(args, source) else 0
