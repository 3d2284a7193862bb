"""The fault that a GPU run is given leaves out what it says, and nothing else."""

import pytest

from shared.models.deepseek_v4.names import tensor_specs
from tests.gpu.unrebuilt_loads import Kind, kind_of, without
from tests.tiny_deepseek_v4 import DEMO


@pytest.mark.parametrize(
    ("kind", "endings"), [("copy", ("weight", "scale")), ("scales", ("scale",))]
)
def test_of_every_block_a_load_lacks_this(kind: Kind, endings: tuple[str, ...]) -> None:
    whole = dict.fromkeys(tensor_specs(DEMO.with_format("fp8")))
    left_out = set(whole) - set(dict(without(whole.items(), kind)))
    blocks = [f"layers.{layer}" for layer in range(DEMO.num_hidden_layers)]
    assert left_out >= {f"{block}.attn.wo_a.{end}" for block in blocks for end in endings}
    assert all(name.endswith(tuple(f".wo_a.{end}" for end in endings)) for name in left_out)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="UNREBUILT=scale: not one of copy, scales"):
        kind_of("scale")
