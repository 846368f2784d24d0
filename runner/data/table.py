"""A table on disk: rows of numbers, with a column of classes or of numbers to predict.

CSV and JSON lines are read by Python's standard library, parquet by pyarrow.
"""

import csv
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from runner.config.notation import plural
from runner.config.problem import did_you_mean, near_name
from runner.data.dataset import Data, DataUnavailable, TensorPairs, split_off

_DELIMITERS = ",;\t|"
_TRUTH = {"true": True, "false": False}
_MISSING = {"nan", "na", "n/a", "#n/a", "<na>", "null", "none", "?", "-", "."}  # in lower case
_WHOLE = re.compile(r"([+-]?(?:0|[1-9][0-9]{0,999}))(\.0*)?")
_CODE = re.compile(r"[+-]?0[0-9]{1,999}")
_LISTED = 8  # names that a message lists at most
_LONGEST_CELL = 2**27  # characters
_LARGEST = torch.finfo(torch.float32).max
_LARGEST_STANDARDIZED = 1e150  # whose square is a float64


class Cell(NamedTuple):
    """A place of a table, as a message names it."""

    file: Path
    line: int
    column: str

    def __str__(self) -> str:
        return f"{self.file.name}, line {self.line}, column {self.column}"


class Kind(Enum):
    """What a cell holds."""

    TRUTH = auto()
    WHOLE = auto()  # 12
    CODE = auto()  # 012: a number, but another class than 12
    REAL = auto()  # 1.5, 1.0, 1e3
    TEXT = auto()


_NUMBERS = (Kind.WHOLE, Kind.CODE, Kind.REAL)


class Value(NamedTuple):
    """The value of a cell, as a number and as the name of a class."""

    kind: Kind
    number: float | None  # None: text; nan and inf as text have one too
    name: str  # 1, 1.0 and " 1" have one name

    @property
    def is_number(self) -> bool:
        """True if it is a finite number."""
        return self.kind in _NUMBERS

    @property
    def marks_missing(self) -> bool:
        """True of text that other programs write for a missing number."""
        return self.kind is Kind.TEXT and self.name.lower() in _MISSING


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
                f"{key}={name}: {self.file.name} has no such column{near} (it has {listed}{more})",
                near_name(name, self.names),
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
        classes: whether targets are classes, numbered in their order; ``auto``: text, booleans and
            whole numbers are.
        standardize: whether inputs have mean 0 and standard deviation 1 over the training rows.
        eval_path: a file of held-out rows; None: a random share of the rows.
        eval_fraction: the share of the rows that is held out; 0: no evaluation.
        seed: seed of the choice of held-out rows.
        encoding: the encoding of the text.
        delimiter: the delimiter of a .csv file; None: the one of ``, ; | tab`` that the first line
            has most of.
    """
    seen = _read(Path(path).expanduser(), "path", encoding, delimiter)
    names = list(columns) if columns is not None else [n for n in seen.names if n != target]
    kinds = _Targets(seen, target, classes)
    largest = _LARGEST_STANDARDIZED if standardize else _LARGEST
    inputs = _numbers(seen, names, target, largest)
    targets = kinds.of(seen)
    if eval_path is not None:
        held_out = _read(Path(eval_path).expanduser(), "eval_path", encoding, delimiter)
        test_inputs = _numbers(held_out, names, target, largest)
        test_targets = kinds.of(held_out)
    else:
        to_train, to_evaluate = split_off(len(inputs), eval_fraction, seed)
        test_inputs = inputs[to_evaluate]
        test_targets = targets[to_evaluate]
        inputs = inputs[to_train]
        targets = targets[to_train]
    if standardize:
        deviation, mean = torch.std_mean(inputs, dim=0, correction=0)
        deviation[deviation <= 1e-12 * mean.abs()] = 1.0  # a constant column
        inputs = (inputs - mean) / deviation
        test_inputs = (test_inputs - mean) / deviation
    inputs = _float32(inputs, names)
    test_inputs = _float32(test_inputs, names)
    test = TensorPairs(test_inputs, test_targets) if len(test_inputs) else None
    return Data(TensorPairs(inputs, targets), test, "samples")


class _Targets:
    """The targets of a table: classes by their names, or numbers."""

    def __init__(self, seen: Table, target: str, classes: bool | str) -> None:
        self._target = target
        self._names: dict[str, int] | None = None
        self._file = seen.file.name
        column = [(cell, parsed(cell, value)) for cell, value in seen.column(target, "data.target")]
        if classes:
            _refuse_strays(column, text_is_class=classes is True)
        values = [value for _, value in column]
        if classes == "auto":
            has_real = any(value.kind is Kind.REAL for value in values)
            classes = not (has_real and all(value.is_number for value in values))
        if classes:
            ordered = _ordered_names(values)
            self._names = {name: number for number, name in enumerate(ordered)}
            if len(ordered) == 1:
                text = f"column {target} of {self._file} holds one class, {ordered[0]}"
                raise DataUnavailable(f"{text}: choose another data.target")

    def of(self, rows: Table) -> Tensor:
        """Return the targets of the rows of a table."""
        column = rows.column(self._target, "data.target")
        numbers: list[float] = []
        if self._names is None:
            advice = "data.classes=true makes a class of each value"
            for cell, value in column:
                numbers.append(_number(cell, value, _LARGEST, advice))
            return torch.tensor(numbers).unsqueeze(1)
        for cell, value in column:
            name = parsed(cell, value).name
            if name not in self._names:
                raise DataUnavailable(f"{cell}: class {name} does not occur in {self._file}")
            numbers.append(self._names[name])
        return torch.tensor(numbers)


def _refuse_strays(column: Sequence[tuple[Cell, Value]], text_is_class: bool) -> None:
    """Refuse the first cell that is no number in a column that is mostly numbers."""
    strays = [(cell, value) for cell, value in column if not value.is_number]
    numbers = len(column) - len(strays)
    if numbers <= sum(not value.marks_missing for _, value in strays):
        return
    for cell, value in strays:
        text = f"{cell}: {value.name[:40]!r} is no number, as most of the column are"
        if value.marks_missing:
            raise DataUnavailable(f"{text}; fill it, or leave out the row")
        if not text_is_class:
            raise DataUnavailable(f"{text}; correct it, or data.classes=true makes a class of it")


def _ordered_names(values: Sequence[Value]) -> list[str]:
    """Return the names of the classes: in the order of numbers, or of text."""
    numbers: dict[str, float] = {}
    for value in values:
        if value.number is not None and value.kind is not Kind.TEXT:
            numbers[value.name] = value.number
    names = {value.name for value in values}
    same_kind = len({value.is_number for value in values}) == 1
    if same_kind and len(numbers) == len(names):
        return sorted(names, key=lambda name: (numbers[name], name))
    return sorted(names)


def _numbers(rows: Table, names: Sequence[str], target: str, largest: float) -> Tensor:
    """Return the columns ``names`` as one float64 tensor [rows, columns]."""
    if not names:
        text = f"{rows.file.name} has no column of inputs beside the target {target}"
        raise DataUnavailable(text)
    if target in names:
        raise DataUnavailable(f"{target} is the target, and no input", argument="columns")
    advice = "data.columns chooses columns of numbers"
    columns = []
    for name in names:
        column = rows.column(name, "data.columns")
        values = [_number(cell, value, largest, advice) for cell, value in column]
        columns.append(torch.tensor(values, dtype=torch.float64))
    return torch.stack(columns, dim=1)


def _float32(inputs: Tensor, names: Sequence[str]) -> Tensor:
    """Return inputs in float32. Held-out rows may be too far from the training rows for it."""
    rounded = inputs.float()
    for name, is_finite in zip(names, rounded.isfinite().all(dim=0).tolist(), strict=True):
        if not is_finite:
            text = f"column {name} has a held-out value too far from its mean in the training rows"
            raise DataUnavailable(f"{text} for float32; correct it, or leave out the row")
    return rounded


def parsed(cell: Cell, value: Any) -> Value:
    """Return the kind, the number and the class name of a value, which must not be missing."""
    if isinstance(value, bool):
        return Value(Kind.TRUTH, int(value), str(value))
    if isinstance(value, int):
        return Value(Kind.WHOLE, value, str(value))
    if isinstance(value, float) and math.isfinite(value):
        return _parsed_real(value)
    if isinstance(value, bytes):
        value = value.decode(errors="backslashreplace")
    text = str(value).strip()
    if value is None or text == "" or (isinstance(value, float) and math.isnan(value)):
        raise DataUnavailable(f"{cell}: there is no value; fill it, or leave out the row")
    return _parsed_text(text)


def _parsed_text(text: str) -> Value:
    if text.lower() in _TRUTH:
        truth = _TRUTH[text.lower()]
        return Value(Kind.TRUTH, int(truth), str(truth))
    whole = _WHOLE.fullmatch(text)
    if whole:
        number = int(whole[1])
        return Value(Kind.REAL if whole[2] else Kind.WHOLE, number, str(number))
    if _CODE.fullmatch(text):
        return Value(Kind.CODE, int(text), text)
    try:
        real = float(text)
    except ValueError:
        return Value(Kind.TEXT, None, text)
    if "_" in text:  # Python reads 1_0 as 10
        return Value(Kind.TEXT, None, text)
    return _parsed_real(real) if math.isfinite(real) else Value(Kind.TEXT, real, text)


def _parsed_real(number: float) -> Value:
    name = str(int(number)) if number.is_integer() else str(number)
    return Value(Kind.REAL, number, name)


def _number(cell: Cell, value: Any, largest: float, advice: str) -> float:
    """Return a finite number of at most ``largest``, or refuse the cell with some advice."""
    number = parsed(cell, value).number
    text = str(value).strip()[:40]
    if number is None:
        raise DataUnavailable(f"{cell}: {text!r} is no number; {advice}")
    if isinstance(number, float) and not math.isfinite(number):
        raise DataUnavailable(f"{cell}: {text} is no finite number; fill it, or leave out the row")
    if abs(number) > largest:
        text = f"{text} is too large: numbers go to {largest:.2g}"
        raise DataUnavailable(f"{cell}: {text}; correct it, or choose a larger unit")
    return float(number)


# -- files


def _read(file: Path, argument: str, encoding: str, delimiter: str | None) -> Table:
    """Return the rows of a file. A DataUnavailable says in one sentence why it cannot be read."""
    reader = {".jsonl": _json_lines, ".ndjson": _json_lines, ".parquet": _parquet}
    if os.path.isdir(file):
        text = f"{file} is a folder: data=datasets data.path={file}"
        raise DataUnavailable(text, argument=argument)
    if not os.path.isfile(file):
        raise DataUnavailable(f"there is no file {file.absolute()}", argument=argument)
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
    if not rows.rows or not rows.names:
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
                    f"line {reader.line_num} has {plural(len(row), 'value')}, and the first line "
                    f"names {plural(len(names), 'column')}"
                )
            rows.append(row)
            lines.append(reader.line_num)
    return Table(file, names, rows, lines)


def _cells(line: str, delimiter: str) -> list[str]:
    return next(csv.reader([line], delimiter=delimiter), [])


def _json_lines(file: Path, encoding: str) -> Table:
    """Return a row for each line. The columns are the keys of all lines, None where one lacks."""
    records: list[dict[str, Any]] = []
    names: dict[str, None] = {}  # in the order of their first lines
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
            records.append(row)
            names.update(dict.fromkeys(row))
            lines.append(number)
    rows = [[record.get(name) for name in names] for record in records]
    return Table(file, list(names), rows, lines)


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
