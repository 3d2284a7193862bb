"""Text to tokens and back by a checkpoint's own files, the same way in every service; no torch."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tokenizers import AddedToken, Tokenizer

TOKENIZER_FILE = "tokenizer.json"
REASONING_TAGS = ("<think>", "</think>")
CONFIG_FILES = ("config.json", "generation_config.json")


@dataclass(frozen=True, slots=True)
class CheckpointTokenizer:
    """Encodes as `tokenizer.json` says, and knows which tokens end a response."""

    tokenizer: Tokenizer
    stop_token_ids: tuple[int, ...]
    vocab_size: int  # of the model, which may be padded beyond the tokenizer's

    @classmethod
    def load(cls, checkpoint: Path) -> Self:
        """Read the checkpoint's files; blocks. OSError names the one that is missing, ValueError
        one that cannot be read."""
        file = checkpoint / TOKENIZER_FILE
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file")
        tokenizer = _tokenizer(file)
        config = _config(checkpoint)
        vocab_size = int(str(config.get("vocab_size", tokenizer.get_vocab_size())))
        return cls(tokenizer, stop_token_ids(config), vocab_size)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)

    def encode_plain(self, text: str) -> list[int]:
        """`text` as nothing but text: names of control tokens in it do not become those tokens."""
        names = (re.escape(one.content) for one in self._added_tokens().values())
        pieces, begin = [], 0
        for match in re.finditer("|".join(names) or r"(?!)", text):
            pieces.append(text[begin : match.start() + 1])
            begin = match.start() + 1
        pieces.append(text[begin:])
        encoded = self.tokenizer.encode_batch(pieces, add_special_tokens=False)
        return [token_id for one in encoded for token_id in one.ids]

    def _added_tokens(self) -> dict[int, AddedToken]:
        return self.tokenizer.get_added_tokens_decoder()

    def token_id(self, token: str) -> int | None:
        """The id of a whole token by its name."""
        found = self.tokenizer.token_to_id(token)
        return None if found is None else int(found)

    def decode(self, token_ids: list[int]) -> str:
        """Special tokens are left out, except those around reasoning: graders look for them."""
        return "".join(
            run if isinstance(run, str) else str(self.tokenizer.decode(run))
            for run in self._runs(token_ids)
        )

    def _runs(self, token_ids: list[int]) -> Iterator[list[int] | str]:
        """Stretches of ids between reasoning tags, and the tags by name."""
        tags = {self.token_id(tag): tag for tag in REASONING_TAGS}
        begin = 0
        for place, token_id in enumerate(token_ids):
            if token_id in tags:
                yield token_ids[begin:place]
                yield tags[token_id]
                begin = place + 1
        yield token_ids[begin:]


def _tokenizer(file: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(file))
    except Exception as err:
        if type(err) is not Exception:  # the tokenizers library raises plain Exception
            raise
        raise ValueError(f"{file}: {err}") from err


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
