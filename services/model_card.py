"""What a gateway must know of the model: tokenizer, chat template, stop ids, sampling defaults, limits.

Read from the model folder where the model lives and sent to every gateway once (2 to 12 MB, nearly all of it the
tokenizer), so gateways need no model files. Knows JSON files only: no tensors, no tokenizer library.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scheduler.errors import BadParams, SettingsError
from scheduler.validation import check_params
from scheduler.wire import SamplingParams

logger = logging.getLogger(__name__)

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_ANY_VOCABULARY = 2**31
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True, slots=True)
class ModelCard:
    """tokenizer_json: the text of tokenizer.json. special_tokens: name -> text, as the chat template expects them.

    eos_ids: tokens that end an answer. defaults: sampling values of generation_config.json, for clients that give none.
    draft_width: γ, the most drafted tokens a round; 0 without a drafter.
    """

    name: str
    created: int
    tokenizer_json: str
    chat_template: str
    special_tokens: dict[str, str]
    eos_ids: tuple[int, ...]
    max_model_len: int
    draft_width: int
    fingerprint: str
    defaults: dict[str, float] = field(default_factory=dict)


def read_card(
    folder: Path, *, name: str, created: int, max_model_len: int, draft_width: int, chat_template: str = ""
) -> ModelCard:
    """The card of the model in `folder`; a non-empty `chat_template` is used instead of the model's own."""
    tokenizer_json = _tokenizer_text(folder)
    tokenizer_config = _json(folder / "tokenizer_config.json")
    generation = _json(folder / "generation_config.json")
    special = _special_tokens(tokenizer_config, _json(folder / "special_tokens_map.json"))
    template = chat_template or _chat_template(folder, tokenizer_config)
    if not template:
        raise SettingsError(
            f"model.path: {folder} has no chat template; set model.chat_template to a file that holds one"
        )
    return ModelCard(
        name=name,
        created=created,
        tokenizer_json=tokenizer_json,
        chat_template=template,
        special_tokens=special,
        eos_ids=_eos_ids(folder, generation, special, tokenizer_json),
        max_model_len=max_model_len,
        draft_width=draft_width,
        fingerprint="fp_" + hashlib.sha256((name + template + tokenizer_json).encode()).hexdigest()[:10],
        defaults=_defaults(generation, folder / "generation_config.json"),
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingsError(f"model.path: {path} is not valid JSON ({error})") from None
    return loaded if isinstance(loaded, dict) else {}


def _tokenizer_text(folder: Path) -> str:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise SettingsError(
            f"model.path: {folder} has no tokenizer.json; write one with transformers' "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    try:
        text = path.read_text(encoding="utf-8")
        fits = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"model.path: {path} is not valid JSON ({error})") from None
    if not fits:
        raise SettingsError(
            f"model.path: {path} holds no JSON object; write it again with AutoTokenizer.save_pretrained"
        )
    return text


def _token_text(value: Any) -> str:
    """A special token is written as its text or as {"content": text, ...}."""
    return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")


def _special_tokens(*sources: dict[str, Any]) -> dict[str, str]:
    found = {}
    for key in SPECIAL_TOKENS:
        text = next((_token_text(source[key]) for source in sources if source.get(key)), "")
        if text:
            found[key] = text
    return found


def _chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template") or _json(folder / "chat_template.json").get("chat_template") or ""
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default", "")
    return str(template)


def _eos_ids(folder: Path, generation: dict[str, Any], special: dict[str, str], tokenizer_json: str) -> tuple[int, ...]:
    """The ids of generation_config.json and config.json, and the tokenizer's eos_token."""
    ids: set[int] = set()
    for source in (generation, _json(folder / "config.json")):
        value = source.get("eos_token_id")
        found = value if isinstance(value, list) else [] if value is None else [value]
        if wrong := [each for each in found if type(each) is not int or each < 0]:
            raise SettingsError(
                f"model.path: {folder} has eos_token_id {wrong[0]!r}; write a token id, or a list of them"
            )
        ids.update(found)
    eos = special.get("eos_token")
    added = json.loads(tokenizer_json).get("added_tokens", [])
    ids.update(token["id"] for token in added if token["content"] == eos)
    return tuple(sorted(ids))


def _defaults(generation: dict[str, Any], path: Path) -> dict[str, float]:
    """Greedy decoding (`do_sample` false) is transformers' default, not a recommendation: it says nothing here. Nor does what no
    client could ask for: it would refuse requests for a value that they do not have."""
    defaults = {}
    for key in SAMPLING_DEFAULTS:
        value = generation.get(key)
        if value is None:
            continue
        try:
            number = float("nan") if isinstance(value, bool | str) else float(value)
            # top_k -1 is off, as in requests
            asked: dict[str, Any] = {key: max(0, int(number)) if key == "top_k" and number >= -1 else number}
            check_params(SamplingParams(**asked), _ANY_VOCABULARY)
        except (BadParams, TypeError, ValueError, OverflowError):
            logger.warning("%s: %s %r is nothing that requests may ask for, and left out", path, key, value)
        else:
            defaults[key] = number
    return defaults
