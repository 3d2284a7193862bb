"""What the actor's other nodes ask the conductor: which ranks to start now."""

from typing import Any

from fastapi import APIRouter, Request, Response

from services.trainer.launch import Launch, LaunchBoard

router = APIRouter(prefix="/v1", tags=["ranks"])
NONE: dict[int | str, dict[str, Any]] = {204: {"description": "no ranks are wanted"}}


@router.get("/launch", response_model=Launch, responses=NONE)
async def launch(request: Request) -> Any:
    """The start of ranks in progress; nodes 1 and up run their part of it."""
    board: LaunchBoard = request.app.state.board
    return board.current or Response(status_code=204)
