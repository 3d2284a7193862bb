"""Every error that Tandem raises on purpose.

TandemError
├── Retryable          leave the message unacked: it comes again, and this does not count against it
│   └── NotYet         the same, as often as it takes: what it waits for is on its way
├── Rejected           bury the message now: it can never become right
│   └── LeftHalfway    the same, but what was asked has been done in part: its state is of no use
├── Fatal              this process cannot go on: end it, the supervisor starts another
├── ConfigInvalid      a setting is wrong; the text is one sentence for people
├── DeadlineExceeded   a wait ended without its event
├── HttpFailed         a request was answered with an error, or not at all
├── ChannelClosed      the engine child (or its parent) went away
├── RemoteError        the engine child failed; carries the child's error by name
├── PartialModel       no rank has the whole model, which was asked for; a ValueError, too
├── WeightsCorrupt     bytes of a weight version are not what its manifest says
│   └── OtherValues    sound in itself, but what it computes with is not what was expected
└── StackFailed        a program of the local stack cannot be started

Anything else that a handler raises is a bug or a poison message: it is logged, counted against the
message, and the message is buried at its delivery limit.
"""

from shared.refusals import sentences


class TandemError(Exception):
    pass


class Retryable(TandemError):
    pass


class NotYet(Retryable):
    pass


class Rejected(TandemError):
    pass


class LeftHalfway(Rejected):
    pass


class Fatal(TandemError):
    pass


class ConfigInvalid(TandemError):
    pass


class DeadlineExceeded(TandemError):
    def __init__(self, what: str, after_s: float) -> None:
        super().__init__(f"waited {after_s:g} s for {what}")
        self.what = what
        self.after_s = after_s


class HttpFailed(TandemError):
    """`status` is None when no answer arrived; `body` is the answer (cut if long) or the cause.

    `is_late` says that it was waited for the answer until the request's deadline.
    """

    def __init__(
        self, method: str, url: str, status: int | None, body: str, *, is_late: bool = False
    ) -> None:
        said = "; ".join(sentences(body))
        super().__init__(f"{method} {url}: {status or 'no answer'}: {said}")
        self.is_late = is_late
        self.method = method
        self.url = url
        self.status = status
        self.body = body


class ChannelClosed(TandemError):
    pass


class RemoteError(TandemError):
    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text


class PartialModel(TandemError, ValueError):
    pass


class WeightsCorrupt(TandemError):
    pass


class OtherValues(WeightsCorrupt):
    pass


class StackFailed(TandemError):
    pass
