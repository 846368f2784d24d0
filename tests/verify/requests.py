"""Small requests, and their verification on ranks."""

from contextlib import nullcontext
from unittest.mock import patch

from runner.config.request import request
from runner.config.schema import parse
from runner.tools.verify import execute
from runner.train import build
from tests.verify import faulty_plugins

TOKENS = [
    *("data=synthetic", "data.kind=tokens", "data.sequence_length=12", "data.vocabulary=32"),
    *("data.samples=70", "data.ignored_fraction=0.3", "data.batch_size=4", "device=cpu"),
    *("model=gpt", "model.vocabulary=32", "model.context=12", "model.layers=4", "model.heads=4"),
    *("model.width=12", "verify.steps=3"),
]
IMAGES = ["data=synthetic", "data.samples=70", "data.batch_size=8", "device=cpu", "verify.steps=3"]


def net(name):
    """Words for a model of :mod:`tests.verify.nets`."""
    return [f"model._target_=tests.verify.nets.{name}"]


def plain_of(*words):
    """The configuration that ``words`` give, to hand to ranks."""
    [job] = request(list(words)).jobs
    return job.plain


def verify(plain, faulty=None):
    """What a rank returns."""
    plugin = getattr(faulty_plugins, faulty) if faulty else None
    with patch.object(build, "make_plugin", lambda _: plugin()) if plugin else nullcontext():
        return execute(parse(plain))
