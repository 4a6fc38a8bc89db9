"""``/v1/models``: the one model there is, by each of its names."""

from starlette.requests import Request
from starlette.responses import Response

from lockstep.launcher.serve.body import json_response
from lockstep.launcher.serve.state import state_of


async def list_models(request: Request) -> Response:
    """Raises ApiError 503 while the model cannot be used: clients wait for this list."""
    cards = state_of(request).open_service().cards
    return json_response({"object": "list", "data": cards})


async def show_model(request: Request) -> Response:
    """Raises ApiError 404 for another model."""
    service = state_of(request).open_service()
    return json_response(service.card_of(request.path_params["name"]))
