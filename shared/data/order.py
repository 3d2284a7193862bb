"""Which row the n-th draw of a job takes: a function of seed and draw alone.

A resumed job re-feeds lost draws by number, so the order must not hang on a library's generator:
each epoch sorts the rows by a hash of (seed, epoch, row).
"""

from functools import lru_cache
from hashlib import blake2b


def draw_order(seed: int | None, num_rows: int, draw: int) -> int:
    """Row index of draw 0, 1, 2, ...; each epoch of `num_rows` draws takes every row once.

    `seed` None keeps the order of the file. The first draw of an epoch costs about a microsecond a
    row, later ones nothing.
    """
    if num_rows <= 0 or draw < 0:
        raise ValueError(f"draw {draw} of {num_rows} rows: need draw >= 0 and at least one row")
    epoch, position = divmod(draw, num_rows)
    return position if seed is None else _permutation(seed, num_rows, epoch)[position]


@lru_cache(maxsize=8)
def _permutation(seed: int, num_rows: int, epoch: int) -> tuple[int, ...]:
    def rank(row: int) -> bytes:
        return blake2b(b"%d/%d/%d" % (seed, epoch, row), digest_size=8).digest()

    return tuple(sorted(range(num_rows), key=rank))
