"""Settings of the gateway that are lists: from files, variables and flags."""

from __future__ import annotations

import pytest

from scheduler.errors import SettingsError
from services.gateway.speculation import SpeculationPolicy
from services.settings import load_settings


@pytest.mark.parametrize("text", ["a,b", " a , b,", '["a", "b"]'])
def test_names_are_read_from_variables_and_flags_in_both_forms(monkeypatch, text):
    monkeypatch.setenv("DSPARK_GATEWAY__SERVED_NAMES", text)
    assert load_settings(args={}).gateway_config().served_names == ("a", "b")
    monkeypatch.delenv("DSPARK_GATEWAY__SERVED_NAMES")
    flags = {"gateway": {"served_names": text}}
    assert load_settings(args={}, flags=flags).gateway_config().served_names == ("a", "b")


@pytest.mark.parametrize("modes", [False, "off", ["off"], [False]])
def test_off_alone_is_a_list_of_modes_however_yaml_reads_it(modes):
    args = {"gateway": {"speculation": {"modes": modes, "max_draft_tokens": 3}}}
    assert load_settings(args=args).gateway_config().speculation == SpeculationPolicy(("off",), 3)


@pytest.mark.parametrize(
    ("gateway", "key"),
    [
        ({"speculation": {"modes": ["fast"]}}, r"gateway\.speculation\.modes"),
        ({"speculation": {"max_draft_tokens": -1}}, r"gateway\.speculation\.max_draft_tokens"),
        ({"served_names": ["a", " "]}, r"gateway\.served_names"),
        ({"served_names": '["a"'}, r"gateway\.served_names"),
        ({"max_choices": 0}, r"gateway\.max_choices"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(gateway, key):
    with pytest.raises(SettingsError, match=key):
        load_settings(args={"gateway": gateway})
