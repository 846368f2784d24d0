"""Change the code in one place at a time, and count the changes that the tests notice.

    python -m tests.mutants --count 60 --seed 1 [--start 30]

Works on a clone of what is committed. Tests of the changed file's folder run first, then the others
of the gate, until one fails. A run that hangs counts as noticed. Prints each change with the test
that noticed it, and the number of those that were.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHANGED = [
    "runner/clip/**/*.py",
    "runner/gradients/**/*.py",
    "runner/booster/optimizer.py",
    "runner/parallel/*.py",
]
CHANGED += ["runner/train/trainer.py", "runner/checkpoint/*.py"]
FIRST = ["clip", "booster", "against_torch", "parallel", "train", "checkpoint", "distributed"]
SWAPS: dict[type, type] = {ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.Is: ast.IsNot}
SWAPS |= {ast.In: ast.NotIn, ast.Add: ast.Sub, ast.Mult: ast.Div, ast.And: ast.Or}
SWAPS |= {new: old for old, new in SWAPS.items()} | {ast.Pow: ast.Mult, ast.FloorDiv: ast.Mult}
SECONDS = 3000


def changes(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield each expression or statement that can be changed, with what replaces it."""
    for node in ast.iter_child_nodes(tree):
        # Messages and types are not behavior.
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert | ast.ImportFrom):
            continue
        match node:
            case ast.Compare(left, [op], right) if type(op) in SWAPS:
                yield node, ast.Compare(left, [SWAPS[type(op)]()], right)
            case ast.BinOp(left, op, right) if type(op) in SWAPS:
                yield node, ast.BinOp(left, SWAPS[type(op)](), right)
            case ast.BoolOp(op, values):
                yield node, ast.BoolOp(SWAPS[type(op)](), values)
            case ast.UnaryOp(ast.Not(), operand):
                yield node, operand
            case ast.Constant(bool() as value):
                yield node, ast.Constant(not value)
            case ast.Constant(int() | float() as value):
                yield node, ast.Constant(value + 1)
            case ast.IfExp(test, body, other):
                yield node, ast.IfExp(test, other, body)
            case ast.Expr(ast.Call()) | ast.AugAssign():
                yield node, ast.Pass()
            case ast.Name("min" | "max" as name):
                yield node, ast.Name({"min": "max", "max": "min"}[name])
        if isinstance(node, ast.arg):
            continue
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                yield from changes(ast.Expression(node.value))
        elif isinstance(node, ast.FunctionDef):
            body = ast.Module([*node.body, *map(ast.Expr, node.args.defaults)], [])
            yield from changes(body)
        else:
            yield from changes(node)


def replaced(source: str, node: ast.AST, new: ast.AST) -> str:
    """Return the source with one node replaced."""
    lines = source.encode().splitlines(keepends=True)
    # type: ignore[attr-defined]
    first = node.lineno - 1
    last = node.end_lineno - 1
    head = lines[first][: node.col_offset]  # type: ignore[attr-defined]
    tail = lines[last][node.end_col_offset :]  # type: ignore[attr-defined]
    text = ast.unparse(new) if isinstance(new, ast.Pass) else f"({ast.unparse(new)})"
    return b"".join([*lines[:first], head + text.encode() + tail, *lines[last + 1 :]]).decode()


def is_noticed(copy: Path, room: str) -> tuple[bool, str]:
    """Run the tests, those of ``room`` first; return whether one failed, and its name."""
    order = sorted(FIRST, key=lambda name: (name != room, FIRST.index(name)))
    folders = [f"tests/{name}" for name in order if (copy / "tests" / name).is_dir()]
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header"]
    pytest += ["-n", "2", "--dist", "loadgroup"]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    for chosen in ([folders[0]], folders[1:], ["tests", *(f"--ignore={name}" for name in folders)]):
        try:
            done = subprocess.run(
                [*pytest, *chosen],
                cwd=copy,
                env=environment,
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return True, "hangs"
        if done.returncode:
            lines = done.stdout.splitlines()
            failed = [line[:120] for line in lines if line.startswith(("FAILED", "ERROR"))]
            return True, failed[0] if failed else done.stdout[-200:]
    return False, ""


def main() -> None:
    """Parse arguments, change the copy, print."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="leave out this many of the changes")
    options = parser.parse_args()
    sites = []
    for path in sorted(path for pattern in CHANGED for path in ROOT.glob(pattern)):
        source = path.read_text()
        sites += [(path, source, node, new) for node, new in changes(ast.parse(source))]
    print(f"seed {options.seed}: {options.count} of {len(sites)} possible changes", flush=True)
    noticed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(copy)], check=True)
        chosen = random.Random(options.seed).sample(sites, options.count)[options.start :]
        for path, source, node, new in chosen:
            place = path.relative_to(ROOT)
            (copy / place).write_text(replaced(source, node, new))
            begun = time.monotonic()
            is_seen, by = is_noticed(copy, place.parts[1])
            (copy / place).write_text(source)
            noticed += is_seen
            change = f"{ast.unparse(node)[:60]} -> {ast.unparse(new)[:60]}"
            said = f"noticed by {by}" if is_seen else "NOT NOTICED"
            where = f"{place}:{node.lineno}"  # type: ignore[attr-defined]
            print(f"{time.monotonic() - begun:5.0f} s {where}: {change}: {said}", flush=True)
    print(f"{noticed} of {len(chosen)} noticed")


if __name__ == "__main__":
    main()
