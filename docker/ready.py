"""A container's health: exit code 0 once the service at this URL may get traffic.

Standard library only, so that asking every few seconds costs a few milliseconds.
"""

import sys
import urllib.error
import urllib.request

ATTEMPT_S = 4.0


def main() -> None:
    """Ends with the answer, which `docker inspect` shows."""
    url = sys.argv[1]
    try:
        with urllib.request.urlopen(url, timeout=ATTEMPT_S) as answer:  # noqa: S310  our own URL
            sys.stdout.write(answer.read(500).decode(errors="replace"))
    except urllib.error.HTTPError as err:
        raise SystemExit(f"{url}: {err.code} {err.read(500).decode(errors='replace')}") from None
    except OSError as err:
        raise SystemExit(f"{url}: {err}") from None


if __name__ == "__main__":
    main()
