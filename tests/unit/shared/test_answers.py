import httpx
import pytest
import redis.exceptions
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict

from shared.answers import MAX_ERRORS_SHOWN, answer_malformed


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")
    number: int = 0


async def post(content: bytes) -> httpx.Response:
    app = FastAPI()
    answer_malformed(app)

    @app.post("/")
    async def take(body: Body) -> int:
        return body.number

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
        return await http.post("/", content=content, headers={"content-type": "application/json"})


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (b'{"number": NaN}', "number"),
        (b'{"number": "\\ud800"}', "number"),
        (b'{"\\ud800": Infinity}', "the body"),
        (b"{", "1"),
        (b"", "the body"),
        (b"\x81\xa1", "the body"),
        (b"[" * 100_000, "the body"),
    ],
)
async def test_whatever_is_wrong_is_answered_by_key(content: bytes, key: str) -> None:
    answer = await post(content)
    assert answer.status_code == 422
    assert [problem["key"] for problem in answer.json()["detail"]] == [key]


async def test_answer_stays_short() -> None:
    keys = ",".join(f'"k{i}": 1' for i in range(100))
    answer = await post(f"{{{keys}}}".encode())
    assert len(answer.json()["detail"]) == MAX_ERRORS_SHOWN


@pytest.mark.parametrize("kind", [redis.exceptions.ConnectionError, redis.exceptions.TimeoutError])
async def test_a_broker_that_does_not_answer_is_told(
    kind: type[redis.exceptions.RedisError],
) -> None:
    app = FastAPI()
    answer_malformed(app)

    @app.get("/")
    async def ask() -> int:
        raise kind("nobody is there")

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
        answer = await http.get("/")
    assert answer.status_code == 503
    assert answer.json() == {"detail": "the broker does not answer: nobody is there"}


@pytest.mark.parametrize(
    ("content", "value"),
    [
        (b'{"number": -0.5}', -0.5),
        (b'{"number": "\\ud800"}', "\ud800"),
        (b'{"number": NaN}', "nan"),
        (b'{"number": 1e400}', "inf"),
        (b'{"number": "%s"}' % (b"x" * 200), "x" * 200),
        (b'{"number": "%s"}' % (b"x" * 10**6), "x" * 200 + "…"),
        (b'{"number": [1, 2]}', None),
    ],
)
async def test_a_wrong_value_is_named_where_it_is_short(content: bytes, value: object) -> None:
    (problem,) = (await post(content)).json()["detail"]
    assert problem["value"] == value
    assert problem["message"]
