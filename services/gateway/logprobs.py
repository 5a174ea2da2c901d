"""Logprobs as the two endpoints show them. The numbers are the target's own law: natural logarithms of the softmax of its
logits, before temperature and truncation, of the tokens that were returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.gateway.choice import ShownToken
from services.gateway.text import Tokenizer

# JSON has no minus infinity; OpenAI's own stand-in for it.
_LEAST = -9999.0


def chat_logprobs(tokens: Sequence[ShownToken], tokenizer: Tokenizer, *, mark_drafted: bool) -> dict[str, Any]:
    return {"content": [_entry(token, tokenizer, mark_drafted) for token in tokens], "refusal": None}


def _entry(token: ShownToken, tokenizer: Tokenizer, mark_drafted: bool) -> dict[str, Any]:
    top = [_token(tokenizer, token_id, logprob) for token_id, logprob in token.logprob.top]
    entry = _token(tokenizer, token.token_id, token.logprob.logprob) | {"top_logprobs": top}
    return entry | {"drafted": token.drafted} if mark_drafted else entry


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, _LEAST), "bytes": list(raw)}


def completion_logprobs(tokens: Sequence[ShownToken], tokenizer: Tokenizer, num_chars: int) -> dict[str, Any]:
    """The older form: parallel lists. text_offset counts characters of the choice's text, `num_chars` is its length: a
    token that a stop string cut begins at its end at the latest. A token that is half a character is named by its bytes,
    as OpenAI does, because the alternatives are keyed by name."""
    return {
        "tokens": [_name(tokenizer, token.token_id) for token in tokens],
        "token_logprobs": [max(token.logprob.logprob, _LEAST) for token in tokens],
        "top_logprobs": [_alternatives(token, tokenizer) for token in tokens],
        "text_offset": [min(token.offset, num_chars) for token in tokens],
    }


def _alternatives(token: ShownToken, tokenizer: Tokenizer) -> dict[str, float]:
    """The most probable tokens and the returned one, which may be a token more."""
    found: dict[str, float] = {}
    for token_id, logprob in (*token.logprob.top, (token.token_id, token.logprob.logprob)):
        found.setdefault(_name(tokenizer, token_id), max(logprob, _LEAST))
    return found


def _name(tokenizer: Tokenizer, token_id: int) -> str:
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
