"""The commands of README with models of torchvision, timm and transformers train as they are."""

import pytest

from tests.process import python
from tests.test_readme import README, commands

OWNERS = ("torchvision", "timm", "transformers")
SHOWN = [
    words
    for words in commands(README)
    if any(word.startswith(f"model._target_={owner}.") for word in words for owner in OWNERS)
]


@pytest.mark.parametrize("words", SHOWN, ids=OWNERS)
@pytest.mark.product(every=3)
def test_a_command_of_readme_trains(words, tmp_path, outputs):
    short = ["train.max_duration=2ba", "eval.interval=100ba", "data.batch_size=4", "device=cpu"]
    small = ["data.max_bytes=20000"] if "data=text" in words else ["data.test_samples=4"]
    python("-m", "runner", *words, *short, *small, "tracker=none", cwd=tmp_path, timeout=200)
    [written] = outputs.glob("runs/*/metrics.jsonl")
    assert len(written.read_text().splitlines()) == 2
