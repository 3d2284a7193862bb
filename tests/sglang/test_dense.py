"""A small dense model on a real server is restored by our updates, whatever the architecture.

Truth is transformers: after each update the server's log-probabilities are those of a model with
the weights that were sent.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
import transformers

from services.rollout.engine.requests import EngineSpec
from services.rollout.engine.sglang.dialects import dialect_of, loading
from services.rollout.engine.sglang.generation import score_body, scores_of
from services.rollout.engine.sglang.server import Server
from services.rollout.engine.sglang.spec import ServerSpec
from services.rollout.engine.sglang.transports import Disk
from shared.models.deepseek_v4.architecture import Architecture
from tests.engine_contract import CHECKPOINT

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

CONFIG = transformers.LlamaConfig(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.2,
)
TEXTS = [[5, 17, 100, 33, 44, 9, 301, 20], [3, 4, 5, 6, 7]]


def write_model(folder: Path, *, seed: int) -> list[np.ndarray]:
    """Save random weights; returns their log-probabilities of `TEXTS`, tokens 1.. ."""
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(CONFIG).float().eval()
    model.save_pretrained(folder)
    scores = []
    with torch.no_grad():
        for ids in TEXTS:
            logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            scores.append(logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy())
    return scores


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(
    sglang_python: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Server]:
    folder: Path = tmp_path_factory.mktemp("dense")
    write_model(folder / "first", seed=0)
    spec = ServerSpec(
        checkpoint=str(folder / "first"),
        python=sglang_python,
        log_file=str(folder / "server.log"),
        max_total_tokens=2048,
    )
    # Of the architecture the launcher takes nothing here but the context's length.
    engine = EngineSpec(Architecture.load(CHECKPOINT), 8, 256, False, 1, server=spec)
    server = Server(engine, spec, log_file=folder / "server.log")
    try:
        await server.start(folder / "first")
        yield server
    finally:
        await server.stop()


async def test_updates_there_and_back_score_as_transformers_does(
    server: Server, tmp_path: Path
) -> None:
    dialect = dialect_of(await server.client.endpoints())
    for number, seed in enumerate((1, 2, 1)):
        folder = tmp_path / f"{number}"
        expected = write_model(folder, seed=seed)
        await server.client.pause("abort")
        async with loading(server.client, dialect, timeout_s=60):
            await Disk().send(server.client, folder, timeout_s=60)
        await server.client.flush()
        await server.client.go_on()
        answers = await server.client.score(score_body(TEXTS, call_id=f"{number}"), timeout_s=60)
        for answer, ids, scores in zip(answers, TEXTS, expected, strict=True):
            np.testing.assert_allclose(scores_of(answer, ids, vocab_size=320), scores, atol=1e-4)
