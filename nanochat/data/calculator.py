"""The calculator that a model can call in a chat: exact arithmetic and letter counting.

Expressions are evaluated by walking a syntax tree, never with eval.
"""

import ast
import re
from fractions import Fraction

MAX_LENGTH = 256  # characters
MAX_NODES = 64  # numbers, texts and operations
MAX_DEPTH = 32  # nested operations
MAX_MAGNITUDE = 10**40  # the limit for every intermediate value
SIGNIFICANT_DIGITS = 10  # for values that are not integers; an integer part is always exact

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
    """Raised if an expression is not a calculation or exceeds a limit."""


def calculate(expression: str) -> str | None:
    """Evaluate an arithmetic expression, and return its value as text.

    Returns None if the expression is not a calculation, divides by zero or exceeds a limit.

    An expression may use + - * / // % with Python's precedence, signs, parentheses, whole and
    decimal numbers with or without thousands commas, and 'text'.count('t'). Intermediate values are
    exact, so 0.1 + 0.2 is 0.3 and 1 / 3 * 3 is 1.
    """
    try:
        source = _tidy(expression)
        tree = ast.parse(source, mode="eval")
        value = _Walk(source).value(tree.body, depth=1)
    except (_Refused, SyntaxError, ValueError, RecursionError, MemoryError, ZeroDivisionError):
        return None  # ValueError: a NUL or a lone surrogate inside a text
    return _show(value)


def _tidy(expression: str) -> str:
    """Return an expression with numbers such as 1,000 and 007 spelled as in Python.

    Raises _Refused if the expression is too long or contains anything not allowed.
    """
    if len(expression) > MAX_LENGTH:
        raise _Refused
    expression = expression.strip()
    words = []
    end = 0
    while end < len(expression):
        match = _WORD.match(expression, end)
        if match is None:
            raise _Refused
        word = match.group()
        end = match.end()
        if match.lastgroup == "number":
            if expression[end : end + 1] in (",", "."):
                raise _Refused  # 12,34 and 1.2.3 are not numbers, and a number has no methods
            integer, point, decimals = word.replace(",", "").partition(".")
            word = (integer.lstrip("0") or "0") + point + decimals
        words.append(word)
    return "".join(words)


class _Walk:
    """Evaluates the syntax tree of an expression, within the limits on its size."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.nodes = 0

    def value(self, node: ast.expr, depth: int) -> Fraction:
        """Return the value of a node at nesting depth `depth`.

        Raises _Refused if the node is not part of a calculation or exceeds a limit.
        """
        self.nodes += 1
        if self.nodes > MAX_NODES or depth > MAX_DEPTH:
            raise _Refused
        result = self._value(node, depth)
        if abs(result) > MAX_MAGNITUDE:
            raise _Refused
        return result

    def _value(self, node: ast.expr, depth: int) -> Fraction:
        if isinstance(node, ast.BinOp):
            left = self.value(node.left, depth + 1)
            right = self.value(node.right, depth + 1)
            return _binary(node.op, left, right)
        if isinstance(node, ast.UnaryOp):
            if isinstance(node.op, ast.USub):
                return -self.value(node.operand, depth + 1)
            if isinstance(node.op, ast.UAdd):
                return self.value(node.operand, depth + 1)
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            # Read the digits in the source, since node.value has been rounded to a float.
            return Fraction(ast.get_source_segment(self.source, node) or "")
        if isinstance(node, ast.Call):
            return Fraction(self.count(node))
        raise _Refused

    def count(self, node: ast.Call) -> int:
        """Return the value of 'text'.count('t'), or raise _Refused for any other call."""
        method = node.func
        if not isinstance(method, ast.Attribute) or method.attr != "count":
            raise _Refused
        if len(node.args) != 1 or node.keywords:
            raise _Refused
        self.nodes += 2
        return _text(method.value).count(_text(node.args[0]))


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise _Refused


def _binary(
    operator: ast.operator,
    left: Fraction,
    right: Fraction,
) -> Fraction:
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
    """Return a value as text, without an exponent.

    An integer is exact. Any other value is rounded to ten significant digits, but to no fewer than
    two decimals, without trailing zeros.
    """
    if value.denominator == 1:
        return str(value.numerator)
    sign = "-" if value < 0 else ""
    value = abs(value)  # so that -x rounds to the same digits as x
    integer_digits = len(str(int(value))) if value >= 1 else 0
    decimals = max(2, SIGNIFICANT_DIGITS - integer_digits)
    smallest = 10 ** (SIGNIFICANT_DIGITS - 1)
    while value < 1 and value * 10**decimals < smallest:
        decimals += 1  # zeros after the point are not significant
    digits = str(round(value * 10**decimals)).zfill(decimals + 1)
    number = f"{digits[:-decimals]}.{digits[-decimals:]}"
    return sign + number.rstrip("0").rstrip(".")
