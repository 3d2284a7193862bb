"""The images, built once and taken away again; `make test-compose` runs these tests."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.compose.project import IMAGES, Project, run

BUILD_S = 900.0


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def images() -> AsyncIterator[list[str]]:
    """Names of the images of compose.yaml's default profile."""
    names = [f"{IMAGES}-{target}:latest" for target in ("torch", "reward", "evaluator")]
    try:
        await Project("tandem-test-build", port=8700).compose("build", timeout_s=BUILD_S)
        yield names
    finally:
        await run(["docker", "image", "rm", "--force", *names])


@pytest.fixture
def project(free_port: int) -> Project:
    return Project(f"tandem-test-{free_port}", free_port)
