"""Tables of Hugging Face's datasets, and tar files that webdataset reads, through ``data=own``."""

import gc
import random

import numpy as np
import pytest
import torch

from runner.data.dataset import own
from runner.data.stream import StreamLoader

ROWS = [{"pixels": [float(n), n / 2], "label": n % 3, "name": str(n)} for n in range(40)]


def test_samples_are_the_rows_of_a_table():
    library = pytest.importorskip("datasets")
    table = library.Dataset.from_list(ROWS)
    data = own(table, columns=["pixels", "label"])
    samples = [
        (inputs.tolist(), int(target))
        for part in (data.train, data.test)
        for inputs, target in part.__getitems__([*range(len(part))])
    ]
    assert sorted(samples) == [(row["pixels"], row["label"]) for row in ROWS]
    assert len(data.test) == 4
    inputs, target = data.train[2]
    assert (inputs.tolist(), int(target), inputs.dtype) == (*samples[2], torch.float32)
    whole = own(table, table, eval_fraction=0.0)
    assert {**whole.test[3], "pixels": whole.test[3]["pixels"].tolist()} == ROWS[3]
    splits = library.DatasetDict({"one": table, "two": table})
    for dataset, wrong, message in (
        (table, {"columns": ["pixels", "labels"]}, "labels.*not in the dataset"),
        (table, {"eval_fraction": 1}, "below 1"),
        (table.select(range(1)), {}, "leaves none of 1 sample "),
        (splits, {}, "choose a split of one, two"),
    ):
        with pytest.raises(ValueError, match=message):
            own(dataset, **wrong)


# webdataset leaves closing its files to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 2)])
def test_each_sample_of_tar_files_is_read_once_in_all_workers(ranks, workers, tmp_path):
    library = pytest.importorskip("webdataset")
    with library.ShardWriter(f"{tmp_path}/%d.tar", maxcount=7, verbose=0) as writer:
        for number in range(20):
            pixels = np.array([number, 0.5], dtype=np.float32)
            writer.write({"__key__": str(number), "npy": pixels, "cls": 1})
    files = sorted(map(str, tmp_path.glob("*.tar")))
    data = library.WebDataset(files, nodesplitter=None, shardshuffle=False).shuffle(5, rng=random)
    seen = []
    for rank in range(ranks):
        split = {"rank": rank, "world_size": ranks, "drop_last": False, "seed": 0}
        loader = StreamLoader(data.decode().to_tuple("npy", "cls"), 3, **split, num_workers=workers)
        for number, (inputs, _) in enumerate(loader):
            if not loader.weightless(number):
                seen += [int(pixel) for pixel in inputs[:, 0]]
    del loader, data
    gc.collect()
    assert sorted(seen) == [*range(20)] != seen
