"""Tables of data that people have: trained, or refused in one sentence."""

import json
import random

import pytest
import torch
from PIL import Image

from runner.cli.main import main
from runner.config.problem import RequestError
from runner.data.dataset import DataUnavailable
from runner.data.table import table as read_table
from runner.request.request import request
from runner.train import build, preflight

LINEAR = ["model=torch.nn.Linear", "model.in_features=2", "model.out_features=2"]
SHORT = ["device=cpu", "tracker=none", "train.max_duration=2ba", "data.batch_size=4"]
CSV = "data=csv data.path={0}/t.csv data.target=label"
LINES = "data=csv data.path={0}/t.jsonl data.target=label"
TARGETS = "data=csv data.path={0}/t.csv data.target=y data.columns=[x]"
NUMBERS = "loss=torch.nn.MSELoss model.out_features=1"
FOLDER = "data=datasets data.path={0} data.columns=[[x,y],label]"
DRAW = random.Random(0)
ROWS = [(DRAW.gauss(5, 2), DRAW.gauss(90, 9), DRAW.choice(["cat", "dog"])) for _ in range(40)]
TEXT = "\n".join(["x,y,label", *(f"{x},{y},{label}" for x, y, label in ROWS)])
RECORDS = [{"x": x, "y": y, "label": label} for x, y, label in ROWS]
ALL = "\n".join(map(json.dumps, RECORDS))
LARGE = TEXT + "\n1,1e300,cat"
MARKED = TEXT.replace("cat", "3").replace("dog", "7") + "\n1,2,NA"
QUOTED = TEXT.replace("cat", '"cat, small"').replace("dog", '"the ""dog"""')
WIDE = [",".join([*(f"c{n}" for n in range(3000)), "label"])]
WIDE += [",".join([*(str(DRAW.random()) for _ in range(3000)), str(n % 2)]) for n in range(12)]


class OfThree(torch.nn.Sequential):
    """Takes vectors of three numbers."""

    def __init__(self):
        super().__init__(torch.nn.Linear(3, 2))


class OfSize(torch.nn.Linear):
    """Takes vectors of a size that it is given."""

    def __init__(self, input_dim):
        super().__init__(input_dim, 2)


def table(library):
    return library.Dataset.from_list(RECORDS)


def splits(library, folder):
    whole = table(library)
    parts = {"train": whole, "validation": whole.select(range(9)), "test": whole.select(range(5))}
    library.DatasetDict(parts).save_to_disk(str(folder / "saved"))


def images(folder, broken):
    for part, name in (("train", "cat"), ("train", "dog"), ("val", "cat"), ("val", "dog")):
        place = folder / part / name
        place.mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (8, 8), (number, 9, 9)).save(place / f"{number}.png")
    (folder / "train" / "dog" / broken).write_text("no image")


WRITTEN = {  # the content of a file, and the words of a run that trains on it
    "text classes": (TEXT, CSV),
    "quoted commas": (QUOTED, CSV),
    "semicolons and a mark at the start": ("\ufeff" + TEXT.replace(",", ";"), CSV),
    "tabs": (TEXT.replace(",", "\t"), CSV),
    "whole numbers as classes": (TEXT.replace("cat", "3").replace("dog", "7"), CSV),
    "numbers": (TEXT, f"{CSV} data.target=y data.columns=[x] model.in_features=1 {NUMBERS}"),
    "chosen columns": (TEXT, f"{CSV} data.columns=[y] model.in_features=1"),
    "wide": ("\n".join(WIDE), f"{CSV} model.in_features=3000"),
    "latin-1": (TEXT.replace("cat", "caf\xe9").encode("latin-1"), f"{CSV} data.encoding=latin-1"),
    "truth values": (TEXT.replace("cat", "True").replace("dog", "False"), CSV),
    "JSON lines": (ALL, LINES),
}
COLUMNS = {  # the cells of a column, by kind of file, and the targets that are read from it
    "booleans of JSON": ("jsonl", [True, False, True], [1, 0, 1]),
    "booleans of parquet": ("parquet", [True, False, True], [1, 0, 1]),
    "a zero at the start": ("csv", ["0123", "123", "7"], [1, 2, 0]),
    "an underscore": ("csv", ["1_0", "10", "a"], [1, 0, 2]),
    "whole numbers beyond float64": ("csv", ["9007199254740993", "9007199254740992"], [1, 0]),
    "whole numbers of JSON": ("jsonl", [9007199254740993, 9007199254740992], [1, 0]),
    "a sign": ("csv", ["-1", "+1", "1"], [0, 1, 1]),
    "decimal numbers": ("csv", ["1.5", "2", "03"], [[1.5], [2.0], [3.0]]),
    "text that marks missing numbers": ("csv", ["NA", "US", "NA", "9"], [1, 2, 1, 0]),
}
REFUSED = {  # the content of a file, the words, and the message
    "missing values": (TEXT + "\n1.0,,cat", CSV, "t.csv, line 42, column y: there is no value"),
    "nan": (TEXT + "\n1.0,nan,cat", CSV, "line 42, column y: nan is no finite number"),
    "a mark among targets": (TEXT + "\n1,?,cat", TARGETS, "line 42, column y: '?' is no number"),
    "nan among targets": (TEXT + "\n1,nan,cat", TARGETS, "'nan' is no number, as most of the"),
    "text among targets": (TEXT + "\n1,2O,cat", TARGETS, "'2O' is no number, as most of the col"),
    "a mark among classes": (
        MARKED,
        f"{CSV} data.classes=true",
        "line 42, column label: 'NA' is no",
    ),
    "a large target": (TEXT + "\n1,1e300,cat", TARGETS, "column y: 1e300 is too large: numbers go"),
    "a large input": (
        LARGE,
        f"{CSV} data.standardize=false",
        "y: 1e300 is too large: numbers go to",
    ),
    "a large input to standardize": (LARGE, CSV, "1e300 is too large: numbers go to 1e+150"),
    "a large whole number": (f"{TEXT}\n1,{10**400},cat", CSV, "is too large: numbers go to 1e+150"),
    "a number with an underscore": (TEXT + "\n1,1_0,cat", CSV, "column y: '1_0' is no number"),
    "an empty line of JSON": (f"{{}}\n{ALL}", LINES, "line 1, column label: there is no value"),
    "a key that the first line lacks": (
        f'{{"x": 1, "label": "a"}}\n{ALL}',
        LINES,
        "1, column y: ther",
    ),
    "no key": ("{}\n{}", LINES, "t.jsonl has no row of values"),
    "one column": ("label\na\nb", CSV, "t.csv has no column of inputs beside the target label"),
    "text inputs": (TEXT, CSV.replace("label", "x"), "is no number; data.columns chooses columns"),
    "another encoding": (TEXT.replace("cat", "caf\xe9").encode("latin-1"), CSV, "encoding=latin-1"),
    "a wrong name": (TEXT, CSV.replace("label", "lable"), "no such column; did you mean label?"),
    "a short row": (TEXT + "\n1.0,2.0", CSV, "line 42 has 2 values, and the first line names 3"),
    "an open quote": (TEXT + '\n1.0,2.0,"cat', CSV, "t.csv cannot be read: unexpected end of data"),
    "no row": ("x,y,label\n", CSV, "t.csv has no row of values"),
    "one class": (TEXT.replace("dog", "cat"), CSV, "holds one class, cat: choose another"),
    "no JSON": ('{"x": 1', LINES, "t.jsonl cannot be read: line 1 is no JSON"),
    "no file": (TEXT, CSV.replace("t.csv", "u.csv"), "there is no file"),
    "no target": (TEXT, "data=csv data.path={0}/t.csv", "no value given"),
    "an image model": (TEXT, f"{CSV} model=cnn", "Linear with model.in_features=2 takes vectors"),
    "a model of one's own": (
        TEXT,
        f"{CSV} model={__name__}.OfThree",
        "OfThree must take vectors of 2, or data.columns=[NAME,NAME] chooses columns",
    ),
    "a model with another size": (
        TEXT,
        f"{CSV} model={__name__}.OfSize model.input_dim=3",
        "model.input_dim=2 takes vectors of 2",
    ),
}


def config_of(words):
    """Return the checked configuration; the later of two values of a key counts."""
    by_key = {}
    for word in [*SHORT, *LINEAR, *words.split()]:
        key = word.partition("=")[0]
        if key == "model":
            by_key = {name: text for name, text in by_key.items() if not name.startswith("model")}
        by_key[key] = word
    [job] = request([*by_key.values()]).jobs
    preflight.check(job.config)
    return job.config


def train(words):
    summary = build.make_trainer(config_of(words), []).fit()
    assert summary["steps"] == 2
    assert "eval/loss" in summary["final"]


def write(folder, words, content):
    name = "t.jsonl" if "jsonl" in words else "t.csv"
    data = content if isinstance(content, bytes) else content.encode()
    (folder / name).write_bytes(data)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_table_trains(name, tmp_path):
    content, words = WRITTEN[name]
    write(tmp_path, words, content)
    train(words.format(tmp_path))


@pytest.mark.parametrize("name", REFUSED)
def test_a_table_that_cannot_train_is_refused_in_one_sentence(name, tmp_path):
    content, words, message = REFUSED[name]
    write(tmp_path, words, content)
    with pytest.raises(RequestError) as error:
        config_of(words.format(tmp_path))
    [problem] = error.value.problems
    assert message in problem.message
    assert "\n" not in problem.message


@pytest.mark.parametrize("name", COLUMNS)
def test_targets_are_read_as_they_stand_in_the_file(name, tmp_path):
    ending, cells, targets = COLUMNS[name]
    file = tmp_path / f"t.{ending}"
    if ending == "csv":
        file.write_text("\n".join(["x,y", *(f"1,{cell}" for cell in cells)]))
    elif ending == "jsonl":
        file.write_text("\n".join(json.dumps({"x": 1, "y": cell}) for cell in cells))
    else:
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet")
        arrow.parquet.write_table(arrow.table({"x": [1] * len(cells), "y": cells}), file)
    data = read_table(str(file), "y", eval_fraction=0)
    assert data.train.targets.tolist() == targets


def test_booleans_are_inputs_of_0_and_1(tmp_path):
    file = tmp_path / "t.jsonl"
    file.write_text("\n".join(json.dumps({"x": x, "y": x}) for x in (True, False)))
    data = read_table(str(file), "y", eval_fraction=0, standardize=False)
    assert data.train.inputs.tolist() == [[1.0], [0.0]]


def test_a_held_out_value_beyond_float32_is_refused(tmp_path):
    held_out = tmp_path / "held.csv"
    (tmp_path / "t.csv").write_text("x,y\n1,2\n2,3")
    held_out.write_text("x,y\n1e40,2")
    with pytest.raises(DataUnavailable, match="column x has a held-out value too far"):
        read_table(str(tmp_path / "t.csv"), "y", eval_path=str(held_out))


def test_a_parquet_file_trains_as_a_table(tmp_path):
    table(pytest.importorskip("datasets")).to_parquet(str(tmp_path / "t.parquet"))
    train(f"data=csv data.path={tmp_path}/t.parquet data.target=label")


@pytest.mark.parametrize(
    "words",
    [
        FOLDER.format("{0}/t.csv"),
        FOLDER.format("{0}/t.jsonl"),
        FOLDER.format("{0}/t.parquet"),
        FOLDER.format("{0}/saved") + " data.eval_split=validation",
    ],
)
def test_a_file_or_a_saved_folder_of_datasets_trains(words, tmp_path, monkeypatch):
    library = pytest.importorskip("datasets")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write(tmp_path, "", TEXT)
    write(tmp_path, "jsonl", WRITTEN["JSON lines"][0])
    table(library).to_parquet(str(tmp_path / "t.parquet"))
    splits(library, tmp_path)
    train(words.format(tmp_path))


def test_a_table_of_datasets_that_cannot_train_is_refused_in_one_sentence(tmp_path):
    library = pytest.importorskip("datasets")
    splits(library, tmp_path)
    saved = f"data=datasets data.path={tmp_path}/saved"
    for words, message in (
        (f"{saved} data.columns=[x,label] data.eval_split=dev", "no split dev (data.train.split"),
        (f"{saved} data.columns=[label,x]", "column label holds text: choose columns of numbers"),
        (f"{saved} data.columns=[x,labels]", "labels"),
        (saved, "[[x,y],label] chooses columns of inputs and, last, targets"),
        ("data=datasets data.path=nowhere.csv", "there is no file"),
        ("data=datasets", "name a folder or a file"),
    ):
        with pytest.raises(RequestError) as error:
            config_of(words)
        [problem] = error.value.problems
        assert message in problem.message


def test_several_columns_are_several_inputs_or_one_vector(tmp_path):
    splits(pytest.importorskip("datasets"), tmp_path)
    words = f"data=datasets data.path={tmp_path}/saved data.columns="
    [job] = request([*f"{words}[x,[y,x],label]".split(), *SHORT]).jobs
    data = build.make_data(job.config.data)
    [(x, both, target)] = data.test.__getitems__([1])
    assert (x.shape, both.shape, both[1]) == ((), (2,), x)
    assert target == ["cat", "dog"].index(ROWS[data.test.indices[1]][2])


def with_numbers_as_classes(tmp_path):
    """A table whose classes are 9, once more than before, and 10."""
    write(tmp_path, "", TEXT.replace("cat", "10").replace("dog", "9") + "\n3,4,9")
    [job] = request([*CSV.format(tmp_path).split(), *SHORT]).jobs
    return build.make_data(job.config.data)


def test_inputs_are_standardized_over_the_training_rows(tmp_path):
    inputs = with_numbers_as_classes(tmp_path).train.inputs
    assert inputs.dtype == torch.float32
    torch.testing.assert_close(inputs.mean(0), torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(inputs.std(0, correction=0), torch.ones(2))


def test_classes_that_are_numbers_have_the_order_of_numbers(tmp_path):
    data = with_numbers_as_classes(tmp_path)
    targets = torch.cat([data.train.targets, data.test.targets])
    nines = sum(label == "dog" for _, _, label in ROWS) + 1
    assert (len(data.test), int((targets == 0).sum())) == (4, nines)


def test_a_held_out_file_has_the_classes_of_the_training_file(tmp_path):
    write(tmp_path, "", TEXT)
    held_out = tmp_path / "held.csv"
    held_out.write_text("\n".join(TEXT.splitlines()[:6]))
    words = f"{CSV.format(tmp_path)} data.eval_path={held_out}"
    train(words)
    words = words.replace("held.csv", "owl.csv")
    (tmp_path / "owl.csv").write_text("x,y,label\n1,2,owl")
    with pytest.raises(RequestError, match=r"line 2, column label: class owl does not occur in t"):
        config_of(words)


class Unequal(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.ones(4 + index % 3), index % 2


def plain(samples):
    return [(torch.randn(2), number % 2) for number in range(samples)]


class Plain(list, torch.utils.data.Dataset):
    pass


def made(samples):
    return Plain(plain(samples))


def pad(samples, to):
    inputs = [torch.nn.functional.pad(inputs, (0, to - len(inputs))) for inputs, _ in samples]
    return torch.stack(inputs), torch.tensor([target for _, target in samples])


def test_samples_of_unequal_length_are_refused_with_the_key_that_pads_them():
    name = "tests.data.test_tables"
    with pytest.raises(RequestError, match=r"lengths \(\[4\] and \[5\]\): data\.collate=mine\.pad"):
        config_of(f"data={name}.Unequal")
    words = f"data.collate={name}.pad data.collate.to=9 data={name}.Unequal model.in_features=9"
    train(words)
    with pytest.raises(RequestError, match=r"data\.collate\._target_=\S+ +makes no batch of two"):
        config_of(words.replace("to=9", "to=nine"))


def test_a_factory_may_return_a_plain_data_set():
    train("data=tests.data.test_tables.made data.samples=20")


@pytest.fixture
def broken_image(tmp_path, outputs, capsys):
    """What a run prints that finds a broken image, and its log."""
    images(tmp_path / "images", "3.png")
    words = [*SHORT, "data=image_folder", f"data.root={tmp_path / 'images'}", "data.size=8"]
    assert main([*words, "data.num_workers=0", "model=resnet18", "model.num_classes=2"]) == 1
    [log] = outputs.glob("runs/*/runner.log")
    return capsys.readouterr().err, log


def test_a_broken_image_is_named(broken_image):
    printed, _ = broken_image
    assert "dog/3.png" in printed


def test_the_traceback_of_a_failed_run_is_in_its_log_alone(broken_image):
    printed, log = broken_image
    assert f"traceback in {log}" in printed
    assert "Traceback" not in printed
    assert "Traceback (most recent call last)" in log.read_text()
