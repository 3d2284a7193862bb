"""Rewards as the algorithm wants them, from rewards as the grader gave them."""

from shared.job_algorithm import OverlongSection


def overlong_penalty(num_tokens: int, max_tokens: int, overlong: OverlongSection | None) -> float:
    """0 up to the buffer, then falling linearly to `-penalty` at `max_tokens`.

    DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13).
    """
    if overlong is None:
        return 0.0
    begin = max_tokens - overlong.buffer_tokens
    over = min(max(num_tokens - begin, 0), overlong.buffer_tokens)
    return -overlong.penalty * over / overlong.buffer_tokens
