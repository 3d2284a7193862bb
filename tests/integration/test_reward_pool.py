"""The grading pool on real processes: hostile graders end within their limits, others go on."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from services.reward.pool.pool import GradingPool
from services.reward.pool.requests import Check
from services.reward.pool.settings import PoolConfig
from shared.errors import Fatal
from shared.messages import GraderError, Outcome, Score, Timeout

HOSTILE = Path(__file__).parents[1] / "fixtures" / "graders"
NAMES = (
    "sleeps", "spins", "hangs_in_c", "takes_memory", "hides_memory_errors", "raises", "recurses",
    "exits", "kills_itself", "leaves_a_child", "leaves_an_orphan",
    "returns_nonsense", "scores_hugely", "forges_a_score", "says_nice", "says_loaded",
)  # fmt: skip
PLUG_INS = {name: f"hostile_graders:{name}" for name in NAMES}
CONFIG = PoolConfig(workers=2, slow_workers=2, plug_ins=PLUG_INS, memory_bytes=256 * 2**20)
EVEN = CONFIG.model_copy(update={"slow_nice": 0})
"""Slow checks get their share of a busy machine: how far they come within a limit is asked."""
TESTS = '{"inputs": [""], "outputs": [""]}'

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[GradingPool]:
    async with whole(EVEN) as pool:
        yield pool


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def yielding() -> AsyncIterator[GradingPool]:
    """A pool whose slow lane yields the cores."""
    async with whole(CONFIG) as pool:
        yield pool


@contextlib.asynccontextmanager
async def whole(config: PoolConfig) -> AsyncIterator[GradingPool]:
    pool = await started(config)
    try:
        yield pool
        pids = pool.pids
    finally:
        await pool.close()
    assert pids
    assert not [pid for pid in pids if is_alive(pid)]


async def started(config: PoolConfig) -> GradingPool:
    """With the hostile graders on its path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HOSTILE))
        return await GradingPool.start(config)


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def grade_one(pool: GradingPool, grader: str, response: str, timeout_s: float) -> Outcome:
    return (await pool.grade([Check(grader, response, "", timeout_s)]))[0]


def right(count: int) -> list[Check]:
    return [Check("arithmetic", "7+8=15;85", "85") for _ in range(count)]


async def test_outcomes_come_in_the_order_of_checks(pool: GradingPool) -> None:
    checks = [Check("arithmetic", str(i), str(i if i % 3 else -1)) for i in range(200)]
    outcomes = await pool.grade(checks)
    assert [outcome.value for outcome in outcomes] == [float(i % 3 > 0) for i in range(200)]  # type: ignore[union-attr]


async def test_mathematics_is_graded_in_the_pool(pool: GradingPool) -> None:
    outcomes = await pool.grade(
        [
            Check("math", r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{\sqrt{2}}{2}"),
            Check("math", r"\boxed{9^{9^{9}}}", "7"),
            Check("math", "no answer", "7"),
            Check("math", r"\boxed{7}", ""),
        ]
    )
    assert [outcome.kind for outcome in outcomes] == ["score", "score", "unparseable", "error"]
    assert outcomes[0].value == 1.0  # type: ignore[union-attr]


@pytest.mark.parametrize("answer", ["|A" * 200, r"\|A" * 100, r"\sum_{k=1}^{9999}\frac{1}{k^9}"])
async def test_an_answer_that_math_verify_reads_for_ever_times_out(
    pool: GradingPool, answer: str
) -> None:
    """The first takes it 54 s; the pool is none the worse."""
    hostile = Check("math", f"\\boxed{{{answer}}}", "7", 0.5)
    normal = [Check("math", f"\\boxed{{{number}}}", "7") for number in range(20)]
    outcomes = await pool.grade([*normal, hostile, *normal])
    assert outcomes.pop(20) == Timeout(after_s=0.5)
    assert [outcome.value for outcome in outcomes].count(1.0) == 2  # type: ignore[union-attr]
    await wait_until(lambda: len(pool.pids) == CONFIG.workers)


@pytest.mark.parametrize(
    ("grader", "response"),
    [("sleeps", "60"), ("spins", "60"), ("hangs_in_c", ""), ("leaves_a_child", "60")],
)
async def test_a_check_that_hangs_times_out_within_its_limit(
    pool: GradingPool, grader: str, response: str
) -> None:
    begin_s = time.monotonic()
    outcome = await grade_one(pool, grader, response, timeout_s=0.4)
    assert outcome == Timeout(after_s=0.4)
    assert time.monotonic() - begin_s < 20  # of the 60 that it would take, or far more
    assert (await pool.grade(right(1)))[0].kind == "score"


@pytest.mark.parametrize(
    ("grader", "response", "reason"),
    [
        ("takes_memory", "at once", "out of memory"),
        ("takes_memory", "bit by bit", "memory"),
        ("hides_memory_errors", "", "bytes of memory exceed"),
        ("raises", "boom", "RuntimeError: boom"),
        ("recurses", "", "nested too deeply"),
        ("exits", "", "the grading process died: exit code"),
        ("kills_itself", "", "the grading process died: killed by SIGKILL"),
        ("returns_nonsense", "", "returned str"),
        ("scores_hugely", "1.7e308", "value 1.7e+308 is beyond the bound of a score, 1e+06"),
        ("forges_a_score", "-2e6", "value -2e+06 is beyond the bound of a score, 1e+06"),
        ("forges_a_score", "nan", "value nan is not finite"),
    ],
)
async def test_a_check_that_fails_is_an_error_of_its_own(
    pool: GradingPool, grader: str, response: str, reason: str
) -> None:
    checks = [*right(3), Check(grader, response, "", 30.0), *right(3)]
    outcomes = await pool.grade(checks)
    failed = outcomes.pop(3)
    assert isinstance(failed, GraderError)
    assert reason in failed.reason
    assert all(isinstance(outcome, Score) for outcome in outcomes)


async def test_a_slow_check_keeps_its_result_and_its_process(yielding: GradingPool) -> None:
    await wait_until(lambda: len(yielding.pids) == CONFIG.workers)
    before = set(yielding.pids)
    outcome = await grade_one(yielding, "sleeps", "0.3", timeout_s=5.0)
    assert outcome == Score(value=1.0, extracted="0.3")
    assert (
        len(before - set(yielding.pids)) == 1
    )  # its worker was moved to the slow lane, then ended
    await wait_until(lambda: len(yielding.pids) == CONFIG.workers)
    outcomes = await yielding.grade([Check("says_nice", "", "") for _ in range(20)])
    ours = str(os.getpriority(os.PRIO_PROCESS, 0))  # no worker is left that was made to wait
    assert {outcome.extracted for outcome in outcomes} == {ours}  # type: ignore[union-attr]


async def test_a_slow_check_yields_the_cores(yielding: GradingPool) -> None:
    def lowered() -> list[int]:
        nice = min(19, os.getpriority(os.PRIO_PROCESS, 0) + CONFIG.slow_nice)
        return [pid for pid in yielding.pids if os.getpriority(os.PRIO_PROCESS, pid) == nice]

    slow = asyncio.create_task(yielding.grade([Check("spins", "60", "", 2.0)]))
    await wait_until(lambda: len(lowered()) == 1)
    (pid,) = lowered()
    assert os.getsid(pid) == os.getsid(0)  # between sessions a nice value may not count
    assert os.getpgid(pid) == pid
    assert await slow == [Timeout(after_s=2.0)]


async def test_neighbours_of_hostile_checks_keep_their_latency(yielding: GradingPool) -> None:
    """50 groups are graded while the slow lane is full, and none waits for a hostile check to end.

    Without the lane both workers would be taken for 4.5 s. How p99 changes is a figure of the
    machine as well: `python -m benchmarks.reward` measures it.
    """
    hostile = asyncio.create_task(yielding.grade([Check("spins", "60", "", 1.5)] * 6))
    await asyncio.sleep(0.3)  # the slow lane is full by now
    latencies = []
    while len(latencies) < 50 and not hostile.done():
        begin_s = time.monotonic()
        outcomes = await yielding.grade(right(8))
        latencies.append(time.monotonic() - begin_s)
        assert all(isinstance(outcome, Score) for outcome in outcomes)
    assert len(latencies) == 50
    assert max(latencies) < 1.5
    assert set(await hostile) == {Timeout(after_s=1.5)}


async def test_checks_of_one_batch_do_not_wait_for_a_hostile_one(pool: GradingPool) -> None:
    small = asyncio.create_task(pool.grade([Check("sleeps", "6", "", 60.0)]))
    mixed = asyncio.create_task(pool.grade([*right(20), Check("sleeps", "9", "", 1.0), *right(20)]))
    outcomes = await mixed
    assert [outcome.kind for outcome in outcomes].count("score") == 40
    assert not small.done()
    assert (await small)[0] == Score(value=1.0, extracted="6")


async def test_waiting_for_a_slow_place_uses_up_no_limit(pool: GradingPool) -> None:
    """Two places: four hostile checks hold them for 4 s, twice the limit of the others."""
    hostile = [asyncio.create_task(grade_one(pool, "sleeps", "60", 2.0)) for _ in range(4)]
    await wait_until(lambda: pool.depth > 0)
    right_ones = await asyncio.gather(*(grade_one(pool, "sleeps", "0.1", 2.0) for _ in range(6)))
    assert right_ones == [Score(value=1.0, extracted="0.1")] * 6
    assert await asyncio.gather(*hostile) == [Timeout(after_s=2.0)] * 4


async def test_a_slow_check_is_charged_for_no_leftover_of_another_batch() -> None:
    """The worker of the first still has the third before it, which hangs, when it is done."""
    config = EVEN.model_copy(update={"workers": 1, "spare_workers": 1, "slow_workers": 1})
    checks = [Check("sleeps", seconds, "", 2.0) for seconds in ("0.4", "0.2", "60")]
    async with whole(config) as pool:
        outcomes = await pool.grade(checks)
    assert [outcome.kind for outcome in outcomes] == ["score", "score", "timeout"]


async def test_a_check_that_finds_no_slow_place_is_an_error() -> None:
    async with whole(EVEN.model_copy(update={"slow_wait_s": 0.3})) as pool:
        outcomes = await asyncio.gather(*(grade_one(pool, "sleeps", "60", 4.0) for _ in range(3)))
    kinds = sorted(outcome.kind for outcome in outcomes)
    assert kinds == ["error", "timeout", "timeout"]
    (failed,) = [outcome for outcome in outcomes if isinstance(outcome, GraderError)]
    assert "queue full" in failed.reason


async def test_code_runs_where_a_worker_has_less_memory_than_a_program_may_take() -> None:
    async with whole(EVEN) as pool:  # before mathematics makes its workers large
        check = Check("code", "```python\npass\n```", TESTS, 30.0)
        (outcome,) = await pool.grade([check])
    assert isinstance(outcome, Score), outcome
    assert outcome.value == 1.0, outcome


async def test_a_killed_check_leaves_no_process_and_no_folder() -> None:
    program = "import os, time\nos.mkdir('a')\nos.chmod('a', 0)\ntime.sleep(60)"
    check = Check("code", f"```python\n{program}\n```", TESTS, 60.0)
    async with whole(EVEN) as pool:
        zygote = pool._zygote
        assert zygote is not None
        folder = Path(zygote._folder)

        def scratch() -> list[Path]:
            return list(folder.glob("*/tandem-code-*"))

        busy = asyncio.create_task(pool.grade([check]))
        await wait_until(lambda: busy.done() or bool(scratch()))
        assert not busy.done(), busy.result()
        os.kill(int(scratch()[0].parent.name), signal.SIGKILL)
        assert [outcome.kind for outcome in await busy] == ["error"]
        await wait_until(lambda: not scratch())
        outcome = await grade_one(pool, "leaves_an_orphan", str(folder / "pid"), 3.0)
        assert outcome == Timeout(after_s=3.0)
        orphan = int((folder / "pid").read_text())
        await wait_until(lambda: not is_alive(orphan))
    await wait_until(lambda: not folder.exists())


async def test_a_thousand_checks_do_not_hold_up_a_group(pool: GradingPool) -> None:
    many = asyncio.create_task(pool.grade([Check("sleeps", "0.005", "")] * 1000))
    await asyncio.sleep(0.1)
    await pool.grade(right(8))
    assert not many.done()
    many.cancel()


async def test_a_request_that_is_given_up_frees_its_workers(pool: GradingPool) -> None:
    request = asyncio.create_task(pool.grade([Check("sleeps", "0.01", "")] * 500))
    await asyncio.sleep(0.1)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    assert pool.depth == 0
    assert len(await pool.grade(right(50))) == 50


async def test_an_unknown_grader_is_refused_by_name(pool: GradingPool) -> None:
    with pytest.raises(ValueError, match="no grader 'nope'; there are aime, arithmetic"):
        await pool.grade([Check("nope", "", "")])
    assert await pool.grade([]) == []


async def test_a_dead_zygote_ends_the_pool_and_its_workers() -> None:
    pool = await started(EVEN)
    pids = pool.pids
    guard = asyncio.create_task(pool.guard(asyncio.Event()))
    request = asyncio.create_task(pool.grade([Check("spins", "60", "", 60.0)]))
    await asyncio.sleep(0.1)
    pool._zygote._process.kill()  # type: ignore[union-attr]
    for waiting in (guard, request):
        with pytest.raises(Fatal, match="the process that forks graders is gone"):
            await asyncio.wait_for(waiting, 60)
    await wait_until(lambda: not any(map(is_alive, pids)))
    await pool.close()


async def test_a_pool_starts_without_mathematics() -> None:
    """That takes longer to load than all else (`python -m benchmarks.reward --only start`)."""
    async with whole(EVEN) as pool:
        for is_asked_for in (False, True):
            if is_asked_for:
                await pool.prepare()
            (outcome,) = await pool.grade([Check("says_loaded", "sympy", "", 30.0)])
            assert outcome == Score(value=float(is_asked_for))


async def test_a_grader_that_cannot_be_loaded_stops_the_start() -> None:
    config = PoolConfig(workers=1, plug_ins={"mine": "no_such_module:grade"})
    with pytest.raises(Fatal, match="no_such_module"):
        await GradingPool.start(config)


async def wait_until(holds: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.05)
