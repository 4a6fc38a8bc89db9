"""Whole numbers as people write them on a command line: 8192, 8k (8000) or 8K (8192)."""

import argparse
import re
from fractions import Fraction

_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_WITH_UNIT = re.compile(r"(\d+|\d+\.\d+(?=[kmgt]))([kmgtKMGT])")


def whole_number(text: str) -> int:
    """The number; only a decimal unit takes a fraction, as in 25.6k.

    Raises:
        argparse.ArgumentTypeError: it is none; says what to write.
    """
    found = _WITH_UNIT.fullmatch(text)
    try:
        number = Fraction(found[1]) * _UNITS[found[2]] if found else Fraction(int(text))
    except ValueError:
        raise argparse.ArgumentTypeError(_complaint(text)) from None
    if number.denominator != 1:
        raise argparse.ArgumentTypeError(_complaint(text))
    return number.numerator


def _complaint(text: str) -> str:
    if text.lower() == "auto":
        return f"{text!r} is what leaving the flag out means"
    return f"expected an int such as 8192, 8k (8000) or 8K (8192), got {text!r}"
