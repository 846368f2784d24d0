"""Answers to the flags that print and run nothing: ``--help``, ``--cfg``, ``--info``."""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from contextlib import redirect_stdout
from string import Template

from hydra._internal.utils import get_args_parser

from runner.compose.composer import Composer, Source
from runner.compose.request import logging_restored, request


def help_text(given: Sequence[str], source: Source | None = None) -> str:
    """Return the text of ``--help``, with the values that the overrides ``given`` give."""
    if given:
        wanted = request(given, source=source, writes=False)
        composer, composed = wanted.composer, wanted.composed
    else:
        composer, composed = Composer(source or Source(), given), None
    with composer.active():
        composed = composed or composer.compose(given)
        return Template(composed.hydra.help.template).safe_substitute()


def answer(args: argparse.Namespace, composer: Composer) -> int:
    """Print Hydra's answer to ``--cfg``, ``--info`` or ``--hydra-help``."""
    printed, code = io.StringIO(), 0
    hydra, name, overrides = composer.hydra, composer.source.name, list(args.overrides)
    with composer.active(), logging_restored(), redirect_stdout(printed):
        try:
            if args.hydra_help:
                hydra.hydra_help(name, get_args_parser(), args)
            elif args.cfg is not None:
                hydra.show_cfg(name, overrides, args.cfg, args.package, args.resolve)
            else:
                hydra.show_info(args.info, name, overrides)
        except SystemExit as end:
            code = int(end.code or 0)
    print(printed.getvalue(), end="")
    return code
