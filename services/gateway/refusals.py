"""Parameters that are known elsewhere and not served here: each would change the answer, so each is refused by name.

The values beside a name ask for nothing and are taken. Parameters that change nothing about the answer (user, metadata,
safety_identifier, prompt_cache_key, ...) and unknown ones are not listed and are taken too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scheduler.errors import BadParams

# Of both endpoints: OpenAI's own, then extensions of other servers.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "moderation": (),
    "prompt_logprobs": (0,),
    "return_token_ids": (False,),
    "length_penalty": (1,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "guided_whitespace_pattern": (),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "thinking_token_budget": (),
    "max_new_tokens": (),
    "n_predict": (),
    "stop_regex": ([], ""),
    "no_stop_trim": (False,),
    "regex": (),
    "ebnf": (),
    "grammar": ("",),
    "json_schema": (),
    "lora_path": (),
    "mirostat": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
}
# Of what renders a conversation.
TOKENIZE_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
    "reasoning_effort": ("none",),
}
CHAT_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **UNSUPPORTED,
    **TOKENIZE_UNSUPPORTED,
    "add_special_tokens": (False,),
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"], []),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "echo": (False,),
}
COMPLETION_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **UNSUPPORTED,
    "echo": (False,),
    "suffix": ("",),
}


def refuse_unsupported(raw: Mapping[str, Any], unsupported: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises BadParams naming every parameter of `raw` that asks for something we do not do; `param` is the first of them."""
    names = [name for name, value in raw.items() if name in unsupported and _asks(value, unsupported[name])]
    if names:
        listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
        raise BadParams(f"{listed} {'is' if len(names) == 1 else 'are'} not supported by this server", param=names[0])


def _asks(value: Any, harmless: tuple[Any, ...]) -> bool:
    return value is not None and not any(_same(value, allowed) for allowed in harmless)


def _same(value: Any, allowed: Any) -> bool:
    """Equality in which True is not 1."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
