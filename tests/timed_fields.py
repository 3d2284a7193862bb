"""Fields of a step's event that depend on the clock: what took how long, and who stood in line."""

TIMED = frozenset(
    {
        "seconds",
        "step_seconds",
        "tokens_per_s",
        "sampled_tokens_per_s",
        "graded_per_s",
        "backlog",
        "open_groups",
    }
)
