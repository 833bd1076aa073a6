"""What ranks send: tensors of every dtype that a batch may have, also of those that gloo does not know."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from strategies.core.mesh import Mesh
from strategies.runtime.communicator import BYTES_ALONE, Communicator


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [*sorted(BYTES_ALONE, key=str), torch.int64, torch.bool], ids=str)
def test_what_only_moves_may_have_any_dtype(dtype: torch.dtype, group: dist.ProcessGroup) -> None:
    communicator, values = Communicator(Mesh((("a", 1),)), 0), torch.arange(6).to(dtype)
    for sizes in (None, [6]):
        into = torch.zeros(6).to(dtype)
        communicator.exchange(into, values, sizes, sizes, group)
        assert torch.equal(into.float(), values.float())
    into = torch.zeros(6).to(dtype)
    communicator.gather(into, values, group)
    assert torch.equal(into.float(), values.float())
