"""Write the runs of a sweep for other programs: for pandas, as CSV, as JSON, and for LaTeX.

Of the configuration they hold the keys in which runs differ. CSV and JSON have one row a run, with
all digits, and so has the frame; the LaTeX table has one row a setting, as a paper shows it.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runner.report.findings import Findings, choice, find
from runner.report.sweep import read
from runner.report.table import headings, mean_row
from runner.report.verdict import verdict
from runner.run_folder import files
from runner.run_folder.strict_json import encode

_SPECIAL = str.maketrans(
    {sign: f"\\{sign}" for sign in "&%$#_{}"}
    | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}"}
    | {"[": "{[}", "−": "$-$", "±": r"$\pm$", "–": "--", "∞": r"$\infty$", "Δ": r"$\Delta$"}
    | {"…": r"\ldots{}", "λ": r"$\lambda$", "‖": r"$\Vert$", "\n": " ", "\u00a0": "~"}
)
"""Texts of LaTeX for single signs."""


def records(found: Findings) -> list[dict[str, Any]]:
    """Return one row a run, in the order of the settings; None where a run recorded nothing."""
    return [
        {"run": run.number, "setting": group.label, "state": run.state}
        | {key: run.config.get(key, choice(run, key)) for key in found.columns}
        | found.measured[run.number]
        for group in found.groups
        for run in group.runs
    ]


def frame(folder: Path | str) -> Any:
    """Return `records` of a run's or a sweep's folder as a ``pandas.DataFrame`` indexed by ``run``.

    Without pandas it is a list of dicts.
    """
    rows = records(find(read(Path(folder))))
    try:
        import pandas
    except ImportError:
        return rows
    return pandas.DataFrame(rows).set_index("run") if rows else pandas.DataFrame()


def as_csv(found: Findings) -> str:
    """Return `records` as CSV with a line of names; empty where there is no value."""
    rows = records(found)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else ["run"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_json(found: Findings) -> str:
    """Return `records`, the settings with their differences, and the verdict as a JSON object."""
    other, winner = found.compared_with, found.winner
    settings = []
    for group in found.groups:
        mean, deviation = found.mean(group)
        one = found.comparisons.get(group.index)
        settings.append(
            {
                "setting": group.label,
                "runs": [run.number for run in group.runs],
                "seeds": len(found.seeds(group)),
                "mean": mean if found.seeds(group) else None,
                "sd": deviation,
                "difference": None if one is None else asdict(one),
            }
        )
    whole = {
        "name": found.sweep.name,
        "verdict": verdict(found),
        "metric": found.metric,
        "higher_is_better": found.higher_is_better,
        "compared_with": other.label if other else None,
        "winner": winner.label if winner else None,
        "settings": settings,
        "runs": records(found),
    }
    return encode(whole, indent=2) + "\n"


def as_latex(found: Findings) -> str:
    columns = [key for key in found.columns if key != "seed"]
    titles = {one.key: one.title for one in headings(found)[1:]}
    wanted = [*columns, *(k for k in (f"best/{found.metric}", "difference", "p") if k in titles)]
    rows = [[*map(titles.__getitem__, wanted), "seeds"]]
    for group in found.groups:
        cells = dict(zip(titles, mean_row(found, group).cells, strict=True))
        rows.append([*(cells[key].text for key in wanted), str(len(found.seeds(group)))])
    head, *body = (" & ".join(cell.translate(_SPECIAL) for cell in row) + r" \\" for row in rows)
    alignment = "l" * len(columns) + "r" * (len(rows[0]) - len(columns))
    lines = [
        r"% \usepackage{booktabs}",
        rf"\begin{{tabular}}{{{alignment}}}",
        *(r"\toprule", head, r"\midrule", *body, r"\bottomrule"),
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


FORMATS: dict[str, tuple[str, Callable[[Findings], str]]] = {
    "csv": (files.TABLE_CSV, as_csv),
    "latex": (files.TABLE_LATEX, as_latex),
    "json": (files.TABLE_JSON, as_json),
}
"""Name of the file and function of each format."""
