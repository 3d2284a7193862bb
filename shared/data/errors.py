"""The one error of this package: it names the file (or data set) and the line."""


class DataError(ValueError):
    """A data set that cannot be used as it is.

    `source` is the file or data set; `line` counts from 1 (the row, where a source has no lines)
    and is None when the whole source is meant.
    """

    def __init__(self, source: str, problem: str, *, line: int | None = None) -> None:
        place = source if line is None else f"{source}, line {line}"
        super().__init__(f"{place}: {problem}")
        self.source = source
        self.line = line
