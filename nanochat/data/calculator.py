"""The calculator of chats: exact arithmetic and letter counting, by walking over a syntax tree, without eval."""

import ast
import re
from fractions import Fraction

MAX_LENGTH = 256  # characters
MAX_NODES = 64  # numbers, texts and operations
MAX_DEPTH = 32  # nested operations
MAX_MAGNITUDE = 10**40  # of every intermediate value
SIGNIFICANT_DIGITS = 10  # of a value that is not whole; the integer part is always exact

# Only these words reach the parser: no names, exponents, escapes, f-strings or keywords.
_WORD = re.compile(
    r"""(?P<space>[ \t]+)
      | (?P<number>\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d*)? | \d+(?:\.\d*)? | \.\d+)
      | (?P<text>'[^'\\\n\r]*' | "[^"\\\n\r]*")
      | (?P<method>\.count\b)
      | (?P<operator>[-+*/%()])""",
    re.VERBOSE | re.ASCII,
)


class _Refused(Exception):
    """The expression is not a calculation, or it exceeds a limit."""


def calculate(expression: str) -> str | None:
    """The value of a calculation as text; None if the expression is not a calculation or exceeds a limit.

    An expression may use + - * / // % with Python's precedence, signs, parentheses, whole and decimal numbers with or
    without thousands commas, and 'text'.count('t'). Fractions are exact: 0.1 + 0.2 is 0.3 and 7 / 7 is 1.
    """
    try:
        source = _tidy(expression)
        value = _Walk(source).value(ast.parse(source, mode="eval").body, depth=1)
    except (_Refused, SyntaxError, ValueError, RecursionError, MemoryError, ZeroDivisionError):
        return None  # ValueError: a NUL or a lone surrogate inside a text
    return _show(value)


def _tidy(expression: str) -> str:
    """Rewrite numbers such as 1,000 and 007 in Python's spelling, and refuse every word that is not allowed."""
    if len(expression) > MAX_LENGTH:
        raise _Refused
    words, end = [], 0
    expression = expression.strip()
    while end < len(expression):
        match = _WORD.match(expression, end)
        if match is None:
            raise _Refused
        end = match.end()
        word = match.group()
        if match.lastgroup == "number":
            whole, point, decimals = word.replace(",", "").partition(".")
            word = (whole.lstrip("0") or "0") + point + decimals
            if end < len(expression) and expression[end] in ",.":
                raise _Refused  # 12,34 and 1.2.3 are not numbers, and a number has no methods
        words.append(word)
    return "".join(words)


class _Walk:
    """Evaluates the syntax tree of a source text and counts its nodes."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.nodes = 0

    def value(self, node: ast.expr, depth: int) -> Fraction:
        self.nodes += 1
        if self.nodes > MAX_NODES or depth > MAX_DEPTH:
            raise _Refused
        if isinstance(node, ast.BinOp):
            result = _binary(
                node.op, self.value(node.left, depth + 1), self.value(node.right, depth + 1)
            )
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            result = -self.value(node.operand, depth + 1)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd):
            result = self.value(node.operand, depth + 1)
        elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            # Read the digits in the source, since node.value has been rounded to a float.
            result = Fraction(ast.get_source_segment(self.source, node) or "")
        elif isinstance(node, ast.Call):
            result = Fraction(self.count(node))
        else:
            raise _Refused
        if abs(result) > MAX_MAGNITUDE:
            raise _Refused
        return result

    def count(self, node: ast.Call) -> int:
        """'text'.count('t'); both texts must be literals."""
        method = node.func
        if (
            not isinstance(method, ast.Attribute)
            or method.attr != "count"
            or len(node.args) != 1
            or node.keywords
        ):
            raise _Refused
        self.nodes += 2
        return _text(method.value).count(_text(node.args[0]))


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise _Refused


def _binary(operator: ast.operator, left: Fraction, right: Fraction) -> Fraction:
    if isinstance(operator, ast.Add):
        return left + right
    if isinstance(operator, ast.Sub):
        return left - right
    if isinstance(operator, ast.Mult):
        return left * right
    if isinstance(operator, ast.Div):
        return left / right
    if isinstance(operator, ast.FloorDiv):
        return Fraction(left // right)
    if isinstance(operator, ast.Mod):
        return left % right
    raise _Refused


def _show(value: Fraction) -> str:
    """A value without an exponent: exact if it is whole, else with ten significant digits and at least two decimals."""
    if value.denominator == 1:
        return str(value.numerator)
    sign, value = (
        ("-", -value) if value < 0 else ("", value)
    )  # so that -x rounds to the same digits as x
    digits_before_point = len(str(int(value))) if value >= 1 else 0
    decimals = max(2, SIGNIFICANT_DIGITS - digits_before_point)
    while value < 1 and value * 10**decimals < 10 ** (SIGNIFICANT_DIGITS - 1):
        decimals += 1  # zeros after the point are not significant
    digits = str(round(value * 10**decimals)).zfill(decimals + 1)
    shown = f"{digits[:-decimals]}.{digits[-decimals:]}".rstrip("0").rstrip(".")
    return sign + shown
