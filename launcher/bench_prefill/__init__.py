"""``lockstep bench prefill``: what a chunk of a prompt takes, through the whole product."""
