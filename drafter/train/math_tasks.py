# ruff: noqa: E501, SIM905 (texts)
"""Mathematics prompts written by us: word problems and exercises with numbers drawn anew for each prompt.

Owns texts only. Every template takes its numbers from a generator, so a seed gives the same prompts everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

ENDING = "\nPlease reason step by step, and put your final answer within \\boxed{}."

_NAMES = (
    "Amara Ben Chloe Dmitri Elena Farid Grace Hugo Ines Jonas Keiko Liam Mona Nikhil Olga Pedro Quinn Rosa Samir Tara "
    "Umar Vera Wendy Xavier Yara Zoe Carlos Diana Edwin Fiona Gustav Hana Ivan Julia Kofi Lena Marco Nadia Oscar Priya"
).split()
_GOODS = (
    "notebooks apples candles mugs stickers postcards muffins pencils oranges plants bracelets puzzles lanterns scarves "
    "cookies marbles kites bookmarks batteries cupcakes"
).split()
_PLACES = (
    "the market;a bakery;the school fair;a garden centre;the museum shop;a small farm;the library;a bike workshop;"
    "a sports club;the town hall"
).split(";")

# Fields: A B C names, G H goods, P place, a..h numbers drawn as written in _RANGES.
_WORD = (
    "{A} sells {a} {G} every morning and {b} every afternoon at {P}. Each one costs ${c}. How much money does {A} earn in {d} days?",
    "{A} had {e} {G}. {A} gave {a} of them to {B} and then split the rest equally among {d} friends. How many did each friend get, and how many are left over?",
    "A train leaves the station at {f} km per hour. Two hours later a second train follows on the same track at {g} km per hour. After how many hours does the second train catch up if {g} is greater than {f}?",
    "{A} reads {a} pages a day during the week and {b} pages on each day of the weekend. How many weeks does it take {A} to finish a book of {h} pages?",
    "{P} orders {d} boxes of {G}. Each box holds {a} and {c} of all the {G} turn out to be broken. How many good {G} are there?",
    "{A} is {d} times as old as {B}. In {c} years the sum of their ages will be {e}. How old is {A} now?",
    "A tank holds {h} litres. One tap fills it at {a} litres a minute while a leak loses {d} litres a minute. How long does it take to fill the empty tank?",
    "{A} and {B} share ${h} in the ratio {c} to {d}. How much more does {A} receive than {B}?",
    "A rectangle's length is {c} metres more than its width. Its perimeter is {f} metres. What is its area?",
    "{A} buys {a} {G} for ${c} each and {b} {H} for ${d} each. {A} pays with a ${h} bill. How much change does {A} get back?",
    "The price of a coat is ${e}. It is reduced by {f}% in the sale and then by another {c}% at the till. What is the final price?",
    "{A} walks {c} km to work at {d} km per hour and cycles home along the same road at {a} km per hour. What is the average speed for the whole trip?",
    "In a class of {f} students, {a} play chess, {b} play football and {c} do both. How many students do neither?",
    "{A} saves ${a} in the first week and ${c} more each following week than in the week before. How much has {A} saved after {b} weeks?",
    "A recipe for {c} people needs {e} grams of flour. How much flour is needed for {a} people?",
    "{A} works {a} hours a week for ${b} an hour and gets time and a half for every hour over {c}. What does {A} earn in a week?",
    "A farmer has chickens and goats. Together they have {f} heads and {g} legs. How many chickens are there if every goat has four legs?",
    "{A}'s car uses {c} litres of fuel per 100 km. Fuel costs ${d} per litre. What does a trip of {h} km cost?",
    "Every day a plant grows {c} cm and at night it shrinks by 1 cm. It starts at {a} cm. After how many days does it first reach {e} cm?",
    "{A} paints a fence in {a} hours and {B} paints the same fence in {b} hours. How long do they need together?",
    "There are {e} seats in a theatre. On Friday {f}% of them were sold and on Saturday {a} more than on Friday. How many tickets were sold in total?",
    "{A} has {a} red, {b} blue and {c} green {G} in a bag. What is the probability of drawing a blue one first and a red one second without putting the first back?",
    "{A} bought {d} packs of {G} with {a} in each pack. {B} bought half as many {G} as {A}. {C} has {c} fewer than {B}. How many do the three have together?",
    "A bus starts with {f} passengers. At the first stop {a} get off and {c} get on. At the second stop half of them get off. How many passengers remain?",
    "{A} ran {c} kilometres on Monday, twice as far on Tuesday, and {d} kilometres less than Tuesday on Wednesday. How far did {A} run in total?",
    "A shop makes {h} {G} a month. {f}% are sold online, a quarter of the rest is sold at {P}, and the others are stored. How many are stored?",
    "{A} needs ${h} for a bicycle. {A} already has ${e} and earns ${b} for mowing a lawn. How many lawns must {A} mow?",
    "Three consecutive even numbers add up to a number between {e} and {h} that is divisible by {d}. Give one example and check it.",
    "{A} fills {d} jars with {c} scoops of sugar each. A bag has {f} scoops. How many scoops are left from two bags?",
    "If {c} workers build a wall in {a} days, how many days do {d} workers need at the same pace?",
    "{A} downloads a file of {h} MB. The first {e} MB arrive at {c} MB per second, the rest at {d} MB per second. How many seconds does it take?",
    "The average of {c} numbers is {a}. When one more number is added the average becomes {b}. What is the added number?",
)

# TeX as in a textbook. Fields as above.
_TEX = (
    "Solve for $x$: ${c}x + {a} = {d}x - {b}$.",
    "What is the value of $\\frac{{{a}}}{{{b}}} + \\frac{{{c}}}{{{d}}}$? Express your answer as a common fraction.",
    "Find the sum of the roots of the equation $x^2 - {a}x + {c} = 0$.",
    "Simplify $({c}x^2 - {d}x + {a}) - ({d}x^2 + {c}x - {b})$.",
    "If $f(x) = {c}x^2 - {d}x + 1$, what is $f({c}) - f(-1)$?",
    "Compute $\\sqrt{{{e}}} \\cdot \\sqrt{{{a}}}$ and simplify the result.",
    "How many positive divisors does ${h}$ have?",
    "What is the remainder when $7^{{{a}}}$ is divided by ${b}$?",
    "Evaluate $\\log_2 {a} + \\log_2 {b}$ and round to two decimal places.",
    "Find the distance between the points $({a}, {c})$ and $(-{d}, {b})$ in the plane.",
    "The first term of an arithmetic sequence is ${c}$ and the common difference is ${d}$. What is the {a}th term?",
    "A geometric series has first term ${c}$ and ratio $\\frac{{1}}{{{d}}}$. What is its infinite sum?",
    "Find the greatest common divisor of ${e}$ and ${h}$.",
    "Expand $(x + {c})(x - {d})(x + 1)$.",
    "Factor $x^2 + {a}x + {c}$ over the integers if possible.",
    "Let $g(x) = \\frac{{{c}x + 1}}{{x - {d}}}$. For which value of $x$ is $g$ undefined, and what is $g(0)$?",
    "A circle has radius ${c}$. Find its circumference and area in terms of $\\pi$.",
    "In a right triangle the legs have lengths ${c}$ and ${d}$. What is the length of the hypotenuse?",
    "How many ways are there to choose {d} students from a group of {b}?",
    "Two fair dice are rolled. What is the probability that the sum is greater than {d}?",
    "Solve the system $x + y = {a}$, ${d}x - y = {b}$.",
    "For what values of $k$ does $x^2 + kx + {a} = 0$ have exactly one real solution?",
    "Find the slope of the line through $({c}, {a})$ and $({b}, {d})$.",
    "If $\\sin \\theta = \\frac{{{d}}}{{{b}}}$ and $\\theta$ is acute, what is $\\cos \\theta$?",
    "What is the sum of the first {a} odd positive integers?",
    "Convert ${e}$ from base 10 to base {d}.",
    "The volume of a cube is ${c}^3$ cubic centimetres. What is its surface area?",
    "Find the matrix product $\\begin{{pmatrix}} {a} & {b} \\\\ {c} & {d} \\end{{pmatrix}} \\begin{{pmatrix}} 1 \\\\ 2 \\end{{pmatrix}}$.",
    "Differentiate $f(x) = {c}x^{d} + {a}x$ and evaluate the derivative at $x = 1$.",
    "Compute $\\int_0^{{{d}}} ({c}x + {a})\\,dx$.",
    "Let $z = {c} + {d}i$. Find $|z|$ and $z \\cdot \\overline{{z}}$.",
    "What is the vertex of the parabola $y = x^2 - {a}x + {b}$?",
    "If $2^x = {a}$ and $2^y = {b}$, express $2^{{x+y}}$ as a number.",
    "The polynomial $x^3 - {c}x^2 + {d}x$ has how many real zeros?",
    "A polygon has interior angles that sum to ${e}0$ degrees plus a remainder. How many sides does a regular polygon with interior angle $150$ degrees have?",
    "Solve the inequality $|x - {c}| < {d}$ and write the answer in interval notation.",
    "Find all integers $n$ such that $n^2 < {f}$.",
    "A vector $\\mathbf{{v}} = \\begin{{pmatrix}} {c} \\\\ {d} \\end{{pmatrix}}$ is rotated by $90$ degrees. What is the result?",
    "What is the smallest positive integer that is divisible by {c}, {d} and {b}?",
    "Rationalise the denominator of $\\frac{{{a}}}{{\\sqrt{{{c}}}}}$.",
)
_RANGES = {
    "a": (6, 30),
    "b": (8, 24),
    "c": (2, 9),
    "d": (2, 7),
    "e": (40, 200),
    "f": (20, 60),
    "g": (62, 96),
    "h": (240, 990),
}


def math_tasks(random: Random) -> Iterator[str]:
    """Endless: alternates word problems and textbook exercises, each time with new numbers and names."""
    while True:
        for template in random.sample(_WORD + _TEX, len(_WORD) + len(_TEX)):
            yield _filled(template, random) + ENDING


def _filled(template: str, random: Random) -> str:
    names, goods = random.sample(_NAMES, 3), random.sample(_GOODS, 2)
    numbers = {key: random.randint(*bounds) for key, bounds in _RANGES.items()}
    place = random.choice(_PLACES)
    text = template.format(A=names[0], B=names[1], C=names[2], G=goods[0], H=goods[1], P=place, **numbers)
    return text[0].upper() + text[1:]
