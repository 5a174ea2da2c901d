"""From validated fields to what the engine is asked for."""

from __future__ import annotations

from scheduler.wire import Grammar, SamplingParams
from services.gateway.errors import ContextTooLong
from services.gateway.fields import GenerationFields
from services.model_card import ModelCard


def sampling_params(
    fields: GenerationFields, card: ModelCard, num_prompt: int, *, grammar: Grammar | None = None
) -> SamplingParams:
    """Values the client leaves out come from the model's generation_config, then from OpenAI's defaults; without a limit
    the answer may fill the context. Raises ContextTooLong."""
    room = card.max_model_len - num_prompt
    wanted = fields.wanted_tokens
    least = wanted or fields.min_tokens or 1
    if room < least:
        asked = f"{wanted} tokens were asked for" if wanted else f"the answer needs at least {least}"
        too_much = fields.length_field if wanted else "min_tokens"
        raise ContextTooLong(
            f"the context holds {card.max_model_len} tokens: the prompt has {num_prompt} "
            f"and {asked}, together {num_prompt + least}; "
            + (f"{too_much} can be at most {room}" if room > 0 else "shorten the prompt"),
            too_much if room > 0 else fields.prompt_field,
        )
    eos = () if fields.ignore_eos else card.eos_ids
    return SamplingParams(
        temperature=_first(fields.temperature, card.defaults.get("temperature"), 1.0),
        top_k=max(0, int(_first(fields.top_k, card.defaults.get("top_k"), 0))),
        top_p=_first(fields.top_p, card.defaults.get("top_p"), 1.0),
        min_p=_first(fields.min_p, card.defaults.get("min_p"), 0.0),
        seed=fields.seed,
        max_tokens=wanted or room,
        min_tokens=fields.min_tokens or 0,
        stop_ids=tuple(dict.fromkeys((*eos, *(fields.stop_token_ids or ())))),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=_first(fields.repetition_penalty, card.defaults.get("repetition_penalty"), 1.0),
        logit_bias=fields.biases,
        num_logprobs=fields.num_logprobs,
        grammar=grammar,
    )


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)
