"""Ways in which the files of a run or a sweep are damaged, or replaced by something else."""

import json

from hypothesis import strategies as st

NAMES = [
    *("status.json", "summary.json", "metrics.jsonl", "config.yaml", ".hydra/overrides.yaml"),
    *("../sweep.json", ".hydra/config.yaml", "../multirun.yaml"),
]
ODD = [
    *(None, True, "", "NaN", "Infinity", "-Infinity", -1, 0, 2**63, 10**400, -(10**400), 1e-320),
    *(5e-324, 1.7e308, -1.7e308, 0.1, "x" * 1000, "<script>", "\ud800", "\0\x1b[2J", [], {}),
    *([None], {"a": {"b": []}}, [[1]], "0001-01-01T00:00:00+23:59", "2026-11-21T04:00:00"),
    *(1e15, "1e999"),
]
"""Values of JSON that no run writes in most places."""
VALUE = st.one_of(st.sampled_from(ODD), st.floats(), st.integers(), st.text(max_size=5))
TEXTS = [
    *("", " ", "null", "[]", "{}", "3", '"a"', "{", "\ufeff{}", "a: 0x" + "f" * 10_000),
    *("? [a]\n: b", "{a: 1, 3: 4, null: 5, [1]: 2}", "- a\n- 1\n- null\n- [a=1]\n- {b: 2}\n"),
    *("clip: [1]\nseed: {}\n", "clip: {mode: [norm]}", "9" * 5000, '{"runs": [1]}'),
    *("a: !!binary x", "clip:\n  mode: own\n  threshold: 1e-320"),
    *("clip: {mode: norm, threshold: 1.0e+308}\n", "clip: {mode: adaptive, threshold: .inf}\n"),
]
TEXT = st.sampled_from(TEXTS)


def _flipped(content, at):
    flipped = bytearray(content)
    if content:
        flipped[at % len(content)] ^= 1 << at % 7
    return bytes(flipped)


def replaced(content, at, value):
    """Put a value in place of one somewhere in nested containers."""
    if not isinstance(content, dict | list) or not content:
        return value
    keys = list(content) if isinstance(content, dict) else range(len(content))
    key = list(keys)[at % len(keys)]
    inner = content[key]
    if isinstance(inner, dict | list) and inner and at % 5:
        content[key] = replaced(inner, at // 7, value)
    else:
        content[key] = value
    return content


def _with_value(content, at, value, by_line):
    """The JSON of a file with a value in place of another, or None where it is no JSON."""
    text = content.decode(errors="replace")
    lines = (by_line and text.splitlines()) or [text]
    line = at % len(lines)
    try:
        lines[line] = json.dumps(replaced(json.loads(lines[line]), at, value))
    except ValueError:  # an earlier damage made it something else
        return None
    return ("\n".join(lines) + "\n").encode()


DAMAGES = st.tuples(
    st.sampled_from(NAMES),
    st.sampled_from(["cut", "flip", "flip", "folder", "gone", "text", *["value"] * 6]),
    st.integers(0, 10**9),
    VALUE,
    TEXT,
)
"""The file, what happens to it, where, and what is put there."""


def damage(run, found):
    """Apply damages to the files of a run that are still there."""
    for name, kind, at, value, text in found:
        path = run / name
        if not path.is_file():
            continue
        content = path.read_bytes()
        if kind in ("folder", "gone"):
            path.unlink()
            if kind == "folder":
                path.mkdir()
        elif kind == "value" and name.endswith(("json", "jsonl")):
            if changed := _with_value(content, at, value, name.endswith("l")):
                path.write_bytes(changed)
        elif kind == "cut":
            path.write_bytes(content[: at % (len(content) + 1)])
        elif kind == "flip":
            path.write_bytes(_flipped(content, at))
        else:
            path.write_text(text)
