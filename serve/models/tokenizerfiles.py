"""Reading a tokenizer's files: in full once, then only what the tokenizers library itself needs.

transformers parses tokenizer.json up to three times in Python before the tokenizers library reads it once more. With
262,144 tokens that takes longer than loading the weights. So a tokenizer is read in full the first time, compared with
one that is made of its file and its settings alone, and made that way from then on where no difference was found.
Two models with the same files share one tokenizer.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from serve.models.cache import cache_root
from serve.models.hashing import cached_file_hash, combine, tokenizer_hash, vocabulary_hash
from serve.models.notes import read_note, write_note

FILE = "tokenizer.json"
_SIDE = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "additional_chat_templates/*")
_FORMAT = 1  # of the notes
PROBES = (
    "The quick brown fox, 42 × π;\n\n\tdef f(x): return 'ß' # 日本語 🙂 <eos> </s>",
    " leading,  double  and trailing spaces \n",
    "<s> [INST] <|im_start|> <bos> <start_of_turn> <|endoftext|> <unk>",
    "",
)
_CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
_loaded: WeakValueDictionary[str, Any] = WeakValueDictionary()
_loading = threading.Lock()


@dataclass(frozen=True)
class TokenizerHashes:
    """xxh3-128, hex: of id -> token, and of all that makes text into ids."""

    vocabulary: str
    rules: str


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer that transformers reads from a checkpoint folder. Lets transformers' own errors through.

    trust_remote_code: run code that the folder brings, where its tokenizer has some.
    """
    if trust_remote_code:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    with _loading:
        key = _key(folder)
        found = _loaded.get(key) if key else None
        if found is None:
            found = _read(folder, key)
            if key:
                _loaded[key] = found
        return found


def tokenizer_hashes(tokenizer: Any, *, rows: int) -> TokenizerHashes:
    """Hashes of a tokenizer for a model of `rows` ids, remembered for one that `load_tokenizer` gave."""
    key = next((key for key, known in list(_loaded.items()) if known is tokenizer), "")
    note = _note("hashes", f"{key}-{rows}")
    known = read_note(note, [_FORMAT, key, rows]) if key else None
    if isinstance(known, dict) and all(isinstance(known.get(name), str) for name in ("vocabulary", "rules")):
        return TokenizerHashes(known["vocabulary"], known["rules"])
    vocabulary = vocabulary_hash(tokenizer, rows=rows)
    made = TokenizerHashes(vocabulary, tokenizer_hash(tokenizer, vocabulary=vocabulary))
    if key:
        with contextlib.suppress(OSError):
            write_note(note, [_FORMAT, key, rows], {"vocabulary": made.vocabulary, "rules": made.rules})
    return made


def template_hash(tokenizer: Any) -> str:
    """Hash of a tokenizer's chat template, or templates by name; "" where it has none."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return ""
    parts = [f"{name}={text}" for name, text in sorted(template.items())] if isinstance(template, dict) else [template]
    return combine(parts)


def same_tokenizer(left: Any, right: Any) -> bool:
    """Whether two tokenizers give the same ids and texts as far as the server ever asks them."""
    plain = (
        "all_special_ids",
        "special_tokens_map",
        "chat_template",
        "model_max_length",
        "eos_token_id",
        "bos_token_id",
    )
    return (
        tokenizer_hash(left) == tokenizer_hash(right)
        and len(left) == len(right)
        and all(getattr(left, name, None) == getattr(right, name, None) for name in plain)
        and all(_answers(left, text) == _answers(right, text) for text in PROBES)
        and _chat(left) == _chat(right)
    )


def _answers(tokenizer: Any, text: str) -> list[Any]:
    """Ids and offsets of a text in every way that the server encodes one, and the ids as text again."""
    answers: list[Any] = []
    for options in ({}, {"add_special_tokens": False}, {"add_special_tokens": False, "split_special_tokens": True}):
        encoded = tokenizer(text, return_offsets_mapping=tokenizer.is_fast, **options)
        ids = list(encoded["input_ids"])
        answers += [ids, encoded.get("offset_mapping"), tokenizer.convert_ids_to_tokens(ids)]
        for skip in (False, True):
            answers.append(tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False))
    return answers


def _chat(tokenizer: Any) -> Any:
    if not tokenizer.chat_template:
        return None
    try:
        return tokenizer.apply_chat_template(_CHAT, tokenize=False)
    except Exception as error:  # a template is code, and may refuse this conversation
        return str(error)


def _read(folder: Path, key: str) -> Any:
    from transformers import AutoTokenizer

    if not key:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    note = _note("tokenizers", key)
    known = read_note(note, [_FORMAT, key])
    if isinstance(known, dict) and known.get("settings"):
        try:
            return _made(folder, known["name"], known["settings"])
        except Exception:  # the note is damaged: whatever a library makes of it, the files themselves decide
            known = None
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if known is None:
        with contextlib.suppress(OSError):
            write_note(note, [_FORMAT, key], _found_out(folder, tokenizer))
    return tokenizer


def _found_out(folder: Path, tokenizer: Any) -> dict[str, Any]:
    """How to make this tokenizer of its file; {} where that would be another one."""
    if not tokenizer.is_fast:
        return {}
    settings = _settings(tokenizer)
    name = type(tokenizer).__name__
    try:
        alike = same_tokenizer(tokenizer, _made(folder, name, settings))
    except Exception:  # it cannot be made so, and is read in full as before
        return {}
    return {"name": name, "settings": settings} if alike else {}


def _settings(tokenizer: Any) -> dict[str, Any]:
    """What the class is given beside the file: special tokens by their text, and what JSON can hold."""
    kept = {
        name: value
        for name, value in tokenizer.init_kwargs.items()
        if isinstance(value, str | int | float | bool) and not name.endswith(("_file", "_class"))
    }
    kept.pop("name_or_path", None)
    special = {name: value for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    extra = tokenizer.init_kwargs.get("extra_special_tokens")
    more = {"extra_special_tokens": [str(token) for token in extra]} if isinstance(extra, list) else {}
    return {**kept, **special, **more, "chat_template": tokenizer.chat_template}


def _made(folder: Path, name: str, settings: dict[str, Any]) -> Any:
    from transformers import PreTrainedTokenizerFast

    named = type(str(name), (PreTrainedTokenizerFast,), {})  # /tokenizer_info names the class
    return named(tokenizer_file=str(folder / FILE), **settings)


def _key(folder: Path) -> str:
    """Hash of the files that make the tokenizer, and of the versions that read them; "" where they are not alone."""
    import tokenizers
    import transformers

    if not (folder / FILE).is_file():
        return ""
    files = sorted(path for pattern in _SIDE for path in folder.glob(pattern) if path.is_file())
    files += [folder / "config.json"] if (folder / "config.json").is_file() else []  # it may choose the class
    digests = [f"{path.relative_to(folder)}={cached_file_hash(path, cache=cache_root())}" for path in files]
    return combine([transformers.__version__, tokenizers.__version__, *digests])


def _note(kind: str, key: str) -> Path:
    return cache_root() / kind / f"{key}.json"
