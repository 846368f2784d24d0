"""Which values the host may read, and how values reach a device."""

import pytest
import torch

from runner.clip import transfer


def test_a_cpu_alone_can_be_read_without_waiting():
    assert transfer.can_read(torch.device("cpu"))
    for kind in ("cuda", "mps", "xpu", "meta"):
        assert not transfer.can_read(torch.device(kind))


def test_an_mps_device_has_no_float64():
    assert transfer.widest(torch.device("mps")) == torch.float32
    for kind in ("cpu", "cuda"):
        assert transfer.widest(torch.device(kind)) == torch.float64


def test_a_value_is_read_where_that_is_free_and_kept_elsewhere():
    value = torch.tensor(2.5)
    assert transfer.read(value) == 2.5
    assert type(transfer.read(value)) is float
    away = torch.empty((), device="meta")
    assert transfer.read(away) is away
    later = transfer.read_later(value)
    assert later() == 2.5


def test_a_count_is_kept_in_the_widest_type():
    mask = torch.tensor([True, False, True])
    assert transfer.count(mask) == 2.0
    assert type(transfer.count(mask)) is float
    assert transfer.count(mask.to("meta")).dtype == torch.float64


@pytest.mark.parametrize("values", [[1.5, 2.0], [torch.tensor(1.5), 2.0], [torch.tensor(1.5)] * 2])
def test_values_become_one_vector_of_the_widest_type(values):
    vector = transfer.on_device(values, torch.device("cpu"))
    assert vector.dtype == torch.float64
    assert vector.tolist() == [float(value) for value in values]
    away = transfer.on_device(values, torch.device("meta"))
    assert (away.device.type, away.dtype, away.shape) == ("meta", torch.float64, (2,))
    exact = transfer.on_device([1e-300, 2**53 - 1.0], torch.device("cpu"))
    assert exact.tolist() == [1e-300, 2**53 - 1.0]
