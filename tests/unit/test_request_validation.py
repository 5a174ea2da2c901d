"""What is refused before it is queued: one line that names the parameter as the client wrote it."""

from __future__ import annotations

import math

import pytest

from scheduler.errors import BadParams
from scheduler.validation import check_request
from scheduler.wire import Request, SamplingParams

VOCAB = 10


def check(**params: object) -> None:
    check_request(Request("r", (1, 2), SamplingParams(**params)), VOCAB)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("params", "field", "says"),
    [
        ({"presence_penalty": 2.1}, "presence_penalty", "from -2 to 2, not 2.1"),
        ({"frequency_penalty": -math.inf}, "frequency_penalty", "from -2 to 2"),
        ({"frequency_penalty": math.nan}, "frequency_penalty", "not nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty", "from 0.01 to 100, not 0.0"),
        ({"logit_bias": ((10, 1.0),)}, "logit_bias", "token 10, and the vocabulary is 0 to 9"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias", "token -1"),
        ({"logit_bias": ((3, 101.0),)}, "logit_bias", "from -100 to 100, and that of token 3 is 101.0"),
        ({"logit_bias": ((3, math.nan),)}, "logit_bias", "nan"),
        ({"logit_bias": ((3, 1.0), (3, 2.0))}, "logit_bias", "twice"),
        ({"num_logprobs": 21}, "top_logprobs", "from 0 to 20, not 21"),
        ({"num_logprobs": -1}, "top_logprobs", "from 0 to 20"),
        ({"min_tokens": 1, "stop_ids": tuple(range(10))}, "min_tokens", "every token is a stop token"),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(params: dict, field: str, says: str) -> None:
    with pytest.raises(BadParams, match=says.replace("(", r"\(")) as refusal:
        check(**params)
    assert refusal.value.param == field


def test_the_bounds_themselves_are_served() -> None:
    check(presence_penalty=-2.0, frequency_penalty=2.0, repetition_penalty=100.0, num_logprobs=20)
    check(logit_bias=((0, -100.0), (9, 100.0)), num_logprobs=0, repetition_penalty=0.01)
    check(stop_ids=tuple(range(10)))
