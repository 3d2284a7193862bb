"""What the actor's other nodes ask the conductor: which ranks to start now."""

from typing import Any

from fastapi import APIRouter, Request, Response

from services.trainer.launch import Launch, LaunchBoard, Refusal
from shared.answers import Responses

router = APIRouter(prefix="/v1", tags=["ranks"])
NONE: Responses = {204: {"description": "no ranks are wanted"}}


@router.get("/launch", response_model=Launch, responses=NONE)
async def launch(request: Request) -> Any:
    """The start of ranks in progress; nodes 1 and up run their part of it."""
    board: LaunchBoard = request.app.state.board
    return board.current or Response(status_code=204)


@router.post("/launch/refusals", status_code=204)
async def refuse(refusal: Refusal, request: Request) -> None:
    """A node cannot take part, so waiting for it is of no use."""
    board: LaunchBoard = request.app.state.board
    board.refuse(refusal)
