"""Numbers of things in messages: one of them is not several."""


def several(count: int, one: str, many: str | None = None) -> str:
    """``1 iteration``, ``2 iterations``; ``many`` where it is not ``one`` with an s."""
    return f"{count} {one if count == 1 else many or one + 's'}"
