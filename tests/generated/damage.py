"""Ways in which the files of a run or a sweep are damaged, or replaced by something else."""

import json
import shutil

from hypothesis import strategies as st

NAMES = [
    *("status.json", "summary.json", "metrics.jsonl", "config.yaml", ".hydra/overrides.yaml"),
    *("../sweep.json", ".hydra/config.yaml", "../multirun.yaml"),
]

ODD = [
    *(None, True, "", "NaN", "Infinity", "-Infinity", -1, 0, 2**63, 10**400, -(10**400), 1e-320),
    *(
        5e-324,
        1.7e308,
        -1.7e308,
        0.1,
        "x" * 1000,
        "<script>",
        "\ud800",
        "\0\x1b[2J",
        [],
        {},
        [None],
    ),
    *({"a": {"b": []}}, [[1]], "0001-01-01T00:00:00+23:59", "2026-11-21T04:00:00", 1e15, "1e999"),
]
"""Values of JSON that no run writes in most places."""

VALUE = st.one_of(st.sampled_from(ODD), st.floats(), st.integers(), st.text(max_size=5))

TEXT = st.sampled_from(
    [
        *(
            "",
            " ",
            "null",
            "[]",
            "{}",
            "3",
            '"a"',
            "{",
            "[" * 100_000,
            '{"a":' * 100_000,
            "\ufeff{}",
        ),
        *("a: &a [*a]", "a: 0x" + "f" * 10_000, "? [a]\n: b", "{a: 1, 3: 4, null: 5, [1]: 2}"),
        "b0: &b0 [1]\n" + "".join(f"b{n}: &b{n} [*b{n - 1}, *b{n - 1}]\n" for n in range(1, 50)),
        *("- a\n- 1\n- null\n- [a=1]\n- {b: 2}\n", "clip: [1]\nseed: {}\n", "clip: {mode: [norm]}"),
        *("9" * 5000, '{"runs": [1]}', "a: !!binary x"),
        "clip:\n  mode: own\n  threshold: 1e-320",
        *("clip: {mode: norm, threshold: 1.0e+308}\n", "clip: {mode: adaptive, threshold: .inf}\n"),
    ]
)


def _cut(path, at):
    content = path.read_bytes()
    path.write_bytes(content[: at % (len(content) + 1)])


def _flip(path, at):
    content = bytearray(path.read_bytes())
    if content:
        content[at % len(content)] ^= 1 << at % 7
    path.write_bytes(bytes(content))


def _become_a_folder(path, _):
    path.unlink()
    path.mkdir()


def _vanish(path, _):
    path.unlink()


ANYHOW = st.tuples(
    st.sampled_from([_cut, _flip, _flip, _become_a_folder, _vanish]), st.integers(0, 10**6)
)


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


@st.composite
def damages(draw):
    """A function that damages one file of a run's folder."""
    name = draw(st.sampled_from(NAMES))
    kind = draw(st.sampled_from(["anyhow", "text", "value", "value", "value"]))
    if kind == "value" and name.endswith((".json", ".jsonl")):
        at, value = draw(st.integers(0, 10**9)), draw(VALUE)

        def work(path):
            text = path.read_text()
            lines = (name.endswith("l") and text.splitlines()) or [text]
            line = at % len(lines)
            lines[line] = json.dumps(replaced(json.loads(lines[line]), at, value))
            path.write_text("\n".join(lines) + "\n")

    elif kind == "anyhow":
        how, at = draw(ANYHOW)

        def work(path):
            how(path, at)

    else:
        text = draw(TEXT)

        def work(path):
            path.write_text(text)

    work.__name__ = f"{name}:{kind}"
    return name, work


def damage(run, found):
    """Apply damages to the files of a run that are still there."""
    for name, work in found:
        path = run / name
        if path.is_file():
            try:
                work(path)
            except ValueError:  # JSON that an earlier damage made something else
                continue


def restored(made, folder):
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(made, folder)
    return folder
