"""The Compose files as Docker reads them: each profile, each role, each missing variable."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NODES = "compose.multinode.yaml"
SITE = {
    "BROKER_PASSWORD": "secret",
    "SITE_HEAD": "10.0.0.1",
    "SITE_SOCKET_IFNAME": "eth0",
    "SITE_IB_HCA": "rdma0",
    "NODE_ADDRESS": "10.0.0.3",
    "RUNS_DIR": "/shared/runs",
    "DATA_DIR": "/shared/data",
}
PROFILES = {
    "cpu": {"trainer", "rollout"},
    "cuda": {"trainer-cuda", "rollout-cuda"},
    "rocm": {"trainer-rocm", "rollout-rocm"},
}
ROLES = {
    "head": {"broker", "trainer", "reward", "evaluator"},
    "actor": {"node"},
    "rollout": {"rollout"},
}


def _has_compose() -> bool:
    if shutil.which("docker") is None:
        return False
    asked = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    return asked.returncode == 0


pytestmark = pytest.mark.skipif(not _has_compose(), reason="needs the command line of Docker")


def config(
    profile: str, variables: dict[str, str], *, file: str = "compose.yaml"
) -> subprocess.CompletedProcess[str]:
    argv = ["docker", "compose", "--env-file", os.devnull, "-f", file, "--profile", profile]
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(
        [*argv, "config", "--format", "json"],
        cwd=ROOT,
        env={**kept, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def services(
    profile: str, variables: dict[str, str], *, file: str = "compose.yaml"
) -> dict[str, dict[str, Any]]:
    done = config(profile, variables, file=file)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)["services"]
    return found


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_publishes_the_trainer_alone_and_locks_every_container(profile: str) -> None:
    found = services(profile, {"BROKER_PASSWORD": "secret"})
    assert set(found) == {"broker", "reward", "evaluator"} | PROFILES[profile]
    published = {name for name, one in found.items() if one.get("ports")}
    assert published == {name for name in found if name.startswith("trainer")}
    for name, one in found.items():
        assert one["read_only"], name
        assert one["cap_drop"] == ["ALL"], name
        assert {"memory", "pids"} <= one["deploy"]["resources"]["limits"].keys(), name
        assert one["logging"]["options"] == {"max-size": "10m", "max-file": "3"}, name
        assert one["healthcheck"]["test"], name
        if name != "broker":
            assert one["depends_on"]["broker"]["condition"] == "service_healthy", name


def test_a_stop_is_given_longer_than_both_drains() -> None:
    for name, one in services("cpu", {"BROKER_PASSWORD": "secret"}).items():
        assert one["stop_grace_period"] == "1m0s", name
        drains = [value for key, value in one["environment"].items() if key.endswith("_DRAIN_S")]
        assert all(2 * float(drain_s) < 60 for drain_s in drains), name
        assert drains or name == "broker"


@pytest.mark.parametrize("role", ROLES)
def test_a_node_runs_the_services_of_its_role_on_its_own_network(role: str) -> None:
    found = services(role, SITE, file=NODES)
    assert set(found) == ROLES[role]
    assert {one["network_mode"] for one in found.values()} == {"host"}


@pytest.mark.parametrize(
    ("file", "name"),
    [("compose.yaml", "BROKER_PASSWORD"), *((NODES, name) for name in SITE)],
)
def test_a_variable_that_must_be_set_fails_with_its_name(file: str, name: str) -> None:
    given = {key: value for key, value in SITE.items() if key != name}
    done = config("head", given, file=file)
    assert done.returncode != 0
    assert name in done.stderr


@pytest.mark.parametrize(("file", "profile"), [("compose.yaml", "cpu"), (NODES, "head")])
def test_the_broker_refuses_a_password_that_would_break_its_address(
    file: str, profile: str
) -> None:
    command = services(profile, SITE, file=file)["broker"]["command"]
    argv = [word.replace("$$", "$") for word in command]
    given = {"PATH": os.environ["PATH"], "BROKER_PASSWORD": "a@b"}
    done = subprocess.run(argv, env=given, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (1, "BROKER_PASSWORD: letters and digits only\n")


@pytest.mark.parametrize("profile", [*PROFILES, "observability"])
def test_every_variable_of_the_file_is_in_the_example(profile: str) -> None:
    """And the example's defaults are the file's."""
    example = (ROOT / ".env.example").read_text().replace("#", "\n")
    given = dict(line.split("=", 1) for line in example.splitlines() if "=" in line)
    assert set(re.findall(r"\${(\w+)", (ROOT / "compose.yaml").read_text())) == set(given) - {
        "COMPOSE_PROFILES"
    }
    bare = services(profile, {"BROKER_PASSWORD": "secret"})
    filled = services(profile, {**given, "BROKER_PASSWORD": "secret", "DATA_DIR": ""})
    assert filled == bare
