import numpy as np
import pytest
import torch

from shared.weights.delta import apply_delta, encode_delta
from shared.weights.tensor_delta import encode_tensor_delta, in_runs


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
def test_a_tensor_gives_the_delta_of_its_bytes(dtype: torch.dtype) -> None:
    base = torch.randint(0, 100, (40, 30), generator=torch.Generator().manual_seed(0)).to(dtype)
    new = base.clone()
    new[::7, 3] += 1
    raw = [t.flatten().view(torch.uint8).numpy() for t in (base, new)]
    found = encode_tensor_delta(base, new)
    assert found == encode_delta(*raw, item_bytes=dtype.itemsize)
    assert found is not None
    assert np.array_equal(apply_delta(raw[0], found), raw[1])


def test_transposed_tensors_count_in_their_own_order() -> None:
    base = torch.arange(600, dtype=torch.float32).view(20, 30)
    new = base.clone()
    new[3, 5] = -1
    found = encode_tensor_delta(base.t(), new.t())
    assert found == encode_tensor_delta(base.t().contiguous(), new.t().contiguous())


def test_tensors_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected torch\.float32 \[3\] as in the base, found"):
        encode_tensor_delta(torch.zeros(3), torch.zeros(4))
    with pytest.raises(ValueError, match=r"found torch\.float64"):
        encode_tensor_delta(torch.zeros(3), torch.zeros(3, dtype=torch.float64))


def test_changes_are_cut_at_the_borders_of_runs() -> None:
    run = 1 << 20
    at = np.array([0, run - 1, run, 3 * run + 4])
    values = np.arange(4, dtype=np.uint8)
    found = list(in_runs(at, values, values + 9, 3 * run + 5))
    assert [one.num_items for one in found] == [run, run, run, 5]
    assert [one.at.tolist() for one in found] == [[0, run - 1], [0], [], [4]]
    assert [one.new.tolist() for one in found] == [[9, 10], [11], [], [12]]
