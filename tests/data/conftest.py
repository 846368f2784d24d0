import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Tests run beside one another: more threads than cores would slow all of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
