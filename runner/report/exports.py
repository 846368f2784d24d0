"""The runs of a folder as rows, and its settings for other programs: CSV, JSON, LaTeX, pandas."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runner.report.findings import Findings, find
from runner.report.remarks import remarks
from runner.report.run import natural, read
from runner.report.settings import Setting, choice
from runner.report.table import columns_of, rows_of
from runner.report.verdict import verdict
from runner.report.worth import in_words
from runner.run_folder import files
from runner.run_folder.strict_json import encode

_LATEX = str.maketrans(
    {sign: f"\\{sign}" for sign in "&%$#_{}"}
    | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}"}
    | {"[": "{[}", "−": "$-$", "±": r"$\pm$", "–": "--", "∞": r"$\infty$", "Δ": r"$\Delta$"}
    | {"…": r"\ldots{}", "λ": r"$\lambda$", "‖": r"$\Vert$", "\n": " ", "\u00a0": "~"}
)


def records(findings: Findings) -> list[dict[str, Any]]:
    """Return one row a run, in the order of the settings; None where a run recorded nothing."""
    return [
        {"run": run.number, "setting": setting.label, "state": run.state}
        | {key: run.config.get(key, choice(run, key)) for key in findings.columns}
        | findings.measured[run.number]
        for setting in findings.settings
        for run in setting.runs
    ]


def frame(folder: Path | str) -> Any:
    """Return a folder's `records` as a ``pandas.DataFrame`` by ``run``; as dicts without pandas."""
    rows = records(find(read(Path(folder))))
    try:
        import pandas
    except ImportError:
        return rows
    return pandas.DataFrame(rows).set_index("run") if rows else pandas.DataFrame()


def as_csv(findings: Findings) -> str:
    """Return `records` as CSV with a line of names."""
    rows = records(findings)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_inert(rows[0] if rows else ["run"]))
    writer.writerows(_inert(row.values()) for row in rows)
    return text.getvalue()


def _inert(cells: Iterable[Any]) -> list[Any]:
    """Return cells that a spreadsheet does not compute: text as text, numbers as they are."""
    signs = ("=", "+", "-", "@", "\t", "\r")
    inert = []
    for cell in cells:
        is_formula = isinstance(cell, str) and cell.startswith(signs) and natural(cell)[1]
        inert.append(f"'{cell}" if is_formula else cell)
    return inert


def as_json(findings: Findings) -> str:
    """Return `answer_of` and `records` as JSON."""
    whole = answer_of(findings) | {"runs": records(findings)}
    return encode(whole, indent=2) + "\n"


def answer_of(findings: Findings) -> dict[str, Any]:
    """Return the verdict, the settings with their differences, best first, and the commands."""
    reference = findings.compared_with
    winner = findings.winner
    answer = verdict(findings)
    return {
        "name": findings.sweep.name,
        "verdict": answer.title,
        "sentences": answer.sentences,
        "remarks": remarks(findings),
        "metric": findings.metric,
        "higher_is_better": findings.higher_is_better,
        "swept": list(findings.swept),
        "compared_with": reference.label if reference else None,
        "winner": winner.label if winner else None,
        "commands": {"next": answer.command or None, "sweep": findings.sweep.command},
        "settings": [_record_of(findings, setting) for setting in findings.listed],
    }


def _record_of(findings: Findings, setting: Setting) -> dict[str, Any]:
    mean, spread = findings.scores.mean(setting)
    difference = findings.comparisons.get(setting.index)
    return {
        "setting": setting.label,
        "runs": [run.number for run in setting.runs],
        "seeds": len(findings.scores.seeds(setting)),
        "diverged": len(findings.scores.diverged(setting)),
        "mean": mean if findings.scores.seeds(setting) else None,
        "sd": spread,
        "clipped": findings.scores.share(setting),
        "difference": asdict(difference) if difference else None,
        "worth": in_words(findings, difference) or None,
    }


def as_latex(findings: Findings) -> str:
    """Return the settings with metric, difference and p as a table of LaTeX."""
    configured = [key for key in findings.columns if key != "seed"]
    columns = columns_of(findings)
    shown = (f"best/{findings.metric}", "difference", "p")
    results = [column for column in columns if column.key in shown]
    body = []
    for row in rows_of(findings):
        cells = [choice(row.setting.runs[0], key) for key in configured]
        for column, cell in zip(columns, row.cells, strict=True):
            if column in results:
                cells.append(cell.text)
        body.append([*cells, str(len(findings.scores.seeds(row.setting)))])
    head = [*configured, *(column.title for column in results), "seeds"]
    alignment = "l" * len(configured) + "r" * (len(results) + 1)
    lines = [
        r"% \usepackage{booktabs}",
        rf"\begin{{tabular}}{{{alignment}}}",
        r"\toprule",
        _latex_row(head),
        r"\midrule",
        *(_latex_row(cells) for cells in body),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(cell.translate(_LATEX) for cell in cells) + r" \\"


# Name of the file and function of each format.
FORMATS: dict[str, tuple[str, Callable[[Findings], str]]] = {
    "csv": (files.TABLE_CSV, as_csv),
    "latex": (files.TABLE_LATEX, as_latex),
    "json": (files.TABLE_JSON, as_json),
}
