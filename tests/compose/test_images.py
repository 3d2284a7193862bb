"""What images are made of, by both builders, and the GPU file on a base that stands in for one."""

import json
import os
import secrets
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.compose.project import ROOT, run

BUILD_S = 900.0
# Has torch, and lacks a few of the packages that Tandem needs.
STAND_IN = """FROM {base}
USER root
RUN mkdir /opt/venv/lib/python3.11/site-packages/sglang \\
    && touch /opt/venv/lib/python3.11/site-packages/sglang/__init__.py \\
    && pip uninstall --quiet --yes xxhash structlog megatron-core
"""

pytestmark = pytest.mark.timeout(1500)


@pytest_asyncio.fixture
async def tag() -> AsyncIterator[str]:
    """A name for what a test builds, which is taken away again."""
    name = f"tandem-test-{secrets.token_hex(4)}"
    yield name
    found = await run(["docker", "image", "ls", "-q", "--filter", f"reference={name}*"])
    if ids := sorted(set(found.split())):
        await run(["docker", "image", "rm", "--force", *ids])


async def in_image(image: str, code: str) -> str:
    return await run(["docker", "run", "--rm", "--network", "none", image, "python", "-c", code])


async def test_small_images_have_no_torch_and_none_knows_an_index(images: list[str]) -> None:
    torch, *small = images
    for image in images:
        found = json.loads(await run(["docker", "image", "inspect", image]))[0]
        assert found["Config"]["User"] == "tandem"
        assert found["Config"]["Labels"]["org.opencontainers.image.title"] == "Tandem"
        assert "PIP_" not in await run(["docker", "history", "--no-trunc", image])
        assert not any(line.startswith("PIP_") for line in found["Config"]["Env"])
    find = "import importlib.util as u, os; print(os.getuid(), u.find_spec('torch') is None)"
    assert [await in_image(image, find) for image in small] == ["10001 True\n"] * 2
    assert await in_image(torch, find) == "10001 False\n"


async def test_the_classic_builder_makes_the_same_images(tag: str) -> None:
    """The largest first: on its way every stage is built, and the others come from the cache."""
    for target, service in (("torch", "trainer"), ("evaluator", "evaluator"), ("reward", "reward")):
        build = ["docker", "build", "--quiet", "-f", "docker/Dockerfile", "--target", target]
        image = f"{tag}-{target}"
        await run([*build, "-t", image, "."], env={"DOCKER_BUILDKIT": "0"}, timeout_s=BUILD_S)
        answer = await in_image(image, f"import services.{service}.app; print('imports')")
        assert answer == "imports\n"


async def test_a_gpu_base_keeps_what_it_has_and_gets_what_it_lacks(
    images: list[str], tag: str
) -> None:
    base, built = f"{tag}-base", f"{tag}-gpu"
    made = STAND_IN.format(base=images[0])
    pipe = ["sh", "-c", 'printf %s "$MADE" | docker build --quiet -t "$BASE" -']
    await run(pipe, env={"MADE": made, "BASE": base})
    build = ["docker", "build", "--quiet", "-f", "docker/Dockerfile.gpu"]
    build += ["--build-arg", f"SGLANG_IMAGE={base}", "-t", built, "."]
    await run(build, timeout_s=BUILD_S)
    where = "import fastapi, xxhash, megatron.core; print(fastapi.__file__, xxhash.__file__)"
    kept, added = (await in_image(built, where)).split()
    assert kept.startswith("/opt/venv/")
    assert added.startswith("/opt/tandem/")


async def test_a_base_without_torch_is_refused_with_what_it_lacks(tag: str) -> None:
    python = os.environ.get("PYTHON_IMAGE", "python:3.11-slim")
    build = ["docker", "build", "-f", "docker/Dockerfile.gpu"]
    build += ["--build-arg", f"SGLANG_IMAGE={python}", "-t", tag, str(ROOT)]
    with pytest.raises(AssertionError, match="This base lacks torch, sglang"):
        await run(build)
