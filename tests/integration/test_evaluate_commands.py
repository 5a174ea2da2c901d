"""`dspark calibrate` and `dspark evaluate` on the real engine with small models, and what they refuse."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from drafter.calibration import Calibration, Scaling, load_calibration, save_calibration
from drafter.checkpoint import read_drafter
from scheduler.errors import SettingsError
from scheduler.wire import SamplingParams
from services.cli import main
from services.evaluation.equality import Equality, TieJudge, compare, seeded_gap
from services.evaluation.prompts import calibration_prompts, load_dataset
from services.evaluation.rollouts import Answer, Sampling, open_rollouts
from services.settings import load_settings
from tests.integration.character_tokenizer import save_tokenizer
from verifier.sampling import seeded_pick
from verifier.sampling_table import SamplingTable
from verifier.weights import fingerprint

FLOAT32 = ("model.dtype=float32", "drafter.dtype=float32", "threads=1")


@pytest.fixture(autouse=True)
def no_environment(monkeypatch) -> None:
    for name in [name for name in os.environ if name.startswith("DSPARK_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def target(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated") / "target"
    shutil.copytree(golden / "target", folder)
    return save_tokenizer(folder, 48)


@pytest.fixture
def checkpoint(golden: Path, tmp_path: Path) -> Path:
    """A drafter of our own to write beside."""
    return Path(shutil.copytree(golden / "dspark_vanilla", tmp_path / "vanilla"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("data")
    files = []
    for name, count in (("few", 3), ("more", 5)):
        rows = [{"id": f"{name}-{n}", "turns": [f"{name} {n} prompt", "and then?"]} for n in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        files.append(str(folder / f"{name}.jsonl"))
    return files


@pytest.fixture
def flags(target: Path) -> list[str]:
    assignments = (*FLOAT32, f"cache_dir={target.parent / 'cache'}")
    return ["--model", str(target), *(word for a in assignments for word in ("--set", a))]


def last_json(text: str) -> dict:
    return json.loads(text.strip().splitlines()[-1])


def test_calibrate_writes_beside_the_weights_what_serving_reads_and_says_how_good_it_is(
    flags, checkpoint, data, tmp_path, capsys
):
    plot = tmp_path / "reliability.png"
    few = ["--max-tokens", "50", "--regimes", "greedy,sampled", "--concurrency", "4", "--temperature-only"]
    asked = ["--drafter", str(checkpoint), "--prompts", *data, "--plot", str(plot)]
    assert main(["calibrate", *flags, *asked, *few]) == 0
    shown = capsys.readouterr()
    report = last_json(shown.out)
    read = load_calibration(checkpoint, read_drafter(checkpoint).block_size, fingerprint(checkpoint))
    assert set(read.regimes) == {"greedy", "sampled"} and read.checkpoint == fingerprint(checkpoint)
    assert "calibration.json" in shown.out and "8 of 8 prompts" in shown.err
    for regime in ("greedy", "sampled"):
        fit = report[regime]
        assert fit["rounds_fitted"] > 100 and fit["rounds_held_out"] > 50 and fit["accepted_length"] >= 1
        assert fit["after"]["ece"] <= fit["before"]["ece"] and len(fit["after"]["ece_at"]) == 7
        assert read.regimes[regime].biases == (0.0,) * 7
    assert json.loads((checkpoint / "calibration.json").read_text())["fit"]["greedy"] == report["greedy"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert not [each for each in checkpoint.iterdir() if each.name.startswith(".")]


def test_a_fit_of_too_few_rounds_replaces_no_earlier_one_unless_told(flags, checkpoint, data, capsys):
    mark, path = fingerprint(checkpoint), checkpoint / "calibration.json"
    earlier = Scaling((0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2), (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7))
    save_calibration(checkpoint, Calibration({"greedy": earlier, "seeded": earlier}, mark))
    before = path.read_bytes()
    asked = ["calibrate", *flags, "--drafter", str(checkpoint), "--prompts", *data, "--regimes", "greedy"]
    asked += ["--max-tokens", "20", "--concurrency", "4", "--least-rounds", "10000"]
    assert main(asked) == 1
    shown = capsys.readouterr()
    reached = last_json(shown.out)["greedy"]["rounds_reached"]
    said = shown.err.strip().splitlines()[-1]
    assert said.startswith(f"dspark: {path} is kept as it was: fewer than 10000 rounds reached greedy draft 1 (")
    assert all(f"{k} ({count})" in said for k, count in enumerate(reached, start=1)) and "--replace" in said
    assert path.read_bytes() == before and "written" not in shown.out
    assert main([*asked, "--replace"]) == 0
    assert "inherited, not fitted: fewer than 10000 rounds reached greedy draft 1 (" in capsys.readouterr().out
    read = load_calibration(checkpoint, 7, mark)
    assert set(read.regimes) == {"greedy", "seeded"} and read.regimes["seeded"] == earlier
    # nothing was fitted: what was known, or the head's own where that is better on the held-out prompts
    assert read.regimes["greedy"] in (earlier, Scaling.of_temperatures(*(1.0,) * 7))


async def test_rounds_that_are_noted_are_the_answer_after_its_first_token(flags, target, checkpoint):
    settings = load_settings(
        flags={
            "model": {"path": str(target), "dtype": "float32"},
            "drafter": {"checkpoint": str(checkpoint), "dtype": "float32"},
            "threads": 1,
        }
    )
    async with open_rollouts(settings, concurrency=2, seed=0, apply_calibration=False) as rollouts:
        answers = await rollouts.run([["one"], ["two"], ["three"]], Sampling(1.0, 40))
        width, stops = rollouts.drafter.width, rollouts.model.card.eos_ids
    assert [answer.prompt for answer in answers] == [0, 1, 2]
    for answer in answers:
        told = [token for each in answer.rounds for token in each.token_ids]
        end = next((at + 1 for at, token in enumerate(told) if token in stops), len(told))
        assert told[:end] == answer.token_ids[1 : 1 + end] and len(told) > 0
        # what is missing at the end is less than a whole round
        assert len(answer.token_ids) - 1 - end <= width
        for each in answer.rounds:
            assert each.num_verified == each.num_drafted == width and len(each.logits) == width


def test_evaluate_puts_drafters_side_by_side_and_checks_the_text(flags, golden, checkpoint, data, tmp_path, capsys):
    scaling = Scaling((1.0,) * 7, (-0.5,) * 7)
    save_calibration(checkpoint, Calibration({"greedy": scaling, "sampled": scaling}))
    out = tmp_path / "out"
    asked = ["--drafter", str(checkpoint), str(golden / "dflash"), "--data", *data, "--out", str(out)]
    few = ["--max-tokens", "24", "--thresholds", "0.2,1", "--sweep-prompts", "1", "--check-prompts", "2"]
    assert main(["evaluate", *flags, *asked, *few, "--concurrency", "4", "--max-prompts", "3"]) == 0
    shown = capsys.readouterr()
    found = last_json(shown.out)
    assert shown.err.count("accepted length") == 8
    cells = {(c["drafter"], c["dataset"], c["temperature"]): c for c in found["cells"]}
    assert set(cells) == {(d, s, t) for d in ("vanilla", "dflash") for s in ("few", "more") for t in (0.0, 1.0)}
    for (drafter, _, _), cell in cells.items():
        assert cell["prompts"] == 3 and cell["rounds"] > 0 and cell["verified"] == 7
        assert cell["equality"] == {"compared": 2, "equal": 2, "near_ties": 0, "wrong": 0, "largest_gap": 0.0}
        assert cell["accepted_length"] == pytest.approx(1 + sum(cell["survival"]), abs=0.3)
        assert (cell["before"] is None) == (drafter == "dflash") == (cell["after"] is None)
    for macro in found["macro"]:
        ours = [c for (d, _, t), c in cells.items() if (d, t) == (macro["drafter"], macro["temperature"])]
        assert (macro["ece_of_all_rounds"][0] is None) == (macro["drafter"] == "dflash")
        assert macro["accepted_length"] == pytest.approx(np.mean([c["accepted_length"] for c in ours]), abs=1e-4)
    for sweep in found["sweeps"]:
        assert sweep["drafter"] == "vanilla" and sweep["thresholds"] == [0.0, 0.2, 1.0]
        assert sweep["verified"][0] == 7 >= sweep["verified"][1] >= sweep["verified"][2] == 0
        assert sweep["accepted_length"][2] == 1
    report = (out / "report.md").read_text()
    assert "target's own (bonus) token included" in report and "| macro average |" in report
    for plot in ("acceptance.png", "reliability.png", "thresholds.png"):
        assert f"({plot})" in report and (out / plot).read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "results.json").read_text()) == found


def test_all_turns_of_a_conversation_are_asked_when_told(flags, checkpoint, data, tmp_path, capsys):
    asked = ["--drafter", str(checkpoint), "--data", data[0], "--out", str(tmp_path), "--temperatures", "0"]
    few = ["--max-tokens", "20", "--sweep-prompts", "0", "--check-prompts", "3"]
    (one,) = _cells(["evaluate", *flags, *asked, *few], capsys)
    (both,) = _cells(["evaluate", *flags, *asked, *few, "--all-turns"], capsys)
    assert one["prompts"] == both["prompts"] == 3
    assert (one["equality"]["equal"], both["equality"]["equal"]) == (3, 6) and both["rounds"] > one["rounds"]


def _cells(arguments: list[str], capsys) -> list[dict]:
    assert main(arguments) == 0
    return last_json(capsys.readouterr().out)["cells"]


@pytest.mark.parametrize(("bias", "verified"), [(-30.0, 0), (30.0, 7)])
async def test_the_planner_decides_on_calibrated_confidence(bias, verified, launch, golden, checkpoint):
    """End to end: nothing but calibration.json differs."""
    scaling = Scaling((1.0,) * 7, (bias,) * 7)
    save_calibration(checkpoint, Calibration({"greedy": scaling}))
    async with launch(golden / "target", checkpoint, planner="threshold:0.5") as engine:
        (answer,) = await engine.ask([[3, 4, 5]], SamplingParams(temperature=0.0, max_tokens=40))
    assert [(each.num_drafted, each.num_verified) for each in answer.rounds[:3]] == [(7, verified)] * 3


def answer_of(*token_ids: int, prompt: int = 0, seed: int | None = None) -> Answer:
    params = SamplingParams(temperature=0.0 if seed is None else 1.0, seed=seed)
    return Answer(prompt, [3, 4, 5], params, list(token_ids))


def test_a_text_that_is_not_the_targets_is_told_from_a_near_tie(golden):
    judge = TieJudge(golden / "target")
    expected = [answer_of(6, 7, 8), answer_of(9, prompt=1), answer_of(5, 5, prompt=2)]
    same = compare(expected, expected, judge, 1e-3)
    assert same.holds and same.facts()["equal"] == 3
    other = [answer_of(6, 9, 8), answer_of(9, prompt=1), answer_of(5, prompt=2)]
    found = compare(expected, other, judge, 1e-3)
    assert [(d.prompt, d.position) for d in found.differences] == [(0, 1), (2, 1)]
    assert not found.holds and found.facts()["wrong"] == 2 and found.facts()["largest_gap"] == "ended early"
    assert 0 < found.differences[0].gap < float("inf")
    assert Equality(1, found.differences[:1], near_tie=1e6).holds


def test_a_seeded_gap_is_asked_of_the_draw_where_unlikely_tokens_share_their_noise():
    """In a wide row the tail wins as a whole, so the two tokens' own logits and noises do not say how close it was."""
    logits = 2 * torch.randn(5000, generator=torch.Generator().manual_seed(0))

    def drawn(row: torch.Tensor, seed: int) -> int:
        table = SamplingTable.build([SamplingParams(temperature=1.0, seed=seed)], torch.device("cpu"))
        return int(seeded_pick(row[None].clone(), table, torch.tensor([3]))[0])

    def boosted(by: float) -> torch.Tensor:
        row = logits.clone()
        row[likely] += by
        return row

    likely = int(logits.argmax())
    for seed in range(200):
        low, high = 0.0, 30.0
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (low, middle) if drawn(boosted(middle), seed) == likely else (middle, high)
        unlikely = drawn(boosted(low), seed)
        if unlikely != likely and boosted(low).softmax(0)[unlikely] < 2.0**-13:
            break
    params = SamplingParams(temperature=1.0, seed=seed)
    assert seeded_gap(boosted(low), (unlikely, likely), params, 3) <= 0.01
    assert seeded_gap(boosted(low + 3.0), (unlikely, likely), params, 3) > 0.1
    assert seeded_gap(boosted(30.0), (likely, likely), params, 3) < 0.001


def test_prompts_to_calibrate_with_are_mixed_distinct_and_not_those_of_the_evaluation(tmp_path):
    prompts = calibration_prompts(("builtin",), (), 60, seed=0)
    assert len(set(prompts)) == len(prompts) == 60
    held_back = tmp_path / "held.jsonl"
    held_back.write_text("".join(json.dumps({"turns": [prompt]}) + "\n" for prompt in prompts[:10]))
    rest = calibration_prompts(("builtin",), (str(held_back),), 60, seed=0)
    assert not set(prompts[:10]) & set(rest) and len(rest) == 60
    assert (
        calibration_prompts(("builtin",), (), 60, seed=0)
        == prompts
        != calibration_prompts(("builtin",), (), 60, seed=1)
    )
    assert calibration_prompts((str(held_back),), (), 60, seed=0) != prompts[:10]
    assert set(calibration_prompts((str(held_back),), (), 60, seed=0)) == set(prompts[:10])


@pytest.mark.parametrize("line", ["{", '{"turns": []}', '{"turns": [1]}', '{"turns": "text"}', '{"prompt": "x"}', "[]"])
def test_a_bad_line_of_a_data_set_is_named(tmp_path, line):
    file = tmp_path / "x.jsonl"
    file.write_text('{"turns": ["good"]}\n' + line + "\n")
    with pytest.raises(SettingsError, match="line 2"):
        load_dataset(str(file), 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["calibrate", "--drafter", "ngram"], "nothing to calibrate"),
        (["calibrate", "--drafter", "none"], "nothing to calibrate"),
        (["calibrate", "--drafter", "DFLASH", "--prompts", "DATA"], "no confidence head"),
        (["calibrate", "--drafter", "FOREIGN", "--prompts", "DATA"], "this drafter is for another target"),
        (["calibrate", "--drafter", "/nowhere/at/all"], "drafter.checkpoint"),
        (["calibrate", "--drafter", "VANILLA", "--prompts", "/nowhere.jsonl"], "/nowhere.jsonl cannot be read"),
        (["calibrate", "--drafter", "VANILLA", "--prompts", "EMPTY"], "no prompts there"),
        (["calibrate", "--drafter", "VANILLA", "--prompts", "DATA", "--exclude", "DATA"], "all of them excluded"),
        (["calibrate", "--drafter", "VANILLA", "--exclude", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["calibrate", "--drafter", "VANILLA", "--held-out", "1"], "--held-out"),
        (["calibrate", "--drafter", "VANILLA", "--regimes", "greedy,chat"], "--regimes"),
        (["calibrate", "--drafter", "VANILLA", "--num-prompts", "1"], "--num-prompts"),
        (["calibrate", "--drafter", "VANILLA", "--concurrency", "0"], "--concurrency"),
        (["evaluate", "--drafter", "VANILLA", "--data", "/nowhere.jsonl"], "--data /nowhere.jsonl: No such file"),
        (["evaluate", "--drafter", "VANILLA", "--data", "EMPTY"], "holds no prompts"),
        (["evaluate", "--drafter", "VANILLA", "--data", "DATA", "DATA"], "two files have the same name"),
        (["evaluate", "--drafter", "VANILLA", "VANILLA", "--data", "DATA"], "named twice"),
        (["evaluate", "--drafter", "none", "--data", "DATA"], "--drafter none"),
        (["evaluate", "--drafter", "FOREIGN", "--data", "DATA"], "this drafter is for another target"),
        (["evaluate", "--drafter", "VANILLA", "--data", "DATA", "--temperatures", "0,hot"], "--temperatures"),
        (["evaluate", "--drafter", "VANILLA", "--data", "DATA", "--temperatures", "3"], "--temperatures"),
        (["evaluate", "--drafter", "VANILLA", "--data", "DATA", "--thresholds", "1.5"], "--thresholds"),
        (["evaluate", "--drafter", "VANILLA", "--data", "DATA", "--max-tokens", "1"], "--max-tokens"),
    ],
)
def test_a_refusal_is_one_line_and_no_traceback(
    arguments, words, flags, golden, checkpoint, data, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    foreign = Path(shutil.copytree(golden / "dspark_vanilla", tmp_path / "foreign"))
    config = json.loads((foreign / "config.json").read_text())
    (foreign / "config.json").write_text(json.dumps(config | {"num_target_layers": config["num_target_layers"] + 1}))
    (tmp_path / "empty.jsonl").write_text("\n")
    places = {
        "VANILLA": str(checkpoint),
        "DFLASH": str(golden / "dflash"),
        "FOREIGN": str(foreign),
        "DATA": data[0],
        "EMPTY": str(tmp_path / "empty.jsonl"),
    }
    command, *rest = [places.get(word, word) for word in arguments]
    assert main([command, *flags, *rest]) == 2
    error = capsys.readouterr().err
    assert error.startswith("dspark: ") and error.count("\n") == 1 and words in error
    assert not (checkpoint / "calibration.json").exists()


def test_a_broken_calibration_stops_evaluate_but_not_calibrate(flags, checkpoint, data, tmp_path, capsys):
    """Weights that changed are the reason to calibrate again."""
    (checkpoint / "calibration.json").write_text(json.dumps({"version": 1, "checkpoint": "old", "regimes": {}}))
    asked = ["--drafter", str(checkpoint), "--data", data[0], "--out", str(tmp_path / "out")]
    assert main(["evaluate", *flags, *asked]) == 2
    assert "calibrate again" in capsys.readouterr().err
    few = ["--prompts", *data, "--max-tokens", "20", "--regimes", "greedy", "--temperature-only"]
    assert main(["calibrate", *flags, "--drafter", str(checkpoint), *few]) == 0
    assert json.loads((checkpoint / "calibration.json").read_text())["checkpoint"] == fingerprint(checkpoint)
