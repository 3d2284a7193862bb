"""Text to tokens and back by a checkpoint's own files, the same way in every service; no torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILES = ("config.json", "generation_config.json")


@dataclass(frozen=True, slots=True)
class CheckpointTokenizer:
    """Encodes as `tokenizer.json` says, and knows which tokens end a response."""

    tokenizer: Tokenizer
    stop_token_ids: tuple[int, ...]
    vocab_size: int  # of the model, which may be padded beyond the tokenizer's

    @classmethod
    def load(cls, checkpoint: Path) -> Self:
        """Read the checkpoint's files; blocks. OSError names the one that is missing."""
        file = checkpoint / TOKENIZER_FILE
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file")
        tokenizer = Tokenizer.from_file(str(file))
        config = _config(checkpoint)
        vocab_size = int(str(config.get("vocab_size", tokenizer.get_vocab_size())))
        return cls(tokenizer, stop_token_ids(config), vocab_size)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)

    def decode(self, token_ids: list[int]) -> str:
        """Special tokens are left out."""
        return str(self.tokenizer.decode(token_ids))


def stop_token_ids(config: Mapping[str, object]) -> tuple[int, ...]:
    """`eos_token_id` of a checkpoint's configuration: one id, several, or none."""
    found = config.get("eos_token_id")
    if isinstance(found, int):
        return (found,)
    return tuple(int(token_id) for token_id in found) if isinstance(found, list) else ()


def _config(checkpoint: Path) -> dict[str, object]:
    """Both configuration files in one; what governs generation wins."""
    merged: dict[str, object] = {}
    for name in CONFIG_FILES:
        if (path := checkpoint / name).is_file():
            merged |= json.loads(path.read_text())
    return merged
