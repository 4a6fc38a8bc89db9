"""How much work a grammar may make: a mask is made while all requests beside it wait."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

# Ways to read the text that are open at one place of it. In a grammar that can read a text in
# several ways the work at a place grows faster than their square.
ITEMS_AT_A_PLACE = 500
# Where there is one way only they are what may come next: 4 for each optional property.
CLEAR_ITEMS_AT_A_PLACE = 9_000
# Of all the places that the tokens of one mask lead to.
ITEMS_A_MASK = 10_000
# The work at one place also grows with the symbols of a grammar that can read a text in several
# ways, which are one that a user wrote and a schema with alternatives.
GRAMMAR_SYMBOLS = 200
ALTERNATIVES_SYMBOLS = 2_500
CLEAR_SYMBOLS = 500_000
# Of the library's units of work on regular expressions, some 14,000 a millisecond.
REGEX_WORK_A_MASK = 200_000
_ALTERNATIVES = ('"anyOf"', '"oneOf"', '"allOf"')


def parser_limits(form: str, lark: str) -> "LLParserLimits":
    """The limits of a grammar.

    Args:
        form: the field of ``StructuredOutputs`` that it is of.
        lark: it as the library gets it.
    """
    from llguidance import LLParserLimits

    items, symbols = ITEMS_AT_A_PLACE, CLEAR_SYMBOLS
    if form == "grammar":
        symbols = GRAMMAR_SYMBOLS
    elif form == "json" and any(word in lark for word in _ALTERNATIVES):
        symbols = ALTERNATIVES_SYMBOLS
    else:
        items = CLEAR_ITEMS_AT_A_PLACE
    return LLParserLimits(
        max_items_in_row=items,
        step_max_items=ITEMS_A_MASK,
        step_lexer_fuel=REGEX_WORK_A_MASK,
        max_grammar_size=symbols,
        verbose_errors=False,
    )
