"""Work for a client that may go away."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run ``work`` to its end, or cancel it when the client disconnects.

    The body of the request must have been read. What ``work`` raises is raised here.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            # Its way out aborts what is left of the request.
            await asyncio.wait((task,))
    if not task.cancelled():
        task.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
