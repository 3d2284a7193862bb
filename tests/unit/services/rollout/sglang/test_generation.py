"""A server's answers become completions exactly, or are refused."""

import base64
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from services.rollout.engine.requests import Completion, EngineSpec, GroupRequest
from services.rollout.engine.sglang.client import ServerRefused
from services.rollout.engine.sglang.generation import (
    Sequence,
    finish_reason,
    request_body,
    scores_of,
)
from services.rollout.engine.sglang.routes import entry_bits, expert_ids, joined, routes_of
from shared.messages import SamplingParams
from shared.models.deepseek_v4.architecture import Architecture
from shared.routes import (
    TokenRoutes,
    first_selecting_token,
    indexed_layers,
    pack_routes,
    unpack_bits,
    unpack_routes,
)

ARCH = Architecture.load(Path("assets/tiny-dsv4"))
SPEC = EngineSpec(ARCH, 8, 64, False, 1, record_experts=True, record_entries=True)


def answer(ids: list[int], *, version: str = "3", kind: str = "length") -> dict[str, object]:
    return {
        "output_ids": ids,
        "meta_info": {
            "finish_reason": {"type": kind} | ({"matched": ids[-1]} if kind == "stop" else {}),
            "output_token_logprobs": [[-0.5 - i, token, None] for i, token in enumerate(ids)],
            "weight_versions": [{"version": version, "start": 0, "end": len(ids)}],
        },
    }


def took(
    one: Sequence,
    found: dict[str, object],
    *,
    most: int = 9,
    stops: tuple[int, ...] = (1,),
    version: int = 3,
) -> int:
    asking = {"max_new_tokens": most, "stop_token_ids": list(stops)}
    return one.extend(found, asking, policy_version=version, vocab_size=ARCH.vocab_size)


def request(**changes: object) -> GroupRequest:
    sampling = SamplingParams(max_response_tokens=10, stop_token_ids=[1], top_k=0, top_p=0.9)
    fields = {"request_id": "r", "samples": [0, 3], "sampling": sampling, "seed": 5}
    return GroupRequest(prompt_token_ids=np.array([5, 6, 7], np.int32), **(fields | changes))  # type: ignore[arg-type]


def test_calls_add_up_to_one_completion_with_exact_spans() -> None:
    one = Sequence(0)
    took(one, answer([4, 5], kind="abort"), version=3)
    took(one, answer([6], version="4", kind="abort"), version=4)
    took(one, answer([], version="4", kind="abort"), version=4)
    took(one, answer([1], version="4", kind="stop"), version=4)
    completion = one.completion()
    assert completion.token_ids.tolist() == [4, 5, 6, 1]
    assert completion.version_spans == [(3, 2), (4, 2)]
    assert completion.finish_reason == "stop"
    np.testing.assert_allclose(completion.logprobs, [-0.5, -1.5, -0.5, -0.5])


def test_a_partial_completion_goes_on_from_its_tokens() -> None:
    begun = Completion(np.array([8, 9], np.int32), np.zeros(2, np.float32), [(2, 2)], "abort")
    sequences = [Sequence.of(0, begun), Sequence.of(3, None)]
    body = request_body(request(), sequences, call_id="r/1", spec=SPEC)
    assert body["input_ids"] == [[5, 6, 7, 8, 9], [5, 6, 7]]
    assert [one["max_new_tokens"] for one in body["sampling_params"]] == [8, 10]
    assert body["sampling_params"][0]["top_k"] == -1  # every token, in the server's words
    assert (
        body["sampling_params"][0]["sampling_seed"] != body["sampling_params"][1]["sampling_seed"]
    )
    assert not body["rid"][0].startswith(body["rid"][1])


def test_all_sampling_parameters_reach_the_server() -> None:
    sampling = SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        frequency_penalty=0.2,
        presence_penalty=-0.3,
        repetition_penalty=1.1,
        max_response_tokens=4,
        stop_token_ids=[1, 2],
    )
    asked = replace(request(), sampling=sampling)
    body = request_body(asked, [Sequence(0)], call_id="r/1", spec=SPEC)
    found = dict(body["sampling_params"][0])
    assert 0 <= found.pop("sampling_seed") < 2**31
    assert found.pop("max_new_tokens") == 4
    assert found.pop("ignore_eos") is False
    assert found == sampling.model_dump(exclude={"max_response_tokens"})


def test_without_stop_tokens_the_servers_own_end_no_sample() -> None:
    asked = replace(request(), sampling=SamplingParams(max_response_tokens=4))
    body = request_body(asked, [Sequence(0)], call_id="r/1", spec=SPEC)
    assert body["sampling_params"][0]["ignore_eos"] is True


def test_the_context_bounds_what_is_asked_for() -> None:
    narrow = replace(SPEC, context_length=8)
    body = request_body(request(), [Sequence(0)], call_id="r/1", spec=narrow)
    assert body["sampling_params"][0]["max_new_tokens"] == 5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight_versions": [{"version": "2"}]}, "tokens are of version"),
        ({"weight_versions": [{"version": "3"}, {"version": "4"}]}, "tokens are of version"),
        ({"output_token_logprobs": [[-1.0, 4, None]]}, "2 tokens came with 1 log-prob"),
        ({"output_token_logprobs": [[-1.0, 4, None], [-1.0, 9, None]]}, "log-prob"),
        ({"finish_reason": {"type": "weather"}}, "weather"),
        ({"finish_reason": None}, "unknown"),
        ({"finish_reason": "length"}, "unknown"),
        ({"output_token_logprobs": [[-1.0, 4, None], [0.5, 5, None]]}, "0.5 is none"),
        ({"output_token_logprobs": [[-1.0, 4, None], ["-1", 5, None]]}, "-1 is none"),
        ({"output_token_logprobs": [[-1.0], 5]}, "2 tokens came with 2 log-prob"),
        ({"finish_reason": {"type": "stop", "matched": "NaN happened"}}, "NaN happened"),
        ({"finish_reason": {"type": "stop"}}, "unknown"),
        ({"finish_reason": {"type": "stop", "matched": 1}}, r"a stop after \[4, 5\]"),
        ({"finish_reason": {"type": "length"}}, "2 tokens came, asked were 9"),
    ],
)
def test_an_answer_that_contradicts_itself_is_refused(
    change: dict[str, object], words: str
) -> None:
    bad = answer([4, 5], kind="abort")
    bad["meta_info"] |= change  # type: ignore[operator]
    one = Sequence(0)
    with pytest.raises(ServerRefused, match=words):
        took(one, bad)
    assert (one.token_ids, one.spans) == ([], [])


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([4, ARCH.vocab_size], f"{ARCH.vocab_size} is outside the vocabulary"),
        ([4, -1], "-1 is outside the vocabulary"),
        ([4, 5.5], "5.5 is outside the vocabulary"),
        ([4, 5, 6, 7], "4 tokens came, asked were 3"),
        ([], "0 tokens came, asked were 3"),
        ([4, 5], "2 tokens came, asked were 3"),
    ],
)
def test_tokens_that_cannot_be_are_refused(ids: list[int], words: str) -> None:
    with pytest.raises(ServerRefused, match=words):
        took(Sequence(0), answer(ids), most=3)


def test_an_answer_without_its_parts_is_refused() -> None:
    for part in ("output_ids", "meta_info"):
        bad = answer([4, 5])
        del bad[part]
        with pytest.raises(ServerRefused, match="an answer without tokens"):
            took(Sequence(0), bad)
    bad = answer([4, 5])
    del bad["meta_info"]["finish_reason"]  # type: ignore[attr-defined]
    with pytest.raises(ServerRefused, match="finish reason None is unknown"):
        took(Sequence(0), bad)


def test_the_servers_own_end_of_text_is_no_end_where_nobody_asked_for_it() -> None:
    one = Sequence(0)
    assert took(one, answer([4, 2], kind="stop"), stops=(1,)) == 2
    assert one.finish_reason == "abort"  # so that it goes on
    assert took(one, answer([5, 2], kind="stop"), most=2, stops=(1,)) == 2
    assert (one.token_ids, one.finish_reason) == ([4, 2, 5, 2], "length")


def test_null_is_a_logprob_that_is_not_finite() -> None:
    bad = answer([4])
    bad["meta_info"]["output_token_logprobs"] = [[None, 4, None]]  # type: ignore[index]
    one = Sequence(0)
    took(one, bad, most=1)
    assert np.isnan(one.logprobs[0])


def test_reasons_to_end_are_mapped_and_others_refused() -> None:
    said = [{"type": "stop", "matched": 1}, {"type": "length"}, {"type": "abort"}]
    assert [finish_reason(one, [1]) for one in said] == ["stop", "length", "abort"]


def test_scores_are_of_the_tokens_that_were_asked_for() -> None:
    found = {"meta_info": {"input_token_logprobs": [[None, 5, None], [-1.5, 6, None]]}}
    np.testing.assert_allclose(scores_of(found, [5, 6], vocab_size=100), [-1.5])
    with pytest.raises(ServerRefused, match="position 1 of 2 is of token 6, asked was token 7"):
        scores_of(found, [5, 7], vocab_size=100)
    with pytest.raises(ServerRefused, match="2 scores came for 3 tokens"):
        scores_of(found, [5, 6, 7], vocab_size=100)


def test_the_last_token_of_the_vocabulary_comes_back_as_zero() -> None:
    found = {"meta_info": {"input_token_logprobs": [[None, 0, None], [-1.5, 0, None]]}}
    np.testing.assert_allclose(scores_of(found, [99, 99], vocab_size=100), [-1.5])
    with pytest.raises(ServerRefused, match="position 1 of 2 is of token 0, asked was token 98"):
        scores_of(found, [99, 98], vocab_size=100)


def routed(ids: np.ndarray) -> dict[str, object]:
    return {"routed_experts": base64.b64encode(ids.astype("<i4").tobytes()).decode()}


def test_hash_layers_are_read_from_the_table_and_take_one_byte() -> None:
    tokens = [5, 6, 7]
    ids = np.ones((2, ARCH.num_hidden_layers, ARCH.num_experts_per_tok), np.int32)
    ids[:, 0] = 0  # as the server leaves them
    table = np.arange(ARCH.vocab_size)[:, None].repeat(ARCH.num_experts_per_tok, 1) % 8
    found = expert_ids(routed(ids), tokens, ARCH, {0: table})
    assert found.dtype == np.uint8
    assert found[:, 0, 0].tolist() == [5, 6]
    assert (found[:, 1:] == 1).all()


def test_wrong_expert_ids_are_refused_with_value_and_bound() -> None:
    shape = (2, ARCH.num_hidden_layers, ARCH.num_experts_per_tok)
    with pytest.raises(ServerRefused, match="expert id 99 is not below 8"):
        expert_ids(routed(np.full(shape, 99)), [5, 6, 7], ARCH, {})
    with pytest.raises(ServerRefused, match="16 expert ids came for"):
        expert_ids(routed(np.zeros(shape)), [5, 6, 7, 8], ARCH, {})
    with pytest.raises(ServerRefused, match="--enable-return-routed-experts"):
        expert_ids({}, [5, 6, 7], ARCH, {})


NUM_TOKENS = 26  # one more than the inputs that have picks


def picks(num_inputs: int) -> np.ndarray:
    """The newest entries that each input sees, -1 where there are fewer: [T, indexed layers, k]."""
    k = ARCH.index_topk
    newest = (np.arange(num_inputs) + 1) // 4 - 1
    one = np.maximum(newest[:, None] - np.arange(k), -1)
    return one[:, None].repeat(len(indexed_layers(ARCH)), 1)


def picked(ids: np.ndarray) -> dict[str, object]:
    return {"indexer_topk": base64.b64encode(ids.astype("<i4").tobytes()).decode()}


def test_picks_become_a_bit_each_from_the_first_token_that_selects() -> None:
    ids = picks(NUM_TOKENS - 1)
    bits = entry_bits(picked(ids), list(range(NUM_TOKENS)), ARCH)
    first = first_selecting_token(ARCH)
    assert 0 < first < NUM_TOKENS - 1
    kept = unpack_bits(bits, 6)
    assert not kept[:first].any()
    for token in range(first, NUM_TOKENS - 1):
        for at in range(len(indexed_layers(ARCH))):
            assert set(np.flatnonzero(kept[token, at])) == set(ids[token, at])
    packed = pack_routes(TokenRoutes(None, bits))
    again = unpack_routes(packed, ARCH, NUM_TOKENS - 1, routing=False, indexer=True, of="r")
    assert (again.entry_bits == bits).all()


def test_tokens_of_an_earlier_call_keep_the_choices_they_were_sampled_with() -> None:
    tokens = list(range(NUM_TOKENS))
    experts = np.ones((NUM_TOKENS - 1, ARCH.num_hidden_layers, ARCH.num_experts_per_tok), np.int32)
    whole = routes_of(picked(picks(NUM_TOKENS - 1)) | routed(experts), tokens, SPEC, {})
    cut = 18
    earlier = picks(cut - 1)
    earlier[-1] = earlier[-1, :, :1] - 1 - np.arange(ARCH.index_topk)  # others than later
    begun = routes_of(picked(earlier) | routed(2 * experts[: cut - 1]), tokens[:cut], SPEC, {})
    found = joined(begun, whole)
    assert found.expert_ids is not None
    assert found.entry_bits is not None
    assert (found.expert_ids[: cut - 1] == 2).all()
    assert (found.expert_ids[cut - 1 :] == 1).all()
    kept = unpack_bits(found.entry_bits, 6)
    assert set(np.flatnonzero(kept[cut - 2, 0])) == set(earlier[-1, 0])
    assert whole.entry_bits is not None
    assert (found.entry_bits[cut - 1 :] == whole.entry_bits[cut - 1 :]).all()


@pytest.mark.parametrize("bad", [-1, 6, "twice"])
def test_picks_that_cannot_be_are_refused_with_the_token(bad: int | str) -> None:
    ids = picks(NUM_TOKENS - 1)
    ids[20, 1, 0] = ids[20, 1, 1] if bad == "twice" else bad
    with pytest.raises(ServerRefused, match=r"token 20: picks .* 3 different ones of its 5"):
        entry_bits(picked(ids), list(range(NUM_TOKENS)), ARCH)
    with pytest.raises(ServerRefused, match="150 indexer picks came for"):
        entry_bits(picked(ids), [1, 2, 3], ARCH)
    with pytest.raises(ServerRefused, match="--enable-return-indexer-topk"):
        entry_bits({}, [1, 2, 3], ARCH)
