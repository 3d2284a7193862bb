import numpy as np
import pytest
import torch

from services.rollout.engine.sampling import Draws, sample, sample_key, token_logprobs, uniforms


def draws(
    num: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int = 0,
) -> Draws:
    keys = np.array([sample_key(seed, 0, i) for i in range(num)], np.uint64)
    return Draws(
        np.full(num, temperature, np.float32),
        np.full(num, top_p, np.float32),
        np.full(num, top_k, np.int64),
        np.full(num, min_p, np.float32),
        uniforms(keys, np.zeros(num, np.int64)),
    )


def test_uniforms_are_the_plain_splitmix64() -> None:
    def plain(key: int, position: int) -> float:
        x = (key + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return ((x ^ (x >> 31)) >> 11) / 2**53

    keys = np.array([0, 1, 2**63, 2**64 - 1, 12345], np.uint64)
    positions = np.array([0, 5, 77, 4096, 10**6])
    expected = [plain(int(k), int(p)) for k, p in zip(keys, positions, strict=True)]
    assert uniforms(keys, positions).tolist() == expected


def test_keys_differ_by_seed_prompt_and_sample() -> None:
    keys = {sample_key(s, j, i) for s in range(-3, 20) for j in range(20) for i in range(20)}
    assert len(keys) == 23 * 20 * 20


def test_uniforms_are_uniform_over_samples_and_positions() -> None:
    keys = np.array([sample_key(3, 0, i) for i in range(500)], np.uint64)
    drawn = np.stack([uniforms(keys, np.full(500, p)) for p in range(40)])
    counts = np.histogram(drawn, 10, (0, 1))[0]
    chi_square = ((counts - 2000) ** 2 / 2000).sum()
    assert chi_square < 33.7  # 9 degrees of freedom, 1e-4
    assert abs(np.corrcoef(drawn[:-1].ravel(), drawn[1:].ravel())[0, 1]) < 0.03


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_tempered_distribution(temperature: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf])
    num = 20_000
    tokens, logprobs = sample(logits.repeat(num, 1), draws(num, temperature=temperature))
    shares = (logits / temperature).softmax(-1).numpy()
    found = np.bincount(tokens, minlength=5) / num
    assert found == pytest.approx(shares, abs=0.015)
    assert logprobs == pytest.approx(np.log(shares[tokens]), abs=1e-6)


def test_top_k_and_top_p_leave_out_the_rest_and_keep_the_logprobs() -> None:
    logits = torch.tensor([0.0, 3.0, 2.0, 1.0]).repeat(4000, 1)
    whole = logits[0].log_softmax(-1)
    tokens, logprobs = sample(logits, draws(4000, top_k=2))
    assert set(tokens.tolist()) == {1, 2}
    assert logprobs == pytest.approx(whole[tokens].numpy())
    assert np.mean(tokens == 1) == pytest.approx(1 / (1 + np.exp(-1)), abs=0.03)
    tokens, _ = sample(logits, draws(4000, top_p=0.6))  # the first alone has 0.64
    assert set(tokens.tolist()) == {1}
    tokens, _ = sample(logits, draws(4000, top_p=0.7))
    assert set(tokens.tolist()) == {1, 2}


def test_min_p_leaves_out_what_is_far_less_likely_than_the_best() -> None:
    logits = torch.tensor([0.5, 0.3, 0.14, 0.06]).log().repeat(4000, 1)
    tokens, logprobs = sample(logits, draws(4000, min_p=0.2))
    assert set(tokens.tolist()) == {0, 1, 2}
    assert logprobs == pytest.approx(logits[0].numpy()[tokens], abs=1e-6)
    tokens, _ = sample(logits, draws(4000, min_p=0.2, top_k=2))
    assert set(tokens.tolist()) == {0, 1}


def test_equal_logits_at_the_edge_of_top_k_keep_the_lower_id() -> None:
    tokens, _ = sample(torch.zeros(500, 6), draws(500, top_k=3))
    assert set(tokens.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53])
def test_extreme_draws_hit_tokens_that_can_be(uniform: float) -> None:
    logits = torch.tensor([[-torch.inf, 1.0, 2.0, -torch.inf]])
    extreme = Draws(
        np.ones(1, np.float32),
        np.ones(1, np.float32),
        np.zeros(1, np.int64),
        np.zeros(1, np.float32),
        np.array([uniform]),
    )
    tokens, logprobs = sample(logits, extreme)
    assert tokens.tolist() == [1 if uniform == 0 else 2]
    assert np.isfinite(logprobs).all()


def test_token_logprobs_are_those_of_the_sampled() -> None:
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(0))
    tokens, logprobs = sample(logits, draws(50, temperature=0.7))
    scores = token_logprobs(logits, torch.from_numpy(tokens), 0.7)
    assert np.array_equal(scores.numpy(), logprobs)
