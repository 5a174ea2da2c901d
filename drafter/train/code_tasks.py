# ruff: noqa: E501 (texts)
"""Programming prompts written by us: functions to write, stubs to complete, programs to explain.

Owns texts only: what a function does, times the ways of asking for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

# verb phrase | function name | signature | example call and result
_FUNCTIONS = """
count the vowels in each word of a sentence | vowels_per_word | text: str -> list[int] | 'tea or coffee' -> [2, 1, 3]
remove every second element from a list | drop_alternate | items: list -> list | [1, 2, 3, 4, 5] -> [1, 3, 5]
merge two dictionaries and add the values of shared keys | merge_counts | a: dict, b: dict -> dict | {'x': 1}, {'x': 2} -> {'x': 3}
rotate a list to the right by k places | rotate_right | items: list, k: int -> list | [1, 2, 3], 1 -> [3, 1, 2]
find the longest word in a paragraph | longest_word | text: str -> str | 'a quick brown fox' -> 'quick'
turn a camelCase name into snake_case | to_snake | name: str -> str | 'maxValue' -> 'max_value'
compute the dot product of two vectors | dot | a: list[float], b: list[float] -> float | [1, 2], [3, 4] -> 11
group words by their first letter | group_by_initial | words: list[str] -> dict | ['ant', 'bee'] -> {'a': ['ant'], 'b': ['bee']}
flatten a list of lists by one level | flatten | nested: list -> list | [[1], [2, 3]] -> [1, 2, 3]
return the running total of a list of numbers | running_total | numbers: list[int] -> list[int] | [1, 2, 3] -> [1, 3, 6]
count how many times each character appears in a string | char_counts | text: str -> dict | 'aab' -> {'a': 2, 'b': 1}
check whether brackets in an expression are balanced | balanced | text: str -> bool | '(a[b])' -> True
convert temperatures from Celsius to Fahrenheit | to_fahrenheit | celsius: float -> float | 100 -> 212.0
find the second smallest number of a list | second_smallest | numbers: list[int] -> int | [4, 1, 3] -> 3
compute the median of a list of numbers | median | numbers: list[float] -> float | [3, 1, 2] -> 2
transpose a matrix given as a list of rows | transpose | rows: list -> list | [[1, 2], [3, 4]] -> [[1, 3], [2, 4]]
replace every digit in a string with a star | mask_digits | text: str -> str | 'a1b2' -> 'a*b*'
split a list into chunks of size n | chunks | items: list, n: int -> list | [1, 2, 3], 2 -> [[1, 2], [3]]
find pairs of numbers in a list that add up to a target | pairs_with_sum | numbers: list[int], target: int -> list | [1, 2, 3], 4 -> [(1, 3)]
parse a line of comma separated values into a list of floats | parse_row | line: str -> list[float] | '1,2.5' -> [1.0, 2.5]
compute the greatest common divisor with Euclid's algorithm | gcd | a: int, b: int -> int | 12, 18 -> 6
list the prime factors of an integer | prime_factors | n: int -> list[int] | 12 -> [2, 2, 3]
compute compound interest after a number of years | compound | amount: float, rate: float, years: int -> float | 100, 0.1, 2 -> 121.0
reverse the order of words in a sentence | reverse_words | text: str -> str | 'one two' -> 'two one'
encode a string with run-length encoding | run_length | text: str -> str | 'aaab' -> 'a3b1'
decode a Caesar cipher with a known shift | decode_caesar | text: str, shift: int -> str | 'bcd', 1 -> 'abc'
return the indices at which a value occurs in a list | positions | items: list, value: int -> list[int] | [5, 1, 5], 5 -> [0, 2]
sort a list of dictionaries by a given key | sort_by | rows: list[dict], key: str -> list[dict] | [{'n': 2}, {'n': 1}], 'n' -> [{'n': 1}, {'n': 2}]
count the lines, words and characters of a text | text_stats | text: str -> tuple | 'a b' -> (1, 2, 3)
compute the Hamming distance of two strings of equal length | hamming | a: str, b: str -> int | 'abc', 'abd' -> 1
check if one string is a rotation of another | is_rotation | a: str, b: str -> bool | 'abcd', 'cdab' -> True
find the missing number in a range from 0 to n | missing | numbers: list[int] -> int | [0, 1, 3] -> 2
multiply two matrices without any library | matmul | a: list, b: list -> list | [[1]], [[2]] -> [[2]]
return the n largest values of a dictionary | top_items | scores: dict, n: int -> list | {'a': 1, 'b': 2}, 1 -> [('b', 2)]
validate an email address with simple rules | valid_email | address: str -> bool | 'a@b.org' -> True
convert seconds to hours, minutes and seconds | hms | seconds: int -> str | 3661 -> '1:01:01'
generate the first n square numbers | squares | n: int -> list[int] | 3 -> [1, 4, 9]
remove duplicate lines from a text and keep their order | unique_lines | text: str -> str | 'a\\na' -> 'a'
compute the moving average of a list with window k | moving_average | numbers: list[float], k: int -> list[float] | [1, 2, 3], 2 -> [1.5, 2.5]
build a frequency histogram with bins of width w | histogram | numbers: list[float], w: float -> dict | [1, 2, 11], 10 -> {0: 2, 1: 1}
find the depth of a nested list | depth | nested: list -> int | [1, [2]] -> 2
count the inversions in a list | inversions | numbers: list[int] -> int | [2, 1] -> 1
compute the edit distance between two words | edit_distance | a: str, b: str -> int | 'cat', 'cut' -> 1
interleave two lists | interleave | a: list, b: list -> list | [1, 3], [2, 4] -> [1, 2, 3, 4]
find the shortest path in an unweighted graph | shortest_path | graph: dict, start: str, goal: str -> list | {'a': ['b'], 'b': []}, 'a', 'b' -> ['a', 'b']
do a topological sort of a dependency graph | topological_order | graph: dict -> list | {'a': ['b'], 'b': []} -> ['b', 'a']
evaluate an expression in reverse Polish notation | evaluate_rpn | tokens: list[str] -> int | ['2', '3', '+'] -> 5
compute the area of a polygon from its corner points | polygon_area | points: list -> float | [(0, 0), (1, 0), (0, 1)] -> 0.5
find the peak elements of a list | peaks | numbers: list[int] -> list[int] | [1, 3, 2] -> [3]
keep only the words that are longer than n letters | long_words | text: str, n: int -> list[str] | 'an apple', 3 -> ['apple']
convert a hexadecimal colour to RGB | hex_to_rgb | colour: str -> tuple | '#ff0000' -> (255, 0, 0)
compute a checksum as the sum of byte values modulo 256 | checksum | data: bytes -> int | b'ab' -> 195
find the majority element of a list if there is one | majority | items: list -> object | [1, 1, 2] -> 1
insert a value into a sorted list at the right place | insert_sorted | items: list[int], value: int -> list[int] | [1, 3], 2 -> [1, 2, 3]
check whether a year is a leap year | leap_year | year: int -> bool | 2024 -> True
count the days between two dates | days_between | first: str, second: str -> int | '2024-01-01', '2024-01-03' -> 2
format a number with thousands separators | with_commas | n: int -> str | 1234567 -> '1,234,567'
compute the standard deviation of a sample | stdev | numbers: list[float] -> float | [1, 3] -> 1.414
wrap a text at a given width | wrap | text: str, width: int -> list[str] | 'a bb c', 4 -> ['a bb', 'c']
find the longest run of equal elements | longest_run | items: list -> int | [1, 1, 2] -> 2
sum the digits of a number until one digit is left | digital_root | n: int -> int | 38 -> 2
return the set of letters that two words share | shared_letters | a: str, b: str -> set | 'cat', 'tap' -> {'a', 't'}
turn a list of pairs into a dictionary of lists | collect | pairs: list -> dict | [('a', 1), ('a', 2)] -> {'a': [1, 2]}
compute n choose k with dynamic programming | choose | n: int, k: int -> int | 4, 2 -> 6
find the first non-repeating character of a string | first_unique | text: str -> str | 'aab' -> 'b'
swap the keys and values of a dictionary | invert | mapping: dict -> dict | {'a': 1} -> {1: 'a'}
clamp every number of a list to a range | clamp_all | numbers: list[float], low: float, high: float -> list[float] | [5, -1], 0, 3 -> [3, 0]
convert a Roman numeral to an integer | from_roman | numeral: str -> int | 'XIV' -> 14
check if a Sudoku row holds every digit once | valid_row | row: list[int] -> bool | [1, 2, 3, 4, 5, 6, 7, 8, 9] -> True
simulate a queue with two stacks | drain_queue | items: list -> list | [1, 2] -> [1, 2]
find the intersection of several lists | common | lists: list -> list | [[1, 2], [2, 3]] -> [2]
compute the cosine similarity of two vectors | cosine | a: list[float], b: list[float] -> float | [1, 0], [1, 0] -> 1.0
apply a discount to prices above a limit | discounted | prices: list[float], limit: float, percent: float -> list[float] | [10, 100], 50, 10 -> [10, 90.0]
pad a string on both sides with a character | pad_center | text: str, width: int, fill: str -> str | 'ab', 4, '-' -> '-ab-'
find all anagrams of a word in a list | anagrams | word: str, words: list[str] -> list[str] | 'tea', ['eat', 'tan'] -> ['eat']
tell whether a matrix is symmetric | symmetric | rows: list -> bool | [[1, 2], [2, 1]] -> True
compute the nth term of a sequence where each term is the sum of the three before it | tribonacci | n: int -> int | 4 -> 2
find the closest number to a target in a list | closest | numbers: list[int], target: int -> int | [1, 5, 9], 6 -> 5
capitalise the first letter of every sentence | capitalise_sentences | text: str -> str | 'hi. bye.' -> 'Hi. Bye.'
partition a list into even and odd numbers | split_parity | numbers: list[int] -> tuple | [1, 2, 3] -> ([2], [1, 3])
compute the perimeter of a triangle from its corner points | triangle_perimeter | points: list -> float | [(0, 0), (3, 0), (0, 4)] -> 12.0
count how many islands a grid of zeros and ones has | count_islands | grid: list -> int | [[1, 0], [0, 1]] -> 2
find the maximum profit from one purchase and one sale | best_profit | prices: list[int] -> int | [3, 1, 5] -> 4
compare two version strings | compare_versions | a: str, b: str -> int | '1.2', '1.10' -> -1
convert a binary string to a decimal number without int() | from_binary | bits: str -> int | '101' -> 5
remove all punctuation from a text | strip_punctuation | text: str -> str | 'a, b!' -> 'a b'
find the k most common words of a text | common_words | text: str, k: int -> list | 'a b a', 1 -> ['a']
calculate the tip and total of a restaurant bill | bill | amount: float, percent: float -> tuple | 50, 10 -> (5.0, 55.0)
draw a pyramid of stars with n rows as a string | pyramid | n: int -> str | 2 -> ' * \\n***'
determine the winner of a game of tic-tac-toe | winner | board: list -> str | [['X', 'X', 'X'], ['O', 'O', ''], ['', '', '']] -> 'X'
""".strip().splitlines()

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
)
_STUB = (
    "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{imports}\ndef {name}({args}) -> {returns}:\n"
    '    """ {What}.\n    >>> {name}({call})\n    {result}\n    """\n\n```'
)
_STUB_PROSE = (
    "Write a solution to the following problem and make sure that it passes the tests:\n```python\n\n\ndef {name}({args}) -> {returns}:\n"
    '    """\n    Given the arguments, {what}.\n    Return an empty result for empty input.\n\n    Examples:\n    {name}({call}) => {result}\n    """\n\n```'
)
_COMPLETE = "Complete this Python function.\n```python\ndef {name}({args}):\n    # {what}\n```"

_PROGRAMS = (
    "Write a Python class {thing} with methods to add, remove and list items.;shopping cart,address book,music playlist,task list,inventory,recipe box,photo album,ticket queue,guest list,bookshelf,bank account,parking lot",
    "Write a Python script that {thing}.;renames all files in a folder by date,counts words in a text file,downloads nothing but prints the current time every minute,reads a CSV file and prints the average of each column,finds duplicate files in a directory,converts a JSON file to CSV,plots a sine wave with matplotlib,prints a calendar for the current month,generates random passwords,plays rock paper scissors with the user,backs up a folder to a zip file,logs messages to a file",
    "Write an SQL query that {thing}.;lists customers with more than five orders,finds the second highest salary,counts orders per month,joins employees with their departments,deletes duplicate rows,returns products that were never sold,updates prices by ten percent,finds the average rating per film",
    "Explain what {thing} means in programming and give a small example.;recursion,a hash table,a closure,inheritance,a generator,a decorator,Big O notation,a race condition,a linked list,dependency injection,a binary search tree,memoization,an API,unit testing,garbage collection,a lambda function",
    "Write an HTML page with CSS for {thing}.;a personal portfolio,a login form,a recipe card,a pricing table,a photo gallery,a contact form,a to-do list,a restaurant menu",
    "Write a bash command or script to {thing}.;find the ten largest files,count lines of code in a project,rename files to lower case,watch disk usage,compress old logs,list running processes by memory",
)


def code_tasks(random: Random) -> Iterator[str]:
    """Endless: functions asked for in a dozen ways, stubs in about a third of the prompts, whole programs in a tenth."""
    functions = [_parsed(line) for line in _FUNCTIONS]
    programs = [frame.replace("{thing}", thing) for frame, things in _frames() for thing in things.split(",")]
    while True:
        for fields in random.sample(functions, len(functions)):
            draw = random.random()
            if draw < 0.1:
                yield random.choice(programs)
            elif draw < 0.42:
                yield random.choice((_STUB, _STUB, _STUB_PROSE, _COMPLETE)).format(**fields)
            else:
                # the plain requests, as most people and benchmarks write them, most often
                yield random.choice(_ASKS[:2] * 4 + _ASKS).format(**fields)


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
