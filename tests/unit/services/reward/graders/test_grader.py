import subprocess
import sys

import pytest

from services.reward.graders.grader import BUILT_IN, addresses, load_grader
from shared import job_reward


def test_every_built_in_grader_loads() -> None:
    graders = {name: load_grader(address) for name, address in BUILT_IN.items()}
    assert set(graders) == set(job_reward.BUILT_IN)
    assert graders["arithmetic"]("1", "1").value == 1.0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("plug_ins", "message"),
    [
        ({"math": "os:system"}, "name of a built-in"),
        ({"mine": "os.system"}, "is not module:function"),
        ({"mine": "os;x:y"}, "is not module:function"),
    ],
)
def test_wrong_plug_ins_are_refused(plug_ins: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        addresses(plug_ins)


def test_a_plug_in_without_its_function_is_refused() -> None:
    with pytest.raises(ValueError, match="no such function"):
        load_grader("json:grade")


def test_the_list_of_graders_loads_no_algebra() -> None:
    check = "import services.reward.graders.grader, sys; print('sympy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=90)
    assert done.stdout.strip() == "False"
