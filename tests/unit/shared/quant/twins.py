"""Slow, obvious number formats on Python's fractions, written from their definitions."""

import math
from fractions import Fraction

E4M3_POSITIVE = [Fraction(mantissa, 8) / 64 for mantissa in range(8)] + [
    (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
    for exponent in range(1, 16)
    for mantissa in range(8 if exponent < 15 else 7)  # the last place is NaN
]
E2M1_POSITIVE = [Fraction(x) for x in ("0", "0.5", "1", "1.5", "2", "3", "4", "6")]


def nearest(value: Fraction, grid: list[Fraction]) -> Fraction:
    """Closest of an ascending grid; halfway between two, the one at the even place."""
    exact = abs(value)
    place = min(range(len(grid)), key=lambda i: (abs(grid[i] - exact), i % 2))
    return grid[place] if value >= 0 else -grid[place]


def scale_exponent(peak: float, largest: int) -> int:
    """Smallest e with peak <= largest · 2^e."""
    exponent = math.frexp(peak)[1] - 20
    while Fraction(peak) > largest * Fraction(2) ** exponent:
        exponent += 1
    return exponent


def rounded_group(
    values: list[float], largest: int, grid: list[Fraction], peak: float
) -> list[float]:
    """Each value to the grid and back under the group's scale; `peak` is its floored maximum."""
    scale = Fraction(2) ** scale_exponent(peak, largest)
    return [float(nearest(Fraction(v) / scale, grid) * scale) for v in values]
