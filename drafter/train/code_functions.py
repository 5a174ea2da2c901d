# ruff: noqa: E501 (texts)
"""Python functions to ask for, written by us, each with an example whose result is right.

Owns texts only; code_tasks asks for them.
"""

from __future__ import annotations

# verb phrase | function name | signature | example call and result
FUNCTIONS = """
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
shorten a title to a given width and end it with three dots | shorten_title | title: str, width: int -> str | 'A long journey', 9 -> 'A long...'
turn a headline into a slug for a web address | slugify | headline: str -> str | 'Rain, again!' -> 'rain-again'
build the dotted initials of a full name | initials | name: str -> str | 'Ada Mary King' -> 'A.M.K.'
right-align numbers as strings of equal width | align_numbers | numbers: list[int] -> list[str] | [5, 120] -> ['  5', '120']
draw a box of dashes and bars around a one-line message | boxed | message: str -> str | 'hi' -> '+--+\\n|hi|\\n+--+'
put a line number before every line of a text | number_lines | text: str -> str | 'a\\nb' -> '1: a\\n2: b'
replace tabs by spaces up to the next tab stop | expand_tabs | line: str, stop: int -> str | 'a\\tb', 4 -> 'a   b'
indent all lines of a text except the empty ones | indent_lines | text: str, spaces: int -> str | 'a\\n\\nb', 2 -> '  a\\n\\n  b'
join names into an English enumeration with commas and a final 'and' | enumerate_names | names: list[str] -> str | ['Ann', 'Bo', 'Cy'] -> 'Ann, Bo and Cy'
translate an English word into Pig Latin | pig_latin | word: str -> str | 'glove' -> 'oveglay'
hide all but the last four digits of a card number | hide_card | number: str -> str | '12345678' -> '****5678'
fill the placeholders of a letter template from a dictionary | fill_template | template: str, values: dict -> str | 'Dear {name}', {'name': 'Eve'} -> 'Dear Eve'
render a progress bar of ten characters for a percentage | progress_bar | percent: int -> str | 30 -> '[###.......]'
write a number with its English ordinal suffix | ordinal | n: int -> str | 22 -> '22nd'
spell a whole number below one hundred in English words | in_words | n: int -> str | 42 -> 'forty-two'
shrink every run of blank lines in a document to a single blank line | shrink_blank_lines | text: str -> str | 'a\\n\\n\\n\\nb' -> 'a\\n\\nb'
lay out a header and rows as a table with padded columns | render_table | header: list[str], rows: list -> str | ['id', 'n'], [[1, 20]] -> 'id  n\\n1   20'
find the deepest folder that contains all given file paths | common_folder | paths: list[str] -> str | ['/a/b/x', '/a/b/y'] -> '/a/b'
translate a message into Morse code | to_morse | message: str -> str | 'sos' -> '... --- ...'
count how often each pair of neighbouring letters occurs | letter_pairs | text: str -> dict | 'abab' -> {'ab': 2, 'ba': 1}
parse the query part of a web address into a dictionary | parse_query | query: str -> dict | 'page=2&sort=name' -> {'page': '2', 'sort': 'name'}
read a duration such as 2h15m and give it in minutes | duration_minutes | text: str -> int | '2h15m' -> 135
read the settings from lines of the form key = value and skip comments | read_settings | text: str -> dict | '# colours\\nink = blue' -> {'ink': 'blue'}
expand a print range such as 1-3,7 into page numbers | expand_ranges | text: str -> list[int] | '1-3,7' -> [1, 2, 3, 7]
write sorted page numbers as a compact print range | compact_ranges | pages: list[int] -> str | [1, 2, 3, 7] -> '1-3,7'
extract the hashtags of a message in the order they appear | hashtags | message: str -> list[str] | 'sun #beach and #sea' -> ['beach', 'sea']
split a command line into arguments and keep quoted parts together | split_command | line: str -> list[str] | 'copy "my file" disk' -> ['copy', 'my file', 'disk']
turn the name of a chess square into column and row numbers | chess_square | square: str -> tuple | 'e4' -> (5, 4)
separate a CSS length into its number and its unit | css_length | text: str -> tuple | '1.5em' -> (1.5, 'em')
parse a block of HTTP headers into a dictionary with lower-case names | parse_headers | text: str -> dict | 'Host: example.org\\nAccept: text/html' -> {'host': 'example.org', 'accept': 'text/html'}
split an arithmetic formula into numbers, operators and parentheses | tokenize | formula: str -> list[str] | '12+3*(4-1)' -> ['12', '+', '3', '*', '(', '4', '-', '1', ')']
count how many lines of a log have each level | count_levels | log: str -> dict | 'INFO start\\nERROR disk\\nINFO stop' -> {'INFO': 2, 'ERROR': 1}
read a mixed number such as 1 1/2 as a float | mixed_number | text: str -> float | '1 1/2' -> 1.5
collect the labels and targets of all links in a Markdown text | markdown_links | text: str -> list | 'see [home](/index)' -> [('home', '/index')]
write a fraction as a decimal with its repeating part in parentheses | repeating_decimal | numerator: int, denominator: int -> str | 1, 6 -> '0.1(6)'
round a measurement to a number of significant digits | significant | value: float, digits: int -> float | 1234.5, 2 -> 1200.0
split a fraction greedily into distinct unit fractions and list their denominators | unit_fractions | numerator: int, denominator: int -> list[int] | 3, 4 -> [2, 4]
compute the integer part of a square root with Newton's method | integer_root | n: int -> int | 30 -> 5
list right triangles with whole-number sides and a hypotenuse of at most n | whole_triangles | n: int -> list | 13 -> [(3, 4, 5), (5, 12, 13), (6, 8, 10)]
approximate pi with the first n terms of the Leibniz series | leibniz_pi | n: int -> float | 1 -> 4.0
recover two integers from their total and their product | from_sum_and_product | total: int, product: int -> tuple | 7, 12 -> (3, 4)
add two fractions given as pairs and reduce the result | add_fractions | a: tuple, b: tuple -> tuple | (1, 2), (1, 3) -> (5, 6)
find the inverse of a number modulo a prime | mod_inverse | a: int, p: int -> int | 3, 7 -> 5
multiply two polynomials given by their coefficients | multiply_polynomials | a: list[int], b: list[int] -> list[int] | [1, 1], [1, -1] -> [1, 0, -1]
write a number of at least one in scientific notation | scientific | value: float -> str | 45600 -> '4.56e4'
expand a positive rational number into a continued fraction | continued_fraction | numerator: int, denominator: int -> list[int] | 10, 7 -> [1, 2, 3]
tell the name of the weekday of a date | weekday_name | date: str -> str | '2024-02-29' -> 'Thursday'
list the days of a month that are Sundays | sundays | year: int, month: int -> list[int] | 2024, 9 -> [1, 8, 15, 22, 29]
compute the age of a person in full years on a given day | age_on | born: str, day: str -> int | '2000-05-20', '2024-05-19' -> 23
move a date forward by a number of working days | add_workdays | date: str, days: int -> str | '2024-03-01', 1 -> '2024-03-04'
name the quarter of the year in which a date lies | quarter | date: str -> str | '2024-08-15' -> 'Q3'
decide whether two bookings of a room collide | bookings_collide | first: tuple, second: tuple -> bool | (9, 11), (10, 12) -> True
merge overlapping meetings into blocks of busy time | merge_meetings | meetings: list -> list | [(9, 11), (10, 12), (14, 15)] -> [(9, 12), (14, 15)]
find the free gaps between the meetings of a working day | free_gaps | meetings: list, start: int, end: int -> list | [(10, 11)], 9, 17 -> [(9, 10), (11, 17)]
rewrite a time of the 12-hour clock for the 24-hour clock | to_24_hours | time: str -> str | '07:05 PM' -> '19:05'
compute the smaller angle between the two hands of a clock | clock_angle | hour: int, minute: int -> float | 3, 30 -> 75.0
describe in words how long ago something happened | time_ago | seconds: int -> str | 7200 -> '2 hours ago'
give the date of the last day of a month | month_end | year: int, month: int -> str | 2023, 2 -> '2023-02-28'
shift the timestamp of a subtitle by some seconds | shift_timestamp | stamp: str, seconds: int -> str | '00:01:58', 5 -> '00:02:03'
check whether a point lies inside a circle | in_circle | point: tuple, center: tuple, radius: float -> bool | (1, 1), (0, 0), 2 -> True
compute the area that two upright rectangles share | shared_area | a: tuple, b: tuple -> int | (0, 0, 4, 3), (2, 1, 6, 5) -> 4
turn a point around the origin by 90 degrees counterclockwise | quarter_turn | point: tuple -> tuple | (2, 1) -> (-1, 2)
find the smallest upright rectangle that holds all points | bounding_box | points: list -> tuple | [(1, 5), (3, 2)] -> (1, 2, 3, 5)
count the city blocks between two street corners | city_blocks | a: tuple, b: tuple -> int | (1, 2), (4, 0) -> 5
order points by how far they are from the origin | by_distance | points: list -> list | [(3, 4), (1, 1)] -> [(1, 1), (3, 4)]
find the point where two lines given by slope and intercept cross | crossing | first: tuple, second: tuple -> tuple | (1, 0), (-1, 4) -> (2.0, 2.0)
tell whether three points lie on one straight line | collinear | points: list -> bool | [(0, 0), (1, 1), (3, 3)] -> True
measure the length of a hike through several waypoints | hike_length | waypoints: list -> float | [(0, 0), (3, 4), (3, 10)] -> 11.0
collect the guests who are on exactly one of two guest lists | on_one_list | a: set, b: set -> set | {'Ann', 'Bo'}, {'Bo', 'Cy'} -> {'Ann', 'Cy'}
compute the Jaccard similarity of two sets of words | jaccard | a: set, b: set -> float | {'tea', 'milk'}, {'tea'} -> 0.5
look up a value in nested dictionaries by a dotted path | dig | data: dict, path: str -> object | {'user': {'name': 'Kim'}}, 'user.name' -> 'Kim'
flatten nested dictionaries into one with dotted keys | flatten_keys | data: dict -> dict | {'a': {'b': 1}, 'c': 2} -> {'a.b': 1, 'c': 2}
report the keys that were added, removed and changed between two versions of a dictionary | dict_diff | old: dict, new: dict -> dict | {'a': 1, 'b': 2}, {'b': 3, 'c': 4} -> {'added': ['c'], 'removed': ['a'], 'changed': ['b']}
rename the fields of a record by a mapping from old to new names | rename_fields | record: dict, names: dict -> dict | {'nm': 'Lee', 'age': 9}, {'nm': 'name'} -> {'name': 'Lee', 'age': 9}
build an index from every word to the lines in which it stands | word_index | lines: list[str] -> dict | ['red blue', 'blue'] -> {'red': [1], 'blue': [1, 2]}
find the pairs of people who follow each other | mutual_follows | follows: dict -> list | {'ann': ['bob'], 'bob': ['ann'], 'cy': ['ann']} -> [('ann', 'bob')]
total the amounts of expense rows for each category | total_by_category | rows: list[dict] -> dict | [{'category': 'food', 'amount': 5}, {'category': 'food', 'amount': 7}] -> {'food': 12}
join two tables of rows on a column they share | join_rows | left: list[dict], right: list[dict], key: str -> list[dict] | [{'id': 1, 'n': 'A'}], [{'id': 1, 'c': 'Rome'}], 'id' -> [{'id': 1, 'n': 'A', 'c': 'Rome'}]
select some columns from a table of rows | select_columns | rows: list[dict], columns: list[str] -> list | [{'a': 1, 'b': 2, 'c': 3}], ['c', 'a'] -> [[3, 1]]
keep only the newest row of every customer | newest_rows | rows: list[dict] -> list[dict] | [{'customer': 1, 'day': 3}, {'customer': 1, 'day': 8}] -> [{'customer': 1, 'day': 8}]
pivot rows of name, month and value into a dictionary of dictionaries | pivot | rows: list -> dict | [('ann', 'may', 3), ('ann', 'june', 4)] -> {'ann': {'may': 3, 'june': 4}}
return one page of a long list of search results | page_of | results: list, page: int, size: int -> list | ['a', 'b', 'c', 'd', 'e'], 2, 2 -> ['c', 'd']
rank players by score and give equal scores the same rank | rank_players | scores: dict -> dict | {'a': 9, 'b': 9, 'c': 4} -> {'a': 1, 'b': 1, 'c': 3}
replace the missing values of a column by the mean of the others | fill_missing | values: list -> list | [2, None, 4] -> [2, 3.0, 4]
read the cells of a matrix in a clockwise spiral | spiral | rows: list -> list | [[1, 2], [4, 3]] -> [1, 2, 3, 4]
find the cells that are largest in their row and smallest in their column | saddle_points | rows: list -> list | [[1, 2], [3, 4]] -> [(0, 1)]
compute the determinant of a square matrix by expansion along its first row | determinant | rows: list -> int | [[1, 2], [3, 4]] -> -2
rotate a picture made of rows of characters clockwise | rotate_picture | rows: list[str] -> list[str] | ['ab', 'cd'] -> ['ca', 'db']
add up the numbers on the border of a grid | border_sum | grid: list -> int | [[1, 1, 1], [1, 9, 1], [1, 1, 1]] -> 8
fill in the numbers of a Minesweeper board | count_mines | board: list[str] -> list[str] | ['*.', '..'] -> ['*1', '11']
blur a row of grey values by averaging each with its neighbours | blur | values: list[int] -> list[float] | [0, 30, 60] -> [15.0, 30.0, 45.0]
work out the single number that is missing from a magic square | complete_magic | square: list -> int | [[2, 7, 6], [9, None, 1], [4, 3, 8]] -> 5
list the moves that solve the Tower of Hanoi from peg A to peg C | hanoi | discs: int -> list | 2 -> [('A', 'B'), ('A', 'C'), ('B', 'C')]
list all arrangements of the letters of a short word recursively | arrangements | word: str -> list[str] | 'abc' -> ['abc', 'acb', 'bac', 'bca', 'cab', 'cba']
count the ways to throw a total with a number of six-sided dice | ways_to_throw | total: int, dice: int -> int | 4, 2 -> 3
add up the file sizes in a folder tree given as nested dictionaries | tree_size | tree: dict -> int | {'a.txt': 3, 'docs': {'b.txt': 4}} -> 7
list the paths from the root of a tree to its leaves | leaf_paths | tree: dict -> list[str] | {'a': {'b': {}, 'c': {}}} -> ['a/b', 'a/c']
generate every valid arrangement of n pairs of parentheses | pair_arrangements | n: int -> list[str] | 2 -> ['(())', '()()']
flood a connected area of a picture with a new colour | flood_fill | grid: list, row: int, column: int, colour: int -> list | [[1, 1], [0, 1]], 0, 0, 5 -> [[5, 5], [0, 5]]
find the fewest steps from start S to exit E of a maze | maze_steps | maze: list[str] -> int | ['S.', '#E'] -> 2
take items from several lists in turn until all are used up | round_robin | lists: list -> list | [[1, 2, 3], [4]] -> [1, 4, 2, 3]
slide a window of k letters over a word and return every piece | letter_windows | word: str, k: int -> list[str] | 'abcd', 3 -> ['abc', 'bcd']
collect the first n terms of the look-and-say sequence from a generator | look_and_say | n: int -> list[str] | 4 -> ['1', '11', '21', '1211']
assign colours to n items by cycling through a palette | cycle_palette | palette: list[str], n: int -> list[str] | ['red', 'blue'], 3 -> ['red', 'blue', 'red']
collect the values of a generator that doubles a number while it stays below a limit | doublings | start: int, limit: int -> list[int] | 3, 20 -> [3, 6, 12]
replay a list of push and pop commands on a stack | replay_stack | commands: list[str] -> list[int] | ['push 4', 'push 7', 'pop'] -> [4]
list what a least recently used cache holds after some requests, oldest first | lru_contents | size: int, requests: list[str] -> list[str] | 2, ['a', 'b', 'a', 'c'] -> ['a', 'c']
write values into a ring buffer and return the ones it still holds | ring_buffer | size: int, values: list -> list | 3, [1, 2, 3, 4] -> [2, 3, 4]
insert numbers into a binary search tree and walk it in order | tree_walk | numbers: list[int] -> list[int] | [5, 2, 8] -> [2, 5, 8]
build a binary min-heap by inserting numbers one at a time | build_heap | numbers: list[int] -> list[int] | [3, 1, 2] -> [1, 3, 2]
apply typing and undo commands of a text editor | editor_text | commands: list[str] -> str | ['type a', 'type b', 'undo'] -> 'a'
group people who are connected through friendships with union-find | friend_groups | pairs: list -> list | [('a', 'b'), ('c', 'd'), ('b', 'e')] -> [['a', 'b', 'e'], ['c', 'd']]
store words in a trie and list those that continue a prefix | completions | words: list[str], prefix: str -> list[str] | ['car', 'dog', 'cat'], 'ca' -> ['car', 'cat']
serve jobs from a priority queue, most urgent first | serve_jobs | jobs: list -> list[str] | [(2, 'mail'), (1, 'alarm')] -> ['alarm', 'mail']
reverse a linked list whose nodes are pairs of value and next node | reverse_links | node: tuple -> tuple | (1, (2, None)) -> (2, (1, None))
sort file names so that numbers inside them are compared as numbers | natural_sort | names: list[str] -> list[str] | ['page10', 'page2'] -> ['page2', 'page10']
find by bisection the first position in a sorted list whose value is at least x | lower_bound | values: list[int], x: int -> int | [1, 3, 3, 7], 3 -> 1
count how many shifts an insertion sort makes | insertion_shifts | numbers: list[int] -> int | [3, 1, 2] -> 2
select the k-th smallest number with the idea of quicksort | quickselect | numbers: list[int], k: int -> int | [9, 4, 6], 2 -> 6
arrange a hand of cards by suit in alphabetical order and then by rank | sort_hand | cards: list[str] -> list[str] | ['KS', '2S', '9C'] -> ['9C', '2S', 'KS']
list the names of unfinished tasks by deadline | open_tasks | tasks: list[dict] -> list[str] | [{'name': 'pay', 'due': 9, 'done': False}, {'name': 'call', 'due': 4, 'done': False}] -> ['call', 'pay']
locate a number in a grid whose rows and columns are sorted | locate | grid: list, value: int -> tuple | [[1, 4], [2, 6]], 6 -> (1, 1)
sort red, white and blue marbles in a single pass | sort_marbles | marbles: list[str] -> list[str] | ['blue', 'red', 'white'] -> ['red', 'white', 'blue']
count the bits in which two integers differ | differing_bits | a: int, b: int -> int | 6, 3 -> 2
pack red, green and blue bytes into one integer | pack_rgb | red: int, green: int, blue: int -> int | 1, 2, 3 -> 66051
reverse the order of the eight bits of a byte | reverse_byte | value: int -> int | 1 -> 128
convert an integer to its Gray code | gray_code | n: int -> int | 5 -> 7
add two non-negative integers with bit operations only | bitwise_add | a: int, b: int -> int | 5, 9 -> 14
list the positions of the ones in the binary form of a number | one_bits | n: int -> list[int] | 10 -> [1, 3]
swap the upper and lower four bits of a byte | swap_nibbles | value: int -> int | 31 -> 241
compute the even parity bit for a string of bits | parity_bit | bits: str -> int | '1011' -> 1
compute the average of grades with weights | weighted_average | grades: list[float], weights: list[float] -> float | [80, 90], [1, 3] -> 87.5
fit a straight line to points by least squares and return slope and intercept | fit_line | xs: list[float], ys: list[float] -> tuple | [0, 1, 2], [1, 3, 5] -> (2.0, 1.0)
find all values that are tied for most frequent | modes | values: list[int] -> list[int] | [1, 1, 2, 2, 3] -> [1, 2]
turn vote counts into shares of the total | vote_shares | votes: list[int] -> list[float] | [1, 3] -> [0.25, 0.75]
compute the percentage change from each price to the next | percent_changes | prices: list[float] -> list[float] | [100, 150, 75] -> [50.0, -50.0]
smooth a series exponentially with a given factor | smooth | values: list[float], factor: float -> list[float] | [10, 20], 0.5 -> [10, 15.0]
compute the harmonic mean of speeds | harmonic_mean | speeds: list[float] -> float | [2, 2] -> 2.0
measure the longest streak of rising temperatures | rising_streak | temperatures: list[float] -> int | [3, 4, 6, 2, 5] -> 3
compute precision and recall of a set of predicted items | precision_recall | predicted: set, actual: set -> tuple | {1, 2}, {2, 3, 4, 5} -> (0.5, 0.25)
pay an amount with as few coins as possible | fewest_coins | amount: int, coins: list[int] -> list[int] | 11, [1, 5, 6] -> [5, 6]
divide an amount of cents among people so that shares differ by one cent at most | split_cents | total: int, people: int -> list[int] | 100, 3 -> [34, 33, 33]
list the balance of a savings account after each monthly deposit | balances | start: int, deposit: int, months: int -> list[int] | 50, 20, 3 -> [70, 90, 110]
compute the income tax for a list of brackets with upper limit and rate | income_tax | income: float, brackets: list -> float | 30000, [(10000, 0.1), (50000, 0.2)] -> 5000.0
work out who has to pay whom after a trip on which friends paid different amounts | settle_trip | paid: dict -> list | {'ann': 30, 'bob': 0} -> [('bob', 'ann', 15.0)]
convert an amount between currencies with a table of rates per euro | exchange_money | amount: float, source: str, target: str, rates: dict -> float | 10, 'EUR', 'USD', {'EUR': 1, 'USD': 2} -> 20.0
total a shopping basket in which every third item of a kind is free | basket_total | basket: list[str], prices: dict -> int | ['tea', 'tea', 'tea', 'jam'], {'tea': 4, 'jam': 3} -> 11
convert a height in feet and inches to whole centimetres | height_cm | feet: int, inches: int -> int | 6, 0 -> 183
show a number of bytes in a readable unit | readable_size | size: int -> str | 1536 -> '1.5 KB'
compute the pace of a runner per kilometre | running_pace | kilometres: float, minutes: float -> str | 10, 55 -> '5:30'
scale the ingredients of a recipe to another number of servings | scale_recipe | recipe: dict, servings: int, wanted: int -> dict | {'flour': 200}, 4, 6 -> {'flour': 300.0}
recognise whether five playing cards form a flush | is_flush | cards: list[str] -> bool | ['2H', '5H', '9H', 'JH', 'KH'] -> True
decide which of two gestures wins in rock paper scissors | winning_gesture | first: str, second: str -> str | 'rock', 'paper' -> 'paper'
advance Conway's Game of Life by one generation | life_step | grid: list -> list | [[0, 1, 0], [0, 1, 0], [0, 1, 0]] -> [[0, 0, 0], [1, 1, 1], [0, 0, 0]]
score a word with a table of letter values | word_score | word: str, values: dict -> int | 'cab', {'a': 1, 'b': 3, 'c': 3} -> 7
mark the letters of a guess as right G, misplaced Y or absent - | mark_guess | secret: str, guess: str -> str | 'plant', 'pants' -> 'GYYY-'
show a hangman word with only the guessed letters visible | hangman_view | word: str, guessed: set -> str | 'apple', {'p', 'e'} -> '_pp_e'
follow the moves U, D, L and R of a robot from the origin | robot_position | moves: str -> tuple | 'UURD' -> (1, 1)
list the chess squares a knight can jump to | knight_moves | square: str -> list[str] | 'a1' -> ['b3', 'c2']
compute the best value of a blackjack hand | blackjack_value | hand: list[str] -> int | ['A', 'K'] -> 21
find the final field of a token in snakes and ladders | final_field | rolls: list[int], jumps: dict -> int | [3, 4], {3: 10} -> 14
add up the floors an elevator passes between its stops | floors_travelled | stops: list[int] -> int | [1, 5, 2] -> 7
simulate customers at one cashier and return how long each has to wait | waiting_times | arrivals: list[int], service: int -> list[int] | [0, 1, 5], 3 -> [0, 2, 1]
tell the colour of a traffic light after a number of seconds | light_colour | seconds: int, phases: list -> str | 32, [('green', 30), ('yellow', 5), ('red', 25)] -> 'yellow'
count the years until a growing population exceeds a limit | years_until | population: float, percent: float, limit: float -> int | 100, 10, 120 -> 2
list the heights that a bouncing ball reaches | bounce_heights | height: float, factor: float, bounces: int -> list[float] | 100, 0.5, 3 -> [50.0, 25.0, 12.5]
find who is left when every k-th person of a circle steps out | last_in_circle | people: int, k: int -> int | 5, 2 -> 3
schedule processes in turns of a fixed length and list them as they finish | finish_order | needs: dict, turn: int -> list[str] | {'a': 3, 'b': 1}, 2 -> ['b', 'a']
encrypt lower-case letters with the Vigenère cipher | vigenere | text: str, key: str -> str | 'attack', 'key' -> 'kxrkgi'
mirror the alphabet of a secret note as in the Atbash cipher | atbash | note: str -> str | 'abz' -> 'zya'
encrypt a message with a rail fence of n rails | rail_fence | message: str, rails: int -> str | 'hello', 2 -> 'hloel'
mask the characters of a text with a one-byte key and print them in hexadecimal | xor_hex | text: str, key: int -> str | 'Hi', 7 -> '4f6e'
validate an account number with the Luhn checksum | luhn_valid | number: str -> bool | '79927398713' -> True
compute the check digit of a ten-digit ISBN | isbn_check_digit | digits: str -> str | '030640615' -> '2'
build the alphabet of a cipher that begins with a keyword | keyword_alphabet | keyword: str -> str | 'zebra' -> 'zebracdfghijklmnopqstuvwxy'
list the rules that a weak password breaks: eight characters, a digit, a capital letter | password_problems | password: str -> list[str] | 'Secret' -> ['too short', 'no digit']
return the last n lines of a log text | tail | text: str, n: int -> str | 'a\\nb\\nc', 2 -> 'b\\nc'
find the lines that contain a word together with their line numbers | grep_lines | text: str, word: str -> list | 'one\\ntwo\\none two', 'two' -> [(2, 'two'), (3, 'one two')]
list the lines of a new version of a text that the old version lacks | new_lines | old: str, new: str -> list[str] | 'a\\nb', 'b\\nc' -> ['c']
split a document into sections at its headings | split_sections | text: str -> dict | '# A\\nx\\n# B\\ny' -> {'A': ['x'], 'B': ['y']}
count the code, comment and blank lines of a program text | line_kinds | source: str -> dict | 'a = 1\\n\\n# b' -> {'code': 1, 'comment': 1, 'blank': 1}
count the files of a listing by extension | count_extensions | names: list[str] -> dict | ['a.py', 'b.py', 'c.txt'] -> {'py': 2, 'txt': 1}
resolve the dots in an absolute file path | clean_path | path: str -> str | '/a/./b/../c' -> '/a/c'
cut a fixed-width record into its fields | read_fixed | record: str, widths: list[int] -> list[str] | 'Anna  12Rome', [6, 2, 4] -> ['Anna', '12', 'Rome']
write one record as a CSV line with quotes only where they are needed | csv_line | fields: list[str] -> str | ['a', 'b,c'] -> 'a,"b,c"'
detect whether a dependency graph has a cycle | has_cycle | graph: dict -> bool | {'a': ['b'], 'b': ['a']} -> True
find the price of the cheapest route between two towns | cheapest_route | roads: dict, start: str, goal: str -> int | {'a': {'b': 1, 'c': 5}, 'b': {'c': 2}, 'c': {}}, 'a', 'c' -> 3
colour the countries of a map greedily so that neighbours differ | colour_map | borders: dict -> dict | {'a': ['b'], 'b': ['a', 'c'], 'c': ['b']} -> {'a': 0, 'b': 1, 'c': 0}
""".strip().splitlines()
