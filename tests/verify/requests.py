"""Small requests, and their verification on ranks."""

from typing import Any

from runner.compose.request import request
from runner.config.check import parse
from runner.train import build
from runner.verify.side_by_side import execute
from tests.distributed.training import Rows
from tests.verify import faulty_plugins

TOKENS = [
    *("data=synthetic", "data.kind=tokens", "data.sequence_length=12", "data.vocabulary=32"),
    *("data.samples=70", "data.ignored_fraction=0.3", "data.batch_size=4", "device=cpu"),
    *("model=gpt", "model.vocabulary=32", "model.context=12", "model.layers=4", "model.heads=4"),
    *("model.width=12", "verify.steps=3"),
]
IMAGES = ["data=synthetic", "data.samples=70", "data.batch_size=8", "device=cpu", "verify.steps=3"]


def net(name: str) -> list[str]:
    """Words for a model of :mod:`tests.verify.nets`."""
    return [f"model._target_=tests.verify.nets.{name}", "~model.width", "~model.num_classes"]


def plain_of(*words: str) -> dict[str, Any]:
    """The configuration that ``words`` give, to hand to ranks."""
    [job] = request(list(words), writes=False).jobs
    return job.plain


def verify(plain: dict[str, Any], faulty: str | None = None, **options: Any) -> dict[str, Any]:
    """What a rank returns, and the rows that it wrote."""
    rows = Rows()

    def make_plugin(config: Any) -> Any:
        return build.make_plugin(config) if faulty is None else plugin(**options)

    plugin = getattr(faulty_plugins, faulty) if faulty is not None else None
    return {"found": execute(parse(plain), [rows], make_plugin), "rows": rows.rows}
