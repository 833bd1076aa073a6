"""Tokenizers from local files: a `tokenizer.json`, or a folder as transformers saves one. Nothing is fetched."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from runner import home
from runner.build.huggingface import QUIET
from runner.errors import ConfigError

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""Names of the token that ends a document, where a tokenizer.json alone is given: it does not say which it is."""


BYTES = 256


class Bytes:
    """Every byte of UTF-8 is a token, and 256 ends a document, or begins one for a classifier."""

    vocabulary, end = 257, 256

    def encode(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        """The bytes of each text, with `special` behind token 256."""
        return [[*[self.end] * special, *text.encode()] for text in texts]


class Tokenizer:
    """The tokenizer of the file or folder `path`.

    Attributes:
        vocabulary: the number of its tokens: every id is less.
        end: the id of the token that ends a document; None without one.

    Raises:
        ConfigError: no such file, one that holds no tokenizer, a package that is missing, or no token `end`.
    """

    def __init__(self, path: str, end: str | None = None) -> None:
        file = located(path)
        self._tokenizer: Any
        try:
            if file.is_dir():
                for name, value in QUIET.items():
                    os.environ.setdefault(name, value)
                made = import_module("transformers").AutoTokenizer.from_pretrained(str(file), local_files_only=True)
                self._encode, known = self._of_transformers, made.eos_token
            else:
                made = import_module("tokenizers").Tokenizer.from_file(str(file))
                self._encode = self._of_tokenizers
                known = next((name for name in ENDS if made.token_to_id(name) is not None), None)
        except ImportError as error:
            package = error.name or "transformers"
            raise ConfigError(
                "MW802", f'{file}: the package {package} is needed: pip install "meshwright[text]".'
            ) from error
        except Exception as error:  # both libraries raise plain exceptions for a file that they cannot use
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ConfigError("MW830", f"{file} holds no tokenizer that can be loaded: {reason}.") from error
        self._tokenizer = made
        ids = made.get_vocab()
        self.vocabulary = max(ids.values()) + 1
        if end is not None and end not in ids:
            raise ConfigError(
                "MW830", f"data.args.end = {end!r} is no token of {file}; name one of its tokens, or null for its own."
            )
        ending = known if end is None else end
        self.end: int | None = None if ending is None else ids[ending]

    def encode(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        """The ids of each text; with `special` between the tokens that the tokenizer puts at its ends."""
        return self._encode(list(texts), special)

    def _of_transformers(self, texts: list[str], special: bool) -> list[list[int]]:
        encoded: list[list[int]] = self._tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"]
        return encoded

    def _of_tokenizers(self, texts: list[str], special: bool) -> list[list[int]]:
        return [one.ids for one in self._tokenizer.encode_batch_fast(texts, add_special_tokens=special)]


def load(path: str | None, end: str | None = None) -> Tokenizer | Bytes:
    """The tokenizer of the file or folder `path`, None: that of bytes. Raises ConfigError as `Tokenizer`."""
    if path is not None:
        return Tokenizer(path, end)
    if end is not None:
        raise ConfigError("MW830", f"data.args.end = {end!r}, but without data.args.tokenizer the end is token 256.")
    return Bytes()


def trained(texts: Iterable[str], vocabulary: int) -> Mapping[str, str]:
    """The files of a tokenizer that is trained on `texts`: byte-pair encoding of bytes (Sennrich et al., 2016), so any
    text can be encoded, and nothing is lost.

    Args:
        texts: the documents.
        vocabulary: tokens at most: 256 bytes, the end of a document, and merges.

    Returns:
        The contents of tokenizer.json and tokenizer_config.json, by name.

    Raises:
        ConfigError: a vocabulary below 257, no text, or a package that is missing.
    """
    if vocabulary <= BYTES:
        raise ConfigError(
            "MW830", f"vocabulary = {vocabulary} must be {BYTES + 1} or more: every byte and the end have a token."
        )
    try:
        library: Any = import_module("tokenizers")
    except ImportError as error:
        raise ConfigError("MW802", 'The package tokenizers is needed: pip install "meshwright[text]".') from error
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        iter(texts),
        library.trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=[ENDS[0]], initial_alphabet=alphabet, show_progress=False
        ),
    )
    if made.get_vocab_size() == BYTES + 1 < vocabulary:
        raise ConfigError("MW314", "There is no text to train a tokenizer on: no two bytes stand together twice.")
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": ENDS[0], "clean_up_tokenization_spaces": False}
    return {"tokenizer.json": made.to_str(), "tokenizer_config.json": json.dumps(kind, indent=2) + "\n"}


def located(path: str) -> Path:
    """The file or folder of a tokenizer. Raises ConfigError: there is none."""
    file = home.expanded(path).absolute()
    if not file.exists():
        raise ConfigError(
            "MW830",
            f"{file}: there is no such tokenizer. Give a tokenizer.json or a folder as transformers saves one; `run "
            "tokenize` trains one on local text.",
        )
    return file


def facts(path: str | None) -> list[str]:
    """What changes when the tokenizer does: names, sizes and times of change of its files."""
    if path is None:
        return ["bytes"]
    file = located(path)
    files = sorted(one for one in file.iterdir() if one.is_file()) if file.is_dir() else [file]
    return [f"{one.name} {one.stat().st_size} {one.stat().st_mtime_ns}" for one in files]
