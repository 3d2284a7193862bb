"""The page's data module, run by Node.js where there is one."""

from pathlib import Path

import pytest

from tests.unit.services.trainer.dashboard.javascript import NODE, evaluate

pytestmark = pytest.mark.skipif(NODE is None, reason="Node.js is not installed")


def test_lines_seen_before_are_left_out(tmp_path: Path) -> None:
    script = """
      const run = new page.Run();
      run.load({after: 5, events: [{name: "step", fields: {step: 1, reward_raw: 0.1}}],
                counts: {step: 1}, dropped: {too_old: 2}});
      run.add({name: "step", fields: {step: 1, reward_raw: 0.9}}, 5);
      run.add({name: "step", fields: {step: 2, reward_raw: 0.2}}, 6);
      run.add({name: "group_dropped", fields: {reason: "too_old"}}, 7);
      answer = {rewards: run.steps.reward_raw, lines: run.lines, dropped: run.dropped,
                counts: run.counts, shown: run.events.length};
    """
    assert evaluate(tmp_path, "run", script) == {
        "rewards": [0.1, 0.2],
        "lines": 7,
        "dropped": {"too_old": 3},
        "counts": {"step": 2, "group_dropped": 1},
        "shown": 2,
    }


def test_a_replayed_step_replaces_the_first_telling(tmp_path: Path) -> None:
    script = """
      const run = new page.Run();
      [[1, 0.1], [2, 0.2], [2, 0.3]].forEach(([step, reward_raw], i) =>
        run.add({name: "step", fields: {step, reward_raw, groups: 4}}, i + 1));
      answer = [run.steps.step, run.steps.reward_raw, run.trained];
    """
    assert evaluate(tmp_path, "run", script) == [[1, 2], [0.1, 0.3], 8]


def test_phases_are_stacked_from_the_first_up(tmp_path: Path) -> None:
    script = """
      const run = new page.Run();
      run.add({name: "step", fields: {step: 1, seconds: {wait: 1, pack: 0.5, checkpoint: 2}}}, 1);
      const columns = run.stackedPhases();
      answer = [columns.at(-1), columns.at(-2), columns[1]];
    """
    assert evaluate(tmp_path, "run", script) == [[1], [1.5], [3.5]]


def test_an_evaluation_that_moves_is_held_by_one_server(tmp_path: Path) -> None:
    script = """
      const run = new page.Run();
      const held = [["eval_requested", "rollout-1"], ["eval_moved", "rollout-0"]];
      held.forEach(([name, replica], i) =>
        run.add({name, fields: {eval_id: "e0", replica}}, i + 1));
      answer = run.held;
    """
    assert evaluate(tmp_path, "run", script) == {"rollout-0": "e0"}


def test_moving_average_skips_gaps(tmp_path: Path) -> None:
    script = "answer = page.movingAverage([1, 2, null, 4, 5], 3)"
    assert evaluate(tmp_path, "run", script) == [1, 1.5, 1.5, 3, 4.5]


def test_a_server_that_did_nothing_in_the_last_step_keeps_its_rate(tmp_path: Path) -> None:
    script = """
      const run = new page.Run();
      const told = [[1, {a: 8, b: 4}], [3, {a: 8}], [4, {}]];
      told.forEach(([step_seconds, sampled_tokens_per_s], i) =>
        run.add({name: "step", fields: {step: i, step_seconds, sampled_tokens_per_s}}, i + 1));
      answer = [run.rates(), new page.Run().rates()];
    """
    assert evaluate(tmp_path, "run", script) == [{"a": 4, "b": 0.5}, {}]


def test_a_row_of_an_overview_counts_as_the_steps_that_it_stands_for(tmp_path: Path) -> None:
    script = """
      const run = new page.Run();
      const told = [[10, 90, 9], [10, 60, 3], [1, 5, 7]];
      told.forEach(([num_steps, tokens, rate], i) => run.add({name: "step", fields: {
        step: i, num_steps, step_seconds: 1, lag_tokens: {0: tokens},
        sampled_tokens_per_s: {a: rate}}}, i + 1));
      answer = [run.lags(11), run.lags(12), run.rates(1), run.rates(10)];
    """
    lags, more, last, ten = evaluate(tmp_path, "run", script)
    assert (lags, more) == ({"0": 65}, {"0": 155})
    assert (last, ten["a"]) == ({"a": 7}, pytest.approx(37 / 11))


def test_fit_lags_and_waiting_are_told(tmp_path: Path) -> None:
    script = """
      const run = new page.Run();
      for (let step = 1; step <= 5; step++) run.add({name: "step", fields: {
        step, reward_raw: step === 2 ? null : 0.1 * step, step_seconds: 2, seconds: {wait: 1},
        lag_tokens: {0: 30, 1: 10}, sampled_tokens_per_s: {"rollout-0": 5, "rollout-1": 6},
        graded_per_s: {"reward-0": 2}, backlog: {prompts: 1, rollouts: 4, groups: 0}}}, step);
      answer = [run.fit("reward_raw").map((y) => Number(y.toFixed(6))), run.lags(),
                run.steps.sampled_per_s[4], run.rates(), run.waits()];
    """
    fit, lags, sampled, rates, waits = evaluate(tmp_path, "run", script)
    assert fit == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert lags == {"0": 150, "1": 50}
    assert (sampled, rates) == (11, {"rollout-0": 5, "rollout-1": 6, "reward-0": 2})
    assert waits.startswith("The trainer waits for groups 50 % of a step and works itself")
