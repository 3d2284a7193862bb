"""The demo's task: add two two-digit numbers with the worked steps written out, digit by digit.

`37+48=` is answered by `7+8=15;3+4+1=08;85`: units, tens with the carry, then the sum. Whatever
follows the last `;` is the answer, so a wrong step may still end right and the reverse.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OPERANDS = range(10, 100)
MAX_RESPONSE_TOKENS = 24
"""Bytes and the end token: the longest worked answer has 19 and one."""


@dataclass(frozen=True, slots=True)
class Addition:
    left: int
    right: int

    @property
    def prompt(self) -> str:
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        return str(self.left + self.right)

    @property
    def worked(self) -> str:
        """The response that earns the reward, step by step."""
        (a, b), (c, d) = divmod(self.left, 10), divmod(self.right, 10)
        carry = (b + d) // 10
        return f"{b}+{d}={b + d:02d};{a}+{c}+{carry}={a + c + carry:02d};{self.answer}"


def last_field(response: str) -> str:
    """The answer that a response states."""
    return response.rpartition(";")[2].strip()


def split(seed: int, *, num_train: int, num_heldout: int) -> tuple[list[Addition], list[Addition]]:
    """Shuffled training and held-out problems; no held-out sum occurs in training, nor mirrored."""
    rng = random.Random(seed)
    pairs = [(a, b) for a in OPERANDS for b in OPERANDS if a <= b]
    rng.shuffle(pairs)
    heldout = [_either_way(pair, rng) for pair in pairs[:num_heldout]]
    train = list(_both_ways(pairs[num_heldout:]))
    if num_train > len(train):
        raise ValueError(f"num_train {num_train} exceeds the {len(train)} problems that are left")
    rng.shuffle(train)
    return train[:num_train], heldout


def write_rows(path: Path, problems: list[Addition]) -> None:
    """One `{"problem", "answer"}` object a line."""
    rows = (json.dumps({"problem": p.prompt, "answer": p.answer}) for p in problems)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{row}\n" for row in rows))


def _either_way(pair: tuple[int, int], rng: random.Random) -> Addition:
    left, right = pair if rng.random() < 0.5 else reversed(pair)
    return Addition(left, right)


def _both_ways(pairs: list[tuple[int, int]]) -> Iterator[Addition]:
    for a, b in pairs:
        yield Addition(a, b)
        if a != b:
            yield Addition(b, a)
