"""All READMEs and CONTRIBUTING agree with the files: tables, keys, commands, examples and links."""

import re
import shlex

import pytest
import torch
import yaml
from torch import nn
from torch.nn.functional import cross_entropy

from runner.cli import pages
from runner.cli.main import COMMANDS
from runner.config.folders import find, options
from runner.config.modes import MODES, options_of
from runner.data.dataset import TensorPairs, collate_pairs
from runner.request import recipes
from runner.request.request import request
from runner.run_folder import files, keys
from tests.process import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("r*/**/*.md")]
DOCUMENTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
FOLDERS = DOCUMENTS["runner/run_folder/README.md"]


def rows(heading, document=README):
    """The cells of the first table whose header begins with the column ``heading``."""
    lines = document.partition(f"| {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def quoted(text):
    """What stands between single backticks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def commands(document):
    """The arguments of every command of this project that the document shows."""
    lines = re.findall(r"^    (?:\$ )?python -m runner\b(.*)$", document, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


def content(*path):
    return yaml.safe_load(find("conf").joinpath(*path).read_text()) or {}


def flattened(mapping, prefix=""):
    for key, value in mapping.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{key}.")


def known_keys():
    """The keys of every option of every group, those of config.yaml, and options of modes."""
    names = set(flattened(content("config.yaml")))
    names |= {f"clip.{option}" for mode in MODES.values() for option in options_of(mode)}
    for file in [*find("conf").rglob("*/*.yaml"), *find("conf").glob("*_keys.yaml")]:
        group = ".".join(file.parent.relative_to(find("conf")).parts)
        names |= set(flattened(content(file), f"{group or file.stem.removesuffix('_keys')}."))
    return names


def reference(source):
    """A recipe's source in short, linked where it has an address."""
    if source.startswith("none"):
        return "none"
    year = re.search(r"\b(19|20)\d\d\b", source)
    address = re.search(r"https://[^\s,]+", source)
    if source[0].isdigit():
        return "several papers, see its header"
    short = source.partition(",")[0] + (f" {year[0]}" if year else "")
    return f"[{short}]({address[0]})" if address else short


def test_a_table_lists_every_group_with_its_options():
    entries = content("config.yaml")["defaults"]
    defaults = [entry for entry in entries if isinstance(entry, dict)]
    first = {group: option for entry in defaults for group, option in entry.items()}
    listed = {
        quoted(row[0])[0]: quoted(row[1])
        for row in rows("group", DOCUMENTS["runner/config/README.md"])
    }
    folders = {folder.name for folder in find("conf").iterdir() if folder.is_dir()}
    assert set(listed) == folders - {"hydra"}
    for group, named in listed.items():
        assert sorted(named) == sorted(options(group)), group
        assert named[0] == first[group], group


def test_a_table_lists_every_mode():
    modes = rows("mode", DOCUMENTS["runner/clip/modes.md"])
    assert sorted(quoted(row[0])[0] for row in modes) == sorted(options("clip"))


def test_a_table_lists_every_recipe():
    listed = rows("recipe", DOCUMENTS["recipes/README.md"])
    for (link, purpose, cited), (name, file) in zip(
        listed, recipes.files_of().items(), strict=True
    ):
        source = re.search(r"(?m)^# source:(.*)", file.read_text())[1]
        assert link == f"[`{name}`]({name}.yaml)", name
        assert purpose == recipes.purpose(file).rstrip("."), name
        assert cited == reference(source.strip()), name


def test_a_table_lists_every_plugin_with_its_keys():
    plugins = {quoted(row[0])[0]: set(quoted(row[2])) for row in rows("plugin")}
    assert {"single", *plugins} == set(options("plugin"))
    for plugin, named in plugins.items():
        existing = set(content("plugin", f"{plugin}.yaml"))
        for base in named & plugins.keys():
            named = named - {base} | plugins[base] & existing
        named |= {"dp_size", "tp_size", "pp_size"} if plugin == "hybrid" else set()
        assert named == existing - {"defaults", "name", "nproc", "sync_batchnorm"}, plugin


def test_every_key_in_a_document_exists():
    existing = known_keys()
    sections = {key.partition(".")[0] for key in existing if "." in key}
    sections |= {folder.name for folder in find("conf").iterdir()}
    for text in quoted("\n".join(DOCUMENTS.values())):
        match = re.match(r"\w+(\.\w+)+(?=$|=)", text)
        if match and text.split(".")[0] in sections and text != "hydra._internal":
            ending = (".py", ".sh", ".yaml", ".json", ".md", ".html", "._target_")
            assert match[0] in existing or match[0].endswith(ending), text


def test_readme_names_every_command():
    shown = {words[0] for words in commands(README) if words}
    inline = {text.split()[3] for text in quoted(README) if text.startswith("python -m runner ")}
    assert set(COMMANDS) - {"run"} <= shown | inline


def test_every_key_of_a_row_in_a_document_exists():
    values = {value for value in vars(keys).values() if isinstance(value, str)}
    named = [key for row in rows("key of a row", FOLDERS) for key in quoted(row[0])]
    assert {re.sub(r"<.*>", "", key) for key in named} <= values


def test_every_file_of_a_run_in_a_document_exists():
    written = {value for name, value in vars(files).items() if name.isupper()}
    tree = set(re.findall(r"^        (\w[\w.]*)/?  ", FOLDERS, re.MULTILINE)) - {"0"}
    assert {files.CONFIG, files.STATUS, files.ROWS, files.SUMMARY, files.SWEEP} <= tree <= written


def test_every_folder_of_the_runner_stands_in_contributing():
    lines = re.findall(r"^      ((?:\w+/ ?)+)", CONTRIBUTING.partition("## The house")[2], re.M)
    folders = {f"{file.parent.name}/" for file in (ROOT / "runner").glob("*/__init__.py")}
    assert {name for line in lines for name in line.split()} == folders


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_in_documents_are_requests_that_can_be_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert pages.new(["demo"]) == 0
    for words in commands(DOCUMENTS[name]):
        command, *arguments = words or [""]
        if COMMANDS.get(command) == "pages" or command in ("bench", "evaluate", "clip.treshold=1"):
            continue  # the last shows how a wrong request is answered
        if len(words) == 1 and command.removeprefix("recipe=") in recipes.files_of():
            continue  # test_recipes composes them, shortened
        words = arguments if command in COMMANDS else words
        typed = [word for word in words if word not in ("-m", "--cfg", "job", "--help")]
        typed = [word for word in typed if "plan.yaml" not in word]
        options_folder = None
        if "--config-dir" in typed:
            place = typed.index("--config-dir")
            options_folder = tmp_path / "demo" / typed.pop(place + 1)
            typed.pop(place)
        assert request(typed, multirun="-m" in words, config_dir=options_folder).jobs, words


def test_the_library_examples_of_readme_run(tmp_path, monkeypatch):
    from runner.launch.process_group import leave, stand_alone

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    data = TensorPairs(torch.randn(12, 4), torch.randint(3, (12,)))
    loader = torch.utils.data.DataLoader(data, 4, collate_fn=collate_pairs)
    section = README.partition("## Your own training loop\n")[2].partition("\n## ")[0]
    section += DOCUMENTS["runner/booster/library.md"]
    examples = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(examples) == 5
    try:
        stand_alone()
        for example in examples:
            model = nn.Linear(4, 3)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(data.inputs).sum().backward()
            if "loader" in example:
                optimizer.zero_grad()
            names = {"torch": torch, "model": model, "optimizer": optimizer, "loss": 0.5}
            names |= {"loader": loader, "test_loader": loader, "criterion": cross_entropy}
            names["scheduler"] = torch.optim.lr_scheduler.ConstantLR(optimizer)
            exec(compile(example, "README.md", "exec"), names)
    finally:
        leave()
    written = (tmp_path / "runs" / "mine" / "metrics.jsonl").read_text()
    assert written.count("grad/norm_clipped") == 1


def test_links_between_documents_lead_somewhere():
    for name, document in DOCUMENTS.items():
        for file, anchor in re.findall(r"\]\(([^):#]*)#?([\w-]*)\)", document):
            place = (ROOT / name).parent / file if file else ROOT / name
            assert place.exists(), (name, file)
            text = place.read_text(encoding="utf-8") if anchor else ""
            heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
            assert not anchor or anchor in slugs, anchor


def test_readme_is_read_in_five_minutes():
    assert 900 <= len(README.split()) <= 1200


def test_the_second_command_is_the_gates_own():
    command = "python -m pytest -q -n 2 --dist loadgroup\n"
    gate = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert all(command in text for text in (README, CONTRIBUTING, gate))
