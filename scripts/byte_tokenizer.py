"""A byte-level tokenizer in the `tokenizer.json` format: any text goes in and comes out unchanged.

Tokens 0, 1, 2 begin, end and pad a sequence under the release's names; token 3 + b is byte b; the
rest of the vocabulary is reserved, so that every token a model can sample has a name. Nothing is
added around a text.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS, PAD = 0, 1, 2
FIRST_BYTE = 3
VOCAB_SIZE = 320


def build_tokenizer() -> Tokenizer:
    specials = _special_tokens()
    vocab = {token: index for index, token in specials.items()}
    vocab |= {char: FIRST_BYTE + byte for byte, char in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(specials[index], special=True, normalized=False) for index in sorted(specials)]
    )
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    """`tokenizer.json` and the small file beside it that names the special tokens."""
    tokenizer = build_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = _special_tokens()
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": names[BOS],
        "eos_token": names[EOS],
        "pad_token": names[PAD],
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def encode_bytes(text: str) -> list[int]:
    """What the tokenizer does, spelled out."""
    return [FIRST_BYTE + byte for byte in text.encode()]


def _special_tokens() -> dict[int, str]:
    first_reserved = FIRST_BYTE + 256
    reserved = {i: f"<｜reserved▁{i}｜>" for i in range(first_reserved, VOCAB_SIZE)}
    return {
        BOS: "<｜begin▁of▁sentence｜>",
        EOS: "<｜end▁of▁sentence｜>",
        PAD: "<｜▁pad▁｜>",
        **reserved,
    }


def _byte_characters() -> list[str]:
    """The printable character by which the byte-level format writes each byte (as GPT-2 did)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    shifted = {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [shifted.get(byte, chr(byte)) for byte in range(256)]
