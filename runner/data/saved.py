"""Tables of Hugging Face's datasets: files, folders, and what ``save_to_disk`` wrote."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.data.dataset import Columns, Data, DataUnavailable, own

_KINDS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
_OF_ONE_TABLE, _OF_SPLITS = "state.json", "dataset_dict.json"
"""Files that ``save_to_disk`` writes into the folder of a table, and of several splits."""


def saved(
    path: str | None = None,
    eval_path: str | None = None,
    eval_split: str | None = None,
    train: Any = None,
    eval: Any = None,
    columns: Columns = None,
    eval_fraction: float = 0.1,
    seed: int = 0,
) -> Data:
    """Train on a table of ``datasets``; see conf/data/datasets.yaml.

    ``train`` and ``eval`` are tables, or the arguments of :func:`load`.
    """
    arguments: dict[str, Any] = {"path": path}
    if isinstance(train, Mapping) and "path" in train:
        arguments = dict(train)
    if not hasattr(train, "with_format"):
        train = load(**arguments)
    if eval is None and (eval_path or eval_split):
        place = eval_path or arguments["path"]
        eval = load(**{**arguments, "path": place, "split": eval_split or "train"})
    return own(train, eval, eval_fraction, seed, columns=columns)


def load(path: str | None = None, split: str = "train", **arguments: Any) -> Any:
    """Return a split of the table in a file or a folder, as ``datasets`` reads it."""
    if path is None:
        raise DataUnavailable("name a folder or a file, as data.path=rows.jsonl", argument="path")
    try:
        import datasets  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise DataUnavailable('needs pip install "clip-runner[data]"') from None
    try:
        return _load(datasets, path, split, arguments)
    except DataUnavailable:
        raise
    except Exception as error:  # of readers of many formats
        while error.__cause__ is not None and isinstance(error.__cause__, Exception):
            error = error.__cause__
        text = " ".join(str(error).split())[:300]
        raise DataUnavailable(f"{path} cannot be read: {text}", argument="path") from None


def _load(datasets: Any, path: str, split: str, arguments: Mapping[str, Any]) -> Any:
    """Return a split of a file, of a folder, or of what the library finds by this name."""
    place = Path(path).expanduser()
    if os.path.exists(place / _OF_SPLITS):
        return _split_of(datasets.load_from_disk(place), split)
    if os.path.exists(place / _OF_ONE_TABLE):
        return datasets.load_from_disk(place)
    kind = _KINDS.get(place.suffix)
    if kind and os.path.isfile(place):
        return datasets.load_dataset(kind, data_files=str(place), split="train", **arguments)
    if kind and not os.path.isdir(place):
        raise DataUnavailable(f"there is no file {place.absolute()}", argument="path")
    return datasets.load_dataset(path, split=split, **arguments)


def _split_of(splits: Any, split: str) -> Any:
    if split not in splits:
        text = f"the folder has no split {split} (data.train.split, data.eval_split)"
        raise DataUnavailable(f"{text}: it has {', '.join(splits)}")
    return splits[split]
