import pytest
import torch
from PIL import Image

from runner.data import DataUnavailable
from runner.data.image_folder import MEAN, STD, image_folder

COLOURS = {"blue": (0, 0, 255), "red": (255, 0, 0)}


@pytest.fixture
def root(tmp_path):
    """Two classes, three training images and one held-out image each, left half black."""
    for part, count in {"train": 3, "val": 1}.items():
        for name, colour in COLOURS.items():
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                image = Image.new("RGB", (40, 30), colour)
                image.paste((0, 0, 0), (0, 0, 20, 30))
                image.save(folder / f"{number}.png")
    return tmp_path


def load(root, **changes):
    return image_folder(
        **{"root": root and str(root), "size": 8, "augment": True, "seed": 0, **changes}
    )


def test_samples_are_normalised_squares_with_the_class_of_their_folder(root):
    data = load(root)
    assert (len(data.train), len(data.test), data.items) == (6, 2, "samples")
    for part in (data.train, data.test):
        classes = [int(part[index][1]) for index in range(len(part))]
        assert classes == sorted(classes)
        image, _ = part[0]
        assert (image.shape, image.dtype) == ((3, 8, 8), torch.float32)
    blue, _ = data.test[0]
    black = (0 - torch.tensor(MEAN)) / torch.tensor(STD)
    colour = (torch.tensor([0.0, 0.0, 1.0]) - torch.tensor(MEAN)) / torch.tensor(STD)
    torch.testing.assert_close(blue[:, 4, 0], black)
    torch.testing.assert_close(blue[:, 4, -1], colour)


def test_training_images_depend_on_seed_epoch_and_sample_alone(root):
    first, again, other = load(root).train, load(root).train, load(root, seed=1).train
    torch.rand(3)
    assert torch.equal(first[1][0], again[1][0])
    assert torch.equal(first[1][0], first[1][0])
    assert not torch.equal(first[1][0], other[1][0])
    before = first[1][0]
    first.set_epoch(1)
    assert not torch.equal(first[1][0], before)
    first.set_epoch(0)
    assert torch.equal(first[1][0], before)


def test_reading_leaves_the_generator_of_the_model_alone(root):
    data = load(root)
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    data.train[0]
    assert torch.equal(torch.rand(4), expected)


def test_without_augmentation_every_epoch_is_alike(root):
    train = load(root, augment=False).train
    before = train[0][0]
    train.set_epoch(1)
    assert torch.equal(train[0][0], before)


@pytest.mark.parametrize("missing", ["train", "val"])
def test_a_folder_without_images_names_itself_and_the_way_forward(root, missing):
    (root / missing).rename(root / "elsewhere")
    with pytest.raises(DataUnavailable, match=r"train/<class>/<image>") as caught:
        load(root)
    assert str(root) in str(caught.value)


def test_the_folder_may_be_named_by_the_environment(root, monkeypatch):
    monkeypatch.setenv("DATA", str(root))
    assert len(load(None).train) == 6
    monkeypatch.delenv("DATA")
    with pytest.raises(DataUnavailable, match=r"data\.root is not set"):
        load(None)


def test_classes_that_differ_are_named(root):
    (root / "val" / "red").rename(root / "val" / "green")
    with pytest.raises(DataUnavailable, match="green, red"):
        load(root)


def test_a_size_below_one_is_refused(root):
    with pytest.raises(ValueError, match="size 0"):
        load(root, size=0)
