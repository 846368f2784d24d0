"""Composed configurations, each made once, and what is wrong with one."""

import copy
from functools import cache

import pytest

from runner.config.check import parse
from runner.config.problem import RequestError
from runner.request.request import request


@cache
def _job(words):
    return request(words).jobs[0]


def plain(*words):
    """A copy of the plain configuration of a request, to change."""
    return copy.deepcopy(_job(words).plain)


def changed(config, key, value):
    """``config`` with another value of a dotted key."""
    *sections, last = key.split(".")
    section = config
    for name in sections:
        section = section[name]
    section[last] = value
    return config


def problems(config):
    """The message of each key that is wrong."""
    with pytest.raises(RequestError) as error:
        parse(config)
    return {problem.key: problem.message for problem in error.value.problems}
