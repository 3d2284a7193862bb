"""Request bodies that are bytes and not JSON: read no more than is allowed."""

from fastapi import HTTPException, Request


async def limited_body(request: Request, max_bytes: int) -> bytes:
    """The whole body; 413 as soon as it is longer than `max_bytes`."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise HTTPException(413, f"the body exceeds {max_bytes} bytes")
        parts.append(part)
    return b"".join(parts)
