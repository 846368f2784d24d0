"""README and CONTRIBUTING agree with the files: tables, keys, commands, examples and links.

``python tests/test_readme.py`` prints the table of recipes for README.
"""

import re
import shlex

import pytest
import torch
import yaml
from torch import nn

from runner.cli import new
from runner.cli.main import COMMANDS
from runner.compose import recipes
from runner.compose.composer import Source
from runner.compose.overrides import spelled_out
from runner.compose.request import request
from runner.config.folders import find, options
from runner.data.dataset import TensorPairs, collate_pairs
from runner.run_folder import files, keys
from tests.process import ROOT, python

README = (ROOT / "README.md").read_text(encoding="utf-8")
GATE = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PYTEST = re.compile(r"python -m (pytest[^&#\n]*)")
DOCUMENTS = {"README.md": README, "CONTRIBUTING.md": CONTRIBUTING}
EVERY_PLUGIN = {"defaults", "name", "nproc", "sync_batchnorm"}
"""Keys of a plugin's file that the table of plugins does not repeat in each row."""


def rows(document, heading):
    """The cells of the first table whose header begins with the column ``heading``."""
    _, _, text = document.partition(f"| {heading} |")
    lines = text.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def quoted(text):
    """What stands between single backticks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def commands(document):
    """The arguments of every command of this project that the document shows."""
    found = re.findall(r"^    (?:\$ )?python -m runner\b(.*)$", document, re.MULTILINE)
    assert found
    return [shlex.split(line, comments=True) for line in found]


def flattened(mapping, prefix=""):
    for key, value in mapping.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{key}.")


def known_keys():
    """The keys of every option of every group, and those of config.yaml."""
    found = set(flattened(yaml.safe_load((find("conf") / "config.yaml").read_text())))
    for file in find("conf").rglob("*/*.yaml"):
        group = ".".join(file.parent.relative_to(find("conf")).parts)
        content = yaml.safe_load(file.read_text()) or {}
        found |= set(flattened(content, f"{group}."))
    for file in find("conf").glob("*_keys.yaml"):
        group = file.stem.removesuffix("_keys")
        found |= set(flattened(yaml.safe_load(file.read_text()), f"{group}."))
    return found


def defaults():
    """The option of each group that holds where nothing is chosen."""
    listed = yaml.safe_load((find("conf") / "config.yaml").read_text())["defaults"]
    entries = [entry for entry in listed if isinstance(entry, dict)]
    return {group: option for entry in entries for group, option in entry.items()}


def reference(source):
    """A recipe's source in short, linked where it has an address."""
    if source.startswith("none"):
        return "none"
    year, address = re.search(r"\b(19|20)\d\d\b", source), re.search(r"https://[^\s,]+", source)
    if source[0].isdigit():
        return "several papers, see its header"
    short = source.partition(",")[0] + (f" {year[0]}" if year else "")
    return f"[{short}]({address[0]})" if address else short


def recipe_rows():
    """The rows of README's table of recipes, from the headers of their files."""
    for recipe in recipes.read_all():
        purpose = recipe.purpose.rstrip(".")
        link = f"[`{recipe.name}`](recipes/{recipe.name}.yaml)"
        yield f"| {link} | {purpose} | {reference(recipe.source)} |"


def test_readme_lists_every_group():
    groups = {folder.name for folder in find("conf").iterdir() if folder.is_dir()} - {"hydra"}
    assert {quoted(row[0])[0] for row in rows(README, "group")} == groups


@pytest.mark.parametrize("row", rows(README, "group"), ids=lambda row: row[0].strip("`"))
def test_readme_lists_every_option_the_default_first(row):
    [group], listed = quoted(row[0]), quoted(row[1])
    assert sorted(listed) == sorted(options(group))
    assert listed[0] == defaults()[group]


def test_readme_lists_every_recipe_as_its_header_does():
    shown = README.partition("| recipe |")[2].partition("\n\n")[0].splitlines()[2:]
    assert shown == list(recipe_rows())


def test_readme_lists_every_clipping_mode():
    assert sorted(quoted(row[0])[0] for row in rows(README, "mode")) == sorted(options("clip"))


def test_readme_lists_every_plugin_with_its_keys():
    listed = {quoted(row[0])[0]: set(quoted(row[2])) for row in rows(README, "plugin")}
    assert {"single", *listed} == set(options("plugin"))
    for plugin, named in listed.items():
        existing = set(yaml.safe_load((find("conf") / "plugin" / f"{plugin}.yaml").read_text()))
        for other in named & listed.keys():
            named = named - {other} | listed[other] & existing
        if plugin == "hybrid":
            named |= {"dp_size", "tp_size", "pp_size"}
        assert named == existing - EVERY_PLUGIN, plugin


@pytest.mark.parametrize("name", DOCUMENTS)
def test_keys_in_documents_exist(name):
    known, groups = known_keys(), {folder.name for folder in find("conf").iterdir()}
    sections = {key.partition(".")[0] for key in known if "." in key} | groups
    named = {
        match[0]
        for text in quoted(DOCUMENTS[name])
        if (match := re.match(r"\w+(\.\w+)+(?=$|=)", text)) and text.split(".")[0] in sections
    }
    files_ = (".py", ".sh", ".yaml", ".json", ".md", ".html")
    named = {key for key in named if not key.endswith(files_)}
    assert named
    assert not {key for key in named if not key.endswith("._target_")} - known


def test_keys_of_rows_exist():
    existing = {value for value in vars(keys).values() if isinstance(value, str)}
    named = [key for row in rows(README, "key of a row") for key in quoted(row[0])]
    assert {re.sub(r"<.*>", "", key) for key in named} <= existing
    assert len(named) > 15


def test_files_of_a_run_exist():
    existing = {value for name, value in vars(files).items() if name.isupper()}
    tree = re.findall(r"^        (\w[\w.]*)/?  ", README, re.MULTILINE)
    assert set(tree) - {"0"} <= existing
    assert {files.CONFIG, files.STATUS, files.ROWS, files.SUMMARY, files.SWEEP} <= set(tree)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_in_documents_are_requests_that_can_be_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert new.main(["demo"]) == 0
    for words in commands(DOCUMENTS[name]):
        if words and words[0] in set(COMMANDS) - {"run"}:
            command, *words = words
            if command in ("bench", "dashboard", "evaluate", "export", "new", "report", "schema"):
                continue
        if words[:1] == ["clip.treshold=1"]:
            continue  # shows what a wrong request is answered
        given = [word for word in words if word not in ("-m", "--cfg", "job", "--help")]
        given = [word for word in given if "plan.yaml" not in word]
        given, source = spelled_out(given), Source()
        if "--config-dir" in given:
            place = given.index("--config-dir")
            source = Source(extra=tmp_path / "demo" / given.pop(place + 1))
            given.pop(place)
        assert request(given, multirun="-m" in words, source=source, writes=False).jobs, words


def test_readme_names_every_command():
    shown = {words[0] for words in commands(README) if words}
    inline = {text.split()[3] for text in quoted(README) if text.startswith("python -m runner ")}
    assert set(COMMANDS) - {"run"} <= shown | inline


def test_the_model_and_data_of_readme_train(tmp_path, outputs):
    code = re.search(r"Save this as `mine.py`:\n\n```python\n(.*?)```", README, re.DOTALL)[1]
    assert len(code.splitlines()) <= 25
    [data_sets] = re.findall(r"```python\n(from torch\.utils\.data .*?)```", README, re.DOTALL)
    (tmp_path / "mine.py").write_text(code + data_sets)
    shown = [words for words in commands(README) if "model._target_=mine.Net" in words]
    short = ["train.max_duration=5ba", "tracker=none"]
    for number, words in enumerate(shown, 1):
        python("-m", "runner", *words, *short, cwd=tmp_path, timeout=200)
        written = [*outputs.glob("runs/*/metrics.jsonl")]
        assert [len(rows.read_text().splitlines()) for rows in written] == [5] * number
    assert number == 3


def test_the_library_examples_of_readme_run(tmp_path, monkeypatch):
    from runner.launch.process_group import leave, stand_alone

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    data = TensorPairs(torch.randn(12, 4), torch.randint(3, (12,)))
    loader = torch.utils.data.DataLoader(data, 4, collate_fn=collate_pairs)
    section = README.partition("## Library")[2].partition("\n## ")[0]
    examples = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(examples) == 4
    try:
        stand_alone()
        for example in examples:
            model = nn.Linear(4, 3)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(data.inputs).sum().backward()
            if "loader" in example:
                optimizer.zero_grad()
            names = {
                "torch": torch,
                "model": model,
                "optimizer": optimizer,
                "loader": loader,
                "test_loader": loader,
                "criterion": nn.functional.cross_entropy,
                "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
            }
            exec(compile(example, "README.md", "exec"), names)
    finally:
        leave()
    assert (tmp_path / "metrics.jsonl").read_text().count("grad/norm_clipped") == len(loader)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_between_documents_lead_somewhere(name):
    for file, _, anchor in re.findall(r"\]\(([^):#]*)(#?)([\w-]*)\)", DOCUMENTS[name]):
        text = DOCUMENTS.get(file or name, "")
        assert (ROOT / (file or name)).exists(), file
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        slugs = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in headings}
        assert not anchor or anchor in slugs, anchor


def test_the_second_command_of_readme_runs_the_tests_of_the_gate():
    setups = [line for line in README.splitlines() if line.startswith("    python3.11 -m venv")]
    assert len(setups) == 2
    shown = [command.strip() for command in PYTEST.findall(setups[1])]
    gate = [command.strip() for command in PYTEST.findall(GATE)]
    assert shown == gate == ["pytest -q -n 2 --dist loadgroup"]


def test_contributing_names_the_same_tests_and_every_mark(pytestconfig):
    shown = [command.strip() for command in PYTEST.findall(CONTRIBUTING)]
    assert shown[:1] == [command.strip() for command in PYTEST.findall(GATE)]
    marks = [line.partition(":")[0] for line in pytestconfig.getini("markers")]
    for mark in {"gpu", "slow"} & set(marks):
        assert f"pytest -m {mark}" in shown


def test_contributing_lists_every_folder():
    _, _, house = CONTRIBUTING.partition("## The house")
    lines = re.findall(r"^      ((?:\w+/ ?)+)", house, re.MULTILINE)
    listed = {name for line in lines for name in line.split()}
    folders = {f"{file.parent.name}/" for file in (ROOT / "runner").glob("*/__init__.py")}
    assert listed == folders


def test_pytest_leaves_out_what_the_gate_does(pytestconfig):
    words = pytestconfig.getini("addopts")
    assert words[words.index("-m") + 1] == "not gpu and not slow"


if __name__ == "__main__":
    print("| recipe | setting | source |\n|---|---|---|", *recipe_rows(), sep="\n")
