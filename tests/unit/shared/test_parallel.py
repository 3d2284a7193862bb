"""Layout arithmetic, against Megatron's rules and the published layout."""

import pytest

from shared.parallel import Layout, balanced_last_stage


def test_the_published_layout_is_four_stages_of_eleven_and_ten() -> None:
    layout = Layout(world=16, pipeline=4, expert=4, last_stage_layers=10)
    assert layout.stage_sizes(43) == (11, 11, 11, 10)
    assert [stage.start for stage in layout.stage_layers(43)] == [0, 11, 22, 33]
    assert (layout.data, layout.expert_data, layout.stage_ranks) == (4, 1, 4)
    assert [layout.stage_of(rank) for rank in (0, 3, 4, 15)] == [0, 0, 1, 3]
    assert balanced_last_stage(43, 4) == 10
    assert str(layout) == "TP1/PP4/EP4/DP4/LAST10"


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ({"world": 6, "tensor": 4}, "does not divide 6 ranks"),
        ({"world": 4, "pipeline": 2, "expert": 4}, "the 2 ranks of a pipeline stage"),
        ({"last_stage_layers": 1}, "need pipeline > 1"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(sizes: dict[str, int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Layout(**sizes)


@pytest.mark.parametrize(
    ("sizes", "num_layers", "expected"),
    [
        ({"world": 1}, 5, (5,)),
        ({"world": 2, "pipeline": 2, "first_stage_layers": 1}, 4, (1, 3)),
        (
            {"world": 4, "pipeline": 4, "first_stage_layers": 1, "last_stage_layers": 1},
            6,
            (1, 2, 2, 1),
        ),
        ({"world": 2, "pipeline": 2, "first_stage_layers": 1, "last_stage_layers": 3}, 4, (1, 3)),
    ],
)
def test_stages_share_what_first_and_last_leave(
    sizes: dict[str, int], num_layers: int, expected: tuple[int, ...]
) -> None:
    assert Layout(**sizes).stage_sizes(num_layers) == expected


@pytest.mark.parametrize("last", [None, 9, 43])
def test_layers_that_do_not_divide_are_refused(last: int | None) -> None:
    with pytest.raises(ValueError, match=r"43 layers do not make 4 .* last_stage_layers 10 alone"):
        Layout(world=4, pipeline=4, last_stage_layers=last).stage_sizes(43)
