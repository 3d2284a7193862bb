"""A container's health: exit code 0 once /readyz at this port says 200, else what it says.

Run every few seconds in every container, so it imports as little as it can: a socket.
"""

import socket
import sys

ATTEMPT_S = 4.0


def main() -> None:
    """The answer, which `docker inspect` shows, ends the process."""
    host, port = sys.argv[1].rsplit(":", 1)
    try:
        with socket.create_connection((host, int(port)), timeout=ATTEMPT_S) as asked:
            asked.sendall(f"GET /readyz HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
            answer = asked.makefile("rb").read(2000).decode(errors="replace")
    except OSError as err:
        sys.exit(f"{host}:{port}: {err}")
    head, _, body = answer.partition("\r\n\r\n")
    sys.stdout.write(body + "\n")
    sys.exit(0 if head.startswith("HTTP/1.1 200") else head.partition("\r\n")[0])


if __name__ == "__main__":
    main()
