"""A table on disk: rows of numbers, with a column of classes or of numbers to predict.

CSV and JSON lines are read by Python's standard library, parquet by pyarrow.
"""

import csv
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from runner.config.problem import did_you_mean
from runner.data.dataset import Data, DataUnavailable, TensorPairs, split_off

_DELIMITERS = ",;\t|"
_TRUTH = {"true": 1.0, "false": 0.0}
_LISTED = 8  # names that a message lists at most
_LONGEST_CELL = 2**27  # characters


class Cell(NamedTuple):
    """A place of a table, as a message names it."""

    file: Path
    line: int
    column: str

    def __str__(self) -> str:
        return f"{self.file.name}, line {self.line}, column {self.column}"


class Table(NamedTuple):
    """The rows of a file as they were read: text, or values of other types."""

    file: Path
    names: list[str]
    rows: list[list[Any]]
    lines: list[int]  # of each row in the file

    def index_of(self, name: str, key: str) -> int:
        """Return the number of a column."""
        if name not in self.names:
            listed = ", ".join(self.names[:_LISTED])
            more = ", ..." if len(self.names) > _LISTED else ""
            near = did_you_mean(name, self.names)
            raise DataUnavailable(
                f"{key}={name}: {self.file.name} has no such column{near} (its first line names "
                f"{listed}{more})"
            )
        if self.names.count(name) > 1:
            raise DataUnavailable(f"{self.file.name} has several columns {name}: rename them")
        return self.names.index(name)

    def column(self, name: str, key: str) -> Iterator[tuple[Cell, Any]]:
        """Yield the values of a column, each with its place."""
        index = self.index_of(name, key)
        for line, row in zip(self.lines, self.rows, strict=True):
            yield Cell(self.file, line, name), row[index]


def table(
    path: str,
    target: str,
    columns: Sequence[str] | None = None,
    classes: bool | Literal["auto"] = "auto",
    standardize: bool = True,
    eval_path: str | None = None,
    eval_fraction: float = 0.1,
    seed: int = 0,
    encoding: str = "utf-8",
    delimiter: str | None = None,
) -> Data:
    """Load a table: float32 inputs [columns], and a class or a number as the target of a row.

    Args:
        path: a .csv, .tsv, .jsonl or .parquet file whose first line names the columns.
        target: the column to predict.
        columns: the columns of the inputs; None: all others.
        classes: whether targets are classes, numbered in their order; ``auto``: text and whole
            numbers are.
        standardize: whether inputs have mean 0 and standard deviation 1 over the training rows.
        eval_path: a file of held-out rows; None: a random share of the rows.
        eval_fraction: that share; 0: no evaluation.
        seed: seed of the choice of held-out rows.
        encoding: of the text.
        delimiter: of a .csv file; None: the one of ``, ; | tab`` that the first line has most of.
    """
    seen = _read(Path(path).expanduser(), "data.path", encoding, delimiter)
    names = list(columns) if columns is not None else [n for n in seen.names if n != target]
    kinds = _Targets(seen, target, classes)
    inputs = _numbers(seen, names, target)
    targets = kinds.of(seen)
    if eval_path is not None:
        held_out = _read(Path(eval_path).expanduser(), "data.eval_path", encoding, delimiter)
        test_inputs, test_targets = _numbers(held_out, names, target), kinds.of(held_out)
    else:
        kept, rest = split_off(len(inputs), eval_fraction, seed)
        test_inputs, test_targets = inputs[rest], targets[rest]
        inputs, targets = inputs[kept], targets[kept]
    if standardize:
        deviation, mean = torch.std_mean(inputs, dim=0, correction=0)
        deviation[deviation <= 1e-12 * mean.abs()] = 1.0  # a constant column
        inputs, test_inputs = (inputs - mean) / deviation, (test_inputs - mean) / deviation
    test = TensorPairs(test_inputs.float(), test_targets) if len(test_inputs) else None
    return Data(TensorPairs(inputs.float(), targets), test, "samples")


class _Targets:
    """The targets of a table: classes by their names, or numbers."""

    def __init__(self, seen: Table, target: str, classes: bool | str) -> None:
        self._target = target
        self._names: dict[str, int] | None = None
        self._file = seen.file.name
        values = [_given(cell, value) for cell, value in seen.column(target, "data.target")]
        if classes == "auto":
            classes = not all(map(_is_number, values)) or all(map(_is_whole, values))
        if classes:
            numbers = all(map(_is_number, values))
            ordered = sorted({_name(value) for value in values}, key=float if numbers else str)
            self._names = {name: number for number, name in enumerate(ordered)}
            if len(ordered) == 1:
                text = f"column {target} of {self._file} holds one class, {ordered[0]}"
                raise DataUnavailable(f"{text}: choose another data.target")

    def of(self, rows: Table) -> Tensor:
        """Return the targets of the rows of a table."""
        column = rows.column(self._target, "data.target")
        if self._names is None:
            return torch.tensor([_number(cell, value) for cell, value in column]).unsqueeze(1)
        numbers = []
        for cell, value in column:
            name = _name(_given(cell, value))
            if name not in self._names:
                raise DataUnavailable(f"{cell}: class {name} does not occur in {self._file}")
            numbers.append(self._names[name])
        return torch.tensor(numbers)


def _numbers(rows: Table, names: Sequence[str], target: str) -> Tensor:
    """Return the columns ``names`` as one float64 tensor [rows, columns]."""
    if not names:
        text = f"{rows.file.name} has no column of inputs beside the target {target}"
        raise DataUnavailable(text)
    if target in names:
        raise DataUnavailable(f"data.columns: {target} is the target, and no input")
    columns = []
    for name in names:
        values = [_number(cell, value) for cell, value in rows.column(name, "data.columns")]
        columns.append(torch.tensor(values, dtype=torch.float64))
    return torch.stack(columns, dim=1)


def _given(cell: Cell, value: Any) -> Any:
    """Return a value, which must not be missing."""
    text = value.strip() if isinstance(value, str) else value
    is_nan = isinstance(text, float) and math.isnan(text)
    if text is None or text == "" or is_nan:
        raise DataUnavailable(f"{cell}: there is no value; fill it, or leave out the row")
    return text


def _number(cell: Cell, value: Any) -> float:
    value = _given(cell, value)
    if isinstance(value, str) and value.lower() in _TRUTH:
        return _TRUTH[value.lower()]
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        text = f"{cell}: {str(value)[:40]!r} is no number; data.columns chooses columns of numbers"
        raise DataUnavailable(text) from None
    if not math.isfinite(number):
        raise DataUnavailable(f"{cell}: {value} is no finite number; fill it, or leave out the row")
    return number


def _is_number(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError, OverflowError):
        return False


def _is_whole(value: Any) -> bool:
    return float(value).is_integer() and "." not in str(value)


def _name(value: Any) -> str:
    """Return the name of a class: 1, 1.0 and " 1" are one class."""
    if _is_number(value) and not isinstance(value, bool) and float(value).is_integer():
        return str(int(float(value)))
    return str(value)


# -- files


def _read(file: Path, key: str, encoding: str, delimiter: str | None) -> Table:
    """Return the rows of a file. A DataUnavailable says in one sentence why it cannot be read."""
    reader = {".jsonl": _json_lines, ".ndjson": _json_lines, ".parquet": _parquet}
    if file.is_dir():
        raise DataUnavailable(f"{key}={file} is a folder: data=datasets data.path={file}")
    if not file.is_file():
        raise DataUnavailable(f"{key}: there is no file {file.absolute()}")
    try:
        if file.suffix in reader:
            rows = reader[file.suffix](file, encoding)
        else:
            rows = _csv(file, encoding, "\t" if file.suffix == ".tsv" else delimiter)
    except UnicodeDecodeError as error:
        text = f"{file.name} is no {error.encoding} text ({error.reason}, byte {error.start})"
        raise DataUnavailable(f"{text}: try data.encoding={_other(file)}") from None
    except LookupError:
        raise DataUnavailable(f"data.encoding={encoding} is no encoding of text") from None
    except (OSError, ValueError, csv.Error) as error:
        raise DataUnavailable(f"{file.name} cannot be read: {error}") from None
    if not rows.rows:
        raise DataUnavailable(f"{file.name} has no row of values")
    return rows


def _other(file: Path) -> str:
    """Return an encoding that a file may have, which is not UTF-8."""
    with file.open("rb") as content:
        start = content.read(2)
    return "utf-16" if start in (b"\xff\xfe", b"\xfe\xff") else "latin-1"


def _csv(file: Path, encoding: str, delimiter: str | None) -> Table:
    csv.field_size_limit(_LONGEST_CELL)
    utf8 = encoding.lower().replace("_", "-") in ("utf-8", "utf8")
    with file.open(encoding="utf-8-sig" if utf8 else encoding, newline="") as content:
        first = content.readline()
        content.seek(0)
        separator = delimiter or max(_DELIMITERS, key=lambda sign: len(_cells(first, sign)))
        reader = csv.reader(content, delimiter=separator, strict=True)
        names = [name.strip() for name in next(reader, [])]
        rows: list[list[Any]] = []
        lines: list[int] = []
        for row in reader:
            if not row or (len(names) > 1 and row == [""]):
                continue  # an empty line
            if len(row) != len(names):
                raise ValueError(
                    f"line {reader.line_num} has {len(row)} values, and the first line names "
                    f"{len(names)} columns"
                )
            rows.append(row)
            lines.append(reader.line_num)
    return Table(file, names, rows, lines)


def _cells(line: str, delimiter: str) -> list[str]:
    return next(csv.reader([line], delimiter=delimiter), [])


def _json_lines(file: Path, encoding: str) -> Table:
    names: list[str] = []
    rows: list[list[Any]] = []
    lines: list[int] = []
    with file.open(encoding=encoding) as content:
        for number, line in enumerate(content, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"line {number} is no JSON ({error})") from None
            if not isinstance(row, dict):
                raise ValueError(f"line {number} holds no JSON object, such as {{'x': 1.0}}")
            names = names or list(row)
            rows.append([row.get(name) for name in names])
            lines.append(number)
    return Table(file, names, rows, lines)


def _parquet(file: Path, encoding: str) -> Table:
    try:
        import pyarrow.parquet  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        text = 'parquet files need pyarrow: pip install "clip-runner[data]"'
        raise DataUnavailable(text) from None
    content = pyarrow.parquet.read_table(file)
    columns = [column.to_pylist() for column in content.columns]
    rows = [list(row) for row in zip(*columns, strict=True)]
    return Table(file, list(content.column_names), rows, list(range(1, len(rows) + 1)))
