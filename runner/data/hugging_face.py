"""Data sets of Hugging Face's library ``datasets`` in a folder on disk."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from torch.utils.data import Dataset

from runner.data.dataset import Data, DataUnavailable, data_folder
from runner.data.own import own

FILES = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}
"""Reader of ``datasets`` by the ending of a file."""

HELD_OUT = ("validation", "test")
"""Names of splits that are evaluated on if none is named."""

WAY_FORWARD = (
    "Set data.root (or $DATA) to a folder that save_to_disk wrote, or that holds parquet, json, "
    "jsonl or csv files"
)


class Pairs(Dataset[tuple[Any, Any]]):
    """Two columns of a table as pairs (inputs, targets)."""

    def __init__(self, table: Dataset[Any], inputs: str, targets: str) -> None:
        self.table, self.inputs, self.targets = table, inputs, targets

    def __len__(self) -> int:
        return len(self.table)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self._pair(self.table[index])

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, Any]]:
        """Return the samples of a batch, by one read of the table."""
        table: Any = self.table
        return [self._pair(row) for row in table.__getitems__(list(indices))]

    def _pair(self, row: dict[str, Any]) -> tuple[Any, Any]:
        return row[self.inputs], row[self.targets]


def datasets(
    root: str | None,
    inputs: str | None = None,
    targets: str | None = None,
    columns: Sequence[str] | None = None,
    train_split: str = "train",
    eval_split: str | None = None,
    eval_fraction: float = 0.1,
    seed: int = 0,
    items: Literal["samples", "tokens"] = "samples",
) -> Data:
    """Read a folder that ``save_to_disk`` wrote, or one of parquet, json, jsonl or csv files."""
    if (inputs is None) != (targets is None):
        raise ValueError("inputs and targets go together: give both columns or none")
    if inputs is not None and columns is not None:
        raise ValueError("columns are those of dictionaries: not with inputs and targets")
    splits = _splits(data_folder(root, f". {WAY_FORWARD}"), train_split)
    if eval_split is None:
        eval_split = next((n for n in HELD_OUT if n in splits and n != train_split), None)
    wanted = [inputs, targets] if inputs is not None else columns

    def part(name: str, key: str) -> Dataset[Any]:
        if name not in splits:
            there = ", ".join(splits)
            raise DataUnavailable(f"data.{key}={name}: the folder has the splits {there}")
        table = splits[name]
        if missing := [column for column in wanted or () if column not in table.column_names]:
            raise DataUnavailable(
                f"data.{key}={name} has no column {missing[0]}: it has "
                f"{', '.join(table.column_names)}"
            )
        table = table.with_format("torch", columns=None if wanted is None else list(wanted))
        if inputs is None or targets is None:
            return table  # type: ignore[no-any-return]
        return Pairs(table, inputs, targets)

    held_out = None if eval_split is None else part(eval_split, "eval_split")
    return own(part(train_split, "train_split"), held_out, eval_fraction, seed, items)


def _splits(folder: Path, train_split: str) -> dict[str, Any]:
    """Return the tables of a folder by the names of their splits."""
    try:
        library: Any = import_module("datasets")
    except ImportError:
        raise DataUnavailable(
            'data=datasets needs a package: pip install "clip-runner[data]"'
        ) from None
    if not folder.is_dir():
        raise DataUnavailable(f"data.root={folder} is no folder. {WAY_FORWARD}")
    library.disable_progress_bars()
    files = sorted(file for file in folder.iterdir() if file.suffix in FILES)
    is_saved = any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))
    if is_saved:
        read = library.load_from_disk(str(folder))
        return dict(read) if isinstance(read, dict) else {train_split: read}
    if not files:
        raise DataUnavailable(f"data.root={folder} holds no data set. {WAY_FORWARD}")
    named: dict[str, list[str]] = {}
    for file in files:
        split = next((n for n in ("train", *HELD_OUT) if file.name.startswith(n)), train_split)
        named.setdefault(split, []).append(str(file))
    kinds = {FILES[file.suffix] for file in files}
    if len(kinds) > 1:
        raise DataUnavailable(f"data.root={folder} holds files of several kinds: {kinds}")
    return dict(library.load_dataset(kinds.pop(), data_files=named))
