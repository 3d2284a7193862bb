"""A small dense model on a real server, in this process: what the contract of engines asks for.

The engine of a job serves DeepSeek-V4 alone; gate, generation, transaction and server are the same
for any architecture. Truth is transformers.
"""

import asyncio
import itertools
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from services.rollout.engine.requests import Completion, GroupRequest
from services.rollout.engine.sglang.checkpoint import write_folder
from services.rollout.engine.sglang.engine import SGLangEngine
from services.rollout.engine.sglang.versions import Good, Versions
from services.rollout.engine.weights import read_canonical
from shared.errors import RemoteError, WeightsCorrupt
from shared.weights.effective import effective_checksum, value_digest
from shared.weights.manifest import MANIFEST_FILE, Manifest
from shared.weights.protocol import CommitResult, CommitUpdate

CONFIG = transformers.LlamaConfig(
    architectures=["LlamaForCausalLM"],
    dtype="float32",
    vocab_size=320,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.2,
)
TOLERANCE = 1e-4


class DenseModel:
    vocab_size = CONFIG.vocab_size
    vector = "model.layers.1.input_layernorm.weight"

    def variant(self, seed: int) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in _model(seed).state_dict().items()}

    def logprobs(self, stored: Mapping[str, Tensor], token_ids: list[int]) -> np.ndarray:
        """FP32 of tokens 1.. ."""
        model = _model(0)
        with torch.no_grad():
            outputs = torch.func.functional_call(model, dict(stored), (torch.tensor([token_ids]),))
            logprobs = outputs.logits[0, :-1].log_softmax(-1)
        found: np.ndarray = logprobs.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].numpy()
        return found

    def assert_logprobs(
        self, found: np.ndarray, stored: Mapping[str, Tensor], token_ids: list[int], span: slice
    ) -> None:
        expected = self.logprobs(stored, token_ids)[span]
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@cache
def _model(seed: int) -> transformers.LlamaForCausalLM:
    torch.manual_seed(seed)
    model: transformers.LlamaForCausalLM = transformers.LlamaForCausalLM(CONFIG).float().eval()
    return model


class DenseVersions(Versions):
    """Any tensors of the model's names and shapes."""

    async def _prepare(self, manifest: Manifest, staged: Path) -> Good:
        stored, known = read_canonical(manifest, staged), _model(0).state_dict()
        for name, tensor in stored.items():
            if known[name].shape != tensor.shape:
                raise WeightsCorrupt(f"{name} is {list(tensor.shape)}")
        folder = self._folder / f"v{manifest.policy_version:08d}"
        shutil.rmtree(folder, ignore_errors=True)
        write_folder(folder, stored, CONFIG.to_dict())
        digests = {name: value_digest(tensor.numpy()) for name, tensor in stored.items()}
        checksum = asyncio.create_task(asyncio.to_thread(effective_checksum, digests))
        return Good(manifest.policy_version, folder, checksum, {})


@dataclass
class Load:
    """As the engine of a service tells it."""

    engine: SGLangEngine

    @property
    def running(self) -> int:
        return self.engine.num_running

    @property
    def waiting(self) -> int:
        return self.engine.num_waiting


class DenseEngine:
    """Answers as `Engine` does, without a child in between."""

    def __init__(self, engine: SGLangEngine, versions: Versions) -> None:
        self.versions = versions
        self.load = Load(engine)
        self._engine = engine
        self._numbers = itertools.count()

    @property
    def policy_version(self) -> int | None:
        return self._engine.policy_version

    async def generate(self, request: GroupRequest, *, timeout_s: float) -> list[Completion]:
        task = asyncio.create_task(self._engine.generate(request))
        try:
            return await asyncio.wait_for(asyncio.shield(task), timeout_s)
        except asyncio.CancelledError:
            await self._engine.abort(request.request_id)
            raise

    async def score(
        self,
        sequences: list[list[int]],
        *,
        temperature: float,
        policy_version: int | None,
        timeout_s: float,
    ) -> dict[str, Any]:
        version, scores = await self._engine.score(sequences, temperature, policy_version)
        return {"policy_version": version, "logprobs": [one.tobytes() for one in scores]}

    async def activate(
        self, folder: Path, commit: CommitUpdate, *, timeout_s: float
    ) -> CommitResult:
        manifest = Manifest.model_validate_json((folder / MANIFEST_FILE).read_bytes())
        asked_at_s = time.monotonic()
        try:
            fields = await self.versions.activate(manifest, folder, commit, asked_at_s=asked_at_s)
        except WeightsCorrupt as err:
            raise RemoteError("WeightsCorrupt", str(err)) from err
        return CommitResult.model_validate(fields)

    async def pause(self) -> None:
        await self._engine.pause()

    async def go_on(self) -> None:
        self._engine.go_on()

    def new_request_id(self) -> str:
        return f"request-{next(self._numbers)}"
