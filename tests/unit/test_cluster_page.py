"""The torchrun command of the page is the one that a node starts."""

import shlex
import sys
from pathlib import Path

from services.trainer.launch import Launch
from shared.job_cluster import RendezvousSection

PAGE = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()


def test_the_page_shows_the_command_of_a_node() -> None:
    _, _, after = PAGE.partition("`services.trainer.node` starts exactly this")
    shown = shlex.split(after.split("```\n")[1].replace("\\\n", " "))
    rendezvous = RendezvousSection()
    launch = Launch(
        number=1,
        nodes=2,
        ranks_per_node=8,
        host="10.0.0.1",
        port=rendezvous.port,
        timeout_s=rendezvous.timeout_s,
        run_dir="RUN",
        environment={},
    )
    assert shown == ["python" if one == sys.executable else one for one in launch.command(1)]
