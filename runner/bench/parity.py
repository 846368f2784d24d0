"""Which tools clip right, in which layout: every cell is measured with real ranks.

``runner.check_clipping`` gives the truth: float64 arithmetic on whole gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from runner.bench.cells import ABSENT, HANGS, MODES, Place, Row, places
from runner.bench.clip_calls import OTHERS, TOOLS, installed
from runner.bench.environments import InstallError, measured, not_run, python_with
from runner.bench.layouts import LAYOUTS
from runner.bench.timing import Setting

_CLASSES = {"right": "right", "off": "off", "raises": "raises", HANGS: "raises"}  # of the page


def rows(setting: Setting) -> Iterator[Row]:
    """Which tools clip right: layouts on four ranks (gloo) and modes, against float64.

    right: largest error; off: what the tool made, and what is right; raises: the first words
    """
    layouts = list(LAYOUTS)[:3] if setting.quick else list(LAYOUTS)
    here = places(layouts, list(installed()), MODES)
    yield from measured(here, Path(sys.executable), setting.folder)
    for tool in setting.others:
        yield from _in_an_environment(places(layouts, [tool], MODES), tool, setting.folder)


def _in_an_environment(cells: Sequence[Place], tool: str, folder: Path) -> Iterator[Row]:
    """Measure the cells of a tool that gets an environment of its own."""
    try:
        python = python_with(tool, folder)
    except InstallError as error:
        yield from not_run(cells, str(error))
        return
    yield from measured(cells, python, folder)


def markdown(table: Sequence[Row], date: str) -> str:
    """Return a table for each mode: a row for each layout, a column for each tool."""
    lines = [_headline(table, date)]
    for mode, tools, layouts in _tables(table):
        lines += ["", f"| {mode} | {' | '.join(tools)} |", "|---" * (len(tools) + 1) + "|"]
        messages: list[str] = []
        for layout, of_tools in layouts.items():
            columns = [_entry(of_tools[tool], messages) for tool in tools]
            lines.append(f"| {layout} | {' | '.join(columns)} |")
        if messages:
            lines.append("")
        for number, message in enumerate(messages, 1):
            lines.append(f"* ({number}) `{message}`")
    return "\n".join(lines) + "\n"


def page(table: Sequence[Row], date: str) -> str:
    """Return the same tables as a page without scripts, with the error of each right cell."""
    parts = [_PAGE, f"<p>{escape(_headline(table, date))}</p>"]
    for mode, tools, layouts in _tables(table):
        heads = "".join(f"<th scope=col>{escape(tool)}" for tool in tools)
        parts.append(f"<table><caption>{mode}</caption><tr><th>layout{heads}")
        for layout, of_tools in layouts.items():
            entries = "".join(_entry_of_page(of_tools[tool]) for tool in tools)
            parts.append(f"<tr><th scope=row>{escape(layout)}{entries}")
        parts.append("</table>")
    return "\n".join(parts) + "\n"


def _headline(table: Iterable[Row], date: str) -> str:
    versions: dict[str, str] = {}
    for row in table:
        if row["version"]:
            versions[row["tool"]] = row["version"]
    texts = [f"{tool} {number}" for tool, number in versions.items()]
    return f"Measured on {date[:10]} with {', '.join(texts)}."


def _tables(table: Sequence[Row]) -> Iterator[tuple[str, list[str], dict[str, dict[str, Row]]]]:
    """Yield each mode, the tools that have it, and for each layout the row of each tool."""
    for mode in dict.fromkeys(row["mode"] for row in table):
        of_mode = [row for row in table if row["mode"] == mode]
        applies = {row["tool"] for row in of_mode if row["verdict"] != "not applicable"}
        tools = [tool for tool in (*TOOLS, *OTHERS) if tool in applies]
        layouts: dict[str, dict[str, Row]] = {}
        for row in of_mode:
            layouts.setdefault(row["layout"], {})[row["tool"]] = row
        yield mode, tools, layouts


def _entry_of_page(row: Row) -> str:
    kind = _CLASSES.get(row["verdict"], "absent")
    detail = f"<br><small>{escape(row['detail'])}</small>" if row["detail"] else ""
    return f"<td class={kind}>{row['verdict']}{detail}"


def _entry(row: Row, messages: list[str]) -> str:
    """Return the text of a cell; what it raises is added to ``messages``, and numbered."""
    verdict: str = row["verdict"]
    if verdict == "off":
        return f"**off** {row['detail']}"
    if verdict == HANGS:
        return f"**hangs** ({row['detail']})"
    if verdict not in ("raises", ABSENT):
        return verdict
    if row["detail"] not in messages:
        messages.append(row["detail"])
    return f"{verdict} ({messages.index(row['detail']) + 1})"


_PAGE = """<!doctype html>
<html lang=en>
<meta charset=utf-8>
<title>Who clips right</title>
<style>
body { font: 15px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 90em; padding: 0 1em }
table { border-collapse: collapse; margin: 1.5em 0 }
caption { font-weight: 600; text-align: left; padding: .3em 0 }
th, td { border: 1px solid #8886; padding: .3em .6em; text-align: left; vertical-align: top }
small { opacity: .8 }
.right { background: #2a92 }
.off { background: #d333 }
.raises { background: #e902 }
.absent { opacity: .6 }
@media (prefers-color-scheme: dark) { body { background: #111; color: #eee } }
</style>
<h1>Who clips right</h1>
<p>Clipping of small models that are spread over four ranks (gloo), compared with float64 arithmetic
on whole gradients. A cell that is off shows what the tool made, and what is right."""
