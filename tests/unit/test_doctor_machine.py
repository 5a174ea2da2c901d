"""`dspark doctor` on a machine: each warning and failure is caused, not imagined, and says what to do."""

from __future__ import annotations

import importlib
import json
import os
import resource
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from scheduler.throughput import CostCurve, CurvePoints, save_curve
from services.cli import main
from services.doctor import machine
from services.doctor.command import check_machine
from services.doctor.findings import Finding, age, found
from services.doctor.models import Models, _free_bytes, _worker_key, check_curve, check_memory
from services.engine import curve_path, machine_key
from services.settings import Settings, load_settings
from tests.integration.character_tokenizer import save_tokenizer
from verifier.kv import bytes_per_token

CALIBRATION = {"version": 1, "checkpoint": "", "regimes": {"greedy": {"temperatures": [1.0] * 7}}}


@pytest.fixture(scope="module")
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def tree(golden: Path, tmp_path: Path, free_port: int) -> dict[str, Any]:
    """Settings of a machine where all is well but the curve and the calibration are not there yet."""
    target = save_tokenizer(Path(shutil.copytree(golden / "target", tmp_path / "target")), 48)
    drafter = shutil.copytree(golden / "dspark_vanilla", tmp_path / "drafter")
    return {
        "model": {"path": str(target), "dtype": "float32", "device": "cpu"},
        "drafter": {"checkpoint": str(drafter), "dtype": "float32", "device": "cpu"},
        "gateway": {"port": free_port},
        "threads": 1,
        "cache_dir": str(tmp_path / "cache"),
    }


@pytest.fixture
def look(tree: dict[str, Any]) -> Callable[..., dict[str, Finding]]:
    """look(section={...}) -> findings by check, with these settings changed."""

    def run(**sections: Any) -> dict[str, Finding]:
        changed = {**tree, **{n: {**tree.get(n, {}), **v} if isinstance(v, dict) else v for n, v in sections.items()}}
        return {each.check: each for each in check_machine(lambda: load_settings(args=changed))}

    return run


def states(findings: dict[str, Finding]) -> dict[str, str]:
    return {name: each.state for name, each in findings.items() if each.state != "ok" and name != "versions"}


def assert_said(finding: Finding, state: str, *words: str) -> None:
    assert finding.state == state and finding.todo, finding
    for word in words:
        assert word in finding.said + " -> " + finding.todo, finding


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def curve(settings: Settings, **made: Any) -> Path:
    """A saved curve that fits these settings, but for what `made` says."""
    models, key = Models(settings), machine_key(settings)
    points = CurvePoints((1, 8), (64,), ((0.01, 0.02),), (1, 4), (1, 7), ((0.001, 0.002), (0.002, 0.003)))
    worker = _worker_key(models, 7) | made.pop("key", {})
    path = curve_path(settings, key)
    save_curve(path, CostCurve(points, made.pop("measured_at", time.time())), key | worker)
    return path


def test_a_machine_where_all_is_well(look, tree, tmp_path):
    settings = load_settings(args=tree)
    curve(settings)
    (tmp_path / "drafter" / "calibration.json").write_text(json.dumps(CALIBRATION))
    findings = look()
    assert states(findings) == {} and len(findings) == 17, findings
    assert "regimes greedy" in findings["calibration"].said and "up to 8 tokens" in findings["curve"].said
    assert findings["drafter"].said.startswith("dspark-vanilla of up to 7 tokens")


def test_the_command_prints_a_line_for_each_check_and_its_status_says_whether_one_failed(tree, tmp_path, capsys):
    file = tmp_path / "settings.yaml"
    file.write_text(json.dumps(tree))
    assert main(["doctor", "--settings", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 18 and all(line.split()[0] in ("ok", "warn") for line in lines[:-1])
    assert main(["doctor", "--settings", str(file), "--drafter", str(tmp_path / "target"), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert {each["check"] for each in told["checks"] if each["state"] == "fail"} >= {"drafter"}
    assert main(["doctor", "--set", "kv.blocksize=3"]) == 1
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("fail  settings") and "kv.block_size" in first and len(rest) >= 4, (
        "the rest is looked at too"
    )


# -- the two models --


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 32}, "hidden_size"),
        ({"vocab_size": 63}, "vocab_size"),
        ({"num_target_layers": 9}, "num_target_layers"),
        ({"architectures": ["GPT2Model"]}, "GPT2Model"),
    ],
)
def test_a_drafter_for_another_target_fails(look, tmp_path, change, words):
    edit(tmp_path / "drafter" / "config.json", **change)
    findings = look()
    assert_said(findings["drafter"], "fail", words)


def test_layers_that_the_target_lacks_and_broken_weights_fail(look, tmp_path):
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    section = config.get("dflash_config") or config.get("dspark_config") or config
    ids = section["target_layer_ids"]
    section["target_layer_ids"] = [*ids[:-1], 99]
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(config))
    assert_said(look()["drafter"], "fail", "99")
    section["target_layer_ids"] = ids
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(config))
    weights = tmp_path / "drafter" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert_said(look()["drafter"], "fail", "truncated")


def test_a_target_that_is_no_target_fails(look, tmp_path):
    edit(tmp_path / "target" / "config.json", intermediate_size=17)
    assert_said(look()["model"], "fail", "config.json says")
    edit(tmp_path / "target" / "config.json", model_type="gpt2")
    assert_said(look()["model"], "fail", "gpt2", "llama")
    (tmp_path / "target" / "tokenizer.json").unlink()
    shutil.rmtree(tmp_path / "target")
    assert_said(look()["model"], "fail")


def test_a_model_that_must_be_fetched_or_converted_first_is_a_warning(look, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    findings = look(model={"path": "someone/some-model"})
    for name in ("model", "drafter", "memory", "curve", "calibration"):
        assert_said(findings[name], "warn", "has not been downloaded")
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    assert_said(look(model={"path": str(tmp_path / "small.gguf")})["model"], "warn", "has not been converted")


def test_calibrations_that_are_missing_broken_or_of_other_weights(look, tmp_path):
    assert_said(look()["calibration"], "warn", "dspark calibrate")
    path = tmp_path / "drafter" / "calibration.json"
    path.write_text(json.dumps(CALIBRATION | {"checkpoint": "0123456789abcdef"}))
    assert_said(look()["calibration"], "fail", "not these weights")
    path.write_text("{")
    assert_said(look()["calibration"], "fail", "not valid JSON")


# -- the cost curve --


def test_curves_that_are_missing_stale_broken_or_old(look, tree):
    settings = load_settings(args=tree)
    assert_said(look()["curve"], "warn", "no curve has been saved yet", "dspark measure")
    path = curve(settings, key={"target": "another"})
    assert_said(look()["curve"], "warn", "measured with target 'another'")
    curve(settings, measured_at=time.time() - 40 * 86400)
    assert_said(look()["curve"], "warn", "40 days ago", str(path))
    path.write_text("{}")
    assert_said(look()["curve"], "warn", "not a curve")
    assert look(scheduler={"planner": "fixed:3"})["curve"].state == "ok"


async def test_the_key_is_the_one_that_a_start_gives_the_curve(tree):
    """Made here from files, there from what the workers say: a difference would call every good curve stale."""
    from services.engine import Engine
    from services.workers import launch_colocated

    settings = load_settings(args={**tree, "scheduler": {"max_live": 2, "prefill_chunk": 8}})
    engine = Engine(settings, launch_colocated)
    await engine.start()
    await engine.stop()
    assert check_curve(Models(settings)).state == "ok"


# -- memory --


def test_memory_that_is_not_there_or_hardly(look, tree):
    per_token = bytes_per_token(3, 2, 16, torch.float32)  # an estimate: what is needed is read below
    said = look(kv={"num_blocks": 10**9})["memory"]
    assert_said(said, "fail", "kv.cache_bytes")
    settings = load_settings(args=tree)
    needed = sum(sum(parts.values()) for parts in _needs_of(settings).values())
    assert needed > per_token

    def tight(limit_bytes: int) -> Finding:
        path = Path(tree["cache_dir"]).parent / "memory.max"
        path.write_text(str(limit_bytes))
        return check_memory(Models(settings), path)

    assert tight(2 * needed).state == "ok"
    assert_said(tight(int(needed / 0.9)), "warn", "little is left")
    assert_said(tight(needed - 1), "fail", "KV")
    assert _free_bytes("cpu", Path("/nowhere")) > needed


def _needs_of(settings: Settings) -> dict[str, dict[str, int]]:
    from services.doctor.models import _needs

    return _needs(Models(settings))


async def test_the_memory_that_is_counted_is_what_the_workers_take(tree):
    from services.workers import launch_colocated

    settings = load_settings(args=tree)
    needs = _needs_of(settings)["cpu"]
    workers = await launch_colocated(settings)
    info, runner = await workers.verifier.describe(), workers.verifier._loaded()  # type: ignore[attr-defined]
    await workers.stop()
    assert needs["KV"] == info.num_blocks * info.block_size * info.kv_bytes_per_token
    weights = (Path(settings.model.path) / "model.safetensors").stat().st_size
    assert 0.8 * weights <= needs["weights"] <= 1.2 * weights
    assert runner.num_threads == 1


# -- the machine --


def test_a_port_in_use_and_a_public_address_without_keys_fail(look, free_port):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert_said(look(gateway={"port": taken.getsockname()[1]})["port"], "fail", "in use")
    assert_said(look(gateway={"host": "0.0.0.0"})["access"], "fail", "no API keys")


@pytest.fixture
def unwritable(tmp_path: Path) -> Iterator[Path]:
    """A folder that not even root can write: /proc takes no new files."""
    yield Path("/proc/sys/dspark")


def test_a_cache_folder_that_cannot_be_written_or_is_too_small_fails(look, unwritable, tmp_path):
    assert_said(look(cache_dir=str(unwritable))["cache"], "fail", "cannot be written", "cache_dir")
    huge = tmp_path / "huge.gguf"
    huge.touch()
    os.truncate(huge, 1 << 43)  # 8 TiB of nothing
    assert_said(look(model={"path": str(huge)})["cache"], "fail", "conversion needs", "make room")


def test_a_device_that_is_not_here_fails_and_a_gpu_that_torch_does_not_see_warns(look, tmp_path, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert_said(look(model={"device": "cuda"})["devices"], "fail", "CUDA")
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 590.11\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    assert_said(look()["devices"], "warn", "590.11", "CUDA build of torch")


def test_bfloat16_without_its_instructions_is_a_warning(tree):
    wanted = load_settings(args={**tree, "model": {**tree["model"], "dtype": "bfloat16"}})
    plain = frozenset({"avx2", "fma"})
    assert_said(machine.check_instructions(wanted, plain), "warn", "model.dtype=auto")
    assert machine.check_instructions(load_settings(args=tree), plain).state == "ok"
    assert machine.check_instructions(wanted, plain | {"avx512_bf16"}).state == "ok"


def test_compilers_that_are_missing_or_broken_are_a_warning(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CC", "/bin/false")
    assert_said(machine.check_compiler(), "warn", "could not be built", "/bin/false")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC")
    assert_said(machine.check_compiler(), "warn", "install gcc")


def test_kernels_that_are_built_and_do_not_load_are_a_warning(monkeypatch, tmp_path):
    """As from a cache folder that is mounted noexec: they had been built, and served nobody."""
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nfor last in "$@"; do :; done; echo "no library" > "$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CC", str(compiler))
    assert_said(machine.check_compiler(), "warn", "could not be built or loaded", "noexec")


def test_threads_beyond_cores_and_beyond_the_containers_share_are_a_warning(tree, tmp_path):
    many = load_settings(args={**tree, "threads": 4096})
    assert_said(machine.check_threads(many), "warn", "4096")
    limit = tmp_path / "cpu.max"
    limit.write_text("50000 100000\n")
    assert_said(machine.check_threads(load_settings(args=tree), limit), "warn", "0.5 cores")
    limit.write_text("max 100000\n")
    assert machine.check_threads(load_settings(args=tree), limit).state == "ok"


def test_few_open_files_and_a_cluster_that_is_not_there(monkeypatch):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    try:
        assert_said(machine.check_ray(), "warn", "1024 files", "ulimit -n")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{closed.getsockname()[1]}")
        assert_said(found("ray", machine.check_ray), "fail", "no Ray answers there")


def test_shared_memory_that_is_too_small_or_missing_is_a_warning(tmp_path):
    assert_said(machine.check_shared_memory(needed=1 << 60), "warn", "--shm-size")
    assert_said(machine.check_shared_memory(tmp_path / "none"), "warn", "--shm-size")


def test_a_collector_that_is_not_there_is_a_warning(tree):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        assert_said(machine.check_tracing(load_settings(args={**tree, "tracing": {"endpoint": url}})), "warn", url)
    with socket.socket() as there:
        there.bind(("127.0.0.1", 0))
        there.listen()
        url = f"http://127.0.0.1:{there.getsockname()[1]}"
        assert machine.check_tracing(load_settings(args={**tree, "tracing": {"endpoint": url}})).state == "ok"


def test_packages_that_are_missing_fail_and_strange_versions_warn(tmp_path, monkeypatch):
    info = tmp_path / "dspark_serve-0.0.dist-info"
    info.mkdir()
    monkeypatch.syspath_prepend(tmp_path)

    def installed(*wanted: str) -> Finding:
        """What is found where the distribution wants these."""
        needs = "".join(f"Requires-Dist: {each}\n" for each in wanted)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dspark-serve\nVersion: 0.0\n{needs}")
        importlib.invalidate_caches()
        return machine.check_versions()

    assert installed("numpy>=1", 'nothing-like-it; extra == "train"').state == "ok"
    assert_said(installed("numpy>=1,<1.1"), "warn", "numpy is", "<1.1")
    assert_said(installed("numpy>=1", "nothing-like-it>=3"), "fail", "nothing-like-it is missing")


def test_a_check_that_breaks_does_not_hide_the_others():
    def broken() -> Finding:
        raise ZeroDivisionError("oh")

    assert_said(found("odd", broken), "fail", "ZeroDivisionError: oh")


@pytest.mark.parametrize(
    ("seconds", "said"), [(0, "0 minutes"), (61, "1 minute"), (119, "2 minutes"), (7300, "2 hours"), (3e5, "3 days")]
)
def test_an_age_is_said_in_good_grammar(seconds: float, said: str) -> None:
    assert age(seconds) == said
