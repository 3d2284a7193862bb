"""Work that needs torch, in a child: commands themselves load none."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE

from pydantic import BaseModel

from shared.errors import DeadlineExceeded, TandemError

_MAX_LAST_WORDS = 2000  # characters of the child's own words that are shown


async def ask_child(module: str, request: BaseModel, *, deadline_s: float, what: str) -> bytes:
    """What `python -m module` prints for the request as JSON on its standard input.

    DeadlineExceeded says for `what` was waited; TandemError has the child's last words.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, str(os.getpid())), stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    asked = request.model_dump_json().encode()
    try:
        answer, errors = await asyncio.wait_for(process.communicate(asked), deadline_s)
    except TimeoutError as err:
        raise DeadlineExceeded(what, deadline_s) from err
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise TandemError(errors.decode(errors="replace").strip()[-_MAX_LAST_WORDS:])
    return answer
