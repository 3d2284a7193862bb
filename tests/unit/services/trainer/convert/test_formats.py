import pytest
import torch
from torch import Tensor

from services.trainer.convert.formats import Stored, recast
from shared.models.deepseek_v4.checkpoint import dequantise_tensor
from shared.models.deepseek_v4.headers import CheckpointInvalid
from shared.quant.fp4 import pack_nibbles, quantise_fp4
from shared.quant.fp8 import quantise_fp8
from shared.quant.policy import POLICIES, Policy

EXPERT = "layers.1.ffn.experts.3.w1.weight"
SCALE = "layers.1.ffn.experts.3.w1.scale"
PLAIN = "layers.1.ffn.gate.weight"
EXACT = "layers.1.hc_attn_fn"
TABLE = "layers.0.ffn.gate.tid2eid"


def matrix(rows: int = 256, columns: int = 128) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def values(parts: dict[str, Tensor]) -> Tensor:
    return dequantise_tensor(EXPERT, parts[EXPERT], scale=parts.get(SCALE))


def same_bytes(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("quantise", [quantise_fp8, quantise_fp4])
def test_what_is_in_the_wanted_format_is_copied_byte_by_byte(quantise: object) -> None:
    codes, scale = quantise(matrix())  # type: ignore[operator]
    halved = (scale.view(torch.uint8) - 1).view(scale.dtype)  # a scale that we would not choose
    policy = POLICIES["fp8" if codes.dtype == torch.float8_e4m3fn else "fp4"]
    parts = recast(EXPERT, Stored(codes, halved), policy=policy)
    assert same_bytes(parts[EXPERT], codes)
    assert same_bytes(parts[SCALE], halved)


def test_fp4_becomes_fp8_without_loss() -> None:
    stored = Stored(*quantise_fp4(matrix()))
    parts = recast(EXPERT, stored, policy=POLICIES["fp8"])
    assert parts[EXPERT].dtype == torch.float8_e4m3fn
    assert torch.equal(values(parts), dequantise_tensor(EXPERT, stored.tensor, scale=stored.scale))


def test_fp4_that_fp8_cannot_hold_is_refused_with_tensor_and_block() -> None:
    codes = pack_nibbles(torch.ones(256, 128, dtype=torch.uint8))  # 0.5 everywhere
    _, scale = quantise_fp4(torch.ones(256, 128))
    raw = scale.view(torch.uint8).clone()
    raw[200, 1] -= 15
    stored = Stored(codes, raw.view(scale.dtype))
    with pytest.raises(ValueError, match=r"experts\.3\.w1\.weight: .* block \(1, 0\) differ by 15"):
        recast(EXPERT, stored, policy=POLICIES["fp8"])
    raw[200, 1] += 1
    recast(EXPERT, stored, policy=POLICIES["fp8"])


@pytest.mark.parametrize("wanted", ["fp8", "fp4", "bf16", "fp32"])
def test_values_are_quantised_like_everywhere(wanted: str) -> None:
    weight = matrix().bfloat16()
    parts = recast(EXPERT, Stored(weight), policy=POLICIES[wanted])
    quantised = {"fp8": quantise_fp8, "fp4": quantise_fp4}.get(wanted)
    if quantised is None:
        assert torch.equal(parts[EXPERT].float(), weight.float())
    else:
        assert all(map(same_bytes, (parts[EXPERT], parts[SCALE]), quantised(weight.float())))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("wanted", ["fp8", "fp4", "bf16", "fp32"])
@pytest.mark.parametrize("name", [EXPERT, PLAIN, EXACT])
def test_values_that_are_not_finite_are_refused_by_name(name: str, wanted: str, bad: float) -> None:
    weight = matrix()
    weight[100, 3] = bad
    with pytest.raises(ValueError, match=f"^{name}: .*NaN or infinity"):
        recast(name, Stored(weight), policy=POLICIES[wanted])


@pytest.mark.parametrize("wanted", ["fp8", "bf16"])
def test_codes_and_scales_that_are_not_finite_are_refused_by_name(wanted: str) -> None:
    codes, scale = quantise_fp8(matrix())
    bad = codes.clone()
    bad.view(torch.uint8)[7, 7] = 0x7F
    with pytest.raises(ValueError, match=f"^{EXPERT}: expected finite E4M3 codes"):
        recast(EXPERT, Stored(bad, scale), policy=POLICIES[wanted])
    infinite = torch.full_like(scale.view(torch.uint8), 255).view(scale.dtype)
    with pytest.raises(ValueError, match=f"^{EXPERT}: expected finite scales"):
        recast(EXPERT, Stored(codes, infinite), policy=POLICIES[wanted])


@pytest.mark.parametrize("wanted", ["fp4", "fp8", "bf16"])
def test_fp4_scale_of_255_is_refused_by_name(wanted: str) -> None:
    codes, scale = quantise_fp4(matrix())
    raw = scale.view(torch.uint8).clone()
    raw[5, 1] = 255
    with pytest.raises(ValueError, match=f"^{EXPERT}: expected finite scales"):
        recast(EXPERT, Stored(codes, raw.view(scale.dtype)), policy=POLICIES[wanted])


def test_what_bf16_cannot_hold_is_refused_by_name() -> None:
    """Byte 0 is the scale 2^-127, under which the smallest code is 2^-136."""
    lowest = torch.zeros(1, 1, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    smallest = torch.full((1, 1), 2.0**-9).to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointInvalid, match=f"^{EXPERT}: has bits below 2\\^-133"):
        recast(EXPERT, Stored(smallest, lowest), policy=POLICIES["bf16"])
    one = torch.ones(1, 1).to(torch.float8_e4m3fn)
    parts = recast(EXPERT, Stored(one, lowest), policy=POLICIES["bf16"])
    assert parts[EXPERT].item() == 2.0**-127
    wide = torch.full((1, 1), 1 / 3)  # from scales like these rounding is what is asked for
    recast(EXPERT, Stored(one, wide), policy=POLICIES["bf16"])


def test_codes_without_scales_are_refused_by_name() -> None:
    codes, _ = quantise_fp8(matrix())
    with pytest.raises(CheckpointInvalid, match=f"^{EXPERT}: expected a scale for fp8"):
        recast(EXPERT, Stored(codes), policy=POLICIES["bf16"])


def test_scales_change_their_type_only_without_loss() -> None:
    codes, scale = quantise_fp8(matrix())
    wide = Policy(linear="fp8", expert="fp8", scale="fp32")
    parts = recast(EXPERT, Stored(codes, scale), policy=wide)
    assert parts[SCALE].dtype == torch.float32
    back = recast(EXPERT, Stored(codes, parts[SCALE]), policy=POLICIES["fp8"])
    assert same_bytes(back[SCALE], scale)
    with pytest.raises(CheckpointInvalid, match=f"^{EXPERT}: has scales that are no powers of two"):
        recast(EXPERT, Stored(codes, parts[SCALE] * 1.5), policy=POLICIES["fp8"])


def test_tables_stay_integers() -> None:
    table = torch.arange(6).view(3, 2)
    assert torch.equal(recast(TABLE, Stored(table), policy=POLICIES["bf16"])[TABLE], table)
    with pytest.raises(CheckpointInvalid, match=f"^{TABLE}: expected int64, found fp32"):
        recast(TABLE, Stored(table.float()), policy=POLICIES["bf16"])
    with pytest.raises(CheckpointInvalid, match=f"^{PLAIN}: expected bf16, found int64"):
        recast(PLAIN, Stored(table), policy=POLICIES["bf16"])
