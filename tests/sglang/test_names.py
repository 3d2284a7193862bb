"""SGLang's column of the table of names against the loader of the server that is installed."""

import ast
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest

from shared.models.deepseek_v4.architecture import Architecture
from shared.models.deepseek_v4.names import Place, places
from tests.tiny_deepseek_v4 import ALIGNED, FLASH

EXPERT = re.compile(r"\.experts\.(\d+)\.(gate|down|up)_proj\.")
SHARDS = {"gate": ("w13_", 0), "up": ("w13_", 1), "down": ("w2_", None)}  # FusedMoE's own
ROWS = {"wkv": 0, "wgate": 1}


@pytest.fixture(scope="module")
def source(sglang_python: str) -> str:
    """Of the server's DeepSeek-V4 class, which a CPU cannot import."""
    find = "import importlib.util as u; print(u.find_spec('sglang').origin)"
    found = subprocess.run([sglang_python, "-c", find], check=True, capture_output=True, text=True)
    return (Path(found.stdout.strip()).parent / "srt/models/deepseek_v4.py").read_text()


def renaming(source: str) -> Callable[..., str]:
    """The function by which its loader renames what it is handed."""
    name = "remap_weight_name_to_dpsk_hf_format"
    nodes = ast.walk(ast.parse(source))
    function = next(n for n in nodes if isinstance(n, ast.FunctionDef) and n.name == name)
    function.decorator_list = []
    space: dict[str, Any] = {"Optional": Optional}
    exec(compile(ast.Module([function], []), "sglang", "exec"), space)
    found: Callable[..., str] = space[name]
    return found


def stacked(source: str) -> list[tuple[str, str, int]]:
    """(matrix, part of it, row block) of its dense layers."""
    text = re.search(r"DEEPSEEK_V4_STACKED_PARAMS_MAPPING.*?= (\[.*?\n\])", source, re.DOTALL)
    assert text is not None
    found: list[tuple[str, str, int]] = ast.literal_eval(text[1])
    return found


def loaded(name: str, dense: list[tuple[str, str, int]]) -> Place:
    """Where the loader puts a renamed tensor."""
    if expert := EXPERT.search(name):
        matrix, row = SHARDS[expert[2]]
        return Place(EXPERT.sub(f".experts.{matrix}", name), int(expert[1]), row)
    for matrix, part, row in dense:
        if f".{part}." in name:
            return Place(name.replace(part, matrix), None, row)
    if half := re.search(r"\.compressor\.(wkv|wgate)\.", name):
        return Place(name.replace(half[1], "wkv_gate"), None, ROWS[half[1]])
    for row, part in enumerate((".self_attn.wq_a.", ".self_attn.wkv.")):
        if part in name:
            return Place(name.replace(part, ".self_attn.wqkv_a."), None, row)
    return Place(name)


@pytest.mark.parametrize("arch", [FLASH, ALIGNED], ids=["flash", "aligned"])
def test_every_release_name_goes_where_the_table_says(source: str, arch: Architecture) -> None:
    assert "torch.cat([kv, wgate], dim=0)" in source
    assert re.search(r'torch\.cat\(\s*\[(bucket\["q"\], bucket\["kv"\]|q, kv)\], dim=0', source)
    rename, dense = renaming(source), stacked(source)
    for name, place in places(arch, "sglang").items():
        is_mtp = name.startswith("mtp.")
        renamed = rename(name, is_nextn=is_mtp, num_hidden_layers=arch.num_hidden_layers)
        assert loaded(renamed, dense) == place, name
