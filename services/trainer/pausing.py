"""How a job that stops where it can go on says so, to whoever runs it."""

from shared.errors import TandemError


class JobPaused(TandemError):
    """The job stops here and can be resumed; the text says why.

    `on_request` says that a wish to pause was obeyed, which may be taken back before the end.
    """

    def __init__(self, why: str, *, on_request: bool = False) -> None:
        super().__init__(why)
        self.on_request = on_request
