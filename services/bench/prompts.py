"""Prompts of our own for the benchmark, by kind of text, and prompts from JSONL files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from scheduler.errors import SettingsError

CODE = (
    "Write a Python function that returns the n-th Fibonacci number without recursion. Include a docstring.",
    "Write a Python function `is_palindrome(text)` that ignores case, spaces and punctuation.",
    "Write a Python class Stack with push, pop, peek and is_empty, and show how to use it.",
    "Write a SQL query that lists each customer with the number of orders placed in the last 30 days.",
    "Write a JavaScript function that debounces another function, with comments that explain each line.",
    "Write a Python function that merges two sorted lists into one sorted list in linear time.",
    "Write a bash script that renames every .jpeg file in the current folder to .jpg.",
    "Write a Python function that counts how often each word occurs in a text and returns the ten most frequent.",
)
MATH = (
    "A train travels 180 km in 2.5 hours. What is its average speed in km/h? Show each step.",
    "Tom has 3 boxes with 12 pencils each. He gives away 9 pencils. How many are left? Explain your steps.",
    "Solve the equation 3x + 7 = 25 step by step.",
    "What is the area of a triangle with a base of 14 cm and a height of 9 cm? Show the calculation.",
    "A shirt costs 40 dollars and is reduced by 15 percent. What is the new price? Show the calculation.",
    "Find the sum of the first 20 positive integers and explain the formula you use.",
    "A rectangle is twice as long as it is wide and its perimeter is 36 m. Find its sides step by step.",
    "If 5 machines make 5 parts in 5 minutes, how long do 100 machines need for 100 parts? Explain.",
)
CHAT = (
    "What are three good habits for sleeping better, and why does each help?",
    "Explain to a ten-year-old why the sky is blue.",
    "Write a short email to a colleague asking to move our meeting to Thursday afternoon.",
    "Give me an idea for a birthday surprise for my grandmother who loves gardening.",
    "Describe a walk through an old harbour town in the early morning.",
    "What should I look at when I buy a used bicycle?",
    "Summarise the story of the tortoise and the hare and its moral.",
    "Which vegetables grow well on a balcony with little sun, and how do I start?",
)
BUILT_IN = {"code": CODE, "math": MATH, "chat": CHAT}


def load_prompts(files: Sequence[str], limit: int) -> dict[str, list[str]]:
    """Kind -> user messages, at most `limit` of each (0 is all). Without files the built-in ones; a file's kind is its
    name. Of several turns the first is used."""
    kinds = {Path(file).stem: _read(Path(file)) for file in files} or {name: list(p) for name, p in BUILT_IN.items()}
    return {name: prompts[: limit or None] for name, prompts in kinds.items()}


def _read(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise SettingsError(f"--prompts {path}: {error.strerror or error}") from None
    prompts = [_first_turn(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise SettingsError(f"--prompts {path}: holds no prompts")
    return prompts


def _first_turn(path: Path, number: int, line: str) -> str:
    try:
        turns = json.loads(line)["turns"]
        if isinstance(turns, list) and turns and isinstance(turns[0], str):
            return turns[0]
    except (ValueError, KeyError, TypeError):
        pass
    raise SettingsError(f'--prompts {path}, line {number}: not of the form {{"turns": ["text", ...]}}')
