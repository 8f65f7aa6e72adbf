"""What every client script asks for: an enum, a nested model, and a function.

A tiny untrained model fills these in under the grammar, so no field is a free text.
"""

import enum
from typing import Literal

from pydantic import BaseModel

QUESTION = "the cat sat on the mat, what colour is it?"


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Owner(BaseModel):
    """Who owns the cat."""

    kind: Literal["child", "farmer"]
    at_home: bool


class Cat(BaseModel):
    """A cat and its owner."""

    colour: Colour
    owner: Owner


def clock(zone: Literal["UTC", "CST"]) -> str:
    """Return the time in a time zone."""
    return f"noon in {zone}"
