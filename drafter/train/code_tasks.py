# ruff: noqa: E501 (texts)
"""Programming prompts written by us: functions to write, stubs to complete, programs to explain.

Owns texts only: the ways of asking, times the functions of code_functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from drafter.train.code_functions import FUNCTIONS

_ASKS = (
    "Write a function to {what}.",
    "Write a python function to {what}.",
    "Write a Python function `{name}` that will {what}.",
    "Write a function that can {what}. Include a short docstring.",
    "Implement {name}({args}) in Python to {what}, and show one example.",
    "How would I {what} in Python?",
    "Write a JavaScript function to {what}.",
    "I need code to {what}. Please explain each step briefly.",
    "Write a function to {what}. Your code should pass this test: assert {name}({call}) == {result}",
    "Write unit tests for a function that should {what}.",
    "Write a C++ function to {what}.",
    "Write a Java method to {what}.",
    "Write a Python one-liner or short function to {what}.",
    "Create a function named {name} which takes {args} and should {what}.",
    "Here is my task: {what}. The input is {args} and the output is {returns}. Show me the Python code.",
    "Write a function to {what}. Do not use any imports.",
    "Write a program that reads the input from the user and then has to {what}.",
    "What is the time complexity of a function to {what}? Write it first.",
    "Write pytest tests for `{name}({args})`, which should {what}. Cover edge cases; one normal case is {name}({call}) == {result}.",
    "Explain step by step how to {what}, then give the Python code.",
    "My function {name} should {what}, but {name}({call}) does not return {result}. Which mistakes are likely, and what does a correct version look like?",
    "Show two different ways to {what} in Python and compare them.",
    "Write a fully typed Python function `{name}({args}) -> {returns}` to {what}. Raise a ValueError for invalid input.",
    "Answer with code only: a Python function to {what}.",
    "Trace by hand why {name}({call}) gives {result} when {name} has to {what}. Then write {name} in Python.",
    "Write a TypeScript function to {what}.",
)
_STUB = (
    "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{imports}\ndef {name}({args}) -> {returns}:\n"
    '    """ {What}.\n    >>> {name}({call})\n    {result}\n    """\n\n```'
)
_STUB_PROSE = (
    "Write a solution to the following problem and make sure that it passes the tests:\n```python\n\n\ndef {name}({args}) -> {returns}:\n"
    '    """\n    Given the arguments, {what}.\n    Return an empty result for empty input.\n\n    Examples:\n    {name}({call}) => {result}\n    """\n\n```'
)
_STUB_OUTLINE = (
    "Finish the function below and answer with the whole function in one code block.\n```python\n{imports}\ndef {name}({args}) -> {returns}:\n"
    '    """{What}.\n\n    For example, {name}({call}) returns {result}.\n    """\n    ...\n```'
)
_FIX = (
    "This function should {what}, but it always returns None:\n```python\ndef {name}({args}):\n    result = None\n    # the rest got lost\n    return result\n```\n"
    "Fix the bug, so that {name}({call}) returns {result}."
)
_TEST_FIRST = (
    "The function to {what} is not written yet, so this test fails. Write the function.\n```python\ndef test_{name}():\n"
    "    assert {name}({call}) == {result}\n```"
)
_COMPLETE = "Complete this Python function.\n```python\ndef {name}({args}):\n    # {what}\n```"
# stubs with a docstring, as benchmarks have them, most often
_STUBS = (*[_STUB] * 4, *[_STUB_PROSE] * 2, _STUB_OUTLINE, _COMPLETE, _FIX, _TEST_FIRST)

_PROGRAMS = (
    "Write a Python class {thing} with methods to add, remove and list items.;shopping cart,address book,music playlist,task list,inventory,recipe box,photo album,ticket queue,guest list,bookshelf,bank account,parking lot",
    "Write a Python script that {thing}.;renames all files in a folder by date,counts words in a text file,downloads nothing but prints the current time every minute,reads a CSV file and prints the average of each column,finds duplicate files in a directory,converts a JSON file to CSV,plots a sine wave with matplotlib,prints a calendar for the current month,generates random passwords,plays rock paper scissors with the user,backs up a folder to a zip file,logs messages to a file",
    "Write an SQL query that {thing}.;lists customers with more than five orders,finds the second highest salary,counts orders per month,joins employees with their departments,deletes duplicate rows,returns products that were never sold,updates prices by ten percent,finds the average rating per film",
    "Explain what {thing} means in programming and give a small example.;recursion,a hash table,a closure,inheritance,a generator,a decorator,Big O notation,a race condition,a linked list,dependency injection,a binary search tree,memoization,an API,unit testing,garbage collection,a lambda function",
    "Write an HTML page with CSS for {thing}.;a personal portfolio,a login form,a recipe card,a pricing table,a photo gallery,a contact form,a to-do list,a restaurant menu",
    "Write a bash command or script to {thing}.;find the ten largest files,count lines of code in a project,rename files to lower case,watch disk usage,compress old logs,list running processes by memory",
    "Write a small Python class for {thing} with type hints, and show how it is used.;a ring buffer,a stack that knows its minimum,a sparse matrix,a money amount with a currency,a countdown timer,a two-way dictionary,a prefix tree,a bounded counter,a deck of cards,a fraction,a half-open interval,an event log",
    "Write a Python generator that yields {thing}.;the lines of a file without comments,all dates between two days,pairs of neighbouring items,the digits of a number from right to left,moves of a chess knight from a square,words of a text one at a time,random walks on a grid,batches of rows from a large table",
)


def code_tasks(random: Random) -> Iterator[str]:
    """Endless: functions asked for in two dozen ways, stubs in about a third of the prompts, whole programs in a tenth."""
    functions = [_parsed(line) for line in FUNCTIONS]
    programs = [frame.replace("{thing}", thing) for frame, things in _frames() for thing in things.split(",")]
    while True:
        for fields in random.sample(functions, len(functions)):
            draw = random.random()
            if draw < 0.1:
                yield random.choice(programs)
            elif draw < 0.42:
                yield random.choice(_STUBS).format(**fields)
            else:
                # the plain requests, as most people and benchmarks write them, most often
                yield random.choice(_ASKS[:2] * 6 + _ASKS).format(**fields)


def _frames() -> Iterator[tuple[str, str]]:
    for line in _PROGRAMS:
        frame, things = line.split(";")
        yield frame, things


def _parsed(line: str) -> dict[str, str]:
    what, name, signature, example = (part.strip() for part in line.split(" | "))
    args, returns = signature.rsplit(" -> ", 1)
    call, result = example.rsplit(" -> ", 1)
    imports = "from typing import List, Dict\n\n" if "list" in args or "dict" in args else "\n"
    return {
        "what": what,
        "What": what[0].upper() + what[1:],
        "name": name,
        "args": args,
        "returns": returns,
        "call": call,
        "result": result,
        "imports": imports,
    }
