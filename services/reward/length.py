"""Soft overlong punishment: long responses lose a little, longer ones more, cut ones all of it.

DAPO (Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", 2025, arXiv
2503.14476), equation 13.
"""


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int) -> float:
    """0 up to max - buffer tokens, then falling linearly to -1 at `max_tokens` and beyond."""
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(f"buffer_tokens {buffer_tokens} is not from 1 to max_tokens {max_tokens}")
    free_tokens = max_tokens - buffer_tokens
    if num_tokens <= free_tokens:
        return 0.0
    return max((free_tokens - num_tokens) / buffer_tokens, -1.0)
