"""`dspark simulate` as a user meets it: a table, one JSON line, a picture; what it is not given right it names."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from services.cli import main


def test_it_prints_a_table_and_ends_in_one_json_line_and_draws(tmp_path, capsys):
    picture = tmp_path / "x.png"
    flags = [
        "--curve",
        "linear",
        "--planners",
        "off,fixed:2,algorithm1",
        "--loads",
        "2,1-4-1,poisson:9",
        "--seconds",
        "1.5",
    ]
    assert main(["simulate", *flags, "--plot", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    document = json.loads(lines[-1])
    assert [(row["load"], row["planner"]) for row in document["rows"]] == [
        (load, planner) for load in ("2", "1-4-1", "poisson:9") for planner in ("off", "fixed:2", "algorithm1")
    ]
    assert all(row["tokens_per_s"] > 0 and row["ratio"] > 0 for row in document["rows"])
    assert len(lines[1].split()) == 12 and lines[1].split()[:3] == ["mixed", "2", "off"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_it_times_planning_by_part_for_planners_that_weigh(capsys):
    assert main(["simulate", "--planning", "3,40", "--planners", "off,algorithm1,auto"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = json.loads(lines[-1])["rows"]
    assert [(row["planner"], row["num_requests"]) for row in rows] == [
        (planner, count) for planner in ("algorithm1", "auto") for count in (3, 40)
    ]
    for row in rows:
        parts = ("judge", "price", "outlook", "admit")
        assert row["plan_s"] == pytest.approx(sum(row[part] for part in parts)) and min(row[p] for p in parts) > 0.0
    assert len(lines[0].split()) == len(lines[1].split()) == 10


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--loads", "4x", "load '4x': write clients (16), a ramp (1-64-1) or arrivals per second (poisson:20)"),
        ("--loads", "0", "load '0'"),
        ("--loads", "poisson:-1", "load 'poisson:-1'"),
        ("--curve", "abacus", "curve 'abacus' is neither a file nor one of gpu"),
        ("--curve", "none.json", "curve none.json: No such file"),
        ("--workloads", "poems", "workload 'poems' is neither a .jsonl file nor one of mixed"),
        ("--workloads", "none.jsonl", "traces none.jsonl: No such file"),
        ("--planners", "best", "'best' is not a planner"),
        ("--known", "all", "--known 'all': use one of measured, exact, none"),
        ("--outliers", "2", "--outliers 2.0: use a share from 0 to 1"),
        ("--noise", "nan", "--noise nan"),
        ("--width", "0", "--width 0"),
        ("--seconds", "-1", "--seconds -1.0"),
        ("--pipeline-depth", "3", "--pipeline-depth 3: use 1 or 2"),
        ("--planning", "many", "--planning 'many': write numbers of live requests"),
        ("--planning", "0", "--planning '0'"),
    ],
)
def test_a_wrong_flag_is_one_line_that_names_it(flag, value, message, capsys):
    assert main(["simulate", flag, value]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_curve_file_is_what_a_server_saved_or_what_measure_printed(tmp_path, capsys):
    points = {
        "tokens": [1, 8],
        "contexts": [64],
        "verify_s": [[0.01, 0.02]],
        "requests": [1, 4],
        "widths": [7],
        "draft_s": [[0.001], [0.002]],
    }
    saved, printed = tmp_path / "saved.json", tmp_path / "printed.json"
    saved.write_text(json.dumps({"version": 1, "points": points}, indent=1))
    printed.write_text("tokens  ms\n" + json.dumps({"measure": "x", **points}) + "\n")
    speeds = []
    for path in (saved, printed):
        assert main(["simulate", "--curve", str(path), "--loads", "1", "--planners", "off", "--seconds", "2"]) == 0
        speeds.append(json.loads(capsys.readouterr().out.splitlines()[-1])["rows"][0]["tokens_per_s"])
    assert speeds[0] == speeds[1] > 0


@pytest.mark.parametrize("text", ["[]", "{", '{"points": {"tokens": [1]}}', ""])
def test_a_file_that_is_no_curve_is_refused(text, tmp_path, capsys):
    path = tmp_path / "x.json"
    path.write_text(text)
    assert main(["simulate", "--curve", str(path)]) == 2
    assert "is not a cost curve" in capsys.readouterr().err


def test_a_reader_that_has_gone_ends_a_command_without_a_word():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "services.cli", "simulate", "--planning", "1"]
    try:
        ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=300)
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, "")
