"""``lockstep bench serve``: load on a server that speaks OpenAI's API, and what came of it."""
