import pytest

from shared.data import draw_order


def epoch(seed: int | None, num_rows: int, number: int) -> list[int]:
    return [draw_order(seed, num_rows, number * num_rows + i) for i in range(num_rows)]


def test_every_epoch_takes_every_row_once_in_another_order() -> None:
    first, second = epoch(7, 50, 0), epoch(7, 50, 1)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second != list(range(50))


def test_the_order_is_a_function_of_seed_and_draw() -> None:
    assert draw_order(7, 50, 120) == epoch(7, 50, 2)[20]
    assert epoch(7, 50, 0) != epoch(8, 50, 0)
    # Pinned: jobs that resume after an upgrade must find their rows again.
    assert epoch(3, 5, 0) == [4, 0, 1, 3, 2]


def test_no_seed_keeps_the_order_of_the_file() -> None:
    assert [draw_order(None, 3, draw) for draw in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_rows_are_spread_over_an_epoch() -> None:
    places = [sum(epoch(seed, 10, 0).index(row) for seed in range(200)) / 200 for row in range(10)]
    assert all(3.5 < place < 5.5 for place in places)  # 4.5 expected, deviation 0.2


@pytest.mark.parametrize(("num_rows", "draw"), [(0, 0), (5, -1)])
def test_impossible_draws_are_refused(num_rows: int, draw: int) -> None:
    with pytest.raises(ValueError, match="need draw >= 0 and at least one row"):
        draw_order(1, num_rows, draw)
