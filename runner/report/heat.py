"""Pictures of the gradient norm of each parameter over time, one for each run."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np
from numpy.typing import NDArray

from runner.report.chart import WIDTH
from runner.report.findings import Findings
from runner.report.markup import Markup, tag
from runner.report.notation import rounded
from runner.report.palette import viridis
from runner.report.run import Run
from runner.report.series import Floats, Series, layers
from runner.run_folder import files

# Most columns and rows of a picture, and most pictures.
_COLUMNS, _ROWS, _RUNS = 160, 64, 6
_LABELS, _ROW, _SIDE = 190, 11, 10
_SHADES = np.asarray(
    [[int(viridis(i / 255)[at : at + 2], 16) for at in (1, 3, 5)] for i in range(256)],
    dtype=np.uint8,
)
_UNKNOWN = np.asarray([236, 238, 240], dtype=np.uint8)


def heat_maps(found: Findings) -> tuple[list[Markup], str | None]:
    """Return pictures of the first runs that recorded layers, and a note on the others."""
    recorded = [
        (position, group, run)
        for group in found.groups
        for position, run in enumerate(group.runs)
        if layers(run.series)
    ]
    # The first seed of each setting comes before the second of any.
    recorded.sort(key=lambda entry: (entry[0], entry[1].index))
    maps = [_map(run, group.label) for _, group, run in recorded[:_RUNS]]
    left = len(recorded) - len(maps)
    if not left:
        return maps, None
    return maps, f"{left} more runs recorded layers; their norms are in {files.ROWS}."


def _map(run: Run, name: str) -> Markup:
    rows = layers(run.series)
    shown, table, last = _table(rows)
    positive = table[np.isfinite(table) & (table > 0)]
    low, high = (float(positive.min()), float(positive.max())) if len(positive) else (1.0, 10.0)
    height = _ROW * len(shown)
    width = WIDTH - _LABELS - _SIDE
    labels = [
        tag(
            "text",
            tag("title", key),
            key if len(key) <= 30 else f"…{key[-29:]}",
            x=_LABELS - 6,
            y=_ROW * i + 9,
            class_="layer",
            text_anchor="end",
        )
        for i, key in enumerate(shown)
    ]
    picture = tag(
        "image",
        x=_LABELS,
        y=0,
        width=width,
        height=height,
        preserveAspectRatio="none",
        href=_png(_shaded(table, low, high)),
        class_="heat",
    )
    ends = [
        tag("text", "0", x=_LABELS, y=height + 14, class_="tick"),
        tag(
            "text",
            f"step {rounded(last, 9)}",
            x=_LABELS + width,
            y=height + 14,
            class_="tick",
            text_anchor="end",
        ),
    ]
    title = f"Norm by parameter · {name} · run {run.number}"
    left = len(rows) - len(shown)
    note = f"Highest norm in each range of steps, log scale: dark {rounded(low, 3)}, bright "
    note += f"{rounded(high, 3)}; grey was not finite or not recorded."
    note += f" The {left} parameters with the smallest norms are left out." if left else ""
    return tag(
        "figure",
        tag("h3", title),
        tag(
            "svg",
            tag("title", title),
            picture,
            *labels,
            *ends,
            viewBox=f"0 0 {WIDTH} {height + 20}",
            role="img",
            aria_label=title,
            class_="chart",
            data_chart=f"heat-{run.number}",
        ),
        tag("figcaption", note),
    )


def _table(rows: dict[str, Series]) -> tuple[list[str], Floats, float]:
    """Return names, the highest norm by row and range of steps, and the last step."""
    last = max(float(one.steps[-1]) for one in rows.values())
    first = min(float(one.steps[0]) for one in rows.values())
    names = list(rows)
    if len(names) > _ROWS:
        size = {
            key: float(np.median(one.finite)) if len(one.finite) else 0.0
            for key, one in rows.items()
        }
        largest = set(sorted(names, key=lambda key: -size[key])[:_ROWS])
        names = [key for key in names if key in largest]
    columns = int(min(_COLUMNS, max(len(one) for one in rows.values())))
    table = np.full((len(names), columns), np.nan)
    for i, key in enumerate(names):
        one = rows[key]
        at = ((one.steps - first) / max(last - first, 1) * (columns - 1e-6)).astype(int)
        known = np.isfinite(one.values)
        np.fmax.at(table[i], np.clip(at, 0, columns - 1)[known], one.values[known])
    return names, table, last


def _shaded(table: Floats, low: float, high: float) -> NDArray[np.uint8]:
    """Return the colours of a table of norms, shape (rows, columns, 3)."""
    span = np.log(high / low) or 1.0
    known = np.isfinite(table)
    with np.errstate(divide="ignore"):
        place = np.log(np.where(known & (table > 0), table, low) / low) / span
    shades = _SHADES[np.clip(place * 255, 0, 255).astype(np.uint8)]
    shades[~known] = _UNKNOWN
    return np.asarray(shades)


def _png(pixels: NDArray[np.uint8]) -> str:
    """Return a picture as a ``data:`` URL: 8-bit RGB, no filter (PNG specification, 5 and 9)."""
    height, width, _ = pixels.shape
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b"")):
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        file += struct.pack(">I", len(data)) + kind + data + checksum
    return "data:image/png;base64," + base64.b64encode(file).decode("ascii")
