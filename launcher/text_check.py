"""Whether a string is text: JSON can spell one half of a pair of surrogates, which is none."""


def check_text(text: str, name: str) -> None:
    """Raises ValueError that begins with ``name`` and counts characters of ``text``."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: no valid Unicode at character {error.start}") from None
