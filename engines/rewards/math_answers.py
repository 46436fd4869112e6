r"""What `math` compares: the reference answer of a row, and the answer that a completion gives.

A reference is bare LaTeX as a rule (MATH: `3\sqrt{13}`), or a number (GSM8K). math-verify looks for
numbers in text without delimiters and would take the 3 of that one, so what brings no delimiter is
handed to it in a box. Of a completion the last box counts. Words are compared as text, and so is
what math-verify 0.9 drops on its way: the base of a number, and the brackets of a tuple or set.
"""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from latex2sympy2_extended.logic import And
from latex2sympy2_extended.sets import FiniteSet
from math_verify import parse, verify
from sympy import (
    Basic,
    Eq,
    Expr,
    Float,
    Ge,
    Gt,
    I,
    Integer,
    Interval,
    Le,
    Lt,
    MatrixBase,
    Symbol,
    Tuple,
    Union,
    evaluate,
    pi,
)
from sympy import FiniteSet as SymPyFiniteSet

from engines.rewards.boxes import boxes_of

# They warn that their own time limits are off: the reward process limits each sample's time.
for _module in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_module).setLevel(logging.ERROR)

Value: TypeAlias = "Basic | MatrixBase"

# What SymPy raises where an expression means nothing, such as an order of complex numbers.
_SYMPY_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_ORDERS = (Lt, Le, Gt, Ge)
_PLACES = 6  # decimal places in which decimals have to agree; of smaller numbers, digits
_REFERENCES = 1024  # whose values are kept: a group has one for all its samples

_DELIMITER = re.compile(r"(?<!\\)\$|\\\(|\\\[|\\boxed|\\fbox")
# A number that needs no LaTeX: 1,200 or -0.5 or 3/4, perhaps of money, per cent or with a unit.
_NUMBER = re.compile(
    r"[-+]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:/\d+)?\s*%?"
    r"(?:\s+[A-Za-z]{1,3}(?:\^?\d)?/[A-Za-z]{1,3}(?:\^?\d)?|\s*(?:[mck]?m|ft|in)\^?\d)?",
    re.ASCII,
)
_BETWEEN_VALUES = re.compile(
    r"[\s$.\\)(]*(?:[,;]|,?\s*(?:\\text\s*\{)?\s*(?:and|or)\b\s*\}?)[\s$\\)(]*(?:[A-Za-z]\s*=\s*)?"
)
_TEXT = re.compile(r"\\(?:text[a-z]*|math(?:rm|bf|it)|mbox)\s*\{([^{}]*)\}")
_SPACING = re.compile(r"(?<!\\)\\[!,;: ()\[\]]|\\q?quad(?![a-z])|\\(?:left|right)(?![a-z])|[\s$~]")
_BETWEEN_DIGITS = re.compile(r"(?<=\d)(?:\s|~|\\[,;: ])+(?=\d)")
_FRACTION = re.compile(r"\\[dtc]frac(?![a-z])")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_FUNCTIONS = "sqrt|arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|ln|log|exp"
_MATHS_WORD = re.compile(rf"and|inf|infinity|{_FUNCTIONS}")
_ONLY_WORDS = re.compile(r"\(?[^\W\d_][^\d_\\{}$=<>+*/^]*")
_JOINED = re.compile(r"\s*(?:[,;]\s*(?:and|or)\b|[,;]|\b(?:and|or)\b)\s*")  # A, B, and C
_NAME = re.compile(r"[^\W\d_]+(?:[ '.-]+[^\W\d_]+)*")
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ(?![a-z])")
_ANSWER_IS = re.compile(r"answer(?:\s+is)?\s*:?[\s*]*", re.IGNORECASE)
_NUMERAL = re.compile(r"\(?([-+]?[A-F]*\d[0-9A-F]*)\)?_\{?\(?(\d+)\)?\}?", re.ASCII)
_BASES = dict(
    zip(
        ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"],
        range(2, 11),
        strict=True,
    )
)

# Other ways to write what math-verify reads only in LaTeX.
_SIGNS = str.maketrans(
    {
        "\N{DEGREE SIGN}": r"^\circ ",
        "\N{GREEK SMALL LETTER PI}": r"\pi ",
        "\N{INFINITY}": r"\infty ",
        "\N{LESS-THAN OR EQUAL TO}": r"\le ",
        "\N{GREATER-THAN OR EQUAL TO}": r"\ge ",
        "\N{NOT EQUAL TO}": r"\ne ",
        "\N{MINUS SIGN}": "-",
        "\N{PLUS-MINUS SIGN}": r"\pm ",
        "\N{MULTIPLICATION SIGN}": r"\times ",
        "\N{MIDDLE DOT}": r"\cdot ",
        "\N{UNION}": r"\cup ",
        "\N{ELEMENT OF}": r"\in ",
        "\N{EN DASH}": "-",
        "\N{POUND SIGN}": "",
        "\N{EURO SIGN}": "",
        "\N{EMPTY SET}": r"\emptyset ",
    }
)
_NUMBER_BEFORE = r"(?<![\w.,^_\\}])"  # where a number begins that no other or exponent is part of
_SPELLINGS = (
    (re.compile(r"\\(?:pounds|euro)(?![a-z])"), ""),
    (re.compile(r"\\varnothing(?![a-z])"), r"\\emptyset "),
    (re.compile(r"\\text\s*\{\s*infinity\s*\}"), r"\\infty "),
    (re.compile(r"\\text\s*\{\s*(?:all )?real numbers\s*\}"), r"\\mathbb{R}"),
    (re.compile(r"\\degree(?![a-z])"), r"^\\circ "),
    (re.compile(r"\\lbrace(?![a-z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![a-z])"), r"\\}"),
    (re.compile(r"\\mathbb\s+([A-Z])"), r"\\mathbb{\1}"),
    (re.compile(r"\\(?:mathbf|boldsymbol|bm|underline)\s*\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\\(?:color|textcolor)\s*\{[a-z]*\}\s*\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\\([dt]?)binom\s*(\d)\s*(\d)"), r"\\binom{\2}{\3}"),
    (re.compile(r"(?:\\?(?<![A-Za-z])sqrt|\u221a)\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"\u221a\s*(\d+|[A-Za-z])"), r"\\sqrt{\1}"),
    # {x : 0 < x} is said by its condition.
    (re.compile(r"\\\{\s*([A-Za-z])\s*(?::|\||\\mid(?![a-z]))\s*([^{}]*\1[^{}]*?)\\\}"), r"\2"),
    (re.compile(rf"{_NUMBER_BEFORE}(\d+)\s+(\d+)/(\d+)(?![\d/])"), r"\1\\frac{\2}{\3}"),
    # 1.5e3; but 3e-5 may be three times Euler's number, less five.
    (
        re.compile(
            rf"{_NUMBER_BEFORE}(\d*\.\d+[eE]|\d+E|1e|\d+e(?=\+?\d|-\d\d))([-+]?\d{{1,3}})(?![\w.])",
            re.ASCII,
        ),
        lambda match: rf"{match[1][:-1]} \times 10^{{{int(match[2])}}}",
    ),
    (re.compile(r"\\langle(?![a-z])"), "("),
    (re.compile(r"\\rangle(?![a-z])"), ")"),
    (re.compile(r"(?<=\d)(?:\{,\}|,\\!)\s*(?=\d{3})"), ""),
    (re.compile(rf"(?<![\\A-Za-z])(?<!name\{{)(?<!text\{{)({_FUNCTIONS}|pi)(?![A-Za-z])"), r"\\\1"),
)
_BASE_IN_WORDS = re.compile(r"_\{?\s*\\text\{\s*(\w+)\s*\}\s*\}?")
_UNIT_POWER = re.compile(r"\\(?:text|mbox|mathrm)\s*\{[^{}]*[a-z][^{}]*\}\s*\^\{?(\d)\}?[}$\s.]*$")
_LENGTH = re.compile(
    r"\\(?:text|mbox|mathrm)\s*\{[\s~]*(?:[mckd]?m|in|ft|yd|mi|inch(?:es)?|f(?:oo|ee)t|yards?|miles?"
    r"|(?:milli|centi|kilo)?met(?:er|re)s?)\.?\s*\}[}$\s.]*$"
)
_SPACED = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\\[,;: ]|[ ~])\d{3})+(?!\d)")  # 1 000 000
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*(?:\{(\d+)\}|(\d))")
_FRACTION_PERCENT = re.compile(r"(\d*)\s*\\[dt]?frac\s*(?:\{(\d+)\}\s*\{(\d+)\}|(\d)\s*(\d))\s*\\%")
_CLOCK = re.compile(r"(\d{1,2})\s*:\s*([0-5]\d)\s*(?:([ap])\.?\s*m\.?)?", re.IGNORECASE)
_OPTION = re.compile(r"\(?([a-z])\s*[).:]\s*\S.*")  # (B) 5
_CLOSED_INFINITY = re.compile(r"\\infty\s*\]|\[\s*-?\s*\\infty")


@dataclass(frozen=True, kw_only=True, slots=True)
class MathValue:
    r"""Text as math-verify reads it: `\dfrac{6}{4}` is 3/2."""

    value: Value | None  # None where it reads no mathematics
    text: str  # that it was read from, normalized
    unit_power: str | None  # 2 of 15 cm^2; None where it says none
    degrees: bool = False  # whether it is an angle in them: 45^\circ, which math-verify reads as 45


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    r"""The reference answer of a row: `3\sqrt{13}`, or `\text{east}`."""

    text: str  # as the row has it
    words: str | None  # what it says where that is only words: east
    read: MathValue
    clock: tuple[str, ...] | None  # hour, minute and half of the day where it is a time: 3, 30, p

    @property
    def readable(self) -> bool:
        """Whether it is more than text: words, or mathematics that is equal to itself."""
        return (
            self.words is not None
            or self.clock is not None
            or (self.read.value is not None and _same_value(self.read, self.read))
        )


@lru_cache(maxsize=_REFERENCES)
def reference_of(text: str) -> Reference | None:
    """What a reference says; None where it is empty."""
    text = _unwrapped(text.strip())
    if not text:
        return None
    only_words = _is_prose(text) or re.search(r"[^\W\d_]|\\", _TEXT.sub("", text)) is None
    words = _words_of(text) if only_words else None
    value = _read(_with_delimiters(text))
    return Reference(text=text, words=words, read=value, clock=_clock_of(text))


def answers(completion: str, reference: Reference) -> bool:
    r"""Whether a completion gives the reference as its answer.

    That is what its last box holds; where the reference is several values, a list of boxes too, as
    \boxed{1} and \boxed{2}. Without a box it is what math-verify takes for the answer, or the text
    that is all of the completion or follows the word answer.
    """
    boxes = _last_boxes(completion)
    if boxes:
        texts, values = boxes[-1:], [_boxed(boxes[-1])]
        if len(boxes) > 1 and isinstance(reference.read.value, SymPyFiniteSet | Tuple):
            values.append(_boxed(",".join(boxes)))
    else:
        last_line = _ANSWER_IS.split(completion)[-1].lstrip().split("\n", 1)[0]
        texts, values = [completion, last_line], [completion]
    if any(_same_text(text, reference) for text in texts):
        return True
    if reference.clock is not None:
        return any(_same_time(reference.clock, _clock_of(text, bare=True)) for text in texts)
    if boxes and reference.words is not None:
        return False
    try:
        return any(_same_value(reference.read, _read(text)) for text in values)
    except (*_SYMPY_ERRORS, MemoryError):  # of what the answer is, such as 5000 digits that repeat
        return False


def _same_text(text: str, reference: Reference) -> bool:
    if _same_names(text, reference):
        return True
    if reference.words is not None:
        words = _words_of(text)
        if words is None and len(reference.words) == 1:
            option = _OPTION.fullmatch(_SPACING.sub(" ", _TEXT.sub(r"\1", text)).strip().lower())
            words = None if option is None else option[1]
        return words == reference.words
    return _plain(text) == _plain(reference.text)


def _same_names(text: str, reference: Reference) -> bool:
    r"""Whether both are a list of the same words: `A, B` and \text{A and B}.

    In any order where the reference joins them by a word, as lists of people do.
    """
    fold = reference.words is not None
    names, answer_names = _names_of(reference.text, fold), _names_of(text, fold)
    if names is None or answer_names is None or len({names[1], answer_names[1]} - {""}) > 1:
        return False
    return names[0] == answer_names[0] or (
        names[1] != "" and sorted(names[0]) == sorted(answer_names[0])
    )


def _names_of(text: str, fold: bool) -> tuple[list[str], str] | None:
    """The words of a list and what joins the last of them: and, or, nothing. None for what is none.

    fold: into small letters.
    """
    words = _SPACING.sub(" ", _TEXT.sub(r" \1 ", text)).strip(" \n.")
    names = [" ".join(name.split()) for name in _JOINED.split(words.lower() if fold else words)]
    if len(names) < 2 or not all(_NAME.fullmatch(name) for name in names):
        return None
    return names, next((match[0] for match in re.finditer(r"\b(?:and|or)\b", words)), "")


def _plain(text: str) -> str:
    """Without what a reader does not see: spacing, delimiters, the size of a fraction."""
    text = _TEXT.sub(r"\1", _FRACTION.sub(r"\\frac", text))
    text = _BETWEEN_DIGITS.sub("&", text)  # 2 1/2 is not 21/2
    return _SPACING.sub("", text).rstrip(".")


def _unwrapped(text: str) -> str:
    r"""Without the \text around all of it, where it has a number: \text{13 years old}."""
    wrapped = _TEXT.fullmatch(text)
    has_number = wrapped is not None and re.search(r"\d", wrapped[1]) is not None
    return wrapped[1].strip() if wrapped is not None and has_number else text


def _clock_of(text: str, bare: bool = False) -> tuple[str, ...] | None:
    """The time of day that is all of a text; None where it is none, or may be a ratio as 3:10.

    A ratio would not be 3:30, which is 1:10, nor 3:05. bare: a time without half of the day is one.
    """
    plain = _SPACING.sub("", _TEXT.sub(r"\1", text)).rstrip(".")
    match = _CLOCK.fullmatch(plain)
    if match is None:
        return None
    hour, minute, half = int(match[1]), int(match[2]), (match[3] or "").lower()
    ratio = math.gcd(hour, minute) == 1 and match[2][0] != "0"
    return None if ratio and not half and not bare else (str(hour), str(minute), half)


def _same_time(gold: tuple[str, ...], answer: tuple[str, ...] | None) -> bool:
    """Whether two times agree, but for the half of the day where one of them says none."""
    if answer is None or gold[:2] != answer[:2]:
        return False
    return gold[2] == answer[2] or not (gold[2] and answer[2])


def _words_of(text: str) -> str | None:
    """What a text says where that is only words, in small letters: evelyn, or c of (C)."""
    words = _TEXT.sub(r" \1 ", text).strip(" \n$.")
    if not _ONLY_WORDS.fullmatch(words):
        return None
    return " ".join(words.strip("()").lower().split())


def _last_boxes(completion: str) -> list[str]:
    """What the last box holds, after what those boxes hold whose list it ends."""
    contents: list[str] = []
    start = len(completion)
    for box in reversed(boxes_of(completion)):
        if box.end > start:  # it has that box within it
            continue
        if contents and not _BETWEEN_VALUES.fullmatch(completion[box.end : start]):
            break
        contents.insert(0, box.content)
        start = box.start
    return contents


def _boxed(text: str) -> str:
    return f"\\boxed{{{_both_signs(_unwrapped(text))}}}"


def _both_signs(text: str) -> str:
    r"""Both values of a \pm within braces, as in a fraction, where math-verify reads neither."""
    before, sign, after = text.partition(r"\pm")
    within = before.count("{") - before.count(r"\{") > before.count("}") - before.count(r"\}")
    if not sign or r"\pm" in after or "," in text or not within:
        return text
    return f"{before}+{after}, {before}-{after}"


def _with_delimiters(text: str) -> str:
    """A reference as it is handed to math-verify.

    A number needs no delimiter, nor does prose with one, such as 18 dollars; the last box is alone
    where there are boxes.
    """
    if _DELIMITER.search(text):
        boxes = _last_boxes(text)
        return _boxed(boxes[-1]) if boxes else text
    return text if _NUMBER.fullmatch(text) or _is_prose(text) else _boxed(text)


def _is_prose(text: str) -> bool:
    """Whether a text without LaTeX has words, and so perhaps a number among them."""
    return "\\" not in text and any(not _MATHS_WORD.fullmatch(word) for word in _WORD.findall(text))


def _read(text: str) -> MathValue:
    """What math-verify reads in a text with delimiters, or in prose."""
    text = text.translate(_SIGNS)
    text = _SPACED.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    text = _REPEATING.sub(_fraction_of, text)
    text = _FRACTION_PERCENT.sub(_percents_of, text)
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    text = _BASE_IN_WORDS.sub(lambda match: f"_{{{_BASES.get(match[1], match[1])}}}", text)
    parts = parse(text, parsing_timeout=None)
    reading = next((part for part in parts if isinstance(part, str)), "")
    value = next((part for part in parts if isinstance(part, Basic | MatrixBase)), None)
    if numeral := _NUMERAL.fullmatch(reading):  # of which math-verify drops the base
        digits, base = numeral.groups()
        decimal = base == "10" and digits.lstrip("+-").isdecimal()
        value = Integer(digits) if decimal else Symbol(f"{digits}_{base}")
    power = _UNIT_POWER.search(text)
    unit = "1" if _LENGTH.search(text) else None
    return MathValue(
        value=None if value is None else _canonical(value, reading),
        text=reading,
        unit_power=unit if power is None else power[1],
        degrees=_DEGREES.search(text) is not None,
    )


def _fraction_of(match: re.Match[str]) -> str:
    r"""Of a repeating decimal: 1/6 of 0.1\overline{6}."""
    whole, once, again = match[1] or "0", match[2], match[3] or match[4]
    below = (10 ** len(again) - 1) * 10 ** len(once)
    above = int(whole + once + again) - int(whole + once)
    return rf"\frac{{{above}}}{{{below}}}"


def _percents_of(match: re.Match[str]) -> str:
    """A fraction of per cent as the decimal that math-verify reads before the sign."""
    above, below = int(match[2] or match[4]), int(match[3] or match[5])
    if not below:
        return match[0]
    return rf"{int(match[1] or 0) + above / below:.9f}\%"


def _canonical(value: Value, text: str) -> Value:
    """The same for all ways to write it: a chain of inequalities in one direction, i as a number.

    math-verify takes i as a number, and symbols as complex, where the text around says so.
    """
    symbols = {
        symbol: I if symbol.name == "i" else Symbol(symbol.name, real=True)
        for symbol in value.free_symbols
        if isinstance(symbol, Symbol)
    }
    changed = {old: new for old, new in symbols.items() if old != new}
    try:
        with evaluate(False):  # x \in [0, 1] is kept as an equation, which is false by itself
            if isinstance(value, And) and all(isinstance(part, _ORDERS) for part in listed(value)):
                parts = [
                    part.reversed if isinstance(part, Gt | Ge) else part for part in listed(value)
                ]
                return And(*sorted((part.xreplace(changed) for part in parts), key=str))
            if isinstance(value, FiniteSet) and not _braced(text):
                parts = [part.xreplace(changed) for part in listed(value)]
                repeated = len(parts) != len(value)  # 5, 5 are two values
                return Tuple(*sorted(parts, key=str)) if repeated else FiniteSet(*parts)
            return value.xreplace(changed)
    except _SYMPY_ERRORS:  # such as an interval that ends with i
        return value


def listed(value: And | FiniteSet) -> list[Basic]:
    """The parts in the order in which they are written, which math-verify's own classes keep."""
    return list(value._unsorted_args)


def _braced(text: str) -> bool:
    return text.startswith(r"\{") and text.endswith(r"\}")


def _same_value(gold: MathValue, answer: MathValue) -> bool:
    """Whether an answer is equal to the reference as mathematics."""
    if gold.value is None or answer.value is None:
        return gold.value is answer.value and gold.text == answer.text != ""
    if gold.unit_power and answer.unit_power and gold.unit_power != answer.unit_power:
        return False
    if bool(_CLOSED_INFINITY.search(gold.text)) != bool(_CLOSED_INFINITY.search(answer.text)):
        return False
    if not _brackets_agree(gold, answer):
        return False
    target, value = _angles(gold, answer)
    if isinstance(target, Tuple | Interval) and isinstance(value, FiniteSet):
        value = Tuple(*listed(value))  # 3, 4 for the point (3, 4), and in its order
    values = _solution(target)
    if values is not None and isinstance(value, Tuple | FiniteSet) and _solution(value) is None:
        target = values
        value = value if isinstance(value, Tuple) else Tuple(*listed(value))
    if isinstance(target, Union | Interval):
        value = _alternatives(value)
    return bool(
        verify(
            target,
            value,
            float_rounding=_places(gold.value),
            allow_set_relation_comp=True,
            timeout_seconds=None,
        )
    )


def _angles(gold: MathValue, answer: MathValue) -> tuple[Value, Value]:
    """Both values, of an angle in degrees that in radians where the other is a part of pi."""
    assert gold.value is not None and answer.value is not None
    pair = [gold.value, answer.value]
    for number, (side, opposite) in enumerate([(gold, answer), (answer, gold)]):
        value = pair[number]
        in_radians = not opposite.degrees and pair[1 - number].has(pi)
        if side.degrees and in_radians and isinstance(value, Expr) and not value.has(pi):
            pair[number] = value * pi / 180
    return pair[0], pair[1]


def _solution(value: Value) -> Tuple | None:
    """The values of x = 1, y = 2 in the order in which they are written; None of what is else."""
    parts = listed(value) if isinstance(value, FiniteSet) else []
    equations = [part for part in parts if isinstance(part, Eq) and isinstance(part.lhs, Symbol)]
    if len(equations) < len(parts) or len({equation.lhs for equation in equations}) < max(
        len(parts), 2
    ):
        return None
    return Tuple(*(equation.rhs for equation in equations))


def _alternatives(value: Value) -> Value:
    """The union that x < -1, x > 1 means; other values as they are."""
    parts = listed(value) if isinstance(value, FiniteSet) else []
    if len(parts) < 2 or not all(
        isinstance(part, _ORDERS) and len(part.free_symbols) == 1 for part in parts
    ):
        return value
    if len({symbol for part in parts for symbol in part.free_symbols}) > 1:
        return value
    try:
        return Union(*(part.as_set() for part in parts))
    except (*_SYMPY_ERRORS, NotImplementedError):
        return value


def _brackets_agree(gold: MathValue, answer: MathValue) -> bool:
    """Whether tuples and sets have the same brackets, which an answer may leave out.

    Those of two intervals are compared as part of them.
    """
    target, brackets = _bracket(gold.text), _bracket(answer.text)
    ordered = Tuple | Interval
    if isinstance(gold.value, And) and isinstance(answer.value, FiniteSet):
        return all(isinstance(part, _ORDERS) for part in listed(answer.value))
    if isinstance(gold.value, ordered) and isinstance(answer.value, FiniteSet):
        return not brackets
    if isinstance(gold.value, SymPyFiniteSet) and isinstance(answer.value, ordered):
        return target != "}"
    if isinstance(gold.value, Tuple) and isinstance(answer.value, Tuple):
        return target == brackets or not (target and brackets)
    return True


def _bracket(text: str) -> str:
    """The bracket that closes a tuple or set; "" where it has none."""
    if _braced(text):
        return "}"
    return text[-1] if text.endswith((")", "]")) else ""


def _places(value: Value) -> int:
    """Decimal places in which an answer has to agree: more where the reference is small."""
    sizes = [abs(float(number)) for number in value.atoms(Float)]
    smallest = min((size for size in sizes if 0 < size < math.inf), default=1.0)
    return max(_PLACES, _PLACES - 1 - math.floor(math.log10(smallest)))
