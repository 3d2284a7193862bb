"""Text to tokens and back by a checkpoint's own files, the same way in every service; no torch."""

import json
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

    @classmethod
    def load(cls, checkpoint: Path) -> Self:
        """Read the checkpoint's files; blocks. OSError names the one that is missing."""
        file = checkpoint / TOKENIZER_FILE
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file")
        tokenizer = Tokenizer.from_file(str(file))
        return cls(tokenizer, _stop_token_ids(checkpoint))

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)

    def decode(self, token_ids: list[int]) -> str:
        """Special tokens are left out."""
        return str(self.tokenizer.decode(token_ids))


def _stop_token_ids(checkpoint: Path) -> tuple[int, ...]:
    """`eos_token_id`: one id, several or none; what governs generation wins."""
    found: object = None
    for name in CONFIG_FILES:
        if (path := checkpoint / name).is_file():
            found = json.loads(path.read_text()).get("eos_token_id", found)
    if isinstance(found, int):
        return (found,)
    return tuple(int(token_id) for token_id in found) if isinstance(found, list) else ()
