"""What is retried, and what an error says."""

import httpx
import pytest
import stamina

from shared.errors import HttpFailed
from shared.http import HttpClient


@pytest.fixture(autouse=True)
def _no_waits():
    with stamina.set_testing(True, attempts=3):
        yield


def answering(*answers):
    """A client whose server gives these answers in turn, and the requests it saw."""
    seen: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        answer = answers[min(len(seen), len(answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return HttpClient(token="t0k", transport=httpx.MockTransport(handle)), seen


async def test_json_goes_out_and_comes_back():
    client, seen = answering(httpx.Response(200, json={"answer": 42}))
    async with client:
        assert await client.post("http://a/v1", {"question": 6}) == {"answer": 42}
    assert seen[0].headers["authorization"] == "Bearer t0k"
    assert seen[0].read() == b'{"question":6}'


async def test_other_answers_are_bytes_or_none():
    client, _ = answering(httpx.Response(200, content=b"\x00\x01"), httpx.Response(204))
    async with client:
        assert await client.get("http://a/raw") == b"\x00\x01"
        assert await client.get("http://a/empty") is None


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[" * 10**6, b"1" * 5000])
async def test_json_that_is_none_is_an_error(body: bytes) -> None:
    kind = {"content-type": "application/json"}
    client, _ = answering(httpx.Response(200, content=body, headers=kind))
    async with client:
        with pytest.raises(HttpFailed, match="GET http://a/v1: 200: no JSON"):
            await client.get("http://a/v1")


async def test_an_answer_that_cannot_be_unpacked_is_an_error() -> None:
    def handle(_: httpx.Request) -> httpx.Response:
        kind = {"content-encoding": "gzip"}
        return httpx.Response(200, stream=httpx.ByteStream(b"no gzip"), headers=kind)

    client = HttpClient(transport=httpx.MockTransport(handle))
    async with client:
        with pytest.raises(HttpFailed, match="DecodingError"):
            await client.get("http://a/v1")


@pytest.mark.parametrize("url", ["http://a:b/v1", "http://[::1/v1"])
async def test_an_address_that_is_none_is_an_error(url: str) -> None:
    client, _ = answering()
    async with client:
        with pytest.raises(HttpFailed, match="no answer"):
            await client.get(url)


async def test_an_error_of_any_form_is_told() -> None:
    client, _ = answering(httpx.Response(409, content=b"[" * 2**16))
    async with client:
        with pytest.raises(HttpFailed, match="GET http://a/v1: 409"):
            await client.get("http://a/v1")


async def test_error_names_method_url_status_and_body():
    client, seen = answering(httpx.Response(409, text="version 3 is in flight"))
    async with client:
        with pytest.raises(HttpFailed) as caught:
            await client.post("http://a/v1/updates", {})
    assert str(caught.value) == "POST http://a/v1/updates: 409: version 3 is in flight"
    assert caught.value.status == 409
    assert len(seen) == 1


async def test_get_is_retried_while_the_server_says_not_now():
    client, seen = answering(httpx.Response(503), httpx.Response(200, json=1))
    async with client:
        assert await client.get("http://a/") == 1
    assert len(seen) == 2


async def test_get_is_retried_within_bounds():
    client, seen = answering(httpx.ReadError("cut"))
    async with client:
        with pytest.raises(HttpFailed, match="GET http://a/: no answer: ReadError: cut"):
            await client.get("http://a/")
    assert len(seen) == 3


async def test_post_is_repeated_only_when_it_was_never_sent():
    client, seen = answering(httpx.ConnectError("refused"), httpx.ReadError("cut"))
    async with client:
        with pytest.raises(HttpFailed, match="ReadError"):
            await client.post("http://a/", {})
    assert len(seen) == 2


async def test_post_that_may_be_repeated_is():
    client, seen = answering(httpx.ReadError("cut"), httpx.Response(200, json=1))
    async with client:
        assert await client.post("http://a/", {}, idempotent=True) == 1
    assert len(seen) == 2
