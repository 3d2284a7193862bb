import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from services.trainer.prompts import DataChanged, PromptSource, TooLong, draw_seed
from shared.chat import EncodedPrompt
from shared.data import Row
from shared.job import Job
from shared.messages import PromptGroup
from shared.tokenizer import stop_token_ids


def make_job(**sections: object) -> Job:
    return Job.model_validate(
        {
            "name": "test",
            "steps": 4,
            "seed": 11,
            "model": {"rollout_checkpoint": "/nowhere"},
            "data": {"path": "/nowhere"},
            "sampling": {"context_length": 20, "max_response_tokens": 8},
            **sections,
        }
    )


def source(texts: list[str], **sections: object) -> PromptSource:
    rows = [Row(i, text, text, "1", f"f, line {i + 1}") for i, text in enumerate(texts)]
    return PromptSource(
        "j-0000",
        make_job(**sections),
        rows,
        lambda text: EncodedPrompt(text, list(text.encode())),
        lambda text: list(text.encode()),
        [0],
        256,
    )


def test_group_is_a_function_of_job_and_draw() -> None:
    one, other = source(["ab", "cd", "ef"]), source(["ab", "cd", "ef"])
    for draw in (0, 5, 100):
        group = one.group(draw, min_policy_version=2)
        assert isinstance(group, PromptGroup)
        assert group.pack() == other.group(draw, min_policy_version=2).pack()
        assert group.group_id == f"j-0000.g{draw:06d}"


def test_a_drawn_prompt_that_does_not_fit_any_more_is_told_by_row() -> None:
    assert source(["ab"]).drawn(0, min_policy_version=2).draw == 0
    message = r"j-0000\.g000000 was asked, .*\(f, line 1\) has 13 tokens now, 12 fit: data or token"
    with pytest.raises(DataChanged, match=message):
        source(["a" * 13]).drawn(0, min_policy_version=2)


def test_every_epoch_asks_every_prompt_once_in_another_order() -> None:
    prompts = source([f"p{i}" for i in range(50)])
    epochs = [[prompts.row_of(e * 50 + i).index for i in range(50)] for e in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_unshuffled_data_comes_in_file_order() -> None:
    prompts = source(["a", "b", "c"], data={"path": "/nowhere", "shuffle": False})
    assert [prompts.row_of(draw).index for draw in range(5)] == [0, 1, 2, 0, 1]


def test_prompt_that_leaves_no_room_is_too_long() -> None:
    prompts = source(["x" * 12, "x" * 13], data={"path": "/nowhere", "shuffle": False})
    assert isinstance(prompts.group(0, min_policy_version=0), PromptGroup)
    assert prompts.group(1, min_policy_version=0) == TooLong(1, "f, line 2", 13, 12)


def test_seeds_differ_by_draw_and_job_and_stay_exact_in_json() -> None:
    seeds = {draw_seed(seed, draw) for seed in range(20) for draw in range(200)}
    assert len(seeds) == 4000
    assert all(json.loads(json.dumps(float(seed))) == seed for seed in seeds)


def test_probe_takes_the_first_prompts_of_two_tokens_or_more() -> None:
    prompts = source(["a", "bcd", "", "ef", "gh"])
    assert prompts.probe_sequences(2, max_tokens=2) == [[98, 99], [101, 102]]
    assert prompts.probe_sequences(0) == []


def test_probe_stays_within_the_context() -> None:
    assert [len(ids) for ids in source(["x" * 30, "xy"]).probe_sequences(2)] == [20, 2]


@pytest.mark.parametrize(
    ("config", "ids"),
    [({}, ()), ({"eos_token_id": 5}, (5,)), ({"eos_token_id": [5, 6]}, (5, 6))],
)
def test_stop_tokens(config: dict, ids: tuple[int, ...]) -> None:
    assert stop_token_ids(config) == ids


def test_source_is_loaded_from_checkpoint_and_data(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"vocab_size": 9, "eos_token_id": 1}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (tmp_path / "rows.jsonl").write_text('{"problem": "ab", "answer": "7"}\n')
    job = make_job(
        model={"rollout_checkpoint": str(tmp_path)}, data={"path": str(tmp_path / "rows.jsonl")}
    )
    prompts = PromptSource.load("j", job)
    group = prompts.group(0, min_policy_version=0)
    assert isinstance(group, PromptGroup)
    assert group.prompt_token_ids.tolist() == [0, 1]
    assert group.gold == "7"
    assert group.sampling.stop_token_ids == [1, 2]
    assert prompts.vocab_size == 9


def test_a_chat_format_that_the_tokenizer_lacks_is_told_before_the_job_begins(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"problem": "1+1=", "answer": "2"}) + "\n")
    data = {"path": str(path), "prompt_format": "thinking"}
    job = make_job(data=data, model={"rollout_checkpoint": "assets/tiny-dsv4"})
    with pytest.raises(ValueError, match="has no token"):
        PromptSource.load("j-0000", job)
