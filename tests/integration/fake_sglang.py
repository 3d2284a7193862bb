"""A small server that answers like SGLang and, when told to, succeeds in words and fails in deed.

It serves reference log-probabilities of whichever folder it loaded last. Each fault is one that was
seen on real servers: see docs/sglang.md. As with them, what is post-processed lies shuffled until
it is restored: tensors that are loaded into it, or a second post-processing, spoil the experts.
"""

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse

from services.rollout.engine.sglang.checkpoint import EXTERNAL_CLASS, read_folder
from services.rollout.engine.sglang.spec import SINKS_DEPARTURE
from tests.engine_contract import reference_logprobs
from tests.integration.sglang_parts import GROUPS, Group, Serializer, unflattened
from tests.served import served

Fault = Literal[
    "none",
    "ignores_weights",  # success, and the old weights stay
    "keeps_stale_copy",  # success, equal checksums, and a derived copy of the old weights serves
    "keeps_stale_sinks",  # likewise, until the server is told to derive it anew
    "says_no",  # 200 with success false
    "refuses",  # 400, with half of the tensors taken
    "hangs",  # no answer to an update
    "hangs_in_probe",  # success, and no score of what was loaded ever comes
    "drops_connection",
    "labels_nothing",  # success, and tokens go on carrying the old label
    "forgets_post_processing",  # loads; post-processing answers success and does nothing
    "garbles_tables",  # success, and integer tables are read from odd bytes
    "asserts",  # 500 at every load, as with packed output projections: also on the way back
    "dies",  # and whoever brings it back knows no version
    "keeps_prefixes",  # the flush answers success and drops nothing
    "keeps_prefixes_secretly",  # likewise, and no answer tells what came from the cache
]

PAUSE_LOOKS_S = 1.0  # as in SGLang 0.5.17


@dataclass
class FakeServer:
    """`faults` says what goes wrong at each update in turn; then nothing does."""

    dialect: Literal["session", "post_process", "bare"] = "session"
    faults: list[Fault] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    url: str = ""
    label: str = "default"
    stale: str = ".attn."  # tensors whose copies stay behind
    version: str = "0.5.23"
    architecture: str = EXTERNAL_CLASS
    page_size: int = 1
    ranks: int = 1  # of tensor parallelism
    tells_sinks: bool = False  # as our class of model does
    has_ranks_apart: bool = False  # each attends to sequences of its own
    chunk: int = 0  # scores behind so many tokens are of the token before
    session: Literal["none", "open", "loaded"] = "none"
    is_sick: bool = False
    breaks_next_health: bool = False  # the connection, not the server
    breaks_next_stream: bool = False  # in the middle of every sequence
    keeps_rebuilt_prefixes: bool = False  # those of a state that was stale
    holds_next_score: bool = False  # until it is cut short
    cuts_early: bool = False  # calls that its scheduler does not have yet
    cuts_queued: bool = False  # calls that wait in its scheduler's queue
    hangs_in_abort: bool = False
    holding: asyncio.Event = field(default_factory=asyncio.Event)
    is_next_late: bool = False  # the next call reaches the server when it is paused
    arrives: asyncio.Event = field(default_factory=asyncio.Event)  # cleared: calls are under way
    failing: int = -1  # a prompt with this token is answered `failure`, or aborted so in a stream
    failure: int = 500
    is_unwell: bool = False  # says its health
    own_end: int | None = None  # a token that ends a sequence after two, asked for or not
    is_deaf: bool = False  # no abort ends what runs
    forbidden: int = -1  # a prompt with this token is answered 400
    endless: frozenset[int] = frozenset()  # samples that run until they are aborted
    running: int = 0  # of the endless ones
    num_waits: int = 0  # for what ran when it was paused
    aborted: list[str] = field(default_factory=list)
    joined: list[str] = field(default_factory=list)  # addresses of process groups
    started_from: list[str] = field(default_factory=list)
    asked: list[list[list[int]]] = field(default_factory=list)  # input_ids of each stream
    _weights: dict[str, Any] = field(default_factory=dict)
    _whole: dict[str, Any] = field(default_factory=dict)  # the same without stale copies
    _cached: dict[tuple[int, ...], dict[str, Any]] = field(default_factory=dict)  # prefix: weights
    _fault: Fault = "none"
    _pending: dict[str, Any] | None = None
    _is_shuffled: bool = True
    _is_spoiled: bool = False  # by what came between two restorings
    _goes_on: asyncio.Event = field(default_factory=asyncio.Event)  # cleared by a pause
    _paused: asyncio.Event = field(default_factory=asyncio.Event)
    _known: set[str] = field(default_factory=set)  # sequences that an abort finds
    _cut: set[str] = field(default_factory=set)
    _cut_all: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._goes_on.set()
        self.arrives.set()

    @property
    def is_going_on(self) -> bool:
        return self._goes_on.is_set()

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.middleware("http")
        async def note(request: Any, call_next: Any) -> Any:
            self.calls.append(request.url.path)
            return await call_next(request)

        app.get("/server_info")(self._info)
        app.get("/model_info")(self._model)
        app.get("/health")(self._ok)
        app.get("/health_generate")(self._health)
        app.post("/generate")(self._generate)
        app.post("/pause_generation")(self._pause)
        app.post("/continue_generation")(self._go_on)
        app.post("/abort_request")(self._abort)
        app.post("/flush_cache")(self._flush)
        app.post("/update_weights_from_disk")(self._update)
        app.post("/update_weights_from_tensor")(self._update_from_handles)
        app.post("/update_weights_from_distributed")(self._update_from_group)
        app.post("/init_weights_update_group")(self._join)
        app.post("/destroy_weights_update_group")(self._leave)
        app.post("/update_weight_version")(self._label)
        app.post("/get_weights_by_name")(self._departure)
        if self.dialect == "session":
            app.post("/begin_weight_update")(self._begin)
            app.post("/end_weight_update")(self._end)
        if self.dialect == "post_process":
            app.post("/post_process_weights")(self._post_process)
        return app

    def forget(self) -> None:
        """What a restart by somebody else leaves: other weights, the first label."""
        self._weights, self._whole, self.label = {}, {}, "default"
        self.session, self._pending = "none", None

    def start_from(self, folder: Path) -> None:
        """What a fresh process of ours has."""
        self.forget()
        self._weights = self._whole = read_folder(folder)
        self._cached.clear()
        self._goes_on.set()
        self._fault = "none"
        self.started_from.append(folder.name)

    async def _ok(self) -> dict[str, Any]:
        return {"success": True, "message": ""}

    async def _health(self) -> Any:
        if self.is_sick:
            return JSONResponse({"detail": "the scheduler does not answer"}, 503)
        if self.breaks_next_health:
            self.breaks_next_health = False
            return StreamingResponse(_broken(), headers={"content-length": "2"})
        if self.is_unwell:
            return JSONResponse({}, 503)
        return await self._ok()

    async def _pause(self) -> dict[str, Any]:
        """It cuts short what runs, and looks only a second later whether that has ended."""
        self._goes_on.clear()
        self._paused.set()
        self._cut_all.set()
        if self.running:
            self.num_waits += 1
            await asyncio.sleep(PAUSE_LOOKS_S)
        return await self._ok()

    async def _go_on(self) -> dict[str, Any]:
        self._goes_on.set()
        self._paused.clear()
        return await self._ok()

    async def _info(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "tp_size": self.ranks,
            "dp_size": self.ranks if self.has_ranks_apart else 1,
            "enable_dp_attention": self.has_ranks_apart,
            "page_size": self.page_size,
        }

    async def _model(self) -> dict[str, Any]:
        return {"weight_version": self.label, "architectures": [self.architecture]}

    async def _flush(self) -> dict[str, Any]:
        if not self._fault.startswith("keeps_prefixes"):
            self._cached.clear()
        return await self._ok()

    async def _label(self, body: dict[str, Any]) -> dict[str, Any]:
        if self._fault != "labels_nothing":
            self.label = body["new_version"]
        return await self._ok()

    async def _departure(self, body: dict[str, Any]) -> Any:
        """Of what attends from what the weights are; of any other name there is nothing."""
        if not self.tells_sinks or body["name"] != SINKS_DEPARTURE:
            return JSONResponse({"error": {"message": "Get parameter by name failed"}}, 400)
        sinks = [name for name in self._whole if name.endswith("attn_sink")]
        pairs = [self._weights[name] - self._whole[name] for name in sinks]
        return [max([0.0, *(float(one.abs().max()) for one in pairs)])]

    async def _update(self, body: dict[str, Any]) -> Any:
        if self.dialect == "session":
            self._restore()
        answer = await self._load(read_folder(Path(body["model_path"])))
        self._finish()
        return answer

    async def _update_from_handles(self, body: dict[str, Any]) -> Any:
        """Each rank takes the handle at its own place; one that finds none dies of it."""
        handles = body["serialized_named_tensors"]
        if len(handles) < self.ranks:
            self.forget()
            raise ConnectionResetError
        for handle in handles:
            shared = Serializer.deserialize(base64.b64decode(handle))
            tensors = unflattened(shared["flattened_tensor"], shared["metadata"])
        return await self._load_in_session(tensors)

    async def _join(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body["world_size"] == self.ranks + 1
        self.joined.append(f"{body['master_address']}:{body['master_port']}")
        GROUPS.setdefault(body["group_name"], Group()).is_joined.set()
        return await self._ok()

    async def _leave(self, body: dict[str, Any]) -> dict[str, Any]:
        del GROUPS[body["group_name"]]
        return await self._ok()

    async def _update_from_group(self, body: dict[str, Any]) -> Any:
        sent = GROUPS[body["group_name"]].sent
        flat = await asyncio.to_thread(sent.get, timeout=20)
        described = list(zip(body["names"], body["dtypes"], body["shapes"], strict=True))
        return await self._load_in_session(unflattened(flat, described))

    async def _load_in_session(self, tensors: dict[str, Any]) -> Any:
        if self.dialect == "session" and self.session == "none":
            return JSONResponse({"success": False, "message": "no session is open"}, 400)
        answer = await self._load(tensors)
        self.session = "loaded" if self.session == "open" else self.session
        if self.dialect == "bare":
            self._finish()
        return answer

    async def _load(self, tensors: dict[str, Any]) -> Any:
        """What happens to them at this time; a server that says no may have taken half of them."""
        self._fault = self.faults.pop(0) if self.faults else "none"
        if self._fault == "says_no":
            return {"success": False, "message": "Failed to load layers.0.attn.wkv"}
        if self._fault == "hangs":
            await asyncio.sleep(3600)
        if self._fault == "dies":
            self.forget()
        if self._fault in ("drops_connection", "dies"):
            raise ConnectionResetError
        if self._fault == "asserts":
            return JSONResponse({"detail": "AssertionError"}, 500)
        names = list(tensors)
        is_half = self._fault == "refuses"
        self._take({name: tensors[name] for name in names[: len(names) // (1 + is_half)]})
        if is_half:
            return JSONResponse({"success": False, "message": "partially updated"}, 400)
        return await self._ok()

    async def _begin(self) -> dict[str, Any]:
        if self.session != "none":
            return {"success": False, "message": "a weight-update session is already open"}
        self.session = "open"
        self._restore()
        return await self._ok()

    async def _end(self) -> dict[str, Any]:
        if self.session == "none":
            return {"success": False, "message": "no weight-update session is open"}
        if self.session == "open":
            self._derive_anew()
        self.session = "none"
        self._finish()
        return await self._ok()

    async def _post_process(self, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("post_load_weights"):
            self._derive_anew()
        if body.get("restore_weights_before_load"):
            self._restore()
        if body.get("post_process_quantization"):
            self._finish()
        return await self._ok()

    def _restore(self) -> None:
        self._is_shuffled = self._is_spoiled = False

    def _take(self, tensors: dict[str, Any]) -> None:
        """What `load_weights` does."""
        self._is_spoiled |= self._is_shuffled and self.dialect != "bare"
        self._pending = (self._pending or self._weights) | tensors

    def _derive_anew(self) -> None:
        if self._fault == "keeps_stale_sinks":
            self._weights = self._whole
            if self.keeps_rebuilt_prefixes:
                self._fault = "keeps_prefixes"

    def _finish(self) -> None:
        """What post-processing does."""
        self._is_spoiled |= self._is_shuffled and self.dialect != "bare"
        self._is_shuffled = True
        if self._pending is not None and self._fault not in (
            "ignores_weights",
            "forgets_post_processing",
        ):
            old, self._weights = self._weights, self._pending
            self._whole = self._weights
            if self._fault.startswith("keeps_stale") and old:
                stale = {name: old[name] for name in old if self.stale in name}
                self._weights = self._weights | stale
            if self._fault == "garbles_tables":
                tables = {name for name in self._weights if name.endswith("tid2eid")}
                self._weights |= {name: self._weights[name].roll(1, 0) for name in tables}
        self._pending = None
        if self._is_spoiled:
            experts = {name: one for name, one in self._weights.items() if "experts.0.w1.w" in name}
            self._weights = self._weights | {name: one.T for name, one in experts.items()}

    async def _abort(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.hangs_in_abort:
            await asyncio.sleep(3600)
        if body.get("abort_all"):
            self._cut |= self._known
            self._cut_all.set()
            return await self._ok()
        self.aborted.append(body["rid"])
        self._cut |= {body["rid"]} & self._known  # of others it says the same, and does nothing
        return await self._ok()

    def _is_cut_short(self, rid: str) -> bool:
        return not self.is_deaf and (rid in self._cut or self._paused.is_set())

    def _aborted(self, body: dict[str, Any]) -> Any:
        """What SGLang 0.5.17 says of a call that was aborted before its scheduler had it."""
        error: dict[str, Any] = {"message": "Request was aborted"}
        if not body.get("stream"):
            return JSONResponse({"error": error}, 499)
        line = f"data: {json.dumps({'error': error | {'code': 499}})}\n\ndata: [DONE]\n\n"
        return StreamingResponse(iter([line]), media_type="text/event-stream")

    async def _run_until_aborted(self, body: dict[str, Any]) -> Any:
        """One sequence, with a token by then."""
        self.running += 1
        self._known.add(body["rid"][0])
        async with asyncio.timeout(20):
            while not self._is_cut_short(body["rid"][0]):  # noqa: ASYNC110  another request tells
                await asyncio.sleep(0.01)
        self.running -= 1
        if self.cuts_early:
            return self._aborted(body)
        sampling = body["sampling_params"][0] | {"max_new_tokens": 1}
        answer = self._answer(body["input_ids"][0], sampling, body)
        answer["meta_info"]["finish_reason"] = {"type": "abort"}
        if self.cuts_queued:
            answer["meta_info"].pop("routed_experts", None)
        return answer

    async def _until_cut(self, body: dict[str, Any]) -> Any:
        """Scores that an update cut short: none of them."""
        self.holds_next_score = False
        self._cut_all.clear()
        self.holding.set()
        async with asyncio.timeout(20):
            await self._cut_all.wait()
        if self.cuts_early:
            return self._aborted(body)
        meta = {"finish_reason": {"type": "abort", "message": "paused"}}
        return [{"output_ids": [], "meta_info": meta} for _ in body["input_ids"]]

    async def _arrive(self) -> None:
        """A call that comes while the server is paused waits, and no abort knows of it."""
        if self.is_next_late:
            self.is_next_late = False
            self.holding.set()
            await self._paused.wait()
        if not self.arrives.is_set():
            self.holding.set()
            await self.arrives.wait()
        await self._goes_on.wait()

    async def _generate(self, body: dict[str, Any]) -> Any:
        await self._arrive()
        if self._fault == "hangs_in_probe" and body.get("logprob_start_len", -1) >= 0:
            await asyncio.sleep(3600)
        if self.forbidden in body["input_ids"][0:1] or any(
            isinstance(ids, list) and self.forbidden in ids for ids in body["input_ids"]
        ):
            return JSONResponse({"error": {"message": "Input is not allowed"}}, 400)
        if self.failing in body["input_ids"][0:1] or any(
            isinstance(ids, list) and self.failing in ids for ids in body["input_ids"]
        ):
            return self._fail(body)
        if self.holds_next_score and body.get("logprob_start_len", -1) >= 0:
            return await self._until_cut(body)
        if isinstance(body["input_ids"][0], int):
            return self._answer(body["input_ids"], body["sampling_params"], body)
        if self.endless and int(body["rid"][0].rstrip(";").rpartition(".")[2]) in self.endless:
            answer = await self._run_until_aborted(body)
            if self.cuts_early:
                return answer
            if not body.get("stream"):
                return [answer]
            line = f"data: {json.dumps(answer | {'index': 0})}\n\ndata: [DONE]\n\n"
            return StreamingResponse(iter([line]), media_type="text/event-stream")
        if body.get("stream"):
            self.asked.append(body["input_ids"])
            return StreamingResponse(self._stream(body), media_type="text/event-stream")
        return [
            self._answer(ids, sampling, body)
            for ids, sampling in zip(body["input_ids"], body["sampling_params"], strict=True)
        ]

    def _fail(self, body: dict[str, Any]) -> Any:
        words = "Input is too much"
        if not body.get("stream"):
            return JSONResponse({"error": {"message": words}}, self.failure)
        meta = {"type": "abort", "message": words, "status_code": self.failure}
        answer = {"output_ids": [], "meta_info": {"finish_reason": meta}, "index": 0}
        answer["meta_info"]["weight_version"] = self.label  # type: ignore[index]
        line = f"data: {json.dumps(answer)}\n\ndata: [DONE]\n\n"
        return StreamingResponse(iter([line]), media_type="text/event-stream")

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        """Half of every sequence, then the whole, as SGLang does: each answer from its start."""
        pairs = list(zip(body["input_ids"], body["sampling_params"], strict=True))
        for share in (2, 1):
            for index, (ids, sampling) in enumerate(pairs):
                num = sampling["max_new_tokens"] // share
                answer = self._answer(ids, sampling | {"max_new_tokens": num}, body)
                if share == 2:
                    answer["meta_info"]["finish_reason"] = None
                yield f"data: {json.dumps(answer | {'index': index})}\n\n"
            if self.breaks_next_stream:
                self.breaks_next_stream = False
                raise ConnectionResetError
        yield "data: [DONE]\n\n"

    def _answer(
        self, ids: list[int], sampling: dict[str, Any], body: dict[str, Any]
    ) -> dict[str, Any]:
        new = [7] * sampling["max_new_tokens"]
        if ends := self.own_end is not None and len(new) > 2 and not sampling["ignore_eos"]:
            new = [7, self.own_end]
        start = int(body.get("logprob_start_len", -1))
        prefix = self._longest_cached(ids, len(ids) - 1 if start < 0 else start)
        scores = self._scores(ids + new, prefix) if self._weights else [0.0] * (len(ids + new) - 1)
        meta: dict[str, Any] = {
            "finish_reason": {"type": "stop", "matched": self.own_end}
            if ends
            else {"type": "length", "length": len(new)},
            "weight_version": self.label,
            "weight_versions": [{"version": self.label, "start": 0, "end": len(new)}],
            "cached_tokens": 0 if self._fault == "keeps_prefixes_secretly" else len(prefix),
        }
        if body.get("return_logprob"):
            at = len(ids) - 1
            meta["output_token_logprobs"] = [
                [score, token, None] for score, token in zip(scores[at:], new, strict=True)
            ]
        if body.get("return_routed_experts"):
            meta["routed_experts"] = self._experts(len(ids + new) - 1)
        if start >= 0:
            last = int(self._weights["head.weight"].shape[0]) - 1 if self._weights else -1
            told = [0 if token == last else token for token in ids]  # as SGLang does
            told = told[: self.chunk] + told[self.chunk - 1 : -1] if self.chunk else told
            pairs = list(zip([None, *scores[: len(ids) - 1]], told, strict=True))[start:]
            meta["input_token_logprobs"] = [[score, token, None] for score, token in pairs]
            meta["input_token_logprobs"][0][0] = None
        return {"output_ids": new, "meta_info": meta}

    def _experts(self, num_tokens: int) -> str:
        """The first experts at every layer with a gate; of hash layers zeros, as SGLang tells."""
        tables = {name for name in self._weights if name.endswith("tid2eid")}
        layers = {name for name in self._weights if name.endswith("ffn.gate.weight")}
        layers = {name for name in layers if name.startswith("layers.")}
        (width,) = {self._weights[name].shape[1] for name in tables}
        ids = np.tile(np.arange(width, dtype="<i4"), (num_tokens, len(layers), 1))
        ids[:, [int(name.split(".")[1]) for name in tables]] = 0
        return base64.b64encode(ids.tobytes()).decode()

    def _longest_cached(self, ids: list[int], most: int) -> tuple[int, ...]:
        """What of the beginning of `ids` was computed before, up to `most` tokens in whole pages.

        Scores from the first token on are never taken from a cache, as in SGLang.
        """
        for length in range(most // self.page_size * self.page_size, 0, -self.page_size):
            if (prefix := tuple(ids[:length])) in self._cached:
                return prefix
        return ()

    def _scores(self, ids: list[int], prefix: tuple[int, ...]) -> list[float]:
        """As the weights say that computed the prefix, until the cache is flushed."""
        weights = self._cached.get(prefix, self._weights)
        for length in range(1, len(ids) + 1):
            self._cached.setdefault(tuple(ids[:length]), weights)
        return [float(x) for x in reference_logprobs(weights, ids)]


async def _broken() -> AsyncIterator[str]:
    raise ConnectionResetError
    yield ""


@contextlib.asynccontextmanager
async def serving(server: FakeServer) -> AsyncIterator[FakeServer]:
    async with served(server.app(), lifespan=False, force=True) as url:
        server.url = url
        yield server
